"""Reads traces, learns from them, and writes the hot set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from daemon.errors import HotsetError
from daemon.hotset import files, hot_set
from daemon.hotset.budget import SizeOf
from daemon.hotset.hot_set import HotSet, Source
from daemon.hotset.placement import ExpertLayer, asked_bytes
from daemon.hotset.trace import MAX_SELECTIONS, Header, Trace, read
from daemon.native import gguf_check
from hotset_tools import output
from hotset_tools.hot_set import learning, ranking
from hotset_tools.planning import held_out
from hotset_tools.planning.report import Planned
from hotset_tools.reporter import Reporter, make_reporter

_SETS = ("_exps.", "_chexps.")
"""How tensors of a layer's first and second set of experts are called."""


class CannotPlan(HotsetError):
    """What was asked makes no sense for these traces, or the file cannot be written; the message says why."""

    code = "cannot_plan"


@dataclass(frozen=True)
class Request:
    """What to learn from what. One of `n_parts` of each segment is held out at a time; `model` knows experts' bytes."""

    traces: Sequence[Path]
    out: Path
    percentages: Sequence[float]
    n_parts: int
    model: Path | None = None


def percentages(text: str) -> list[float]:
    """What `--sizes` asks for, ascending.

    Raises:
        CannotLearn: one is no percentage, or there are too many.
        CannotPlan: one is there twice.
    """
    values = learning.percentages(text)
    if len(values) < len(text.split(",")):
        raise CannotPlan(f"--sizes: {text!r} names a size twice")
    return values


def plan(request: Request, *, json: bool = False) -> Planned:
    """Learn and write.

    Raises:
        TraceUnusable: a trace cannot be read.
        ModelUnusable: the model cannot be read.
        CannotPlan: traces do not belong together, or to the model, or the file cannot be written.
    """
    _check_target(request.out, request.traces)
    reporter = make_reporter(json=json)
    try:
        traces = _read(request.traces, reporter)
        first = traces[0].header
        weights = _weights(request.model, first) if request.model else None
        segments = ((name, trace.ids[tokens]) for trace in traces for name, tokens in trace.segments())
        topics = held_out.gather(segments)
        n_expert = traces[0].n_expert
        reporter.stage("counting")
        slots = np.array([ranking.slots(percent, n_expert) for percent in request.percentages])
        measured = held_out.measure(topics, n_expert, slots, request.n_parts, reporter.progress)
    finally:
        reporter.close()
    found = _hot_set(request, first, topics, measured)
    output.write(request.out, found.model_dump_json(exclude_defaults=True) + "\n")
    bytes_of = [asked_bytes(found, SizeOf(size.name), weights) for size in found.sizes] if weights else None
    return Planned(request.out, len(traces), found, request.n_parts, topics, measured, bytes_of)


def _check_target(out: Path, traces: Sequence[Path]) -> None:
    """Find out before any work; what is no hot set is not replaced, it might be one of the traces."""
    if obstacle := files.obstacle(out):
        raise CannotPlan(f"{out} cannot be written: {obstacle}")
    if out.exists():
        try:
            hot_set.read(out)
        except hot_set.HotSetUnusable:
            raise CannotPlan(f"{out} is there already and is no hot set; it is not replaced") from None
    seen: list[Path] = []
    for path in traces:
        if path.exists() and any(path.samefile(other) for other in seen):
            raise CannotPlan(f"{path} is given twice: what it holds would count twice")
        seen += [path] if path.exists() else []


def _read(paths: Sequence[Path], reporter: Reporter) -> list[Trace]:
    traces: list[Trace] = []
    left = MAX_SELECTIONS
    for path in paths:
        reporter.stage(f"reading {path.name}")
        trace = read(path)
        left -= trace.header.n_selections
        if left < 0:
            raise CannotPlan(f"the traces have more than {MAX_SELECTIONS:,} selections together: leave some out")
        if traces:
            _check_alike(paths[0].name, traces[0].header, path.name, trace.header)
        traces.append(trace)
    return traces


def _check_alike(first_name: str, first: Header, name: str, header: Header) -> None:
    if header.model.fingerprint != first.model.fingerprint:
        prints = [one.model.fingerprint[:12] for one in (first, header)]
        raise CannotPlan(
            f"{first_name} and {name} come from two models: their fingerprints begin with {prints[0]} and {prints[1]}"
        )
    if (header.layers, header.top_k) != (first.layers, first.top_k):
        raise CannotPlan(f"{first_name} and {name} do not have the same layers, though they name the same model")


def _weights(model: Path, header: Header) -> list[ExpertLayer]:
    file = gguf_check.check(model)
    if file.fingerprint != header.model.fingerprint:
        raise CannotPlan(
            f"{model.name} is not the model of the traces: its fingerprint begins with {file.fingerprint[:12]}, "
            f"theirs with {header.model.fingerprint[:12]}"
        )
    return list(_layers(file.facts, header))


def _layers(facts: gguf_check.ModelFacts, header: Header) -> Iterator[ExpertLayer]:
    for index, layer in enumerate(header.layers):
        tensors = facts.layers[layer.layer].experts if layer.layer < len(facts.layers) else ()
        own = [tensor for tensor in tensors if layer.set < len(_SETS) and _SETS[layer.set] in tensor.name]
        if {tensor.n_expert for tensor in own} != {layer.experts}:
            raise CannotPlan(f"layer {layer.layer} of the model has no set of {layer.experts} experts as the traces do")
        weight = sum(tensor.bytes_per_expert for tensor in own)
        yield ExpertLayer(index, (layer.layer, layer.set), layer.experts, weight, "")


def _hot_set(request: Request, header: Header, topics: Sequence[held_out.Topic], measured: held_out.Measured) -> HotSet:
    keys = [(layer.layer, layer.set) for layer in header.layers]
    counts = {
        key: [int(count) for count in row[: layer.experts]]
        for key, layer, row in zip(keys, header.layers, measured.counts, strict=True)
    }
    source = Source(
        texts=[topic.name for topic in topics],
        tokens=sum(topic.tokens for topic in topics),
        method=f"recorded routing: {header.method}" if header.method else "recorded routing",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return ranking.make(counts, request.percentages, header.model, source)
