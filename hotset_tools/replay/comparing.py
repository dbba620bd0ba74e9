"""Plays a trace to every policy and gathers the figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from daemon.errors import HotsetError
from daemon.hotset.allotment import LEAST_GAIN
from daemon.hotset.policy import Settings
from daemon.hotset.trace import Trace, read
from hotset_tools.hot_set.learning import percentages
from hotset_tools.replay import mixed, ours, rivals
from hotset_tools.replay.clairvoyant import Ids, clairvoyant
from hotset_tools.replay.meter import Meter, Tell
from hotset_tools.replay.report import Report, Row, Switch
from hotset_tools.replay.rivals import Played
from hotset_tools.replay.switches import tokens_to_90
from hotset_tools.reporter import Reporter, make_reporter

_MOST_STREAMS = 64

OURS, POOLED = "hotset", "hotset-pooled"

Players = Mapping[str, Callable[[Tell], Played]]
"""How to play each policy, and whom to tell how far that is."""


class CannotReplay(HotsetError):
    """What was asked makes no sense for this trace; the message says why."""

    code = "cannot_replay"


@dataclass(frozen=True)
class Request:
    """What to play; shares from 0 to 1, `uploads` per token, `widths` the tokens a step of each of several streams."""

    trace: Path
    shares: Sequence[float]
    uploads: float = 1.0
    settings: Settings = field(default_factory=Settings)
    widths: Sequence[int] = ()
    least_gain: float = LEAST_GAIN


def shares(text: str) -> list[float]:
    """What `--slots` asks for, ascending, each from 0 to 1.

    Raises:
        CannotLearn: one is no percentage.
    """
    return [percent / 100 for percent in percentages(text, "--slots")]


def widths(text: str) -> list[int]:
    """What `--streams` asks for.

    Raises:
        CannotReplay: it is no list of small numbers.
    """
    if not text:
        return []
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise CannotReplay(f"--streams: {text!r} is no list of numbers such as 1,1,1,1") from None
    if len(values) > _MOST_STREAMS or not all(1 <= value <= _MOST_STREAMS for value in values):
        raise CannotReplay(f"--streams: at most {_MOST_STREAMS} streams of 1 to {_MOST_STREAMS} tokens a step")
    return values


def compare(request: Request, *, json: bool = False) -> Report:
    """Play everything.

    Raises:
        TraceUnusable: the trace cannot be read.
        CannotReplay: it has too few segments for so many streams.
    """
    reporter = make_reporter(json=json)
    try:
        reporter.stage(f"reading {request.trace.name}")
        trace = read(request.trace)
        return _mixed(request, trace, reporter) if request.widths else _single(request, trace, reporter)
    finally:
        reporter.close()


def slots_of(trace: Trace, shares: Sequence[float]) -> npt.NDArray[np.int64]:
    """Slots of every layer for each share, at least one, [shares, layers]."""
    return np.maximum(1, np.round(np.outer(shares, trace.n_expert))).astype(np.int64)


def _single(request: Request, trace: Trace, reporter: Reporter) -> Report:
    ids, n_expert, slots = trace.ids, trace.n_expert, slots_of(trace, request.shares)
    segments = [tokens for _, tokens in trace.segments()]
    ruled = (request.uploads, request.settings)
    players: Players = {
        **{name: partial(rivals.play, score, ids, n_expert, slots) for name, score in rivals.RIVALS.items()},
        OURS: partial(ours.play, ours.single(ids), n_expert, slots, *ruled),
        POOLED: partial(ours.play_pooled, ids, n_expert, slots, *ruled, request.least_gain),
        "clairvoyant": lambda tell: Played(*clairvoyant(ids, max(n_expert), slots, tell)),
    }
    played = _all(players, reporter)
    best = [int(hits) for hits in played["clairvoyant"].hits.sum(axis=0)]
    rows = [row for name, result in played.items() for row in _rows(name, result, ids, request.shares, best)]
    lists = {"static": rivals.static(ids, n_expert, slots)}
    if len(segments) > 1:
        lists["frozen"] = rivals.frozen(ids, segments, n_expert, slots)
    for name, rates in lists.items():
        hits = np.array(rates) * ids.size
        rows += _rows(name, Played(hits[None], np.zeros(len(hits), np.int64)), ids, request.shares, best)
    switch = _switches(played[OURS], segments, request.shares)
    return Report(request.trace, trace.header, request.uploads, request.settings, rows, switch)


def _mixed(request: Request, trace: Trace, reporter: Reporter) -> Report:
    n_expert, slots = trace.n_expert, slots_of(trace, request.shares)
    segments = [tokens for _, tokens in trace.segments()]
    try:
        steps = list(mixed.deal(trace.ids, segments, request.widths))
    except ValueError as error:
        raise CannotReplay(f"{request.trace.name}: {error}") from None
    ids = np.concatenate([step.ids for step in steps])
    players: Players = {
        name: partial(ours.play_with, make, steps, n_expert, slots, request.uploads, request.settings)
        for name, make in mixed.meanings(n_expert, request.settings).items()
    }
    played = _all(players, reporter)
    rows = [row for name, result in played.items() for row in _rows(name, result, ids, request.shares)]
    return Report(request.trace, trace.header, request.uploads, request.settings, rows, None, tuple(request.widths))


def _all(players: Players, reporter: Reporter) -> dict[str, Played]:
    reporter.stage("policies, percent")
    meter = Meter(reporter, len(players))
    played = {}
    for name, play in players.items():
        played[name] = play(meter.worked)
        meter.ended()
    return played


def _rows(name: str, played: Played, ids: Ids, shares: Sequence[float], best: Sequence[int] | None = None) -> list[Row]:
    """A row of each share; `best` are the hits of the clairvoyant, which a trace without repetition has none of."""
    known = best if best is not None else [0] * len(shares)
    cases = zip(shares, played.hits.sum(axis=0), played.uploads, known, strict=True)
    return [
        Row(share, name, float(hits) / ids.size, float(hits) / most if most else None, float(uploads) / len(ids))
        for share, hits, uploads, most in cases
    ]


def _switches(played: Played, segments: Sequence[slice], shares: Sequence[float]) -> list[Switch]:
    each = [tokens_to_90(hits, segments) for hits in played.hits.T]
    return [Switch(share, float(median(one)), one) for share, one in zip(shares, each, strict=True) if one]
