"""Multiplies small matrices of every quant type on the CPU backend and compares with a float product.

Run as a child, `python -m daemon.native.selftest DIRECTORY`: on some virtual machines the processor announces
instructions that it then traps on, which ends the process. Each line of output is one JSON object: {"running": name}
before a case, so that the parent can say where a child died, and at the end {"errors": {...}, "wrong": [...]}.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daemon.native import backends
from daemon.native.ggml import Cpu, Ggml, InitParams

Floats = NDArray[np.float32]

# ggml.h's enum; what is left out cannot be quantised to (Q8_1 and Q8_K exist for activations only).
TYPES = {
    "f32": 0, "f16": 1, "bf16": 30, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q2_K": 10, "q3_K": 11,
    "q4_K": 12, "q5_K": 13, "q6_K": 14, "iq2_xxs": 16, "iq2_xs": 17, "iq3_xxs": 18, "iq1_s": 19, "iq4_nl": 20,
    "iq3_s": 21, "iq2_s": 22, "iq4_xs": 23, "iq1_m": 29, "tq1_0": 34, "tq2_0": 35, "mxfp4": 39, "nvfp4": 40,
    "q1_0": 41, "q2_0": 42,
}  # fmt: skip
_F32, _I32 = 0, 26

COLUMNS = 512
"""Length of a row: two blocks of the largest quant type."""
ROWS = 64
"""A multiple of every tile that repack and AMX want."""
EXPERTS, USED = 4, 2
QUANTISED = 32
"""Rows that are really quantised, which some types take long over; the matrices repeat them in random order."""
TOKENS = (1, 7, 32)
"""One row (decode), a ragged few, and a whole tile of them."""

PRODUCT_BOUND = 0.02
"""Relative error against the product with the weights as the library reads them back: activations lose 1 % at most."""


def weight_bound(bits: float, name: str) -> float:
    """Relative error that quantising normally distributed weights to `bits` bits each may cost."""
    return 0.01 if name in {"f32", "f16", "bf16"} else min(0.95, 2.5 * 2.0 ** (1 - bits))


class Selftest:
    """All cases over one library. `running` is told the name of each case before it runs."""

    def __init__(self, directory: Path, running: Callable[[str], None]) -> None:
        backends.load(directory, {"cpu"})
        self._g = Ggml(directory)
        self._cpu = Cpu(self._g)
        self._running = running
        self._random = np.random.default_rng(2)
        self.errors: dict[str, float] = {}
        self.wrong: list[str] = []

    def run(self) -> None:
        """Every type in every buffer type that takes it."""
        for name, number in TYPES.items():
            seen = self._g.ggml_type_name(number).decode()
            if seen.lower() != name.lower():
                self.wrong.append(f"type {number} is {seen}, not {name}")
                continue
            self._type(name, number)
        self._cpu.close()

    def _type(self, name: str, number: int) -> None:
        few = self._random.standard_normal((QUANTISED, COLUMNS), np.float32)
        order = self._random.permutation(np.arange(EXPERTS * ROWS) % QUANTISED)
        weights = few[order]
        self._running(f"{name} quantise")
        rows = np.frombuffer(self._quantise(number, few), np.uint8).reshape(QUANTISED, -1)
        data = rows[order].tobytes()
        self._running(f"{name} read back")
        known = self._read_back(number, data)
        bits = 8 * len(data) / weights.size
        self._judge(f"{name} weights", relative_error(known, weights), weight_bound(bits, name))
        for buffer_type in self._cpu.buffer_types:
            self._products(name, number, data, known.reshape(EXPERTS, ROWS, COLUMNS), buffer_type)

    def _products(self, name: str, number: int, data: bytes, known: Floats, buffer_type: int) -> None:
        place = self._g.ggml_backend_buft_name(buffer_type).decode()
        for tokens in TOKENS:
            for expert in (False, True):
                kind = "mul_mat_id" if expert else "mul_mat"
                label = f"{name} {kind} of {tokens} in {place}"
                self._running(label)
                error = self._product(number, data, known, buffer_type, tokens, expert)
                if error is not None:
                    self._judge(label, error, PRODUCT_BOUND)

    def _product(
        self, number: int, data: bytes, known: Floats, buffer_type: int, tokens: int, expert: bool
    ) -> float | None:
        """Relative error of one product; None when the buffer type does not take it."""
        g = self._g
        with self._context() as fixed, self._context() as context:
            if expert:
                w = g.ggml_new_tensor_3d(fixed, number, COLUMNS, ROWS, EXPERTS)
            else:
                w = g.ggml_new_tensor_2d(fixed, number, COLUMNS, ROWS)
            with self._buffer(fixed, buffer_type):
                job = _Experts(g, self._random, tokens) if expert else _Dense(g, self._random, tokens)
                result = job.build(context, w)
                if not g.ggml_backend_dev_supports_op(self._cpu.device, result):
                    return None
                self._set(w, data[: g.ggml_nbytes(w)])
                with self._buffer(context, self._cpu.buffer_types[0]):
                    for tensor, values in job.inputs:
                        self._set(tensor, values.tobytes())
                    got = self._compute(context, result)
        expected = job.expected(known)
        return relative_error(got.reshape(expected.shape), expected)

    def _quantise(self, number: int, weights: Floats) -> bytes:
        rows, columns = weights.shape
        target = ctypes.create_string_buffer(rows * self._g.ggml_row_size(number, columns))
        importance = np.ones(columns, np.float32)  # some types refuse to be made without one
        self._g.ggml_quantize_chunk(number, _data(weights), target, 0, rows, columns, _data(importance))
        return target.raw

    def _read_back(self, number: int, data: bytes) -> Floats:
        g, rows = self._g, EXPERTS * ROWS
        with self._context() as context:
            w = g.ggml_new_tensor_2d(context, number, COLUMNS, rows)
            ids = g.ggml_new_tensor_2d(context, _I32, rows, 1)
            result = g.ggml_get_rows(context, w, ids)
            with self._buffer(context, self._cpu.buffer_types[0]):
                self._set(w, data)
                self._set(ids, np.arange(rows, dtype=np.int32).tobytes())
                return self._compute(context, result).reshape(rows, COLUMNS)

    def _compute(self, context: int, result: int) -> Floats:
        graph = self._g.ggml_new_graph(context)
        self._g.ggml_build_forward_expand(graph, result)
        status = self._g.ggml_backend_graph_compute(self._cpu.backend, graph)
        if status != 0:
            raise RuntimeError(f"ggml_backend_graph_compute says {status}")
        got = np.empty(self._g.ggml_nbytes(result) // 4, np.float32)
        self._g.ggml_backend_tensor_get(result, _data(got), 0, got.nbytes)
        return got

    def _set(self, tensor: int, data: bytes) -> None:
        self._g.ggml_backend_tensor_set(tensor, data, 0, len(data))

    def _judge(self, label: str, error: float, bound: float) -> None:
        kind = label.split(" of ")[0].split(" ", 1)[1]
        self.errors[kind] = max(self.errors.get(kind, 0.0), error)
        if not error <= bound:
            self.wrong.append(f"{label}: relative error {error:.3g}, at most {bound:.3g} is right")

    @contextlib.contextmanager
    def _context(self) -> Iterator[int]:
        size = 16 * self._g.ggml_tensor_overhead() + self._g.ggml_graph_overhead()
        context = self._g.ggml_init(InitParams(size, None, True))
        try:
            yield context
        finally:
            self._g.ggml_free(context)

    @contextlib.contextmanager
    def _buffer(self, context: int, buffer_type: int) -> Iterator[None]:
        buffer = self._g.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type)
        if not buffer:
            raise MemoryError("ggml cannot allocate a test buffer")
        try:
            yield
        finally:
            self._g.ggml_backend_buffer_free(buffer)


class _Dense:
    """One weight matrix times some tokens."""

    def __init__(self, ggml: Ggml, random: np.random.Generator, tokens: int) -> None:
        self._g = ggml
        self._x = random.standard_normal((tokens, COLUMNS), np.float32)
        self.inputs: list[tuple[int, NDArray[Any]]] = []

    def build(self, context: int, w: int) -> int:
        x = self._g.ggml_new_tensor_2d(context, _F32, COLUMNS, len(self._x))
        self.inputs = [(x, self._x)]
        return int(self._g.ggml_mul_mat(context, w, x))

    def expected(self, known: Floats) -> Floats:
        return np.asarray(self._x @ known[0].T, np.float32)


class _Experts:
    """Some of several matrices for each token, chosen by ids, as a Mixture-of-Experts layer does."""

    def __init__(self, ggml: Ggml, random: np.random.Generator, tokens: int) -> None:
        self._g = ggml
        self._x = random.standard_normal((tokens, 1, COLUMNS), np.float32)
        chosen = [random.permutation(EXPERTS)[:USED] for _ in range(tokens)]
        self._ids = np.asarray(chosen, np.int32)
        self.inputs: list[tuple[int, NDArray[Any]]] = []

    def build(self, context: int, w: int) -> int:
        tokens = len(self._x)
        x = self._g.ggml_new_tensor_3d(context, _F32, COLUMNS, 1, tokens)
        ids = self._g.ggml_new_tensor_2d(context, _I32, USED, tokens)
        self.inputs = [(x, self._x), (ids, self._ids)]
        return int(self._g.ggml_mul_mat_id(context, w, x, ids))

    def expected(self, known: Floats) -> Floats:
        return np.asarray(np.einsum("tunk,tk->tun", known[self._ids], self._x[:, 0]), np.float32)


def relative_error(got: Floats, expected: Floats) -> float:
    """Of the whole array, by Euclidean norms; NaN anywhere gives NaN."""
    difference = got.astype(np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected.astype(np.float64)))


def _data(array: NDArray[Any]) -> Any:
    return array.ctypes.data_as(ctypes.c_void_p)


def main() -> None:
    """Test the library in the directory that is the only argument."""
    test = Selftest(Path(sys.argv[1]), lambda name: print(json.dumps({"running": name}), flush=True))
    test.run()
    print(json.dumps({"errors": test.errors, "wrong": test.wrong}), flush=True)


if __name__ == "__main__":
    main()
