"""The CPU's kernels pass over expert ids below zero: such a row is zero, all others are as without it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from daemon.native import backends
from daemon.native.ggml import Cpu, Ggml, InitParams

F32, I32 = 0, 26
TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q4_0": 2, "q8_0": 8, "q4_K": 12, "q6_K": 14, "mxfp4": 39}
COLUMNS, ROWS, EXPERTS, USED = 256, 64, 8, 4


class Bench:
    """Computes one node on the CPU."""

    def __init__(self, directory: Path) -> None:
        backends.load(directory, {"cpu"})
        self.g = Ggml(directory)
        self.cpu = Cpu(self.g)
        self.add_id = ctypes.CDLL(str(directory / "libggml-base.so")).ggml_add_id
        self.add_id.argtypes, self.add_id.restype = [ctypes.c_void_p] * 4, ctypes.c_void_p

    @contextmanager
    def context(self) -> Iterator[int]:
        context = self.g.ggml_init(
            InitParams(16 * self.g.ggml_tensor_overhead() + self.g.ggml_graph_overhead(), None, True)
        )
        yield context
        self.g.ggml_free(context)

    def compute(self, context: int, node: int, inputs: list[tuple[int, bytes]]) -> npt.NDArray[np.float32]:
        """The node's values; its memory holds NaN before."""
        buffer = self.g.ggml_backend_alloc_ctx_tensors_from_buft(context, self.cpu.buffer_types[0])
        out = np.full(self.g.ggml_nbytes(node) // 4, np.nan, np.float32)
        for tensor, data in [*inputs, (node, out.tobytes())]:
            self.g.ggml_backend_tensor_set(tensor, data, 0, len(data))
        graph = self.g.ggml_new_graph(context)
        self.g.ggml_build_forward_expand(graph, node)
        assert self.g.ggml_backend_graph_compute(self.cpu.backend, graph) == 0
        self.g.ggml_backend_tensor_get(node, out.ctypes.data_as(ctypes.c_void_p), 0, out.nbytes)
        self.g.ggml_backend_buffer_free(buffer)
        return out

    def quantised(self, kind: int, values: npt.NDArray[np.float32]) -> bytes:
        rows, columns = values.reshape(-1, values.shape[-1]).shape
        target = ctypes.create_string_buffer(rows * self.g.ggml_row_size(kind, columns))
        data = values.ctypes.data_as(ctypes.c_void_p)
        self.g.ggml_quantize_chunk(kind, data, target, 0, rows, columns, None)
        return target.raw


@pytest.fixture(scope="module")
def bench(library_path: Path) -> Iterator[Bench]:
    made = Bench(library_path)
    yield made
    made.cpu.close()


def ids_with_holes(n_tokens: int, random: np.random.Generator) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Ids without and with holes; the first token has none left and one expert has none at all."""
    whole = np.stack([random.permutation(EXPERTS)[:USED] for _ in range(n_tokens)]).astype(np.int32)
    holes = np.where((random.random(whole.shape) < 0.5) | (whole == 3), -1, whole).astype(np.int32)
    holes[0] = -1
    return whole, holes


@pytest.mark.parametrize("n_tokens", [1, 3, 32])
@pytest.mark.parametrize("kind", TYPES)
def test_rows_of_negative_ids_are_zero(bench: Bench, kind: str, n_tokens: int) -> None:
    """Product by id, with few rows and with enough for the tiled kernel."""
    random = np.random.default_rng(n_tokens)
    weights = bench.quantised(TYPES[kind], random.standard_normal((EXPERTS, ROWS, COLUMNS), np.float32))
    x = random.standard_normal((n_tokens, 1, COLUMNS), np.float32)
    results = []
    for ids in ids_with_holes(n_tokens, random):
        with bench.context() as context:
            w = bench.g.ggml_new_tensor_3d(context, TYPES[kind], COLUMNS, ROWS, EXPERTS)
            b = bench.g.ggml_new_tensor_3d(context, F32, COLUMNS, 1, n_tokens)
            i = bench.g.ggml_new_tensor_2d(context, I32, USED, n_tokens)
            node = bench.g.ggml_mul_mat_id(context, w, b, i)
            inputs = [(w, weights), (b, x.tobytes()), (i, ids.tobytes())]
            results.append((ids, bench.compute(context, node, inputs).reshape(n_tokens, USED, ROWS)))
    compare(results)


@pytest.mark.parametrize("n_tokens", [1, 5])
def test_a_bias_of_a_negative_id_gives_zero(bench: Bench, n_tokens: int) -> None:
    random = np.random.default_rng(n_tokens)
    bias = random.standard_normal((EXPERTS, ROWS), np.float32)
    x = random.standard_normal((n_tokens, USED, ROWS), np.float32)
    results = []
    for ids in ids_with_holes(n_tokens, random):
        with bench.context() as context:
            a = bench.g.ggml_new_tensor_3d(context, F32, ROWS, USED, n_tokens)
            b = bench.g.ggml_new_tensor_2d(context, F32, ROWS, EXPERTS)
            i = bench.g.ggml_new_tensor_2d(context, I32, USED, n_tokens)
            inputs = [(a, x.tobytes()), (b, bias.tobytes()), (i, ids.tobytes())]
            out = bench.compute(context, bench.add_id(context, a, b, i), inputs)
            results.append((ids, out.reshape(n_tokens, USED, ROWS)))
    np.testing.assert_array_equal(results[0][1], x + bias[results[0][0]])
    compare(results)


@pytest.mark.parametrize("n_tokens", [1, 5])
def test_a_row_of_a_negative_index_is_zero(bench: Bench, n_tokens: int) -> None:
    """As the scales of experts are looked up."""
    random = np.random.default_rng(n_tokens)
    scales = random.standard_normal((n_tokens, EXPERTS, 1), np.float32)
    results = []
    for ids in ids_with_holes(n_tokens, random):
        with bench.context() as context:
            a = bench.g.ggml_new_tensor_3d(context, F32, 1, EXPERTS, n_tokens)
            i = bench.g.ggml_new_tensor_2d(context, I32, USED, n_tokens)
            inputs = [(a, scales.tobytes()), (i, ids.tobytes())]
            out = bench.compute(context, bench.g.ggml_get_rows(context, a, i), inputs)
            results.append((ids, out.reshape(n_tokens, USED, 1)))
    compare(results)


def compare(results: list[tuple[npt.NDArray[np.int32], Any]]) -> None:
    (_, whole), (ids, holes) = results
    assert not holes[ids < 0].any()
    if (ids >= 0).any():
        difference = np.abs(holes[ids >= 0] - whole[ids >= 0]).max()
        assert difference <= 0.02 * np.abs(whole).max()  # fewer rows of an expert may take another kernel
