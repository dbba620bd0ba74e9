"""The tokens that benchmarks feed: walks of a generated model's kind, or random ids for any other model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from daemon.errors import HotsetError
from hotset_tools.bench.moe_models import routing_of
from hotset_tools.routing import Part, stream

_PIECES = 1000


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


class TopicWalks(Walks):
    """Streams that switch topics: those to measure visit the second half of a model's topics, others the first half.

    A visit lasts `n_visit` tokens and half as many more or less. Every (number // 1000, sequence) is one stream, which
    `steps` goes through piece by piece with number % 1000.

    Raises:
        HotsetError: the model was not generated with topics.
    """

    def __init__(self, model: Path, n_visit: int, seed: int) -> None:
        super().__init__(model, 0, seed)
        if self.routing is None or self.routing.n_topics < 4:
            raise HotsetError("the model's routing has no topics; `hotset bench make-model --routing topics` makes one")
        self._topics = self.routing = replace(self.routing, dwell=n_visit)
        half = self.routing.n_topics // 2
        self.learned, self.visited = tuple(range(half)), tuple(range(half, self.routing.n_topics))

    def tokens(self, n_tokens: int, number: int, part: Part = "measure") -> list[int]:
        """One stream."""
        among = self.visited if part == "measure" else self.learned
        return stream(self._topics, n_tokens, number + 100_003 * self._seed, part, among)

    def steps(self, n_steps: int, n_sequences: int, number: int) -> list[list[int]]:
        """Token ids [n_steps][n_sequences] of one piece; the pieces of a stream are to be asked for in equal sizes."""
        walk, piece = divmod(number, _PIECES)
        start = piece * n_steps
        streams = [self.tokens(start + n_steps, walk * 64 + sequence)[start:] for sequence in range(n_sequences)]
        return [list(step) for step in zip(*streams, strict=True)]

    def prompt(self, n_tokens: int, topic: int, number: int) -> list[list[int]]:
        """Token ids [n_tokens][1] of one topic, from one place on."""
        routing = replace(self._topics, dwell=2 * n_tokens + 2)
        tokens = stream(routing, n_tokens, number + 100_003 * self._seed, "measure", (topic,))
        return [[token] for token in tokens]

    def switches(self, steps: Sequence[Sequence[int]]) -> int:
        """How often a sequence of `steps` comes to another topic."""
        topics = np.array(steps) * self._topics.n_topics // self._topics.n_ids
        return int((np.diff(topics, axis=0) != 0).sum())
