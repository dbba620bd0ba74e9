"""The order of those that wait: fair between clients, strict between classes, and nobody starves."""

from __future__ import annotations

from collections import Counter, deque
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.fair_queue import CLASSES, QUANTUM, SHARE, Entry, FairQueue
from daemon.messages import Priority

COSTS = st.integers(1, 5 * QUANTUM)


class Line:
    """A queue with entries that are named by their numbers."""

    def __init__(self) -> None:
        self.queue: FairQueue[int] = FairQueue()
        self.entries: dict[int, Entry[int]] = {}
        self._numbers = count()

    def push(self, client: str = "a", priority: Priority = "normal", cost: int = 100) -> int:
        number = next(self._numbers)
        self.entries[number] = Entry(number, priority, client, cost, number)
        self.queue.push(self.entries[number])
        return number

    def pop(self, *barred: str) -> int | None:
        return self.queue.pop(lambda entry, due: entry.client not in barred)

    def rest(self) -> list[int]:
        found = []
        while (item := self.pop()) is not None:
            found.append(item)
        return found


def test_one_client_is_served_in_the_order_in_which_it_came() -> None:
    line = Line()
    for cost in (5 * QUANTUM, 1, 3 * QUANTUM, 1):
        line.push(cost=cost)
    assert line.rest() == [0, 1, 2, 3]


def test_clients_take_turns_by_cost_and_not_by_number() -> None:
    line = Line()
    large = [line.push("large", cost=QUANTUM) for _ in range(4)]
    small = [line.push("small", cost=QUANTUM // 4) for _ in range(8)]
    expected = [large[0], *small[:4], large[1], *small[4:], large[2], large[3]]
    assert line.rest() == expected


def test_what_a_client_has_left_is_kept_for_its_next_turn_but_not_once_nothing_of_it_waits() -> None:
    line = Line()
    dear = line.push("a", cost=QUANTUM + 1)
    cheap = [line.push("b", cost=QUANTUM) for _ in range(3)]
    assert [line.pop() for _ in range(3)] == [cheap[0], dear, cheap[1]]
    again = line.push("a", cost=QUANTUM)
    later = line.push("a", cost=QUANTUM - 1)
    assert line.rest() == [again, cheap[2], later], "QUANTUM - 1 of before are gone"


def test_classes_go_in_their_order() -> None:
    line = Line()
    numbers = {priority: line.push(priority=priority) for priority in CLASSES[::-1]}
    assert [numbers[priority] for priority in CLASSES] == line.rest()


def test_a_class_that_others_went_before_so_often_is_next_and_is_told_so() -> None:
    line = Line()
    background, normal = line.push(priority="background"), line.push(priority="normal")
    quick = [line.push(priority="interactive") for _ in range(SHARE + 3)]
    assert list(line.queue.order()) == [*quick[:SHARE], background, normal, *quick[SHARE:]]
    assert [line.pop() for _ in range(SHARE)] == quick[:SHARE]
    told: dict[Priority, bool] = {}

    def may(entry: Entry[Any], due: bool) -> bool:
        told[entry.priority] = due
        return False

    assert line.queue.pop(may) is None
    assert told == {"interactive": False, "normal": True, "background": True}
    assert line.rest() == [background, normal, *quick[SHARE:]]


def test_who_may_not_start_is_passed_over_and_keeps_what_it_has_left() -> None:
    line = Line()
    a, b = line.push("a"), line.push("b")
    assert line.pop("a") == b
    assert line.pop("a") is None
    assert line.pop() == a
    assert len(line.queue) == 0


def test_what_is_given_back_is_first_again_and_has_not_been_paid_for() -> None:
    line = Line()
    a1, a2, b = line.push("a", cost=QUANTUM), line.push("a", cost=QUANTUM), line.push("b", cost=QUANTUM)
    assert [line.pop(), line.pop()] == [a1, b]
    line.queue.give_back(line.entries[b], QUANTUM)
    line.queue.give_back(line.entries[a1], QUANTUM)
    assert line.queue.position(a1) == 0
    assert line.rest() == [a1, b, a2]


def test_what_is_not_there_cannot_be_removed() -> None:
    line = Line()
    a = line.push()
    assert line.queue.remove(a)
    assert not line.queue.remove(a)
    assert (len(line.queue), line.queue.count("normal"), line.queue.count_of("a"), line.rest()) == (0, 0, 0, [])


def test_asking_while_nobody_may_start_changes_nothing() -> None:
    """Else a client whose turn is not over would get another quantum each time."""
    line = Line()
    small = [line.push("a", cost=QUANTUM // 2) for _ in range(4)]
    other = line.push("b", cost=QUANTUM)
    assert line.pop() == small[0]
    for _ in range(5):
        assert line.pop("a", "b") is None
    assert line.rest() == [small[1], other, *small[2:]]


@given(st.lists(COSTS, min_size=1), st.lists(COSTS, min_size=1), st.lists(st.none() | COSTS))
def test_two_backlogged_clients_of_a_class_stay_close(a: list[int], b: list[int], others: list[int | None]) -> None:
    """Within a quantum and the largest cost since both wait; in any stretch of that within one largest cost more."""
    line = Line()
    for client, costs in (("a", a), ("b", b)):
        for cost in costs:
            line.push(client, cost=cost)
    left, bound = {"a": deque(a), "b": deque(b)}, QUANTUM + max(a + b)
    lead, highest, lowest = 0, 0, 0
    todo = deque(others)
    while left["a"] and left["b"]:
        if todo and (cost := todo.popleft()) is not None:
            line.push(f"c{cost % 3}", cost=cost)
        assert line.pop(*"ab", "c0", "c1", "c2") is None
        item = line.pop()
        assert item is not None
        entry = line.entries[item]
        if entry.client in left:
            assert left[entry.client].popleft() == entry.cost
            lead += entry.cost if entry.client == "a" else -entry.cost
        highest, lowest = max(highest, lead), min(lowest, lead)
        assert abs(lead) <= bound
    assert highest - lowest <= bound + max(a + b)


Move = tuple[str, Any]
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.tuples(st.sampled_from("abc"), st.sampled_from(CLASSES), COSTS)),
        st.tuples(st.just("pop"), st.sets(st.sampled_from("abc"), max_size=2)),
        st.tuples(st.just("remove"), st.integers(0, 60)),
        st.tuples(st.just("return"), st.integers(0, 60)),
    ),
    max_size=80,
)


@given(MOVES)
def test_nothing_is_lost_or_served_twice_and_counts_are_right(moves: list[Move]) -> None:
    line, inside, out = Line(), set[int](), list[int]()
    for move, detail in moves:
        if move == "push":
            inside.add(line.push(*detail))
        elif move == "remove":
            assert line.queue.remove(detail) == (detail in inside)
            inside.discard(detail)
        elif move == "return" and out:
            back = out.pop(detail % len(out))
            line.queue.give_back(line.entries[back], line.entries[back].cost)
            inside.add(back)
        elif move == "pop":
            item = line.pop(*detail)
            able = [number for number in inside if line.entries[number].client not in detail]
            assert (item in able) if able else item is None
            if item is not None:
                inside.remove(item)
                out.append(item)
        entries = [line.entries[number] for number in inside]
        assert len(line.queue) == len(inside)
        for priority in CLASSES:
            assert line.queue.count(priority) == sum(entry.priority == priority for entry in entries)
        for client in "abc":
            assert line.queue.count_of(client) == sum(entry.client == client for entry in entries)
        order = list(line.queue.order())
        assert sorted(order) == sorted(inside)
        assert [line.queue.position(item) for item in order] == list(range(len(order)))
    order = list(line.queue.order())
    assert line.rest() == order


@given(MOVES)
def test_one_client_in_one_class_keeps_its_order(moves: list[Move]) -> None:
    line, last = Line(), dict[tuple[str, str], int]()
    for move, detail in moves:
        if move == "push":
            line.push(*detail)
        elif move == "remove":
            line.queue.remove(detail)
        elif (item := line.pop()) is not None:
            entry = line.entries[item]
            assert item > last.get((entry.client, entry.priority), -1)
            last[entry.client, entry.priority] = item


@given(st.lists(st.sampled_from([*CLASSES, None, None, None]), min_size=1, max_size=200))
def test_no_class_starves(moves: list[Priority | None]) -> None:
    """None serves one; a class that has something waiting sees at most SHARE + 1 of others go before it."""
    line, passed = Line(), Counter[Priority]()
    for priority in CLASSES:
        line.push(priority=priority)
    for move in moves + [None] * 200:
        if move is not None:
            line.push(priority=move)
            continue
        item = line.pop()
        if item is None:
            continue
        served = line.entries[item].priority
        for priority in CLASSES:
            passed[priority] = 0 if priority == served or not line.queue.count(priority) else passed[priority] + 1
            assert passed[priority] <= SHARE + 1


@pytest.mark.parametrize("priority", ["normal", "background"])
def test_an_endless_stream_of_interactive_ones_does_not_keep_a_class_out(priority: Priority) -> None:
    line = Line()
    waits = line.push(priority=priority)
    served = []
    for _ in range(SHARE + 1):
        line.push("b", "interactive")
        served.append(line.pop())
    assert served.index(waits) == SHARE
