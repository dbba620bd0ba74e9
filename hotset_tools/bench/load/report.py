"""The result of a run: JSON for scripts, a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotset_tools.bench.load.comparison import best_peer, dominated_by, ratios
from hotset_tools.bench.load.figures import ServerFigures

BUSY = 0.1
"""Share of the machine used by others above which figures are doubtful."""

_DOMINATED = ("dominated_by", "dominated_by_time")


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One run; `ours` is None where only URLs of others were given."""

    ours: ServerFigures | None
    peers: tuple[ServerFigures, ...]
    workload: dict[str, object]
    model: str
    machine: dict[str, str | int]
    seconds: float

    @property
    def servers(self) -> tuple[ServerFigures, ...]:
        """All, ours first."""
        return (*((self.ours,) if self.ours else ()), *self.peers)

    def as_json(self) -> dict[str, object]:
        """As scripts read it. `ratios` are those to the peer with the highest throughput; every peer has its own."""
        best = best_peer(self.peers)
        return {
            "model": self.model,
            "machine": self.machine,
            "workload": self.workload,
            "seconds": self.seconds,
            "ours": self.ours.as_json() if self.ours else None,
            "peers": [self._peer(peer) for peer in self.peers],
            "ratios": ratios(self.ours, best).as_json() if self.ours and best else None,
            "dominated_by": dominated_by(self.ours, self.peers) if self.ours else [],
            "dominated_by_time": dominated_by(self.ours, self.peers, by_time=True) if self.ours else [],
            "notes": self.notes(),
        }

    def _peer(self, peer: ServerFigures) -> dict[str, object]:
        return {**peer.as_json(), "ratios": ratios(self.ours, peer).as_json() if self.ours else None}

    def notes(self) -> list[str]:
        """What a reader must know before believing the figures."""
        found = []
        for server in self.servers:
            if server.n_refused:
                found.append(f"{server.name}: {server.n_refused} requests were refused")
            if server.n_failed:
                found.append(f"{server.name}: {server.n_failed} requests failed")
            found += [f"{server.name}: {n} x {fault}" for fault, n in server.faults.items()]
            if server.others_cpu is not None and server.others_cpu > BUSY:
                found.append(f"{server.name}: others used {server.others_cpu:.0%} of the processors meanwhile")
            if server.late.p99 is not None and server.late.p99 > 0.05:
                found.append(f"{server.name}: requests were sent {server.late.p99:.2f} s late (99th percentile)")
        return found


def table(run: Mapping[str, Any]) -> str:
    """`LoadRun.as_json` (or what was read of a file with it) for people: Markdown."""
    servers = [*([run["ours"]] if run["ours"] else []), *run["peers"]]
    lines = [
        f"{run['model'] or 'model of the server'}, {_offer(run['workload'])}, {run['seconds']:.0f} s in all",
        "",
        "| server | tokens/s | at once | chats: gap p50 / p95 / p99 | by time p95 | per token p95 "
        "| TTFT short p50 / p95 / p99 | TTFT long p50 | whole |",
        "|---|---|---|---|---|---|---|---|---|",
        *map(_row, servers),
        "",
        *_by_kind(servers),
        *_verdict(run),
        *(f"- {note}" for note in run["notes"]),
    ]
    return "\n".join(lines).rstrip()


def _offer(workload: Mapping[str, Any]) -> str:
    who = ", ".join(f"{n} {kind}" for kind, n in workload["clients"].items())
    return f"clients: {who}, offered {workload['offered_tokens_per_second']:.0f} tokens/s"


def _row(server: Mapping[str, Any]) -> str:
    kinds = server["kinds"]
    chats = kinds.get("chat", {})
    cells = [
        server["name"],
        f"{server['throughput']:.1f}",
        "-" if server["capacity"] is None else f"{server['capacity']:.1f}",
        _spread(chats.get("itl_s"), 1e3, "ms"),
        _one(chats.get("itl_by_time_s"), "p95", 1e3, "ms"),
        _one(chats.get("tpot_s"), "p95", 1e3, "ms"),
        _spread(server["ttft_short_s"], 1, "s"),
        _one(kinds.get("long", {}).get("ttft_s"), "p50", 1, "s"),
        f"{sum(kind['whole'] for kind in kinds.values())} of {sum(kind['sent'] for kind in kinds.values())}",
    ]
    return f"| {' | '.join(cells)} |"


def _by_kind(servers: Sequence[Mapping[str, Any]]) -> list[str]:
    """A second table where there are more kinds than the first one shows."""
    if not {kind for server in servers for kind in server["kinds"]} - {"chat", "long"}:
        return []
    rows = [
        f"| {server['name']} | {kind} | {one['whole']} of {one['sent']} | {_spread(one['ttft_s'], 1, 's')} "
        f"| {_spread(one['itl_s'], 1e3, 'ms')} |"
        for server in servers
        for kind, one in server["kinds"].items()
    ]
    head = "| server | kind | whole | TTFT p50 / p95 / p99 | gap p50 / p95 / p99 |"
    return [head, "|---|---|---|---|---|", *rows, ""]


def _verdict(run: Mapping[str, Any]) -> list[str]:
    found = run["ratios"]
    if not found:
        return []
    words = ", ".join(f"{name} {value:.2f}" for name, value in found.items() if isinstance(value, float))
    better = " and with gaps by time ".join(", ".join(run[name]) or "none" for name in _DOMINATED)
    return [
        f"Ratios to {found['peer']} (highest throughput): {words}.",
        f"Better than ours in all three: {better}.",
        "",
    ]


def _spread(found: Mapping[str, Any] | None, factor: float, unit: str) -> str:
    """p50 / p95 / p99 with one unit."""
    if not found or found["p50"] is None:
        return "-"
    return f"{' / '.join(_number(found[name] * factor) for name in ('p50', 'p95', 'p99'))} {unit}"


def _one(found: Mapping[str, Any] | None, name: str, factor: float, unit: str) -> str:
    return "-" if not found or found[name] is None else f"{_number(found[name] * factor)} {unit}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
