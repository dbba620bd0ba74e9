"""Estimates from measured answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.messages import Submit
from daemon.service_times import ServiceTimes, seconds_until_start
from tests.pure.test_admission import done


def asked(n_prompt: int, max_tokens: int) -> Submit:
    return Submit(id="x", prompt=[1] * n_prompt, max_tokens=max_tokens)


def test_answers_are_taken_to_be_as_long_as_the_last_ones_but_no_longer_than_they_may_be() -> None:
    times = ServiceTimes()
    assert (times.tokens(10_000), times.tokens(5)) == (256, 5)
    times.learn(done("a", n_predicted=100))
    assert (times.tokens(10_000), times.tokens(5)) == (100, 5)
    for _ in range(50):
        times.learn(done("a", n_predicted=10))
    assert times.tokens(10_000) == 10


def test_what_was_cancelled_teaches_nothing() -> None:
    times = ServiceTimes()
    times.learn(done("a", finish_reason="cancelled", n_prompt=1000, prompt_ms=1.0, n_predicted=1))
    assert times.tokens(10_000) == 256
    assert times.until_start([(asked(10, 10), 3.0)], [asked(1, 1)], 1) == 3.0


def test_cached_tokens_cost_no_time_and_prompts_without_computed_ones_change_nothing() -> None:
    times = ServiceTimes()
    times.learn(done("a", n_prompt=110, n_cached=100, prompt_ms=1000, n_predicted=10, predicted_ms=1000))
    times.learn(done("a", n_prompt=110, n_cached=110, prompt_ms=0, n_predicted=10, predicted_ms=1000))
    # 0.1 s for a token of a prompt, 0.1 s for one of an answer
    assert times.until_start([(asked(20, 10), 0.0)], [asked(1, 1)], 1) == pytest.approx(3.0)


def test_who_finds_a_place_does_not_wait() -> None:
    assert seconds_until_start([5.0], [1.0], 2) == 0
    assert seconds_until_start([5.0, 7.0, 9.0], [1.0], 2) == 7.0, "more run than have a place of their own"


@given(
    st.lists(st.integers(0, 20), max_size=6),
    st.lists(st.integers(0, 20), min_size=1, max_size=8),
    st.integers(1, 4),
)
def test_as_if_it_were_played_second_by_second(running: list[int], waiting: list[int], places: int) -> None:
    ends, second, todo = list(running), 0, list(waiting)
    while True:
        ends = [end for end in ends if end > second]
        while todo and len(ends) < places:
            length = todo.pop(0)
            if length:
                ends.append(second + length)
        if not todo:
            break
        second += 1
    assert seconds_until_start(running, waiting, places) == second
