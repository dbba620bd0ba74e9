"""The residency benchmark without a library: intervals, prices, budgets, which arms race, rows, what is kept open."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from daemon.errors import HotsetError
from daemon.hotset.planner import Kind, Plan
from hotset_tools.bench import cost, tables, worker
from hotset_tools.bench.arms import Arm, Cell, Settings, Timed, arms, budget_bytes, fitting_splits, keep
from hotset_tools.bench.cost import Prices, Probes, predict, prices
from hotset_tools.bench.intervals import estimate, paired_ratio
from hotset_tools.bench.judge import Judge, measurements
from hotset_tools.bench.rows import Prices as PriceRow
from hotset_tools.bench.rows import Report, Row
from hotset_tools.bench.shelf import Place, Sizes
from hotset_tools.output import write

N_LAYERS, N_EXPERT, EXPERT = 4, 8, 1 << 30
SIZES = Sizes(
    path="m.gguf", load_mode="none", n_ctx=512, max_sequences=8, ubatch=512,
    layer_bytes=(N_EXPERT * EXPERT,) * N_LAYERS, expert_bytes=(EXPERT,) * N_LAYERS, other_bytes=EXPERT,
    context_bytes=EXPERT,
)  # fmt: skip
SETTINGS = Settings(Path("m.gguf"), "Vulkan0", threads=(8, 16), sequences=(1,), prefill=(512,))
DECODE, PREFILL = SETTINGS.cells
SLOTS = (3,) * N_LAYERS
RESIDENT = Plan(Kind.RESIDENCY, SLOTS, 0, 1.0)
SPLIT = Plan(Kind.SPLIT, (0, 0, 8, 8), 0, 1.0)


class TestIntervals:
    def test_the_median_lies_in_its_interval(self) -> None:
        found = estimate([1.0, 2, 3, 4, 5, 6, 100])
        assert found.median == 4
        assert 1 <= found.low < 4 < found.high <= 100
        assert found == estimate([1.0, 2, 3, 4, 5, 6, 100])

    def test_ratios_are_paired(self) -> None:
        """The machine is ten times slower in one round, for both."""
        found = paired_ratio([1.0, 1, 10, 1], [2.0, 2, 20, 2])
        assert (found.low, found.median, found.high) == (2, 2, 2)

    def test_nothing_is_no_estimate(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            estimate([])


class TestPrices:
    """A machine that follows the model exactly gives its prices back."""

    @pytest.mark.parametrize("n_probed", [N_LAYERS, 2])
    @pytest.mark.parametrize("cpu_bandwidth", [30e9, 1e12])
    def test_they_come_back(self, n_probed: int, cpu_bandwidth: float) -> None:
        true = Prices(fixed=80e-6, partial=130e-6, cold=90e-6, gpu_bandwidth=2e12, cpu_bandwidth=cpu_bandwidth)
        picked, missed = 24e6, 0.1e6
        device, cpu = picked / true.gpu_bandwidth, picked / true.cpu_bandwidth
        others = (N_LAYERS - n_probed) * (true.fixed + true.cold + cpu)
        layer = {
            "cold": true.fixed + true.cold + cpu,
            "full": true.fixed + device,
            "nearly": true.fixed + true.partial + max(device, missed / true.cpu_bandwidth),
            "empty": true.fixed + true.partial + cpu,
        }
        seconds = {name: others + n_probed * value for name, value in layer.items()}
        found = prices(Probes(N_LAYERS, n_probed, **seconds, picked=picked, missed=missed), true.gpu_bandwidth)
        assert found.partial == pytest.approx(true.partial, rel=0.02)
        assert found.fixed == pytest.approx(true.fixed, rel=0.02)
        assert found.cold == pytest.approx(true.cold, rel=0.02)
        assert found.cpu_bandwidth == pytest.approx(true.cpu_bandwidth, rel=0.02)

    def test_what_cannot_be_measured_is_no_negative_price(self) -> None:
        found = prices(Probes(4, 4, cold=1.0, full=2.0, nearly=1.5, empty=1.4, picked=1e6, missed=0.0), float("inf"))
        assert (found.fixed, found.partial, found.cold) == (0.5, 0.0, 0.0)

    def test_bandwidth_below_the_noise_is_infinite(self) -> None:
        assert cost.bandwidth(1e6, -1.0) == float("inf")
        assert cost.bandwidth(1e6, 0.5) == 2e6

    def test_a_prediction_by_hand(self) -> None:
        """One step; layer 0 picks experts 0 and 1 of which 0 is resident, layer 1 is full."""
        trace = np.array([[[2, 1, 0], [0, 1, 1]]], np.uint8)
        resident = np.array([[True, False, False], [True, True, True]])
        price = Prices(fixed=1.0, partial=10.0, cold=99.0, gpu_bandwidth=100.0, cpu_bandwidth=10.0)
        found = predict(trace, resident, np.array([True, False]), [100, 200], price)
        assert found.limit == max(1.0, 10.0) + 4.0
        assert found.model == found.limit + 2 * 1.0 + 10.0
        assert cost.hit_rate(trace, resident) == pytest.approx((2 + 2) / 5)
        assert cost.picked_bytes(trace, [100, 200]) == 300


class TestArms:
    def test_splits_that_fit(self) -> None:
        assert list(fitting_splits(0.5, SIZES)) == [2, 3, 4]
        assert list(fitting_splits(0.49, SIZES)) == [3, 4]
        assert next(iter(fitting_splits(1.0, SIZES))) == 0
        assert budget_bytes(0.5, SIZES) == 16 * EXPERT

    def test_every_library_and_thread_count_competes(self, tmp_path: Path) -> None:
        (tmp_path / "libllama.so").touch()
        settings = replace(SETTINGS, peer=tmp_path, split_step=1)
        found = list(arms(0.5, {"planner": RESIDENT, "all partial": RESIDENT}, SIZES, settings))
        assert len(found) == 2 * (2 + 3 + 3)
        assert {(arm.role, arm.place.n_cpu) for arm in found if arm.role != "ours"} == {
            (role, n) for role in ("same", "stock") for n in (2, 3, 4)
        }
        assert {arm.place for arm in found if arm.role == "ours"} == {Place("ours", N_LAYERS, SLOTS)}

    @pytest.mark.parametrize(("step", "splits"), [(0, {1}), (1, {1, 2, 3, 4}), (2, {1, 3}), (9, {1})])
    def test_fewer_splits_may_compete(self, step: int, splits: set[int]) -> None:
        found = arms(0.75, {"planner": RESIDENT}, SIZES, replace(SETTINGS, split_step=step))
        assert {arm.place.n_cpu for arm in found if arm.role == "same"} == splits

    def test_a_plan_without_slots_runs_upstream(self) -> None:
        ours, same = (arm for arm in arms(0.5, {"planner": SPLIT}, SIZES, SETTINGS) if arm.threads == 8)
        assert ours.place == same.place == Place("ours", 2)
        assert ours != same

    def test_scouting_keeps_what_is_near_the_best_of_its_kind(self) -> None:
        ours = [Arm("ours", Place("ours", 4, SLOTS), threads, "planner") for threads in (8, 12, 16)]
        even = Arm("ours", Place("ours", 4, SLOTS), 8, "all partial")
        same = [Arm("same", Place("ours", n), 8) for n in (2, 3, 4)]
        speeds = dict(zip([*ours, even, *same], [1.0, 1.01, 1.2, 3.0, 2.0, 2.1, 2.5], strict=True))
        assert keep(speeds, 1.08) == [*ours[:2], even, *same[:2]]


def timed(*seconds: float, hits: int = 0, misses: int = 0) -> Timed:
    return Timed(list(seconds), hits, misses)


JUDGE = Judge(SIZES, [list(range(N_EXPERT))] * N_LAYERS, "vulkan", 1, "abc")
OURS = Arm("ours", Place("ours", 4, SLOTS), 8, "planner")
SAME = [Arm("same", Place("ours", 2), threads) for threads in (8, 16)]
STOCK = Arm("stock", Place("peer", 2), 16)
COSTS = {threads: Prices(0.0, 0.5, 0.0, float("inf"), 4.0 * EXPERT) for threads in (8, 16)}
TRACE = np.zeros((2, N_LAYERS, N_EXPERT), np.uint8)
TRACE[:, :, [0, 5]] = 1


class TestRows:
    def test_a_decode_row(self) -> None:
        times = {OURS: timed(2, 2, 4, hits=30, misses=10), SAME[0]: timed(9, 9, 9), SAME[1]: timed(3, 3, 6),
                 STOCK: timed(4, 4, 8)}  # fmt: skip
        ours, off = JUDGE.rows(0.5, DECODE, times, TRACE, COSTS)
        assert (ours.mode, ours.plan, off.mode, off.plan) == ("static", "planner", "off", "split")
        assert (ours.ratio_vs_best_static, ours.ci) == (2.0, (2.0, 2.0))
        assert (ours.ratio_vs_same_scheduler, off.ratio_vs_same_scheduler) == (1.5, 1.0)
        assert off.ratio_vs_best_static == pytest.approx(4 / 3)
        assert (ours.best_static.library, ours.best_static.threads) == ("stock", 16)
        assert (ours.same_scheduler.threads, ours.same_scheduler.cpu_moe_layers) == (16, 2)
        assert (ours.hit_rate, off.hit_rate) == (0.75, 0.5)
        assert ours.resident == (3 + 1) / N_EXPERT
        assert ours.layers == {"full": 0, "partial": 4, "cold": 0}
        assert off.layers == {"full": 2, "partial": 0, "cold": 2}
        # Each layer misses one expert: 1/4 s, and pays 0.5 s for its two chains.
        assert ours.measured_over_model == pytest.approx(4 * 0.75 / 2)
        assert ours.measured_over_limit == pytest.approx(4 * 0.25 / 2)
        assert ours.tokens_per_second == 0.5
        assert "against best static 2.00 (2.00-2.00)" in ours.line

    def test_of_several_numbers_of_threads_the_fastest_counts_on_every_side(self) -> None:
        slower = replace(OURS, threads=16)
        costs = {8: COSTS[8], 16: COSTS[8]}
        times = {OURS: timed(2, 2), slower: timed(3, 3), SAME[0]: timed(9, 9), SAME[1]: timed(6, 6)}
        ours, off = JUDGE.rows(0.5, DECODE, times, TRACE, costs)
        assert (ours.threads, ours.ratio_vs_best_static, off.threads) == (8, 3.0, 16)

    def test_a_prefill_row_has_no_hits_and_no_model(self) -> None:
        times = {OURS: timed(2, 2, 2, misses=5), SAME[0]: timed(3, 3, 3)}
        ours, off = JUDGE.rows(0.5, PREFILL, times, None, COSTS)
        assert (ours.hit_rate, ours.measured_over_model, ours.measured_over_limit) == (None, None, None)
        assert (ours.tokens, ours.tokens_per_second) == (512, 256)
        assert ours.best_static.library == off.best_static.library == "this build, feature off"

    def test_rows_survive_json(self) -> None:
        times = {OURS: timed(2, 2, 2), SAME[0]: timed(3, 3, 3)}
        row, _ = JUDGE.rows(0.5, DECODE, times, TRACE, COSTS)
        assert Row.model_validate_json(row.model_dump_json()) == row
        wanted = {"phase", "backend", "mode", "budget", "resident", "sequences", "threads", "hit_rate", "ci", "seed",
                  "commit", "ratio_vs_best_static", "ratio_vs_same_scheduler", "measured_over_model",
                  "measured_over_limit"}  # fmt: skip
        assert wanted <= json.loads(row.model_dump_json()).keys()

    @pytest.mark.parametrize("change", [{"budget": 25}, {"hit_rate": 48.0}, {"mode": "fast"}, {"surprise": 1}])
    def test_what_is_no_row_is_refused(self, change: dict[str, Any]) -> None:
        row, _ = JUDGE.rows(0.5, DECODE, {OURS: timed(2), SAME[0]: timed(3)}, TRACE, COSTS)
        with pytest.raises(ValidationError):
            Row.model_validate(row.model_dump() | change)

    def test_measurements_have_every_arm(self) -> None:
        found = list(measurements(0.5, DECODE, {OURS: timed(2, 3), STOCK: timed(4, 5)}))
        assert [one.seconds for one in found] == [(2.0, 3.0), (4.0, 5.0)]
        assert "stock (split), 2 layers on the CPU, no slots, 16 threads" in found[1].arm


def test_a_worker_answers_line_by_line(tmp_path: Path) -> None:
    replies = (tmp_path / "out").open("w+")
    with replies:
        worker.serve(iter(['{"do": "add", "a": 1, "b": 2}\n']), replies, SimpleNamespace(add=lambda a, b: {"c": a + b}))  # type: ignore[arg-type]
        replies.seek(0)
        assert json.loads(replies.read()) == {"c": 3}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"budgets": (25.0,)}, "budgets are shares from 0 to 1"),
        ({"budgets": ()}, "budgets are missing"),
        ({"sequences": (0,)}, "sequences are 1 to 64"),
        ({"prefill": (8,)}, "prompts are 33"),
        ({"sequences": (), "prefill": ()}, "sequences or prompts are missing"),
        ({"threads": ()}, "threads are 1"),
        ({"load_mode": "fast"}, "load is none, mmap or auto"),
        ({"peer": Path("nowhere")}, "peer has no libllama.so"),
        ({"out": Path("nowhere/out.json"), "budgets": ()}, "budgets are missing; out names no file in a directory"),
        ({"out": Path()}, "out names no file in a directory"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(change: dict[str, Any], fault: str) -> None:
    with pytest.raises(HotsetError, match=fault):
        replace(SETTINGS, **change)


def test_cells() -> None:
    assert [str(cell) for cell in SETTINGS.cells] == ["decode of 1", "prefill of 512"]
    assert Cell("decode", 1, 1) == DECODE


class TestTables:
    HEAD: dict[str, Any] = {  # noqa: RUF012
        "date": "2026-12-01", "stock": "unpatched build", "build": {"ours": {"series": "0123456789ab"}, "peer": {}},
        "hardware": {"cpu": "Some CPU", "cores": 16, "ram": 1 << 37, "driver": "NVIDIA 1.2",
                     "devices": [{"description": "A card"}]},
        "model": {"name": "m.gguf", "architecture": "qwen3moe", "layers": 4, "experts": 8, "top_k": 2,
                  "expert_bytes": 32e9, "other_bytes": 1e9, "routing": "local"},
        "settings": {"device": "Vulkan0", "threads": [8, 16], "rounds": 7, "ubatch": 512, "load": "none", "seed": 1},
    }  # fmt: skip

    @pytest.fixture
    def report(self) -> Report:
        decoded = JUDGE.rows(0.5, DECODE, {OURS: timed(0.1), SAME[1]: timed(0.2)}, TRACE, COSTS)
        read = JUDGE.rows(0.5, PREFILL, {OURS: timed(0.5), SAME[1]: timed(1.0)}, None, COSTS)
        price = PriceRow(
            sequences=1, threads=8, fixed=8e-5, partial=1.2e-4, cold=9e-5, gpu_bandwidth=None, cpu_bandwidth=3e10,
            probed_layers=4, seconds={},
        )  # fmt: skip
        return Report(head=self.HEAD, prices=[price], rows=[*decoded, *read], measurements=[], notes=["too hot"])

    def test_a_report_is_a_section(self, report: Report) -> None:
        text = tables.tables([("a.json", report)])
        assert "### 2026-12-01: A card, local routing (`a.json`)" in text
        assert "Some CPU, 16 cores, 128 GiB; Vulkan0, driver NVIDIA 1.2" in text.replace("\n", " ")
        assert "Library: series 0123456789ab. Stock: unpatched build." in text.replace("\n", " ")
        assert (
            "| 50% | 1 | static, planner (4 partial) | 0.50 | 10.0 (t 8) | 5.0 (n 2, t 16) | 2.00 (2.00-2.00) |" in text
        )
        assert "| 50% | 512 | off (2 full, 2 cold) | 512.0 (t 16) |" in text
        assert "| 1 | 8 | 80 | 120 | 90 | - | 30 |" in text
        assert "- too hot" in text
        columns = {line.count("|") for line in text.splitlines() if line.startswith(("| 50% | 1 |", "| budget | seq"))}
        assert len(columns) == 1

    def test_a_library_without_a_record_of_its_build_has_an_unknown_series(self, report: Report) -> None:
        head = {**self.HEAD, "build": {"ours": {"directory": "lib"}}}
        text = tables.tables([("a.json", report.model_copy(update={"head": head}))])
        assert "Library: series unknown. Stock: unpatched build." in text.replace("\n", " ")

    def test_tables_go_between_the_markers(self, report: Report) -> None:
        page = f"before\n\n{tables.BEGIN}\nold\n{tables.END}\nafter\n"
        once = tables.replace_between(page, "new")
        assert once == f"before\n\n{tables.BEGIN}\n\nnew\n\n{tables.END}\nafter\n"
        assert tables.replace_between(once, "new") == once
        assert tables.replace_between(once, "") == f"before\n\n{tables.BEGIN}\n{tables.END}\nafter\n"

    def test_a_page_without_markers_is_an_error(self) -> None:
        with pytest.raises(HotsetError, match="lacks the lines"):
            tables.replace_between("text", "new")

    def test_a_page_is_changed_wholly_or_not_at_all(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        for content, fault in ((None, "cannot be read: No such file"), (b"\xff", "not UTF-8"), (b"text", "lacks")):
            if content is not None:
                page.write_bytes(content)
            with pytest.raises(HotsetError, match=fault):
                tables.put_into(page, "new")
            assert content is None or page.read_bytes() == content
        page.write_text(f"{tables.BEGIN}\n{tables.END}\n")
        tables.put_into(page, "new")
        assert "new" in page.read_text()
        assert list(tmp_path.iterdir()) == [page]
        with pytest.raises(HotsetError, match="cannot be written: Is a directory"):
            write(tmp_path, "x")

    def test_files_that_are_no_reports_are_errors(self, tmp_path: Path, report: Report) -> None:
        path = tmp_path / "a.json"
        with pytest.raises(HotsetError, match="cannot be read"):
            tables.read(path)
        path.write_text(report.model_dump_json())
        assert tables.read(path).rows == report.rows
        path.write_text('{"rows": []}')
        with pytest.raises(HotsetError, match="no report"):
            tables.read(path)
