"""Times arms: scouting runs, then interleaved rounds of those that are left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hotset_tools.bench.arms import MOST_STEPS, Arm, Cell, Settings, Timed, keep
from hotset_tools.bench.child import WorkerFailed
from hotset_tools.bench.shelf import Shelf
from hotset_tools.bench.walks import Walks

NEAR_BEST = 1.1
"""After scouting, other splits and numbers of threads stay in the race if they are less than this slower."""

SCOUTS = 3
"""How often an arm is tried; its best counts. One try is too few to choose between numbers of threads."""

ENOUGH_ROUNDS = 3
_SCOUTING = 7000  # number of the first walk that is scouted with; rounds have walks 0, 1, ...


class Race:
    """Measures on `shelf`; `say` gets lines for people, `note` what belongs into the report."""

    def __init__(
        self,
        shelf: Shelf,
        walks: Walks,
        settings: Settings,
        say: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self._shelf, self._walks, self._settings = shelf, walks, settings
        self._say, self._note = say, note

    def scout(self, cell: Cell, arms: Sequence[Arm]) -> dict[Arm, float]:
        """Seconds per step or prompt of the arms that stay in the race; one that cannot be opened leaves it.

        Raises:
            WorkerFailed: a worker has ended.
        """
        steps = 6 if cell.n_sequences <= 4 else 3
        speeds: dict[Arm, float] = {}
        for arm in arms:
            try:
                if cell.phase == "prefill":
                    self._time(cell, arm, 1, _SCOUTING)  # the first one builds pipelines, a decode's warm steps do so
                tries = SCOUTS if cell.phase == "decode" else 1
                replies = [self._time(cell, arm, steps, _SCOUTING + n) for n in range(tries)]
            except WorkerFailed as error:
                if error.ended:
                    raise
                self._note(f"{arm.label} is left out: {error.message}")
                continue
            speeds[arm] = min(float(reply["seconds"]) for reply in replies) / _units(cell, steps)
            self._say(f"scout {arm.label}: {1e3 * speeds[arm]:.2f} ms")
        return {arm: speeds[arm] for arm in keep(speeds, NEAR_BEST)}

    def n_steps(self, cell: Cell, speeds: Mapping[Arm, float], seconds: float, most: int = MOST_STEPS) -> int:
        """Steps per round, `most` at most, so that all rounds together take `seconds`; a prefill is one prompt."""
        if cell.phase == "prefill":
            return 1
        if self._settings.steps:
            return self._settings.steps
        fitting = int(seconds / self._settings.rounds / sum(speeds.values())) - cell.warm
        return min(most, max(cell.least_steps, fitting))

    def rounds(self, cell: Cell, arms: Sequence[Arm], n_steps: int, deadline: float) -> dict[Arm, Timed]:
        """Every arm once a round, in another order each time, all on the same tokens.

        After the deadline (monotonic) no round beyond the `ENOUGH_ROUNDS`-th begins.
        """
        times = {arm: Timed() for arm in arms}
        random = np.random.default_rng(self._settings.seed)
        for number in range(self._settings.rounds):
            if number >= ENOUGH_ROUNDS and time.monotonic() > deadline:
                self._note(f"{cell}: {number} rounds only, the time is over")
                break
            for index in random.permutation(len(arms)):
                times[arms[index]].add(self._time(cell, arms[index], n_steps, number), _units(cell, n_steps))
        for arm, timed in times.items():
            self._say(f"{len(timed.seconds)} x {n_steps} {arm.label}: {1e3 * timed.median:.2f} ms")
        return times

    def steps(self, cell: Cell, n_steps: int, number: int) -> list[list[int]]:
        """The tokens of a round, warming up included."""
        return self._walks.steps(cell.warm + n_steps, cell.n_sequences, number)

    def _time(self, cell: Cell, arm: Arm, n_steps: int, number: int) -> dict[str, Any]:
        if cell.phase == "prefill":
            tokens = self._walks.tokens(cell.n_tokens, number)
            return self._shelf.ask(arm.place, "prefill", tokens=tokens, threads=arm.threads)
        steps = self.steps(cell, n_steps, number)
        return self._shelf.ask(arm.place, "decode", steps=steps, warm=cell.warm, threads=arm.threads)


def _units(cell: Cell, n_steps: int) -> int:
    return n_steps if cell.phase == "decode" else 1
