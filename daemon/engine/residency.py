"""Experts in VRAM for one engine: slots that are filled and followed beside serving."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from daemon.engine.counts import Counts
from daemon.engine.gatekeeper import Gatekeeper
from daemon.engine.mover import Mover
from daemon.engine.placed import Placed
from daemon.engine.ports import Ids, Source
from daemon.engine.recorder import source
from daemon.engine.residency_report import Describer
from daemon.hotset import curves
from daemon.hotset.bursts import Compute
from daemon.hotset.judge import Judge
from daemon.hotset.placement import ExpertLayer
from daemon.messages import Residency as Report
from daemon.messages import ResidencySpec, SelfTestState
from daemon.native.hotset import Move, Reason, Residency, ResidencyError, State, Status

_STATES = {Compute.OFF: State.OFF, Compute.COUNT: State.COUNT, Compute.ON: State.ON}


class Follower(Protocol):
    """Changes slots; called on the mover's thread."""

    def follow(self, placed: Placed, spec: ResidencySpec) -> Placed:
        """Put what is live of another [residency] into force."""

    def refit(self, placed: Placed, judge: Judge) -> Placed:
        """Other slots within the same budgets, where they are predicted to be clearly faster."""


class Experts:
    """Slots of one context, filled and followed in the background; a context manager that ends before the context.

    `status` may be asked by any thread; all else belongs to that of the engine. `counts` are what requests selected.
    `chosen` are the ids of the last step that `decoded` was told of, as `step_ids` gives them; None where they are not
    known.
    """

    def __init__(
        self,
        residency: Residency,
        synchronize: Callable[[], None],
        placed: Placed,
        layers: Sequence[ExpertLayer],
        names: Sequence[str],
        mover: Mover,
        follower: Follower,
    ) -> None:
        self.residency, self.placed, self.mover = residency, placed, mover
        self._synchronize, self._follower = synchronize, follower
        self._describe = Describer(names, [layer for layer in layers if layer.wholly])
        self._managed = [layer for layer in residency.layers() if layer.reason is Reason.MANAGED]
        self._off = ""
        self._set = State.ON
        self.chosen: Ids | None = None
        self.counts = Counts(residency)
        self._selftest: tuple[SelfTestState, str] = ("none", "")
        self.gatekeeper = Gatekeeper(self)
        self._holds = False
        self._news: deque[Callable[[], None]] = deque()

    @property
    def filled(self) -> bool:
        """Whether there is something in the slots, and nothing more to bring now."""
        if not self.mover.seeded:
            return bool(self.mover.fault)
        return self.frozen or bool(self.mover.fault) or (self.mover.picture.at_rest and self._n_resident() > 0)

    @property
    def complete(self) -> bool:
        """Whether all of it came without a fault."""
        return self.filled and not self.mover.fault

    def start(self) -> None:
        """Begin to upload while decoding goes on; a layer's first experts are used once all of them are there."""
        self.mover.start()

    # -- each step

    def prepare(self, width: int) -> None:
        """The next step computes a generated token for each of `width` sequences; 0: a prompt is in it."""
        self._hear()
        wanted = _STATES[self.gatekeeper.compute(width)]
        if wanted != self._set and not self._off:
            self.compute_as(wanted)

    def decoded(self, width: int, seconds: float) -> npt.NDArray[np.int64] | None:
        """A step of one generated token for each of `width` sequences is over: learn what it chose.

        Returns the selections of each token that were in VRAM, and how many there were, [2, width]. None where that is
        not known.
        """
        keeper, control = self.gatekeeper, self.mover.controller
        ids = self.chosen = None if self._off or self._set is State.OFF else self.residency.step_ids(width, control.pad)
        found = None
        if ids is not None:
            self.mover.observe(ids, width, keeper.learns)
            found = control.served(ids)
            if self._set is State.COUNT:
                found[0] = 0
        if not self._off:
            keeper.computed(Compute[self._set.name], seconds, width)
        return found

    def recordable(self) -> Source | str:
        """What `chosen` holds, for who records it; why nothing is to be recorded where residency is off."""
        report = self.status()
        return report.reason if report.state == "off" else source(self.residency.layers())

    def synchronize(self) -> None:
        """Wait for the step that was begun; what waits for a boundary between steps need not wait for the next one."""
        self._synchronize()
        self._hear()

    # -- what is live

    def adjust(self, spec: ResidencySpec) -> None:
        """Follow another [residency] as far as it is live: budgets, reserve, pace, frozen, gate."""
        self.mover.post(lambda: self._adjust(spec))

    def _adjust(self, spec: ResidencySpec) -> None:
        old = self.placed
        if spec == old.spec and not old.note:
            return
        self.placed = self._follower.follow(old, spec)
        self._news.append(self.gatekeeper.obey)
        if self.placed.plan.experts != old.plan.experts:
            self._news += [self.gatekeeper.refit, self.gatekeeper.restart]

    # -- the gate

    @property
    def gated(self) -> bool:
        """Whether what does not pay is to be switched off."""
        return self.placed.gated

    @property
    def frozen(self) -> bool:
        """Whether experts stay where they are, and steps are computed alike."""
        return self.placed.frozen

    def slots(self) -> list[int]:
        """Of each layer that could have some."""
        return [self.residency.layer(layer.index).n_slots for layer in self._managed]

    def hit_rates(self) -> list[float]:
        """Of these layers lately, 0-1; NaN before the first token."""
        rates = self.mover.controller.hit_rates()
        return [float(rates[layer.index]) for layer in self._managed]

    def potential(self, width: int) -> list[float]:
        """Hit rates that these slots would have, with so many sequences."""
        control = self.mover.controller
        before = [curves.expected(layer.n_expert, width) for layer in self._managed]
        hits = control.curves()[[layer.index for layer in self._managed]]
        return curves.observed_at(self.slots(), hits, control.n_ranked, before)

    def let_move(self, moving: bool) -> None:
        """Whether experts may come and go."""
        self.mover.pause(not moving or bool(self._off))

    def refit(self, judge: Judge) -> None:
        """See whether other slots would be faster, and change them."""
        self.mover.post(lambda: self._refit(judge))

    def _refit(self, judge: Judge) -> None:
        old = self.placed
        self.placed = self._follower.refit(old, judge)
        if self.placed.plan.experts != old.plan.experts:
            self._news.append(self.gatekeeper.restart)

    def _hear(self) -> None:
        """What the mover's thread has changed is the gate's business too, which belongs to this thread.

        Not while slots are held: it may ask for others.
        """
        while self._news and not self._holds:
            self._news.popleft()()

    # -- the probe

    @property
    def settled(self) -> bool:
        """Whether residency is to be had and nothing is being uploaded, moved or resized."""
        mover = self.mover
        able = not self._off and not mover.fault and self.placed.plan.n_experts > 0
        return able and mover.seeded and mover.picture.at_rest and not mover.held

    def hold(self) -> None:
        """Leave slots and state alone until `release`; what is selected from now on is nobody's."""
        self._synchronize()
        self.stop_counting()
        self._holds = True
        self.mover.hold()

    @property
    def held(self) -> bool:
        """Whether nobody else changes or uploads anything by now.

        Raises:
            ResidencyError: whoever does has failed, and will never say so.
        """
        if self.mover.fault:
            raise ResidencyError(Status.FAILED, f"experts cannot be moved: {self.mover.fault}")
        return self.mover.held

    def release(self, missing: Sequence[Move]) -> None:
        """Look at the slots again, bring these experts back, compute as is right."""
        self._synchronize()
        self._holds = False
        self.count_again()
        self.mover.release(missing, paused=self.gatekeeper.closed or bool(self._off))
        if not self._off:
            self.compute_as(State.OFF if self.gatekeeper.closed else State.ON)

    def switch_off(self, reason: str) -> None:
        """Compute as upstream does from now on, for this reason, and move nothing more."""
        self.mover.pause(True)
        self.compute_as(State.OFF)
        self._off = reason

    def compute_as(self, state: State) -> None:
        """Switch residency for the next steps; slots keep their experts."""
        self._synchronize()
        self.residency.set_state(state)
        self._set = state

    def stop_counting(self) -> None:
        """What is selected from now on is not of requests."""
        self.counts.stop()

    def count_again(self) -> None:
        """Selections are of requests again."""
        self.counts.resume()

    def tell(self, state: SelfTestState, detail: str = "") -> None:
        """What status says of the self-test."""
        self._selftest = (state, detail)

    def close(self) -> None:
        """End all moves and free the slots."""
        self.mover.stop(self._synchronize)
        self.residency.close()

    def __enter__(self) -> Experts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def status(self) -> Report:
        """Counted anew from the library."""
        statistics = self.residency.statistics()
        if statistics.state == State.OFF != self._set:
            self._off = "a device had no room for the compute buffers that a step needs with experts in VRAM"
        selftest, detail = self._selftest
        gate = self.gatekeeper.report()
        closed = gate.reason if self.gatekeeper.closed else ""
        report = self._describe.report(self.counts.layers(), self.placed, self.mover, self._off, closed)
        return report.model_copy(
            update={
                "uploaded_bytes": statistics.staged_bytes,
                "published": statistics.published,
                "gate": gate,
                "selftest": selftest,
                "selftest_detail": detail,
            }
        )

    def _n_resident(self) -> int:
        return sum(layer.n_resident for layer in self.residency.layers())
