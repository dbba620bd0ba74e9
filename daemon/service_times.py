"""How long answers take, as measured, and what follows from it for those that wait. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from daemon.messages import Done, Submit

_KEPT = 0.8
"""What is left of the weight of an answer once the next one is counted."""
_FIRST_GUESS = 256
"""Tokens of an answer, before any has been seen."""


class ServiceTimes:
    """Means over recent answers, each with the weight of its tokens: a few short ones change little."""

    def __init__(self) -> None:
        self._prompts, self._answers, self._lengths = _Mean(), _Mean(), _Mean()

    def learn(self, done: Done) -> None:
        """An answer is over; one that was cancelled says nothing: how much of its prompt was read is not known."""
        if done.finish_reason == "cancelled":
            return
        self._prompts.add(done.prompt_ms / 1000, done.n_prompt - done.n_cached)
        self._answers.add(done.predicted_ms / 1000, done.n_predicted)
        self._lengths.add(done.n_predicted, 1)

    def tokens(self, max_tokens: int) -> int:
        """How long an answer is likely to become that may have `max_tokens`."""
        mean = self._lengths.value
        return max(1, min(max_tokens, _FIRST_GUESS if mean is None else round(mean)))

    def until_start(self, running: Sequence[tuple[Submit, float]], waiting: Sequence[Submit], places: int) -> float:
        """Seconds until the last of `waiting` starts; of those that run it is told how many seconds they do already.

        Before anything is known, what runs is taken to be half done, and what waits to take as long as the longest.
        """
        longest = max((age for _, age in running), default=0.0)
        left = [age if (known := self._seconds(submit)) is None else max(0.0, known - age) for submit, age in running]
        lengths = [2 * longest if (known := self._seconds(submit)) is None else known for submit in waiting]
        return seconds_until_start(left, lengths, places)

    def _seconds(self, submit: Submit) -> float | None:
        """How long it is likely to take from its start."""
        if self._answers.value is None:
            return None
        prompt = len(submit.prompt) * (self._prompts.value or 0.0)
        return prompt + self.tokens(submit.max_tokens) * self._answers.value


class _Mean:
    """Sum of values by sum of counts, both forgetting."""

    def __init__(self) -> None:
        self._sum = self._count = 0.0

    def add(self, total: float, count: int) -> None:
        if count > 0:
            self._sum = _KEPT * self._sum + total
            self._count = _KEPT * self._count + count

    @property
    def value(self) -> float | None:
        return self._sum / self._count if self._count else None


def seconds_until_start(running: Iterable[float], waiting: Iterable[float], places: int) -> float:
    """When the last of `waiting` starts, if each starts as soon as fewer than `places` (at least 1) run.

    `running` are the seconds that those that run have left, `waiting` those that each takes, in their order.
    """
    ends, now = list(running), 0.0
    heapq.heapify(ends)
    for seconds in waiting:
        while len(ends) >= places:
            now = max(now, heapq.heappop(ends))
        heapq.heappush(ends, now + seconds)
    return now
