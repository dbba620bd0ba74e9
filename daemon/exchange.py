"""Another load in the place of the one that is served: text pool first, then the answers that run, then the engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import structlog

from daemon.admission import Admission
from daemon.config import Config
from daemon.errors import HotsetError
from daemon.messages import LoadResult, LoadStep
from daemon.model_files import load_command
from daemon.prompt.pool import TextPool
from daemon.replacement import Replacement
from daemon.supervisor import Supervisor

LOOK_SECONDS = 0.2
"""How often it is looked at how far a load is."""
HEARTBEAT_SECONDS = 10.0
"""Who waits for a load hears this often that it goes on."""

Say = Callable[[LoadStep], None]

log = structlog.get_logger("hotset.load")


class Pools(Protocol):
    """The text pool that is served, and how another one is made."""

    @property
    def current(self) -> TextPool:
        """The one that is served."""

    def make(self, config: Config) -> TextPool:
        """One for `config`, not started."""

    def serve(self, pool: TextPool) -> None:
        """Put it in the place of the current one; closes nothing."""


class Exchange:
    """Carries out orders to load anew, one at a time. Belongs to the event loop.

    What is served stays as it is until an engine is ready with the new load; in that moment model, vocabulary and
    configuration change together. `seconds` tells how long answers that run may take to finish.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        admission: Admission,
        pools: Pools,
        seconds: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supervisor, self._admission, self._pools = supervisor, admission, pools
        self._seconds, self._clock = seconds, clock
        self._step: Callable[[], LoadStep] | None = None

    async def load(self, config: Config, adopt: Callable[[], None], say: Say) -> LoadResult:
        """Serve what `config` says with another engine; where that fails the one of before comes back.

        Requests are queued all the time, and none is lost but those that run longer than their time. `adopt` is called
        in the moment in which the new load is served.
        """
        if refusal := self._refusal():
            return LoadResult(result="refused", reason=refusal)
        began = self._clock()
        async with self._telling(say):
            result = await self._load(config, adopt)
        return result.model_copy(update={"seconds": self._clock() - began})

    def _refusal(self) -> str:
        if self._step is not None:
            return f"another load is under way ({self._step().stage})"
        if self._admission.closing:
            return "the service is stopping"
        if self._supervisor.info is None or getattr(self._pools.current, "info", None) is None:
            return "the first load has not ended yet"
        return ""

    @contextlib.asynccontextmanager
    async def _telling(self, say: Say) -> AsyncIterator[None]:
        self._enter("text")
        teller = asyncio.create_task(self._tell(say), name="progress of a load")
        try:
            yield
        finally:
            self._step = None
            teller.cancel()
            await asyncio.gather(teller, return_exceptions=True)

    async def _tell(self, say: Say) -> None:
        told, at = None, 0.0
        while self._step is not None:
            step, now = self._step(), self._clock()
            if step != told or now - at >= HEARTBEAT_SECONDS:
                say(step)
                told, at = step, now
            await asyncio.sleep(LOOK_SECONDS)

    def _enter(self, stage: str, replacement: Replacement | None = None) -> None:
        def step() -> LoadStep:
            queue = self._admission.statistics()
            now = "returning" if replacement is not None and replacement.failed else stage
            values = {"stage": now, "running": queue.running, "waiting": queue.waiting}
            return LoadStep.model_validate(values | {"progress": self._supervisor.progress})

        self._step = step

    async def _load(self, config: Config, adopt: Callable[[], None]) -> LoadResult:
        pool, before = self._pools.make(config), self._pools.current
        try:
            try:
                await pool.start()
            except (HotsetError, OSError) as error:
                return _failed(error.message if isinstance(error, HotsetError) else str(error))
            n_cut_off = await self._drain()
            why = await self._replace(config, pool, adopt)
        finally:
            await (before if self._pools.current is pool else pool).close()
        if why:
            return _failed(why, n_cut_off)
        return LoadResult(result="loaded", cut_off=n_cut_off)

    async def _drain(self) -> int:
        """Until nothing runs; how many answers had to be ended for that."""
        self._enter("draining")
        self._admission.hold()
        self._supervisor.expect("a new load was ordered; answers that run are finished first")
        seconds, queue = self._seconds(), self._admission.statistics()
        log.info("new load: running answers have some time to finish", seconds=seconds, running=queue.running)
        return await self._admission.finish_running(
            seconds, "The engine is being replaced by order, and the time to finish is over."
        )

    async def _replace(self, config: Config, pool: TextPool, adopt: Callable[[], None]) -> str:
        """Why it failed, "" when it did not."""

        def settled(good: bool) -> None:
            if good:
                adopt()
                self._pools.serve(pool)
                self._admission.renew()
            self._admission.release()

        replacement = Replacement(load_command(config), settled)
        self._enter("loading", replacement)
        try:
            await self._supervisor.replace(replacement)
            return await replacement.outcome
        finally:
            replacement.outcome.cancel()


def _failed(why: str, n_cut_off: int = 0) -> LoadResult:
    return LoadResult(result="failed", reason=why, cut_off=n_cut_off)
