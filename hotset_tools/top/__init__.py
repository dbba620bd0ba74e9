"""`hotset top`: what a running service does with its experts, live or once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from daemon.errors import EXIT_FAILURE
from hotset_tools.top.drawing import Drawing
from hotset_tools.top.picture import Picture
from hotset_tools.top.polling import KEY_VARIABLE, Reading, Service, base_url

DEFAULT_URL = "http://127.0.0.1:8117"


def _address(text: str) -> str:
    try:
        return base_url(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _key(text: str) -> str:
    if not text.isascii() or not text.isprintable() or " " in text:
        raise typer.BadParameter("a key has printable ASCII characters only, and no spaces")
    return text


def command(
    url: Annotated[str, typer.Option(callback=_address, help="Where hotsetd listens.")] = DEFAULT_URL,
    key: Annotated[
        str, typer.Option(envvar=KEY_VARIABLE, callback=_key, help="A key of http.keys; others may see it here.")
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="Look twice, print one picture, and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")] = 1.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: with --once one object, else one a line.")
    ] = False,
) -> None:
    """Show what a running hotsetd does with its experts: hit rate, moves, tokens per second, budgets, layers.

    It keeps trying while hotsetd is away, and ends with Ctrl-C. With --once the exit code is 1 unless hotsetd is ready.
    """
    service = Service(url, key)
    if once:
        if not show_once(service.url, service.read, lambda: time.sleep(interval), as_json=as_json):
            raise typer.Exit(EXIT_FAILURE)
        return
    try:
        watch(service.url, service.read, lambda: time.sleep(interval), as_json=as_json)
    except KeyboardInterrupt:
        return


def show_once(url: str, read: Callable[[], Reading], wait: Callable[[], None], *, as_json: bool) -> bool:
    """One picture, of two looks where the first finds a service that is ready; whether the last one did."""
    shown = Picture(url, read())
    if shown.good:
        wait()
        shown = Picture(url, read(), shown.now)
    if as_json:
        print(json.dumps(shown.as_json(), indent=2))
    else:
        Console().print(Drawing(shown))
    return shown.good


def watch(
    url: str,
    read: Callable[[], Reading],
    wait: Callable[[], None],
    *,
    as_json: bool = False,
    console: Console | None = None,
) -> None:
    """Pictures until interrupted: in place on a terminal, else one after the other."""
    out = console or Console()
    shown = pictures(url, read, wait)
    if as_json:
        for picture in shown:
            print(json.dumps(picture.as_json()), flush=True)
    elif out.is_terminal and not out.is_dumb_terminal:
        with Live(console=out, screen=True, auto_refresh=False) as live:
            for picture in shown:
                live.update(Drawing(picture, whole=False), refresh=True)
    else:
        for picture in shown:
            out.print(Drawing(picture))
            out.print()


def pictures(url: str, read: Callable[[], Reading], wait: Callable[[], None]) -> Iterator[Picture]:
    """One after each wait, for ever."""
    before: Reading | None = None
    while True:
        now = read()
        yield Picture(url, now, before)
        before = now
        wait()
