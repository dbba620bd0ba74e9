"""The engine child from outside: start it, listen to it, replace it when it dies or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from pydantic import BaseModel

from daemon.config import EngineSection
from daemon.frames import Decoder, encode
from daemon.messages import (
    REPORT,
    Load,
    LoadFailed,
    Loading,
    ModelInfo,
    Ready,
    Recorded,
    RequestEvent,
    Residency,
    Shutdown,
    Snapshot,
    Step,
)
from daemon.replacement import HOPELESS_LIVES, Replacement

State = Literal["loading", "ready", "restarting", "failed", "stopped"]

RestartReason = Literal["start", "load", "hang", "signal", "exit", "reload"]

LONG_LIFE_SECONDS = 60.0
"""An engine that was ready for this long did not die of its start; the next delay begins small again."""

_STDERR_LINES = 40
_ABORT_SECONDS = 3.0
_LAST_WORDS_SECONDS = 2.0
_NO_ENGINE = Residency(reason="off: there is no engine yet; it is being started")

log = logging.getLogger("hotset.supervisor")


class Listener(Protocol):
    """Who is told what the engine does; `daemon.admission` is."""

    def engine_ready(self) -> None:
        """It takes commands."""

    def engine_lost(self, why: str) -> None:
        """It is gone, with all that ran."""

    def engine_unlikely(self, why: str) -> None:
        """None is to be expected soon: it is no use to wait."""

    def deliver(self, event: RequestEvent) -> None:
        """It said this about one request."""


class RoutingListener(Protocol):
    """Who is told what the engine records; `daemon.recording` is."""

    def deliver(self, part: Recorded) -> None:
        """A part of a recording."""

    def engine_lost(self, why: str) -> None:
        """The engine is gone."""


class ExpertCounts(Protocol):
    """Who adds up what engines count, each from its own start; `daemon.expert_metrics` does."""

    def engine_started(self) -> None:
        """Reports from now on are of another engine."""

    def report(self, residency: Residency) -> None:
        """It said this about its experts."""


class _Uncounted:
    def engine_started(self) -> None: ...

    def report(self, residency: Residency) -> None: ...


def engine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: the C library is asked to back large blocks by huge pages.

    Weights and KV cells are read all over in every step; with 4 KiB pages much of that is spent on address translation.
    What the operator set is kept; a kernel or C library that knows no such thing ignores it.
    """
    tunables = environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" in tunables:
        return dict(environ)
    return {**environ, "GLIBC_TUNABLES": ":".join(filter(None, (tunables, "glibc.malloc.hugetlb=1")))}


def engine_command(fd: int) -> list[str]:
    """How the child is started; tests put another program in its place."""
    return [sys.executable, "-m", "daemon.engine", str(fd), str(os.getpid())]


class _Link(asyncio.Protocol):
    """The service's end of the socketpair."""

    def __init__(self, on_body: Callable[[bytes], None], on_close: Callable[[], None]) -> None:
        self._decoder = Decoder()
        self._on_body, self._on_close = on_body, on_close
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for body in self._decoder.feed(data):
            self._on_body(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_close()

    def send(self, message: BaseModel) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(encode(message))


class Supervisor:
    """Keeps one engine alive until `stop`. Belongs to the event loop.

    `state` is "loading" until the first engine is ready and while another one is put in its place by order,
    "restarting" between engines, "failed" when the first load cannot succeed; `reason` says why it is not "ready".
    """

    def __init__(
        self,
        spec: Callable[[], Load],
        settings: Callable[[], EngineSection],
        *,
        command: Callable[[int], Sequence[str]] = engine_command,
        restarted: Callable[[RestartReason], None] = lambda reason: None,
        counts: ExpertCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._settings, self._command, self._clock = spec, settings, command, clock
        self._restarted = restarted
        self._counts = counts or _Uncounted()
        self.listener: Listener | None = None
        self.recordings: RoutingListener | None = None
        self.state: State = "loading"
        self.reason = "the model is being loaded"
        self.progress = 0.0
        self.info: ModelInfo | None = None
        self.snapshot = Snapshot()
        self.residency = _NO_ENGINE
        self.restarts = 0
        self.load_seconds = 0.0
        self.settled = asyncio.Event()
        """Set when the first load has ended, well or badly."""
        self._link: _Link | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self._load_failed: LoadFailed | None = None
        self._heard = self._spawned = self._ready_at = 0.0
        self._delay = 0.0
        self._hung = False
        self._n_still_born = 0
        self._kind: RestartReason = "exit"
        self._listens = False
        self._replacement: Replacement | None = None
        self._hurry = asyncio.Event()

    # -- what admission sees

    @property
    def capacity(self) -> int:
        """Sequences that may run together; 0 while no engine is ready."""
        return self.info.max_sequences if self._listens and self.info else 0

    @property
    def retry_after(self) -> int:
        """Whole seconds until an engine is likely to be ready, from how long the last load took."""
        left = self._spawned + self.load_seconds - self._clock() if self.load_seconds else 1.0
        return max(1, math.ceil(left))

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None between engines."""
        return self._process.pid if self._process else None

    def send(self, command: BaseModel) -> None:
        """Hand a command to the engine; dropped when there is none (its loss is told by `engine_lost`)."""
        if self._link is not None:
            self._link.send(command)

    # -- life

    async def run(self) -> None:
        """Start engines until cancelled, or until the first load turns out to be hopeless."""
        while True:
            why = await self._one_life()
            if self.info is None and self._load_failed and self._load_failed.fatal:
                self._change("failed", why)
                self.settled.set()
                return
            self.restarts += 1
            self._restarted(self._kind)
            if not self._at_once(why):
                log.error("engine ended: %s; starting another one", why)
                await self._pause(self._next_delay())

    async def stop(self, seconds: float = 5.0) -> None:
        """Ask the engine to end, and kill it if it has not within `seconds`."""
        self._change("stopped", "the service is stopping")
        self._listens = False
        await self._end(seconds)

    def expect(self, why: str) -> None:
        """Another engine is going to be put in the place of the one that runs: `state` and `reason` say so already."""
        self.progress = 0.0
        self._change("loading", why)

    async def replace(self, replacement: Replacement, seconds: float = 5.0) -> None:
        """End the engine, as `stop` does, and see `replacement` through, whose `outcome` tells how it went."""
        self.expect("the engine is being replaced by order")
        self._replacement = replacement
        self._listens = False
        self._hurry.set()
        await self._end(seconds)

    async def _end(self, seconds: float) -> None:
        process = self._process
        if process is None:
            return
        self.send(Shutdown())
        try:
            async with asyncio.timeout(seconds):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _at_once(self, why: str) -> bool:
        """Whether the next engine is started without a delay, because of an order."""
        if self._replacement is None:
            return False
        step = self._replacement.ended(why, refused=self._load_failed is not None)
        if step == "return":
            log.error("the new load failed: %s; going back to the one before", why)
            self._n_still_born = 0
            self._change("restarting", f"the new load failed: {why}")
        return step != "again"

    async def _pause(self, seconds: float) -> None:
        """Sleep; an order to replace the engine wakes it."""
        self._hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    async def _one_life(self) -> str:
        """Start one engine and see it through; returns why it ended."""
        self._load_failed, self._hung, self._ready_at = None, False, 0.0
        self._stderr.clear()
        try:
            process = self._process = await self._spawn()
        except OSError as error:
            why, self._kind = f"it could not be started: {error.strerror}", "start"
            self._next_load()
            self._lost(why)
            return why
        watchers = [asyncio.create_task(self._read_stderr(process)), asyncio.create_task(self._watch(process))]
        try:
            code = await process.wait()
            # Its last words; a grandchild may keep the pipe open for ever.
            await asyncio.wait(watchers[:1], timeout=_LAST_WORDS_SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            self._close_link()
            self._process = None
        why, self._kind = self._why(code)
        self._lost(why)
        return why

    async def _spawn(self) -> asyncio.subprocess.Process:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *self._command(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    env=engine_environment(os.environ),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                )
        except BaseException:
            ours.close()
            raise
        self._spawned = self._heard = self._clock()
        loop = asyncio.get_running_loop()
        _, self._link = await loop.create_connection(lambda: _Link(self._on_body, self._on_close), sock=ours)
        self.progress = 0.0
        self._link.send(self._next_load())
        return process

    def _next_load(self) -> Load:
        before = self._spec()
        return before if self._replacement is None else self._replacement.begin(before)

    def _close_link(self) -> None:
        if self._link is not None and self._link.transport is not None:
            self._link.transport.abort()
        self._link = None

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while chunk := await process.stderr.read(65536):
            for line in chunk.decode("utf-8", "replace").splitlines():
                self._stderr.append(line)
                log.warning("engine: %s", line)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Replace an engine that is silent: a ready one reports every second or step, one that loads its progress."""
        while True:
            settings = self._settings()
            limit = settings.hang_seconds if self._ready_at else settings.load_hang_seconds
            silent = self._clock() - self._heard
            if silent >= limit:
                self._hung = True
                process.send_signal(signal.SIGABRT)  # faulthandler writes the Python stacks to stderr
                await asyncio.sleep(_ABORT_SECONDS)
                process.kill()
                return
            await asyncio.sleep(max(0.05, min(1.0, limit - silent)))

    # -- what the engine says

    def _on_body(self, body: bytes) -> None:
        report = REPORT.validate_json(body)
        self._heard = self._clock()
        if isinstance(report, Step):
            self._on_step(report)
        elif isinstance(report, Loading):
            self.progress = report.progress
        elif isinstance(report, Ready):
            self._on_ready(report.info)
            self._counts.engine_started()
            self._on_residency(report.residency)
        elif isinstance(report, LoadFailed):
            self._load_failed = report
        else:
            self.snapshot = report

    def _on_close(self) -> None:
        """The socket closes before the process is reaped: what comes in between must wait, not be sent."""
        if self._listens:
            self._listens = False
            if self.state == "ready":
                self._change("restarting", "the engine closed its end")

    def _on_step(self, step: Step) -> None:
        if step.snapshot is not None:
            self.snapshot = step.snapshot
            if step.snapshot.residency is not None:
                self._on_residency(step.snapshot.residency)
        if self.listener is not None:
            for event in step.events:
                self.listener.deliver(event)
        if self.recordings is not None and step.recorded is not None:
            self.recordings.deliver(step.recorded)

    def _on_ready(self, info: ModelInfo) -> None:
        if self._replacement is not None and not self._replacement.begun:
            return  # it has been told to end
        self.info, self.progress = info, 1.0
        self._ready_at = self._clock()
        self.load_seconds = self._ready_at - self._spawned
        for warning in info.warnings:
            log.warning("%s", warning)
        log.info("engine ready in %.1f s: %s", self.load_seconds, info.description)
        self._listens = self.state != "stopped"
        if self._replacement is not None:
            self._replacement.ready()
            self._replacement = None
        self._change("ready", "")
        self.settled.set()
        if self.listener is not None:
            self.listener.engine_ready()

    def _on_residency(self, residency: Residency) -> None:
        """Said aloud whenever its reason is another one."""
        failed = residency.selftest == "failed"
        if residency.reason != self.residency.reason:
            log.log(logging.ERROR if failed else logging.INFO, "experts in VRAM are %s", residency.reason)
        if residency.selftest != self.residency.selftest and residency.selftest in ("passed", "skipped"):
            log.info("self-test of experts in VRAM %s: %s", residency.selftest, residency.selftest_detail)
        known, before = residency.remembered, self.residency.remembered
        if known.reason and known.reason != before.reason:
            log.info("slots for experts begin %s: %s", known.start, known.reason)
        if known.fault and known.fault != before.fault:
            log.warning("experts are not remembered: %s", known.fault)
        self.residency = residency
        self._counts.report(residency)

    def _change(self, state: State, reason: str) -> None:
        if self.state != "stopped":
            self.state, self.reason = state, reason

    def _lost(self, why: str) -> None:
        self._listens = False
        if self.state == "ready":
            self._change("restarting", why)
        self.reason = why if self.state != "stopped" else self.reason
        self.snapshot, self.residency = Snapshot(), _NO_ENGINE
        if self.recordings is not None:
            self.recordings.engine_lost(why)
        self._n_still_born = 0 if self._ready_at else self._n_still_born + 1
        if self.listener is not None:
            self.listener.engine_lost(f"The engine ended: {why}.")
            if self._n_still_born >= HOPELESS_LIVES or (self._load_failed is not None and self._load_failed.fatal):
                self._tell_unlikely(self.listener, why)

    def _tell_unlikely(self, listener: Listener, why: str) -> None:
        """A new load that fails is no reason: the one of before is tried after it."""
        if self._replacement is not None:
            if self._replacement.trying:
                return
            self._replacement.hopeless(why)
            self._replacement = None
        listener.engine_unlikely(f"The engine cannot be started: {why}.")

    def _why(self, code: int) -> tuple[str, RestartReason]:
        """Why the engine ended, in words and as a metric's label."""
        if self._replacement is not None and not self._replacement.begun:
            return "another one takes its place by order", "reload"
        if self._load_failed is not None:
            return self._load_failed.message, "load"
        if self._hung:
            return "it was silent for too long", "hang"
        if code < 0:
            return f"killed by {_signal_name(-code)}", "signal"
        return f"exit code {code}", "exit"

    def _next_delay(self) -> float:
        settings = self._settings()
        lived = self._clock() - self._ready_at if self._ready_at else 0.0
        if lived >= LONG_LIFE_SECONDS or not self._delay:
            self._delay = settings.restart_delay_seconds
        else:
            self._delay = min(self._delay * 2, settings.restart_delay_max_seconds)
        return self._delay


def _signal_name(number: int) -> str:
    """SIGKILL; real-time signals have no names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
