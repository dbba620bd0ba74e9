"""Experts that follow the traffic of a worker's context, by the daemon's own code: controller, mover, placer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from daemon.config import Config
from daemon.engine import learnings, placing, wanted
from daemon.engine.residency import Experts
from daemon.engine.wanted import Off
from daemon.errors import HotsetError
from daemon.messages import Device, Load, ResidencySpec
from daemon.model_files import residency_spec
from daemon.native import devices, gguf_check
from daemon.native.context import Context
from daemon.native.hotset import Residency

_POLL_SECONDS = 0.0005


class Stopwatch:
    """A monotonic clock, in seconds, that can be stopped."""

    def __init__(self) -> None:
        self._lost = 0.0
        self._stopped: float | None = None

    def __call__(self) -> float:
        """Its time now."""
        return (time.monotonic() if self._stopped is None else self._stopped) - self._lost

    def stop(self) -> None:
        """Stand still."""
        if self._stopped is None:
            self._stopped = time.monotonic()

    def start(self) -> None:
        """Go on from where it stood."""
        if self._stopped is not None:
            self._lost += time.monotonic() - self._stopped
            self._stopped = None


class Following:
    """Slots of `context` that experts come to as its steps choose them; a context manager that ends before it.

    Experts move only within `moving`, at the pace that the configuration has by default: while other arms are timed,
    nothing is uploaded and no allowance is earned.

    Raises:
        HotsetError: no expert can have a slot.
    """

    def __init__(
        self, context: Context, spec: Load, vram: str, chosen: Sequence[int], state: Path | None = None
    ) -> None:
        """`vram` is a budget as in residency.vram, `chosen` are the devices of the model.

        What was learned in the directory `state` is where it begins, with all of its experts in their slots.
        """

        def described() -> list[Device]:
            return [devices.describe(pointer) for pointer in chosen]

        file = gguf_check.check(Path(spec.model))
        spec = spec.model_copy(update={"residency": _residency(vram)})
        memory = learnings.recall(state, spec.residency, file)
        wish = wanted.prepare(spec, file, described(), memory.learned)
        found = wish if isinstance(wish, Off) else placing.place(context, wish, described, (), memory)
        if isinstance(found, Off):
            raise HotsetError(f"experts cannot follow the traffic: {found.reason}")
        self.experts: Experts = found
        self._context = context
        self._clock = Stopwatch()
        found.mover.clock = self._clock
        found.start()
        self._until(lambda: found.mover.seeded)
        self._rest()

    @property
    def residency(self) -> Residency:
        """The slots."""
        return self.experts.residency

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Experts come and go within."""
        self._clock.start()
        self.experts.mover.release((), paused=False)
        try:
            yield
        finally:
            self._rest()

    def prepare(self, width: int) -> None:
        """The next step computes a token for each of `width` sequences."""
        self.experts.prepare(width)

    def decoded(self, width: int, seconds: float) -> None:
        """That step is over."""
        self.experts.synchronize()
        self.experts.decoded(width, seconds)

    def adjust(self, vram: str) -> None:
        """Follow another budget, as the engine does when the configuration changes."""
        self.experts.adjust(_residency(vram))

    def save(self) -> None:
        """Keep what was learned in the directory, as the engine does now and then.

        Raises:
            HotsetError: it could not be written.
        """
        keeper, done = self.experts.mover.keeper, threading.Event()
        assert keeper is not None
        self.experts.mover.post(keeper.save)
        self.experts.mover.post(done.set)
        while not done.wait(_POLL_SECONDS):
            self.check()
        if keeper.report.fault or not keeper.report.saved:
            raise HotsetError(f"what was learned is not saved: {keeper.report.fault or keeper.report.reason}")

    def check(self) -> None:
        """Whether all is well.

        Raises:
            HotsetError: the mover gave up.
        """
        if self.experts.mover.fault:
            raise HotsetError(f"experts move no more: {self.experts.mover.fault}")

    def _rest(self) -> None:
        self._clock.stop()
        self.experts.mover.hold()
        self._until(lambda: self.experts.mover.held)

    def _until(self, done: Callable[[], bool]) -> None:
        """Wait for the mover, which may wait for a boundary."""
        while not done():
            self.check()
            self._context.synchronize()
            time.sleep(_POLL_SECONDS)

    def __enter__(self) -> Following:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.experts.close()


def _residency(vram: str) -> ResidencySpec:
    """The daemon's defaults but for the budget; nothing is kept free, and the gate stays open."""
    asked = {"vram": vram, "reserve": 0, "gate": False}
    return residency_spec(Config.model_validate({"residency": asked}))
