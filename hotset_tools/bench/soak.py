"""`hotset bench soak`: many clients of all manners at one hotsetd for minutes; nothing is lost, nothing grows."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from hotset_tools.bench import hardware, servers
from hotset_tools.bench.clients import Endpoint
from hotset_tools.bench.soak_clients import (
    MANNERS,
    MOST_PATIENCE,
    SHARES,
    STALL_SECONDS,
    Client,
    Connection,
    Job,
)
from hotset_tools.bench.soak_judge import MIB, Growth, Said, Sample, Tally, faults, growth, read_whole

N_CTX = 2048
LOOK_SECONDS = 0.25
SAY_SECONDS = 10.0
SETTLE_SECONDS = 30.0
PAGE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one run. `threads` are the engine's: the clients need processors too. `margin_mib` is what a process may grow
    by and still be flat, where a twentieth is less."""

    model: Path
    clients: int
    minutes: float
    sequences: int
    threads: int
    max_waiting: int
    margin_mib: int
    seed: int


@dataclass(frozen=True, slots=True)
class Report:
    """What came of it; no `faults`: the run was good."""

    settings: Settings
    tally: Tally
    growths: list[Growth]
    before: Sample
    after: Sample
    max_running: int
    max_waiting: int
    given_up: dict[str, int]
    faults: list[str]

    @property
    def ok(self) -> bool:
        """Whether everything was as it must be."""
        return not self.faults

    def as_json(self) -> dict[str, Any]:
        """As scripts read it; memory in bytes."""
        tally = self.tally
        return {
            "ok": self.ok,
            "faults": self.faults,
            "hardware": hardware.describe(),
            "commit": hardware.commit(),
            "settings": asdict(self.settings) | {"model": self.settings.model.name},
            "requests": tally.sent,
            "outcomes": dict(tally.by_outcome),
            "manners": dict(sorted(tally.by_manner.items())),
            "rejected": dict(tally.rejected),
            "tokens": tally.n_tokens,
            "same_as_alone": tally.n_same,
            "max_running": self.max_running,
            "max_waiting": self.max_waiting,
            "connections_given_up": self.given_up,
            "memory": {one.process: asdict(one) | {"flat": one.flat} for one in self.growths},
            "descriptors": {"before": self.before.descriptors, "after": self.after.descriptors},
        }


def run(settings: Settings, say: Callable[[str], None]) -> Report:
    """Start a hotsetd of its own, with room for few, and let the clients at it; `say` gets progress.

    Raises:
        HotsetError: it did not start.
    """
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "hotsetd.log"
        limits = {
            "HOTSET_ENGINE_THREADS": str(settings.threads),
            "HOTSET_QUEUE_MAX_WAITING": str(settings.max_waiting),
            "HOTSET_HTTP_WRITE_TIMEOUT_SECONDS": str(STALL_SECONDS / 2),
        }
        with servers.hotsetd(settings.model, settings.sequences, N_CTX, log, limits) as server:
            report = asyncio.run(_Soak(settings, server, say).run())
        complaints = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    report.faults.extend(f"the service said: {line[:300]}" for line in complaints[:5])
    return report


class _Soak:
    """One run."""

    def __init__(self, settings: Settings, server: servers.Server, say: Callable[[str], None]) -> None:
        self._settings, self._server, self._say = settings, server, say
        self._endpoint = Endpoint("127.0.0.1", server.port)
        self._tally = Tally()
        self._samples: list[Sample] = []
        self._began = time.monotonic()
        self._processes = _processes(server.pid)

    async def run(self) -> Report:
        settings, dice = self._settings, random.Random(self._settings.seed)
        jobs = make_jobs(dice)
        alone = {job: await self._ask_alone(job) for job in jobs}
        before = await self._look()
        self._say(
            f"{len(jobs)} prompts were answered alone; {settings.clients} clients for {settings.minutes:g} minutes"
        )
        self._began = time.monotonic()
        looking = asyncio.create_task(self._keep_looking())
        clients = [Client(self._endpoint, f"soak-{i}", random.Random(dice.random())) for i in range(settings.clients)]
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(self._keep_asking(client, alone))
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        after = await self._settle(before)
        return await self._report(before, after)

    async def _keep_asking(self, client: Client, alone: dict[Job, Said]) -> None:
        jobs = list(alone)
        while time.monotonic() - self._began < self._settings.minutes * 60:
            job, (manner,) = client.dice.choice(jobs), client.dice.choices(list(MANNERS), SHARES)
            self._tally.sent += 1
            ended = await client.ask(manner, job, alone[job])
            self._tally.add(manner, ended)
            if ended.fault:
                self._say(f"{manner}, {len(job.prompt)} characters, {job.n_tokens} tokens: {ended.fault}")
            if ended.outcome == "rejected":
                await asyncio.sleep(min(ended.retry_after, MOST_PATIENCE) * client.dice.uniform(0.3, 1))

    async def _ask_alone(self, job: Job) -> Said:
        connection = await Connection.ask(self._endpoint, "alone", job.body(stream=False), small=False)
        data = await connection.rest()
        connection.close()
        return read_whole(data.partition(b"\r\n\r\n")[2])

    # -- looking

    async def _keep_looking(self) -> None:
        said = time.monotonic()
        while True:
            self._samples.append(await self._look())
            if time.monotonic() - said >= SAY_SECONDS:
                said = time.monotonic()
                self._say(self._line(self._samples[-1]))
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> Sample:
        page = await asyncio.to_thread(self._page)
        memory = {name: process.memory_info().rss for name, process in self._processes.items()}
        descriptors = {name: process.num_fds() for name, process in self._processes.items()}
        return Sample(
            at=time.monotonic() - self._began,
            memory=memory,
            descriptors=descriptors,
            running=total(page, "hotset_running"),
            waiting=total(page, "hotset_waiting"),
            cells=total(page, 'hotset_kv_cells{state="used"'),
        )

    def _page(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._server.port}/metrics", timeout=PAGE_SECONDS) as page:
            return str(page.read(), "utf-8")

    def _line(self, sample: Sample) -> str:
        memory = ", ".join(f"{name} {size // MIB} MiB" for name, size in sample.memory.items())
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self._tally.by_outcome.items()))
        return f"{sample.at:5.0f} s: {counts}; {sample.running} run, {sample.waiting} wait; {memory}"

    async def _settle(self, before: Sample) -> Sample:
        """What is there when all clients are gone; the service gets a while to see that they are."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            sample = await self._look()
            closed = all(count <= before.descriptors[name] for name, count in sample.descriptors.items())
            if (closed and sample.running + sample.waiting + sample.cells == 0) or time.monotonic() > deadline:
                return sample
            await asyncio.sleep(LOOK_SECONDS)

    async def _report(self, before: Sample, after: Sample) -> Report:
        settings, samples = self._settings, self._samples
        growths = [growth(samples, name, settings.margin_mib * MIB) for name in self._processes]
        page = await asyncio.to_thread(self._page)
        given_up = {
            reason: total(page, f'hotset_connections_given_up_total{{reason="{reason}"')
            for reason in ("write_timeout", "lag", "pipelining")
        }
        return Report(
            settings=settings,
            tally=self._tally,
            growths=growths,
            before=before,
            after=after,
            max_running=max(sample.running for sample in samples),
            max_waiting=max(sample.waiting for sample in samples),
            given_up=given_up,
            faults=faults(self._tally, samples, growths, before, after, settings.max_waiting),
        )


def make_jobs(dice: random.Random) -> list[Job]:
    """Two dozen chats: short ones, and some with a prompt that takes several steps to read."""
    words = "sea ship harbour storm island captain letter winter bread garden river stone".split()
    jobs = []
    for number in range(24):
        n_words = 500 if number % 6 == 5 else dice.randint(3, 30)
        text = " ".join(dice.choice(words) for _ in range(n_words))
        jobs.append(Job(f"Story {number}: {text}", dice.randint(8, 120)))
    return jobs


def total(page: str, prefix: str) -> int:
    """The sum of the samples of a metrics page that begin so."""
    values = [line.rpartition(" ")[2] for line in page.splitlines() if line.startswith(prefix)]
    return int(sum(float(value) for value in values))


def _processes(pid: int) -> dict[str, psutil.Process]:
    service = psutil.Process(pid)
    engines = [one for one in service.children() if "daemon.engine" in " ".join(one.cmdline())]
    return {"service": service, "engine": engines[0]}
