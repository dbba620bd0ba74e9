"""The controller: slots and experts always agree, moves are paced, and what is hot comes in."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.hotset.controller import EMPTY, WIDEST_PARTIAL, Batch, Controller, Upload, spread
from daemon.hotset.policy import Settings

N_LAYER, N_EXPERT, TOP_K = 3, 8, 2
FAST = 1e9


def made(slots: int = 3, *, rate: float = FAST, padded: bool = False, size: int = 10) -> Controller:
    controller = Controller([N_EXPERT] * N_LAYER, [size] * N_LAYER, bytes_per_second=rate, padded=padded)
    for layer in range(N_LAYER):
        controller.adopt(layer, [EMPTY] * slots)
    return controller


def step(*experts: int) -> np.ndarray:
    """Every layer of one token chooses these."""
    return np.tile(np.array(experts, np.int32), (1, N_LAYER, 1))


def residents(controller: Controller, layer: int) -> set[int]:
    return set(np.flatnonzero(controller.serving[layer]))


def follow(controller: Controller, seconds: float = 1.0) -> Batch:
    """A whole turn: nothing stays in flight."""
    batch = controller.batch(seconds)
    controller.published(batch.uploads)
    return batch


def test_what_is_chosen_fills_free_slots_one_a_layer_at_a_time() -> None:
    controller = made()
    controller.observe(step(4, 6), 1)
    first, second, third = (follow(controller) for _ in range(3))
    assert {(one.layer, one.expert) for one in first.uploads} == {(layer, 4) for layer in range(N_LAYER)}
    assert {(one.layer, one.expert) for one in second.uploads} == {(layer, 6) for layer in range(N_LAYER)}
    assert third == Batch(), "an expert that nobody chose is not worth an upload"
    assert residents(controller, 1) == {4, 6}
    assert controller.n_moves == 2 * N_LAYER


def test_a_newcomer_takes_the_slot_of_the_coldest_when_it_is_clearly_hotter() -> None:
    controller = made(slots=2)
    for _ in range(4):
        controller.observe(step(0, 1), 1)
    follow(controller), follow(controller)
    controller.observe(step(1, 5), 1)
    assert follow(controller) == Batch(), "one selection is not enough"
    for _ in range(40):
        controller.observe(step(1, 5), 1)
    batch = follow(controller)
    assert set(batch.retired) == {(layer, slot) for layer, _, slot in batch.uploads}
    assert {expert for _, expert, _ in batch.uploads} == {5}
    assert residents(controller, 0) == {1, 5}


def test_a_victim_is_a_miss_before_its_successor_is_a_hit() -> None:
    controller = made(slots=1)
    for _ in range(3):
        controller.observe(step(0, 1), 1)
    follow(controller)
    before = residents(controller, 0)
    for _ in range(40):
        controller.observe(step(6, 7), 1)
    batch = controller.batch(1.0)
    assert residents(controller, 0) == set()
    assert controller.served(step(*before, 6)).tolist() == [[0], [2 * N_LAYER]]
    controller.published(batch.uploads)
    assert residents(controller, 0) == {batch.uploads[0].expert}


def test_the_pace_is_kept_over_any_time_and_its_burst_is_small() -> None:
    controller = made(slots=4, rate=100.0, size=10)  # ten experts a second, five at once
    for expert in range(0, 8, 2):
        controller.observe(step(expert, expert + 1), 1)
    first = controller.batch(60.0)
    assert len(first.uploads) == 3
    assert not first.more
    second = controller.batch(0.0)
    assert (len(second.uploads), second.more) == (2, True)
    assert (controller.batch(0.0), controller.batch(0.05)) == (Batch(more=True), Batch(more=True))
    assert len(controller.batch(0.05).uploads) == 1


def test_nothing_moves_at_pace_nought_and_nobody_waits_for_it() -> None:
    controller = made(rate=0.0)
    controller.observe(step(0, 1), 1)
    assert controller.batch(1e6) == Batch()
    controller.pace(FAST)
    assert controller.batch(1.0).uploads


def test_seeds_come_whatever_the_pace_and_only_into_free_slots() -> None:
    controller = made(slots=3, rate=0.0)
    controller.adopt(1, [7, EMPTY, EMPTY])
    batch = controller.seed(1, [7, 2, 3, 4])
    assert batch == Batch((), (Upload(1, 2, 1), Upload(1, 3, 2)))
    assert residents(controller, 1) == {7}
    controller.published(batch.uploads)
    assert residents(controller, 1) == {7, 2, 3}


def test_an_expert_that_leaves_at_the_moment_of_its_arrival_is_not_there() -> None:
    controller = made(slots=1)
    controller.observe(step(0, 1), 1)
    landed = controller.batch(1.0).uploads
    assert controller.leaving([0] * N_LAYER) == [(layer, 0) for layer in range(N_LAYER)]
    controller.published(landed)
    assert not controller.serving.any()


def test_layers_that_choose_fewer_are_filled_up_with_nothing() -> None:
    controller = made(padded=True)
    ids = step(2, 3)
    ids[0, 1, 1] = controller.pad
    for _ in range(5):
        controller.observe(ids, 1)
        follow(controller)
    assert [residents(controller, layer) for layer in range(N_LAYER)] == [{2, 3}, {2}, {2, 3}]
    assert controller.served(ids).tolist() == [[5], [5]]
    assert controller.hit_rate([0, 1, 2]) is not None
    assert controller.curves().shape == (N_LAYER, N_EXPERT + 2)


def test_hit_rates_are_those_of_the_recent_past() -> None:
    controller = made()
    assert controller.hit_rate([0]) is None
    assert np.isnan(controller.hit_rates()).all()
    for _ in range(200):
        controller.observe(step(0, 1), 1)
        follow(controller)
    assert controller.hit_rate(range(N_LAYER)) == pytest.approx(1.0, abs=0.05)
    for _ in range(200):
        controller.observe(step(4, 5), 1)
    assert controller.hit_rate(range(N_LAYER)) == pytest.approx(0.0, abs=0.15)


def test_a_summary_says_how_heat_spreads() -> None:
    heat = np.array([[8.0, 1, 1, 0, -1], [0, 0, 0, 0, 0]])
    resident = np.array([[False, True, False, False, False], [True, False, False, False, False]])
    first, second = spread(heat, resident)
    assert second is None
    assert first is not None
    assert first.resident_share == pytest.approx(0.1)
    assert (first.for_half, first.for_ninety, first.hottest) == (1, 2, (0, 1, 2))


orders = st.lists(
    st.one_of(
        st.tuples(st.just("observe"), st.lists(st.integers(0, N_EXPERT - 1), min_size=2, max_size=2, unique=True)),
        st.tuples(st.just("batch"), st.floats(0, 1)),
        st.tuples(st.just("land"), st.none()),
        st.tuples(st.just("resize"), st.lists(st.integers(0, N_EXPERT), min_size=N_LAYER, max_size=N_LAYER)),
    ),
    max_size=40,
)


@given(orders, st.integers(0, 4), st.sampled_from([0.0, 15.0, 1e9]))
def test_no_slot_has_two_experts_and_no_expert_two_slots(
    script: list[tuple[str, object]], slots: int, rate: float
) -> None:
    """Against a model of the library that refuses what llama.cpp would refuse."""
    controller = made(slots, rate=rate)
    owners = [[EMPTY] * slots for _ in range(N_LAYER)]
    staged: dict[tuple[int, int], int] = {}
    landed: list[Upload] = []

    def publish(retired: list[tuple[int, int]]) -> None:
        for layer, expert, slot in landed:
            assert owners[layer][slot] == EMPTY
            assert expert not in owners[layer]
            assert staged[layer, slot] == expert
            owners[layer][slot] = expert
        for layer, slot in retired:
            owners[layer][slot] = EMPTY
        controller.published(landed)
        landed.clear()

    for order, value in script:
        if order == "observe":
            controller.observe(step(*value), 1)  # type: ignore[misc]
        elif order == "land":
            publish([])
        elif order == "batch":
            batch = controller.batch(value)  # type: ignore[arg-type]
            publish(list(batch.retired))
            for upload in batch.uploads:
                assert owners[upload.layer][upload.slot] == EMPTY
                staged[upload.layer, upload.slot] = upload.expert
                landed.append(upload)
        else:
            publish(controller.leaving(value))  # type: ignore[arg-type]
            for layer, n in enumerate(value):  # type: ignore[arg-type, var-annotated]
                kept = [expert for expert in owners[layer] if expert != EMPTY]
                assert len(kept) <= n
                owners[layer] = kept + [EMPTY] * (n - len(kept))
                controller.adopt(layer, owners[layer])
    publish([])
    for layer in range(N_LAYER):
        held = Counter(expert for expert in owners[layer] if expert != EMPTY)
        assert set(held) == residents(controller, layer)
        assert all(count == 1 for count in held.values())


def test_settings_decide_who_is_hotter() -> None:
    eager = Controller([N_EXPERT], [1], bytes_per_second=FAST, settings=Settings(margin=0.0))
    eager.adopt(0, [EMPTY])
    for expert in (0, 1, 1):
        eager.observe(np.array([[[expert]]]), 1)
        follow(eager)
    assert set(np.flatnonzero(eager.serving[0])) == {1}


def test_a_layer_keeps_what_it_is_told_and_the_rest_leaves() -> None:
    controller = made(slots=4)
    controller.adopt(1, [5, EMPTY, 2, 7])
    assert controller.keep(1, [7, 0]) == [(1, 2), (1, 0)]
    assert residents(controller, 1) == {7}
    assert controller.keep(1, [7]) == []
    assert [one.expert for one in controller.seed(1, [7, 0]).uploads] == [0]


def test_steps_of_many_sequences_find_only_full_layers_in_vram() -> None:
    controller = made(slots=N_EXPERT)
    controller.adopt(0, range(N_EXPERT))
    controller.adopt(1, [0, 1, 2])
    for n, hits in ((WIDEST_PARTIAL, 4), (WIDEST_PARTIAL + 1, 2)):
        ids = np.tile(step(0, 1), (n, 1, 1))
        assert controller.served(ids).tolist() == [[hits] * n, [6] * n]
    controller.observe(ids, len(ids))
    assert controller.hit_rates().tolist() == [1, 0, 0]


def test_hit_rates_are_those_of_one_moment_whenever_another_thread_asks() -> None:
    controller = made(slots=N_EXPERT)
    controller.adopt(0, range(N_EXPERT))
    seen: list[float] = []

    def between_lines(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code is not Controller.observe.__code__:
            return None
        seen.append(controller.hit_rates()[0])
        return between_lines

    before = sys.gettrace()
    sys.settrace(between_lines)
    try:
        for _ in range(4):
            controller.observe(step(1, 2), 1)
    finally:
        sys.settrace(before)
    assert len(seen) > 8
    assert {rate for rate in seen if not np.isnan(rate)} == {1.0}
