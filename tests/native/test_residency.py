"""Experts in slots of a device give the numbers that upstream gives; the device is a CPU behind the RPC backend."""

from __future__ import annotations

import ctypes
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from daemon.config import Config
from daemon.model_files import load_command
from daemon.native import devices
from daemon.native.context import DECODED, Context
from daemon.native.hotset import Mode, Reason, Residency, ResidencyError, State, Status
from daemon.native.library import backend
from daemon.native.model import Model
from tests.minigguf import write_moe

Logits = npt.NDArray[np.float32]
SIZES: dict[str, Any] = {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "head_size": 64, "n_vocab": 512}
SIZES |= {"n_expert": 16, "n_expert_used": 4, "n_ff": 256}
N_EXPERT, N_USED, N_LAYER = 16, 4, 4


@pytest.fixture(scope="module")
def server(library_path: Path) -> Iterator[str]:
    """The endpoint of a CPU behind the RPC backend."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [library_path / "ggml-rpc-server", "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(port)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


@pytest.fixture(scope="module", params=["F32", "F16", "Q8_0", "Q4_K"])
def model_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    return request.param, write_moe(path, experts=request.param, layers="F32", vocab="F32", **SIZES)


@dataclass
class Bench:
    """A model whose experts are in memory, in a context that has a device."""

    model: Model
    context: Context

    def logits(self, tokens: list[tuple[int, int, int]]) -> Logits:
        """One step of (token, position, sequence); the logits of every row."""
        assert self.context.decode((*row, True) for row in tokens) == DECODED
        return np.stack([self.context.logits(i).copy() for i in range(len(tokens))])

    def clear(self) -> None:
        for seq_id in range(8):
            self.context.remove(seq_id)


@pytest.fixture(scope="module")
def bench(server: str, model_file: tuple[str, Path]) -> Iterator[Bench]:
    with open_bench(server, model_file[1]) as made:
        yield made


class open_bench(ExitStack):
    def __init__(self, server: str, path: Path, **engine: Any) -> None:
        super().__init__()
        settings = {"device": f"rpc:{server}", "threads": 2, "kv_cells": 512, "max_sequences": 8, "ubatch": 64}
        settings |= {"cache_type_k": "f32", "cache_type_v": "f32"}
        self.spec = load_command(
            Config.model_validate({"model": {"path": str(path)}, "engine": settings | {"repack": False} | engine})
        )

    def __enter__(self) -> Bench:  # type: ignore[override]
        super().__enter__()
        devices.load_backends(self.spec.device)
        model = self.enter_context(Model(self.spec, lambda _: None))
        with changed_params(flash_attn_type=0):
            context = Context(model, self.spec, n_ctx=512, n_threads=2, n_threads_batch=2)
        return Bench(model, self.enter_context(context))


@contextmanager
def changed_params(**changes: Any) -> Iterator[None]:
    """Contexts are made with these parameters.

    Flash attention and an F16 cache are off here: they make a difference of the last bit a thousand times larger, so
    that even stock's own logits differ by KL 1e-7 between a step of 31 tokens and 31 steps.
    """
    lib = backend()
    make = lib.llama_context_default_params

    def params() -> Any:
        made = make()
        for name, value in changes.items():
            setattr(made, name, value)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lib, "llama_context_default_params", params)
        yield


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


def fill(hs: Residency, experts: dict[int, list[int]]) -> None:
    """Make these experts resident, in slots from 0 on."""
    moves = []
    for index in experts:
        moves += [(index, slot, -1) for slot, owner in enumerate(hs.resident(index)) if owner >= 0]
    hs.publish(moves)
    moves = []
    for index, wanted in experts.items():
        for slot, expert in enumerate(wanted):
            hs.stage(index, expert, slot)
            moves.append((index, slot, expert))
    hs.publish(moves)


def kl(reference: Logits, other: Logits) -> npt.NDArray[np.float64]:
    """KL divergence of each row."""
    a, b = (x.astype(np.float64) for x in (reference, other))
    a, b = (x - x.max(1, keepdims=True) for x in (a, b))
    a, b = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (a, b))
    return (np.exp(a) * (a - b)).sum(1)


def every(n: int, offset: int = 0) -> dict[int, list[int]]:
    """`n` experts of each layer, spread out."""
    return {i: sorted((offset + i + e * (N_EXPERT // n)) % N_EXPERT for e in range(n)) for i in range(N_LAYER)}


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


def test_any_residency_agrees_with_stock(bench: Bench, model_file: tuple[str, Path]) -> None:
    stock = walk(bench)
    with Residency(bench.context.pointer, [8] * N_LAYER) as hs:
        for n in (2, 4, 8):
            fill(hs, every(n))
            divergence = kl(stock, walk(bench))
            if model_file[0] == "F32":
                assert divergence.max() <= 1e-8
            else:
                assert (divergence > 1e-4).mean() <= 0.01
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

        divergence = kl(stock, walk(bench, change))
        assert hs.statistics().resizes == 4
    assert (divergence > (1e-8 if model_file[0] == "F32" else 1e-4)).mean() <= (0 if model_file[0] == "F32" else 0.01)


def test_counts_equal_a_recount_of_the_routers_ids(
    server: str, model_file: tuple[str, Path], library_path: Path
) -> None:
    """In full, partial and cold layers alike, and in steps of every width."""
    recorder = Recorder(library_path)
    with (
        changed_params(cb_eval=recorder.callback),
        open_bench(server, model_file[1]) as bench,
        Residency(bench.context.pointer, [N_EXPERT, 8, 0, 2]) as hs,
    ):
        fill(hs, {0: list(range(N_EXPERT)), 1: [1, 3, 5], 3: [0, 9]})
        walk(bench)
        n_tokens = hs.statistics().tokens
        for layer in hs.layers():
            np.testing.assert_array_equal(hs.counts(layer.index), recorder.counts[layer.il])
            assert layer.hits + layer.misses == n_tokens * N_USED
        assert [layer.hits == 0 for layer in hs.layers()] == [False, False, True, False]
        assert hs.layer(0).misses == 0


def test_switched_off_the_nodes_are_those_of_stock(
    server: str, model_file: tuple[str, Path], library_path: Path
) -> None:
    nodes = Nodes(library_path)
    with changed_params(cb_eval=nodes.callback), open_bench(server, model_file[1]) as bench:

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

    def __init__(self, library_path: Path) -> None:
        self.names: list[str] = []
        self.base = ctypes.CDLL(str(library_path / "libggml-base.so"))
        self.base.ggml_get_name.restype, self.base.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self.callback = backend().ggml_backend_sched_eval_callback(self.see)

    def see(self, tensor: Any, ask: bool, _data: Any) -> bool:
        if ask:
            self.names.append(self.base.ggml_get_name(tensor).decode())
        return not ask


class Recorder:
    """Counts what the router's nodes select, by llama.cpp's callback for every node."""

    def __init__(self, library_path: Path) -> None:
        self.counts = np.zeros((N_LAYER, N_EXPERT), np.uint64)
        self.base = ctypes.CDLL(str(library_path / "libggml-base.so"))
        self.base.ggml_get_name.restype, self.base.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self.base.ggml_backend_tensor_get.restype = None
        self.base.ggml_backend_tensor_get.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_size_t] * 2]
        self.callback = backend().ggml_backend_sched_eval_callback(self.see)

    def see(self, tensor: Any, ask: bool, _data: Any) -> bool:
        name = self.base.ggml_get_name(tensor).decode()
        if not name.startswith("ffn_moe_topk-"):
            return not ask
        if not ask:
            shape = (ctypes.c_int64 * 8).from_address(tensor + 16)  # ne[4], nb[4]
            (n_used, n_tokens), row = shape[:2], shape[5]
            for token in range(n_tokens):
                ids = np.zeros(n_used, np.int32)
                self.base.ggml_backend_tensor_get(tensor, ids.ctypes.data, token * row, 4 * n_used)
                self.counts[int(name.split("-")[1])] += np.bincount(ids, minlength=N_EXPERT).astype(np.uint64)
        return True


def test_experts_are_staged_and_published_by_another_thread_while_decoding(bench: Bench) -> None:
    """The numbers stay those of stock within what moving an expert changes; nothing is left in between."""
    stock = walk(bench)
    failures: list[BaseException] = []
    with Residency(bench.context.pointer, [6] * N_LAYER) as hs:
        stop = threading.Event()

        def churn() -> None:
            random = np.random.default_rng(1)
            try:
                while not stop.is_set():
                    index, slot = int(random.integers(N_LAYER)), int(random.integers(6))
                    owners = hs.resident(index)
                    if slot >= len(owners):
                        continue
                    if owners[slot] >= 0:
                        hs.publish([(index, slot, -1)])
                    expert = int(random.choice([e for e in range(N_EXPERT) if e not in owners]))
                    hs.stage(index, expert, slot)
                    hs.publish([(index, slot, expert)])
                    if random.random() < 0.02:
                        hs.resize([int(random.integers(3, 9)) for _ in range(N_LAYER)])
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        thread = threading.Thread(target=churn)
        thread.start()
        divergence = np.concatenate([kl(stock, walk(bench)) for _ in range(4)])
        stop.set()
        # the thread may wait for a boundary
        while thread.is_alive():
            bench.clear()
            bench.logits([(1, 0, 0)])
            thread.join(0.01)
        assert not failures
        assert hs.statistics().published > 50
        assert hs.statistics().resizes > 0
    assert (divergence > 1e-4).mean() <= 0.01


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


def refused(status: Status, call: Callable[[], object]) -> None:
    with pytest.raises(ResidencyError) as caught:
        call()
    assert caught.value.refusal == status
    assert caught.value.message
