"""Rows of `hotset bench live` from measured times. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotset_tools.bench.arms import Arm, Cell, Timed, fastest
from hotset_tools.bench.intervals import Estimate, estimate, paired_ratio
from hotset_tools.bench.judge import baseline
from hotset_tools.bench.rows import Row
from hotset_tools.bench.shelf import Place, Sizes

_MIB = 1 << 20


@dataclass(frozen=True)
class UploadCost:
    """The share of decode speed that uploads take away, and how fast they were."""

    share: Estimate
    mib_per_second: float

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> UploadCost:
        """From a worker's reply to `push`."""
        pairs = zip(reply["with"], reply["without"], strict=True)
        share = estimate([1 - without / pushing for pushing, without in pairs])
        return cls(share, reply["bytes"] / reply["seconds"] / _MIB)


@dataclass(frozen=True)
class LiveJudge:
    """What all rows of a run have in common; `n_expert` is that of every layer."""

    sizes: Sizes
    n_expert: int
    backend: str
    seed: int
    commit: str

    def rows(
        self, budget: float, cell: Cell, times: Mapping[Arm, Timed], n_steps: int, cost: UploadCost | None
    ) -> Iterator[Row]:
        """One for experts that follow the traffic, one for the frozen set of other topics, one for the best split.

        Rounds had `n_steps` timed steps. Without an arm of the unpatched library the best split is this build's.
        """
        static = fastest(times, "stock") or fastest(times, "same")
        live, frozen = (fastest(times, "ours", origin) for origin in ("traffic", "other topics"))
        assert static is not None
        assert live is not None
        assert frozen is not None
        against_frozen = paired_ratio(times[live].seconds, times[frozen].seconds)
        moved = self._moved(cell, times[live], n_steps) | {
            "ratio_vs_frozen": against_frozen.median,
            "ci_vs_frozen": (against_frozen.low, against_frozen.high),
        }
        if cost is not None:
            moved |= {
                "upload_cost": cost.share.median,
                "ci_upload_cost": (cost.share.low, cost.share.high),
                "upload_cost_mib_per_second": cost.mib_per_second,
            }
        yield self._row(budget, cell, live, "live", times, static, moved)
        yield self._row(budget, cell, frozen, "static", times, static, {})
        yield self._row(budget, cell, static, "off", times, static, {})

    def _moved(self, cell: Cell, timed: Timed, n_steps: int) -> dict[str, Any]:
        n_all = n_steps * len(timed.seconds)
        seconds = sum(timed.seconds) * n_steps
        return {
            "moves_per_token": timed.uploads / (n_all * cell.n_sequences),
            "upload_mib_per_second": timed.upload_bytes / seconds / _MIB,
        }

    def _row(
        self, budget: float, cell: Cell, arm: Arm, mode: str, times: Mapping[Arm, Timed], static: Arm, more: Any
    ) -> Row:
        timed = times[arm]
        ratio = paired_ratio(timed.seconds, times[static].seconds)
        counted = timed.hits + timed.misses
        values = {
            "phase": cell.phase,
            "backend": self.backend,
            "mode": mode,
            "plan": arm.origin,
            "budget": budget,
            "resident": self._held(arm.place) / sum(self.sizes.layer_bytes),
            "layers": self._modes(arm.place),
            "sequences": cell.n_sequences,
            "tokens": cell.n_tokens,
            "ubatch": self.sizes.ubatch,
            "threads": arm.threads,
            "hit_rate": timed.hits / counted if counted else None,
            "tokens_per_second": cell.n_sequences / timed.median,
            "ratio_vs_best_static": ratio.median,
            "ci": (ratio.low, ratio.high),
            "ratio_vs_same_scheduler": None,
            "ci_same_scheduler": None,
            "best_static": baseline(static, times, cell.n_sequences),
            "same_scheduler": None,
            "measured_over_model": None,
            "measured_over_limit": None,
            "rounds": len(timed.seconds),
            "seed": self.seed,
            "commit": self.commit,
        }
        return Row.model_validate(values | more)

    def _held(self, place: Place) -> int:
        return self.sizes.slab_bytes(place.slots) if place.slots else sum(self.sizes.layer_bytes[place.n_cpu :])

    def _modes(self, place: Place) -> dict[str, int]:
        slots: Sequence[int] = place.slots or [
            0 if layer < place.n_cpu else self.n_expert for layer in range(len(self.sizes.layer_bytes))
        ]
        full, cold = sum(n == self.n_expert for n in slots), sum(n == 0 for n in slots)
        return {"full": full, "partial": len(slots) - full - cold, "cold": cold}
