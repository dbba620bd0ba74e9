"""The benchmark of experts that follow the traffic, over a CPU behind the RPC backend: only its plumbing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.errors import HotsetError
from daemon.model_files import EMBEDDED_MODEL
from daemon.native.gguf_check import check
from daemon.native.hotset import ResidencyError, Status
from hotset_tools.bench import live
from hotset_tools.bench.arms import Settings
from hotset_tools.bench.following import Following
from hotset_tools.bench.live import Traffic
from hotset_tools.bench.moe_models import bench_routing
from hotset_tools.bench.pushing import Pusher
from hotset_tools.bench.rows import Report
from hotset_tools.bench.tables import tables
from hotset_tools.bench.walks import TopicWalks
from hotset_tools.bench.worker import Worker
from hotset_tools.cli import main
from hotset_tools.make_model import write_model
from tests.native.test_bench_workers import SHAPE

N_LAYER, N_EXPERT, TOP_K = SHAPE.n_layer, SHAPE.n_expert, SHAPE.n_expert_used
TRAFFIC = Traffic(n_visit=20, budget_seconds=0.5, restart=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("live") / "topics.gguf"
    write_model(path, SHAPE, 1, reuse_layer=True, routing=bench_routing(SHAPE, "topics", 1))
    return path


@pytest.fixture
def settings(model: Path, child_device: str, tmp_path: Path) -> Settings:
    return Settings(
        model, child_device, budgets=(0.25, 0.5), sequences=(1,), threads=(1,), rounds=3, minutes=5, steps=16,
        learn_tokens=512, ubatch=64, out=tmp_path / "out.json",
    )  # fmt: skip


def test_a_report_is_whole(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_MOST_PAIRS", 8)
    report = live.run(settings, TRAFFIC)
    assert settings.out is not None
    assert Report.model_validate_json(settings.out.read_text()).model_dump_json() == report.model_dump_json()
    found = {(row.budget, row.mode): row for row in report.rows}
    assert found.keys() == {(budget, mode) for budget in (0.25, 0.5) for mode in ("live", "static", "off")}
    for row in report.rows:
        assert row.resident <= row.budget
        assert (row.rounds, row.sequences, row.backend) == (3, 1, "rpc")
    for budget in settings.budgets:
        ours, frozen = found[budget, "live"], found[budget, "static"]
        assert ours.resident == frozen.resident
        assert ours.layers == frozen.layers == {"full": 0, "partial": N_LAYER, "cold": 0}
        assert ours.hit_rate is not None
        assert frozen.hit_rate is not None
        assert ours.hit_rate > frozen.hit_rate, "it was learned on other topics"
        assert (ours.moves_per_token or 0) > 0
        assert (ours.upload_mib_per_second or 0) > 0
        assert ours.upload_cost is not None
        assert ours.ratio_vs_frozen is not None
        assert (ours.best_static.library, frozen.moves_per_token) == ("this build, feature off", None)
    assert report.head["traffic"]["topics"] == (3, 4, 5)
    assert len(report.measurements) == 6

    changes = report.budget_changes
    assert changes is not None
    assert [(one.before, one.after) for one in changes.changes] == [("25%", "50%"), ("50%", "10%"), ("10%", "25%")]
    size = check(settings.model).facts.layers[0].bytes_per_expert
    slots = [[n // size // N_LAYER - 1 for n in one.slot_bytes] for one in changes.changes]
    assert slots == [[8, 16], [16, 3], [3, 8]]
    for one in changes.changes:
        assert one.seconds_to_slots is not None
        assert one.longest_gap_ms > 0
        assert len(one.tokens) == 4
        assert min(one.tokens) > 0
    restart = report.restart
    assert restart is not None
    assert (restart.budget, restart.tokens, restart.topics) == (0.25, 64, (3, 4, 5))
    assert all(warm > cold for warm, cold in zip(restart.warm, restart.cold, strict=True))
    assert sum(restart.warm) == pytest.approx(sum(restart.without), rel=0.1), "as if there had been no restart"
    text = tables([("out.json", report)])
    assert "| 25% to 50% |" in text
    assert "| topic | before | warm start |" in text


def test_the_command_prints_rows(
    settings: Settings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_MOST_PAIRS", 8)
    words = [
        "bench", "live", str(settings.model), "--device", settings.device, "--budgets", "0.5", "--threads", "1",
        "--steps", "8", "--rounds", "1", "--learn", "64", "--topic-tokens", "16",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main([*words, "--json"])
    assert ended.value.code == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    assert [row["mode"] for row in rows] == ["live", "static", "off"]


def test_a_budget_without_a_slot_for_every_layer_is_noted(settings: Settings) -> None:
    report = live.run(replace(settings, budgets=(0.04,)), Traffic(n_visit=20))
    assert (report.rows, report.budget_changes) == ([], None)
    assert report.notes == ["decode of 1 at 4%: that is no slot in every layer"]


def test_models_without_topics_are_refused(settings: Settings) -> None:
    with pytest.raises(HotsetError, match="has no topics"):
        live.run(replace(settings, model=EMBEDDED_MODEL), Traffic())


class TestWorker:
    """What the requests do to a context."""

    @pytest.fixture
    def worker(self, rpc_device: str, model: Path) -> Iterator[Worker]:
        worker = Worker()
        worker.hello(rpc_device)
        engine = {"device": rpc_device, "cpu_moe_layers": N_LAYER, "max_sequences": 4, "repack": False, "ubatch": 64}
        worker.load("m", str(model), engine, "none")
        yield worker
        for name in list(worker._opened):
            worker.close(name)
        worker.unload("m")

    @pytest.fixture
    def steps(self, model: Path) -> list[list[int]]:
        return TopicWalks(model, 20, 1).steps(24, 1, 0)

    def following(self, worker: Worker, vram: str = "50%") -> Following:
        worker.open("c", "m", 256, 1, None, vram)
        following = worker._opened["c"].following
        assert following is not None
        return following

    def resident(self, worker: Worker) -> list[list[int]]:
        return [worker._opened["c"].slots.resident(layer) for layer in range(N_LAYER)]

    def test_experts_follow(self, worker: Worker, steps: list[list[int]]) -> None:
        self.following(worker)
        assert {len(slots) for slots in self.resident(worker)} == {N_EXPERT // 2}
        first, again = (worker.decode("c", steps, warm=0, threads=1) for _ in range(2))
        assert first["uploads"] > 0
        assert first["upload_bytes"] % first["uploads"] == 0
        assert sum(first["hits"]) + sum(first["misses"]) == len(steps) * N_LAYER * TOP_K
        assert sum(again["hits"]) > sum(first["hits"]), "the slots were empty at first"

    def test_nothing_moves_between_two_measurements(self, worker: Worker, steps: list[list[int]]) -> None:
        following = self.following(worker)
        mover = following.experts.mover

        def on_its_thread(order: Callable[[], None]) -> None:
            done = threading.Event()
            mover.post(lambda: (order(), done.set()))
            assert done.wait(20)

        on_its_thread(lambda: mover.controller.pace(1.0))
        worker.decode("c", steps, warm=0, threads=1)
        staged = following.residency.statistics().staged
        assert staged <= 2, "the pace allows no more"
        on_its_thread(lambda: mover.controller.pace(1e12))
        on_its_thread(lambda: None)  # the turn after the order before is over
        assert (mover.held, following.residency.statistics().staged) == (True, staged)
        worker.decode("c", steps, warm=0, threads=1)
        assert following.residency.statistics().staged > staged

    def test_a_mover_that_gave_up_is_an_error(self, worker: Worker, steps: list[list[int]]) -> None:
        following = self.following(worker)

        def fail(seconds: float) -> None:
            raise ResidencyError(Status.FAILED, "the device is gone")

        following.experts.mover.controller.batch = fail  # type: ignore[assignment, method-assign]
        with pytest.raises(HotsetError, match="experts move no more: the device is gone"):
            worker.decode("c", steps, warm=0, threads=1)

    def test_what_was_learned_is_where_the_next_one_begins(
        self, worker: Worker, steps: list[list[int]], tmp_path: Path
    ) -> None:
        for name in ("a", "b"):
            worker.open(name, "m", 256, 1, None, "50%", str(tmp_path))
            if name == "a":
                worker.decode("a", steps, warm=0, threads=1)
                worker.save("a")
        first, second = ([worker._opened[n].slots.resident(at) for at in range(N_LAYER)] for n in ("a", "b"))
        assert [set(experts) for experts in first] == [set(experts) for experts in second]
        assert any(expert >= 0 for experts in first for expert in experts)

    def test_what_cannot_be_saved_is_an_error(self, worker: Worker, steps: list[list[int]], tmp_path: Path) -> None:
        worker.open("c", "m", 256, 1, None, "50%", str(tmp_path / "state"))
        worker.decode("c", steps, warm=0, threads=1)
        (tmp_path / "state").write_text("not a directory")
        with pytest.raises(HotsetError, match=r"what was learned is not saved: .*cannot be written"):
            worker.save("c")

    def test_pushing_leaves_everything_as_it_was(self, worker: Worker, steps: list[list[int]]) -> None:
        worker.open("c", "m", 256, 1, [8] * N_LAYER)
        worker.place("c", [list(range(3, 11))] * N_LAYER)
        before = worker.decode("c", steps, warm=0, threads=1)
        found = worker.push("c", [steps] * 3, warm=1, threads=1, bytes_per_second=1e9)
        assert [len(found[name]) for name in ("with", "without")] == [3, 3]
        assert found["bytes"] > 0
        assert self.resident(worker) == [list(range(3, 11))] * N_LAYER
        after = worker.decode("c", steps, warm=0, threads=1)
        assert (after["hits"], after["misses"]) == (before["hits"], before["misses"])

    def test_pushing_follows_its_pace(self, worker: Worker, steps: list[list[int]]) -> None:
        worker.open("c", "m", 256, 1, [8] * N_LAYER)
        worker.place("c", [list(range(8))] * N_LAYER)
        assert worker.push("c", [steps], warm=1, threads=1, bytes_per_second=1e-3)["bytes"] == 0

    def test_a_push_that_fails_is_told(self, worker: Worker, steps: list[list[int]]) -> None:
        worker.open("c", "m", 256, 1, [8] * N_LAYER)
        with pytest.raises(HotsetError, match="no expert is resident"):
            worker.push("c", [steps], warm=1, threads=1, bytes_per_second=1e9)
        worker.place("c", [list(range(8))] * N_LAYER)
        residency = worker._opened["c"].slots
        pusher = Pusher(residency, [(0, 0, (9,))], 1e12)  # expert 0 is in that slot
        with pytest.raises(ResidencyError) as refused, pusher:
            pusher._thread.join(20)
        assert refused.value.refusal is Status.SLOT_IN_USE

    def test_a_budget_that_gives_nothing_is_an_error(self, worker: Worker) -> None:
        with pytest.raises(HotsetError, match=r"cannot follow the traffic: off: residency.vram names Vulkan7"):
            self.following(worker, "Vulkan7=50%")
