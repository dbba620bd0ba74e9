"""What is measured against what: settings, cells (one phase at one size), and the arms that compete in a cell. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from daemon.errors import HotsetError
from daemon.hotset.files import obstacle
from daemon.hotset.planner import Kind, Plan
from hotset_tools.bench.shelf import Place, Sizes

MOST_STEPS = 64

Phase = Literal["decode", "prefill"]
Origin = Literal["planner", "all partial", "split", "traffic", "other topics"]
Role = Literal["ours", "same", "stock"]


@dataclass(frozen=True)
class Cell:
    """What is measured of each arm: decoding of `n_sequences`, or a prompt of `n_tokens`."""

    phase: Phase
    n_sequences: int
    n_tokens: int

    @property
    def warm(self) -> int:
        """Steps before the clock starts, for graphs, pipelines and clocks; steps of many sequences take long."""
        return 3 if self.n_sequences <= 4 else 2

    @property
    def least_steps(self) -> int:
        """Steps of a round when time is short."""
        return 8 if self.n_sequences <= 4 else 4

    def __str__(self) -> str:
        return f"prefill of {self.n_tokens}" if self.phase == "prefill" else f"decode of {self.n_sequences}"


@dataclass(frozen=True)
class Settings:
    """What to measure. `budgets` are shares of all expert bytes; `prefill` are prompt lengths in tokens.

    `steps` of a round are 0 where `minutes` should decide. Of the static splits that fit a budget the one with most
    layers on the device competes, and every `split_step`-th of the others, 0: none.

    Raises:
        HotsetError: lists everything that cannot be.
    """

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
    steps: int = 0
    seed: int = 1
    load_mode: str = "none"
    split_step: int = 0
    learn_tokens: int = 8192
    out: Path | None = None
    commit: str = ""

    def __post_init__(self) -> None:
        faults = [
            ("budgets", "are shares from 0 to 1", all(0 < budget <= 1 for budget in self.budgets)),
            ("sequences", "are 1 to 64", all(1 <= n <= 64 for n in self.sequences)),
            ("prompts", "are 33 to 65,536 tokens", all(33 <= n <= 65_536 for n in self.prefill)),
            ("threads", "are 1 to 1,024", bool(self.threads) and all(1 <= n <= 1024 for n in self.threads)),
            ("load", "is none, mmap or auto", self.load_mode in ("none", "mmap", "auto")),
            ("sequences or prompts", "are missing", bool(self.sequences or self.prefill)),
            ("budgets", "are missing", bool(self.budgets)),
            ("out", "names no file in a directory", self.out is None or not obstacle(self.out)),
            ("peer", "has no libllama.so", self.peer is None or (self.peer / "libllama.so").is_file()),
        ]
        if wrong := [f"{name} {rule}" for name, rule, holds in faults if not holds]:
            raise HotsetError("; ".join(wrong))

    @property
    def cells(self) -> list[Cell]:
        """For every budget."""
        return [Cell("decode", n, 1) for n in self.sequences] + [Cell("prefill", 1, n) for n in self.prefill]


@dataclass(frozen=True)
class Arm:
    """One way of computing a cell. Role "ours" is judged, "same" is this build without it, "stock" the unpatched."""

    role: Role
    place: Place
    threads: int
    origin: Origin = "split"

    @property
    def label(self) -> str:
        """For people and JSON."""
        slots = self.place.slots or ()
        where = f"slots in {sum(n > 0 for n in slots)} layers" if slots else "no slots"
        return f"{self.role} ({self.origin}), {self.place.n_cpu} layers on the CPU, {where}, {self.threads} threads"


@dataclass
class Timed:
    """What an arm took: seconds per step or prompt, round by round."""

    seconds: list[float] = field(default_factory=list)
    hits: int = 0
    misses: int = 0
    uploads: int = 0
    upload_bytes: int = 0

    def add(self, reply: Mapping[str, Any], units: int) -> None:
        """One round's reply of a worker, which has `units` steps or prompts."""
        self.seconds.append(float(reply["seconds"]) / units)
        self.hits += sum(reply["hits"])
        self.misses += sum(reply["misses"])
        self.uploads += reply.get("uploads", 0)
        self.upload_bytes += reply.get("upload_bytes", 0)

    @property
    def median(self) -> float:
        """Seconds per step or prompt."""
        return statistics.median(self.seconds)


def budget_bytes(budget: float, sizes: Sizes) -> int:
    """Bytes of a share of all experts."""
    return int(budget * sum(sizes.layer_bytes) + 1e-6)


def fitting_splits(budget: float, sizes: Sizes) -> range:
    """Every `cpu_moe_layers` whose remaining layers fit the budget, the one with most on the device first."""
    n_layers, allowed = len(sizes.layer_bytes), budget_bytes(budget, sizes)
    return range(next(n for n in range(n_layers + 1) if sum(sizes.layer_bytes[n:]) <= allowed), n_layers + 1)


def arms(budget: float, plans: Mapping[Origin, Plan], sizes: Sizes, settings: Settings) -> Iterator[Arm]:
    """All that compete at a budget. A plan that is a split has its own arm over upstream's path."""
    splits = fitting_splits(budget, sizes)
    for threads in settings.threads:
        for origin, plan in plans.items():
            resident = plan.kind is Kind.RESIDENCY
            place = Place("ours", len(plan.slots), plan.slots) if resident else Place("ours", plan.n_cold)
            yield Arm("ours", place, threads, origin)
        for n_cpu in splits[:: settings.split_step or len(splits)]:
            yield Arm("same", Place("ours", n_cpu), threads)
            if settings.peer is not None:
                yield Arm("stock", Place("peer", n_cpu), threads)


def keep(speeds: Mapping[Arm, float], near: float) -> list[Arm]:
    """After scouting, of each placement of ours and of all splits: those at most `near` times the best one's time."""
    kept: list[Arm] = []
    for key in dict.fromkeys((arm.role, arm.origin) for arm in speeds):
        group = {arm: seconds for arm, seconds in speeds.items() if (arm.role, arm.origin) == key}
        limit = min(group.values()) * near
        kept += [arm for arm, seconds in group.items() if seconds <= limit]
    return kept


def fastest(times: Mapping[Arm, Timed], role: Role, origin: Origin | None = None) -> Arm | None:
    """The arm of a role with the least median; None as `origin`: whatever it comes from."""
    found = (arm for arm in times if arm.role == role and origin in (None, arm.origin))
    return min(found, key=lambda arm: times[arm].median, default=None)
