"""`hotset bench live`: experts that follow traffic which switches topics, against a frozen set and static splits."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from daemon.config import Config
from daemon.errors import HotsetError
from daemon.native import locate
from daemon.native.gguf_check import check
from daemon.native.gguf_facts import ModelFacts
from hotset_tools.bench import budget_gaps, hardware, rows
from hotset_tools.bench.arms import Arm, Cell, Settings, Timed, budget_bytes, fitting_splits
from hotset_tools.bench.child import Child
from hotset_tools.bench.judge import measurements
from hotset_tools.bench.live_judge import LiveJudge, UploadCost
from hotset_tools.bench.race import SCOUTS, Race
from hotset_tools.bench.reporter import Reporter
from hotset_tools.bench.residency import backend_of, head, require_managed
from hotset_tools.bench.routing_facts import popular
from hotset_tools.bench.shelf import Place, Shelf, Sizes
from hotset_tools.bench.walks import TopicWalks
from hotset_tools.bench.worker import LEARN_PROMPT

MOST_STEPS = 192
"""Timed steps of a round."""
LEAD_STEPS = 128
"""Steps that the slots fill in before anything is timed."""
RESTART_TOKENS = 64
"""Of those, hit rates before and after a restart are compared."""
_LEAD, _PUSHED, _CHANGED, _RESTARTED = 3000, 4000, 5000, 6000  # numbers of walks, beside those of rounds and scouting
_TRY_STEPS = 16
_PUSH_WARM, _PUSH_STEPS = 1, 8
_PUSH_SHARE = 0.15  # of a cell's time
_RESTART_SHARE = 0.1  # of all time
_LEAST_PAIRS, _MOST_PAIRS = 8, 48
_MIB = 1 << 20


@dataclass(frozen=True)
class Traffic:
    """Topics are visited for `n_visit` tokens. Each budget of `budgets` is kept for `budget_seconds`; 0: not done.

    Raises:
        HotsetError: lists everything that cannot be.
    """

    n_visit: int = 200
    budgets: tuple[str, ...] = ("25%", "50%", "10%", "25%")
    budget_sequences: int = 4
    budget_seconds: float = 0.0
    restart: bool = False
    """Whether to compare starts."""

    def __post_init__(self) -> None:
        if not (2 <= self.n_visit <= 100_000 and 0 <= self.budget_seconds <= 600):
            raise HotsetError("a topic is visited for 2 to 100,000 tokens, a budget is kept for 0 to 600 seconds")


def run(settings: Settings, traffic: Traffic) -> rows.Report:
    """Measure everything; what is ready is in `settings.out` and on stderr at any time.

    Raises:
        HotsetError: the model has no experts or no topics, the device is missing, or a worker ended.
    """
    facts = check(settings.model).facts
    sizes = _sizes(settings, traffic, facts)
    walks = TopicWalks(settings.model, traffic.n_visit, settings.seed)
    with ExitStack() as stack:
        libraries = {"ours": locate.require_build().directory} | ({"peer": settings.peer} if settings.peer else {})
        children = {name: stack.enter_context(Child(name, path)) for name, path in libraries.items()}
        return LiveBench(settings, traffic, facts, sizes, walks, children, libraries).run()


class LiveBench:
    """One run; `children` are workers by library."""

    def __init__(
        self,
        settings: Settings,
        traffic: Traffic,
        facts: ModelFacts,
        sizes: Sizes,
        walks: TopicWalks,
        children: Mapping[str, Child],
        libraries: dict[str, Path],
    ) -> None:
        self._settings, self._traffic, self._walks = settings, traffic, walks
        began = time.monotonic()
        self._deadline = began + 60 * settings.minutes
        self._reserved = traffic.budget_seconds * (len(traffic.budgets) + 1)
        self._reserved += 60 * settings.minutes * _RESTART_SHARE if traffic.restart else 0
        self._n_expert = facts.n_expert
        devices = {"ours": settings.device, "peer": settings.peer_device or settings.device}
        said = {name: child.ask("hello", device=devices[name]) for name, child in children.items()}
        self._shelf = Shelf(children, devices, sizes)
        described = head(settings, facts, libraries, said["ours"]["devices"], walks.kind)
        report = rows.Report(head=described | {"traffic": _described(traffic, walks)}, prices=[], rows=[],
                             measurements=[], notes=[])  # fmt: skip
        self._told = Reporter(report, settings.out, began)
        self._race = Race(self._shelf, walks, settings, self._told.say, self._told.note)
        commit = settings.commit or hardware.commit()
        self._judge = LiveJudge(sizes, facts.n_expert, backend_of(settings.device), settings.seed, commit)

    def run(self) -> rows.Report:
        """Learn other topics, measure budget by budget, then change budgets."""
        settings = self._settings
        self._learn()
        cells = [(budget, cell) for budget in settings.budgets for cell in settings.cells]
        for index, (budget, cell) in enumerate(cells):
            left = self._deadline - self._reserved - time.monotonic()
            if left <= 0:
                self._told.note(f"{cell} at {budget:.0%}: no time is left")
                continue
            self._measure(budget, cell, left / (len(cells) - index))
        if self._traffic.budget_seconds:
            self._change_budgets()
        if self._traffic.restart:
            self._restart(settings.budgets[0])
        return self._told.report

    def _learn(self) -> None:
        """What the topics that are not measured use most."""
        place = Place("ours", len(self._shelf.sizes.layer_bytes), ())
        require_managed(self._shelf.open(place))
        tokens = self._walks.tokens(self._settings.learn_tokens, 0, "learn")
        halves = self._shelf.ask(place, "learn", tokens=tokens)["halves"]
        self._order = [popular(counts) for counts in np.array(halves).sum(axis=0)]
        self._told.say(f"learned topics {_names(self._walks.learned)} from {len(tokens)} tokens")

    # -- one cell

    def _measure(self, budget: float, cell: Cell, seconds: float) -> None:
        """One cell at one budget, in about `seconds`."""
        began = time.monotonic()
        slots = even_slots(budget, self._shelf.sizes, self._n_expert)
        if not slots[0]:
            self._told.note(f"{cell} at {budget:.0%}: that is no slot in every layer")
            return
        live, frozen = self._places(slots)
        speeds = self._race.scout(cell, [*self._frozen(frozen), *self._static(budget)])
        if not {"ours", "stock" if self._settings.peer else "same"} <= {arm.role for arm in speeds}:
            self._told.note(f"{cell} at {budget:.0%}: nothing to compare")
            return
        speeds |= self._lead_in(cell, live)
        left = seconds - (time.monotonic() - began)
        n_steps = self._race.n_steps(cell, speeds, left * (1 - _PUSH_SHARE), MOST_STEPS)
        times = self._race.rounds(cell, list(speeds), n_steps, self._deadline - self._reserved)
        cost = self._upload_cost(cell, times, n_steps, left * _PUSH_SHARE)
        self._tell(budget, cell, times, n_steps, cost)
        self._shelf.close(live)
        self._shelf.close(frozen)

    def _places(self, slots: tuple[int, ...]) -> tuple[Place, Place]:
        """Slots that follow the traffic, and as many with what other topics use."""
        n_layers = len(slots)
        live = Place("ours", n_layers, slots, vram=in_mib(self._shelf.sizes.slab_bytes(slots)))
        given = tuple(layer["slots"] for layer in self._shelf.open(live)["layers"])
        if given != slots:
            raise HotsetError(f"the device gave {min(given)} to {max(given)} slots a layer, not {slots[0]}")
        frozen = Place("ours", n_layers, slots)
        self._shelf.assign(frozen, [order[:n] for order, n in zip(self._order, slots, strict=True)])
        return live, frozen

    def _frozen(self, place: Place) -> list[Arm]:
        return [Arm("ours", place, threads, "other topics") for threads in self._settings.threads]

    def _static(self, budget: float) -> list[Arm]:
        """The split with most layers on the device, and every `split_step`-th of the others."""
        settings = self._settings
        splits = fitting_splits(budget, self._shelf.sizes)
        chosen = splits[:: settings.split_step or len(splits)]
        peer = settings.peer is not None
        return [
            Arm("stock" if peer else "same", Place("peer" if peer else "ours", n_cpu), threads)
            for threads in settings.threads
            for n_cpu in chosen
        ]

    def _lead_in(self, cell: Cell, place: Place) -> dict[Arm, float]:
        """Traffic that fills the slots, then what each number of threads takes; the fastest stays."""
        arms = [Arm("ours", place, threads, "traffic") for threads in self._settings.threads]
        self._decode(cell, arms[0], LEAD_STEPS, _LEAD)
        tries: dict[Arm, list[float]] = {arm: [] for arm in arms}
        for number in range(SCOUTS):
            for index, arm in enumerate(arms):
                piece = _LEAD + LEAD_STEPS // _TRY_STEPS + number * len(arms) + index
                tries[arm].append(self._decode(cell, arm, _TRY_STEPS, piece))
        best = min(tries, key=lambda arm: min(tries[arm]))
        self._told.say(f"scout {best.label}: {1e3 * min(tries[best]):.2f} ms")
        return {best: min(tries[best])}

    def _decode(self, cell: Cell, arm: Arm, n_steps: int, number: int) -> float:
        """Seconds per step."""
        steps = self._walks.steps(n_steps, cell.n_sequences, number)
        warm = min(cell.warm, n_steps - 1)
        reply = self._shelf.ask(arm.place, "decode", steps=steps, warm=warm, threads=arm.threads)
        return float(reply["seconds"]) / (n_steps - warm)

    def _upload_cost(self, cell: Cell, times: Mapping[Arm, Timed], n_steps: int, seconds: float) -> UploadCost | None:
        """With the frozen set, at the mean rate of the live one; None where that moved nothing."""
        live = next(timed for arm, timed in times.items() if arm.origin == "traffic")
        rate = live.upload_bytes / (sum(live.seconds) * n_steps)
        if not rate:
            return None
        arm = min((one for one in times if one.origin == "other topics"), key=lambda one: times[one].median)
        each = 2 * (_PUSH_WARM + _PUSH_STEPS)
        n_pairs = min(_MOST_PAIRS, max(_LEAST_PAIRS, int(seconds / (each * times[arm].median))))
        size = _PUSH_WARM + _PUSH_STEPS
        pairs = [self._walks.steps(size, cell.n_sequences, _PUSHED + number) for number in range(n_pairs)]
        reply = self._shelf.ask(
            arm.place, "push", pairs=pairs, warm=_PUSH_WARM, threads=arm.threads, bytes_per_second=rate,
            together=max(1, round(live.uploads / (len(live.seconds) * n_steps))),
        )  # fmt: skip
        return UploadCost.of(reply)

    def _tell(
        self, budget: float, cell: Cell, times: Mapping[Arm, Timed], n_steps: int, cost: UploadCost | None
    ) -> None:
        n_rounds = min(len(timed.seconds) for timed in times.values())
        pieces = [step for number in range(n_rounds) for step in self._race.steps(cell, n_steps, number)]
        switches = self._walks.switches(pieces)
        self._told.say(f"{cell} at {budget:.0%}: {n_rounds} x {n_steps} timed steps, {switches} switches of topic")
        if not switches:
            self._told.note(f"{cell} at {budget:.0%}: no topic was switched in so few steps")
        found = list(self._judge.rows(budget, cell, times, n_steps, cost))
        self._told.report.rows.extend(found)
        self._told.report.measurements.extend(measurements(budget, cell, times))
        for row in found:
            self._told.say(row.line)
        self._told.write()

    # -- budgets

    def _change_budgets(self) -> None:
        """Sequences decode while their experts' budget changes."""
        traffic, sizes = self._traffic, self._shelf.sizes
        n = traffic.budget_sequences
        slots = even_slots(0.5, sizes, self._n_expert)
        place = Place("ours", len(slots), slots, vram=traffic.budgets[0])
        threads = max(self._settings.threads)
        cell = Cell("decode", n, 1)
        self._decode(cell, Arm("ours", place, threads, "traffic"), LEAD_STEPS, _LEAD)
        reply = self._shelf.ask(
            place, "change_budgets", steps=self._walks.steps(sizes.n_ctx // n, n, _CHANGED), threads=threads,
            budgets=traffic.budgets[1:], seconds=traffic.budget_seconds,
        )  # fmt: skip
        try:
            changes = budget_gaps.judge(reply, traffic.budgets, n, threads)
        except ValueError as error:
            self._told.note(f"changing budgets: {error}; keep each of them for longer")
            return
        report = self._told.report.model_copy(update={"budget_changes": changes})
        self._told.report = report
        for change in changes.changes:
            self._told.say(change.line)
        self._told.write()

    # -- restarts

    def _restart(self, budget: float) -> None:
        """Another prompt of a topic after a warm start, without a restart, and after a cold one."""
        slots = even_slots(budget, self._shelf.sizes, self._n_expert)
        if not slots[0]:
            self._told.note(f"restart at {budget:.0%}: that is no slot in every layer")
            return
        with tempfile.TemporaryDirectory() as state:
            rates = [self._restart_in(slots, topic, f"{state}/{topic}") for topic in self._walks.visited]
        before, warm, without, cold = zip(*rates, strict=True)
        found = rows.Restart(
            budget=budget, tokens=RESTART_TOKENS, topics=self._walks.visited, before=before, warm=warm, without=without,
            cold=cold,
        )  # fmt: skip
        self._told.report = self._told.report.model_copy(update={"restart": found})
        self._told.say(found.line)
        self._told.write()

    def _restart_in(self, slots: tuple[int, ...], topic: int, state: str) -> tuple[float, float, float, float]:
        """Hit rates before, warm, without a restart and cold; what is saved in between is copied beside `state`."""
        Path(state).mkdir()
        vram = in_mib(self._shelf.sizes.slab_bytes(slots))
        places = [Place("ours", len(slots), slots, vram, directory) for directory in (state, f"{state}-saved", "")]
        prompt = self._walks.prompt(LEAD_STEPS + RESTART_TOKENS, topic, _RESTARTED)
        other = self._walks.prompt(RESTART_TOKENS, topic, _RESTARTED + 1)
        before = self._hit_rate(places[0], prompt, LEAD_STEPS)
        self._shelf.ask(places[0], "save")
        shutil.copytree(state, f"{state}-saved")
        rates = []
        for place in places:
            rates.append(self._hit_rate(place, other, 0))
            self._shelf.close(place)
        return before, rates[1], rates[0], rates[2]

    def _hit_rate(self, place: Place, steps: Sequence[Sequence[int]], warm: int) -> float:
        threads = max(self._settings.threads)
        reply = self._shelf.ask(place, "decode", steps=steps, warm=warm, threads=threads)
        hits, misses = sum(reply["hits"]), sum(reply["misses"])
        return float(hits / (hits + misses))


def even_slots(budget: float, sizes: Sizes, n_expert: int) -> tuple[int, ...]:
    """The same number of slots for every layer, those of zeros counted."""
    allowed, n_layers = budget_bytes(budget, sizes), len(sizes.layer_bytes)
    choices = ((n,) * n_layers for n in range(n_expert + 1))
    return max(slots for slots in choices if sizes.slab_bytes(slots) <= allowed)


def in_mib(n_bytes: int) -> str:
    """A budget that holds so many bytes, as residency.vram takes it."""
    return f"{-(-n_bytes * 1000 // _MIB) / 1000:.3f}"


def _sizes(settings: Settings, traffic: Traffic, facts: ModelFacts) -> Sizes:
    sequences = max((*settings.sequences, traffic.budget_sequences if traffic.budget_seconds else 1))
    steps = max(MOST_STEPS + 8, LEAD_STEPS + RESTART_TOKENS, settings.steps + 8)
    return Sizes.of(
        facts,
        path=str(settings.model),
        load_mode=settings.load_mode,
        n_ctx=-(-max(steps * sequences, LEARN_PROMPT) // 256) * 256,
        max_sequences=sequences,
        ubatch=settings.ubatch,
    )


def _described(traffic: Traffic, walks: TopicWalks) -> dict[str, object]:
    return {
        "topics": walks.visited,
        "frozen_set_learned_on": walks.learned,
        "tokens_per_visit": traffic.n_visit,
        "lead_steps": LEAD_STEPS,
        "upload_pace_mib_per_second": Config().residency.upload,
    }


def _names(topics: Sequence[int]) -> str:
    return ", ".join(map(str, topics))
