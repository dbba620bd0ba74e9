"""Residency that is changed without a pause by a second thread: every row stays right, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from daemon.native.hotset import Residency
from daemon.verify.tolerance import KL_FLOAT
from tests.minigguf import write_moe
from tests.residency_bench import Bench, Logits, fill, in_child, kl, open_bench, rpc_server
from tests.residency_churn import Amount, Churn
from tests.rpc_proxy import other_expert, proxy

GOAL = Amount(stages=100_000, publishes=10_000, resizes=200)
N_EXPERT, N_LAYER = 16, 3
SIZES: dict[str, Any] = {"n_layer": N_LAYER, "n_embd": 64, "n_head": 2, "n_head_kv": 1, "head_size": 32, "n_ff": 32}
SIZES |= {"n_vocab": 512, "n_expert": N_EXPERT, "n_expert_used": 4, "experts": "F32", "layers": "F32", "vocab": "F32"}

MIB = 1 << 20
LEFT_BEHIND = 8 * MIB
"""Bytes that may be held more at the end: 80 for each stage, 800 for each publication, 40 KiB for each resize."""

PLAIN_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""Slabs go back to the system at once.

By itself glibc raises the threshold to the largest block that was freed, and slabs of changing sizes then leave holes
in the heap: with 15 to 28 MiB of slots a server went up and down between 54 and 99 MiB during 1,200 resizes, without a
trend, and gave most of it back with the last slot (with the threshold fixed, 43 to 52 MiB for 24 to 33 MiB). That is no
leak, but it would hide one.
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_moe(tmp_path / "model.gguf", **SIZES)


def steps() -> list[list[tuple[int, int, int]]]:
    """A prompt, single tokens, and steps of 4, 12 and 31: about a hundred rows of one sequence."""
    random, position, out = np.random.default_rng(3), 0, []
    for width in (40, 1, 1, 1, 4, 1, 12, 1, 1, 31, 1, 1):
        tokens = random.integers(0, 500, width)
        out.append([(int(token), position + i, 0) for i, token in enumerate(tokens)])
        position += width
    return out


def walk(bench: Bench) -> Logits:
    bench.clear()
    return np.concatenate([bench.logits(step) for step in steps()])


@pytest.mark.timeout(400)
def test_every_row_is_right_and_nothing_leaks(library_path: Path, model: Path) -> None:
    in_child(check_churn, str(library_path), str(model), **PLAIN_MALLOC)


def check_churn(library: str, path: str) -> None:
    with rpc_server(Path(library), **PLAIN_MALLOC) as server, open_bench(server.device, Path(path)) as bench:
        stock = walk(bench)
        with Residency(bench.context.pointer, [N_EXPERT // 2] * N_LAYER) as hs:
            held = Held(server.process.pid, hs)
            churn = Churn(hs, GOAL)
            churn.start()
            try:
                while churn.is_alive():
                    right(walk(bench), stock)
                    held.note(churn.done.resizes)
            finally:
                churn.stop()
                while churn.is_alive():  # it may wait for a boundary
                    walk(bench)
            assert churn.failure is None, churn.failure
            assert churn.done.reaches(GOAL)
            statistics = hs.statistics()
            assert statistics.staged == churn.done.stages
            assert (statistics.published, statistics.compute_growths) == (churn.done.publishes, 0)
            held.check()
        np.testing.assert_array_equal(walk(bench), stock)


def right(logits: Logits, stock: Logits) -> None:
    assert kl(stock, logits).max() <= KL_FLOAT
    np.testing.assert_array_equal(logits.argmax(1), stock.argmax(1))


class Held:
    """Memory of this process and of the server, without the slots: after a tenth of all resizes, and later."""

    def __init__(self, server: int, hs: Residency) -> None:
        self._processes = psutil.Process(), psutil.Process(server)
        self._hs = hs
        self._first: tuple[int, int] | None = None

    def note(self, n_resizes: int) -> None:
        if self._first is None and n_resizes > GOAL.resizes / 10:
            self._first = self._now()

    def check(self) -> None:
        assert self._first is not None
        more = [now - first for now, first in zip(self._now(), self._first, strict=True)]
        assert max(more) <= LEFT_BEHIND, f"{more} bytes more in this process and in the server"

    def _now(self) -> tuple[int, int]:
        process, server = (int(process.memory_full_info().uss) for process in self._processes)
        return process, server - self._hs.statistics().device_bytes


def test_one_wrong_matrix_would_be_seen(library_path: Path, model: Path) -> None:
    """An expert's matrix that is another's, behind a proxy, in a layer whose other experts are right."""
    in_child(check_wrong_matrix, str(library_path), str(model))


def check_wrong_matrix(library: str, path: str) -> None:
    with (
        rpc_server(Path(library)) as server,
        proxy(server.port, other_expert(4)) as device,
        open_bench(f"rpc:127.0.0.1:{device.port}", Path(path)) as bench,
    ):
        stock = walk(bench)
        with Residency(bench.context.pointer, [N_EXPERT // 2] * N_LAYER) as hs:
            fill(hs, {1: list(range(N_EXPERT // 2))})
            assert device.n_uploads > 4
            assert kl(stock, walk(bench)).max() > 1000 * KL_FLOAT
