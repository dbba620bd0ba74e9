"""The `hotset` command: a thin shell that imports the module of a subcommand only when that one is asked for."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from daemon import __version__
from daemon.errors import EXIT_FAILURE, HotsetError


class Entry(NamedTuple):
    """Where a subcommand lives: a function, or a typer app when it has subcommands of its own."""

    module: str
    attribute: str
    help: str


COMMANDS = {
    "bench": Entry("hotset_tools.bench", "app", "Measure the engine, and hotsetd beside llama-server."),
    "build": Entry("hotset_tools.build_command", "command", "Build the native library into the cache."),
    "demo": Entry("hotset_tools.demo", "command", "Serve with a CPU as the device, to watch experts move."),
    "doctor": Entry("hotset_tools.doctor", "command", "Tell what this machine has, lacks and would use."),
    "hot-set": Entry("hotset_tools.hot_set", "command", "Rank a model's experts by texts, for residency.hot_set."),
    "inspect": Entry("hotset_tools.inspect", "command", "Describe a GGUF file: experts, sizes, context."),
    "make-model": Entry("hotset_tools.make_model", "command", "Generate a model with random weights."),
    "patchset": Entry("hotset_tools.patchset_command", "app", "Check, apply and export the patch series."),
    "plan": Entry("hotset_tools.planning", "command", "Rank a model's experts by recordings, for residency.hot_set."),
    "record": Entry("hotset_tools.record", "command", "Record which experts a model or a running hotsetd chooses."),
    "reload": Entry("hotset_tools.reload", "command", "Let a running hotsetd read its configuration again."),
    "replay": Entry("hotset_tools.replay", "command", "Play a recording to the policy and to its rivals."),
    "top": Entry("hotset_tools.top", "command", "Show what a running hotsetd does with its experts."),
    "verify": Entry("hotset_tools.verify", "command", "Compare experts on a device with stock llama.cpp."),
}


def make_app(wanted: str | None) -> typer.Typer:
    """The whole command line; only the subcommand `wanted` is imported, the others are names with a line of help."""
    app = typer.Typer(
        name="hotset",
        help="Tools of hotset; the daemon itself is `hotsetd`.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_show_locals=False,
    )
    app.callback()(_callback)
    for name, entry in COMMANDS.items():
        target = getattr(importlib.import_module(entry.module), entry.attribute) if name == wanted else _unreached
        _register(app, name, target, entry.help)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of the console script. An error that this project raises on purpose is one message and exit code 1."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # ggml would start a debugger, whose output hides what it said
    if arguments is None:
        signal.signal(signal.SIGTERM, _end)
    wanted = next((word for word in words if not word.startswith("-")), None)
    try:
        make_app(wanted)(words)
    except HotsetError as error:
        print(f"hotset: {error.message}", file=sys.stderr)
        sys.exit(EXIT_FAILURE)


def _register(app: typer.Typer, name: str, target: typer.Typer | Callable[..., Any], text: str) -> None:
    if isinstance(target, typer.Typer):
        app.add_typer(target, name=name, help=text)
    else:
        app.command(name, help=text if target is _unreached else target.__doc__)(target)


def _end(number: int, _frame: object) -> None:
    """As Ctrl-C ends it: files that are not whole yet and children go too."""
    sys.exit(128 + number)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hotset {__version__}")
        raise typer.Exit


def _callback(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Options of the command itself."""


def _unreached() -> None:
    raise AssertionError("the subcommand that runs is always imported")


if __name__ == "__main__":
    main()
