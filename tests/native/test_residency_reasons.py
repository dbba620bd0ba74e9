"""Why a layer is not managed: each reason is told, and the numbers are those of stock."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from daemon.native import model
from daemon.native.gguf_types import FLOAT32, STRING
from daemon.native.hotset import Memory, Mode, Reason, Residency, Status
from daemon.native.library import backend
from tests.minigguf import MiniFile, MiniTensor, scalar, write_moe
from tests.native.test_residency import N_EXPERT, N_LAYER, SIZES, every, near, refused, walk
from tests.residency_bench import Bench, fill, open_bench

ADAPTED = {0, 1}


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    return write_moe(path, experts="F32", layers="F32", vocab="F32", **SIZES)


def not_managed(bench: Bench, reasons: list[Reason], memory: list[Memory]) -> None:
    """These reasons, by layer; slots are refused there, and nothing is computed otherwise than by stock."""
    stock = walk(bench)
    declined = [reason is not Reason.MANAGED for reason in reasons]
    refused(Status.NOT_MANAGED, lambda: Residency(bench.context.pointer, [N_EXPERT] * N_LAYER))
    with Residency(bench.context.pointer, [0 if no else N_EXPERT for no in declined]) as hs:
        assert [layer.reason for layer in hs.layers()] == reasons
        assert [layer.memory for layer in hs.layers()] == memory
        refused(Status.NOT_MANAGED, lambda: hs.stage(declined.index(True), 0, 0))
        fill(hs, {i: experts for i, experts in every(N_EXPERT).items() if not declined[i]})
        np.testing.assert_array_equal(walk(bench), stock)
        assert [layer.mode is Mode.COLD for layer in hs.layers()] == declined
        assert [hs.counts(i).sum() > 0 for i in range(N_LAYER)] == [not no for no in declined]


def test_layers_that_are_on_the_device(rpc_device: str, model_file: Path) -> None:
    with open_bench(rpc_device, model_file, load="mmap", cpu_moe_layers=2) as bench:
        not_managed(
            bench,
            [Reason.MANAGED] * 2 + [Reason.ON_DEVICE] * 2,
            [Memory.MAPPED] * 2 + [Memory.NONE] * 2,
        )


def test_layers_that_belong_to_the_cpu(rpc_device: str, model_file: Path) -> None:
    with open_bench(rpc_device, model_file, load="mmap", gpu_layers=3) as bench:
        not_managed(bench, [Reason.NO_DEVICE] * 2 + [Reason.MANAGED] * 2, [Memory.MAPPED] * 4)


def test_weights_that_are_partly_on_the_device(
    rpc_device: str, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "EXPERT_TENSORS", r"\.ffn_(up|gate)_exps")
    with open_bench(rpc_device, model_file, load="mmap", cpu_moe_layers=2) as bench:
        not_managed(bench, [Reason.NOT_HOST] * 2 + [Reason.ON_DEVICE] * 2, [Memory.NONE] * 4)


def test_weights_in_the_layout_of_the_cpus_own_kernels(rpc_device: str, tmp_path: Path) -> None:
    path = write_moe(tmp_path / "model.gguf", experts="Q4_K", layers="F32", vocab="F32", **SIZES)
    with open_bench(rpc_device, path, repack=True) as bench:
        not_managed(bench, [Reason.REPACKED] * N_LAYER, [Memory.NONE] * N_LAYER)


class Adapter:
    """A LoRA adapter on the experts of two layers."""

    def __init__(self, bench: Bench, path: Path) -> None:
        self._lib, self._context = backend(), bench.context.pointer
        self._pointer = self._lib.llama_adapter_lora_init(bench.model.pointer, str(path).encode())
        assert self._pointer

    def use(self, scale: float) -> None:
        """From the next step on; 0 takes it away."""
        pointers = (self._lib.llama_adapter_lora_p_ctypes * 1)(self._pointer)
        scales = (ctypes.c_float * 1)(scale)
        assert self._lib.llama_set_adapters_lora(self._context, pointers, 1, scales) == 0


def write_adapter(path: Path) -> Path:
    rng = np.random.default_rng(5)
    rank, n_embd, n_ff = 4, SIZES["n_embd"], SIZES["n_ff"]
    shapes = {"ffn_up_exps": (n_embd, n_ff), "ffn_down_exps": (n_ff, n_embd)}
    keys = {"general.type": "adapter", "general.architecture": "qwen3moe", "adapter.type": "lora"}
    tensors = []
    for il in ADAPTED:
        for name, (n_in, n_out) in shapes.items():
            for part, dims in (("a", (n_in, rank, N_EXPERT)), ("b", (rank, n_out, N_EXPERT))):
                values = rng.normal(0, 0.1, dims).astype(np.float32).tobytes()
                tensors.append(MiniTensor(f"blk.{il}.{name}.weight.lora_{part}".encode(), dims, 0, values))
    head = tuple((key.encode(), scalar(STRING, value)) for key, value in keys.items())
    path.write_bytes(MiniFile((*head, (b"adapter.lora.alpha", scalar(FLOAT32, 4.0))), tuple(tensors)).to_bytes())
    return path


@pytest.fixture
def adapted(rpc_device: str, model_file: Path, tmp_path: Path) -> Iterator[tuple[Bench, Adapter]]:
    with open_bench(rpc_device, model_file) as bench:
        yield bench, Adapter(bench, write_adapter(tmp_path / "adapter.gguf"))


def test_an_adapter_that_comes_and_goes_takes_its_layers_along(adapted: tuple[Bench, Adapter]) -> None:
    bench, adapter = adapted
    stock = walk(bench)
    adapter.use(1.0)
    stock_adapted = walk(bench)
    assert np.abs(stock_adapted - stock).max() > 0.01
    adapter.use(0.0)

    slots = [8, N_EXPERT, N_EXPERT, N_EXPERT]
    with Residency(bench.context.pointer, slots) as hs:
        fill(hs, {i: every(n)[i] for i, n in enumerate(slots)})
        near("F32", walk(bench), stock)
        before = hs.layers()
        adapter.use(1.0)
        np.testing.assert_array_equal(walk(bench), stock_adapted)
        assert [layer.reason for layer in hs.layers()] == [Reason.LORA] * 2 + [Reason.MANAGED] * 2
        assert [hs.layer(i).hits for i in ADAPTED] == [before[i].hits for i in ADAPTED]
        refused(Status.NOT_MANAGED, lambda: hs.stage(0, 15, 7))
        refused(Status.NOT_MANAGED, lambda: hs.resize([4, -1, -1, -1]))
        hs.publish([(0, 0, -1)])
        np.testing.assert_array_equal(walk(bench), stock_adapted)

        adapter.use(0.0)
        near("F32", walk(bench), stock)
        assert {layer.reason for layer in hs.layers()} == {Reason.MANAGED}
        assert hs.layer(0).hits > before[0].hits
        assert hs.statistics().compute_growths == 0


def test_an_adapter_that_is_there_at_the_start(adapted: tuple[Bench, Adapter]) -> None:
    bench, adapter = adapted
    stock = walk(bench)
    adapter.use(1.0)
    stock_adapted = walk(bench)
    refused(Status.NOT_MANAGED, lambda: Residency(bench.context.pointer, [8] * N_LAYER))
    with Residency(bench.context.pointer, [0, 0, 8, N_EXPERT]) as hs:
        assert [layer.reason for layer in hs.layers()] == [Reason.LORA] * 2 + [Reason.MANAGED] * 2
        fill(hs, {3: every(N_EXPERT)[3]})
        np.testing.assert_array_equal(walk(bench), stock_adapted)
        adapter.use(0.0)
        np.testing.assert_array_equal(walk(bench), stock)
        hs.resize([N_EXPERT] * N_LAYER)
        fill(hs, every(N_EXPERT))
        np.testing.assert_array_equal(walk(bench), stock)
        assert hs.statistics().compute_growths == 0
