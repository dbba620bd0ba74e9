"""Finds a running hotsetd by its control socket."""

from __future__ import annotations

import socket

from daemon import control
from daemon.errors import HotsetError

ANSWER_SECONDS = 60.0
"""A service that says nothing for so long is stuck."""


class NoService(HotsetError):
    """No running service could be asked, or several could."""

    code = "no_service"


def connect(pid: int = 0) -> socket.socket:
    """A connection to the service with this process id, 0 for the only one; reads end after `ANSWER_SECONDS`.

    Raises:
        NoService: none is there, or several are.
    """
    names = (path.stem for path in control.directory().glob("*.sock"))
    pids = [pid] if pid else sorted(int(name) for name in names if name.isdecimal())
    reached = {one: connection for one in pids if (connection := _try(one)) is not None}
    if len(reached) == 1:
        return reached.popitem()[1]
    for connection in reached.values():
        connection.close()
    if reached:
        raise NoService(f"several run, say which one: --pid {', --pid '.join(map(str, reached))}")
    raise NoService(f"no running hotsetd answers in {control.directory()}{f' as process {pid}' if pid else ''}")


def _try(pid: int) -> socket.socket | None:
    """A connection to that process; None when it left its socket behind, or there is none."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(ANSWER_SECONDS)
    try:
        connection.connect(str(control.socket_path(pid)))
    except OSError:
        connection.close()
        return None
    return connection
