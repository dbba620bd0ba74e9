"""`hotset hot-set`: from texts to batches, and from counts to sizes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.errors import HotsetError
from daemon.hotset.files import ModelId
from daemon.hotset.hot_set import Source
from daemon.native.context import Context
from daemon.native.hotset import Residency
from hotset_tools.hot_set import counting, learning, ranking
from hotset_tools.hot_set.learning import CannotLearn
from tests.engine_fakes import BAD_TOKEN, FakeContext
from tests.minigguf import write_dense

MODEL = ModelId(fingerprint="0" * 64)


class Counting(FakeContext):
    """A context that can be waited for."""

    def synchronize(self) -> None:
        """Everything is computed at once."""


def test_the_most_selected_come_first() -> None:
    assert ranking.rank([3, 9, 3, 0]) == [1, 0, 2, 3]
    hot = ranking.make({(1, 0): [3, 9, 3, 0], (2, 0): [0, 0, 1, 0]}, [25, 50, 100], MODEL, Source())
    assert [size.name for size in hot.sizes] == ["p25", "p50", "p100"]
    assert [layer.experts for layer in hot.sizes[1].layers] == [[1, 0], [2, 0]]
    assert [size.coverage for size in hot.sizes] == [0.625, 0.8125, 1.0]


@given(st.lists(st.lists(st.integers(0, 100), min_size=1, max_size=20), min_size=1, max_size=5))
def test_larger_sizes_hold_the_smaller_ones_and_cover_more(counts: list[list[int]]) -> None:
    hot = ranking.make({(i, 0): layer for i, layer in enumerate(counts)}, [10, 40, 70, 100], MODEL, Source())
    for small, large in zip(hot.sizes, hot.sizes[1:], strict=False):
        for a, b in zip(small.layers, large.layers, strict=True):
            assert b.experts[: len(a.experts)] == a.experts
        assert (small.coverage or 0) <= (large.coverage or 0)
    assert [sorted(layer.experts) for layer in hot.sizes[-1].layers] == [list(range(len(layer))) for layer in counts]


@given(st.lists(st.lists(st.integers(1, 400), max_size=12), max_size=20))
def test_every_token_is_decoded_once_in_narrow_steps(texts: list[list[int]]) -> None:
    context = Counting(1000)
    told: list[counting.Progress] = []
    places: list[counting.Place] = []
    n = counting.decode(cast(Context, context), texts, told.append, places.extend)
    rows = [row for batch in context.batches for row in batch]
    assert [texts[text][position] for text, position in places] == [token for token, *_ in rows]
    assert len(set(places)) == n
    assert n == len(rows) == sum(map(len, texts)) == told[-1].done == told[-1].total
    assert sorted(token for token, *_ in rows) == sorted(token for text in texts for token in text)
    for batch in context.batches:
        assert len(batch) <= counting.N_SEQUENCES
        assert len({seq_id for _, _, seq_id, _ in batch}) == len(batch)
        assert all(wanted for *_, wanted in batch)
    assert not context.cells


def test_a_step_that_cannot_be_computed_ends_it() -> None:
    with pytest.raises(HotsetError, match="could not compute"):
        counting.decode(cast(Context, Counting(1000)), [[1, BAD_TOKEN]], lambda _: None)


@pytest.mark.parametrize("text", ["", "a", "25,,50", "0", "-5", "101", "nan", "inf", "1e-9"])
def test_what_is_no_list_of_percentages_is_refused(text: str) -> None:
    with pytest.raises(CannotLearn, match="--sizes"):
        learning.percentages(text)


def test_percentages_are_sorted_and_named_once() -> None:
    assert learning.percentages("50, 12.5,50,12.5000001") == [12.5, 50]


def test_every_size_lists_experts() -> None:
    hot = ranking.make({(0, 0): [3, 9, 3, 0]}, [1], MODEL, Source())
    assert [layer.experts for layer in hot.sizes[0].layers] == [[1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": Path("nowhere") / "hot.json"}, "no directory"),
        ({"out": Path()}, "no file"),
        ({"out": Path("/dev/null")}, "no file"),
        ({}, "is dense"),
    ],
)
def test_what_cannot_be_learned_is_said_before_anything_runs(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = write_dense(tmp_path / "dense.gguf")
    values = {"model": model, "out": tmp_path / "hot.json", "prompts": [tmp_path], "percentages": [25.0]}
    request = learning.Request(**values | {"tokens": 8, "device": "auto", "threads": 1} | changes)
    with pytest.raises(CannotLearn, match=message):
        learning.learn(request)


def test_a_model_is_not_written_over(tmp_path: Path) -> None:
    model = write_dense(tmp_path / "dense.gguf")
    link = tmp_path / "hot.json"
    link.symlink_to(model)
    for out in (model, link):
        with pytest.raises(CannotLearn, match="it is the model"):
            learning.check(model, out)


def test_texts_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(CannotLearn, match=r"no \.txt file"):
        learning.read_texts([tmp_path])
    with pytest.raises(CannotLearn, match="cannot be read"):
        learning.read_texts([tmp_path / "none.txt"])


def test_texts_of_the_same_name_are_all_used(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(name, "utf-8")
    assert learning.read_texts([tmp_path / "a", tmp_path / "b"]) == [("text.txt", "a"), ("text.txt", "b")]


def test_a_recorder_puts_tokens_where_they_belong() -> None:
    recorder = counting.Recorder(cast(Residency, Router()), [2, 3])
    for step in ([(0, 0), (1, 0)], [(0, 1), (1, 1)], [(1, 2)]):
        recorder(step)
    assert recorder.ids.tolist() == [[[0, 1]], [[10, 11]], [[0, 1]], [[10, 11]], [[20, 21]]]


class Router:
    """One layer; its choice is made of the step's number and the selection's."""

    n_layers = 1

    def __init__(self) -> None:
        self.step = -1

    def layers(self) -> list[SimpleNamespace]:
        """What a recorder asks for."""
        return [SimpleNamespace(n_expert_used=2)]

    def router_ids(self, index: int, n_tokens: int) -> np.ndarray:
        """[n_tokens, 2]."""
        self.step += 1
        return np.array([[10 * self.step, 10 * self.step + 1]] * n_tokens)
