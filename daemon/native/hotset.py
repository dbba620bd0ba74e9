"""Experts in VRAM: the exports of the patch series for one context, typed.

Layers are numbered from 0 in the order in which the model computes them. Any thread may call anything but the
constructor and `close`; what changes the placement waits until the context is between two computations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from daemon.errors import HotsetError
from daemon.native import abi
from daemon.native.library import handle

Move = tuple[int, int, int]
"""Layer, slot, and the expert staged in it; expert -1: the slot's expert goes back to the CPU."""


class ResidencyError(HotsetError):
    """A call was refused and changed nothing; `refusal` says why."""

    code = "residency_refused"

    def __init__(self, refusal: Status, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


class Status(IntEnum):
    """`enum llama_hotset_status`."""

    OK = 0
    INVALID = -1
    NO_MEMORY = -2
    NOT_MANAGED = -3
    SLOT_IN_USE = -4
    NOT_STAGED = -5
    RESIDENT = -6
    BUSY = -7
    FAILED = -8


class Mode(IntEnum):
    """How a layer is computed: upstream's path, a chain on each side, or all of it on the device."""

    COLD = 0
    PARTIAL = 1
    FULL = 2


class Reason(IntEnum):
    """Why a layer is not managed."""

    MANAGED = 0
    LORA = 1
    REPACKED = 2
    NOT_HOST = 3
    ON_DEVICE = 4
    NO_DEVICE = 5
    UNSUPPORTED = 6


class Memory(IntEnum):
    """Where the CPU's copy of a layer's experts is; of several kinds in one layer, the last one in this order.

    PINNED memory is read by the device itself; a backend that cannot pin gives PAGEABLE memory without a word. MAPPED
    are pages of the model's file, NONE is memory that the CPU cannot read.
    """

    NONE = 0
    PINNED = 1
    PAGEABLE = 2
    MAPPED = 3


class State(IntEnum):
    """What residency does at all: nothing, count only, everything."""

    OFF = 0
    COUNT = 1
    ON = 2


@dataclass(frozen=True)
class Layer:
    """One set of routed experts. `index` is its number here, `il` the model's layer; sizes in bytes."""

    index: int
    il: int
    n_expert: int
    n_expert_used: int
    n_slots: int
    n_resident: int
    mode: Mode
    reason: Reason
    device: int
    expert_bytes: int
    device_bytes: int
    hits: int
    misses: int
    memory: Memory = Memory.NONE


@dataclass(frozen=True)
class Statistics:
    """Counters since the start; what is held now, in bytes; `state`, which is OFF also after memory ran out.

    `cpu_us` are the microseconds from the first to the last node of the CPU's chains, `device_us` all others between
    leaving a boundary and reaching the next one: the device's work that the CPU waited for, and layers on upstream's
    path. `compute_bytes` are llama.cpp's buffers on all backends, `compute_growths` how often they were too small.
    """

    state: int
    generation: int
    steps: int
    tokens: int
    wide_steps: int
    staged: int
    staged_bytes: int
    published: int
    resizes: int
    cpu_us: int
    device_us: int
    device_bytes: int
    compute_bytes: int
    compute_growths: int


_MODES, _REASONS, _MEMORIES = list(Mode), list(Reason), list(Memory)  # numbered from 0


class _LayerInfo(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("il", "n_expert", "n_expert_used", "n_slots", "n_resident")),
        *((name, ctypes.c_int32) for name in ("mode", "reason", "device", "memory")),
        *((name, ctypes.c_uint64) for name in ("expert_bytes", "device_bytes", "hits", "misses")),
    )


class _Stats(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in Statistics.__dataclass_fields__)


class _Move(ctypes.Structure):
    _fields_ = (("layer", ctypes.c_int32), ("slot", ctypes.c_int32), ("expert", ctypes.c_int32))


class Residency:
    """Slots for one context, which must outlive it; a context manager.

    Raises:
        ResidencyError: nothing can be managed so, for example because the device has too little memory.
    """

    def __init__(self, context: Any, slots: Sequence[int] | None = None, *, max_bytes: int = 0) -> None:
        """`context` is llama.cpp's handle; `slots` are per layer (None: none yet), `max_bytes` limits all devices."""
        self._exports = abi.bind(handle())
        self._pointer: ctypes.c_void_p | None = None
        pointer = ctypes.c_void_p()
        given = None if slots is None else _ints(slots)
        count = 0 if slots is None else len(slots)
        status = self._exports.llama_hotset_create(context, given, count, max_bytes, ctypes.byref(pointer))
        self._check(status)
        self._pointer = pointer
        self.n_layers = int(self._exports.llama_hotset_layer_count(pointer))
        managed = [layer for layer in self.layers() if layer.reason == Reason.MANAGED]
        self._counted = [(layer.index, layer.n_expert_used) for layer in managed]
        self._top_k = max((used for _, used in self._counted), default=0)

    @property
    def ragged(self) -> bool:
        """Whether some layers choose fewer experts than others, or are not counted."""
        return len(self._counted) < self.n_layers or any(used < self._top_k for _, used in self._counted)

    def layer(self, index: int) -> Layer:
        """What is known about a layer now."""
        info = _LayerInfo()
        self._check(self._exports.llama_hotset_get_layer(self._pointer, index, ctypes.byref(info)))
        return Layer(  # names and values one by one: this is asked for many layers between two steps
            index=index,
            il=info.il,
            n_expert=info.n_expert,
            n_expert_used=info.n_expert_used,
            n_slots=info.n_slots,
            n_resident=info.n_resident,
            mode=_MODES[info.mode],
            reason=_REASONS[info.reason],
            device=info.device,
            expert_bytes=info.expert_bytes,
            device_bytes=info.device_bytes,
            hits=info.hits,
            misses=info.misses,
            memory=_MEMORIES[info.memory],
        )

    def layers(self) -> list[Layer]:
        """Every layer with routed experts."""
        return [self.layer(index) for index in range(self.n_layers)]

    def statistics(self) -> Statistics:
        """The counters as of the last boundary."""
        stats = _Stats()
        self._check(self._exports.llama_hotset_get_stats(self._pointer, ctypes.byref(stats)))
        return Statistics(**{name: getattr(stats, name) for name in Statistics.__dataclass_fields__})

    def counts(self, index: int) -> npt.NDArray[np.uint64]:
        """How often each expert of a layer was selected, [n_expert]."""
        out = np.zeros(self.layer(index).n_expert, np.uint64)
        self._check(self._exports.llama_hotset_get_counts(self._pointer, index, out.ctypes.data, len(out)))
        return out

    def all_counts(self) -> list[npt.NDArray[np.uint64]]:
        """`counts` of every layer, as of one boundary."""
        sizes = [layer.n_expert for layer in self.layers()]
        out = np.zeros(sum(sizes), np.uint64)
        self._check(self._exports.llama_hotset_get_counts(self._pointer, -1, out.ctypes.data, len(out)))
        return np.split(out, np.cumsum(sizes)[:-1])

    def router_ids(self, index: int, n_tokens: int) -> npt.NDArray[np.int32]:
        """What the router chose for each token of the last step, [n_tokens, n_expert_used].

        Only of a step that was computed in one piece while residency was not off.
        """
        out = np.zeros((n_tokens, self.layer(index).n_expert_used), np.int32)
        count = self._exports.llama_hotset_get_ids(self._pointer, index, out.ctypes.data, out.size)
        self._check(min(count, 0))
        if count != out.size:
            raise ResidencyError(Status.INVALID, f"the last step had {count} ids in this layer, not {out.size}")
        return out

    def step_ids(self, n_tokens: int, pad: int) -> npt.NDArray[np.int32] | None:
        """What the routers of all layers chose in the last step, [n_tokens, layers, top_k of the largest].

        `pad` stands where a layer chooses fewer, or is not counted. None for a step that was computed in several pieces
        or was not counted. Cheap enough for each step.
        """
        out = np.full((self.n_layers, n_tokens, self._top_k), pad, np.int32)
        read, pointer = self._exports.llama_hotset_get_ids, self._pointer
        address, stride = out.ctypes.data, out.strides[0]
        for index, used in self._counted:
            n_ids = n_tokens * used
            if used == self._top_k:
                count = read(pointer, index, address + index * stride, n_ids)
            else:
                own = np.empty((n_tokens, used), np.int32)
                count = read(pointer, index, own.ctypes.data, n_ids)
                out[index, :, :used] = own
            if count != n_ids:
                return None
        return out.transpose(1, 0, 2)

    def resident(self, index: int) -> list[int]:
        """Slot -> published expert, -1 for none."""
        out = np.zeros(self.layer(index).n_slots, np.int32)
        self._check(self._exports.llama_hotset_get_map(self._pointer, index, out.ctypes.data, len(out)))
        return [int(expert) for expert in out]

    def stage(self, index: int, expert: int, slot: int) -> None:
        """Upload an expert into a slot that no published expert holds, also while the context computes."""
        self.stage_all([(index, slot, expert)])

    def stage_all(self, moves: Iterable[Move]) -> None:
        """Upload all of these or none; together they take less than one by one."""
        array = _moves(moves)
        self._check(self._exports.llama_hotset_stage_experts(self._pointer, array, len(array)))

    def publish(self, moves: Iterable[Move], *, wait: bool = True) -> None:
        """Apply all moves or none at the next boundary; without `wait` a refusal is not told."""
        array = _moves(moves)
        self._check(self._exports.llama_hotset_publish_moves(self._pointer, array, len(array), wait))

    def resize(self, slots: Sequence[int]) -> None:
        """Give every layer a new number of slots, -1: as it is; nothing changes if the device has too little memory."""
        self._check(self._exports.llama_hotset_resize_slots(self._pointer, _ints(slots), len(slots)))

    def set_state(self, state: State) -> None:
        """Switch residency; slots keep their experts."""
        self._check(self._exports.llama_hotset_set_state(self._pointer, state))

    def close(self) -> None:
        """Free all slots; the context goes on without."""
        if self._pointer is not None:
            self._exports.llama_hotset_free(self._pointer)
            self._pointer = None

    def __enter__(self) -> Residency:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _check(self, status: int) -> None:
        if status != Status.OK:
            reason = self._exports.llama_hotset_last_error().decode(errors="replace")
            raise ResidencyError(Status(status), reason or "llama.cpp gave no reason")


def _moves(moves: Iterable[Move]) -> ctypes.Array[_Move]:
    listed = [_Move(*move) for move in moves]
    return (_Move * len(listed))(*listed)


def _ints(values: Sequence[int]) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * len(values))(*values)
