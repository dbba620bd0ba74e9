"""Servers in turn: every one gets the same requests, in rounds, so that what disturbs the machine meets all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hotset_tools.bench.clients import Endpoint
from hotset_tools.bench.load import plan as planning
from hotset_tools.bench.load.bodies import Scale, Writer
from hotset_tools.bench.load.figures import Outcome, ServerFigures, figures
from hotset_tools.bench.load.machine import CpuWatch
from hotset_tools.bench.load.plan import Arrival, Source
from hotset_tools.bench.load.runner import Patience, measure_scale, play, warm_up

_BURST = 500
"""Added to the seed for the round that comes all at once."""


@dataclass(frozen=True, slots=True)
class Round:
    """Requests, and the seed of their texts, which no other round has."""

    seed: int
    plan: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent. `seconds` are those of all rounds together; `burst_seconds` of arrivals come all at once (0: none).

    `speed` multiplies all rates of arrival.
    """

    sources: tuple[Source, ...]
    seconds: float
    n_rounds: int = 1
    seed: int = 1
    speed: float = 1.0
    burst_seconds: float = 0.0
    cached: bool = False
    model: str = ""

    def rounds(self) -> list[Round]:
        """The requests of every round."""
        seeds = [self.seed + 1000 * number for number in range(self.n_rounds)]
        return [Round(seed, self._arrivals(self.seconds / self.n_rounds, seed)) for seed in seeds]

    def burst(self) -> Round:
        """The requests that come all at once."""
        seed = self.seed + _BURST
        return Round(seed, planning.at_once(self._arrivals(self.burst_seconds, seed)))

    def _arrivals(self, seconds: float, seed: int) -> tuple[Arrival, ...]:
        return planning.arrivals(self.sources, seconds, seed, self.speed)

    def as_json(self) -> dict[str, object]:
        """As scripts read it."""
        rounds = self.rounds()
        each = self.seconds / self.n_rounds
        return {
            "clients": {source.kind.name: source.n_clients for source in self.sources},
            "rates": {source.kind.name: source.kind.rate * self.speed for source in self.sources},
            "prompt_tokens": {source.kind.name: source.kind.n_prompt for source in self.sources},
            "output_tokens": {source.kind.name: source.kind.n_output for source in self.sources},
            "seconds": self.seconds,
            "rounds": self.n_rounds,
            "requests": [len(one.plan) for one in rounds],
            "burst_requests": len(self.burst().plan),
            "offered_tokens_per_second": sum(planning.offered(one.plan, each) for one in rounds) / self.n_rounds,
            "seed": self.seed,
            "cached": self.cached,
        }


@dataclass(slots=True)
class Arm:
    """A server under test; `pid` is its process where it is one of this machine and ours to look at."""

    name: str
    endpoint: Endpoint
    settings: dict[str, object] = field(default_factory=dict)
    pid: int | None = None
    rounds: list[list[Outcome]] = field(default_factory=list)
    burst: list[Outcome] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    def figures(self) -> ServerFigures:
        """What all its rounds say."""
        others = sum(self.others) / len(self.others) if self.others else None
        return figures(self.name, self.settings, self.rounds, burst=self.burst, others_cpu=others)


async def race(
    arms: Sequence[Arm], workload: Workload, patience: Patience, say: Callable[[str], None]
) -> list[ServerFigures]:
    """Every round with every arm; the order turns round by round. The first arm's counts decide how long texts are.

    Raises:
        ServerUnusable: one does not answer a plain request.
    """
    scale = await measure_scale(arms[0].endpoint, workload.model, patience)
    for arm in arms[1:]:
        await warm_up(arm.endpoint, workload.model, patience)
    for number, one in enumerate(workload.rounds()):
        turn = number % len(arms)
        for arm in (*arms[turn:], *arms[:turn]):
            say(f"{arm.name}: round {number + 1} of {workload.n_rounds}, {len(one.plan)} requests")
            arm.rounds.append(await _play(arm, one, workload, scale, patience))
    burst = workload.burst()
    for arm in arms if burst.plan else ():
        say(f"{arm.name}: {len(burst.plan)} requests at once")
        arm.burst = await _play(arm, burst, workload, scale, patience)
    return [arm.figures() for arm in arms]


async def _play(arm: Arm, one: Round, workload: Workload, scale: Scale, patience: Patience) -> list[Outcome]:
    writer = Writer(one.seed, scale, workload.model, workload.cached)
    bodies = [writer.body(arrival) for arrival in one.plan]
    watch = CpuWatch(arm.pid)
    outcomes = await play(arm.endpoint, one.plan, bodies, patience)
    if (others := watch.others()) is not None:
        arm.others.append(others)
    return outcomes
