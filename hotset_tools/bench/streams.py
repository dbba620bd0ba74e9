"""`hotset bench streams`: tokens per second of several streaming clients, hotsetd and llama-server in turn."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from daemon.model_files import EMBEDDED_MODEL
from hotset_tools.bench import servers
from hotset_tools.bench.clients import Answer, stream_together

N_CTX = 2048


@dataclass(frozen=True, slots=True)
class Arm:
    """One server's rounds; tokens per second of all clients together, and seconds to the first token."""

    name: str
    rates: tuple[float, ...]
    first_tokens: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.rates)

    def as_json(self) -> dict[str, object]:
        """As scripts read it."""
        return {
            "name": self.name,
            "tokens_per_second": self.rate,
            "rounds": list(self.rates),
            "ttft_s": {"p50": statistics.median(self.first_tokens), "max": max(self.first_tokens)},
        }


@dataclass(frozen=True, slots=True)
class StreamsRun:
    """Both arms of one run."""

    model: str
    n_clients: int
    n_tokens: int
    ours: Arm
    peer: Arm

    @property
    def ratios(self) -> tuple[float, ...]:
        """Ours over the peer's, round by round: what disturbs the machine for longer than a round meets both."""
        return tuple(ours / peer for ours, peer in zip(self.ours.rates, self.peer.rates, strict=True))

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios."""
        return statistics.median(self.ratios)

    def as_json(self) -> dict[str, object]:
        """As scripts read it."""
        return {
            "model": self.model,
            "clients": self.n_clients,
            "tokens_each": self.n_tokens,
            "ours": self.ours.as_json(),
            "peer": self.peer.as_json(),
            "ratio": self.ratio,
            "ratios": list(self.ratios),
        }


def run(model: Path | None, *, n_clients: int, n_tokens: int, n_rounds: int) -> StreamsRun:
    """Both servers are up; they are measured in turn, so that whatever disturbs the machine meets both.

    Raises:
        PeerMissing: no llama-server.
        HotsetError: a server did not start.
    """
    path = model or EMBEDDED_MODEL
    n_ctx = max(N_CTX, n_tokens + 256)
    with tempfile.TemporaryDirectory() as directory:
        logs = Path(directory)
        with (
            servers.hotsetd(path, n_clients, n_ctx, logs / "hotsetd.log") as ours,
            servers.llama_server(path, n_clients, n_ctx, logs / "llama-server.log") as peer,
        ):
            rounds = asyncio.run(_alternate((ours.port, peer.port), n_clients, n_tokens, n_rounds))
    arms = (_arm("hotsetd", rounds[ours.port]), _arm("llama-server", rounds[peer.port]))
    return StreamsRun(path.name, n_clients, n_tokens, *arms)


async def _alternate(
    ports: tuple[int, int], n_clients: int, n_tokens: int, n_rounds: int
) -> dict[int, list[list[Answer]]]:
    rounds: dict[int, list[list[Answer]]] = {port: [] for port in ports}
    for port in ports:
        await stream_together(port, n_clients, min(n_tokens, 32), 10_000)  # warm-up, not counted
    for number in range(n_rounds):
        for port in ports if number % 2 == 0 else ports[::-1]:
            rounds[port].append(await stream_together(port, n_clients, n_tokens, number))
    return rounds


def _arm(name: str, rounds: list[list[Answer]]) -> Arm:
    rates = tuple(sum(a.n_tokens for a in answers) / max(a.last for a in answers) for answers in rounds)
    return Arm(name, rates, tuple(a.first for answers in rounds for a in answers))


def table(result: StreamsRun) -> str:
    """The result for people."""
    lines = [f"model {result.model}, {result.n_clients} clients, {result.n_tokens} tokens each"]
    for arm in (result.ours, result.peer):
        spread = f"{min(arm.rates):.1f}-{max(arm.rates):.1f}"
        first = statistics.median(arm.first_tokens) * 1e3
        lines.append(f"{arm.name:13s} {arm.rate:8.1f} tok/s ({spread}), first chunk {first:.0f} ms")
    spread = f"{min(result.ratios):.3f}-{max(result.ratios):.3f}"
    return "\n".join([*lines, f"ratio         {result.ratio:8.3f} ({spread}, rounds: {len(result.ratios)})"])
