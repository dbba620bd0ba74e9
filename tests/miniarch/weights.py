"""How large the random weights of a tensor are, by its name, so that activations stay about as large as their input.

Most tensors are matrices: normal numbers whose spread is a gain over the root of the row length. The others, which are
added, multiplied or exponentiated, are uniform numbers around a centre. The first pattern that matches decides.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

UNIFORM: tuple[tuple[str, float, float], ...] = (
    # pattern, centre, half width
    ("*exp_probs_b*", 0.0, 0.05),
    ("*ffn_gate_inp.scale", 0.0625, 0.02),  # gemma4 multiplies the router's input by the root of its width
    ("*scale*", 1.0, 0.3),
    ("rope_f*", 1.0, 0.0),
    ("*.rope_f*", 1.0, 0.0),
    ("*norm*.bias", 0.0, 0.1),
    ("*norm*", 1.0, 0.2),
    ("*ssm_a", -0.5, 0.4),  # a decay: below zero
    ("*ssm_d", 1.0, 0.2),
    ("*ssm_dt.bias", 0.0, 1.0),
    ("*.bias", 0.0, 0.2),
    ("*attn_sinks*", 0.0, 0.5),
    ("*_base*", 0.0, 0.3),
    ("*_ape*", 0.0, 0.3),
)

GAINS: tuple[tuple[str, float], ...] = (
    ("output.weight", 3.0),
    ("*ffn_gate_inp.weight", 2.0),
    ("*attn_output*.weight", 0.5),
    ("*ffn_down*", 0.5),
    ("*ssm_out.weight", 0.5),
    ("*shortconv.out_proj.weight", 0.5),
    ("*hc_*_fn*", 0.5),
)


def spread(name: str, dims: tuple[int, ...], embedding: float) -> float | None:
    """Standard deviation of a matrix; None: the tensor holds uniform numbers."""
    if name == "token_embd.weight":
        return embedding
    if _uniform(name) is not None:
        return None
    gain = next((gain for pattern, gain in GAINS if fnmatchcase(name, pattern)), 1.0)
    return gain / math.sqrt(dims[0])


def uniform(name: str, count: int, random: np.random.Generator) -> Floats:
    """Numbers of a tensor that is no matrix."""
    found = _uniform(name)
    assert found is not None
    centre, half = found
    return random.uniform(centre - half, centre + half, count).astype(np.float32)


def _uniform(name: str) -> tuple[float, float] | None:
    return next(((centre, half) for pattern, centre, half in UNIFORM if fnmatchcase(name, pattern)), None)
