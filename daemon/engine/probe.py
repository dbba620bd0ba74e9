"""What experts in VRAM cost and gain on this machine, measured in the engine that serves, while it is idle.

Steps of one sequence are timed with the placements of `daemon.engine.arms`, in turn and in several rounds, on the same
tokens at the same positions. One decode call a step of the loop: a request takes the engine at once, and the probe
begins anew when it has been quiet for a while. What it computes is not counted and moves no expert.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, Protocol

from pydantic import Field, model_validator

from daemon.engine.arms import Selections
from daemon.engine.store import Key, Record, Store, now
from daemon.errors import HotsetError
from daemon.hotset.prices import LEAST_ROUNDS, Arm, LayerFacts, Prices, Setup, Times, solve
from daemon.verify.walk import Decoder, StepFailed

WARM, TIMED = 3, 5
"""Steps of a visit to an arm: after a change the graph is built and prepared ahead, which the first ones pay for."""
N_CELLS = WARM + TIMED
"""KV cells that the probe needs at most."""

MOST_ROUNDS, SECONDS = 24, 4.0
"""Rounds, and how long they may go on if there are `LEAST_ROUNDS`."""
QUIET_SECONDS, MOST_QUIET_SECONDS = 2.0, 120.0
"""Without a request before the probe begins again; twice as many each time that it was interrupted."""

_SEQUENCE = 0  # nobody has it while the engine is idle


class Measured(Record):
    """The prices' raw material, and when it was measured (UTC)."""

    format: Literal[1] = 1
    setup: Setup
    rounds: list[dict[Arm, Times]] = Field(min_length=LEAST_ROUNDS, max_length=MOST_ROUNDS)
    measured: str

    @model_validator(mode="after")
    def _gives_prices(self) -> Measured:
        self.prices()
        return self

    def prices(self) -> Prices:
        """What these times say."""
        return solve(self.setup, self.rounds)


@dataclass(frozen=True)
class Compared:
    """Seconds per step without residency and with the placement as it stood, in each round; of each layer its slots and
    hit rate. `layers`, `slots` and `hit_rates` are in the same order.
    """

    offs: list[float]
    ons: list[float]
    layers: list[LayerFacts]
    slots: list[int]
    hit_rates: list[float]


class ArmsPort(Protocol):
    """What the probe needs of `daemon.engine.arms.Arms`."""

    @property
    def ready(self) -> bool:
        """Whether there are slots that nobody is changing."""

    @property
    def fits_whole(self) -> bool:
        """Whether the slots that there are could hold all experts of a layer."""

    @property
    def layers(self) -> list[LayerFacts]:
        """Those that could have slots."""

    @property
    def slots(self) -> list[int]:
        """Of each of them now."""

    def setup(self) -> Setup:
        """What the arms are; once arranged."""

    def begin(self, whole: bool) -> None:
        """Take the placement over."""

    def advance(self) -> bool:
        """Do a piece of arranging; whether it is done."""

    def show(self, arm: Arm) -> None:
        """Place experts so."""

    def cpu_seconds(self) -> float:
        """Spent in the CPU's chains so far."""

    def selections(self) -> list[Selections]:
        """Hits and misses of each layer so far."""

    def end(self) -> None:
        """Give the placement back."""


class Listener(Protocol):
    """Whoever wants to know; called on the engine's thread, with the placement given back."""

    def priced(self, measured: Measured, note: str) -> None:
        """Prices were measured, or found in the cache; `note` says which, and whether they could be kept."""

    def compared(self, compared: Compared) -> None:
        """The placement as it stands was measured."""

    def unmeasured(self, why: str) -> None:
        """Nothing could be measured."""


class Probe:
    """The loop asks whether it is `pending`, lets it `step` when idle, and `interrupt`s it when a request comes.

    `tokens` are what is computed, `N_CELLS` of them at most.
    """

    def __init__(
        self,
        context: Decoder,
        arms: ArmsPort,
        tokens: Sequence[int],
        store: Store[Measured],
        key: Key,
        listener: Listener,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._context, self._arms, self._listener, self._clock = context, arms, listener, clock
        self._tokens = [tokens[i % len(tokens)] for i in range(N_CELLS)]
        self._store, self._key = store, key
        self._due: list[Literal["prices", "comparison"]] = ["prices"]
        self._rounds: _Rounds | None = None
        self._begun = self._looked = False
        self._not_before, self._quiet = float("-inf"), QUIET_SECONDS

    @property
    def pending(self) -> bool:
        """Whether there is something to do now."""
        return self._begun or (bool(self._due) and self._clock() >= self._not_before and self._arms.ready)

    @property
    def underway(self) -> bool:
        """Whether it holds cells, and residency is not as requests want it."""
        return self._begun

    def compare(self) -> None:
        """Measure the placement as it stands, once more: budgets, the load or many experts have changed."""
        if "comparison" not in self._due:
            self._due.append("comparison")

    def step(self) -> None:
        """One decode call, or a piece of preparing for it."""
        try:
            if not self._begun:
                self._begin()
            elif self._rounds is not None:
                self._compute(self._rounds)
            elif self._arms.advance():
                self._rounds = self._new_rounds()
        except HotsetError as error:
            self._stop()
            self._due.clear()
            self._listener.unmeasured(error.message)

    def interrupt(self) -> None:
        """Give everything back; the probe begins anew when nobody has asked for anything for a while."""
        if self._begun:
            self._stop()
            self._quiet = min(MOST_QUIET_SECONDS, 2 * self._quiet)
        self._not_before = self._clock() + self._quiet

    def _begin(self) -> None:
        if self._due[0] == "prices" and self._found():
            return
        self._begun = True
        self._arms.begin(whole=self._due[0] == "prices")

    def _found(self) -> bool:
        """Whether the cache has the prices of these layers."""
        if self._looked:
            return False
        self._looked = True
        known = self._store.find(self._key)
        if known is None or known.setup.layers != self._arms.layers:
            return False
        if self._arms.fits_whole and not known.setup.whole:
            return False
        self._due.remove("prices")
        self._listener.priced(known, f"measured on {known.measured}, with the same build, driver, device and settings")
        return True

    def _new_rounds(self) -> _Rounds:
        if self._due[0] == "comparison":
            arms = [Arm.OFF, Arm.ON]
        else:
            whole = [Arm.NEARLY, Arm.WHOLE] if self._arms.setup().whole else []
            arms = [Arm.OFF, Arm.EMPTY, *whole]
        return _Rounds(self._context, self._arms, arms, self._tokens, self._clock)

    def _compute(self, rounds: _Rounds) -> None:
        rounds.step()
        if rounds.done:
            report = self._comparison(rounds) if self._due[0] == "comparison" else self._prices(rounds)
            self._stop()
            del self._due[0]
            self._quiet = QUIET_SECONDS
            report()

    def _prices(self, rounds: _Rounds) -> Callable[[], None]:
        setup = self._arms.setup()
        missed = 1 - rounds.hit_rate(Arm.NEARLY, setup.whole) if setup.whole else 0.0
        setup = setup.model_copy(update={"missed": missed})
        measured = Measured(key=self._key, setup=setup, rounds=rounds.rounds, measured=now())
        unkept = self._store.add(measured)
        note = f"measured now; it cannot be remembered: {unkept}" if unkept else "measured now"
        return lambda: self._listener.priced(measured, note)

    def _comparison(self, rounds: _Rounds) -> Callable[[], None]:
        layers, slots = self._arms.layers, self._arms.slots
        offs, ons = ([one[arm].wall for one in rounds.rounds] for arm in (Arm.OFF, Arm.ON))
        rates = [rounds.hit_rate(Arm.ON, [place]) for place in range(len(layers))]
        return lambda: self._listener.compared(Compared(offs, ons, layers, slots, rates))

    def _stop(self) -> None:
        """Without anything computed or changed that would stay."""
        if self._begun:
            self._context.remove(_SEQUENCE)
            self._begun, self._rounds = False, None
            self._arms.end()


class _Rounds:
    """Visits to arms: each decodes the same tokens from an empty sequence, the first ones untimed."""

    def __init__(
        self,
        context: Decoder,
        arms: ArmsPort,
        order: Sequence[Arm],
        tokens: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        self._context, self._arms, self._order, self._tokens, self._clock = context, arms, list(order), tokens, clock
        self.rounds: list[dict[Arm, Times]] = []
        self.done = False
        self._started = clock()
        self._round: dict[Arm, Times] = {}
        self._left = list(order)
        self._times: list[Times] = []
        self._position = 0
        self._before: list[Selections] = []
        self._selected: defaultdict[tuple[Arm, int], list[int]] = defaultdict(lambda: [0, 0])

    def step(self) -> None:
        """Decode one token.

        Raises:
            StepFailed: llama.cpp refused it.
        """
        if self._position == 0:
            self._arms.show(self._left[0])
            self._before = self._arms.selections()
        cpu, started = self._arms.cpu_seconds(), self._clock()
        code = self._context.decode([(self._tokens[self._position], self._position, _SEQUENCE, True)])
        if code:
            raise StepFailed(f"a step of one token cannot be computed (code {code})")
        self._context.logits(0)  # waits for the step
        wall = max(0.0, self._clock() - started)
        self._position += 1
        if self._position > WARM:
            self._times.append(Times(wall=wall, cpu=max(0.0, self._arms.cpu_seconds() - cpu)))
        if self._position == N_CELLS:
            self._end_visit()

    def hit_rate(self, arm: Arm, places: Sequence[int]) -> float:
        """Of the selections of these layers in an arm; 0 if there were none."""
        hits, misses = (sum(self._selected[arm, place][side] for place in places) for side in (0, 1))
        return hits / (hits + misses) if hits + misses else 0.0

    def _end_visit(self) -> None:
        arm = self._left.pop(0)
        for place, (now_, before) in enumerate(zip(self._arms.selections(), self._before, strict=True)):
            for side in (0, 1):
                self._selected[arm, place][side] += now_[side] - before[side]
        wall, wait = median(one.wall for one in self._times), median(one.wait for one in self._times)
        self._round[arm] = Times(wall=wall, cpu=max(0.0, wall - wait))
        self._context.remove(_SEQUENCE)
        self._times, self._position = [], 0
        if not self._left:
            self._end_round()

    def _end_round(self) -> None:
        """The next one goes the other way, so that what drifts falls on all arms alike."""
        self.rounds.append(self._round)
        self._round = {}
        self._order.reverse()
        self._left = list(self._order)
        n = len(self.rounds)
        self.done = n >= MOST_ROUNDS or (n >= LEAST_ROUNDS and self._clock() - self._started >= SECONDS)
