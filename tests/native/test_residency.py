"""Experts in slots of a device give the numbers that upstream gives; the device is a CPU behind the RPC backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.native.context import DECODED
from daemon.native.hotset import Mode, Reason, Residency, ResidencyError, State, Status
from daemon.native.library import backend
from tests.miniarch.ggml_tensor import base_library
from tests.miniarch.watch import Watch, by_layer
from tests.minigguf import write_moe
from tests.residency_bench import Bench, Logits, changed_params, fill, kl, open_bench
from tests.residency_churn import Amount, Churn

SIZES: dict[str, Any] = {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "head_size": 64, "n_vocab": 512}
SIZES |= {"n_expert": 16, "n_expert_used": 4, "n_ff": 256}
N_EXPERT, N_USED, N_LAYER = 16, 4, 4


@pytest.fixture(scope="module", params=["F32", "F16", "Q8_0", "Q4_K"])
def model_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    return request.param, write_moe(path, experts=request.param, layers="F32", vocab="F32", **SIZES)


@pytest.fixture(scope="module")
def bench(rpc_device: str, model_file: tuple[str, Path]) -> Iterator[Bench]:
    with open_bench(rpc_device, model_file[1]) as made:
        yield made


def walk(bench: Bench, between: Callable[[int], None] = lambda _: None) -> Logits:
    """Prefill, single tokens, four and eight sequences, steps of 12 and 31 tokens: every logit row."""
    bench.clear()
    rows = [bench.logits([(7 * i % 500, i, 0) for i in range(40)])]
    for i in range(12):
        between(i)
        rows.append(bench.logits([(11 * i % 500, 40 + i, 0)]))
    for i in range(4):
        between(12 + i)
        rows.append(bench.logits([((13 * i + s) % 500, i, s) for s in range(1, 5)]))
        rows.append(bench.logits([((5 * i + s) % 500, i + 52 * (s == 0), s) for s in (0, 5, 6)]))
    rows.append(bench.logits([(17 * i % 500, i, 7) for i in range(12)]))
    rows.append(bench.logits([(19 * i % 500, 12 + i, 7) for i in range(31)]))
    return np.concatenate(rows)


def every(n: int, offset: int = 0) -> dict[int, list[int]]:
    """`n` experts of each layer, spread out."""
    return {i: sorted((offset + i + e * (N_EXPERT // n)) % N_EXPERT for e in range(n)) for i in range(N_LAYER)}


def near(kind: str, logits: Logits, stock: Logits) -> None:
    """F32 experts agree; others do but for noise, and for few rows that the router sends elsewhere because of it."""
    divergence = kl(stock, logits)
    if kind == "F32":
        assert divergence.max() <= 1e-8
    else:
        assert (divergence > 1e-4).mean() <= 0.01


def test_the_layers_are_found_and_described(bench: Bench) -> None:
    with Residency(bench.context.pointer, [8] * N_LAYER) as hs:
        layers = hs.layers()
        assert [layer.il for layer in layers] == list(range(N_LAYER))
        for layer in layers:
            assert (layer.n_expert, layer.n_expert_used, layer.n_slots) == (N_EXPERT, N_USED, 8)
            assert (layer.mode, layer.reason) == (Mode.PARTIAL, Reason.MANAGED)
            assert layer.device_bytes >= 9 * layer.expert_bytes
            assert hs.resident(layer.index) == [-1] * 8


def test_nothing_resident_is_bit_identical_to_stock(bench: Bench) -> None:
    stock = walk(bench)
    with Residency(bench.context.pointer, [4] * N_LAYER):
        np.testing.assert_array_equal(walk(bench), stock)
    with Residency(bench.context.pointer):
        np.testing.assert_array_equal(walk(bench), stock)


def test_everything_resident_is_bit_identical_to_stock(bench: Bench) -> None:
    stock = walk(bench)
    with Residency(bench.context.pointer, [N_EXPERT] * N_LAYER) as hs:
        fill(hs, every(N_EXPERT))
        assert {layer.mode for layer in hs.layers()} == {Mode.FULL}
        np.testing.assert_array_equal(walk(bench), stock)


def test_two_threads_share_the_cpus_chain(rpc_device: str, tmp_path: Path) -> None:
    """Its rows and its sums; all other tests have one thread."""
    path = write_moe(tmp_path / "model.gguf", experts="F32", layers="F32", vocab="F32", **SIZES)
    with open_bench(rpc_device, path, threads=2) as bench:
        stock = walk(bench)
        with Residency(bench.context.pointer, [8] * N_LAYER) as hs:
            fill(hs, every(8))
            near("F32", walk(bench), stock)


def test_any_residency_agrees_with_stock(bench: Bench, model_file: tuple[str, Path]) -> None:
    stock = walk(bench)
    with Residency(bench.context.pointer, [8] * N_LAYER) as hs:
        for n in (2, 4, 8):
            fill(hs, every(n))
            near(model_file[0], walk(bench), stock)
        layers = hs.layers()
        assert all(layer.hits > 0 and layer.misses > 0 for layer in layers)


def test_residency_that_changes_between_tokens_agrees_with_stock(bench: Bench, model_file: tuple[str, Path]) -> None:
    stock = walk(bench)
    with Residency(bench.context.pointer, [8, 4, 0, N_EXPERT]) as hs:

        def change(i: int) -> None:
            if i % 5 == 4:
                hs.resize([(8, 3)[i // 5 % 2], 4, (2, 0)[i // 5 % 2], N_EXPERT])
            for index, layer in enumerate(hs.layers()):
                n = min(layer.n_slots, N_EXPERT if i % 3 == 0 else 8)
                fill(hs, {index: [(i + e) % N_EXPERT for e in range(n)]})

        near(model_file[0], walk(bench, change), stock)
        assert hs.statistics().resizes == 4


def test_counts_equal_a_recount_of_the_routers_ids(rpc_device: str, model_file: tuple[str, Path]) -> None:
    """In full, partial and cold layers alike, in steps of every width, and where residency only counts or is off."""
    watch = Watch()
    with (
        changed_params(cb_eval=watch.callback),
        open_bench(rpc_device, model_file[1]) as bench,
        Residency(bench.context.pointer, [N_EXPERT, 8, 0, 2]) as hs,
    ):
        fill(hs, {0: list(range(N_EXPERT)), 1: [1, 3, 5], 3: [0, 9]})
        counted = np.zeros((N_LAYER, N_EXPERT), np.uint64)
        hits = np.zeros(N_LAYER, np.uint64)
        for state in (State.ON, State.COUNT, State.OFF, State.ON):
            hs.set_state(state)
            watch.take()
            walk(bench)
            chosen = by_layer(watch.take(), hs.layers())
            if state != State.OFF:
                counted += np.stack([np.bincount(ids.flat, minlength=N_EXPERT) for ids in chosen]).astype(np.uint64)
            np.testing.assert_array_equal([hs.counts(index) for index in range(N_LAYER)], counted)
            n_selected = hs.statistics().tokens * N_USED
            assert [layer.hits + layer.misses for layer in hs.layers()] == [n_selected] * N_LAYER
            more, hits = [layer.hits for layer in hs.layers()] - hits, np.array([layer.hits for layer in hs.layers()])
            assert [bool(n) for n in more] == ([True, True, False, True] if state == State.ON else [False] * N_LAYER)


def test_switched_off_the_nodes_are_those_of_stock(rpc_device: str, model_file: tuple[str, Path]) -> None:
    nodes = Nodes()
    with changed_params(cb_eval=nodes.callback), open_bench(rpc_device, model_file[1]) as bench:

        def seen(*steps: int) -> list[str]:
            bench.clear()
            nodes.names.clear()
            for width in steps:
                bench.logits([(i, i, 0) for i in range(width)])
                bench.clear()
            return nodes.names.copy()

        stock = seen(1, 4, 40)
        with Residency(bench.context.pointer, [8] * N_LAYER) as hs:
            assert seen(1, 4, 40) != stock
            hs.set_state(State.OFF)
            assert seen(1, 4, 40) == stock
        assert seen(1, 4, 40) == stock


class Nodes:
    """The names of all nodes in the order in which they are computed; unnamed ones have their number."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.base = base_library()
        self.callback = backend().ggml_backend_sched_eval_callback(self.see)

    def see(self, tensor: Any, ask: bool, _data: Any) -> bool:
        if ask:
            self.names.append(self.base.ggml_get_name(tensor).decode())
        return not ask


def test_experts_are_staged_and_published_by_another_thread_while_decoding(
    bench: Bench, model_file: tuple[str, Path]
) -> None:
    stock = walk(bench)
    with Residency(bench.context.pointer, [6] * N_LAYER) as hs:
        churn = Churn(hs, Amount(stages=400, publishes=60, resizes=6), publishes_per_resize=10)
        churn.start()
        while churn.is_alive():
            near(model_file[0], walk(bench), stock)
        assert churn.failure is None, churn.failure
        assert hs.statistics().published >= 60
    np.testing.assert_array_equal(walk(bench), stock)


def test_refusals_are_codes_with_a_reason_and_change_nothing(bench: Bench) -> None:
    with Residency(bench.context.pointer, [2] * N_LAYER) as hs:
        hs.stage(0, 5, 1)
        refused(Status.NOT_STAGED, lambda: hs.publish([(0, 1, 6)]))
        refused(Status.NOT_STAGED, lambda: hs.publish([(0, 1, 5), (0, 0, 7)]))
        assert hs.resident(0) == [-1, -1]
        hs.publish([(0, 1, 5)])
        assert hs.resident(0) == [-1, 5]
        refused(Status.SLOT_IN_USE, lambda: hs.stage(0, 6, 1))
        hs.stage(0, 5, 0)
        refused(Status.RESIDENT, lambda: hs.publish([(0, 0, 5)]))
        refused(Status.INVALID, lambda: hs.stage(0, N_EXPERT, 0))
        refused(Status.INVALID, lambda: hs.stage(N_LAYER, 0, 0))
        refused(Status.INVALID, lambda: hs.publish([(9, 0, 0)]))
        refused(Status.INVALID, lambda: hs.resize([1]))
        refused(Status.INVALID, lambda: hs.resize([N_EXPERT + 1, 0, 0, 0]))
        refused(Status.INVALID, lambda: Residency(bench.context.pointer))
        assert hs.resident(0) == [-1, 5]


def test_memory_that_is_not_there_leaves_the_slots_as_they_were(bench: Bench) -> None:
    with Residency(bench.context.pointer, [2] * N_LAYER) as hs:
        used = hs.statistics().device_bytes
    limit = used + 4096
    refused(Status.NO_MEMORY, lambda: Residency(bench.context.pointer, [8] * N_LAYER, max_bytes=limit))
    with Residency(bench.context.pointer, [2] * N_LAYER, max_bytes=limit) as hs:
        fill(hs, {0: [3, 4]})
        refused(Status.NO_MEMORY, lambda: hs.resize([8] * N_LAYER))
        assert [layer.n_slots for layer in hs.layers()] == [2] * N_LAYER
        assert hs.resident(0) == [3, 4]
        assert hs.statistics().device_bytes == used


def test_resizing_keeps_the_experts_that_fit(bench: Bench) -> None:
    with Residency(bench.context.pointer, [4] * N_LAYER) as hs:
        fill(hs, {0: [3, 4, 5, 6]})
        hs.publish([(0, 0, -1)])
        hs.resize([2, -1, -1, -1])
        assert hs.resident(0) == [5, 4]
        hs.resize([6, -1, -1, -1])
        assert hs.resident(0) == [5, 4, -1, -1, -1, -1]
        hs.resize([0, -1, -1, -1])
        assert (hs.layer(0).mode, hs.layer(0).n_resident) == (Mode.COLD, 0)


def test_switched_off_it_computes_what_stock_does_and_keeps_its_experts(bench: Bench) -> None:
    stock = walk(bench)
    with Residency(bench.context.pointer, [8] * N_LAYER) as hs:
        fill(hs, every(8))
        for state, counting in ((State.OFF, False), (State.COUNT, True)):
            hs.set_state(state)
            tokens = hs.statistics().tokens
            np.testing.assert_array_equal(walk(bench), stock)
            assert (hs.statistics().tokens > tokens) is counting
        hs.set_state(State.ON)
        walk(bench)
        assert hs.layer(0).hits > 0
    np.testing.assert_array_equal(walk(bench), stock)


def test_a_request_is_served_although_nobody_asks_for_outputs(bench: Bench) -> None:
    """A prompt that is read in many steps has no outputs until its end."""
    bench.clear()
    with Residency(bench.context.pointer, [2] * N_LAYER) as hs:
        assert bench.context.decode([(1, 0, 0, False)]) == DECODED
        hs.stage(0, 7, 1)
        hs.publish([(0, 1, 7)], wait=False)
        assert hs.resident(0) == [-1, -1]
        assert bench.context.decode([(2, 1, 0, False)]) == DECODED
        assert hs.resident(0) == [-1, 7]


def refused(status: Status, call: Callable[[], object]) -> str:
    """The message of the refusal that `call` must bring."""
    with pytest.raises(ResidencyError) as caught:
        call()
    assert caught.value.refusal == status
    assert caught.value.message
    return caught.value.message
