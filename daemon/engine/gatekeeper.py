"""Has the gate follow what is measured, and says for each step how residency is to be computed.

It belongs to the engine's thread. What it decides by is in `daemon.hotset.judge` and `daemon.hotset.bursts`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

from daemon.engine.probe import Compared, Measured
from daemon.hotset.bursts import Compute, References, counting
from daemon.hotset.gate import Gate, State
from daemon.hotset.judge import Judge
from daemon.messages import Gate as Report

REVIEW_TOKENS = 64
"""A closed gate thinks again after so many."""
REFIT_SECONDS = 600.0
"""Slots change hands between layers at most this often."""
_RECENT_STEPS = 32


class GatedExperts(Protocol):
    """What is switched."""

    @property
    def gated(self) -> bool:
        """Whether what does not pay is to be switched off."""

    @property
    def frozen(self) -> bool:
        """Whether the same requests are to give the same numbers again, so that no step may be computed otherwise."""

    def slots(self) -> list[int]:
        """Of each layer that could have some."""

    def hit_rates(self) -> list[float]:
        """Of these layers lately; NaN before the first token."""

    def potential(self, width: int) -> list[float]:
        """Hit rates that these slots would have, with so many sequences."""

    def let_move(self, moving: bool) -> None:
        """Whether experts may come and go."""

    def refit(self, judge: Judge) -> None:
        """See whether other slots would be faster, and change them."""


class Gatekeeper:
    """`compare` asks the probe to measure the placement as it stands, when the engine is idle."""

    def __init__(self, experts: GatedExperts, clock: Callable[[], float] = time.monotonic) -> None:
        self._experts, self._clock = experts, clock
        self.gate = Gate()
        self.judge: Judge | None = None
        self.compare: Callable[[], None] = lambda: None
        self._note = ""
        self._references = References()
        self._closed_steps = self._tokens = 0
        self._off_steps: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS)
        self._refitted = clock()

    @property
    def closed(self) -> bool:
        """Whether steps are computed on upstream's path."""
        return self._experts.gated and self.gate.state is State.CLOSED

    def compute(self, width: int) -> Compute:
        """How the next step is to be computed: one token for each of `width` sequences, 0: a prompt is in it."""
        if self.closed:
            return counting(self._closed_steps).compute if width else Compute.OFF
        if not width:
            self._references.restart()
        refers = width and self._experts.gated and self.judge and not self._experts.frozen
        return self._references.compute if refers else Compute.ON

    @property
    def learns(self) -> bool:
        """Whether ranks of the step that was computed last tell of hit rates."""
        return not self.closed or counting(self._closed_steps).learn

    def computed(self, how: Compute, seconds: float, width: int) -> None:
        """A decode step is over."""
        if self.judge is None:
            return
        if self.closed:
            self._while_closed(self.judge, how, seconds, width)
        elif self._experts.gated and not self._experts.frozen:
            reference = self._references.observe(seconds, width)
            if reference is not None:
                self._changed(self.judge.refer(reference, self._experts.slots(), self._rates(width)))
        if self._clock() - self._refitted >= REFIT_SECONDS:
            self.refit()

    def refit(self) -> None:
        """Let slots change hands where prices say that it is worth it."""
        self._refitted = self._clock()
        if self.judge is not None and not self._experts.frozen:
            self._experts.refit(self.judge)

    def restart(self) -> None:
        """Budgets or many experts have changed."""
        self._references.restart()
        self.compare()

    def obey(self) -> None:
        """`gated` or `frozen` may have changed."""
        self._experts.let_move(not self.closed)

    def report(self) -> Report:
        """What status says."""
        verdict = self.gate.verdict
        if not self._experts.gated:
            return Report(state="none", reason="residency.gate is false", on=verdict.on, off=verdict.off)
        return Report(state=verdict.state.value, reason=verdict.reason, on=verdict.on, off=verdict.off)

    # -- what the probe found

    def priced(self, measured: Measured, note: str) -> None:
        """Prices are known; the placement as it stands is compared next, since prices of few steps are not sure."""
        self.judge = Judge(measured.prices(), measured.setup.layers, self.gate)
        self._note = note
        self.refit()
        self.compare()

    def compared(self, compared: Compared) -> None:
        """The placement as it stands was timed."""
        if self.judge is None or compared.layers != self.judge.layers:
            return
        self.judge.compared(compared.offs, compared.ons, compared.slots, compared.hit_rates)
        changed = self.judge.review(compared.slots, self._potential(1), decisive=True)
        self._changed(changed)

    def unmeasured(self, why: str) -> None:
        """Nothing could be timed."""
        self.gate.unmeasured(why)

    # -- inside

    def _while_closed(self, judge: Judge, how: Compute, seconds: float, width: int) -> None:
        self._closed_steps += 1
        self._tokens += width
        if how is Compute.OFF:
            self._off_steps.append((seconds, width))
        alike = [one for one, n in self._off_steps if n == width]
        if self._tokens >= REVIEW_TOKENS and alike:
            slots = self._experts.slots()
            tokens, self._tokens = self._tokens, 0
            now = median(alike)
            self._changed(judge.review(slots, self._potential(width), width=width, tokens=tokens, now=now))

    def _changed(self, changed: bool) -> None:
        if changed:
            self._closed_steps = self._tokens = 0
            self._off_steps.clear()
            self._references.restart()
            self.obey()

    def _rates(self, width: int) -> list[float]:
        """Live ones; before the first token what is to be expected."""
        live, potential = self._experts.hit_rates(), self._potential(width)
        return [other if math.isnan(rate) else rate for rate, other in zip(live, potential, strict=True)]

    def _potential(self, width: int) -> Sequence[float]:
        return self._experts.potential(width)
