"""`hotset hot-set`: write hot_set.json for a model from texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hotset_tools.options import MoeArgument, StandInOption, TextsOption, ThreadsOption, TokensOption

PROMPTS = Path(__file__).resolve().parents[2] / "models" / "prompts"


def command(
    model: MoeArgument,
    out: Annotated[Path, typer.Option(help="File to write; one that is there is replaced.")] = Path("hot_set.json"),
    prompts: TextsOption = None,
    sizes: Annotated[str, typer.Option(help="Percent of each layer's experts, separated by commas.")] = "25,50,75,100",
    tokens: TokensOption = 512,
    device: StandInOption = "auto",
    threads: ThreadsOption = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: what was written but the experts.")] = False,
) -> None:
    """Rank the experts of each layer by how often texts of yours use them, for residency.hot_set."""
    from hotset_tools.hot_set import learning

    texts = prompts or [PROMPTS]
    request = learning.Request(model, out, texts, tokens, device, threads, learning.percentages(sizes))
    written = learning.learn(request, json=as_json)
    print(json.dumps(written.as_json(), indent=2) if as_json else written.text())
