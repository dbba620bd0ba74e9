"""`hotset record --daemon`: what a running service's models choose while it answers, as a trace."""

from __future__ import annotations

import base64
import contextlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter
from rich.console import Console

from daemon import control
from daemon.errors import HotsetError
from daemon.hotset import files, trace
from daemon.hotset.answers import Answers
from daemon.hotset.files import ModelId
from daemon.messages import Recorded, Recording
from hotset_tools.service import connect
from hotset_tools.signals import calling

METHOD = "live: the decode steps of a running hotsetd"
SHOW_SECONDS = 10.0
"""How often it is said how far a recording is, where that is no terminal."""

_LINE: TypeAdapter[Recording | Recorded] = TypeAdapter(Recording | Recorded)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class CannotRecord(HotsetError):
    """The service records nothing now, nothing came of it, or the file cannot be written; the message says which."""

    code = "cannot_record"


class Shown:
    """How far it is, on stderr: lines, one each `SHOW_SECONDS` at most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()

    def say(self, text: str) -> None:
        """What stays on the screen."""
        print(text, file=sys.stderr, flush=True)

    def progress(self, text: str) -> None:
        """What is true until the next one."""
        now = self._clock()
        if now - self._at >= SHOW_SECONDS:
            self._at = now
            self.say(text)

    def close(self) -> None:
        """The work is over."""


class Silent(Shown):
    """Nothing; beside JSON."""

    def say(self, text: str) -> None:
        """Ignored."""


class OnTerminal(Shown):
    """One line that changes, below what stays."""

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(stderr=True)
        self._status = self._console.status("waiting for hotsetd")
        self._status.start()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def progress(self, text: str) -> None:
        self._status.update(text)

    def close(self) -> None:
        self._status.stop()


def make_shown(*, json: bool) -> Shown:
    """For this process."""
    if json:
        return Silent()
    return OnTerminal() if sys.stderr.isatty() else Shown()


@dataclass(frozen=True)
class Order:
    """What to record: of the service `pid`, 0 for the only one, at most so many tokens and seconds; None: no limit."""

    out: Path
    pid: int = 0
    tokens: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Written:
    """The file that was written. `ended` is why, "" where that was asked for."""

    path: Path
    header: trace.Header
    left_out: list[int]
    ended: str

    def as_json(self) -> dict[str, Any]:
        """All of it but the ids."""
        about = {"file": str(self.path), "bytes": self.path.stat().st_size, "ended": self.ended}
        return {**about, "left_out": self.left_out, **self.header.model_dump()}

    def text(self) -> str:
        """The same for people."""
        return summary(self.path, self.header, "answer")


def summary(path: Path, header: trace.Header, part: str) -> str:
    """A trace in one line; `part` is what a segment is."""
    tokens, layers, top_k = header.shape
    counts = f"{_count(tokens, 'token')} of {_count(len(header.segments), part)}"
    shape = f"{counts}, {_count(layers, 'layer')}, {_count(top_k, 'expert')} each"
    return f"{path}: {shape}, {path.stat().st_size:,} bytes"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


class Stoppable(Protocol):
    """What a signal ends."""

    stopped: bool

    def stop(self) -> None:
        """Enough; sets `stopped`."""


class Session:
    """One recording over a connection to the service.

    `ended` is why it has ended, "" where that was asked for; `stop` may be called by a signal's handler and by any
    thread.
    """

    def __init__(self, connection: socket.socket, order: Order, shown: Shown) -> None:
        self._connection, self._order, self._shown = connection, order, shown
        self.stopped = False
        self.ended: str | None = None
        self.recording: Recording | None = None
        self.answers: Answers | None = None
        self.begun = ""
        self._alarm: threading.Timer | None = None

    def stop(self) -> None:
        """It is enough: the service sends what is left, and the end."""
        self.stopped = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def run(self) -> None:
        """Take what comes until it has ended, by whomever.

        Raises:
            CannotRecord: the service refuses.
        """
        try:
            self._connection.sendall(control.RECORD)
            with self._connection.makefile("rb") as lines:
                for line in lines:
                    self._take(_LINE.validate_json(line))
        except KeyboardInterrupt:
            pass  # told to stop for the second time: it does not wait for what is left
        except (OSError, ValueError):  # it does not answer, or not so that it can be understood
            self.ended = self.ended if self.stopped else "hotsetd is stuck, or sent what is no recording"
        finally:
            if self._alarm is not None:
                self._alarm.cancel()
        if self.ended is None:
            self.ended = "" if self.stopped else "hotsetd went away"

    def _take(self, line: Recording | Recorded) -> None:
        if isinstance(line, Recording):
            self._begin(line)
            return
        if self.answers is None:
            if line.ended is not None:
                raise CannotRecord(f"hotsetd records nothing now: {line.ended}")
            return
        self.answers.add(line.answers, base64.b64decode(line.ids, validate=True))
        tokens, answers = _count(self.answers.n_tokens, "token"), _count(len(self.answers), "answer")
        self._shown.progress(f"recorded {tokens} of {answers}")
        if line.ended is not None:
            self.ended = line.ended
        elif self.answers.full and not self.stopped:
            self._shown.say(self.answers.full)
            self.stop()

    def _begin(self, recording: Recording) -> None:
        scope, order = recording.scope, self._order
        layers = [trace.TraceLayer(layer=one.layer, set=one.set, experts=one.experts) for one in scope.layers]
        self.recording = recording
        self.answers = Answers(layers, scope.top_k, order.tokens or trace.MAX_SELECTIONS)
        self.begun = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S")
        what = f"{_count(len(layers), 'layer')} of {recording.name}"
        self._shown.say(f"recording {what} while it answers; Ctrl-C ends it")
        if scope.left_out:
            numbers = ", ".join(map(str, scope.left_out))
            self._shown.say(f"left out, because their routing is not read: layers {numbers}")
        if order.seconds is not None:
            self._alarm = threading.Timer(order.seconds, self.stop)
            self._alarm.daemon = True
            self._alarm.start()


def record(order: Order, *, json: bool = False) -> Written:
    """Record until there is enough, Ctrl-C or SIGTERM comes, or the service ends it; write what there is by then.

    Raises:
        NoService: no service could be asked.
        CannotRecord: it refuses, no token came, or the file cannot be there.
        TraceUnusable: the file cannot be written.
    """
    check(order.out)
    shown = make_shown(json=json)
    try:
        with connect(order.pid) as connection:
            session = Session(connection, order, shown)
            with heeding_signals(session):
                session.run()
        return write(session, order.out, shown)
    finally:
        shown.close()


def check(out: Path) -> None:
    """Find out before anything is recorded whether `out` can be written; only a trace is replaced.

    Raises:
        CannotRecord: it cannot.
    """
    if obstacle := files.obstacle(out):
        raise CannotRecord(f"{out} cannot be written: {obstacle}")
    if out.exists() and not trace.begins_one(out):
        raise CannotRecord(f"{out} is there already and is no trace; it is not replaced")


def write(session: Session, out: Path, shown: Shown) -> Written:
    """Write what a session that has ended recorded.

    Raises:
        CannotRecord: that is nothing.
        TraceUnusable: the file cannot be written.
    """
    recording, answers, why = session.recording, session.answers, session.ended or ""
    if recording is None or answers is None or not answers.n_tokens:
        raise CannotRecord(f"nothing was recorded: {why or 'no answer was decoded'}")
    if why:
        shown.say(f"the recording has ended early: {why}")
    shown.progress("writing")
    model = ModelId(fingerprint=recording.fingerprint, name=recording.name, architecture=recording.architecture)
    made = answers.trace(model, METHOD, session.begun)
    trace.write(out, made)
    return Written(out, made.header, recording.scope.left_out, why)


@contextlib.contextmanager
def heeding_signals(session: Stoppable) -> Iterator[None]:
    """The first signal to end stops the recording, the second one does not wait. One that is ignored stays so."""

    def heed() -> None:
        if session.stopped:
            raise KeyboardInterrupt
        session.stop()

    with calling(heed, _SIGNALS):
        yield
