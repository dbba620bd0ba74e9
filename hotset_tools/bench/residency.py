"""`hotset bench decode` and `prefill`: residency against every static split of the same size, in interleaved rounds."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from daemon.errors import HotsetError
from daemon.hotset import planner
from daemon.hotset.planner import LayerState, Plan
from daemon.native import locate
from daemon.native.gguf_check import check
from hotset_tools.bench import hardware, rows
from hotset_tools.bench.child import Child
from hotset_tools.bench.cost import Trace, hit_rate, predict
from hotset_tools.bench.intervals import paired_ratio
from hotset_tools.bench.probing import PROBE_WIDTH, Probed, Prober
from hotset_tools.bench.routing_facts import hit_curve, popular
from hotset_tools.bench.shelf import Place, Shelf, Sizes
from hotset_tools.bench.walks import Walks
from hotset_tools.bench.worker import LEARN_PROMPT

WARM = 3
LEAST_STEPS, MOST_STEPS, SCOUT_STEPS = 8, 64, 6
NEAR_BEST = 1.08
"""After scouting a static split stays in the race if it is not this much slower than the best one."""

Phase = Literal["decode", "prefill"]
Origin = Literal["planner", "all partial", "split"]


@dataclass(frozen=True)
class Settings:
    """What to measure. `budgets` are shares of all expert bytes; `prefill` are prompt lengths in tokens."""

    model: Path
    device: str
    peer: Path | None = None
    peer_device: str = ""
    budgets: tuple[float, ...] = (0.25, 0.5, 0.75)
    sequences: tuple[int, ...] = ()
    prefill: tuple[int, ...] = ()
    threads: tuple[int, ...] = (8, 16)
    ubatch: int = 512
    rounds: int = 7
    minutes: float = 8.0
    seed: int = 1
    load_mode: str = "none"
    every_split: bool = False
    learn_tokens: int = 8192
    out: Path | None = None

    @property
    def cells(self) -> list[Cell]:
        """Phases and sizes, for every budget."""
        return [Cell("decode", n, 1) for n in self.sequences] + [Cell("prefill", 1, n) for n in self.prefill]

    @property
    def n_ctx(self) -> int:
        """Cells of the cache: the longest prompt, or what all sequences decode."""
        steps = (MOST_STEPS + WARM) * max((PROBE_WIDTH, *self.sequences))
        return -(-max((steps, LEARN_PROMPT, *self.prefill)) // 256) * 256


@dataclass(frozen=True)
class Cell:
    """What is measured of each arm: decoding of `n_sequences`, or a prompt of `n_tokens`."""

    phase: Phase
    n_sequences: int
    n_tokens: int


@dataclass(frozen=True)
class Arm:
    """One way of computing the cell. `role`: "ours" is judged, "same" is this build without, "stock" the unpatched."""

    role: Literal["ours", "same", "stock"]
    place: Place
    threads: int
    origin: Origin = "split"

    @property
    def label(self) -> str:
        """For people and JSON."""
        where = f"{sum(n > 0 for n in self.place.slots)} layers with slots" if self.place.slots else "no slots"
        return f"{self.role} {self.origin}, n_cpu {self.place.n_cpu}, {where}"


@dataclass
class Timed:
    """What an arm took, round by round."""

    seconds: list[float] = field(default_factory=list)
    hits: int = 0
    misses: int = 0

    def add(self, reply: dict[str, Any]) -> None:
        """One round's reply."""
        self.seconds.append(float(reply["seconds"]))
        self.hits += sum(reply["hits"])
        self.misses += sum(reply["misses"])


def run(settings: Settings) -> rows.Report:
    """Measure everything; what is ready is in `settings.out` and on stderr at any time.

    Raises:
        HotsetError: the model has no experts, the device is missing, or a worker ended.
    """
    with ExitStack() as stack:
        libraries = {"ours": locate.require_build().directory} | ({"peer": settings.peer} if settings.peer else {})
        children = {name: stack.enter_context(Child(name, path)) for name, path in libraries.items()}
        return Bench(settings, children, libraries).run()


class Bench:
    """One run; `children` are workers by library."""

    def __init__(self, settings: Settings, children: dict[str, Child], libraries: dict[str, Path]) -> None:
        self._settings, self._children = settings, children
        self._began, self._deadline = time.monotonic(), time.monotonic() + 60 * settings.minutes
        facts = check(settings.model).facts
        if not facts.is_moe:
            raise HotsetError(f"{settings.model.name} has no experts")
        sizes = Sizes.of(
            facts, path=str(settings.model), load_mode=settings.load_mode,
            n_ctx=settings.n_ctx, max_sequences=max((PROBE_WIDTH, *settings.sequences)), ubatch=settings.ubatch,
        )  # fmt: skip
        if len(sizes.layer_bytes) != facts.n_layer:
            raise HotsetError(f"{settings.model.name} has layers without experts: not measured here")
        self._sizes, self._facts = sizes, facts
        devices = {"ours": settings.device, "peer": settings.peer_device or settings.device}
        self._shelf = Shelf(children, devices, sizes)
        self._walks = Walks(settings.model, facts.n_vocab, settings.seed)
        said = {name: child.ask("hello", device=devices[name]) for name, child in children.items()}
        self._backend = "".join(letter for letter in settings.device.split(":")[0] if letter.isalpha()).lower()
        self._commit = hardware.commit()
        self._report = rows.Report(
            head=self._head(libraries, said["ours"]["devices"]), prices=[], rows=[], measurements=[], notes=[]
        )

    def run(self) -> rows.Report:
        """Learn, probe, and measure budget by budget."""
        self._learn()
        probed = {n: self._probe(n) for n in self._settings.sequences or (1,)}
        cells = [(budget, cell) for budget in self._settings.budgets for cell in self._settings.cells]
        for index, (budget, cell) in enumerate(cells):
            left = self._deadline - time.monotonic()
            if left <= 0:
                self._note(f"no time for {cell.phase} at {budget:.0%} with {cell.n_sequences} x {cell.n_tokens}")
                continue
            by_threads = probed.get(cell.n_sequences) or next(iter(probed.values()))
            self._measure(budget, cell, by_threads, left / (len(cells) - index))
        return self._report

    # What every cell needs

    def _learn(self) -> None:
        """A static hot set from one part of the walk, and how well one half of it does on the other."""
        place = Place("ours", len(self._sizes.layer_bytes), ())
        described = self._shelf.open(place)
        unmanaged = {layer["reason"] for layer in described["layers"]} - {"MANAGED"}
        if unmanaged:
            raise HotsetError(f"not every layer can be managed: {', '.join(sorted(unmanaged))}")
        tokens = self._walks.tokens(self._settings.learn_tokens, 0, "learn")
        first, second = (np.array(half) for half in self._shelf.ask(place, "learn", tokens=tokens)["halves"])
        self._curves = [hit_curve(a, b) for a, b in zip(first, second, strict=True)]
        self._order = [popular(counts) for counts in first + second]
        self._prober = Prober(self._shelf, self._walks, first + second)
        self._say("learned from", len(tokens), "tokens")

    def _probe(self, n_sequences: int) -> dict[int, Probed]:
        found = {threads: self._prober.measure(n_sequences, threads) for threads in self._settings.threads}
        for threads, probed in found.items():
            cost = probed.cost
            entry = rows.Prices(
                sequences=n_sequences, threads=threads, fixed=cost.fixed, partial=cost.partial, cold=cost.cold,
                gpu_bandwidth=_finite(cost.gpu_bandwidth), cpu_bandwidth=_finite(cost.cpu_bandwidth),
                probed_layers=probed.n_layers, seconds=probed.seconds,
            )  # fmt: skip
            self._report.prices.append(entry)
            self._say("prices", entry.model_dump_json())
        self._write()
        return found

    def _plans(self, budget: float, probed: Probed, n_sequences: int) -> dict[Origin, Plan]:
        """The planner's choice, and the same share of every layer where that is another one."""
        layers = self._states(probed, n_sequences)
        bytes_ = int(budget * sum(self._sizes.layer_bytes) + 1e-6)
        chosen = planner.plan(layers, bytes_)
        plans: dict[Origin, Plan] = {"planner": chosen}
        even = planner.all_partial(layers, bytes_)
        if chosen.slots != even.slots and any(even.slots):
            plans["all partial"] = even
        return plans

    def _states(self, probed: Probed, n_sequences: int) -> list[LayerState]:
        trace = self._prober.trace(self._walks.steps(LEAST_STEPS, n_sequences, 8000 + n_sequences))
        distinct = (trace > 0).sum(axis=2).mean(axis=0)
        cost = probed.cost
        return [
            LayerState(
                expert_bytes=size, hit_rates=curve, fixed=cost.fixed, partial_price=cost.partial, cold_price=cost.cold,
                cpu=size * float(n) / cost.cpu_bandwidth, device=size * float(n) / cost.gpu_bandwidth,
            )
            for size, curve, n in zip(self._sizes.expert_bytes, self._curves, distinct, strict=True)
        ]  # fmt: skip

    # One cell

    def _measure(self, budget: float, cell: Cell, probed: dict[int, Probed], slice_seconds: float) -> None:
        began = time.monotonic()
        best = min(probed, key=lambda threads: probed[threads].seconds["empty"])
        plans = self._plans(budget, probed[best], cell.n_sequences)
        arms, speeds = self._scout(cell, list(self._arms(budget, plans)))
        if not any(arm.role == "ours" for arm in arms) or not any(arm.role == "same" for arm in arms):
            self._note(f"{cell.phase} at {budget:.0%}: nothing to compare, {len(arms)} arms could be opened")
            return
        left = slice_seconds - (time.monotonic() - began)
        per_step = sum(speeds.values())
        steps = int(left / self._settings.rounds / per_step) - WARM if cell.phase == "decode" else 1
        times, trace = self._rounds(cell, arms, min(MOST_STEPS, max(LEAST_STEPS, steps)))
        self._conclude(budget, cell, times, trace, probed, plans)

    def _arms(self, budget: float, plans: dict[Origin, Plan]) -> Iterator[Arm]:
        n_layers = len(self._sizes.layer_bytes)
        allowed = budget_bytes(budget, self._sizes)
        fits = next(n for n in range(n_layers + 1) if sum(self._sizes.layer_bytes[n:]) <= allowed)
        splits = range(fits, n_layers + 1) if self._settings.every_split else [fits]
        for threads in self._settings.threads:
            for origin, plan in plans.items():
                slots = plan.slots if plan.kind is planner.Kind.RESIDENCY else None
                yield Arm("ours", Place("ours", n_layers if slots else plan.n_cold, slots), threads, origin)
            for n_cpu in splits:
                yield Arm("same", Place("ours", n_cpu), threads)
                if "peer" in self._children:
                    yield Arm("stock", Place("peer", n_cpu), threads)

    def _scout(self, cell: Cell, arms: Sequence[Arm]) -> tuple[list[Arm], dict[Arm, float]]:
        """Open and time every arm once; the best of ours by origin and all splits near the best stay in the race."""
        speeds: dict[Arm, float] = {}
        for arm in arms:
            self._open(arm.place)
            self._time(cell, arm, SCOUT_STEPS, 7000)  # builds graphs and pipelines
            speeds[arm] = float(self._time(cell, arm, SCOUT_STEPS, 7001)["seconds"]) / self._units(cell, SCOUT_STEPS)
            self._say(f"scout {arm.label}, {arm.threads} threads:", f"{1e3 * speeds[arm]:.2f} ms per step")
        kept = []
        for key in dict.fromkeys((arm.role, arm.origin) for arm in arms):
            group = {arm: speed for arm, speed in speeds.items() if (arm.role, arm.origin) == key}
            limit = min(group.values()) * (1 if key[0] == "ours" else NEAR_BEST)
            kept += [arm for arm, speed in group.items() if speed <= limit]
        return kept, {arm: speeds[arm] for arm in kept}

    def _rounds(self, cell: Cell, arms: list[Arm], n_steps: int) -> tuple[dict[Arm, Timed], Trace | None]:
        """Every arm once per round, in another order each time; and what the last round's steps picked."""
        times = {arm: Timed() for arm in arms}
        random = np.random.default_rng(self._settings.seed)
        self._say(f"{self._settings.rounds} rounds of {n_steps} steps, {len(arms)} arms")
        done = 0
        for number in range(self._settings.rounds):
            if done >= 3 and time.monotonic() > self._deadline:
                self._note(f"{cell.phase} with {cell.n_sequences} x {cell.n_tokens}: only {done} rounds, time is over")
                break
            for index in random.permutation(len(arms)):
                times[arms[index]].add(self._time(cell, arms[index], n_steps, number))
            done += 1
        for arm, timed in times.items():
            timed.seconds = [seconds / self._units(cell, n_steps) for seconds in timed.seconds]
            self._say(f"  {arm.label}, {arm.threads} threads: {1e3 * statistics.median(timed.seconds):.2f} ms per step")
        if cell.phase == "prefill":
            return times, None
        traces = [self._prober.trace(self._steps(cell, n_steps, number))[WARM:] for number in range(min(done, 3))]
        return times, np.concatenate(traces)

    def _time(self, cell: Cell, arm: Arm, n_steps: int, number: int) -> dict[str, Any]:
        if cell.phase == "prefill":
            tokens = self._walks.tokens(cell.n_tokens, number)
            return self._shelf.ask(arm.place, "prefill", tokens=tokens, threads=arm.threads)
        steps = self._steps(cell, n_steps, number)
        return self._shelf.ask(arm.place, "decode", steps=steps, warm=WARM, threads=arm.threads)

    def _steps(self, cell: Cell, n_steps: int, number: int) -> list[list[int]]:
        return self._walks.steps(WARM + n_steps, cell.n_sequences, number)

    def _units(self, cell: Cell, n_steps: int) -> int:
        """What a reply's seconds are divided by: steps, or prompts."""
        return n_steps if cell.phase == "decode" else 1

    def _open(self, place: Place) -> None:
        experts = None
        if place.slots:
            experts = [order[:n] for order, n in zip(self._order, place.slots, strict=True)]
        self._shelf.open(place, experts)

    # Rows

    def _conclude(
        self,
        budget: float,
        cell: Cell,
        times: dict[Arm, Timed],
        trace: Trace | None,
        probed: dict[int, Probed],
        plans: dict[Origin, Plan],
    ) -> None:
        same = _fastest({arm: timed for arm, timed in times.items() if arm.role == "same"})
        stock = _fastest({arm: timed for arm, timed in times.items() if arm.role == "stock"} or {same: times[same]})
        judged = [arm for arm in times if arm.role == "ours"] + [same]
        for arm in judged:
            self._report.rows.append(self._row(budget, cell, arm, times, (stock, same), trace, probed[arm.threads]))
            self._say(_line(self._report.rows[-1]))
        for arm, timed in times.items():
            entry = rows.Measurement(
                phase=cell.phase, budget=budget, arm=arm.label, sequences=cell.n_sequences, threads=arm.threads,
                tokens=cell.n_sequences * cell.n_tokens, seconds=tuple(timed.seconds),
            )  # fmt: skip
            self._report.measurements.append(entry)
        self._write()

    def _row(
        self,
        budget: float,
        cell: Cell,
        arm: Arm,
        times: dict[Arm, Timed],
        against: tuple[Arm, Arm],
        trace: Trace | None,
        probed: Probed,
    ) -> rows.Row:
        timed = times[arm]
        median = statistics.median(timed.seconds)
        stock, same = (paired_ratio(timed.seconds, times[other].seconds) for other in against)
        slots = self._effective_slots(arm.place)
        model = limit = None
        resident = self._resident(slots)
        if trace is not None:
            partial = np.array([0 < n < len(order) for n, order in zip(slots, self._order, strict=True)])
            predicted = predict(trace, resident, partial, self._sizes.expert_bytes, probed.cost)
            model, limit = predicted.model / median, predicted.limit / median
        hits = None
        if trace is not None:  # a prompt takes upstream's path in partial layers, which has no hits
            counted = timed.hits + timed.misses
            hits = timed.hits / counted if counted else hit_rate(trace, resident)
        n_tokens = cell.n_sequences * cell.n_tokens
        return rows.Row(
            phase=cell.phase, backend=self._backend, mode="static" if arm.role == "ours" else "off",
            plan=arm.origin, budget=budget, resident=self._resident_share(arm.place),
            layers={"full": sum(n == len(o) for n, o in zip(slots, self._order, strict=True)),
                    "partial": sum(0 < n < len(o) for n, o in zip(slots, self._order, strict=True)),
                    "cold": sum(n == 0 for n in slots)},
            sequences=cell.n_sequences, tokens=cell.n_tokens, ubatch=self._settings.ubatch, threads=arm.threads,
            hit_rate=hits, tokens_per_second=n_tokens / median,
            ratio_vs_best_static=stock.median, ci=(stock.low, stock.high),
            ratio_vs_same_scheduler=same.median, ci_same_scheduler=(same.low, same.high),
            best_static=_baseline(against[0], times, n_tokens), same_scheduler=_baseline(against[1], times, n_tokens),
            measured_over_model=model, measured_over_limit=limit,
            rounds=len(timed.seconds), seed=self._settings.seed, commit=self._commit,
        )  # fmt: skip

    def _effective_slots(self, place: Place) -> list[int]:
        """Experts per layer on the device, whether in slots or loaded there."""
        if place.slots:
            return list(place.slots)
        return [0 if layer < place.n_cpu else len(order) for layer, order in enumerate(self._order)]

    def _resident(self, slots: Sequence[int]) -> npt.NDArray[np.bool_]:
        resident = np.zeros((len(slots), max(len(order) for order in self._order)), bool)
        for layer, (order, n) in enumerate(zip(self._order, slots, strict=True)):
            resident[layer, order[:n]] = True
        return resident

    def _resident_share(self, place: Place) -> float:
        sizes = self._sizes
        held = sizes.slab_bytes(place.slots) if place.slots else sum(sizes.layer_bytes[place.n_cpu :])
        return held / sum(sizes.layer_bytes)

    def _head(self, libraries: dict[str, Path], devices: list[dict[str, str]]) -> dict[str, Any]:
        settings = self._settings
        return {
            "date": time.strftime("%Y-%m-%d"),
            "hardware": hardware.describe() | {"devices": devices},
            "build": {name: hardware.build(path) for name, path in libraries.items()},
            "stock": "unpatched build" if settings.peer else "this build with the feature off (no --peer)",
            "model": {
                "name": settings.model.name, "architecture": self._facts.architecture, "layers": self._facts.n_layer,
                "experts": self._facts.n_expert, "top_k": self._facts.n_expert_used,
                "expert_bytes": self._facts.expert_bytes, "other_bytes": self._facts.other_bytes,
                "routing": self._walks.kind,
            },
            "settings": {
                "device": settings.device, "threads": settings.threads, "ubatch": settings.ubatch,
                "rounds": settings.rounds, "minutes": settings.minutes, "seed": settings.seed,
                "load": settings.load_mode, "context": settings.n_ctx, "learn_tokens": settings.learn_tokens,
                "cache": "empty before every measurement", "budget": "slots of zeros counted",
            },
        }  # fmt: skip

    def _note(self, text: str) -> None:
        self._report.notes.append(text)
        self._say("NOTE:", text)
        self._write()

    def _say(self, *words: object) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s]", *words, file=sys.stderr, flush=True)

    def _write(self) -> None:
        if self._settings.out is not None:
            temporary = self._settings.out.with_suffix(".partial")
            temporary.write_text(json.dumps(self._report.model_dump(), indent=1), "utf-8")
            temporary.replace(self._settings.out)


def table(report: rows.Report) -> str:
    """The rows for people."""
    return "\n".join([_line(row) for row in report.rows] + [f"NOTE: {note}" for note in report.notes])


def budget_bytes(budget: float, sizes: Sizes) -> int:
    """Bytes of a share of all experts."""
    return int(budget * sum(sizes.layer_bytes) + 1e-6)


def _fastest(times: dict[Arm, Timed]) -> Arm:
    return min(times, key=lambda arm: statistics.median(times[arm].seconds))


def _baseline(arm: Arm, times: dict[Arm, Timed], n_tokens: int) -> rows.Baseline:
    return rows.Baseline(
        library="stock" if arm.role == "stock" else "this build, feature off",
        cpu_moe_layers=arm.place.n_cpu,
        threads=arm.threads,
        tokens_per_second=n_tokens / statistics.median(times[arm].seconds),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _line(row: rows.Row) -> str:
    hits = "-" if row.hit_rate is None else f"{row.hit_rate:.3f}"
    model = "-" if row.measured_over_model is None else f"{row.measured_over_model:.2f}"
    what = f"{row.phase} {row.mode} ({row.plan}) budget {row.budget:.0%} x{row.sequences} n{row.tokens} t{row.threads}"
    return (
        f"ROW {what}: "
        f"{row.tokens_per_second:.1f} tok/s, h {hits}, vs best static {row.ratio_vs_best_static:.2f} "
        f"({row.ci[0]:.2f}-{row.ci[1]:.2f}), vs same scheduler {row.ratio_vs_same_scheduler:.2f}, model {model}"
    )
