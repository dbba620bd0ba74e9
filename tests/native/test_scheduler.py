"""In which order llama.cpp's scheduler lets a device and the CPU work; the device is a CPU behind the RPC backend."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from daemon.native import devices
from daemon.native.ggml import Cpu, Ggml, InitParams
from tests.miniarch.ggml_tensor import base_library

F32, SIZE = 0, 8
_P, _S, _INT, _BOOL = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_bool
FUNCTIONS: dict[str, tuple[Any, ...]] = {  # result, arguments
    "ggml_add": (_P, _P, _P, _P),
    "ggml_backend_sched_new": (_P, _P, _P, _INT, _S, _BOOL, _BOOL),
    "ggml_backend_sched_free": (None, _P),
    "ggml_backend_sched_set_tensor_backend": (None, _P, _P, _P),
    "ggml_backend_sched_alloc_graph": (_BOOL, _P, _P),
    "ggml_backend_sched_graph_compute": (_INT, _P, _P),
}
WATCHED: dict[str, tuple[int, Any]] = {  # place in `struct ggml_backend_i` (ggml-backend-impl.h), and type
    "reads": (3, ctypes.CFUNCTYPE(None, _P, _P, _P, _S, _S)),
    "waits": (7, ctypes.CFUNCTYPE(None, _P)),
    "computes": (12, ctypes.CFUNCTYPE(_INT, _P, _P)),
}


class Watched:
    """Notes in `events` what a backend is asked to do, as "NAME computes", and lets it do so."""

    def __init__(self, backend: int, name: str, events: list[str]) -> None:
        self._keep: list[Any] = []
        for event, (place, kind) in WATCHED.items():
            slot = ctypes.c_void_p.from_address(backend + 8 * (1 + place))  # behind the guid
            if slot.value:
                noted = kind(self._noted(f"{name} {event}", kind(slot.value), events))
                self._keep.append(noted)
                slot.value = ctypes.cast(noted, _P).value

    @staticmethod
    def _noted(event: str, original: Any, events: list[str]) -> Any:
        def call(*args: Any) -> Any:
            events.append(event)
            return original(*args)

        return call


class Bench:
    """A scheduler over the device and the CPU, and a context for tensors without memory."""

    def __init__(self, device: str) -> None:
        self.g: Ggml = devices.ggml()
        self.base = base_library()
        for name, (result, *arguments) in FUNCTIONS.items():
            function = getattr(self.base, name)
            function.restype, function.argtypes = result, arguments
        self.cpu = Cpu(self.g)
        pointer = self.g.ggml_backend_dev_by_name(device.encode())
        self.device = self.g.ggml_backend_dev_init(pointer, None)
        self.buffer_type = self.g.ggml_backend_dev_buffer_type(pointer)
        self.events: list[str] = []
        self._watched = [Watched(self.device, "device", self.events), Watched(self.cpu.backend, "cpu", self.events)]
        backends = (_P * 2)(self.device, self.cpu.backend)
        self.sched = self.base.ggml_backend_sched_new(backends, None, 2, 64, False, False)
        self.context = self.g.ggml_init(InitParams(64 * self.g.ggml_tensor_overhead() + (1 << 16), None, True))

    def on_device(self, value: np.ndarray[Any, np.dtype[np.float32]]) -> int:
        """A weight in the device's memory."""
        context = self.g.ggml_init(InitParams(2 * self.g.ggml_tensor_overhead(), None, True))
        tensor = self.g.ggml_new_tensor_2d(context, F32, SIZE, SIZE)
        self.g.ggml_backend_alloc_ctx_tensors_from_buft(context, self.buffer_type)
        self.g.ggml_backend_tensor_set(tensor, value.ctypes.data, 0, value.nbytes)
        return int(tensor)

    def node(self, operation: str, a: int, b: int, *, cpu: bool = False) -> int:
        """A node on one of the two."""
        functions = {"mul_mat": self.g.ggml_mul_mat, "add": self.base.ggml_add}
        tensor = functions[operation](self.context, a, b)
        self.base.ggml_backend_sched_set_tensor_backend(self.sched, tensor, self.cpu.backend if cpu else self.device)
        return int(tensor)

    def compute(self, *nodes: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The last of the nodes, which are computed in this order."""
        graph = self.g.ggml_new_graph(self.context)
        for node in nodes:
            self.g.ggml_build_forward_expand(graph, node)
        assert self.base.ggml_backend_sched_alloc_graph(self.sched, graph)
        self.events.clear()
        assert self.base.ggml_backend_sched_graph_compute(self.sched, graph) == 0
        seen, out = self.events.copy(), np.zeros((SIZE, SIZE), np.float32)
        self.g.ggml_backend_tensor_get(nodes[-1], out.ctypes.data, 0, out.nbytes)
        self.events[:] = seen
        return out

    def close(self) -> None:
        self.base.ggml_backend_sched_free(self.sched)
        self.g.ggml_free(self.context)
        self.g.ggml_backend_free(self.device)
        self.cpu.close()


@pytest.fixture
def bench(rpc_device: str) -> Iterator[Bench]:
    made = Bench(rpc_device)
    yield made
    made.close()


def test_all_reads_of_a_cpu_split_have_one_wait(bench: Bench) -> None:
    rng = np.random.default_rng(1)
    w, x = (rng.standard_normal((SIZE, SIZE), np.float32) for _ in range(2))
    weight, first = bench.on_device(w), bench.on_device(x)
    second = bench.node("mul_mat", weight, first)
    third = bench.node("mul_mat", weight, second)
    fourth = bench.node("add", second, third)
    partial = bench.node("add", second, third, cpu=True)
    out = bench.compute(second, third, fourth, partial, bench.node("add", partial, fourth, cpu=True))
    assert bench.events[:6] == ["device computes", *["device reads"] * 3, "device waits", "cpu computes"]
    np.testing.assert_allclose(out, 2 * (x @ w.T + x @ w.T @ w.T), rtol=1e-5)


def test_the_cpu_does_not_wait_for_what_it_does_not_need(bench: Bench) -> None:
    """The device's part is queued behind the reads, so that the CPU waits for nothing else; both meet at the end."""
    rng = np.random.default_rng(2)
    w, x = (rng.standard_normal((SIZE, SIZE), np.float32) for _ in range(2))
    weight, first = bench.on_device(w), bench.on_device(x)
    shared = bench.node("mul_mat", weight, first)
    read = bench.node("add", shared, shared, cpu=True)
    hot = bench.node("mul_mat", weight, shared)
    cold = bench.node("add", read, read, cpu=True)
    out = bench.compute(shared, read, hot, cold, bench.node("add", hot, cold))
    assert bench.events[:3] == ["device computes", "device reads", "device computes"]
    assert bench.events[3:5] == ["cpu computes", "cpu computes"]
    np.testing.assert_allclose(out, x @ w.T @ w.T + 4 * (x @ w.T), rtol=1e-4)
