"""Whether residency pays at all: it is open, closed, or waits for a measurement. Pure.

Only tokens per second count. What is compared is a step with residency and one without, both measured or both predicted
from measured prices. It closes below 0.98 of the speed without and opens above 1.03; in between it stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

CLOSE_BELOW, OPEN_ABOVE = 0.98, 1.03
"""Speed with residency, as a part of that without."""
CLOSE_TOKENS, OPEN_TOKENS = 512, 512
"""So many tokens in a row must say so."""
MOST_TOKENS = 65_536
"""Opening takes twice as many after every closing, up to this."""


class State(StrEnum):
    """Of the gate; the names are those of the status."""

    WAITING = "waiting"
    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True)
class Review:
    """Seconds of a step of `width` sequences without and with residency, at a hit rate over all layers that have slots.

    `tokens` were decoded since the review before; `decisive` ones were made of enough steps to be believed at once.
    """

    off: float
    on: float
    hit_rate: float
    width: int = 1
    tokens: int = 0
    measured: bool = False
    decisive: bool = False

    def __post_init__(self) -> None:
        if not (self.off > 0 and self.on > 0 and 0 <= self.hit_rate <= 1 and self.width >= 1 and self.tokens >= 0):
            raise ValueError(f"that is no review: {self}")

    @property
    def speed(self) -> float:
        """With residency, as a part of without."""
        return self.off / self.on


@dataclass(frozen=True)
class Verdict:
    """What status says: `on` and `off` in tokens per second."""

    state: State
    reason: str
    on: float | None = None
    off: float | None = None


class Gate:
    """Takes reviews, one after the other."""

    def __init__(self) -> None:
        self.verdict = Verdict(State.WAITING, "waiting: not measured yet; it is measured when the engine is idle")
        self._against = 0
        self._n_closings = 0

    @property
    def state(self) -> State:
        """Now."""
        return self.verdict.state

    def review(self, review: Review) -> bool:
        """Think again; whether the state changed."""
        before, state = self.state, self._state_after(review)
        if state is not before:
            self._against = 0
            self._n_closings += state is State.CLOSED
        self.verdict = Verdict(state, _reason(state, review), review.width / review.on, review.width / review.off)
        return state is not before

    def unmeasured(self, why: str) -> None:
        """Nothing can be measured, for this reason; what is not known to be slower stays."""
        if self.state is State.WAITING:
            self.verdict = Verdict(State.WAITING, f"waiting: {why}")

    def _state_after(self, review: Review) -> State:
        if self.state is State.WAITING:
            return State.CLOSED if review.speed < CLOSE_BELOW else State.OPEN
        opened = self.state is State.OPEN
        if not (review.speed < CLOSE_BELOW if opened else review.speed > OPEN_ABOVE):
            self._against = 0
            return self.state
        self._against += review.tokens
        if not review.decisive and self._against < self._enough:
            return self.state
        return State.CLOSED if opened else State.OPEN

    @property
    def _enough(self) -> int:
        if self.state is State.OPEN:
            return CLOSE_TOKENS
        return int(min(MOST_TOKENS, OPEN_TOKENS * 2 ** max(0, self._n_closings - 1)))


def hit_rate(slots: Sequence[int], rates: Sequence[float]) -> float:
    """Of all layers that have slots, each counting the same, as each chooses equally often."""
    having = [rate for n, rate in zip(slots, rates, strict=True) if n]
    return sum(having) / len(having) if having else 0.0


def _reason(state: State, review: Review) -> str:
    on, off = (review.width / seconds for seconds in (review.on, review.off))
    how = "measured" if review.measured else "predicted from measured prices"
    streams = f" for {review.width} streams" if review.width > 1 else ""
    return (
        f"{state.value}: {_judged(state, review.speed)}: {on:.3g} tokens a second{streams} with experts in VRAM at a "
        f"hit rate of {review.hit_rate:.2f}, {off:.3g} without ({how})"
    )


def _judged(state: State, speed: float) -> str:
    if state is State.OPEN:
        return "residency pays" if speed >= 1 else "residency loses too little, or not for long enough, to be closed"
    if speed <= 1:
        return "residency does not pay"
    return "residency gains too little, or not for long enough, to be opened"
