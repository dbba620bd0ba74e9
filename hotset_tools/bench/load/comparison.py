"""Ours beside the peers: ratios to the peer with the highest throughput, and whether a peer beats us in everything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hotset_tools.bench.load.figures import ServerFigures


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ours over the peer's; latencies are better below 1, rates above. None where one side has no figure."""

    peer: str
    p95_itl: float | None
    p95_itl_by_time: float | None
    p95_tpot: float | None
    p95_ttft_short: float | None
    throughput: float | None
    capacity: float | None

    def as_json(self) -> dict[str, object]:
        """As scripts read it."""
        return asdict(self)


def best_peer(peers: Sequence[ServerFigures]) -> ServerFigures | None:
    """The one with the highest throughput, the first of equals."""
    return max(peers, key=lambda peer: peer.throughput, default=None)


def ratios(ours: ServerFigures, peer: ServerFigures) -> Ratios:
    """Ours over `peer`'s; inter-token latencies are those of the chats."""
    itl, by_time, tpot = (_over(*pair) for pair in zip(_chats(ours), _chats(peer), strict=True))
    return Ratios(
        peer=peer.name,
        p95_itl=itl,
        p95_itl_by_time=by_time,
        p95_tpot=tpot,
        p95_ttft_short=_over(ours.ttft_short.p95, peer.ttft_short.p95),
        throughput=_over(ours.throughput, peer.throughput),
        capacity=_over(ours.capacity, peer.capacity),
    )


def dominated_by(ours: ServerFigures, peers: Sequence[ServerFigures], *, by_time: bool = False) -> list[str]:
    """Names of peers that are better in all three figures at once; a missing figure is worse than any.

    `by_time` takes the gaps weighted by their length.
    """
    mine = _figures(ours, by_time)
    return [peer.name for peer in peers if all(a < b for a, b in zip(_figures(peer, by_time), mine, strict=True))]


def _figures(server: ServerFigures, by_time: bool) -> tuple[float, float, float]:
    """The three figures, smaller is better."""
    itl = _chats(server)[1 if by_time else 0]
    ttft = server.ttft_short.p95
    return (math.inf if itl is None else itl, math.inf if ttft is None else ttft, -server.throughput)


def _chats(server: ServerFigures) -> tuple[float | None, float | None, float | None]:
    """95th percentiles of the chats: gaps, gaps by time, time per token of an answer."""
    chats = server.chats
    return (chats.itl.p95, chats.itl_by_time.p95, chats.tpot.p95) if chats else (None, None, None)


def _over(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None
