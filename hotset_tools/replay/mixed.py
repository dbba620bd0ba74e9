"""Several sequences at once: a trace's segments dealt out to streams, and other meanings that heat could have. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from daemon.hotset.policy import Heat, Settings, Values
from hotset_tools.replay.clairvoyant import Ids
from hotset_tools.replay.ours import Source, Step, Sum


def deal(ids: Ids, segments: Sequence[slice], widths: Sequence[int]) -> Iterator[Step]:
    """Steps in which stream i decodes `widths`[i] tokens; a stream that ends a segment takes the next one.

    First segments are cut to different lengths, so that not all streams change their topic at once. It ends when the
    first stream has nothing left, so that all steps are mixed.
    """
    waiting = deque(enumerate(segments))
    if len(waiting) < len(widths):
        raise ValueError(f"{len(waiting)} segments are not enough for {len(widths)} streams")
    running: list[tuple[int, int, int]] = []  # text, next token, end
    for number in range(len(widths)):
        text, segment = waiting.popleft()
        length = segment.stop - segment.start
        running.append((text, segment.start, segment.start + max(1, length * (number + 1) // len(widths))))
    while True:
        tokens: list[int] = []
        texts: list[int] = []
        for number, (text, at, end) in enumerate(running):
            upto = min(at + widths[number], end)
            tokens += range(at, upto)
            texts += [text] * (upto - at)
            running[number] = (text, upto, end)
        yield Step(ids[tokens], tuple(texts))
        for number, (_, at, end) in enumerate(running):
            if at == end:
                if not waiting:
                    return
                text, segment = waiting.popleft()
                running[number] = (text, segment.start, segment.stop)


class ByToken(Heat):
    """One heat that every token ages, so that many sequences forget faster than one."""

    def take(self, step: Step) -> None:
        """A step was computed."""
        self.observe(step.ids)


class Own:
    """Each sequence has its own heat, which ends with it; they are added up as they are, or as shares of the whole."""

    def __init__(self, n_expert: Sequence[int], settings: Settings, *, shares: bool) -> None:
        self._make = partial(Heat, n_expert, settings)
        self._shares = shares
        self._heats: dict[int, Heat] = {}
        self._decay = 0.5 ** (1 / settings.half_life)
        self.values: Values = self._make().values

    def take(self, step: Step) -> None:
        """A step was computed."""
        texts = np.array(step.texts)
        self._heats = {text: self._heats.get(text) or self._make() for text in set(step.texts)}
        for text, heat in self._heats.items():
            heat.observe(step.ids[texts == text])
        # A share is worth what a long sequence has of heat, so that the margin means the same.
        whole = step.ids.shape[2] / (1 - self._decay)
        self.values = np.sum([self._weighted(heat.values, whole) for heat in self._heats.values()], axis=0)

    def _weighted(self, values: Values, whole: float) -> Values:
        if not self._shares:
            return values
        return np.where(values < 0, -1.0, values * (whole / np.maximum(values, 0).sum(axis=1, keepdims=True)))


def meanings(n_expert: Sequence[int], settings: Settings) -> Mapping[str, Callable[[], Source]]:
    """What heat could mean; `hotset` is what the daemon uses."""
    return {
        "hotset": lambda: Sum(n_expert, settings),
        "sum, aged by every token": lambda: ByToken(n_expert, settings),
        "own heat, added": lambda: Own(n_expert, settings, shares=False),
        "own heat, shares": lambda: Own(n_expert, settings, shares=True),
    }
