"""The benchmark of experts that follow the traffic, without a library: walks, rows, gaps, tables."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from daemon.errors import HotsetError
from daemon.hotset.budget import Bytes, parse
from hotset_tools.bench import budget_gaps, tables
from hotset_tools.bench.arms import Arm, Timed
from hotset_tools.bench.following import Stopwatch
from hotset_tools.bench.live import LiveBench, Traffic, even_slots, in_mib
from hotset_tools.bench.live_judge import LiveJudge, UploadCost
from hotset_tools.bench.memory_watch import MemoryWatch
from hotset_tools.bench.moe_models import make
from hotset_tools.bench.rows import Report, Restart, Row
from hotset_tools.bench.shelf import Place, Shelf
from hotset_tools.bench.walks import TopicWalks, Walks
from hotset_tools.routing import make_routing, stream
from tests.pure import test_bench_residency as others
from tests.pure.test_bench_race import FakeChild
from tests.pure.test_bench_residency import DECODE, EXPERT, N_EXPERT, N_LAYERS, SIZES, SLOTS

MIB = 1 << 20
LIVE = Arm("ours", Place("ours", N_LAYERS, SLOTS, "16384"), 8, "traffic")
FROZEN = Arm("ours", Place("ours", N_LAYERS, SLOTS), 8, "other topics")
STOCK = Arm("stock", Place("peer", 2), 16)
RESTART = Restart(
    budget=0.25, tokens=64, topics=(3, 4), before=(0.5, 0.75), warm=(0.5, 0.5), without=(0.25, 0.25), cold=(0.5, 0.125)
)
JUDGE = LiveJudge(SIZES, N_EXPERT, "vulkan", 1, "abc")


def timed(*seconds: float, hits: int = 0, misses: int = 0, uploads: int = 0) -> Timed:
    return Timed(list(seconds), hits, misses, uploads, uploads * EXPERT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("walks") / "topics.gguf"
    return make(path, "overhead", "Q8_0", "topics", 1, n_layer=1, n_vocab=1800)[0]


class TestTopicWalks:
    @pytest.fixture
    def walks(self, model: Path) -> TopicWalks:
        return TopicWalks(model, 40, seed=3)

    def topics(self, walks: TopicWalks, tokens: list[int]) -> list[int]:
        assert walks.routing is not None
        return [token * 6 // walks.routing.n_ids for token in tokens]

    def test_what_is_learned_and_what_is_measured_have_no_topic_in_common(self, walks: TopicWalks) -> None:
        assert (walks.learned, walks.visited) == ((0, 1, 2), (3, 4, 5))
        assert set(self.topics(walks, walks.tokens(2000, 0, "learn"))) == {0, 1, 2}
        assert set(self.topics(walks, walks.tokens(2000, 0))) == {3, 4, 5}

    def test_topics_are_switched_as_often_as_asked(self, walks: TopicWalks, model: Path) -> None:
        steps = walks.steps(4000, 1, 0)
        assert walks.switches(steps) == pytest.approx(4000 / 40, rel=0.2)
        assert TopicWalks(model, 400, 3).switches(steps) == walks.switches(steps)
        assert walks.switches([[step[0]] * 2 for step in steps]) == 2 * walks.switches(steps)

    def test_pieces_make_one_stream_of_each_sequence(self, walks: TopicWalks) -> None:
        pieces = [step for number in range(4) for step in walks.steps(25, 2, 7000 + number)]
        assert pieces == walks.steps(100, 2, 7000)
        assert pieces != walks.steps(100, 2, 0)
        assert [step[0] for step in pieces] != [step[1] for step in pieces]

    def test_a_prompt_is_one_place_of_a_topic(self, walks: TopicWalks) -> None:
        one, other = (walks.prompt(90, 4, number) for number in (1, 2))
        assert walks.switches(one) == 0
        assert {topic for step in one + other for topic in self.topics(walks, step)} == {4}
        assert one != other
        assert one == walks.prompt(90, 4, 1)

    def test_other_models_are_refused(self, tmp_path: Path) -> None:
        path, _ = make(tmp_path / "local.gguf", "overhead", "Q8_0", "local", 1, n_layer=1, n_vocab=1800)
        assert Walks(path, 1800, 1).kind == "local"
        with pytest.raises(HotsetError, match="has no topics; `hotset bench make-model --routing topics`"):
            TopicWalks(path, 40, 1)

    def test_streams_among_all_topics_are_what_they_were(self) -> None:
        routing = make_routing("topics", 12_000, 3)
        assert stream(routing, 900, 5) == stream(routing, 900, 5, among=range(6))
        assert {token // 2000 for token in stream(routing, 3000, 5, among=(4,))} == {4}


def test_slots_are_the_same_for_every_layer() -> None:
    assert even_slots(0.5, SIZES, N_EXPERT) == (3,) * N_LAYERS, "4 of 8, one of them for zeros"
    assert even_slots(0.1, SIZES, N_EXPERT) == (0,) * N_LAYERS
    assert even_slots(1.0, replace(SIZES, layer_bytes=(99 * EXPERT,) * N_LAYERS), N_EXPERT) == (N_EXPERT,) * N_LAYERS


@pytest.mark.parametrize("n_bytes", [MIB, MIB + 1, 10**9 + 7, 16 * 10**9 + 1])
def test_a_budget_in_mib_holds_all_of_it(n_bytes: int) -> None:
    found = parse(in_mib(n_bytes))
    assert isinstance(found, Bytes)
    assert n_bytes <= found.n <= n_bytes + MIB // 1000 + 1


@pytest.mark.parametrize("wrong", [{"n_visit": 1}, {"budget_seconds": -1.0}, {"budget_seconds": 601.0}])
def test_traffic_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(HotsetError, match="a topic is visited for"):
        Traffic(**wrong)


def test_fewer_slots_than_asked_for_are_an_error() -> None:
    bench = LiveBench.__new__(LiveBench)
    bench._shelf = SimpleNamespace(  # type: ignore[assignment]
        sizes=SIZES, open=lambda _: {"layers": [{"slots": 3}, {"slots": 3}, {"slots": 3}, {"slots": 2}]}
    )
    with pytest.raises(HotsetError, match="gave 2 to 3 slots a layer, not 3"):
        bench._places(SLOTS)


def test_what_learns_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 50))
    child = FakeChild(40 * EXPERT)
    shelf = Shelf({"ours": child}, {"ours": "Vulkan0"}, SIZES)  # type: ignore[dict-item]
    shelf.open(LIVE.place)
    shelf.open(Place("ours", N_LAYERS))
    child.free = 0
    shelf.open(FROZEN.place)
    assert [what for do, what in child.said if do == "close"] == [f"cpu{N_LAYERS}:None"]
    shelf.close(LIVE.place)
    shelf.close(LIVE.place)
    assert [what for do, what in child.said if do == "close"][1:] == [f"cpu{N_LAYERS}:{SLOTS}16384"]


class TestRows:
    TIMES = {  # noqa: RUF012
        LIVE: timed(2, 2, 4, hits=3, misses=1, uploads=12), FROZEN: timed(3, 3, 6, hits=1, misses=3),
        STOCK: timed(4, 4, 8), replace(STOCK, threads=8): timed(5, 5, 9),
    }  # fmt: skip

    def test_they_are_compared_round_by_round(self) -> None:
        live, frozen, off = JUDGE.rows(0.5, DECODE, self.TIMES, 2, None)
        assert [(row.mode, row.plan) for row in (live, frozen, off)] == [
            ("live", "traffic"), ("static", "other topics"), ("off", "split")
        ]  # fmt: skip
        assert (live.ratio_vs_best_static, live.ratio_vs_frozen, live.ci_vs_frozen) == (2, 1.5, (1.5, 1.5))
        assert (frozen.ratio_vs_best_static, frozen.ratio_vs_frozen) == (pytest.approx(4 / 3), None)
        assert (off.ratio_vs_best_static, off.best_static.threads, off.best_static.library) == (1, 16, "stock")
        assert (live.hit_rate, frozen.hit_rate, off.hit_rate) == (0.75, 0.25, None)
        assert (live.layers, off.layers) == (
            {"full": 0, "partial": 4, "cold": 0},
            {"full": 2, "partial": 0, "cold": 2},
        )
        assert live.resident == frozen.resident == off.resident == 0.5
        assert live.moves_per_token == 12 / 6, "3 rounds of 2 steps"
        assert live.upload_mib_per_second == 12 * EXPERT / MIB / 16
        assert (live.upload_cost, frozen.moves_per_token) == (None, None)

    def test_moves_are_counted_by_the_tokens_of_all_sequences(self) -> None:
        live, *_ = JUDGE.rows(0.5, replace(DECODE, n_sequences=4), self.TIMES, 2, None)
        assert live.moves_per_token == 12 / 24
        assert live.tokens_per_second == 2

    def test_uploads_cost_what_steps_take_longer(self) -> None:
        cost = UploadCost.of({"with": [1.25, 1.0, 1.25], "without": [1.0, 0.8, 1.0], "bytes": 7 * MIB, "seconds": 3.5})
        live, *_ = JUDGE.rows(0.5, DECODE, self.TIMES, 2, cost)
        assert live.upload_cost == pytest.approx(0.2)
        assert live.ci_upload_cost == pytest.approx((0.2, 0.2))
        assert live.upload_cost_mib_per_second == 2
        assert "against frozen 1.50, uploads cost 20.0%" in live.line
        assert Row.model_validate_json(live.model_dump_json()) == live

    def test_without_a_peer_the_split_is_this_build_s(self) -> None:
        times = {arm: one for arm, one in self.TIMES.items() if arm.role == "ours"}
        _, _, off = JUDGE.rows(0.5, DECODE, times | {replace(STOCK, role="same"): timed(4, 4, 4)}, 2, None)
        assert off.best_static.library == "this build, feature off"


def reply(**change: Any) -> dict[str, Any]:
    """Steps every 10 ms; 1 s, then 8 GiB more asked for, then all but 2 GiB given back."""
    ends = [0.01 * n for n in range(1, 301) if not 120 <= n < 140]
    memory = [(0.05 * n, 100 - held, held) for n in range(1, 60) for held in [slots(0.05 * n)]]
    found = {
        "ends": ends,
        "asked": [1.0, 2.0],
        "memory": [(at, free * EXPERT, held * EXPERT) for at, free, held in memory],
    }
    return found | change


def slots(at: float) -> int:
    return 4 if at <= 1.22 else 12 if at <= 2.31 else 2


class TestBudgetChanges:
    def test_gaps_and_memory(self) -> None:
        found = budget_gaps.judge(reply(), ["25%", "50%", "10%"], 4, 16)
        assert (found.sequences, found.threads) == (4, 16)
        assert (found.usual_gap_ms, found.quiet_gap_ms) == (pytest.approx(10), pytest.approx(10))
        more, less = found.changes
        assert (more.before, more.after, less.before, less.after) == ("25%", "50%", "50%", "10%")
        assert (more.longest_gap_ms, less.longest_gap_ms) == (pytest.approx(210), pytest.approx(10))
        assert (more.tokens, less.tokens) == ((80,) * 4, (100,) * 4)
        assert more.slot_bytes == (4 * EXPERT, 12 * EXPERT)
        assert less.free_bytes == (88 * EXPERT, 98 * EXPERT)
        assert (more.seconds_to_slots, more.seconds_to_memory) == (pytest.approx(0.25), pytest.approx(0.25))
        assert less.seconds_to_memory == pytest.approx(0.35)
        assert "25% to 50%: longest gap 210 ms, slots after 0.25 s, driver's memory after 0.25 s" in more.line

    def test_a_gap_that_begins_before_the_change_is_one(self) -> None:
        ends = [at for at in reply()["ends"] if not 0.985 < at < 1.085]
        more, _ = budget_gaps.judge(reply(ends=ends), ["25%", "50%", "10%"], 1, 1).changes
        assert more.longest_gap_ms == pytest.approx(210)
        ends = [at for at in reply()["ends"] if not 0.955 < at < 1.25]
        more, _ = budget_gaps.judge(reply(ends=ends), ["25%", "50%", "10%"], 1, 1).changes
        assert more.longest_gap_ms == pytest.approx(450)

    def test_memory_that_does_not_follow_is_said(self) -> None:
        fixed = [(at, 100 * EXPERT, held) for at, _, held in reply()["memory"]]
        more, less = budget_gaps.judge(reply(memory=fixed), ["25%", "50%", "10%"], 4, 16).changes
        assert (more.seconds_to_memory, less.seconds_to_memory) == (None, None)
        assert more.seconds_to_slots is not None
        assert "driver's memory never" in more.line

    def test_a_driver_that_does_not_tell(self) -> None:
        silent = [(at, 0, held) for at, _, held in reply()["memory"]]
        assert (
            budget_gaps.judge(reply(memory=silent), ["25%", "50%", "10%"], 4, 16).changes[0].seconds_to_memory is None
        )

    @pytest.mark.parametrize(
        "change", [{"ends": [0.1, 0.2, 2.5]}, {"ends": [1.1, 1.2, 2.5]}, {"asked": [1.0]}, {"memory": []}]
    )
    def test_too_few_steps_or_samples_are_an_error(self, change: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="with every budget"):
            budget_gaps.judge(reply(**change), ["25%", "50%", "10%"], 4, 16)


def test_a_stopped_clock_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Stopwatch()
    assert clock() == 10
    for at, act, seen in ((12.0, clock.stop, 12.0), (15.0, clock.stop, 12.0), (20.0, clock.start, 12.0)):
        now[0] = at
        act()
        assert clock() == seen
    now[0] = 21.0
    clock.start()
    assert clock() == 13


def test_memory_is_looked_at_from_the_beginning() -> None:
    with MemoryWatch(lambda: 5, lambda: 7) as watch:
        pass
    assert [one[1:] for one in watch.samples] == [(5, 7)] * len(watch.samples)
    assert watch.samples


def test_live_reports_have_tables_of_their_own() -> None:
    cost = UploadCost.of({"with": [1.0], "without": [0.98], "bytes": MIB, "seconds": 1})
    times = {LIVE: timed(0.02, hits=3, misses=1, uploads=2), FROZEN: timed(0.03, hits=1, misses=1), STOCK: timed(0.04)}
    changes = budget_gaps.judge(reply(), ["25%", "50%", "10%"], 4, 16)
    report = Report(
        head=others.TestTables.HEAD | {"traffic": {"tokens_per_visit": 200}}, prices=[], measurements=[], notes=[],
        rows=list(JUDGE.rows(0.5, DECODE, times, 1, cost)), budget_changes=changes, restart=RESTART,
    )  # fmt: skip
    text = tables.tables([("live.json", report)])
    assert "Visits of 200 tokens to a topic." in text.replace("\n", " ")
    assert (
        "| 50% | 1 | live, traffic (4 partial) | 0.75 | 2.0 | 102400 | 50.0 (t 8) | 25.0 (n 2, t 16) "
        "| 2.00 (2.00-2.00) | 1.50 (1.50-1.50) | 2.0% (2.0% to 2.0%) |" in text
    )
    assert "| 50% | 1 | static, other topics (4 partial) | 0.50 | - | - | 33.3 (t 8) |" in text
    assert "| 25% to 50% | 210 | 0.25 | 0.25 | +8192 | 80 |" in text
    assert "while 4 sequences decode with 16 threads" in text.replace("\n", " ")
    assert Report.model_validate_json(report.model_dump_json()) == report
    assert "Hit rates of 64 tokens with 25%" in text
    assert "| 4 | 0.75 | 0.50 | 0.25 | 0.12 |" in text
    assert RESTART.line.startswith(
        "restart at 25%: hits 0.625 before, then 0.500 of another prompt warm, 0.250 without"
    )
    for columns, begin in ((tables.LIVE, "| 50% | 1 |"), (tables.CHANGES, "| 25% to")):
        assert {line.count("|") for line in text.splitlines() if line.startswith(begin)} == {len(columns) + 1}
