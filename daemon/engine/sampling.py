"""From sampling parameters to a chain of llama.cpp samplers; pure.

The order is llama.cpp's own (common/sampling): bias, penalties, DRY, top-n-sigma, top-k, typical, top-p, min-p, XTC,
temperature, then the draw. A stage that would change nothing is left out: it costs a pass over the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from daemon.messages import Sampling

StageName = Literal[
    "logit_bias", "penalties", "dry", "top_n_sigma", "top_k", "typical", "top_p", "min_p", "xtc", "temp", "temp_ext",
    "greedy", "dist", "mirostat", "mirostat_v2",
]  # fmt: skip

NEVER = -1e30
"""A bias that no logit can outweigh, finite so that it survives JSON."""

_MIROSTAT_CANDIDATES = 100  # m of Basu et al. 2020, the value of the paper


@dataclass(frozen=True, slots=True)
class Stage:
    """One sampler of the chain, with the arguments of its constructor (vocabulary and its size are added later)."""

    name: StageName
    args: tuple[object, ...] = ()


def chain(sampling: Sampling, seed: int, suppressed: tuple[int, ...] = (), n_ctx: int = 0) -> list[Stage]:
    """The stages for `sampling`, in order, ending in exactly one that chooses.

    `seed` is used where `sampling` has none; `suppressed` are token ids that may never be chosen; `n_ctx` is what a
    look-back of -1 stands for.
    """
    biases = (*sampling.logit_bias, *((token, NEVER) for token in suppressed))
    stages = [Stage("logit_bias", (biases,))] if biases else []
    if sampling.mirostat:
        return [*stages, *_mirostat(sampling, seed)]
    stages += _penalties(sampling, n_ctx)
    if sampling.temperature <= 0:
        return [*stages, Stage("greedy")]
    return [*stages, *_filters(sampling, seed), *_temperature(sampling), Stage("dist", (seed,))]


def history_needed(sampling: Sampling, n_ctx: int) -> int:
    """How many of the prompt's last tokens the chain must have seen before it chooses the first new one."""
    needed = 0
    if _has_penalties(sampling):
        needed = _look_back(sampling.repeat_last_n, n_ctx)
    if sampling.dry_multiplier > 0:
        needed = max(needed, _look_back(sampling.dry_penalty_last_n, n_ctx))
    return needed


def _look_back(n: int, n_ctx: int) -> int:
    return n_ctx if n < 0 else n


def _has_penalties(s: Sampling) -> bool:
    changed = s.repeat_penalty != 1 or s.frequency_penalty != 0 or s.presence_penalty != 0
    return changed and s.repeat_last_n != 0


def _penalties(s: Sampling, n_ctx: int) -> list[Stage]:
    stages = []
    if _has_penalties(s):
        last_n = _look_back(s.repeat_last_n, n_ctx)
        stages.append(Stage("penalties", (last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty)))
    if s.dry_multiplier > 0 and s.dry_penalty_last_n != 0:
        last_n = _look_back(s.dry_penalty_last_n, n_ctx)
        args = (s.dry_multiplier, s.dry_base, s.dry_allowed_length, last_n, s.dry_sequence_breakers)
        stages.append(Stage("dry", args))
    return stages


def _filters(s: Sampling, seed: int) -> list[Stage]:
    stages = []
    if s.top_n_sigma > 0:
        stages.append(Stage("top_n_sigma", (s.top_n_sigma,)))
    if s.top_k > 0:
        stages.append(Stage("top_k", (s.top_k,)))
    if s.typical_p < 1:
        stages.append(Stage("typical", (s.typical_p, s.min_keep)))
    if s.top_p < 1:
        stages.append(Stage("top_p", (s.top_p, s.min_keep)))
    if s.min_p > 0:
        stages.append(Stage("min_p", (s.min_p, s.min_keep)))
    if s.xtc_probability > 0:
        stages.append(Stage("xtc", (s.xtc_probability, s.xtc_threshold, s.min_keep, seed)))
    return stages


def _temperature(s: Sampling) -> list[Stage]:
    if s.dynatemp_range > 0:
        return [Stage("temp_ext", (s.temperature, s.dynatemp_range, s.dynatemp_exponent))]
    return [Stage("temp", (s.temperature,))] if s.temperature != 1 else []


def _mirostat(s: Sampling, seed: int) -> list[Stage]:
    temperature = Stage("temp", (s.temperature,))
    if s.mirostat == 1:
        return [temperature, Stage("mirostat", (seed, s.mirostat_tau, s.mirostat_eta, _MIROSTAT_CANDIDATES))]
    return [temperature, Stage("mirostat_v2", (seed, s.mirostat_tau, s.mirostat_eta))]
