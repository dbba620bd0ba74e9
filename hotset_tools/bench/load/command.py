"""`hotset bench load`: several people at once, hotsetd beside llama-server or any OpenAI-compatible servers."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated

import typer

from daemon.errors import HotsetError
from hotset_tools.bench import hardware
from hotset_tools.bench.clients import parse_url
from hotset_tools.bench.load.arms import Arm, Workload, race
from hotset_tools.bench.load.plan import MIXES, sources
from hotset_tools.bench.load.report import LoadRun, table
from hotset_tools.bench.load.runner import Patience


class BadLoad(HotsetError):
    """Options that do not fit together."""

    code = "bad_load"


def load(
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=URL or URL of a server to measure; may be repeated, the first is compared with the rest."
        ),
    ] = None,
    key: Annotated[str, typer.Option(envvar="HOTSET_BENCH_KEY", help="API key for all of them.")] = "",
    model: Annotated[
        str, typer.Option(help="With --url the name in requests, else a GGUF file instead of a generated model.")
    ] = "",
    mix: Annotated[str, typer.Option(help=f"What is sent: {', '.join(MIXES)}.")] = "chats+long",
    clients: Annotated[int, typer.Option(min=1, max=32, help="Clients, not counting the one with long prompts.")] = 8,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="Of arrivals for each server, all rounds.")] = 40.0,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Pieces of that; servers take turns.")] = 2,
    speed: Annotated[float, typer.Option(min=0.01, max=1000, help="Factor on all rates of arrival.")] = 1.0,
    burst: Annotated[float, typer.Option(min=0, max=600, help="Seconds whose requests come at once; 0: none.")] = 10.0,
    cached: Annotated[bool, typer.Option("--cached", help="Chats go on, and servers may remember prompts.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=1_000_000, help="Decides arrivals and texts.")] = 1,
    silence: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds that an answer may be silent.")] = 60.0,
    grace: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds for all after the last arrival.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Throughput and latencies under open-loop load: hotsetd and llama-server (`hotset build --peer`), or any --url."""
    if mix not in MIXES:
        raise typer.BadParameter(f"there is no mix {mix}; there are {', '.join(MIXES)}")
    try:
        wanted = sources(mix, clients)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    workload = Workload(wanted, seconds, rounds, seed, speed, burst, cached, model if url else "")
    patience = Patience(silence, grace)
    found = _of_urls(url, key, workload, patience) if url else _default(model, workload, patience)
    result = found.as_json()
    typer.echo(json.dumps(result, indent=2) if as_json else table(result))


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _default(model: str, workload: Workload, patience: Patience) -> LoadRun:
    from hotset_tools.bench.load import contest
    from hotset_tools.bench.models import generated, use_native_build

    if model and not Path(model).is_file():
        raise BadLoad(f"{model} is no file; without --url, --model is a GGUF file")
    use_native_build()
    return contest.run(Path(model).resolve() if model else generated("load"), workload, patience, _say)


def _of_urls(urls: list[str], key: str, workload: Workload, patience: Patience) -> LoadRun:
    arms = [arm(url, key) for url in urls]
    if len({one.name for one in arms}) < len(arms):
        raise BadLoad("two servers have the same name; --url NAME=URL gives them others")
    began = time.monotonic()
    ours, *peers = asyncio.run(race(arms, workload, patience, _say))
    passed = time.monotonic() - began
    return LoadRun(ours, tuple(peers), workload.as_json(), workload.model, hardware.describe(), passed)


def arm(text: str, key: str) -> Arm:
    """A server from NAME=URL or URL.

    Raises:
        BadUrl: it is none.
    """
    name, separator, url = text.partition("=")
    if not separator or "/" in name:
        name, url = text, text
    if not name:
        raise BadLoad(f"{text}: a name is missing before =")
    return Arm(name, parse_url(url, key), {"url": url})
