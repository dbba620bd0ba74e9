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
from pathlib import Path

import structlog

from daemon.messages import LoadStep, Reload

RELOAD = b"reload\n"
"""Read the configuration again; answered by a `Reload`. To connect is no order: `hotset reload` does that to learn who
is there."""
LOAD, LOAD_AGAIN = b"load\n", b"load again\n"
"""The same and load what waits for it, or load in any case; answered by any number of `LoadStep`, then a `Reload`."""

Load = Callable[[bool, Callable[[LoadStep], None]], Awaitable[Reload]]

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
    reload: Callable[[], Awaitable[Reload]], load: Load, environ: Mapping[str, str] = os.environ
) -> AsyncIterator[None]:
    """Answer each order with the result of `reload` or `load`; without a socket the service goes on, and says so.

    An order is carried out to its end though the one who gave it leaves. `load` is told whether it was ordered in any
    case, and where its steps go.
    """
    answers = set[asyncio.Task[None]]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, ValueError):  # gone, or a line too long
            order = await reader.readline()
            if order == RELOAD:
                _say(writer, await reload())
            elif order in (LOAD, LOAD_AGAIN):
                _say(writer, await load(order == LOAD_AGAIN, lambda step: _say(writer, step)))
            await writer.drain()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(answer(reader, writer), name="reload order")
        answers.add(task)
        task.add_done_callback(answers.discard)

    path = socket_path(os.getpid(), environ)
    server: asyncio.Server | None = None
    try:
        _prepare(path)
        server = await asyncio.start_unix_server(connected, path)
        path.chmod(0o600)
    except OSError as error:
        log.warning("`hotset reload` cannot reach this service, SIGHUP can", reason=error.strerror or str(error))
    try:
        yield
    finally:
        if server is not None:
            server.close()
            path.unlink(missing_ok=True)
            for task in answers:
                task.cancel()
            await asyncio.gather(*answers, return_exceptions=True)


def _say(writer: asyncio.StreamWriter, message: Reload | LoadStep) -> None:
    if not writer.is_closing():
        writer.write(message.model_dump_json().encode() + b"\n")


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
