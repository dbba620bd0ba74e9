"""`hotset reload`: let a running service read its configuration again, or load anew, and tell what came of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from daemon import control
from daemon.errors import EXIT_CONFIG, EXIT_FAILURE
from daemon.messages import Change, LoadResult, LoadStep, Reload
from hotset_tools.service import NoService, connect

_ANSWER: TypeAdapter[LoadStep | Reload] = TypeAdapter(LoadStep | Reload)
_TENTHS = 10


def command(
    load: Annotated[
        bool, typer.Option("--load", help="Also load what waits for it: another engine takes the place of this one.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --load: though no key has changed, because files behind them have.")
    ] = False,
    pid: Annotated[int, typer.Option(min=0, help="Process id of hotsetd; 0: the only one that runs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Let a running hotsetd read its configuration again: what applies, what waits, or why it was rejected (exit 78).

    With --load, answers that run may finish (http.shutdown_seconds), requests wait in the queue, and an engine with the
    new model, context or device serves them. If it cannot be loaded, the one of before goes on (exit 1).
    hotsetd is found by a socket in $RUNTIME_DIRECTORY, or else in $XDG_RUNTIME_DIR; call this as the user that runs it.
    """
    if force and not load:
        raise typer.BadParameter("it goes with --load only", param_hint="--force")
    order = (control.LOAD_AGAIN if force else control.LOAD) if load else control.RELOAD
    outcome = ask(pid, order, _ignore if as_json else Progress())
    if as_json:
        print(outcome.model_dump_json(indent=2))
    else:
        _print(outcome)
    if outcome.result == "rejected":
        raise typer.Exit(EXIT_CONFIG)
    if outcome.load is not None and outcome.load.result in ("failed", "refused"):
        raise typer.Exit(EXIT_FAILURE)


def ask(pid: int = 0, order: bytes = control.RELOAD, say: Callable[[LoadStep], None] = lambda _: None) -> Reload:
    """Give the service `pid`, 0 for the only one, an order and wait for what comes of it; `say` is told the steps.

    Raises:
        NoService: none is there, several are, or it went away before it answered.
    """
    with connect(pid) as connection, connection.makefile("rb") as answers:
        try:
            connection.sendall(order)
            for line in answers:
                answer = _ANSWER.validate_json(line)
                if isinstance(answer, Reload):
                    return answer
                say(answer)
        except (OSError, ValidationError):
            pass
    raise NoService("hotsetd went away, or is stuck, before it answered; its log may say why")


def _ignore(step: LoadStep) -> None:
    pass


class Progress:
    """Lines on stderr: a new stage, another number of running answers, another tenth of the model."""

    def __init__(self) -> None:
        self._told = ""

    def __call__(self, step: LoadStep) -> None:
        """Tell a step, unless it reads as the last one did."""
        line = _line(step)
        if line != self._told:
            self._told = line
            print(line, file=sys.stderr, flush=True)


def _line(step: LoadStep) -> str:
    if step.stage == "text":
        return "reading the vocabulary"
    if step.stage == "draining":
        return f"draining: {_answers(step.running, 'still runs', 'still run')}"
    percent = int(step.progress * _TENTHS) * (100 // _TENTHS)
    return f"{'loading' if step.stage == 'loading' else 'loading what was served before'}: {percent} %"


def _answers(count: int, one: str, several: str) -> str:
    return f"1 answer {one}" if count == 1 else f"{count} answers {several}"


_WAITS_FOR = {
    "live": "waits for what it goes with",
    "next load": "waits for `hotset reload --load`",
    "restart": "waits until hotsetd is started again",
}


def _print(outcome: Reload) -> None:
    for key, what in outcome.faults:
        print(f"hotset: {key}: {what}" if key else f"hotset: {what}", file=sys.stderr)
    if outcome.result == "rejected":
        print("hotset: rejected; the last good configuration stays in force", file=sys.stderr)
    for change in outcome.applied:
        print(f"{_changed(change)} (in force)")
    for change in outcome.load.loaded if outcome.load else []:
        print(f"{_changed(change)} (loaded)")
    for change in outcome.pending:
        print(f"{_changed(change)} ({change.effect}: {_WAITS_FOR[change.effect]})")
    for key in outcome.shadowed:
        print(f"{key}: the environment of hotsetd overrides the file")
    if outcome.load is not None:
        _print_load(outcome.load)
    elif outcome.result == "unchanged" and not outcome.pending:
        print("nothing to change: what the file says is in force (hotsetd also reads a changed file by itself)")


def _changed(change: Change) -> str:
    return f"{change.key}: {change.old} -> {change.new}"


def _print_load(load: LoadResult) -> None:
    if load.cut_off:
        print(f"{_answers(load.cut_off, 'was', 'were')} ended: http.shutdown_seconds was over")
    if load.result == "loaded":
        print(f"ready in {load.seconds:.1f} s")
    elif load.result == "nothing":
        print("nothing to load: no changed key waits for it (--force loads the same again)")
    elif load.result == "refused":
        print(f"hotset: not loaded: {load.reason}", file=sys.stderr)
    else:
        print(f"hotset: the load failed, nothing that waits for it is in force: {load.reason}", file=sys.stderr)
