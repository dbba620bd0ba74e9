"""`hotset verify`: whether experts in VRAM give the numbers that stock llama.cpp gives."""

from __future__ import annotations

import json as jsonlib
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from daemon.errors import EXIT_FAILURE, EXIT_USAGE, HotsetError
from daemon.native.process import die_with_parent
from hotset_tools.options import ThreadsOption, device_name


def command(
    model: Annotated[Path, typer.Argument(help="GGUF file with experts.", show_default=False)],
    device: Annotated[
        str | None,
        typer.Option(callback=device_name, help="As `hotset doctor` lists it, rpc:HOST:PORT, or cpu for a stand-in."),
    ] = None,
    threads: ThreadsOption = 0,
    seed: Annotated[int, typer.Option(min=0, help="Which experts become resident when.")] = 1,
    prompts: Annotated[Path | None, typer.Option(help="Text file to take the prompts from.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare experts on a device with stock llama.cpp; exit code 1 beyond tolerance, 2 if nothing can be compared."""
    parent = os.getpid()
    if child := os.fork():  # ggml ends the process whose device is gone
        raise typer.Exit(_end_of(child))
    die_with_parent(parent)
    from hotset_tools.bench.models import use_native_build
    from hotset_tools.verify import opening, report, run

    # There is nothing to tidy up, and an exception would be lost where the signal comes in a callback of llama.cpp.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        use_native_build()
        request = opening.Request(model, device, threads, seed, prompts)
        outcome = run.verify(request, lambda text: print(text, file=sys.stderr))
    except HotsetError as error:
        print(f"hotset: {error.message}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from None
    print(jsonlib.dumps(report.as_json(outcome), indent=2) if as_json else report.table(outcome))
    if not outcome.ok:
        raise typer.Exit(EXIT_FAILURE)


def _end_of(child: int) -> int:
    """The exit code that stands for a child's."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code >= 0:
        return code
    print(f"hotset: the comparison was ended by {signal.Signals(-code).name}, not by hotset", file=sys.stderr)
    return EXIT_USAGE
