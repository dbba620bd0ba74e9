"""A small deterministic stand-in for llama.cpp under the engine loop; it checks every batch it is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from daemon.engine.ports import DECODED, NO_CELLS
from daemon.messages import Adjust, Cancel, Done, Failed, Record, RequestEvent, Shutdown, Step, Submit, Tokens

EOS = 0
N_VOCAB = 512
BAD_TOKEN = 500
"""A batch with this token cannot be computed (code -1)."""


def next_token(history: Sequence[int]) -> int:
    """The fake model: the next token depends on the whole history, and is never EOS nor `BAD_TOKEN`."""
    return (sum((i + 1) * token for i, token in enumerate(history)) * 31 + len(history)) % 26 + ord("a")


class FakeSampler:
    def __init__(self, stages: Iterable[tuple[str, tuple[Any, ...]]]) -> None:
        self.stages = list(stages)
        self.accepted: list[int] = []
        self.closed = False

    def accept(self, tokens: Sequence[int]) -> None:
        self.accepted += tokens

    def close(self) -> None:
        assert not self.closed
        self.closed = True


@dataclass(eq=False)
class FakeCell:
    """One token; sequences that share it hold the same object."""

    token: int


class FakeContext:
    """Holds what each sequence id has in its cells; refuses gaps, overflows and wrong rows."""

    can_share = True

    def __init__(self, n_cells: int, rule: Callable[[Sequence[int]], int] = next_token) -> None:
        self.n_cells, self.rule = n_cells, rule
        self.cells: dict[int, list[FakeCell]] = {}
        self.batches: list[list[tuple[int, int, int, bool]]] = []
        self.samplers: list[FakeSampler] = []
        self.refuse_once = self.n_refused = 0
        self.sample_fails_at: int | None = None
        self.bytes_per_cell = 1
        """Of a saved state; 0: states cannot be saved."""
        self.restores = True
        self.shared: list[tuple[int, int, int]] = []
        self._histories: dict[int, list[int]] = {}

    @property
    def used(self) -> int:
        """Cells in use, shared ones counted once."""
        return len({id(cell) for cells in self.cells.values() for cell in cells})

    def decode(self, rows: Iterable[tuple[int, int, int, bool]]) -> int:
        batch = list(rows)
        self.batches.append(batch)
        assert batch, "an empty batch is an error in llama.cpp"
        if any(token == BAD_TOKEN for token, *_ in batch):
            return -1
        if self.refuse_once or self.used + len(batch) > self.n_cells:
            self.n_refused += self.refuse_once > 0
            self.refuse_once = max(0, self.refuse_once - 1)
            return NO_CELLS
        self._histories.clear()
        for row, (token, position, seq_id, wanted) in enumerate(batch):
            cells = self.cells.setdefault(seq_id, [])
            assert position == len(cells), "positions of a sequence follow each other"
            cells.append(FakeCell(token))
            if wanted:
                self._histories[row] = [cell.token for cell in cells]
        return DECODED

    def synchronize(self) -> None: ...

    def share(self, source: int, target: int, n: int) -> None:
        assert not self.cells.get(target)
        assert 0 < n <= len(self.cells[source])
        self.cells[target] = self.cells[source][:n]
        self.shared.append((source, target, n))

    def state_size(self, seq_id: int) -> int:
        return len(self.cells.get(seq_id, ())) * self.bytes_per_cell

    def save(self, seq_id: int) -> bytearray | None:
        text = json.dumps([cell.token for cell in self.cells[seq_id]]).encode()
        return bytearray(text.ljust(self.state_size(seq_id)))

    def restore(self, seq_id: int, state: bytearray) -> bool:
        assert not self.cells.get(seq_id)
        tokens = json.loads(state)
        self.cells[seq_id] = [FakeCell(token) for token in tokens]
        if not self.restores:
            del self.cells[seq_id][1:]
        return self.restores and self.used <= self.n_cells

    def sample(self, sampler: FakeSampler, row: int) -> int:
        assert not sampler.closed
        history = self._histories[row]
        if self.sample_fails_at is not None and history[0] == self.sample_fails_at:
            raise ValueError("no such sampler")
        token = self.rule(history)
        sampler.accept([token])
        return token

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        logits = np.zeros(N_VOCAB, np.float32)
        logits[self.rule(self._histories[row])] = 5.0
        return logits

    def new_sampler(self, stages: Iterable[tuple[str, tuple[Any, ...]]]) -> FakeSampler:
        sampler = FakeSampler(stages)
        self.samplers.append(sampler)
        return sampler

    def remove(self, seq_id: int) -> None:
        self.cells.pop(seq_id, None)

    def last_position(self, seq_id: int) -> int:
        return len(self.cells.get(seq_id, [])) - 1


class FakeVocab:
    """Token n is the byte n up to 255; 0 ends an answer; above that nothing is shown."""

    n_tokens = N_VOCAB

    def piece(self, token: int, special: bool = False) -> bytes:
        return bytes([token]) if 0 < token < 256 else b""

    def is_eog(self, token: int) -> bool:
        return token == EOS


class FakePipe:
    """Commands put in by the test, messages kept in the order they were sent."""

    def __init__(self) -> None:
        self.inbox: list[bytes] = []
        self.sent: list[Step] = []
        self.timeouts: list[float | None] = []
        self.closed = False

    def put(self, *commands: Submit | Cancel | Adjust | Record | Shutdown) -> None:
        self.inbox += [command.model_dump_json().encode() for command in commands]

    def send(self, message: Any) -> None:
        self.sent.append(type(message).model_validate_json(message.model_dump_json()))

    def receive(self, timeout: float | None) -> list[bytes]:
        self.timeouts.append(timeout)
        if self.closed:
            raise EOFError("closed")
        bodies, self.inbox = self.inbox, []
        return bodies

    def events(self, request: str) -> list[RequestEvent]:
        return [event for step in self.sent for event in step.events if event.id == request]

    def text(self, request: str) -> str:
        return "".join(e.text for e in self.events(request) if not isinstance(e, Failed))

    def end(self, request: str) -> Done | Failed | None:
        ends = [event for event in self.events(request) if not isinstance(event, Tokens)]
        assert len(ends) <= 1, "every request ends once"
        return ends[0] if ends else None
