"""Vulkan's own kernels and queues: slots agree with stock as far as stock's two placements agree with each other.

Prompts of 32 tokens and more, steps of up to 31, and experts that are staged while tokens are computed need more than
a CPU behind the RPC backend can show. All in one process, since compiling shaders takes most of the time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.native.hotset import Mode, Residency, State
from daemon.verify.compare import Mask, distance, flipped
from daemon.verify.script import DECODE, PREFILL, SEQUENCES, STEPS, Row, Step
from daemon.verify.tolerance import Rule, Standard, Tolerance
from daemon.verify.walk import Recording, walk
from tests.miniarch.table import MINIS, all_of
from tests.miniarch.writer import write_minis
from tests.residency_bench import Bench, fill, in_child, open_bench
from tests.residency_churn import Churn

MODELS = {
    "qwen3moe-Q4_K": ("qwen3moe", "Q4_K"),
    "gpt-oss-MXFP4": ("gpt-oss", "MXFP4"),
    "deepseek2-Q8_0": ("deepseek2", "Q8_0"),
    "qwen3next-Q4_K": ("qwen3next", "Q4_K"),
    "qwen3next-F32": ("qwen3next", "F32"),
}
ROUNDING = 1e-5
"""Largest divergence with experts that nobody rounds, wherever they are: a wrong one makes thousands of times more."""
CASES = ("empty", "half", "staging", "full")
N_SEQUENCES = 6

Found = dict[tuple[str, str], dict[str, Any]]
"""What the child printed, by model and case."""


@pytest.fixture(scope="module")
def found(lavapipe: dict[str, str], library_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    wanted = {name: replace(MINIS[mini], quants=all_of(kind)) for name, (mini, kind) in MODELS.items()}
    paths = write_minis(tmp_path_factory.mktemp("minis"), wanted, library_path)
    output = in_child(compare_all, *map(str, paths.values()), **lavapipe)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {(line["model"], line["case"]): line for line in lines}


@pytest.mark.timeout(600)  # the first test waits for the child, which may have to compile all shaders
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_slots_agree_as_stocks_placements_do(
    model: str, case: str, found: Found, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = found[model, case]
    with capsys.disabled():
        print(f"\n{model} {case}: KL {seen['kl']:.2g}, stock's own {seen['kl_stock']:.2g}, flips {seen['flips']:.1%}")
    assert seen["problem"] is None
    assert seen["flips"] <= (0.0 if model.endswith("F32") else 0.1)
    assert seen["prompt_is_identical"]
    assert seen["kl_stock"] > 0
    assert (seen["hits"] > 0, seen["misses"] > 0) == (case != "empty", case != "full")
    assert seen["hits"] + seen["misses"] == seen["selections"]
    assert (seen["staged"] > 0) == (case == "staging")


def compare_all(*paths: str) -> None:
    """In the child: a line for each case of each model."""
    for path in map(Path, paths):
        for case in compare(path):
            print(json.dumps({"model": path.stem} | case), flush=True)


def compare(path: Path) -> Iterator[dict[str, Any]]:
    """One model: stock with its experts on the device and in memory, then slots."""
    with open_model(path, cpu_moe_layers=0) as bench:
        device = walk(bench.context, script())
    with open_model(path) as bench, Residency(bench.context.pointer) as hs:
        hs.resize([layer.n_expert for layer in hs.layers()])
        hs.set_state(State.OFF)
        stock = walk(bench.context, script())
        hs.set_state(State.ON)
        own = distance(stock.logits, device.logits, np.zeros(len(stock.logits), np.bool_)).kl_mean
        standard = Standard(frozenset({"quantised"}), rounds_alike=False, kl_stock=own)
        moved = Tolerance(Rule.ALIKE, ROUNDING) if path.stem.endswith("F32") else standard.moved()
        empty = walk(bench.context, script(), hs)

        def judged(case: str, seen: Recording, reference: Recording, tolerance: Tolerance) -> dict[str, Any]:
            flips = flipped(empty.ids, seen.ids, len(seen.logits))
            # What is resident is chance while experts are staged, and so is whether a rounding error sends a row to
            # other experts; that shows in all that its sequence computes afterwards.
            rows = before_flips(flips, seen.steps) if case == "staging" else np.ones(len(flips), np.bool_)
            apart = distance(reference.logits[rows], seen.logits[rows], flips[rows])
            return {
                "case": case,
                "kl": apart.kl_mean,
                "kl_stock": own,
                "flips": float(flips.mean()),
                "problem": tolerance.problem(apart),
                "prompt_is_identical": bool((seen.phase(PREFILL).logits == stock.phase(PREFILL).logits).all()),
                "hits": sum(seen.hits),
                "misses": sum(seen.misses),
                "selections": sum(ids.size for ids in seen.ids),
                "staged": hs.statistics().staged - before.staged,
            }

        before = hs.statistics()
        yield judged("empty", empty, stock, standard.untouched())
        fill(hs, {layer.index: list(range(0, layer.n_expert, 2)) for layer in hs.layers()})
        before = hs.statistics()
        yield judged("half", walk(bench.context, script(), hs), stock, moved)
        yield judged("staging", walk_while_staging(bench, hs), stock, moved)
        hs.resize([layer.n_expert for layer in hs.layers()])
        fill(hs, {layer.index: list(range(layer.n_expert)) for layer in hs.layers()})
        before = hs.statistics()
        assert {layer.mode for layer in hs.layers()} == {Mode.FULL}
        yield judged("full", walk(bench.context, script(), hs), device, standard.unmoved())


def before_flips(flips: Mask, steps: Sequence[Step]) -> Mask:
    """Rows of each sequence up to the first one that was routed otherwise, without it."""
    kept, spoilt = np.ones(len(flips), np.bool_), set[int]()
    for index, (_, _, seq_id) in enumerate(row for step in steps for row in step.rows):
        if flips[index]:
            spoilt.add(seq_id)
        kept[index] = seq_id not in spoilt
    return kept


@contextmanager
def open_model(path: Path, **engine: Any) -> Iterator[Bench]:
    with open_bench("Vulkan0", path, max_sequences=N_SEQUENCES, **engine) as bench:
        yield bench


def script() -> list[Step]:
    """A prompt, single tokens, four sequences together, and steps of 9 and of 31."""
    position = [0] * N_SEQUENCES

    def rows(seq_ids: tuple[int, ...], width: int) -> Iterator[Row]:
        for seq_id in seq_ids:
            for _ in range(width):
                yield (37 * position[seq_id] + 11 * seq_id) % 300, position[seq_id], seq_id
                position[seq_id] += 1

    shapes = [(PREFILL, (0,), 36), (DECODE, (0,), 1), (DECODE, (0,), 1), (SEQUENCES, (1, 2, 3, 4), 1)]
    shapes += [(SEQUENCES, (1, 2, 3, 4), 1), (STEPS, (5,), 9), (STEPS, (5,), 31)]
    return [Step(phase, tuple(rows(seq_ids, width))) for phase, seq_ids, width in shapes]


def walk_while_staging(bench: Bench, hs: Residency) -> Recording:
    """Another thread stages, publishes and resizes all the time."""
    churn = Churn(hs, publishes_per_resize=20)
    churn.start()
    try:
        return walk(bench.context, script(), hs)
    finally:
        churn.stop()
        churn.join()
        assert churn.failure is None, churn.failure
