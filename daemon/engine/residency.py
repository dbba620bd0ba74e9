"""Experts in VRAM for one engine: slots that are filled and followed beside serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt

from daemon.engine.counts import Counts
from daemon.engine.mover import Mover
from daemon.engine.placed import Placed
from daemon.engine.residency_report import Describer
from daemon.hotset.placement import ExpertLayer
from daemon.messages import Residency as Report
from daemon.messages import ResidencySpec, SelfTestState
from daemon.native.hotset import Residency, State


class Experts:
    """Slots of one context, filled and followed in the background; a context manager that ends before the context.

    `status` may be asked by any thread; all else belongs to that of the engine. `counts` are what requests selected.
    `adjusted` puts another [residency] into force, on the mover's thread.
    """

    def __init__(
        self,
        residency: Residency,
        synchronize: Callable[[], None],
        placed: Placed,
        layers: Sequence[ExpertLayer],
        names: Sequence[str],
        mover: Mover,
        replace: Callable[[ResidencySpec], Placed],
    ) -> None:
        self.residency, self.placed, self.mover = residency, placed, mover
        self._synchronize, self._replace = synchronize, replace
        self._describe = Describer(names, [layer for layer in layers if layer.wholly])
        self._off = ""
        self._set = State.ON
        self.counts = Counts(residency)
        self._selftest: tuple[SelfTestState, str] = ("none", "")

    @property
    def filled(self) -> bool:
        """Whether there is something in the slots, and nothing more to bring now."""
        if not self.mover.seeded:
            return bool(self.mover.fault)
        return self.placed.frozen or bool(self.mover.fault) or (self.mover.picture.at_rest and self._n_resident() > 0)

    @property
    def complete(self) -> bool:
        """Whether all of it came without a fault."""
        return self.filled and not self.mover.fault

    def start(self) -> None:
        """Begin to upload while decoding goes on; a layer's first experts are used once all of them are there."""
        self.mover.start()

    def decoded(self, n_tokens: int) -> npt.NDArray[np.int64] | None:
        """A step that computed one token for each of `n_tokens` sequences is over: learn what it chose.

        Returns the selections of each token that were in VRAM, and how many there were, [2, n_tokens]. None where that
        is not known.
        """
        if self._set == State.OFF:
            return None
        self._synchronize()
        control = self.mover.controller
        ids = self.residency.step_ids(n_tokens, control.pad)
        if ids is None:
            return None
        self.mover.observe(ids, n_tokens)
        return control.served(ids)

    def rest(self) -> None:
        """Nothing is to be computed now: what waits for a boundary need not wait for the next step."""
        self._synchronize()

    def adjust(self, spec: ResidencySpec) -> None:
        """Follow another [residency] as far as it is live: budgets, reserve, pace, frozen or not."""
        self.mover.post(lambda: self._adjust(spec))

    def _adjust(self, spec: ResidencySpec) -> None:
        if spec != self.placed.spec:
            self.placed = self._replace(spec)

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
        report = self._describe.report(self.counts.layers(), self.placed, self.mover, self._off)
        return report.model_copy(
            update={
                "uploaded_bytes": statistics.staged_bytes,
                "published": statistics.published,
                "selftest": selftest,
                "selftest_detail": detail,
            }
        )

    def _n_resident(self) -> int:
        return sum(layer.n_resident for layer in self.residency.layers())
