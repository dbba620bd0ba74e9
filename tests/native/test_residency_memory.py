"""What residency takes and where: compute buffers that never grow, the kind of host memory, microseconds per side."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from daemon.native.hotset import Memory, Mode, Residency, State
from tests.minigguf import write_moe
from tests.native.test_residency import N_EXPERT, N_LAYER, SIZES, every
from tests.residency_bench import ROOT, Bench, Logits, fill, open_bench

UBATCH = 64
WIDTHS = (1, 9, 31, UBATCH - 1, UBATCH)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts that are large beside the vocabulary, so that they decide how large the compute buffers must be."""
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    return write_moe(path, experts="F16", layers="F16", vocab="F16", **SIZES | {"n_ff": 1024})


@pytest.fixture(scope="module")
def bench(rpc_device: str, model_file: Path) -> Iterator[Bench]:
    with open_bench(rpc_device, model_file) as made:
        yield made


def step(bench: Bench, width: int, n_seqs: int = 1) -> Logits:
    bench.clear()
    return bench.logits([((7 * i + width) % 500, i // n_seqs, i % n_seqs) for i in range(width)])


def every_width(bench: Bench) -> None:
    for width in WIDTHS:
        step(bench, width, n_seqs=1 + 7 * (width > 8))


def test_no_compute_buffer_grows_after_the_start(bench: Bench) -> None:
    """Whatever becomes of layers that have no slot at the start, in steps of every width."""
    with Residency(bench.context.pointer) as hs:
        reserved = hs.statistics().compute_bytes
        assert reserved > 0
        every_width(bench)
        for slots in ([8] * N_LAYER, [N_EXPERT] * N_LAYER, [N_EXPERT, 8, 0, 2]):
            hs.resize(slots)
            every_width(bench)
            fill(hs, {i: list(range(n)) for i, n in enumerate(slots)})
            assert [layer.mode is Mode.FULL for layer in hs.layers()] == [n == N_EXPERT for n in slots]
            every_width(bench)
        for state in (State.COUNT, State.OFF, State.ON):
            hs.set_state(state)
            every_width(bench)
        assert (hs.statistics().compute_bytes, hs.statistics().compute_growths) == (reserved, 0)


@pytest.mark.parametrize(("load", "memory"), [("none", Memory.PAGEABLE), ("mmap", Memory.MAPPED)])
def test_each_kind_of_host_memory_is_told_and_works(
    rpc_device: str, model_file: Path, load: str, memory: Memory
) -> None:
    with open_bench(rpc_device, model_file, load=load) as bench:
        stock = step(bench, 12)
        with Residency(bench.context.pointer, [N_EXPERT] * N_LAYER) as hs:
            assert {layer.memory for layer in hs.layers()} == {memory}
            fill(hs, every(N_EXPERT))
            np.testing.assert_array_equal(step(bench, 12), stock)


def test_the_wall_time_of_steps_is_split_between_the_sides(bench: Bench) -> None:
    with Residency(bench.context.pointer, [8] * N_LAYER) as hs:
        fill(hs, every(8))
        before, start = hs.statistics(), time.perf_counter()
        for _ in range(20):
            step(bench, 8)
        wall_us = (time.perf_counter() - start) * 1e6
        after = hs.statistics()
        cpu_us, device_us = after.cpu_us - before.cpu_us, after.device_us - before.device_us
        assert cpu_us > 0
        assert device_us > 0
        assert cpu_us + device_us <= wall_us
        assert cpu_us + device_us > wall_us / 4, "the rest is spent in Python between the steps"

        hs.set_state(State.COUNT)
        step(bench, 8)
        assert hs.statistics().cpu_us == after.cpu_us, "upstream's path counts as the devices'"
        assert hs.statistics().device_us > after.device_us


@pytest.mark.parametrize(("what", "n_slots"), [("take", N_EXPERT), ("give", 4)])
def test_a_step_does_not_wait_for_the_memory_of_slots(
    lavapipe: dict[str, str], tmp_path: Path, what: str, n_slots: int
) -> None:
    """The driver holds it back until the steps are over: whoever waited for it would wait for ever."""
    command = [sys.executable, "-m", "tests.native.held_memory", str(tmp_path), what]
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | lavapipe, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout.splitlines()[-1]) == n_slots
