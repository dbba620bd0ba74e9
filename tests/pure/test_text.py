"""Bytes in pieces become the same text as bytes in one."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from daemon.text import Utf8Stream


def fed(data: bytes, cuts: list[int]) -> str:
    stream = Utf8Stream()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    text = "".join(stream.feed(data[start:end]) for start, end in itertools.pairwise(edges))
    return text + stream.flush()


@given(st.text(), st.lists(st.integers(0, 10_000)))
def test_any_split_of_any_text_round_trips(text: str, cuts: list[int]) -> None:
    assert fed(text.encode(), cuts) == text


@given(st.binary(), st.lists(st.integers(0, 10_000)))
def test_any_split_of_any_bytes_decodes_like_the_whole(data: bytes, cuts: list[int]) -> None:
    assert fed(data, cuts) == data.decode("utf-8", "replace")


def test_an_unfinished_character_is_held_back() -> None:
    stream = Utf8Stream()
    rocket = "🚀".encode()
    assert [stream.feed(rocket[n : n + 1]) for n in range(3)] == ["", "", ""]
    assert stream.pending == rocket[:3]
    assert stream.feed(rocket[3:]) == "🚀"
    assert stream.pending == b""


def test_an_unfinished_character_at_the_end_is_replaced_once_and_the_stream_starts_anew() -> None:
    stream = Utf8Stream()
    assert stream.feed("é".encode()[:1]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert stream.feed("é".encode()) == "é"
