"""How well lists of the most used experts serve what they were not learned from: cross-validation. Pure.

A list for `n` slots of a layer holds the experts that were selected most often there; of equal ones the lower id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from daemon.hotset.allotment import Hits, allot, gain
from hotset_tools.replay.clairvoyant import Ids, Slots

Counts = npt.NDArray[np.int64]
"""Selections of each expert, [layers, n_expert of the largest layer]."""
Order = npt.NDArray[np.int64]
"""Experts of each layer, the most selected first, [layers, n_expert]."""

_CHUNK = 4096


@dataclass(frozen=True)
class Topic:
    """Segments of one name, ids [n_tokens, layers, top_k] each."""

    name: str
    segments: list[Ids] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """All of it."""
        return sum(map(len, self.segments))


@dataclass(frozen=True)
class Rates:
    """Shares of selections that each size serves, 0-1 [sizes]; None where nothing can be held out.

    `held_out`: parts of segments, by a list of the other parts. `new_topic`: topics, by a list of the others.
    """

    held_out: list[float] | None
    new_topic: list[float] | None


@dataclass(frozen=True)
class Shared:
    """Slots that go where they serve most, as many as equal shares have; shares of selections served, 0-1.

    `gain` is what they serve more than equal shares do, as a share of that: of what is held out, or of everything where
    nothing can be.
    """

    slots: list[int]
    coverage: float
    held_out: float | None
    gain: float


@dataclass(frozen=True)
class Measured:
    """`counts` of everything, and what is served of what was not learned from: all together, and each topic."""

    counts: Counts
    together: Rates
    by_topic: list[Rates]
    shared: list[Shared]


@dataclass(frozen=True)
class _Part:
    """Counts of a part and of everything else, and how experts rank there."""

    counts: Counts
    rest: Counts
    order: Order


def gather(segments: Iterable[tuple[str, Ids]]) -> list[Topic]:
    """Topics, in the order in which their names come first."""
    topics: dict[str, Topic] = {}
    for name, ids in segments:
        topics.setdefault(name, Topic(name)).segments.append(ids)
    return list(topics.values())


def measure(
    topics: Sequence[Topic], n_expert: Sequence[int], slots: Slots, n_parts: int, tell: Callable[[int, int], None]
) -> Measured:
    """Learn from everything; from all but one part of each segment, each in turn; from all topics but one, likewise.

    The parts of a segment are equally long pieces of it. Of single tokens here and there a list would know most: the
    tokens beside them choose nearly the same. `slots` [sizes, layers]. `tell` hears how many of how many counts are
    done. Topics are counted twice rather than kept: a trace of a large model may have thousands.
    """
    shape = (n_parts, len(n_expert), max(n_expert))
    by_part = np.zeros(shape, np.int64)
    for number, topic in enumerate(topics, 1):
        by_part += _count(topic, shape)
        tell(number, 2 * len(topics))
    whole, parts = by_part.sum(axis=0), _parts(by_part)
    held_out = new_topic = np.zeros(len(slots), np.int64)
    by_topic: list[Rates] = []
    for number, topic in enumerate(topics, 1):
        own = _count(topic, shape)
        of = own.sum(axis=0)
        held = sum((_served(part.order, one, slots) for part, one in zip(parts, own, strict=False)), 0 * held_out)
        new = _served(_order(whole - of), of, slots)
        by_topic.append(_rates(held, new, of, parts, topics))
        held_out, new_topic = held_out + held, new_topic + new
        tell(len(topics) + number, 2 * len(topics))
    top_k = topics[0].segments[0].shape[2]
    shared = [_share(whole, parts, n_expert, one, top_k) for one in slots]
    return Measured(whole, _rates(held_out, new_topic, whole, parts, topics), by_topic, shared)


def _count(topic: Topic, shape: tuple[int, int, int]) -> Counts:
    """Selections in each part, of the given [parts, layers, n_expert]."""
    n_parts, n_layers, most = shape
    first = np.arange(n_layers)[:, None] * most
    result = np.zeros((n_parts, n_layers * most), np.int64)
    for ids in topic.segments:
        for part, (start, end) in enumerate(pairwise(len(ids) * border // n_parts for border in range(n_parts + 1))):
            for at in range(start, end, _CHUNK):
                chunk = ids[at : min(at + _CHUNK, end)] + first
                result[part] += np.bincount(chunk.ravel(), minlength=n_layers * most)
    return result.reshape(shape)


def _parts(by_part: Counts) -> list[_Part]:
    """None where all tokens are in one part."""
    if np.count_nonzero(by_part.any(axis=(1, 2))) < 2:
        return []
    whole = by_part.sum(axis=0)
    return [_Part(counts, whole - counts, _order(whole - counts)) for counts in by_part]


def _order(counts: Counts) -> Order:
    return np.argsort(-counts, axis=1, kind="stable")


def _curve(order: Order, traffic: Counts) -> Hits:
    """Selections of `traffic` that 0 to n_expert slots serve."""
    hits = np.cumsum(np.take_along_axis(traffic, order, axis=1), axis=1)
    return np.pad(hits, ((0, 0), (1, 0))).astype(np.float64)


def _served(order: Order, traffic: Counts, slots: Slots) -> npt.NDArray[np.int64]:
    """Selections that each case serves, [cases]."""
    hits = _curve(order, traffic)
    found: npt.NDArray[np.int64] = hits[np.arange(len(hits)), slots].sum(axis=1).astype(np.int64)
    return found


def _rates(
    held_out: npt.NDArray[np.int64],
    new_topic: npt.NDArray[np.int64],
    of: Counts,
    parts: Sequence[_Part],
    topics: Sequence[Topic],
) -> Rates:
    total = int(of.sum())
    return Rates(
        [int(hits) / total for hits in held_out] if parts else None,
        [int(hits) / total for hits in new_topic] if len(topics) > 1 else None,
    )


def _share(
    whole: Counts, parts: Sequence[_Part], n_expert: Sequence[int], equal: npt.NDArray[np.int64], top_k: int
) -> Shared:
    """No layer gets less than a token chooses, or than the smallest equal share if that is less."""
    budget = int(equal.sum()) + len(n_expert)  # each layer with slots has one more, for zeros

    def by(hits: Hits) -> list[int]:
        return allot(hits, n_expert, [1] * len(n_expert), budget, min(top_k, int(equal.min())))

    learned = _curve(_order(whole), whole)
    slots = by(learned)
    if not parts:
        return Shared(slots, _coverage(learned, slots), None, gain(learned, list(equal), slots))
    tried = np.concatenate([_curve(part.order, part.counts) for part in parts])
    blind = [n for part in parts for n in by(_curve(part.order, part.rest))]
    better = gain(tried, [*equal] * len(parts), blind)
    return Shared(slots, _coverage(learned, slots), _coverage(tried, blind), better)


def _coverage(hits: Hits, slots: Sequence[int]) -> float:
    return float(hits[np.arange(len(hits)), slots].sum() / hits[:, -1].sum())
