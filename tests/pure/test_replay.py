"""`hotset replay`: rivals counted by hand, the best possible against every possible plan, and the recorded traces."""

from __future__ import annotations

import json
import sys
import types
from functools import cache
from itertools import combinations, permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.errors import EXIT_FAILURE
from daemon.hotset.files import ModelId
from daemon.hotset.policy import Settings
from daemon.hotset.trace import Header, Segment, Trace, TraceLayer, TraceUnusable, read, write
from hotset_tools.cli import main
from hotset_tools.hot_set.learning import CannotLearn
from hotset_tools.replay import comparing, mixed, ours, plot, rivals
from hotset_tools.replay.clairvoyant import clairvoyant
from hotset_tools.replay.meter import Meter
from hotset_tools.replay.report import Report, Row
from hotset_tools.replay.switches import WINDOW, tokens_to_90
from hotset_tools.reporter import Silent

DATA = Path(__file__).resolve().parents[1] / "data"
SHARES = (0.125, 0.25, 0.5)


def chosen(*experts: tuple[int, ...]) -> np.ndarray:
    """One layer, [n_tokens, 1, top_k]."""
    return np.array(experts, np.uint16)[:, None]


ONE = chosen((0,), (1,), (0,), (2,), (0,), (1,), (1,))


@pytest.mark.parametrize(
    ("name", "hits", "uploads"),
    [("lru", [0, 1, 0, 0, 0, 0, 1], 5), ("lfu", [0, 1, 0, 1, 0, 1, 1], 1)],
)
def test_rivals_on_a_trace_counted_by_hand(name: str, hits: list[int], uploads: int) -> None:
    ids = chosen((0,), (0,), (1,), (0,), (2,), (0,), (0,))
    played = rivals.play(rivals.RIVALS[name], ids, [3], np.array([[1]]))
    assert played.hits[:, 0].tolist() == hits
    assert played.uploads.tolist() == [uploads]


def test_a_window_forgets() -> None:
    scores = rivals.frequency(ONE[:, 0], 3, window=2)
    assert (scores > 0).tolist()[4:] == [[True, False, True], [True, False, True], [True, True, False]]


def test_lists_that_are_frozen() -> None:
    ids = chosen((0,), (0,), (1,), (1,), (1,), (0,))
    slots = np.array([[1]])
    assert rivals.static(ids, [2], slots) == [0.5]
    assert rivals.frozen(ids, [slice(0, 3), slice(3, 6)], [2], slots) == [pytest.approx(1 / 3)]


def test_frozen_lists_are_tried_on_every_other_segment() -> None:
    trace = read(DATA / "six-domains.trace")
    ids, segments = trace.ids, [tokens for _, tokens in trace.segments()]
    rates = []
    for one, other in permutations(segments, 2):
        hits = 0
        for layer in range(6):
            used = np.bincount(ids[one, layer].ravel(), minlength=32)
            best = sorted(range(32), key=lambda expert: (-used[expert], expert))[:8]
            hits += np.isin(ids[other, layer], best).sum()
        rates.append(hits / ids[other].size)
    assert rivals.frozen(ids, segments, [32] * 6, np.array([[8] * 6])) == [pytest.approx(np.mean(rates))]


def test_lists_of_layers_of_different_sizes() -> None:
    ids = np.array([[0, 0], [1, 1], [0, 4], [0, 4]], np.uint16)[..., None]
    assert rivals.static(ids, [2, 5], np.array([[1, 1], [2, 2]])) == [5 / 8, 7 / 8]
    halves = [slice(0, 2), slice(2, 4)]
    assert rivals.frozen(ids, halves, [2, 5], np.array([[1, 1]])) == [pytest.approx((2 / 4 + 1 / 4) / 2)]


@pytest.mark.parametrize("name", ["lru", "hotset", "pooled", "clairvoyant"])
def test_everyone_tells_how_far_it_is(name: str) -> None:
    heard: list[float] = []
    ids, slots = np.concatenate([ONE, ONE], axis=1), np.array([[1, 1], [2, 1]])
    n_expert, ruled = [3, 3], (1.0, Settings())
    if name == "lru":
        rivals.play(rivals.last_use, ids, n_expert, slots, heard.append)
    elif name == "hotset":
        ours.play(ours.single(ids), n_expert, slots, *ruled, heard.append)
    elif name == "pooled":
        ours.play_pooled(ids, n_expert, slots, *ruled, tell=heard.append)
    else:
        clairvoyant(ids, 3, slots, heard.append)
    assert len(heard) > 1
    assert sum(heard) == pytest.approx(1)


def test_progress_is_told_in_whole_percent_and_ends() -> None:
    class Heard(Silent):
        def progress(self, done: int, total: int) -> None:
            told.append((done, total))

    told: list[tuple[int, int]] = []
    meter = Meter(Heard(), 2)
    for _ in range(1000):
        meter.worked(1 / 999)  # a little too much
    meter.ended()
    meter.worked(0.5)
    meter.ended()
    assert told[:50] == [(percent, 100) for percent in range(1, 51)]
    assert told[50:] == [(75, 100), (100, 100)]


@settings(max_examples=40)
@given(st.lists(st.sampled_from(list(combinations(range(4), 2))), min_size=1, max_size=9), st.integers(1, 3))
def test_the_clairvoyant_is_the_best_of_all_plans(tokens: list[tuple[int, int]], n_slots: int) -> None:
    @cache
    def best(token: int, resident: frozenset[int]) -> int:
        if token == len(tokens):
            return 0
        candidates = resident | set(tokens[token])
        kept = (frozenset(some) for size in range(n_slots + 1) for some in combinations(candidates, size))
        return len(resident & set(tokens[token])) + max(best(token + 1, some) for some in kept)

    hits, _ = clairvoyant(chosen(*tokens), 4, np.array([[n_slots]]))
    assert hits.sum() == best(0, frozenset())


def test_a_layer_without_slots_has_no_hit() -> None:
    ids = np.concatenate([ONE, ONE], axis=1)
    hits, uploads = clairvoyant(ids, 3, np.array([[0, 3], [0, 0]]))
    assert hits.sum(axis=0).tolist() == [4, 0]
    assert uploads.tolist() == [2, 0]  # expert 2 never comes again


def test_tokens_until_a_new_topic_is_served() -> None:
    segment = [0] * 20 + [8] * 60
    found = tokens_to_90(np.array([8] * 50 + segment + [0] * 10), [slice(0, 50), slice(50, 130), slice(130, 140)])
    assert found == [20 + int(np.ceil(0.9 * WINDOW))]
    assert tokens_to_90(np.array([0] * 40 + [0] * 39 + [1]), [slice(0, 40), slice(40, 80)]) == [40]


class TestStreams:
    """Several sequences at once."""

    ids = np.arange(60, dtype=np.uint16)[:, None, None]
    segments = tuple(slice(start, start + 10) for start in range(0, 60, 10))

    def test_segments_are_dealt_to_streams(self) -> None:
        steps = list(mixed.deal(self.ids, self.segments, [1, 1]))
        assert all(len(step.ids) == 2 for step in steps)
        for step in steps:
            assert [int(token) // 10 for token in step.ids[:, 0, 0]] == list(step.texts)
        tokens = [int(token) for step in steps for token in step.ids[:, 0, 0]]
        assert len(set(tokens)) == len(tokens)
        assert [step.texts for step in steps[4:6]] == [(0, 1), (2, 1)]

    def test_a_stream_may_be_faster(self) -> None:
        steps = list(mixed.deal(self.ids, self.segments, [4, 1]))
        assert [len(step.ids) for step in steps[:3]] == [5, 2, 5]
        assert steps[0].texts == (0, 0, 0, 0, 1)

    def test_one_stream_is_the_trace(self) -> None:
        steps = list(mixed.deal(self.ids, self.segments, [1]))
        assert np.array_equal(np.concatenate([step.ids for step in steps]), self.ids)

    @pytest.mark.parametrize("name", mixed.meanings([8], Settings()))
    def test_for_one_sequence_all_meanings_of_heat_agree(self, name: str) -> None:
        source = mixed.meanings([60], Settings())[name]()
        usual = ours.Sum([60], Settings())
        for step in list(mixed.deal(self.ids, self.segments[:1], [1])) * 30:
            source.take(step)
            usual.take(step)
        assert source.values == pytest.approx(usual.values, rel=1e-3)

    def test_own_heat_ends_with_its_sequence(self) -> None:
        source = mixed.meanings([4], Settings())["own heat, added"]()
        source.take(ours.Step(chosen((0,), (1,)), (0, 1)))
        source.take(ours.Step(chosen((1,), (2,)), (1, 2)))
        assert source.values[0, 0] == 0
        assert source.values[0, 1] > source.values[0, 2] == 1


@pytest.fixture(scope="module")
def six() -> dict[str, object]:
    return comparing.compare(comparing.Request(DATA / "six-domains.trace", SHARES), json=True).as_json()


def column(report: dict[str, object], policy: str, name: str) -> list[float]:
    rows = report["rows"]
    assert isinstance(rows, list)
    return [row[name] for share in SHARES for row in rows if (row["policy"], row["share"]) == (policy, share)]


def test_the_policy_comes_near_the_best_possible(six: dict[str, object]) -> None:
    assert np.all(np.array(column(six, "hotset", "of_clairvoyant")) >= [0.79, 0.86, 0.93])
    assert max(column(six, "hotset", "uploads_per_token")) <= 1
    assert column(six, "clairvoyant", "of_clairvoyant") == [1, 1, 1]


def test_no_rival_is_better_by_a_point_and_frozen_lists_are_far_behind(six: dict[str, object]) -> None:
    mine = np.array(column(six, "hotset", "hit_rate"))
    for name in (*rivals.RIVALS, "static", "hotset-pooled"):
        assert np.all(mine >= np.array(column(six, name, "hit_rate")) - 0.01), name
    assert np.all(mine > np.array(column(six, "frozen", "hit_rate")) + 0.25)


def test_a_new_topic_is_served_within_64_tokens(six: dict[str, object]) -> None:
    switch = six["switch"]
    assert isinstance(switch, dict)
    assert switch["tokens_to_90"] == max(row["tokens_to_90"] for row in switch["rows"])
    assert WINDOW <= switch["tokens_to_90"] <= 64
    assert [len(row["each"]) for row in switch["rows"]] == [5, 5, 5]


def test_the_policy_beats_lru_on_all_domains() -> None:
    trace = read(DATA / "all-domains.trace")
    slots = comparing.slots_of(trace, SHARES)
    assert slots.tolist() == [[4] * 6, [8] * 6, [16] * 6]
    mine = ours.play(ours.single(trace.ids), trace.n_expert, slots, 1.0, Settings())
    lru = rivals.play(rivals.last_use, trace.ids, trace.n_expert, slots)
    better = (mine.hits.sum(axis=0) - lru.hits.sum(axis=0)) / trace.ids.size
    assert np.all(better >= [0.03, 0.05, 0.02])
    assert np.all(mine.uploads <= len(trace.ids))


def test_fewer_uploads_are_kept_to() -> None:
    ids, slots = read(DATA / "six-domains.trace").ids[:600], np.array([[8] * 6])
    assert ours.play(ours.single(ids), [32] * 6, slots, 0.1, Settings()).uploads[0] <= 0.1 * 600 + ours.BURST
    assert ours.play(ours.single(ids), [32] * 6, slots, 0.0, Settings()).uploads[0] == ours.BURST


def test_layers_share_slots_where_that_serves_more() -> None:
    random = np.random.default_rng(1)
    busy = random.integers(0, 8, (2 * ours.REPLAN_TOKENS, 1, 1))
    ids = np.concatenate([busy, np.zeros_like(busy)], axis=1).astype(np.uint16)
    slots = np.array([[4, 4]])
    alone = ours.play(ours.single(ids), [8, 8], slots, 1.0, Settings())
    pooled = ours.play_pooled(ids, [8, 8], slots, 1.0, Settings())
    half = ours.REPLAN_TOKENS
    assert np.array_equal(pooled.hits[:half], alone.hits[:half])
    assert pooled.hits[half:].sum() > 1.2 * alone.hits[half:].sum()


def test_a_trace_without_repetition_has_no_best_to_compare_with(tmp_path: Path) -> None:
    header = Header(
        model=ModelId(fingerprint="0" * 64),
        top_k=2,
        layers=[TraceLayer(layer=1, experts=4), TraceLayer(layer=2, experts=3)],
        segments=[Segment(name="one", tokens=1)],
    )
    path = tmp_path / "a.trace"
    write(path, Trace(header, np.array([[[0, 3], [1, 2]]], np.uint16)))
    report = comparing.compare(comparing.Request(path, [0.5]), json=True)
    assert {row.of_clairvoyant for row in report.rows} == {None}
    assert "frozen" not in {row.policy for row in report.rows}
    assert "switch" not in json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert "hotset" in report.text()


@pytest.mark.parametrize("text", ["a", "1,", "0", "65", "1,-1", ",".join("1" * 65)])
def test_streams_that_make_no_sense(text: str) -> None:
    with pytest.raises(comparing.CannotReplay, match="--streams"):
        comparing.widths(text)


def test_what_cannot_be_replayed_is_said(tmp_path: Path) -> None:
    with pytest.raises(CannotLearn, match="--slots"):
        comparing.shares("0")
    with pytest.raises(comparing.CannotReplay, match="6 segments are not enough for 7 streams"):
        comparing.compare(comparing.Request(DATA / "six-domains.trace", [0.5], widths=[1] * 7), json=True)
    with pytest.raises(TraceUnusable):
        comparing.compare(comparing.Request(tmp_path / "none.trace", [0.5]), json=True)


def test_the_command_prints_json_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["replay", str(DATA / "six-domains.trace"), "--slots", "25", "--streams", "1,1,1"]
    for extra in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main([*words, *extra])
        assert ended.value.code == 0
        captured = capsys.readouterr()
        if extra:
            report = json.loads(captured.out)
            assert not captured.err
            assert "switch" not in report
            assert {row["policy"] for row in report["rows"]} == set(mixed.meanings([1], Settings()))
        else:
            assert "25.000% of experts" in captured.out
            assert captured.err.startswith("reading six-domains.trace\npolicies, percent\n  10/100\n")


def test_a_picture_needs_matplotlib_and_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(place: Path) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["replay", str(DATA / "six-domains.trace"), "--plot", str(place)])
        assert ended.value.code == EXIT_FAILURE
        return capsys.readouterr().err

    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert "cannot be written" in refused(tmp_path / "none" / "a.png")
    assert "it is the trace" in refused(DATA / "six-domains.trace")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "hotset[plots]" in refused(tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    row = Row(0.25, "hotset", 0.5, None, 0.1)
    header = read(DATA / "six-domains.trace").header
    plot.draw(Report(Path("a.trace"), header, 1.0, Settings(), [row], None), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
