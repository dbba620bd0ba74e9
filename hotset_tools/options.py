"""What options of several tools share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def device_name(name: str | None) -> str | None:
    """An option's value, unless it is empty, which names no device.

    Raises:
        typer.BadParameter: it is.
    """
    if name is not None and not name.strip():
        raise typer.BadParameter("an empty text is no name of a device")
    return name


MoeArgument = Annotated[Path, typer.Argument(help="GGUF file with experts; the first part of a split one.")]
TextsOption = Annotated[
    list[Path] | None, typer.Option("--prompts", help="Text file, or directory of .txt files; may be repeated.")
]
TokensOption = Annotated[int, typer.Option("--tokens", min=1, max=1_000_000, help="Tokens of each text that are used.")]
StandInOption = Annotated[
    str,
    typer.Option(
        "--device", callback=device_name, help="As engine.device; where that gives none, a CPU stands in for one."
    ),
]
ThreadsOption = Annotated[int, typer.Option("--threads", min=0, max=1024, help="0: one for each physical core.")]
