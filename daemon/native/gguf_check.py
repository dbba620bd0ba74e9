"""Looks at a model before llama.cpp does: either everything about it is in order, or one message says what is not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from daemon.native.gguf_facts import ExpertTensor, LayerFacts, ModelFacts, collect
from daemon.native.gguf_fingerprint import fingerprint, vocabulary
from daemon.native.gguf_metadata import Metadata
from daemon.native.gguf_parts import read_parts
from daemon.native.gguf_reader import Head
from daemon.native.gguf_rules import check_sizes, check_tensors
from daemon.native.gguf_vocabulary import check_vocabulary

__all__ = ["ExpertTensor", "GgufFile", "LayerFacts", "ModelFacts", "Part", "check", "memory_warning", "shortage"]

_RESERVE = 1 << 30  # KV cache, compute buffers and everything else on the machine


@dataclass(frozen=True)
class Part:
    """One file of a model; size in bytes."""

    path: Path
    size: int


@dataclass(frozen=True)
class GgufFile:
    """A model that can be handed to llama.cpp: its first part's path, all parts, what is in it, and which one it is."""

    path: Path
    version: int
    parts: tuple[Part, ...]
    facts: ModelFacts
    fingerprint: str
    vocabulary: str
    """The same where token ids mean the same."""

    @property
    def architecture(self) -> str:
        """llama.cpp's name for it; whether llama.cpp knows it shows at load."""
        return self.facts.architecture

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(part.size for part in self.parts)


def check(path: Path) -> GgufFile:
    """Read and check the head of every part of a model; tensor data is only sampled, for the fingerprint.

    Raises:
        ModelUnusable: the file is missing, cut off, hostile, no model, or would abort llama.cpp.
    """
    heads = read_parts(path)
    return GgufFile(
        path=path,
        version=heads[0].version,
        parts=tuple(Part(head.path, head.size) for head in heads),
        facts=_facts(heads),
        fingerprint=fingerprint(heads),
        vocabulary=vocabulary(heads[0]),
    )


def shortage(facts: ModelFacts, available_bytes: int) -> int:
    """Bytes that a model lacks to fit `available_bytes` of memory; negative where some are left."""
    return facts.size + _RESERVE - available_bytes


def memory_warning(facts: ModelFacts, available_bytes: int) -> str | None:
    """What to expect of a model that does not fit `available_bytes` of memory; None where it fits."""
    if shortage(facts, available_bytes) <= 0:
        return None
    usable = max(available_bytes - _RESERVE, 0)
    start = (
        f"The model has {_bytes(facts.size)} and {_bytes(available_bytes)} of memory are available, {_bytes(_RESERVE)} "
        "of them needed for other things. It is served from the mapped file; what does not fit is read from disk again"
    )
    if usable <= facts.other_bytes or not facts.is_moe:
        lack = max(min(facts.size - usable, facts.active_bytes), 0)
        return f"{start}: about {_bytes(lack)} for every token. Expect seconds per token even on a fast disk."
    share = min((usable - facts.other_bytes) / facts.expert_bytes, 1.0)
    routed = facts.active_bytes - facts.other_bytes
    return (
        f"{start}. Memory holds {share:.0%} of the experts; each token reads {_bytes(routed)} of experts, about "
        f"{_bytes(round(routed * (1 - share)))} of it from disk if all experts are used alike, less where some are "
        "favoured. Expect it to be slow until the experts in use are in memory."
    )


def _facts(heads: tuple[Head, ...]) -> ModelFacts:
    first = heads[0]
    tensors = tuple(tensor for head in heads for tensor in head.tensors)
    if not tensors:
        raise first.fail("the file has no tensors, only metadata")
    metadata = Metadata(first)
    sizes = check_sizes(metadata)
    n_vocab = check_vocabulary(metadata)
    check_tensors(metadata, tensors, sizes, n_vocab)
    return collect(metadata, tensors, sizes, n_vocab)


def _bytes(size: int) -> str:
    if size < 1 << 30:
        return f"{size / (1 << 20):.0f} MiB"
    return f"{size / (1 << 30):.1f} GiB"
