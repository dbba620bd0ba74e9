"""The subcommand `hotset bench soak`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from daemon.errors import EXIT_FAILURE
from hotset_tools.bench.residency_commands import JsonOption, OutOption

if TYPE_CHECKING:
    from hotset_tools.bench.soak import Report


def soak(
    model: Annotated[Path | None, typer.Option(help="Serve this model instead of the embedded one.")] = None,
    clients: Annotated[int, typer.Option(min=1, max=1000, help="Clients that ask at once, over and over.")] = 64,
    minutes: Annotated[float, typer.Option(min=0.05, max=10_000, help="How long they do.")] = 10.0,
    sequences: Annotated[int, typer.Option(min=1, max=64, help="Sequences that may run.")] = 8,
    threads: Annotated[int, typer.Option(min=0, help="Threads of the engine; 0: as many as cores.")] = 1,
    max_waiting: Annotated[int, typer.Option(min=0, max=100_000, help="Requests that may wait.")] = 32,
    margin: Annotated[int, typer.Option(min=1, max=100_000, help="MiB that are no growth of a process.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Of the clients' dice.")] = 1,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Many clients for minutes, some slow, some that leave: every answer whole, nothing grows; exit code 1 if not."""
    from daemon.model_files import EMBEDDED_MODEL
    from hotset_tools.bench import soak as bench
    from hotset_tools.bench.models import use_native_build

    use_native_build()
    settings = bench.Settings(model or EMBEDDED_MODEL, clients, minutes, sequences, threads, max_waiting, margin, seed)
    report = bench.run(settings, lambda line: typer.echo(line, err=True))
    text = json.dumps(report.as_json(), indent=2)
    if out is not None:
        out.write_text(text + "\n", "utf-8")
    typer.echo(text if as_json else table(report))
    if not report.ok:
        raise typer.Exit(EXIT_FAILURE)


def table(report: Report) -> str:
    """The result for people."""
    tally = report.tally
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(tally.by_outcome.items()))
    reasons = ", ".join(f"{count} {name}" for name, count in tally.rejected.items()) or "none"
    given_up = ", ".join(f"{count} {name}" for name, count in report.given_up.items())
    lines = [
        f"{tally.sent} requests: {outcomes}",
        f"rejected: {reasons}; connections given up: {given_up}",
        f"{tally.n_tokens} tokens in whole answers, {tally.n_same} answers token by token as alone",
        f"at most {report.max_running} ran and {report.max_waiting} waited",
    ]
    lines += [
        f"{one.process}: {one.warm >> 20} MiB after the warm-up, {one.end >> 20} at the end" for one in report.growths
    ]
    return "\n".join([*lines, *(f"FAULT {fault}" for fault in report.faults), "ok" if report.ok else "not ok"])
