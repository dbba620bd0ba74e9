"""The scheduler over a scripted list of arrivals on machines with given prices; `python -m tests.scheduling_replay`.

Nothing is measured here: a machine is a function from a step to its seconds, so that the effect of each choice shows in
numbers that are the same everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from daemon.engine.scheduler import Kind, Scheduler, StepPlan, Work
from daemon.messages import Scheduling

Machine = Callable[[int], float]
"""Seconds of one ubatch of so many tokens."""


def cpu(n: int) -> float:
    """Everything on two cores: tokens cost more in small steps; eight chats decode in 25 ms."""
    return float(np.interp(n, (0, 1, 8, 16, 32, 64, 128, 256, 512), CPU_SECONDS))


CPU_SECONDS = (0.0, 0.006, 0.025, 0.042, 0.066, 0.107, 0.188, 0.352, 0.640)
"""Of a quiet machine with the generated model of `hotset bench load`, 2026-12-01."""


def linear(n: int) -> float:
    """Nearly proportional to the tokens; eight chats decode in 20 ms."""
    return 0.002 + 0.0022 * n


def spilled(n: int) -> float:
    """Experts in memory that a card fetches for each ubatch of 32 tokens or more; four chats decode in 30 ms."""
    return 0.012 + 0.0045 * n if n < 32 else 0.28 + 0.0005 * n


def resident(n: int) -> float:
    """Everything on a card."""
    return 0.006 + 0.0002 * n


@dataclass(frozen=True)
class Arrival:
    """One request; `at` in seconds, `kind` names it in the report."""

    at: float
    n_prompt: int
    n_answer: int
    kind: str
    rank: int = 1
    client: str = ""


@dataclass
class Running:
    """A request and the times of its tokens."""

    number: int
    asked: Arrival
    n_left: int
    tokens: list[float] = field(default_factory=list)

    @property
    def decoding(self) -> bool:
        return bool(self.tokens)


class Planner(Protocol):
    """What decides of steps."""

    def plan(self, running: Sequence[Work]) -> StepPlan: ...

    def computed(self, plan: StepPlan, running: Sequence[Work], seconds: float) -> None: ...


class FirstComeFirstServed:
    """One row for each that decodes, then prompts in order of arrival up to `n_batch` tokens: llama-server's way."""

    def __init__(self, n_batch: int) -> None:
        self._n_batch = n_batch

    def plan(self, running: Sequence[Work]) -> StepPlan:
        parts = [(work.index, 1) for work in running if work.decoding]
        n_decode, left = len(parts), self._n_batch - len(parts)
        for work in running:
            if not work.decoding and left > 0:
                parts.append((work.index, min(left, work.n_left)))
                left -= parts[-1][1]
        return StepPlan(tuple(parts), n_decode, self._n_batch - n_decode - left, Kind.FULL)

    def computed(self, plan: StepPlan, running: Sequence[Work], seconds: float) -> None: ...


@dataclass(frozen=True)
class Replayed:
    """What came of a script."""

    requests: list[Running]
    plans: list[StepPlan]
    seconds: float

    def gaps(self, kind: str) -> list[float]:
        """Seconds between tokens of one answer."""
        return [b - a for one in self._of(kind) for a, b in zip(one.tokens, one.tokens[1:], strict=False)]

    def first(self, kind: str) -> list[float]:
        """Seconds from arrival to the first token."""
        return [one.tokens[0] - one.asked.at for one in self._of(kind) if one.tokens]

    def between(self, begin: float, end: float, kind: str) -> int:
        """Tokens of answers in a stretch of time."""
        return sum(begin <= at < end for one in self._of(kind) for at in one.tokens)

    @property
    def throughput(self) -> float:
        """Prompt and answer tokens a second."""
        return sum(one.asked.n_prompt + len(one.tokens) for one in self.requests if one.tokens) / self.seconds

    def _of(self, kind: str) -> list[Running]:
        return [one for one in self.requests if one.asked.kind == kind]


def replay(
    arrivals: Sequence[Arrival],
    machine: Machine,
    planner: Planner,
    *,
    n_ubatch: int = 512,
    max_sequences: int = 9,
    until: float = float("inf"),
    noise: random.Random | None = None,
) -> Replayed:
    """Run a script to its end, or for so many seconds. With `noise` one step in twenty takes ten times as long."""
    waiting = [Running(i, one, one.n_prompt) for i, one in enumerate(sorted(arrivals, key=lambda one: one.at))]
    everyone, running, plans, now = list(waiting), list[Running](), list[StepPlan](), 0.0
    while (waiting or running) and now < until:
        here = sorted((one for one in waiting if one.asked.at <= now), key=lambda one: (one.asked.rank, one.number))
        for one in here[: max_sequences - len(running)]:
            waiting.remove(one)
            running.append(one)
        if not running:
            now = min(one.asked.at for one in waiting)
            continue
        work = [
            Work(i, one.number, one.n_left, one.decoding, one.asked.rank, one.asked.client)
            for i, one in enumerate(running)
        ]
        plan = planner.plan(work)
        seconds = _seconds(plan.n_tokens, machine, n_ubatch)
        slow = 10.0 if noise is not None and noise.random() < 0.05 else 1.0
        planner.computed(plan, work, seconds * slow)
        now += seconds * slow
        plans.append(plan)
        _advance(running, plan, now)
        running = [one for one in running if len(one.tokens) < one.asked.n_answer]
    return Replayed(everyone, plans, now)


def _seconds(n: int, machine: Machine, n_ubatch: int) -> float:
    whole, rest = divmod(n, n_ubatch)
    return whole * machine(n_ubatch) + (machine(rest) if rest else 0.0)


def _advance(running: Sequence[Running], plan: StepPlan, now: float) -> None:
    for index, n in plan.parts:
        one = running[index]
        one.n_left = 1 if one.decoding else one.n_left - n
        if one.decoding or not one.n_left:
            one.n_left = 1
            one.tokens.append(now)


def chats_and_long_prompts(n_chats: int = 8, every: float = 20.0, seconds: float = 180.0) -> list[Arrival]:
    """Chats that take turns of 100 tokens and answer with 150, and a prompt of 4000 tokens now and then."""
    rng = random.Random(1)
    chats = [
        Arrival(start + rng.random(), 100, 150, "chat", client=f"chat {i}")
        for i in range(n_chats)
        for start in np.arange(i / n_chats, seconds, 15.0).tolist()
    ]
    long = [Arrival(at, 4000, 16, "long", client="long") for at in np.arange(2.0, seconds, every).tolist()]
    return [*chats, *long]


def steady(n_chats: int, n_long: int, n_prompt: int = 4096) -> list[Arrival]:
    """Chats that answer without end, and prompts that come one after the other."""
    chats = [Arrival(0.0, 20, 1_000_000, "chat", client=f"chat {i}") for i in range(n_chats)]
    return [*chats, *(Arrival(1.0 + i * 1e-3, n_prompt, 1, "long", client="long") for i in range(n_long))]


def _line(name: str, found: Replayed) -> str:
    gaps, first = np.array(found.gaps("chat")) * 1e3, np.array(found.first("chat")) * 1e3
    long = found.first("long")
    return (
        f"{name:<44}{found.throughput:>8.0f}{np.percentile(gaps, 50):>9.0f}{np.percentile(gaps, 95):>9.0f}"
        f"{gaps.max():>9.0f}{np.percentile(first, 95):>11.0f}{np.median(long) if long else float('nan'):>10.1f}"
    )


def main() -> None:
    """Print what each choice costs, on each machine."""
    print(f"{'':<44}{'tok/s':>8}{'gap p50':>9}{'p95':>9}{'max':>9}{'first p95':>11}{'long, s':>10}   (chats: ms)")
    for machine in (cpu, linear, spilled, resident):
        print(f"-- {machine.__name__}: {' '.join((machine.__doc__ or '').split())}")
        script = chats_and_long_prompts()
        for n_batch, n_ubatch in ((2048, 512), (256, 256), (64, 64)):
            found = replay(script, machine, FirstComeFirstServed(n_batch), n_ubatch=n_ubatch)
            print(_line(f"in order of arrival, batch {n_batch}, ubatch {n_ubatch}", found))
        choices = [Scheduling(target_latency=factor) for factor in (1.5, 2.0, 4.0, 8.0)]
        choices += [Scheduling(decode_share=share) for share in (0.25, 0.75)]
        for choice in choices:
            name = f"target_latency {choice.target_latency:g}, decode_share {choice.decode_share:g}"
            print(_line(name, replay(script, machine, Scheduler(512, choice))))


if __name__ == "__main__":
    main()
