"""What the engine loop needs from llama.cpp; `daemon.native.context` provides it, tests put a fake in its place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from daemon.messages import RecordingScope, Residency, ResidencySpec

DECODED = 0
NO_CELLS = 1

Ids = npt.NDArray[np.integer]
"""What a decode step chose, [n_tokens, layers, top_k]."""


@dataclass(frozen=True)
class Source:
    """What can be recorded of a step's ids: the layers of `scope` are those at `columns`."""

    scope: RecordingScope
    columns: list[int]


class SamplerPort(Protocol):
    """A chain of samplers that belongs to one sequence."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Let the chain see `tokens`, oldest first."""

    def close(self) -> None:
        """Free it."""


class ContextPort(Protocol):
    """Decoding over one KV buffer; every method belongs to the loop thread."""

    def decode(self, rows: Iterable[tuple[int, int, int, bool]]) -> int:
        """Compute (token, position, sequence id, want logits) rows; 0 done, 1 no cells, else an error.

        Whatever is not 0 left the KV buffer as it was.
        """

    def sample(self, sampler: Any, row: int) -> int:
        """Choose and accept the next token from the logits of a row of the last batch."""

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """[n_vocab], valid until the next decode."""

    def new_sampler(self, stages: Iterable[tuple[str, tuple[Any, ...]]]) -> SamplerPort:
        """A chain from (name, arguments) stages."""

    def remove(self, seq_id: int) -> None:
        """Free all cells of a sequence."""

    def last_position(self, seq_id: int) -> int:
        """Largest position in the buffer, -1 for none."""

    def synchronize(self) -> None:
        """Wait until everything that was queued is computed."""

    @property
    def can_share(self) -> bool:
        """Whether `share` gives a sequence exactly the beginning of another one."""

    def share(self, source: int, target: int, n: int) -> None:
        """Let `target`, which is empty, have the cells of the first `n` tokens of `source` too; no data moves."""

    def state_size(self, seq_id: int) -> int:
        """Bytes that `save` would give; 0 where it cannot."""

    def save(self, seq_id: int) -> bytearray | None:
        """The state of a sequence, None where it cannot be read."""

    def restore(self, seq_id: int, state: bytearray) -> bool:
        """Put a saved state into an empty sequence; False where that cannot be, which may leave a part of it."""


class VocabPort(Protocol):
    """Token ids to bytes."""

    n_tokens: int

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes that the token stands for; empty for control tokens."""

    def is_eog(self, token: int) -> bool:
        """Whether the token ends an answer."""


class ResidencyPort(Protocol):
    """What keeps experts in VRAM."""

    def status(self) -> Residency:
        """The state of this moment."""

    def prepare(self, width: int) -> None:
        """The next step computes a generated token for each of `width` sequences; 0: a prompt is in it."""

    def synchronize(self) -> None:
        """Wait for what was begun."""

    def decoded(self, width: int, seconds: float) -> npt.NDArray[np.int64] | None:
        """A step of one generated token for each of `width` sequences is over.

        Returns [2, width]: selections of experts in VRAM, and all of them; None where that is not known.
        """

    @property
    def chosen(self) -> Ids | None:
        """What the last step that `decoded` was told of chose; None where that is not known."""

    def recordable(self) -> Source | str:
        """What can be recorded of `chosen` now, or why nothing."""

    def adjust(self, spec: ResidencySpec) -> None:
        """Follow what is live of another [residency]."""


class IdlePort(Protocol):
    """Work for an engine that has none, in steps."""

    @property
    def pending(self) -> bool:
        """Whether there is a step to do."""

    @property
    def underway(self) -> bool:
        """Whether it has begun and holds cells of a sequence."""

    def step(self) -> None:
        """Do one."""

    def interrupt(self) -> None:
        """A request or a change of placement came: give everything back."""


class PipePort(Protocol):
    """The engine's end of the socket."""

    def send(self, message: Any) -> None:
        """Send one message."""

    def receive(self, timeout: float | None) -> list[bytes]:
        """Frames that arrived within `timeout` seconds; EOFError when the service is gone."""
