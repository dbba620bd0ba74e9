"""Tokens of several answers: sorted apart, within what a trace may hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.hotset import answers as module
from daemon.hotset import trace
from daemon.hotset.answers import MAX_ANSWERS, Answers
from daemon.hotset.files import ModelId
from daemon.hotset.trace import MAX_HEADER, Header, Segment, TraceLayer

MODEL = ModelId(fingerprint="0" * 64)
LAYERS = [TraceLayer(layer=number, experts=8) for number in (0, 2)]
NOW = "2026-12-01T12:00:00"


def ids_of(number: int, n_expert: int = 8, seed: int = 1) -> np.ndarray:
    """What the token with this number chose, [layers, top_k], in no order."""
    random = np.random.default_rng([seed, number])
    return np.stack([random.permutation(n_expert)[:2] for _ in LAYERS])


def made(order: list[int], parts: list[int], most: int = 1 << 20, n_expert: int = 8) -> Answers:
    """Tokens of these answers, handed over in parts of these lengths and one with the rest."""
    layers = [TraceLayer(layer=one.layer, experts=n_expert) for one in LAYERS]
    answers = Answers(layers, 2, most)
    dtype = trace.id_type([n_expert])
    at = 0
    for length in [*parts, len(order)]:
        own = order[at : at + length]
        chosen = [ids_of(number, n_expert).astype(dtype).tobytes() for number in range(at, at + len(own))]
        answers.add(own, b"".join(chosen))
        at += len(own)
    return answers


@settings(max_examples=40)
@given(
    st.lists(st.integers(3, 9), min_size=1, max_size=60),
    st.lists(st.integers(0, 9), max_size=8),
    st.sampled_from([8, 300]),
)
def test_answers_are_sorted_apart(order: list[int], parts: list[int], n_expert: int) -> None:
    found = made(order, parts, n_expert=n_expert).trace(MODEL, "a test", NOW)
    numbers = list(dict.fromkeys(order))
    assert [name for name, _ in found.segments()] == [f"answer-{at} of {NOW}" for at in range(1, len(numbers) + 1)]
    for answer, (_, tokens) in zip(numbers, found.segments(), strict=True):
        own = [np.sort(ids_of(at, n_expert), axis=-1) for at, one in enumerate(order) if one == answer]
        assert np.array_equal(found.ids[tokens], own)


def test_what_comes_of_it_is_a_trace(tmp_path: Path) -> None:
    found = made([4, 5, 4], [1]).trace(MODEL, "a test", NOW)
    trace.write(tmp_path / "a.trace", found)
    read = trace.read(tmp_path / "a.trace")
    assert (read.header, read.ids.tolist()) == (found.header, found.ids.tolist())
    assert [segment.tokens for segment in read.header.segments] == [2, 1]


@pytest.mark.parametrize("parts", [[], [3], [5], [6], [1, 1, 1, 1, 1, 1]])
def test_there_are_no_more_tokens_than_were_asked_for(parts: list[int]) -> None:
    answers = made([1, 2] * 5, parts, most=5)
    assert (answers.n_tokens, len(answers)) == (5, 2)
    assert "5 tokens" in answers.full
    assert [segment.tokens for segment in answers.trace(MODEL, "", NOW).header.segments] == [3, 2]


def test_it_is_full_with_its_last_token_and_not_before() -> None:
    assert made([1] * 4, [], most=5).full == ""
    assert made([1] * 5, [], most=5).full


def test_it_never_has_more_selections_than_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SELECTIONS", 13)  # three tokens of four, and one selection
    assert made([1] * 9, [2]).n_tokens == 3


def test_it_has_as_many_answers_as_the_header_can_describe() -> None:
    layers = [TraceLayer(layer=0, experts=4)]
    answers = Answers(layers, 1, 1 << 20)
    answers.add(range(MAX_ANSWERS), bytes(MAX_ANSWERS))
    answers.add([0, 1], bytes(2))
    assert not answers.full
    answers.add([0, MAX_ANSWERS, 0], bytes(3))
    assert (answers.n_tokens, len(answers)) == (MAX_ANSWERS + 3, MAX_ANSWERS)
    assert "8,192 answers" in answers.full
    answers.add([0], bytes(1))
    assert answers.n_tokens == MAX_ANSWERS + 3

    segments = [Segment(name=f"answer-{at} of {NOW}", tokens=1_000_000) for at in range(MAX_ANSWERS)]
    largest = [TraceLayer(layer=at, experts=65536) for at in range(4096)]
    header = Header(model=MODEL, top_k=1, layers=largest, segments=segments)
    assert len(header.model_dump_json()) < MAX_HEADER


@pytest.mark.parametrize("ids", [b"", bytes(3), bytes(5), bytes(8)])
def test_ids_that_are_not_those_of_the_tokens(ids: bytes) -> None:
    answers = Answers(LAYERS, 2, 10)
    with pytest.raises(ValueError, match="reshape"):
        answers.add([1], ids)
    assert answers.n_tokens == 0


def test_nothing_is_no_trace() -> None:
    with pytest.raises(ValueError, match="no token"):
        Answers(LAYERS, 2, 10).trace(MODEL, "", NOW)
