"""Heat and moves: what is hot comes in, what is equally hot does not flutter, and every move is possible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.hotset.policy import NO_VICTIM, Heat, Move, Pace, Settings, decide, surplus

RULES = Settings(half_life=4, margin=1)


def resident(*layers: set[int], n_expert: int = 4) -> np.ndarray:
    found = np.zeros((len(layers), n_expert), bool)
    for layer, experts in enumerate(layers):
        found[layer, list(experts)] = True
    return found


def slots(*counts: int) -> np.ndarray:
    return np.array(counts)


def test_heat_halves_after_the_half_life_and_counts_selections() -> None:
    heat = Heat([3, 3], RULES)
    heat.observe(np.array([[[0, 1], [1, 2]]]))
    assert heat.values.tolist() == [[1, 1, 0], [0, 1, 1]]
    for _ in range(4):
        heat.observe(np.array([[[1, 2], [1, 2]]]))
    assert heat.values[0, 0] == pytest.approx(0.5)


def test_many_sequences_forget_no_faster_than_one() -> None:
    one, four = Heat([4], RULES), Heat([4], RULES)
    for _ in range(3):
        one.observe(np.array([[[0, 1]]]))
        four.observe(np.array([[[0, 1]]] * 4), n_sequences=4)
    assert four.values == pytest.approx(4 * one.values)


def test_several_tokens_of_one_sequence_are_as_much_time() -> None:
    heat = Heat([2], RULES)
    heat.observe(np.array([[[0]]]))
    heat.observe(np.array([[[1]]] * 4))
    assert heat.values[0].tolist() == pytest.approx([0.5, 4])


def test_experts_that_do_not_exist_never_move() -> None:
    heat = Heat([2, 4], RULES)
    heat.observe(np.array([[[0], [3]]]))
    assert heat.values.tolist() == [[1, 0, -1, -1], [0, 0, 0, 1]]
    found = resident({0, 1}, set())
    assert decide(heat.values, found, slots(3, 1), 9, RULES) == [Move(1, 3)]


def test_a_free_slot_takes_the_hottest_expert_that_was_chosen() -> None:
    heat = np.array([[0, 2.0, 5, 0], [0, 0, 0, 0]])
    assert decide(heat, resident(set(), set()), slots(2, 2), 9, RULES) == [Move(0, 2, NO_VICTIM)]


def test_a_layer_with_a_slot_for_every_expert_gets_every_expert() -> None:
    heat = np.array([[0, 2.0, 5, 0]])
    found = resident({1, 2, 3})
    assert decide(heat, found, slots(4), 9, RULES) == [Move(0, 0)]
    assert decide(heat, resident({0, 1, 2, 3}), slots(4), 9, RULES) == []


def test_a_newcomer_must_be_hotter_than_its_victim_by_the_margin() -> None:
    found = resident({0, 1})
    assert decide(np.array([[3.0, 2, 3, 0]]), found, slots(2), 9, RULES) == []
    assert decide(np.array([[3.0, 2, 3.1, 0]]), found, slots(2), 9, RULES) == [Move(0, 2, 1)]


def test_the_most_useful_moves_come_first_and_no_more_than_allowed() -> None:
    heat = np.array([[5.0, 0, 0, 0], [9, 0, 0, 0], [7, 0, 0, 0]])
    found = resident({1}, {1}, {1})
    assert decide(heat, found, slots(1, 1, 1), 2, RULES) == [Move(1, 0, 1), Move(2, 0, 1)]
    assert decide(heat, found, slots(1, 1, 1), 0, RULES) == []


def test_a_layer_without_slots_or_with_too_many_residents_gets_nothing() -> None:
    heat = np.array([[0, 0, 9.0, 9], [0, 0, 9, 0]])
    assert decide(heat, resident({0, 1}, set()), slots(1, 0), 9, RULES) == []


def test_the_coldest_leave_a_layer_that_shrank() -> None:
    heat = np.array([[4.0, 1, 2, 3], [1, 0, 0, 0]])
    assert surplus(heat, resident({0, 1, 2, 3}, {0}), slots(2, 1)) == [(0, 1), (0, 2)]


def test_settings_and_paces_that_make_no_sense() -> None:
    for make in (
        lambda: Settings(half_life=0),
        lambda: Settings(margin=-1),
        lambda: Settings(half_life=float("nan")),
        lambda: Pace(-1, 1),
        lambda: Pace(1, -1),
    ):
        with pytest.raises(ValueError, match="less"):
            make()


def test_a_pace_saves_up_to_its_burst() -> None:
    pace = Pace(0.5, 3)
    pace.spend(3)
    pace.earn(1)
    assert pace.left == 0.5
    pace.earn(100)
    assert pace.left == 3


@settings(max_examples=60)
@given(
    st.lists(st.integers(2, 9), min_size=1, max_size=4),
    st.lists(st.integers(0, 9), min_size=4, max_size=4),
    st.integers(0, 3),
    st.integers(0, 1000),
)
def test_moves_are_always_possible(n_expert: list[int], wanted: list[int], most: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    heat = Heat(n_expert, RULES)
    found = np.zeros((len(n_expert), max(n_expert)), bool)
    room = slots(*(min(count, given) for count, given in zip(n_expert, wanted, strict=False)))
    for _ in range(20):
        ids = np.array([[random.choice(count, 2, replace=False) for count in n_expert]])
        heat.observe(ids)
        moves = decide(heat.values, found, room, most, RULES)
        assert len(moves) <= most
        assert len({move.layer for move in moves}) == len(moves)
        for layer, expert, victim in moves:
            assert not found[layer, expert]
            assert expert < n_expert[layer]
            if victim != NO_VICTIM:
                assert found[layer, victim]
                found[layer, victim] = False
            found[layer, expert] = True
        assert (found.sum(axis=1) <= room).all()


def test_what_is_always_chosen_is_resident_soon_and_then_nothing_moves() -> None:
    heat, found = Heat([8], RULES), np.zeros((1, 8), bool)
    moves = []
    for _ in range(50):
        heat.observe(np.array([[[2, 5]]]))
        moves.append(decide(heat.values, found, slots(2), 9, RULES))
        for _, expert, _ in moves[-1]:
            found[0, expert] = True
    assert found[0].nonzero()[0].tolist() == [2, 5]
    assert not any(moves[2:])
