"""A stand-in for the library's slots: what is staged is there at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from daemon.native.hotset import Layer, Memory, Mode, Move, Reason, ResidencyError, State, Statistics, Status

MIB = 1 << 20
NOTHING = Statistics(**dict.fromkeys(Statistics.__dataclass_fields__, 0))


def layer(index: int, **changes: Any) -> Layer:
    values = {"index": index, "il": index + 1, "n_expert": 8, "n_expert_used": 2, "n_slots": 4, "n_resident": 0}
    values |= {"mode": Mode.PARTIAL, "reason": Reason.MANAGED, "device": 0, "expert_bytes": MIB}
    values |= {"device_bytes": 5 * MIB, "memory": Memory.PINNED, "hits": 0, "misses": 0}
    return Layer(**values | changes)


class FakeResidency:
    """Slots that are filled at once."""

    def __init__(self, *layers: Layer) -> None:
        self.found = list(layers)
        self.state = State.ON
        self.refuse_at: int | None = None
        self.refuse_resize: Exception | None = None
        self.staged: list[tuple[int, int, int]] = []
        self.closed = False
        self.owners = [[-1] * one.n_slots for one in layers]

    @property
    def n_layers(self) -> int:
        return len(self.found)

    def layers(self) -> list[Layer]:
        return list(self.found)

    def all_counts(self) -> list[npt.NDArray[np.uint64]]:
        return [np.zeros(one.n_expert, np.uint64) for one in self.found]

    def statistics(self) -> Statistics:
        return replace(NOTHING, state=self.state, staged=len(self.staged), staged_bytes=len(self.staged) * MIB)

    def step_ids(self, n_tokens: int, pad: int) -> npt.NDArray[np.int32] | None:
        """The last ids stay there whatever the state."""
        return np.zeros((n_tokens, self.n_layers, 2), np.int32)

    def stage(self, index: int, expert: int, slot: int) -> None:
        if len(self.staged) == self.refuse_at:
            raise ResidencyError(Status.FAILED, "the device is gone")
        self.staged.append((index, expert, slot))

    def stage_all(self, moves: Iterable[Move]) -> None:
        for index, slot, expert in moves:
            self.stage(index, expert, slot)

    def resident(self, index: int) -> list[int]:
        return list(self.owners[index])

    def publish(self, moves: Iterable[Move]) -> None:
        for index, slot, expert in moves:
            assert expert < 0 or (index, expert, slot) in self.staged
            self.owners[index][slot] = expert
            n_resident = sum(owner >= 0 for owner in self.owners[index])
            self.found[index] = replace(self.found[index], n_resident=n_resident)

    def resize(self, slots: Sequence[int]) -> None:
        if self.refuse_resize is not None:
            raise self.refuse_resize
        for index, n in enumerate(slots):
            if n >= 0:
                self.owners[index] = (self.owners[index] + [-1] * n)[:n]
                n_resident = sum(owner >= 0 for owner in self.owners[index])
                self.found[index] = replace(self.found[index], n_slots=n, n_resident=n_resident)

    def set_state(self, state: State) -> None:
        self.state = state

    def close(self) -> None:
        self.closed = True
