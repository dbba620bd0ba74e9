"""A Unix socket for the operator of this service: who sends an order is sent what comes of it, a line of JSON each.

It does not go through HTTP, because the address and the keys to call with may be the very thing that is to change.
File permissions decide who may connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import structlog
from pydantic import BaseModel

from daemon.messages import LoadStep, Reload

RELOAD = b"reload\n"
"""Read the configuration again; answered by a `Reload`. To connect is no order: `hotset reload` does that to learn who
is there."""
LOAD, LOAD_AGAIN = b"load\n", b"load again\n"
"""The same and load what waits for it, or load in any case; answered by any number of `LoadStep`, then a `Reload`."""
RECORD = b"record\n"
"""Record live routing; answered by a `Recording` and any number of `Recorded`, the last of which tells why it ended.
Who has sent all that it will send (a shutdown for writing, or the end of the connection) has recorded enough."""

MAX_BEHIND = 8 << 20
"""Bytes that may wait for who records."""
READ_SECONDS = 30.0
"""How long who recorded may take to read what waits."""

Load = Callable[[bool, Callable[[LoadStep], None]], Awaitable[Reload]]
Record = Callable[[Callable[[BaseModel], bool], Callable[[], Awaitable[object]]], Awaitable[None]]
"""`daemon.recording.Recordings.record`."""

log = structlog.get_logger("hotset.config")


def directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the sockets are, one a process: systemd's RUNTIME_DIRECTORY, the user's, or one of our own."""
    if given := environ.get("RUNTIME_DIRECTORY"):
        return Path(given.partition(":")[0])
    if given := environ.get("XDG_RUNTIME_DIR"):
        return Path(given) / "hotset"
    return Path(tempfile.gettempdir()) / f"hotset-{os.geteuid()}"


def socket_path(pid: int, environ: Mapping[str, str] = os.environ) -> Path:
    """The socket of the service with this process id."""
    return directory(environ) / f"{pid}.sock"


@contextlib.asynccontextmanager
async def listening(
    reload: Callable[[], Awaitable[Reload]], load: Load, record: Record, environ: Mapping[str, str] = os.environ
) -> AsyncIterator[None]:
    """Answer each order with the result of `reload`, `load` or `record`; without a socket the service goes on, and
    says so.

    But for `record`, an order is carried out to its end though the one who gave it leaves. `load` is told whether it
    was ordered in any case, and where its steps go.
    """
    answers = set[asyncio.Task[None]]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, ValueError):  # gone, or a line too long
            order = await reader.readline()
            if order == RELOAD:
                _say(writer, await reload())
            elif order in (LOAD, LOAD_AGAIN):
                _say(writer, await load(order == LOAD_AGAIN, lambda step: _say(writer, step)))
            elif order == RECORD:
                await record(partial(_tell, writer), partial(reader.read, 1))
                await _read_to_the_end(writer)
            await writer.drain()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(answer(reader, writer), name="order")
        answers.add(task)
        task.add_done_callback(answers.discard)

    path = socket_path(os.getpid(), environ)
    server: asyncio.Server | None = None
    try:
        _prepare(path)
        server = await asyncio.start_unix_server(connected, path)
        path.chmod(0o600)
    except OSError as error:
        reason = error.strerror or str(error)
        log.warning("`hotset reload` and `hotset record` cannot reach this service, SIGHUP can", reason=reason)
    try:
        yield
    finally:
        if server is not None:
            server.close()
            path.unlink(missing_ok=True)
            for task in answers:
                task.cancel()
            await asyncio.gather(*answers, return_exceptions=True)


def _say(writer: asyncio.StreamWriter, message: BaseModel) -> None:
    if not writer.is_closing():
        writer.write(message.model_dump_json().encode() + b"\n")


def _tell(writer: asyncio.StreamWriter, message: BaseModel) -> bool:
    """False when too much waits to be read."""
    _say(writer, message)
    return writer.transport.get_write_buffer_size() <= MAX_BEHIND


async def _read_to_the_end(writer: asyncio.StreamWriter) -> None:
    """Wait until little is left to be read, or drop it: a process that is stopped would keep it for ever."""
    try:
        async with asyncio.timeout(READ_SECONDS):
            await writer.drain()
    except TimeoutError:
        writer.transport.abort()


def _prepare(path: Path) -> None:
    """Make the directory; what another user could have put there is not used.

    Raises:
        OSError: there is no place for the socket.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise OSError(None, f"{path.parent} is not a directory of this user alone")
    path.unlink(missing_ok=True)
