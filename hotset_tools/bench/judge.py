"""Rows from measured times: ratios against the fastest splits, and against the cost model. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotset_tools.bench.arms import Arm, Cell, Timed, fastest
from hotset_tools.bench.cost import Prices, Trace, hit_rate, predict
from hotset_tools.bench.intervals import paired_ratio
from hotset_tools.bench.rows import Baseline, Measurement, Row
from hotset_tools.bench.shelf import Place, Sizes


@dataclass(frozen=True)
class Judge:
    """What all rows of a run have in common; `order` is each layer's experts, those of slot 0 first."""

    sizes: Sizes
    order: Sequence[Sequence[int]]
    backend: str
    seed: int
    commit: str

    def rows(
        self,
        budget: float,
        cell: Cell,
        times: Mapping[Arm, Timed],
        trace: Trace | None,
        costs: Mapping[int, Prices],
    ) -> Iterator[Row]:
        """A row for each of ours and one for the feature switched off.

        `trace` is what the timed steps picked (None: a prompt), `costs` are by threads. Without an arm of the unpatched
        library the best static split is this build's.
        """
        same = fastest(times, "same")
        assert same is not None
        stock = fastest(times, "stock") or same
        origins = dict.fromkeys(arm.origin for arm in times if arm.role == "ours")
        ours = [fastest(times, "ours", origin) for origin in origins]
        for arm in [*(arm for arm in ours if arm is not None), same]:
            yield self._row(budget, cell, arm, times, stock, same, trace, costs[arm.threads])

    def _row(
        self,
        budget: float,
        cell: Cell,
        arm: Arm,
        times: Mapping[Arm, Timed],
        stock: Arm,
        same: Arm,
        trace: Trace | None,
        cost: Prices,
    ) -> Row:
        timed, slots = times[arm], self._slots(arm.place)
        against_stock, against_same = (paired_ratio(timed.seconds, times[other].seconds) for other in (stock, same))
        model, limit, hits = self._compared(timed, slots, trace, cost)
        per_unit = cell.n_sequences * cell.n_tokens
        return Row(
            phase=cell.phase,
            backend=self.backend,
            mode="static" if arm.role == "ours" else "off",
            plan=arm.origin,
            budget=budget,
            resident=self._resident_share(arm.place),
            layers=self._modes(slots),
            sequences=cell.n_sequences,
            tokens=cell.n_tokens,
            ubatch=self.sizes.ubatch,
            threads=arm.threads,
            hit_rate=hits,
            tokens_per_second=per_unit / timed.median,
            ratio_vs_best_static=against_stock.median,
            ci=(against_stock.low, against_stock.high),
            ratio_vs_same_scheduler=against_same.median,
            ci_same_scheduler=(against_same.low, against_same.high),
            best_static=baseline(stock, times, per_unit),
            same_scheduler=baseline(same, times, per_unit),
            measured_over_model=model,
            measured_over_limit=limit,
            rounds=len(timed.seconds),
            seed=self.seed,
            commit=self.commit,
        )

    def _compared(
        self, timed: Timed, slots: Sequence[int], trace: Trace | None, cost: Prices
    ) -> tuple[float | None, float | None, float | None]:
        """The model's and the limit's time over the measured one, and the hit rate; None for prompts.

        Prompts take upstream's path in partial layers, so they have no hits.
        """
        if trace is None:
            return None, None, None
        resident, partial = self._resident(slots), np.array([mode == "partial" for mode in self._mode(slots)])
        predicted = predict(trace, resident, partial, self.sizes.expert_bytes, cost)
        counted = timed.hits + timed.misses
        hits = timed.hits / counted if counted else hit_rate(trace, resident)
        return predicted.model / timed.median, predicted.limit / timed.median, hits

    def _slots(self, place: Place) -> Sequence[int]:
        """Experts of each layer on the device, whether in slots or loaded there."""
        if place.slots:
            return place.slots
        return [0 if layer < place.n_cpu else len(experts) for layer, experts in enumerate(self.order)]

    def _mode(self, slots: Sequence[int]) -> list[str]:
        names = {0: "cold"}
        return [
            "full" if n == len(experts) else names.get(n, "partial")
            for n, experts in zip(slots, self.order, strict=True)
        ]

    def _modes(self, slots: Sequence[int]) -> dict[str, int]:
        modes = self._mode(slots)
        return {name: modes.count(name) for name in ("full", "partial", "cold")}

    def _resident(self, slots: Sequence[int]) -> npt.NDArray[np.bool_]:
        resident = np.zeros((len(slots), max(map(len, self.order))), bool)
        for layer, (experts, n) in enumerate(zip(self.order, slots, strict=True)):
            resident[layer, list(experts[:n])] = True
        return resident

    def _resident_share(self, place: Place) -> float:
        sizes = self.sizes
        held = sizes.slab_bytes(place.slots) if place.slots else sum(sizes.layer_bytes[place.n_cpu :])
        return held / sum(sizes.layer_bytes)


def measurements(budget: float, cell: Cell, times: Mapping[Arm, Timed]) -> Iterator[Measurement]:
    """What rows are made of."""
    for arm, timed in times.items():
        yield Measurement(
            phase=cell.phase,
            budget=budget,
            arm=arm.label,
            sequences=cell.n_sequences,
            tokens=cell.n_tokens,
            seconds=tuple(timed.seconds),
        )


def baseline(arm: Arm, times: Mapping[Arm, Timed], n_tokens: int) -> Baseline:
    """What rows say of the split that they are compared with; a step or prompt has `n_tokens`."""
    return Baseline(
        library="stock" if arm.role == "stock" else "this build, feature off",
        cpu_moe_layers=arm.place.n_cpu,
        threads=arm.threads,
        tokens_per_second=n_tokens / times[arm].median,
    )
