"""`hotset bench decode` and `prefill`: residency against every static split of the same size, in interleaved rounds."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from daemon.engine.residency_report import WHY_NOT
from daemon.errors import HotsetError
from daemon.hotset import planner
from daemon.hotset.planner import LayerState, Plan
from daemon.native import locate
from daemon.native.gguf_check import check
from daemon.native.gguf_facts import ModelFacts
from daemon.native.hotset import Reason
from hotset_tools.bench import hardware, rows
from hotset_tools.bench.arms import MOST_STEPS, Arm, Cell, Origin, Settings, Timed, arms, budget_bytes
from hotset_tools.bench.child import Child
from hotset_tools.bench.cost import Trace
from hotset_tools.bench.judge import Judge, measurements
from hotset_tools.bench.probing import PROBE_WIDTH, Probed, Prober
from hotset_tools.bench.race import Race
from hotset_tools.bench.reporter import Reporter
from hotset_tools.bench.routing_facts import distinct_curve, hit_curve, popular
from hotset_tools.bench.shelf import Place, Shelf, Sizes
from hotset_tools.bench.walks import Walks
from hotset_tools.bench.worker import LEARN_PROMPT

_PLANNING, _PLANNING_STEPS = 8000, 32  # number of the walk, and how far, that tells what several sequences share
_TRACED_ROUNDS = 3
_MOST_WARM = 4  # at least the warm steps of any cell


def run(settings: Settings) -> rows.Report:
    """Measure everything; what is ready is in `settings.out` and on stderr at any time.

    Raises:
        HotsetError: the model has no experts, the device is missing, or a worker ended.
    """
    facts = check(settings.model).facts
    sizes = _sizes(settings, facts)
    with ExitStack() as stack:
        libraries = {"ours": locate.require_build().directory} | ({"peer": settings.peer} if settings.peer else {})
        children = {name: stack.enter_context(Child(name, path)) for name, path in libraries.items()}
        return Bench(settings, facts, sizes, children, libraries).run()


class Bench:
    """One run; `children` are workers by library."""

    def __init__(
        self,
        settings: Settings,
        facts: ModelFacts,
        sizes: Sizes,
        children: dict[str, Child],
        libraries: dict[str, Path],
    ) -> None:
        self._settings = settings
        self._began = time.monotonic()
        self._deadline = self._began + 60 * settings.minutes
        devices = {"ours": settings.device, "peer": settings.peer_device or settings.device}
        said = {name: child.ask("hello", device=devices[name]) for name, child in children.items()}
        self._walks = Walks(settings.model, facts.n_vocab, settings.seed)
        self._shelf = Shelf(children, devices, sizes)
        described = head(settings, facts, libraries, said["ours"]["devices"], self._walks.kind)
        self._report = rows.Report(head=described, prices=[], rows=[], measurements=[], notes=[])
        reporter = Reporter(self._report, settings.out, self._began)
        self._say, self._note, self._write = reporter.say, reporter.note, reporter.write
        self._race = Race(self._shelf, self._walks, settings, self._say, self._note)

    def run(self) -> rows.Report:
        """Learn, probe, and measure budget by budget."""
        settings = self._settings
        self._learn()
        probed = {n: self._probe(n) for n in settings.sequences or (1,)}
        cells = [(budget, cell) for budget in settings.budgets for cell in settings.cells]
        for index, (budget, cell) in enumerate(cells):
            left = self._deadline - time.monotonic()
            if left <= 0:
                self._note(f"{cell} at {budget:.0%}: no time is left")
                continue
            self._measure(
                budget, cell, probed.get(cell.n_sequences) or probed[min(probed)], left / (len(cells) - index)
            )
        return self._report

    def _learn(self) -> None:
        """A static hot set from one part of the walk, and how well one half of it does on the other."""
        sizes, settings = self._shelf.sizes, self._settings
        place = Place("ours", len(sizes.layer_bytes), ())
        require_managed(self._shelf.open(place))
        tokens = self._walks.tokens(settings.learn_tokens, 0, "learn")
        first, second = (np.array(half) for half in self._shelf.ask(place, "learn", tokens=tokens)["halves"])
        self._curves = [hit_curve(a, b) for a, b in zip(first, second, strict=True)]
        self._order = [popular(counts) for counts in first + second]
        self._prober = Prober(self._shelf, self._walks, first + second)
        self._judge = Judge(
            sizes, self._order, backend_of(settings.device), settings.seed, settings.commit or hardware.commit()
        )
        self._say(f"learned from {len(tokens)} tokens")

    def _probe(self, n_sequences: int) -> dict[int, Probed]:
        """The prices for each number of threads."""
        found = {threads: self._prober.measure(n_sequences, threads) for threads in self._settings.threads}
        for threads, probed in found.items():
            cost = probed.cost
            entry = rows.Prices(
                sequences=n_sequences,
                threads=threads,
                fixed=cost.fixed,
                partial=cost.partial,
                cold=cost.cold,
                gpu_bandwidth=_finite(cost.gpu_bandwidth),
                cpu_bandwidth=_finite(cost.cpu_bandwidth),
                probed_layers=probed.n_layers,
                seconds=probed.seconds,
            )
            self._report.prices.append(entry)
            self._say(f"prices {entry.model_dump_json()}")
        self._write()
        return found

    def _measure(self, budget: float, cell: Cell, probed: dict[int, Probed], seconds: float) -> None:
        """One cell at one budget, in about `seconds`."""
        began = time.monotonic()
        sizes, settings = self._shelf.sizes, self._settings
        best = min(probed, key=lambda threads: probed[threads].seconds["empty"])
        candidates = list(arms(budget, self._plans(budget, probed[best], cell.n_sequences), sizes, settings))
        self._announce(candidates)
        speeds = self._race.scout(cell, candidates)
        if not {"ours", "same"} <= {arm.role for arm in speeds}:
            self._note(f"{cell} at {budget:.0%}: nothing to compare")
            return
        n_steps = self._race.n_steps(cell, speeds, seconds - (time.monotonic() - began))
        times = self._race.rounds(cell, list(speeds), n_steps, self._deadline)
        costs = {threads: found.cost for threads, found in probed.items()}
        found = list(self._judge.rows(budget, cell, times, self._trace(cell, n_steps, times), costs))
        self._report.rows.extend(found)
        self._report.measurements.extend(measurements(budget, cell, times))
        for row in found:
            self._say(row.line)
        self._write()

    def _plans(self, budget: float, probed: Probed, n_sequences: int) -> dict[Origin, Plan]:
        """The planner's choice, and the same share of every layer where that is another one."""
        layers = self._states(probed, n_sequences)
        allowed = budget_bytes(budget, self._shelf.sizes)
        chosen, even = planner.plan(layers, allowed), planner.all_partial(layers, allowed)
        different = any(even.slots) and (chosen.slots != even.slots or chosen.kind is not even.kind)
        return {"planner": chosen, "all partial": even} if different else {"planner": chosen}

    def _states(self, probed: Probed, n_sequences: int) -> list[LayerState]:
        """What the planner is told: sequences share experts, so hits are counted by the experts that a step reads."""
        trace = self._prober.trace(self._walks.steps(_PLANNING_STEPS, n_sequences, _PLANNING + n_sequences))
        distinct = (trace > 0).sum(axis=2).mean(axis=0)
        curves = self._curves
        if n_sequences > 1:
            curves = [distinct_curve(trace[:, layer], order) for layer, order in enumerate(self._order)]
        cost = probed.cost
        return [
            LayerState(
                expert_bytes=size,
                hit_rates=curve,
                fixed=cost.fixed,
                partial_price=cost.partial,
                cold_price=cost.cold,
                cpu=size * float(n) / cost.cpu_bandwidth,
                device=size * float(n) / cost.gpu_bandwidth,
            )
            for size, curve, n in zip(self._shelf.sizes.expert_bytes, curves, distinct, strict=True)
        ]

    def _announce(self, candidates: list[Arm]) -> None:
        """Tell the shelf which experts are to be in the slots."""
        for place in {arm.place for arm in candidates if arm.place.slots}:
            slots = place.slots or ()
            self._shelf.assign(place, [order[:n] for order, n in zip(self._order, slots, strict=True)])

    def _trace(self, cell: Cell, n_steps: int, times: dict[Arm, Timed]) -> Trace | None:
        """What the timed steps of the first rounds picked."""
        if cell.phase == "prefill":
            return None
        n_rounds = min(_TRACED_ROUNDS, *(len(timed.seconds) for timed in times.values()))
        traces = [self._prober.trace(self._race.steps(cell, n_steps, number)) for number in range(n_rounds)]
        return np.concatenate([trace[cell.warm :] for trace in traces])


def _sizes(settings: Settings, facts: ModelFacts) -> Sizes:
    """The cache has room for the longest prompt and for what all sequences decode together."""
    sequences = max((PROBE_WIDTH, *settings.sequences))
    cells = max(((max(MOST_STEPS, settings.steps) + _MOST_WARM) * sequences, LEARN_PROMPT, *settings.prefill))
    return Sizes.of(
        facts,
        path=str(settings.model),
        load_mode=settings.load_mode,
        n_ctx=-(-cells // 256) * 256,
        max_sequences=sequences,
        ubatch=settings.ubatch,
    )


def require_managed(opened: Mapping[str, Any]) -> None:
    """Whether a context of which a worker said this can have slots in all layers.

    Raises:
        HotsetError: it has layers that cannot.
    """
    reasons = {layer["reason"] for layer in opened["layers"]} - {"MANAGED"}
    if reasons:
        why = ", ".join(sorted(WHY_NOT[Reason[one]] for one in reasons))
        raise HotsetError(f"not every layer can be managed: {why}")


def backend_of(device: str) -> str:
    """As rows name it: "vulkan" for Vulkan0."""
    return "".join(letter for letter in device.split(":")[0] if letter.isalpha()).lower()


def head(
    settings: Settings, facts: ModelFacts, libraries: dict[str, Path], devices: list[dict[str, Any]], routing: str
) -> dict[str, Any]:
    """What a report says of its circumstances."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware.describe() | {"devices": devices},
        "build": {name: hardware.build(path) for name, path in libraries.items()},
        "stock": "unpatched build" if settings.peer else "this build with the feature off",
        "model": {
            "name": settings.model.name,
            "architecture": facts.architecture,
            "layers": facts.n_layer,
            "experts": facts.n_expert,
            "top_k": facts.n_expert_used,
            "expert_bytes": facts.expert_bytes,
            "other_bytes": facts.other_bytes,
            "routing": routing,
        },
        "settings": {
            "device": settings.device,
            "threads": settings.threads,
            "ubatch": settings.ubatch,
            "rounds": settings.rounds,
            "minutes": settings.minutes,
            "steps": settings.steps,
            "seed": settings.seed,
            "load": settings.load_mode,
            "learn_tokens": settings.learn_tokens,
            "split_step": settings.split_step,
            "cache": "empty before every measurement",
            "budget": "share of all expert bytes, slots of zeros counted",
        },
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
