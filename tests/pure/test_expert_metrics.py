"""Counters of experts go on when engines are replaced, when layers change, and never go backwards."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from daemon.expert_metrics import ExpertCounters, gauges
from daemon.messages import ExpertLayer, Gate, Residency
from tests.fakes import MOVING


class Counted:
    """Counters, and what they show."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.counters = ExpertCounters(self.registry)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"hotset_expert_{name}_total", labels)

    def all(self) -> dict[tuple[str, str], float]:
        samples = (sample for family in self.registry.collect() for sample in family.samples)
        return {(sample.name, str(sample.labels)): sample.value for sample in samples}


def layer(hits: int, misses: int, device: str = "V0", memory: str = "pinned") -> ExpertLayer:
    fields = {"layer": 0, "mode": "partial", "reason": "", "experts": 8, "slots": 4, "resident": 4}
    return ExpertLayer.model_validate(fields | {"device": device, "memory": memory, "hits": hits, "misses": misses})


def test_layers_of_a_device_are_added_up_by_tier() -> None:
    counted = Counted()
    layers = [layer(3, 1), layer(5, 2), layer(1, 7, memory="mapped"), layer(4, 4, "V1"), layer(0, 9, "")]
    counted.counters.report(Residency(layers=layers, moves=2, uploaded_bytes=100))
    assert counted.value("hits", device="V0", tier="vram") == 9
    assert counted.value("misses", device="V0", tier="ram") == 3
    assert counted.value("misses", device="V0", tier="mapped") == 7
    assert counted.value("hits", device="V1", tier="vram") == 4
    assert counted.value("hits", device="", tier="vram") is None, "layers of the CPU have no slots to hit"
    assert (counted.value("swaps"), counted.value("upload_bytes")) == (2, 100)


def test_the_same_report_twice_counts_once() -> None:
    counted = Counted()
    for _ in range(2):
        counted.counters.report(MOVING)
    assert (counted.value("swaps"), counted.value("hits", device="Vulkan0", tier="vram")) == (9, 60)


def test_counters_go_on_with_the_next_engine() -> None:
    """Even where that one has counted more than the last one did when it is first heard."""
    counted = Counted()
    counted.counters.report(Residency(layers=[layer(10, 5)], moves=4, uploaded_bytes=50))
    counted.counters.engine_started()
    counted.counters.report(Residency())
    assert counted.value("hits", device="V0", tier="vram") == 10, "the series stays where the next one has no slots"
    counted.counters.report(Residency(layers=[layer(12, 6)], moves=4, uploaded_bytes=60))
    assert counted.value("hits", device="V0", tier="vram") == 22
    assert counted.value("misses", device="V0", tier="ram") == 11
    assert (counted.value("swaps"), counted.value("upload_bytes")) == (8, 110)


def test_a_layer_whose_weights_move_to_another_tier_takes_no_counts_along() -> None:
    counted = Counted()
    counted.counters.report(Residency(layers=[layer(0, 5, memory="mapped")]))
    counted.counters.report(Residency(layers=[layer(0, 8, memory="pinned")]))
    assert counted.value("misses", device="V0", tier="mapped") == 5
    assert counted.value("misses", device="V0", tier="ram") == 3


reports = st.builds(
    lambda layers, moves: Residency(layers=layers, moves=moves),
    st.lists(
        st.builds(
            layer,
            st.integers(0, 100),
            st.integers(0, 100),
            st.sampled_from(["V0", "V1", ""]),
            st.sampled_from(["pinned", "mapped", ""]),
        ),
        max_size=4,
    ),
    st.integers(0, 100),
)


@given(st.lists(st.one_of(st.none(), reports)))
def test_no_counter_goes_backwards(story: list[Residency | None]) -> None:
    """Whatever is reported; None is the start of another engine."""
    counted = Counted()
    before = counted.all()
    for report in story:
        if report is None:
            counted.counters.engine_started()
        else:
            counted.counters.report(report)
        now = counted.all()
        assert all(now[series] >= value for series, value in before.items())
        before = now


def samples(residency: Residency) -> dict[tuple[str, ...], float]:
    found = (sample for family in gauges(residency) for sample in family.samples)
    return {(sample.name, *sample.labels.values()): sample.value for sample in found}


def test_gauges_are_what_the_engine_said_last() -> None:
    found = samples(MOVING)
    assert found["hotset_expert_slots_total", "Vulkan0"] == 8
    assert found["hotset_expert_slots_resident", "Vulkan0"] == 7
    assert found["hotset_expert_vram_bytes", "Vulkan0"] == 96
    assert found["hotset_expert_hit_rate",] == 0.75


def test_without_residency_there_is_no_hit_rate_and_no_device() -> None:
    names = {name for name, *_ in samples(Residency())}
    assert names == {"hotset_expert_gate", "hotset_expert_selftest"}


def test_one_state_of_the_gate_is_1() -> None:
    found = samples(Residency(gate=Gate(state="closed", reason="it does not pay")))
    assert {state: found["hotset_expert_gate", state] for state in ("none", "waiting", "open", "closed")} == {
        "none": 0, "waiting": 0, "open": 0, "closed": 1,
    }  # fmt: skip
