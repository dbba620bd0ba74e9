"""The tokens that benchmarks feed: walks of a generated model's kind, or random ids for any other model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hotset_tools.bench.moe_models import routing_of
from hotset_tools.routing import Part, stream


class Walks:
    """Token streams for one model; every (part, number) is one stream of its own."""

    def __init__(self, model: Path, n_vocab: int, seed: int) -> None:
        self.routing = routing_of(model)
        self._n_vocab, self._seed = n_vocab, seed

    @property
    def kind(self) -> str:
        """For the head of a report."""
        return self.routing.kind if self.routing is not None else "random ids"

    def tokens(self, n_tokens: int, number: int, part: Part = "measure") -> list[int]:
        """One stream."""
        number += 100_003 * self._seed
        if self.routing is not None:
            return stream(self.routing, n_tokens, number, part)
        random = np.random.default_rng([number, part == "measure"])
        return [int(token) for token in random.integers(self._n_vocab, size=n_tokens)]

    def steps(self, n_steps: int, n_sequences: int, number: int) -> list[list[int]]:
        """Token ids [n_steps][n_sequences]; every sequence is at another place of the walk."""
        streams = [self.tokens(n_steps, number * 64 + sequence) for sequence in range(n_sequences)]
        return [list(step) for step in zip(*streams, strict=True)]
