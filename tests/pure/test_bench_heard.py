"""What the bytes of a streamed answer say, however they were cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotset_tools.bench.heard import is_whole, understand
from tests.openai_fake import DONE, HEAD, chunked, delta, event, refusal, usage, whole

GOOD = whole("a", " b", "ü", n_prompt=7)


def one(data: bytes) -> list[tuple[float, bytes]]:
    return [(1.0, data)]


def cut(data: bytes, places: list[int]) -> list[tuple[float, bytes]]:
    edges = [0, *sorted({place % len(data) for place in places}), len(data)]
    return [(float(end), data[start:end]) for start, end in pairwise(edges) if end > start]


class TestGood:
    def test_counts_and_times(self) -> None:
        found = understand([(1.0, HEAD), (2.0, delta("a")), (3.0, delta("b")), (4.0, delta("", "stop")),
                            (5.0, usage(9, 2) + DONE)])  # fmt: skip
        assert (found.status, found.n_prompt, found.n_output, found.finish, found.fault) == (200, 9, 2, "stop", "")
        assert found.texts == (2.0, 3.0)
        assert found.events == (2.0, 3.0, 4.0, 5.0)

    @given(st.lists(st.integers(0, 10_000), max_size=30), st.integers(1, 200))
    def test_how_bytes_were_cut_changes_nothing_but_times(self, places: list[int], size: int) -> None:
        for data in (GOOD, chunked(GOOD, size)):
            found = understand(cut(data, places))
            assert (found.n_prompt, found.n_output, len(found.texts), found.fault) == (7, 3, 3, "")

    @given(st.lists(st.integers(0, 10_000), max_size=30), st.integers(1, 200))
    def test_an_event_arrives_with_the_end_of_its_line(self, places: list[int], size: int) -> None:
        """Times here are offsets of bytes: each text is timed by the first piece that reaches its line's end."""
        data = chunked(GOOD, size)
        pieces = cut(data, places)
        one_by_one = understand([(float(i + 1), data[i : i + 1]) for i in range(len(data))])
        for exact, coarse in zip(one_by_one.texts, understand(pieces).texts, strict=True):
            assert coarse == min(at for at, _ in pieces if at >= exact)

    def test_carriage_returns_comments_and_other_fields(self) -> None:
        body = b": ping\r\nevent: x\r\n" + (delta("a") + delta("", "stop") + usage(1, 1) + DONE).replace(b"\n", b"\r\n")
        found = understand(one(HEAD + body))
        assert (found.fault, len(found.texts)) == ("", 1)

    @pytest.mark.parametrize("choice", [{"text": "x"}, {"delta": {"reasoning_content": "x"}}])
    def test_completions_and_thoughts_are_text(self, choice: dict[str, object]) -> None:
        body = event({"choices": [{**choice, "finish_reason": "stop"}]}) + usage(1, 1) + DONE
        assert len(understand(one(HEAD + body)).texts) == 1

    def test_usage_on_the_finish_chunk(self) -> None:
        body = event({"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}],
                      "usage": {"prompt_tokens": 2, "completion_tokens": 1}}) + DONE  # fmt: skip
        found = understand(one(HEAD + body))
        assert (found.n_prompt, found.n_output, found.fault) == (2, 1, "")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "closed without an answer"),
        (b"hello", "no HTTP response"),
        (b"HTTP/1.1 200 OK\r\nContent-", "no HTTP response"),
        (b"SSH-2.0-x\r\n\r\n", "no HTTP response"),
        (HEAD, "broke off"),
        (HEAD + delta("a"), "broke off"),
        (HEAD + delta("a") + DONE, "without a finish_reason"),
        (HEAD + delta("a", "stop") + DONE, "usage"),
        (HEAD + delta("a", "stop") + usage(3, 0) + DONE, "usage"),
        (HEAD + delta("a", "cancelled") + usage(3, 1) + DONE, "'cancelled'"),
        (HEAD + b"data: {nonsense\n\n", "no JSON object"),
        (HEAD + b"data: [1]\n\n", "no JSON object"),
        (HEAD + b"data: \xff\xfe\n\n", "no JSON object"),
        (HEAD + delta("a") + event({"error": {"message": "engine gone"}}), "engine gone"),
        (HEAD + delta("a") + event({"error": "odd"}), "odd"),
        (refusal(429, "queue is full"), "HTTP 429: queue is full"),
        (b"HTTP/1.1 500 Oops\r\n\r\n<html>", "HTTP 500: b'<html>'"),
        (chunked(GOOD, 20).replace(b"\r\n14\r\n", b"\r\nzz\r\n", 1), "no chunk"),
    ],
)
def test_bad_answers_have_a_reason(data: bytes, words: str) -> None:
    found = understand(one(data) if data else [])
    assert words in found.fault


def test_odd_shapes_are_no_crash() -> None:
    for value in (
        {"choices": 3},
        {"choices": [3]},
        {"choices": [{"delta": 3}]},
        {"usage": 4},
        {"usage": {"prompt_tokens": "x"}},
    ):
        assert understand(one(HEAD + event(value) + DONE)).fault


def test_why_the_connection_ended_is_told() -> None:
    assert "nothing came for 3 s" in understand(one(HEAD + delta("a")), "nothing came for 3 s").fault
    assert understand([], "refused").fault == "refused"


@given(st.binary(max_size=300))
def test_any_bytes_give_an_answer_or_a_reason(data: bytes) -> None:
    assert understand(one(HEAD + data)).fault
    assert understand(one(data)).fault


def test_a_response_with_a_length_is_whole_or_not() -> None:
    data = refusal(429, "full")
    assert is_whole(data)
    assert not is_whole(data[:-1])
    assert not is_whole(GOOD)
