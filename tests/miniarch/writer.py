"""Writes mini models: metadata from the table, tensors from llama.cpp, random weights from a seed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.miniarch import blocks, weights
from tests.miniarch.shapes import Tensor, shapes
from tests.miniarch.skeleton import header
from tests.miniarch.table import Mini


def write_minis(
    directory: Path, minis: Mapping[str, Mini], library: Path, *, seed: int = 1, expert_seed: int | None = None
) -> dict[str, Path]:
    """Every model as NAME.gguf; the same seeds give the same bytes. `expert_seed` gives it other experts only.

    Raises:
        RuntimeError: llama.cpp refuses the metadata of a model.
    """
    paths = {}
    for name, tensors in shapes(minis, library).items():
        paths[name] = directory / f"{name}.gguf"
        write(paths[name], minis[name], tensors, seed, expert_seed)
    return paths


def write(path: Path, mini: Mini, tensors: list[Tensor], seed: int, expert_seed: int | None = None) -> None:
    """One model with the tensors given."""
    import gguf  # slow

    writer = header(path, mini)
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.kind]
        its_seed = expert_seed if expert_seed is not None and tensor.holds_experts else seed
        data = _data(tensor, mini, np.random.default_rng([its_seed, *tensor.name.encode()]))
        row = blocks.size(tensor.kind, tensor.dims[0])
        writer.add_tensor(tensor.name, data.reshape(*reversed(tensor.dims[1:]), row), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _data(tensor: Tensor, mini: Mini, random: np.random.Generator) -> Any:
    if tensor.kind == "I32":
        return _routes(tensor, mini, random)
    spread = weights.spread(tensor.name, tensor.dims, mini.embedding)
    if spread is None:
        return blocks.plain(tensor.kind, weights.uniform(tensor.name, tensor.n_elements, random))
    return blocks.draw(tensor.kind, tensor.n_elements, spread, random)


def _routes(tensor: Tensor, mini: Mini, random: np.random.Generator) -> Any:
    """For each token the experts that it always goes to, each of them once."""
    n_used, n_tokens = tensor.dims
    order = random.random((n_tokens, mini.n_expert)).argsort(axis=1)
    return np.ascontiguousarray(order[:, :n_used].astype(np.int32)).view(np.uint8)
