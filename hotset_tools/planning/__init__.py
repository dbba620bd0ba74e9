"""`hotset plan`: write hot_set.json from recorded routing, with what it should serve beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    traces: Annotated[list[Path], typer.Argument(help="What `hotset record` wrote, all of one model.")],
    out: Annotated[Path, typer.Option(help="File to write; a hot set that is there is replaced.")],
    sizes: Annotated[str, typer.Option(help="Percent of each layer's experts, separated by commas.")] = "25,50,75,100",
    hold_out: Annotated[
        int, typer.Option(min=2, max=100, help="Parts of each segment, of which one at a time is held out.")
    ] = 5,
    model: Annotated[Path | None, typer.Option(help="GGUF file of the traces' model, to tell sizes in MiB.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: what was written but the experts.")] = False,
) -> None:
    """Rank the experts of each layer by recorded use, for residency.hot_set, and predict what each size serves."""
    from hotset_tools.planning import planning

    request = planning.Request(traces, out, planning.percentages(sizes), hold_out, model)
    planned = planning.plan(request, json=as_json)
    print(json.dumps(planned.as_json(), indent=2) if as_json else planned.text())
