"""The result of `hotset bench decode` and `prefill`: rows, the measurements behind them, and the head. Pure."""

from __future__ import annotations

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
    """

    phase: Literal["decode", "prefill"]
    backend: str
    mode: Literal["static", "live", "off"]
    plan: Literal["planner", "all partial", "split"]
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
    ratio_vs_same_scheduler: float = Field(gt=0)
    ci_same_scheduler: tuple[float, float]
    best_static: Baseline
    same_scheduler: Baseline
    measured_over_model: float | None
    measured_over_limit: float | None
    rounds: int = Field(ge=1)
    seed: int
    commit: str

    @property
    def line(self) -> str:
        """For people."""
        hits = "-" if self.hit_rate is None else f"{self.hit_rate:.3f}"
        model = "-" if self.measured_over_model is None else f"{self.measured_over_model:.2f}"
        size = f"of {self.tokens}" if self.phase == "prefill" else f"x{self.sequences}"
        return (
            f"{self.phase} {size} {self.budget:.0%} {self.mode} ({self.plan}), {self.threads} threads: "
            f"{self.tokens_per_second:.1f} tok/s, hits {hits}, against best static {self.ratio_vs_best_static:.2f} "
            f"({self.ci[0]:.2f}-{self.ci[1]:.2f}), same scheduler {self.ratio_vs_same_scheduler:.2f}, model {model}"
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


class Report(_Strict):
    """Everything that one command measured."""

    head: dict[str, Any]
    prices: list[Prices]
    rows: list[Row]
    measurements: list[Measurement]
    notes: list[str]
