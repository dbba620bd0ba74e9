"""Tokens that wait to be sent: nothing is lost when they are merged, and they weigh what they take."""

from __future__ import annotations

import tracemalloc

import pytest

from daemon.api.gathered import Gathered, weight
from daemon.messages import Candidate, Step, TokenLogprob, Tokens


def test_merging_keeps_order_and_logprobs() -> None:
    one = TokenLogprob(token=1, bytes=[97], logprob=-1.0)
    two = TokenLogprob(token=2, bytes=[98], logprob=-2.0)
    gathered = Gathered()
    parts = [
        Tokens(id="r", tokens=[1], text="a", logprobs=[one]),
        Tokens(id="r", tokens=[], text=""),
        Tokens(id="r", tokens=[2, 3], text="bc", logprobs=[two]),
    ]
    for part in parts:
        assert gathered.add(part) == weight(part)
    assert gathered.merged("q") == Tokens(id="q", tokens=[1, 2, 3], text="abc", logprobs=[one, two])
    assert parts[0].logprobs == [one], "what was added is not changed"
    assert gathered.weight == sum(weight(part) for part in parts)


def test_no_logprobs_is_not_an_empty_list_of_them() -> None:
    gathered = Gathered()
    gathered.add(Tokens(id="r", tokens=[1], text="a"))
    assert gathered.merged("r").logprobs is None


def message(n_top: int | None) -> str:
    """A token as the engine sends it."""
    piece = [32, 97, 98, 99]
    top = [Candidate(token=5000 + i, bytes=piece, logprob=-1.5 - i) for i in range(n_top or 0)]
    logprobs = None if n_top is None else [TokenLogprob(token=4000, bytes=piece, logprob=-1.25, top=top)]
    return Step(events=[Tokens(id="a" * 32, tokens=[4000], text=" abc", logprobs=logprobs)]).model_dump_json()


@pytest.mark.parametrize("n_top", [None, 0, 1, 5, 20])
def test_the_weight_is_the_memory(n_top: int | None) -> None:
    body, gathered = message(n_top), Gathered()
    tracemalloc.start()
    try:
        for _ in range(2000):
            (event,) = Step.model_validate_json(body).events
            assert isinstance(event, Tokens)
            gathered.add(event)
            del event
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.5 * gathered.weight < taken < 1.25 * gathered.weight
