"""`hotset demo`: experts that move, on a machine without a graphics card."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from daemon.errors import EXIT_CONFIG, ConfigError
from daemon.native import locate
from hotset_tools.demo import attending, settings
from hotset_tools.demo.traffic import Traffic, prompts, topics
from hotset_tools.stand_in import rpc_server
from hotset_tools.top.polling import Service

HOTSETD = (sys.executable, "-m", "daemon")
"""How the service is started; tests put another program in its place."""

_DEFAULT_CONFIG = Path("config.toml")


def command(
    config_file: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="As for hotsetd: config.toml if it is there.")
    ] = None,
    vram: Annotated[
        str, typer.Option(help="As residency.vram: how much of the experts the stand-in has room for.")
    ] = "25%",
    traffic: Annotated[bool, typer.Option("--traffic", help="Also send prompts that change their topic.")] = False,
) -> None:
    """Serve the embedded model with a CPU in place of a graphics card, so that moving experts can be watched.

    This is for looking, not for speed. HOTSET_MODEL_PATH names another model. Ctrl-C ends it, a second one at once.
    """
    file = config_file or (_DEFAULT_CONFIG if _DEFAULT_CONFIG.exists() else None)
    asked = topics() if traffic else {}
    with rpc_server(locate.require_build().directory) as server:
        try:
            found = settings.read(file, server.device, vram)
        except ConfigError as error:
            raise typer.Exit(_explain(error)) from None
        say("a CPU behind llama.cpp's RPC backend stands in for a graphics card. This is for looking, not for speed.")
        words = [*HOTSETD, *([str(file)] if file else [])]
        with attending.child(words, found.environment) as process:
            code = _attend(process, server.process, found, asked, vram)
    raise typer.Exit(code)


def _attend(
    process: attending.Process, stand_in: attending.Process, found: settings.Settings, asked: dict[str, str], vram: str
) -> int:
    client = Traffic(found.url, found.key, prompts(asked), say)
    service = Service(found.url, found.key)

    def announce() -> None:
        _tell(found, vram, traffic=bool(asked))
        if asked:
            client.start()

    with attending.passing_on(process, client.stop):
        return attending.attend(process, stand_in, lambda: service.read().state in ("ready", "refused"), announce, say)


def say(text: str) -> None:
    """A line of the demo's own, among those of the service's log."""
    print(f"hotset demo: {text}", flush=True)


def _tell(found: settings.Settings, vram: str, *, traffic: bool) -> None:
    own = sys.argv[0] if Path(sys.argv[0]).name == "hotset" else "hotset"
    key = " (with a key of http.keys in HOTSET_KEY)" if found.key else ""
    say(f"serving on {found.url}; the stand-in has room for {vram} of the experts. Watch it from elsewhere{key}:")
    _show([own, "top", "--url", found.url])
    _show(["curl", "-s", f"{found.url}/v1/residency"])
    say(
        "prompts of changing topics are sent"
        if traffic
        else "experts move when it is asked something: chat with it, or --traffic"
    )


def _show(words: Sequence[str]) -> None:
    print(f"    {' '.join(words)}", flush=True)


def _explain(error: ConfigError) -> int:
    for key, what in error.problems:
        print(f"hotset: {key}: {what}" if key else f"hotset: {what}", file=sys.stderr)
    return EXIT_CONFIG
