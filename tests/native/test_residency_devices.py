"""Devices of their own: what crosses to them, several at once, and one whose memory runs out."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from daemon.native import devices
from daemon.native.hotset import Mode, Residency, State, Status
from daemon.native.library import backend
from tests.minigguf import write_moe
from tests.native.test_residency import N_EXPERT, N_LAYER, N_USED, SIZES, every, near, refused, walk
from tests.residency_bench import Bench, RpcServer, fill, in_child, open_bench, rpc_server
from tests.rpc_wire import Command, Wire, wire

LARGE = SIZES | {"n_ff": 2048}
"""Experts that need more of a device's compute buffer than anything else."""


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    return write_moe(path, experts="F32", layers="F32", vocab="F32", **SIZES)


def test_publishing_is_one_write_and_a_step_brings_only_its_own_ids(library_path: Path, model_file: Path) -> None:
    in_child(check_traffic, str(library_path), str(model_file))


def check_traffic(library: str, path: str) -> None:
    with rpc_server(Path(library)) as server, wire(server.port) as seen, open_bench(seen.device, Path(path)) as bench:
        with Residency(bench.context.pointer, [8] * N_LAYER) as hs:
            fill(hs, every(8))
            (writes,) = written(seen)
            hs.publish([(i, slot, -1) for i in range(N_LAYER) for slot in range(4)])
            assert written(seen) == [writes + 1], "the maps of all layers in one write"
            n_tokens = 3
            bench.logits([(5, i, 0) for i in range(n_tokens)])
            assert seen.count(Command.GET_TENSOR, size=4 * n_tokens * N_USED * N_LAYER) == 1, "the ids of all layers"


def written(*wires: Wire) -> list[int]:
    """Writes that each server got so far."""
    g = devices.ggml()
    for i in range(g.ggml_backend_dev_count()):
        devices.describe(g.ggml_backend_dev_get(i))  # asks for its memory, and the answer comes behind all writes
    return [one.count(Command.SET_TENSOR) for one in wires]


def test_layers_of_two_devices_have_their_slots_there(library_path: Path, model_file: Path) -> None:
    in_child(check_two_devices, str(library_path), str(model_file))


def check_two_devices(library: str, path: str) -> None:
    with (
        rpc_server(Path(library)) as first,
        rpc_server(Path(library)) as second,
        wire(first.port) as a,
        wire(second.port) as b,
        open_bench(f"{a.device},{b.device}", Path(path)) as bench,
    ):
        stock = walk(bench)
        with Residency(bench.context.pointer) as hs:
            owners = [layer.device for layer in hs.layers()]
            assert len(set(owners)) == 2
            np.testing.assert_array_equal(walk(bench), stock)
            hs.resize([N_EXPERT] * N_LAYER)
            for layer in hs.layers():
                before = written(a, b)
                hs.stage(layer.index, 0, 0)
                grown = [now > then for now, then in zip(written(a, b), before, strict=True)]
                assert grown == [layer.device == device for device in (owners[0], owners[-1])]
            fill(hs, every(N_EXPERT))
            assert {layer.mode for layer in hs.layers()} == {Mode.FULL}
            np.testing.assert_array_equal(walk(bench), stock)
            hs.resize([8] * N_LAYER)
            fill(hs, every(8))
            before = hs.statistics()
            near("F32", walk(bench), stock)
            after = hs.statistics()
            for layer in hs.layers():
                assert layer.hits + layer.misses == after.tokens * N_USED == hs.counts(layer.index).sum()
            assert (after.wide_steps - before.wide_steps, after.compute_growths) == (1, 0)


def test_a_device_without_memory_leaves_everything_as_it_was(library_path: Path, model_file: Path) -> None:
    in_child(check_slots_without_memory, str(library_path), str(model_file))


def check_slots_without_memory(library: str, path: str) -> None:
    """The server's process gets a limit, so that its allocations fail as they do on a card that is full."""
    with rpc_server(Path(library)) as server, open_bench(server.device, Path(path)) as bench:
        stock = walk(bench)
        one_slab = 17 * 3 * 256 * 256 * 4
        with limited(server, one_slab // 2):
            refused(Status.NO_MEMORY, lambda: Residency(bench.context.pointer, [N_EXPERT] * N_LAYER))
        np.testing.assert_array_equal(walk(bench), stock)

        with Residency(bench.context.pointer, [2] * N_LAYER) as hs:
            fill(hs, every(2))
            before, logits = (hs.layers(), hs.statistics()), walk(bench)
            near("F32", logits, stock)
            for room in (one_slab // 2, one_slab + one_slab // 2):
                with limited(server, room):
                    message = refused(Status.NO_MEMORY, lambda: hs.resize([N_EXPERT] * N_LAYER))
                    assert "MiB free, did not give 12.8 MiB" in message
                    assert hs.statistics().device_bytes == before[1].device_bytes
                    assert [hs.resident(i) for i in range(N_LAYER)] == list(every(2).values())
                    np.testing.assert_array_equal(walk(bench), logits)
            hs.resize([N_EXPERT] * N_LAYER)
            fill(hs, every(N_EXPERT))
            np.testing.assert_array_equal(walk(bench), stock)


def test_compute_buffers_that_do_not_fit_leave_the_context_as_it_was(library_path: Path, tmp_path: Path) -> None:
    path = write_moe(tmp_path / "model.gguf", experts="F16", layers="F32", vocab="F32", **LARGE)
    in_child(check_compute_buffers_without_memory, str(library_path), str(path))


def check_compute_buffers_without_memory(library: str, path: str) -> None:
    with rpc_server(Path(library)) as server, open_bench(server.device, Path(path)) as bench:
        stock = walk(bench)
        with limited(server, 1 << 20):
            message = refused(Status.NO_MEMORY, lambda: Residency(bench.context.pointer))
            assert "compute buffers" in message
            np.testing.assert_array_equal(walk(bench), stock)
        with Residency(bench.context.pointer):
            np.testing.assert_array_equal(walk(bench), stock)


def test_compute_buffers_that_no_longer_fit_switch_residency_off(library_path: Path, tmp_path: Path) -> None:
    """An adapter makes llama.cpp reserve anew: for upstream's graphs there is room, for residency's there is not."""
    path = write_moe(tmp_path / "model.gguf", experts="F16", layers="F32", vocab="F32", **LARGE)
    in_child(check_later_buffers_without_memory, str(library_path), str(path))


def check_later_buffers_without_memory(library: str, path: str) -> None:
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back to the system
    with rpc_server(Path(library), **at_once) as server, open_bench(server.device, Path(path)) as bench:
        stock, taken = walk(bench), address_space(server)
        with Residency(bench.context.pointer) as hs:
            more = address_space(server) - taken
            assert more > 1 << 20
            with limited(server, -more // 2):
                clear_control_vector(bench)
                np.testing.assert_array_equal(walk(bench), stock)
                assert hs.statistics().state == State.OFF


def clear_control_vector(bench: Bench) -> None:
    """Changes nothing, but llama.cpp reserves its compute buffers anew."""
    n_embd = int(SIZES["n_embd"])
    assert backend().llama_set_adapter_cvec(bench.context.pointer, None, 0, n_embd, 0, 0) == 0


def address_space(server: RpcServer) -> int:
    """Bytes that the server's process has now."""
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[0]
    return int(pages) * resource.getpagesize()


class limited:
    """The server may take this many bytes of address space more than it has now (less: what it gives back first)."""

    def __init__(self, server: RpcServer, room: int) -> None:
        self._server = server
        self._room = room

    def __enter__(self) -> None:
        limit = address_space(self._server) + self._room
        resource.prlimit(self._server.process.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    def __exit__(self, *_: object) -> None:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(self._server.process.pid, resource.RLIMIT_AS, unlimited)
