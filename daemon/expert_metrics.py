"""Metrics of experts in VRAM: counters that outlive engines, and gauges of what the engine said last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric

from daemon.messages import ExpertDevice, ExpertLayer, GateState, Residency, SelfTestState


class ExpertCounters:
    """Sums over all engines of one service: an engine counts from its own start, a counter must not go backwards.

    `tier` is where the weights were: "vram", "ram", or "mapped" for a file that may be on disk in part. What an engine
    selected after its last report is lost with it.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        labels = ["device", "tier"]
        self._hits = Counter("hotset_expert_hits", "Selections of experts computed in VRAM.", labels, registry=registry)
        self._misses = Counter(
            "hotset_expert_misses", "Selections of experts computed elsewhere.", labels, registry=registry
        )
        self._swaps = Counter(
            "hotset_expert_swaps", "Experts brought to VRAM because of the traffic.", registry=registry
        )
        self._uploaded = Counter("hotset_expert_upload_bytes", "Experts copied to VRAM.", registry=registry)
        self._seen: dict[tuple[str, int], int] = {}

    def engine_started(self) -> None:
        """Reports from now on are of another engine."""
        self._seen.clear()

    def report(self, residency: Residency) -> None:
        """What the engine that started last has counted so far."""
        self._swaps.inc(self._new("moves", 0, residency.moves))
        self._uploaded.inc(self._new("uploaded", 0, residency.uploaded_bytes))
        for number, layer in enumerate(residency.layers):
            if layer.device:
                self._hits.labels(layer.device, "vram").inc(self._new("hits", number, layer.hits))
                self._misses.labels(layer.device, _tier(layer)).inc(self._new("misses", number, layer.misses))

    def _new(self, what: str, number: int, count: int) -> int:
        """What has come to this count of the engine's; all of it where the engine began anew by itself."""
        before = self._seen.get((what, number), 0)
        self._seen[what, number] = count
        return count - before if count >= before else count


def _tier(layer: ExpertLayer) -> str:
    return "mapped" if layer.memory == "mapped" else "ram"


_GAUGES: tuple[tuple[str, str, Callable[[ExpertDevice], int]], ...] = (
    ("slots_total", "Places for experts in VRAM.", lambda one: one.slots),
    ("slots_resident", "Of them, with an expert in use.", lambda one: one.resident),
    ("vram_bytes", "VRAM that experts take.", lambda one: one.bytes),
)


def gauges(residency: Residency) -> Iterator[Metric]:
    """One series a device, none where residency is off; the hit rate once there is one."""
    for name, documentation, value in _GAUGES:
        family = GaugeMetricFamily(f"hotset_expert_{name}", documentation, labels=["device"])
        for device in residency.devices:
            family.add_metric([device.device], value(device))
        yield family
    rate = GaugeMetricFamily("hotset_expert_hit_rate", "Of selections in recent decode steps, computed in VRAM, 0-1.")
    if residency.hit_rate is not None:
        rate.add_metric([], residency.hit_rate)
    yield rate
    yield _one_of("gate", "1 for whether experts in VRAM pay.", "state", get_args(GateState), residency.gate.state)
    results = get_args(SelfTestState)
    yield _one_of("selftest", "1 for how the self-test stands.", "result", results, residency.selftest)


def _one_of(name: str, documentation: str, label: str, values: tuple[str, ...], current: str) -> Metric:
    family = GaugeMetricFamily(f"hotset_expert_{name}", documentation, labels=[label])
    for value in values:
        family.add_metric([value], value == current)
    return family
