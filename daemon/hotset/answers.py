"""Tokens of several answers as they were decoded, sorted apart: what a trace of live routing is made of. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from daemon.hotset.files import ModelId
from daemon.hotset.trace import MAX_SELECTIONS, Header, Segment, Trace, TraceLayer, id_type

MAX_ANSWERS = 8192
"""The first line of a trace has room for so many."""


class Answers:
    """Grows by parts of a recording; at most `most` tokens, and never more than a trace may hold.

    Each token has the `top_k` experts that each of `layers` chose.
    """

    def __init__(self, layers: Sequence[TraceLayer], top_k: int, most: int) -> None:
        self._layers, self._top_k = list(layers), top_k
        self._type = id_type(layer.experts for layer in layers)
        self._left = min(most, MAX_SELECTIONS // (len(self._layers) * top_k))
        self._parts: dict[int, list[npt.NDArray[np.uint8 | np.uint16]]] = {}
        self.n_tokens = 0
        self.full = ""
        """Why it takes no more; "" while it does."""

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, answers: Sequence[int], ids: bytes) -> None:
        """Tokens of these answers, in the order in which they were decoded: ids [tokens, layers, top_k].

        What exceeds the limits is dropped, and all that comes after it.

        Raises:
            ValueError: the ids are not as many as they should be.
        """
        shape = len(answers), len(self._layers), self._top_k
        rows = np.sort(np.frombuffer(ids, self._type).reshape(shape), axis=-1)
        fitting = self._fitting(answers)
        whose = np.array(answers[:fitting], np.int64)
        for answer in dict.fromkeys(answers[:fitting]):
            self._parts.setdefault(answer, []).append(rows[:fitting][whose == answer])
        self.n_tokens += fitting
        self._left -= fitting

    def _fitting(self, answers: Sequence[int]) -> int:
        """How many of the first tokens there is room for; where nothing comes after them, it is full."""
        if self.full:
            return 0
        known = set(self._parts)
        for at, answer in enumerate(answers[: self._left]):
            known.add(answer)
            if len(known) > MAX_ANSWERS:
                self.full = f"a trace holds no more than {MAX_ANSWERS:,} answers"
                return at
        if len(answers) >= self._left:
            self.full = f"it has the {self.n_tokens + self._left:,} tokens that it may have"
        return min(len(answers), self._left)

    def trace(self, model: ModelId, method: str, begun: str) -> Trace:
        """All of it, one answer after the other in the order in which their first tokens came.

        `begun` is when the recording began: it tells answers of several recordings apart.

        Raises:
            ValueError: there is no token.
        """
        if not self.n_tokens:
            raise ValueError("there is no token")
        segments = [
            Segment(name=f"answer-{number} of {begun}", tokens=sum(map(len, parts)))
            for number, parts in enumerate(self._parts.values(), 1)
        ]
        header = Header(model=model, method=method, top_k=self._top_k, layers=self._layers, segments=segments)
        ids = np.concatenate([part for parts in self._parts.values() for part in parts])
        return Trace(header, ids.astype(np.uint16, copy=False))
