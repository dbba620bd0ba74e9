"""A context that a worker has open: its steps, its cache, what it counts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from daemon.errors import HotsetError
from daemon.native.context import DECODED, Context
from daemon.native.hotset import Residency
from hotset_tools.bench.following import Following

Totals = npt.NDArray[np.int64]


@dataclass
class Opened:
    """A context; `staged` is layer -> slot -> expert whose bytes it holds."""

    context: Context
    stack: ExitStack
    residency: Residency | None = None
    staged: list[dict[int, int]] = field(default_factory=list)
    n_sequences: int = 1
    following: Following | None = None

    def moving(self) -> AbstractContextManager[None]:
        """Experts follow the traffic within, where they do at all."""
        return self.following.moving() if self.following else nullcontext()

    def step(self, tokens: Sequence[int], position: int) -> None:
        """One token for each sequence, and its logits."""
        if self.following is None:
            self._decode(tokens, position)
            return
        self.following.prepare(len(tokens))
        began = time.perf_counter()
        self._decode(tokens, position)
        self.following.decoded(len(tokens), time.perf_counter() - began)

    @property
    def slots(self) -> Residency:
        """What the request needs slots for."""
        assert self.residency is not None, "the request needs a context with slots"
        return self.residency

    def clear(self) -> None:
        """Forget all tokens."""
        for sequence in range(self.n_sequences):
            self.context.remove(sequence)

    def prompt(self, tokens: Sequence[int]) -> None:
        """A prompt in sequence 0, in pieces of the micro-batch, and the logits of its last token."""
        width = self.context.n_ubatch
        for start in range(0, len(tokens), width):
            part = tokens[start : start + width]
            last = len(tokens) - 1 - start
            code = self.context.decode((token, start + i, 0, i == last) for i, token in enumerate(part))
            if code != DECODED:
                raise HotsetError(f"llama_decode returned {code}")
        self.context.logits((len(tokens) - 1) % width)

    def counts(self) -> Totals:
        """How often each expert was selected so far, [layers, n_expert]."""
        return np.stack(self.slots.all_counts()).astype(np.int64)

    def hits(self) -> Totals:
        """Hits and misses of all layers so far, each [layers]; none without slots."""
        if self.residency is None:
            return np.zeros((2, 0), np.int64)
        layers = self.residency.layers()
        return np.array([[layer.hits for layer in layers], [layer.misses for layer in layers]], np.int64)

    def uploads(self) -> Totals:
        """Experts uploaded so far, and their bytes."""
        if self.residency is None:
            return np.zeros(2, np.int64)
        statistics = self.residency.statistics()
        return np.array([statistics.staged, statistics.staged_bytes], np.int64)

    def _decode(self, tokens: Sequence[int], position: int) -> None:
        code = self.context.decode((token, position, sequence, True) for sequence, token in enumerate(tokens))
        if code != DECODED:
            raise HotsetError(f"llama_decode returned {code}")
        self.context.logits(0)
