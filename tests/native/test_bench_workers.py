"""The residency benchmark's plumbing, over a CPU behind the RPC backend; how fast anything is, it alone may say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.errors import HotsetError
from daemon.model_files import EMBEDDED_MODEL
from hotset_tools.bench import check_model, residency
from hotset_tools.bench.arms import Arm, Settings, Timed
from hotset_tools.bench.child import Child, WorkerFailed
from hotset_tools.bench.cost import Trace
from hotset_tools.bench.judge import Judge
from hotset_tools.bench.moe_models import BLOCK_GAIN, bench_routing
from hotset_tools.bench.rows import Report, Row
from hotset_tools.make_model import write_model
from hotset_tools.model_shapes import Shape
from tests import minigguf

SHAPE = Shape(
    "bench", 3, 256, 4, 2, 64, 32, 4, 256, 4000, experts="Q4_K", layers="Q4_K", vocab="Q8_0", block_gain=BLOCK_GAIN
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "local.gguf"
    write_model(path, SHAPE, 1, reuse_layer=True, routing=bench_routing(SHAPE, "local", 1))
    return path


@pytest.fixture
def settings(model: Path, child_device: str, tmp_path: Path) -> Settings:
    return Settings(
        model, child_device, budgets=(0.5,), sequences=(1, 3), prefill=(48,), threads=(1,), rounds=3, minutes=5,
        steps=6, learn_tokens=1024, ubatch=64, out=tmp_path / "out.json",
    )  # fmt: skip


def test_a_report_is_whole(settings: Settings) -> None:
    report = residency.run(settings)
    assert settings.out is not None
    assert Report.model_validate_json(settings.out.read_text()).model_dump_json() == report.model_dump_json()
    cells = {(row.phase, row.sequences, row.tokens, row.mode) for row in report.rows}
    assert cells == {
        (phase, n, tokens, mode)
        for phase, n, tokens in (("decode", 1, 1), ("decode", 3, 1), ("prefill", 1, 48))
        for mode in ("static", "off")
    }
    assert {row.plan for row in report.rows} >= {"planner", "split"}
    assert all(row.backend == "rpc" and row.resident <= row.budget and row.rounds == 3 for row in report.rows)
    assert all(row.layers["cold"] == 2 for row in report.rows if row.mode == "off"), "1 of 3 layers fits half of them"
    assert [price.sequences for price in report.prices] == [1, 3]
    assert all(price.probed_layers == SHAPE.n_layer for price in report.prices)
    assert report.head["model"]["routing"] == "local"
    assert {one.sequences for one in report.measurements} == {1, 3}


def test_counted_hits_are_those_that_the_trace_foretells(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """One round, so that the trace and the counters are of the same tokens."""
    seen: list[tuple[Judge, Mapping[Arm, Timed], Trace]] = []
    judged = Judge.rows

    def watch(judge: Judge, *given: Any) -> Iterator[Row]:
        seen.append((judge, given[2], given[3]))
        return judged(judge, *given)

    monkeypatch.setattr(Judge, "rows", watch)
    residency.run(replace(settings, rounds=1, sequences=(2,), prefill=(), budgets=(0.5, 0.8)))
    assert len(seen) == 2
    for judge, times, trace in seen:
        with_slots = {arm: timed for arm, timed in times.items() if arm.place.slots}
        assert with_slots
        for arm, timed in with_slots.items():
            assert timed.hits + timed.misses == trace.sum()
            slots = enumerate(arm.place.slots or ())
            foretold = sum(int(trace[:, layer, judge.order[layer][:n]].sum()) for layer, n in slots)
            assert timed.hits == pytest.approx(foretold, abs=0.01 * trace.sum()), "but for rows that round otherwise"


def test_a_model_is_described(model: Path, child_device: str) -> None:
    found = json.loads(
        json.dumps(check_model.run(model, device=child_device, n_tokens=96, n_learn=256, seed=1).as_json())
    )
    assert (found["routing"], found["layers"], found["tokens"]) == ("local", 3, 96)
    assert found["measured"].keys() > found["published"].keys() == found["difference"].keys()
    measured = found["measured"]
    assert 4 / 32 < measured["repeat next"] < measured["repeat within 8"] < 1
    assert measured["static 25%"] < measured["static 50%"] < measured["static 75%"]
    assert measured["recent 40%"] > measured["static 40%"]


def test_a_model_without_experts_is_refused(settings: Settings, tmp_path: Path) -> None:
    dense = minigguf.write_dense(tmp_path / "dense.gguf")
    with pytest.raises(HotsetError, match="without experts"):
        residency.run(replace(settings, model=dense))
    with pytest.raises(HotsetError, match="without experts"):
        check_model.run(dense, device=settings.device, n_tokens=64, n_learn=64, seed=1)


def test_a_worker_that_cannot_load_says_why(tmp_path: Path) -> None:
    with Child("ours", tmp_path) as child, pytest.raises(WorkerFailed, match="cannot be loaded") as failed:
        child.ask("hello", device="cpu")
    assert not failed.value.ended


def test_a_worker_that_ended_shows_its_last_words(tmp_path: Path) -> None:
    with Child("ours", tmp_path) as child, pytest.raises(WorkerFailed, match="AttributeError") as failed:
        child.ask("nonsense")
    assert failed.value.ended


def test_other_models_have_random_tokens(settings: Settings) -> None:
    settings = replace(settings, model=EMBEDDED_MODEL, sequences=(1,), prefill=(), rounds=1)
    assert residency.run(settings).head["model"]["routing"] == "random ids"
