"""`hotset reload`: let a running service read its configuration again, and tell what came of it."""

from __future__ import annotations

import socket
import sys
from typing import Annotated

import typer
from pydantic import ValidationError

from daemon import control
from daemon.errors import EXIT_CONFIG, HotsetError
from daemon.messages import Reload

ANSWER_SECONDS = 60.0


class NoService(HotsetError):
    """No running service could be asked, or several could."""

    code = "no_service"


def command(
    pid: Annotated[int, typer.Option(min=0, help="Process id of hotsetd; 0: the only one that runs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Let a running hotsetd read its configuration again: what applies, what waits, or why it was rejected (exit 78).

    It is found by a socket in $RUNTIME_DIRECTORY, or else in $XDG_RUNTIME_DIR; call it as the user that runs hotsetd.
    """
    outcome = ask(pid)
    if as_json:
        print(outcome.model_dump_json(indent=2))
    else:
        _print(outcome)
    if outcome.result == "rejected":
        raise typer.Exit(EXIT_CONFIG)


def ask(pid: int = 0) -> Reload:
    """Ask the service `pid`, 0 for the only one, and wait for its answer.

    Raises:
        NoService: none is there, several are, or it went away before it answered.
    """
    with _connect(pid) as connection:
        try:
            connection.sendall(control.RELOAD)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
            return Reload.model_validate_json(answer)
        except (OSError, ValidationError):
            raise NoService("hotsetd went away, or is stuck, before it answered; its log may say why") from None


def _connect(pid: int) -> socket.socket:
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


def _print(outcome: Reload) -> None:
    for key, what in outcome.faults:
        print(f"hotset: {key}: {what}" if key else f"hotset: {what}", file=sys.stderr)
    if outcome.result == "rejected":
        print("hotset: rejected; the last good configuration stays in force", file=sys.stderr)
    for change in outcome.applied:
        print(f"{change.key}: {change.old} -> {change.new} (in force)")
    for change in outcome.pending:
        print(f"{change.key}: {change.old} -> {change.new} ({change.effect}: waits until hotsetd is started again)")
    for key in outcome.shadowed:
        print(f"{key}: the environment of hotsetd overrides the file")
    if outcome.result == "unchanged" and not outcome.pending:
        print("nothing to change: what the file says is in force (hotsetd also reads a changed file by itself)")
