"""`hotset record`: which experts a model's router chooses while it writes given texts, or answers, as a trace."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from daemon.errors import EXIT_FAILURE
from daemon.hotset import trace
from hotset_tools import record_live
from hotset_tools.hot_set import PROMPTS, learning
from hotset_tools.options import StandInOption, TextsOption, ThreadsOption
from hotset_tools.reporter import make_reporter

_OF_TEXTS = {"model": "MODEL", "prompts": "--prompts", "device": "--device", "threads": "--threads"}
_OF_A_DAEMON = {"pid": "--pid", "seconds": "--seconds"}


def command(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="File to write; one that is there is replaced.")],
    model: Annotated[
        Path | None, typer.Argument(help="GGUF file with experts; the first part of a split one. Not with --daemon.")
    ] = None,
    prompts: TextsOption = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, help="Of each text, 512 if not given; with --daemon of all answers."),
    ] = None,
    device: StandInOption = "auto",
    threads: ThreadsOption = 0,
    daemon: Annotated[bool, typer.Option("--daemon", help="Record what a running hotsetd decodes, not texts.")] = False,
    pid: Annotated[int, typer.Option(min=0, help="With --daemon: its process id; 0: the only one that runs.")] = 0,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, max=1e6, help="With --daemon: end after so many; else Ctrl-C ends it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: what was written but the ids.")] = False,
) -> None:
    """Record which experts a model chooses for each token of texts, decoded as if it had written them.

    Each text becomes a segment. With --daemon it is each answer that a running hotsetd decodes, until --tokens,
    --seconds, Ctrl-C or SIGTERM; what there is by then is written. It exits with 1 where something else ended it.
    """
    _check_options(context, daemon=daemon)
    recorded: Recorded | record_live.Written
    if daemon:
        recorded = record_live.record(record_live.Order(out, pid, tokens, seconds), json=as_json)
    elif model is None:
        raise typer.BadParameter("a model to run, or --daemon", param_hint="MODEL")
    else:
        recorded = record(learning.Run(model, out, prompts or [PROMPTS], tokens or 512, device, threads), json=as_json)
    print(json.dumps(recorded.as_json(), indent=2) if as_json else recorded.text())
    if isinstance(recorded, record_live.Written) and recorded.ended:
        raise typer.Exit(EXIT_FAILURE)


def _check_options(context: typer.Context, *, daemon: bool) -> None:
    """Options that would be ignored are refused.

    Raises:
        typer.BadParameter: one of them was given.
    """
    for name, shown in (_OF_TEXTS if daemon else _OF_A_DAEMON).items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"it does not go {'with' if daemon else 'without'} --daemon", param_hint=shown)


@dataclass(frozen=True)
class Recorded:
    """The file that was written."""

    path: Path
    header: trace.Header
    stand_in: bool

    def as_json(self) -> dict[str, Any]:
        """All of it but the ids."""
        size = self.path.stat().st_size
        return {"file": str(self.path), "bytes": size, "stand_in": self.stand_in, **self.header.model_dump()}

    def text(self) -> str:
        """The same for people."""
        return record_live.summary(self.path, self.header, "text")


def record(run: learning.Run, *, json: bool = False) -> Recorded:
    """Decode the texts in a child and write what the router chose.

    Raises:
        CannotLearn: a text cannot be read or nothing is to be recorded.
        ModelUnusable: the model cannot be read.
        TraceUnusable: the file cannot be written.
    """
    file = learning.check(run.model, run.out)
    texts = learning.read_texts(run.prompts)
    with tempfile.TemporaryDirectory() as directory:
        ids = Path(directory) / "ids.npy"
        counted, stand_in = learning.count(run.job(texts, str(ids)), make_reporter(json=json))
        chosen = np.sort(np.load(ids, allow_pickle=False), axis=-1)
    lengths = zip(texts, counted.lengths, strict=True)
    segments = [trace.Segment(name=Path(name).stem, tokens=length) for (name, _), length in lengths if length]
    if not segments:
        raise learning.CannotLearn("the texts have no token")
    layers = [trace.TraceLayer(layer=one.layer, set=one.set, experts=len(one.counts)) for one in counted.layers]
    header = trace.Header(
        model=learning.model_id(file),
        method=learning.METHOD,
        top_k=chosen.shape[2],
        layers=layers,
        segments=segments,
    )
    trace.write(run.out, trace.Trace(header, chosen))
    return Recorded(run.out, header, stand_in)
