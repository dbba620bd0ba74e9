"""`hotset replay`: play a trace to the policy that moves experts, and to its rivals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from daemon.hotset.allotment import LEAST_GAIN
from daemon.hotset.policy import Settings

_DEFAULT = Settings()


def command(
    trace: Annotated[Path, typer.Argument(help="What `hotset record` wrote.")],
    slots: Annotated[str, typer.Option(help="Percent of each layer's experts, separated by commas.")] = "12.5,25,50",
    uploads: Annotated[float, typer.Option(min=0, max=1e6, help="Uploads per token that ours may do.")] = 1.0,
    half_life: Annotated[float, typer.Option(min=0.1, max=1e9, help="Tokens.")] = _DEFAULT.half_life,
    margin: Annotated[
        float, typer.Option(min=0, max=1e9, help="Heat by which a newcomer must exceed its victim.")
    ] = _DEFAULT.margin,
    streams: Annotated[
        str,
        typer.Option(help="Deal the segments to several sequences: tokens a step of each, such as 1,1,1,1."),
    ] = "",
    pool_gain: Annotated[
        float, typer.Option(min=0, max=10, help="Predicted gain at which layers share out their slots anew.")
    ] = LEAST_GAIN,
    plot: Annotated[Path | None, typer.Option(help="PNG file to draw; needs matplotlib.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the policy that moves experts with others and with the best that is possible, on recorded routing."""
    from hotset_tools.replay import comparing
    from hotset_tools.replay import plot as plotting

    request = comparing.Request(
        trace=trace,
        shares=comparing.shares(slots),
        uploads=uploads,
        settings=Settings(half_life, margin),
        widths=comparing.widths(streams),
        least_gain=pool_gain,
    )
    if plot is not None:
        plotting.check(plot, trace)
    report = comparing.compare(request, json=as_json)
    if plot is not None:
        plotting.draw(report, plot)
    print(json.dumps(report.as_json(), indent=2) if as_json else report.text())
