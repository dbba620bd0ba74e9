"""`hotset record`: which experts a model's router chooses while it writes given texts, as a trace."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from daemon.hotset import trace
from hotset_tools.hot_set import PROMPTS, learning
from hotset_tools.options import MoeArgument, StandInOption, TextsOption, ThreadsOption, TokensOption
from hotset_tools.reporter import make_reporter


def command(
    model: MoeArgument,
    out: Annotated[Path, typer.Option(help="File to write; one that is there is replaced.")],
    prompts: TextsOption = None,
    tokens: TokensOption = 512,
    device: StandInOption = "auto",
    threads: ThreadsOption = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: what was written but the ids.")] = False,
) -> None:
    """Record which experts a model chooses for each token of texts, decoded as if it had written them.

    Each text becomes a segment.
    """
    recorded = record(learning.Run(model, out, prompts or [PROMPTS], tokens, device, threads), json=as_json)
    print(json.dumps(recorded.as_json(), indent=2) if as_json else recorded.text())


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
        tokens, layers, top_k = self.header.shape
        shape = f"{tokens:,} tokens of {len(self.header.segments)} texts, {layers} layers, {top_k} experts each"
        return f"{self.path}: {shape}, {self.path.stat().st_size:,} bytes"


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
