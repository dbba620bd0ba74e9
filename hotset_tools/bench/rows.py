"""The result of `hotset bench decode`, `prefill` and `live`: rows, the measurements behind them, and the head. Pure."""

from __future__ import annotations

from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Share = Field(ge=0, le=1)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Baseline(_Strict):
    """The static split that a row is compared with: the fastest of those that fit the budget."""

    library: Literal["stock", "this build, feature off"]
    cpu_moe_layers: int = Field(ge=0)
    threads: int = Field(ge=1)
    tokens_per_second: float = Field(gt=0)


class Row(_Strict):
    """One placement at one budget in one phase.

    Shares are 0 to 1. `resident`: expert bytes on the device of all expert bytes, slots of zeros counted. Ratios
    are medians over the rounds of (seconds of the baseline / seconds of this), `ci` is the 95 % interval of the first.
    `measured_over_model` is the model's time over the measured one, `measured_over_limit` the same without the fixed
    prices; both are about decoding only. `plan` is who chose the placement.

    The rest is of `hotset bench live`, where `mode` "live" are experts that follow the traffic and the frozen set has
    the same slots; it may leave out the same scheduler. `upload_cost` is the share of decode speed that uploads into
    slots which no step reads take away (0.01: 1 %; below 0: noise), at `upload_cost_mib_per_second`.
    """

    phase: Literal["decode", "prefill"]
    backend: str
    mode: Literal["static", "live", "off"]
    plan: Literal["planner", "all partial", "split", "traffic", "other topics"]
    budget: float = Share
    resident: float = Field(ge=0, le=1.01)
    layers: dict[str, int]
    sequences: int = Field(ge=1)
    tokens: int = Field(ge=1)
    ubatch: int = Field(ge=1)
    threads: int = Field(ge=1)
    hit_rate: float | None = Field(ge=0, le=1)
    tokens_per_second: float = Field(gt=0)
    ratio_vs_best_static: float = Field(gt=0)
    ci: tuple[float, float]
    ratio_vs_same_scheduler: float | None = Field(gt=0)
    ci_same_scheduler: tuple[float, float] | None
    best_static: Baseline
    same_scheduler: Baseline | None
    measured_over_model: float | None
    measured_over_limit: float | None
    rounds: int = Field(ge=1)
    seed: int
    commit: str
    moves_per_token: float | None = Field(default=None, ge=0)
    upload_mib_per_second: float | None = Field(default=None, ge=0)
    ratio_vs_frozen: float | None = Field(default=None, gt=0)
    ci_vs_frozen: tuple[float, float] | None = None
    upload_cost: float | None = None
    ci_upload_cost: tuple[float, float] | None = None
    upload_cost_mib_per_second: float | None = Field(default=None, ge=0)

    @property
    def line(self) -> str:
        """For people."""
        hits = "-" if self.hit_rate is None else f"{self.hit_rate:.3f}"
        model = "-" if self.measured_over_model is None else f"{self.measured_over_model:.2f}"
        size = f"of {self.tokens}" if self.phase == "prefill" else f"x{self.sequences}"
        same = "" if self.ratio_vs_same_scheduler is None else f", same scheduler {self.ratio_vs_same_scheduler:.2f}"
        frozen = "" if self.ratio_vs_frozen is None else f", against frozen {self.ratio_vs_frozen:.2f}"
        cost = "" if self.upload_cost is None else f", uploads cost {self.upload_cost:.1%}"
        return (
            f"{self.phase} {size} {self.budget:.0%} {self.mode} ({self.plan}), {self.threads} threads: "
            f"{self.tokens_per_second:.1f} tok/s, hits {hits}, against best static {self.ratio_vs_best_static:.2f} "
            f"({self.ci[0]:.2f}-{self.ci[1]:.2f}){frozen}{same}{cost}, model {model}"
        )


class Measurement(_Strict):
    """What one arm took: seconds per step or prompt, round by round."""

    phase: Literal["decode", "prefill"]
    budget: float = Share
    arm: str
    sequences: int
    tokens: int
    seconds: tuple[float, ...]


class Prices(_Strict):
    """What was measured for the cost model: seconds per layer and step, bytes per second (None: not measurable)."""

    sequences: int
    threads: int
    fixed: float
    partial: float
    cold: float
    gpu_bandwidth: float | None
    cpu_bandwidth: float | None
    probed_layers: int
    seconds: dict[str, float]


class BudgetChange(_Strict):
    """Another budget while sequences decode. Bytes before and after are of slots, and what the driver says is free.

    `longest_gap_ms` lies between two steps of the time with this budget, which begins when it is asked for; so do the
    `tokens` of each sequence. Seconds are until nine tenths of the change could be seen; None: never, or the driver
    does not tell.
    """

    before: str
    after: str
    longest_gap_ms: float = Field(ge=0)
    tokens: tuple[int, ...]
    slot_bytes: tuple[int, int]
    free_bytes: tuple[int, int]
    seconds_to_slots: float | None
    seconds_to_memory: float | None

    @property
    def line(self) -> str:
        """For people."""
        slots, memory = (
            "never" if one is None else f"after {one:.2f} s" for one in (self.seconds_to_slots, self.seconds_to_memory)
        )
        return (
            f"budget {self.before} to {self.after}: longest gap {self.longest_gap_ms:.0f} ms, slots {slots}, "
            f"driver's memory {memory}, {min(self.tokens)} tokens of each of {len(self.tokens)}"
        )


class BudgetChanges(_Strict):
    """Budgets that change while sequences decode; the usual gap is the median, the quiet one the longest before."""

    sequences: int
    threads: int
    usual_gap_ms: float
    quiet_gap_ms: float
    changes: tuple[BudgetChange, ...]


class Restart(_Strict):
    """Hit rates of `tokens` decoded tokens, topic by topic: of the end of one prompt, and of the beginning of another
    one: after a start with what was saved in between, without a restart, and after a start with nothing."""

    budget: float = Share
    tokens: int = Field(ge=1)
    topics: tuple[int, ...]
    before: tuple[float, ...]
    warm: tuple[float, ...]
    without: tuple[float, ...]
    cold: tuple[float, ...]

    @property
    def line(self) -> str:
        """For people."""
        before, warm, without, cold = (fmean(one) for one in (self.before, self.warm, self.without, self.cold))
        return (
            f"restart at {self.budget:.0%}: hits {before:.3f} before, then {warm:.3f} of another prompt warm, "
            f"{without:.3f} without a restart, {cold:.3f} cold"
        )


class Report(_Strict):
    """Everything that one command measured."""

    head: dict[str, Any]
    prices: list[Prices]
    rows: list[Row]
    measurements: list[Measurement]
    notes: list[str]
    budget_changes: BudgetChanges | None = None
    restart: Restart | None = None
