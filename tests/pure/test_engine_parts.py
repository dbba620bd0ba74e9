"""The engine's pure parts: stop strings, step plans, sampler chains, sizes, times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.engine import sizes
from daemon.engine.logprobs import log_softmax_top
from daemon.engine.sampling import NEVER, Stage, chain, history_needed
from daemon.engine.scheduler import HEADROOM, may_start
from daemon.engine.stops import StopMatcher, TextOut
from daemon.engine.times import TimeLog
from daemon.messages import Sampling
from daemon.supervisor import engine_environment

TEXTS = st.text(alphabet="ab<>e ", max_size=40)


def reference_cut(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    ends = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(ends)], True) if ends else (text, False)


@given(TEXTS, st.lists(st.text(alphabet="ab<>e", min_size=1, max_size=5), max_size=4), st.data())
def test_stops_cut_where_the_whole_text_would_be_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    """However the text is split; the stop that is complete first wins, as it does in a stream."""
    matcher = StopMatcher(tuple(stops))
    shown, stopped, rest = "", None, text
    while rest and stopped is None:
        n = data.draw(st.integers(1, len(rest)))
        piece, rest = rest[:n], rest[n:]
        more, stopped = matcher.feed(piece)
        shown += more
    if stopped is None:
        assert shown + matcher.flush() == text
        assert not any(stop in text for stop in stops)
    else:
        fed = text[: len(text) - len(rest)]
        assert reference_cut(fed, tuple(stops)) == (shown, True)


@given(TEXTS, st.lists(st.text(alphabet="ab<>e", min_size=1, max_size=5), min_size=1, max_size=4))
def test_nothing_is_held_back_longer_than_needed(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    for i, char in enumerate(text):
        shown, stopped = matcher.feed(char)
        if stopped is not None:
            return
        held = len(text[: i + 1]) - len(shown)
        assert held >= 0
    held_text = matcher.flush()
    assert not held_text or any(stop.startswith(held_text) and stop != held_text for stop in stops)


def test_text_out_ends_an_unfinished_character_and_may_still_find_a_stop() -> None:
    out = TextOut(("\ufffd",))
    assert out.feed("x€".encode()[:3]) == "x"
    assert out.finish() == ""
    assert out.stop_word == "\ufffd"


@pytest.mark.parametrize(
    ("n_tokens", "more", "free", "others", "starts"),
    [
        (10, 100, 10 + HEADROOM, True, True),
        (10, 100, 9 + HEADROOM, True, False),
        (10, 3, 13, True, True),
        (10, 100, 11, False, True),
        (10, 100, 10, False, False),
    ],
)
def test_who_may_start(n_tokens: int, more: int, free: int, others: bool, starts: bool) -> None:
    assert may_start(n_tokens, more, free, others) is starts


def names(sampling: Sampling, **more: object) -> list[str]:
    return [stage.name for stage in chain(sampling, 1, **more)]  # type: ignore[arg-type]


def test_the_chain_follows_llama_cpps_order() -> None:
    everything = Sampling(
        logit_bias=((3, 1.0),), repeat_penalty=1.1, dry_multiplier=0.8, top_n_sigma=1, typical_p=0.9,
        xtc_probability=0.5, dynatemp_range=0.2,
    )  # fmt: skip
    assert names(everything) == [
        "logit_bias", "penalties", "dry",
        "top_n_sigma", "top_k", "typical", "top_p", "min_p", "xtc", "temp_ext", "dist",
    ]  # fmt: skip


def test_stages_that_change_nothing_are_left_out() -> None:
    plain = Sampling(temperature=1, top_k=0, top_p=1, min_p=0)
    assert names(plain) == ["dist"]
    assert names(Sampling(temperature=0)) == ["greedy"]
    assert names(Sampling(repeat_penalty=1.3, repeat_last_n=0, temperature=0)) == ["greedy"]
    assert names(Sampling(dry_multiplier=1, dry_penalty_last_n=0, temperature=0)) == ["greedy"]


def test_bias_and_penalties_also_hold_for_greedy() -> None:
    assert names(Sampling(temperature=0, logit_bias=((1, 2.0),), presence_penalty=1)) == [
        "logit_bias", "penalties", "greedy",
    ]  # fmt: skip


def test_mirostat_replaces_the_filters() -> None:
    assert names(Sampling(mirostat=1)) == ["temp", "mirostat"]
    assert names(Sampling(mirostat=2)) == ["temp", "mirostat_v2"]


def test_suppressed_tokens_are_biased_out() -> None:
    first = chain(Sampling(temperature=0), 1, suppressed=(4, 5))[0]
    assert first == Stage("logit_bias", (((4, NEVER), (5, NEVER)),))


@pytest.mark.parametrize(
    ("sampling", "needed"),
    [
        (Sampling(), 0),
        (Sampling(repeat_penalty=1.1), 64),
        (Sampling(repeat_penalty=1.1, repeat_last_n=-1), 1000),
        (Sampling(dry_multiplier=1), 1000),
        (Sampling(presence_penalty=1, dry_multiplier=1, dry_penalty_last_n=8), 64),
    ],
)
def test_how_much_of_the_prompt_the_chain_must_see(sampling: Sampling, needed: int) -> None:
    assert history_needed(sampling, 1000) == needed


def test_log_softmax_top() -> None:
    logits = np.array([0.0, 3.0, 1.0, -np.inf], np.float32)
    own, best = log_softmax_top(logits, 2, 2)
    total = np.log(np.exp([0, 3, 1]).sum())
    assert own == pytest.approx(1 - total)
    assert [token for token, _ in best] == [1, 2]
    assert best[0][1] == pytest.approx(3 - total)
    assert log_softmax_top(logits, 3, 0)[0] == -np.inf
    assert len(log_softmax_top(logits, 0, 99)[1]) == 4


def test_sizes() -> None:
    assert sizes.context_length(0, 4096) == 4096
    assert sizes.context_length(0, 262_144) == sizes.DEFAULT_CONTEXT
    assert sizes.context_length(0, 0) == sizes.DEFAULT_CONTEXT
    assert sizes.context_length(100_000, 4096) == 100_000
    assert sizes.kv_cells(0, 4096, 8, 3072) == 32_768
    assert sizes.kv_cells(0, 32_768, 8, 98_304) == 32_768
    assert sizes.kv_cells(0, 8192, 8, 98_304) == 10_922
    assert sizes.kv_cells(50_000, 4096, 8, 3072) == 50_000
    assert sizes.kv_cells(1000, 4096, 8, 3072) == 4096
    assert sizes.kv_cells(0, 4096, 8, 0) == 32_768
    assert (sizes.threads(0, 8, 16), sizes.threads(0, None, 4), sizes.threads(0, 8, 2)) == (8, 4, 2)
    assert sizes.threads(3, 8, 16) == 3
    assert sizes.bytes_on_devices(0, 1.0, 100, 900) == 0
    assert sizes.bytes_on_devices(5000, 1.0, 100, 900) == 1000
    assert sizes.bytes_on_devices(5000, 0.5, 100, 0) == 50
    assert sizes.bytes_on_devices(70, 7.0, 100, 900) == 70


def test_times_summarise_the_last_steps() -> None:
    log = TimeLog()
    assert log.summary() is None
    for _ in range(3000):
        log.add(0.010, 0.007, 0.002, 4)
    summary = log.summary()
    assert summary is not None
    assert summary.n_steps == 2048
    assert summary.outside_p50 == pytest.approx(1.0)
    assert summary.sample_per_token == pytest.approx(0.5)


def test_the_engine_asks_for_huge_pages_unless_told_otherwise() -> None:
    wanted = "glibc.malloc.hugetlb=1"
    assert engine_environment({"A": "b"}) == {"A": "b", "GLIBC_TUNABLES": wanted}
    assert engine_environment({"GLIBC_TUNABLES": "glibc.x=2"})["GLIBC_TUNABLES"] == f"glibc.x=2:{wanted}"
    kept = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert engine_environment(kept) == kept
