"""Who sends what when: open-loop arrivals, decided before the run by a seed alone; pure.

Arrivals are a Poisson process for each client: the time to the next request is exponential and does not depend on
whether earlier ones were answered. A server that falls behind gets no fewer requests, so its waiting shows. A kind that
is `even` comes at equal distances instead, the first after a tenth of one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, takewhile
from typing import Literal

KindName = Literal["chat", "long", "title", "autocomplete"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request: tokens of its prompt and of its answer, and how often each client sends one (requests/s).

    Turn t of a chat has t earlier exchanges in its prompt; after `n_turns` it begins anew. `short` says whether its
    first token counts as that of a short request.
    """

    name: KindName
    n_prompt: int
    n_output: int
    rate: float
    short: bool = True
    n_turns: int = 1
    even: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """`n_clients` clients that send requests of one kind."""

    kind: Kind
    n_clients: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: `at` seconds after the start. `number` is its place in the plan, `turn` its place in its client."""

    at: float
    client: str
    kind: Kind
    number: int
    turn: int


CHAT = Kind("chat", 100, 128, 0.07, n_turns=4)
LONG = Kind("long", 4000, 16, 1 / 15, short=False, even=True)
TITLE = Kind("title", 120, 12, 0.125)
AUTOCOMPLETE = Kind("autocomplete", 200, 12, 0.25)

MIXES: dict[str, tuple[tuple[Kind, float], ...]] = {
    "chats+long": ((CHAT, 1.0), (LONG, 0.0)),
    "chats": ((CHAT, 1.0),),
    "office": ((CHAT, 0.5), (TITLE, 0.25), (AUTOCOMPLETE, 0.25), (LONG, 0.0)),
    "autocomplete": ((AUTOCOMPLETE, 1.0),),
}
"""Kinds with their share of the clients; a share of 0 is one more client, whoever else there is."""


def sources(mix: str, n_clients: int) -> tuple[Source, ...]:
    """The clients of a mix: shares are rounded so that they add up and every kind has at least one.

    Raises:
        ValueError: fewer clients than kinds.
    """
    shared = [(kind, share) for kind, share in MIXES[mix] if share > 0]
    if n_clients < len(shared):
        raise ValueError(f"the mix {mix} needs at least {len(shared)} clients")
    counts = [max(1, int(n_clients * share)) for _, share in shared]
    counts[0] += n_clients - sum(counts)
    extra = tuple(Source(kind, 1) for kind, share in MIXES[mix] if share == 0)
    return (*(Source(kind, count) for (kind, _), count in zip(shared, counts, strict=True)), *extra)


def arrivals(wanted: Sequence[Source], seconds: float, seed: int, speed: float = 1.0) -> tuple[Arrival, ...]:
    """Every request of `seconds`, in order of time. `speed` multiplies all rates.

    A client's requests depend on the seed, its kind and its number only, so that more clients or another kind leave it
    as it was.
    """
    found = [item for source in wanted for item in _of_source(source, seconds, seed, speed)]
    found.sort(key=lambda item: (item[0], item[1]))
    return tuple(Arrival(at, client, kind, number, turn) for number, (at, client, kind, turn) in enumerate(found))


def _of_source(source: Source, seconds: float, seed: int, speed: float) -> Iterator[tuple[float, str, Kind, int]]:
    for index in range(source.n_clients):
        client = f"{source.kind.name}-{index}"
        times = _times(random.Random(f"{seed}/{client}"), source.kind, speed)
        for turn, at in enumerate(takewhile(lambda at: at < seconds, times)):
            yield at, client, source.kind, turn


def _times(draw: random.Random, kind: Kind, speed: float) -> Iterator[float]:
    """Seconds of arrivals, without end."""
    rate = kind.rate * speed
    if kind.even:
        return count(0.1 / rate, 1 / rate)
    return accumulate(iter(lambda: draw.expovariate(rate), None))


def offered(plan: Sequence[Arrival], seconds: float) -> float:
    """Prompt and output tokens per second that the plan asks for."""
    return sum(item.kind.n_prompt + item.kind.n_output for item in plan) / seconds


def at_once(plan: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """The same requests, all at the start: what a server can do when it is never out of work."""
    return tuple(replace(item, at=0.0) for item in plan)
