"""Computes a script in a context and keeps what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from daemon.errors import HotsetError
from daemon.native.hotset import Layer, Reason
from daemon.verify.compare import Ids, Logits, Mask
from daemon.verify.script import Step

_DECODED = 0


class StepFailed(HotsetError):
    """Llama.cpp refused a step of the comparison."""

    code = "verify_step_failed"


class Decoder(Protocol):
    """What is needed of a context; `daemon.native.context` and `daemon.engine.ports` have it."""

    def decode(self, rows: Iterable[tuple[int, int, int, bool]]) -> int:
        """Compute (token, position, sequence id, want logits) rows; 0: done."""

    def logits(self, row: int) -> Logits:
        """[n_vocab], valid until the next decode."""

    def remove(self, seq_id: int) -> None:
        """Free all cells of a sequence."""


class Counter(Protocol):
    """What is needed of `daemon.native.hotset.Residency`."""

    def layers(self) -> list[Layer]:
        """Every layer with routed experts, hits and misses included."""

    def router_ids(self, index: int, n_tokens: int) -> Ids:
        """What the router of a layer chose in the last step, [n_tokens, n_expert_used]."""


@dataclass(frozen=True)
class Recording:
    """`logits` [n_rows, n_vocab]; `ids` of each managed layer [n_rows, n_used]; the rest by step.

    `hits` and `misses` are selections; without a counter they are empty, and so are the ids.
    """

    steps: tuple[Step, ...]
    logits: Logits
    ids: tuple[Ids, ...]
    hits: tuple[int, ...]
    misses: tuple[int, ...]

    def rows(self, phase: str) -> Mask:
        """Which rows belong to a phase, [n_rows]."""
        return np.concatenate([np.full(len(step.rows), step.phase == phase) for step in self.steps])

    def phase(self, phase: str) -> Recording:
        """The steps of one phase only."""
        rows = self.rows(phase)
        chosen = [i for i, step in enumerate(self.steps) if step.phase == phase]
        return Recording(
            tuple(self.steps[i] for i in chosen),
            self.logits[rows],
            tuple(ids[rows] for ids in self.ids),
            tuple(self.hits[i] for i in chosen if self.hits),
            tuple(self.misses[i] for i in chosen if self.misses),
        )


def walk(
    context: Decoder,
    steps: Sequence[Step],
    counter: Counter | None = None,
    before: Callable[[int], None] = lambda _: None,
) -> Recording:
    """Compute all `steps` with every row's logits; `before` is called with the number of each step.

    The sequences are empty before and after.

    Raises:
        StepFailed: llama.cpp refused a step.
    """
    walker = Walker(context, steps, counter)
    try:
        for i in range(len(steps)):
            before(i)
            walker.step()
    finally:
        walker.clear()
    return walker.recording()


class Walker:
    """The same one step at a time, for a context that has other work in between."""

    def __init__(self, context: Decoder, steps: Sequence[Step], counter: Counter | None = None) -> None:
        self._context, self._steps, self._counter = context, tuple(steps), counter
        self._managed = [layer.index for layer in _managed(counter)]
        self._logits: list[Logits] = []
        self._ids: list[list[Ids]] = []
        self._counted = [_selections(counter)]
        self.clear()

    @property
    def done(self) -> bool:
        """Whether every step is computed."""
        return len(self._logits) == len(self._steps)

    def step(self) -> None:
        """Compute the next step."""
        rows = self._steps[len(self._logits)].rows
        code = self._context.decode((*row, True) for row in rows)
        if code != _DECODED:
            raise StepFailed(f"a step of {len(rows)} tokens cannot be computed (code {code})")
        self._logits.append(np.stack([self._context.logits(i).copy() for i in range(len(rows))]))
        if self._counter is not None:
            self._ids.append([self._counter.router_ids(index, len(rows)) for index in self._managed])
        self._counted.append(_selections(self._counter))

    def clear(self) -> None:
        """Free the cells of all sequences of the script."""
        for seq_id in {seq_id for step in self._steps for _, _, seq_id in step.rows}:
            self._context.remove(seq_id)

    def recording(self) -> Recording:
        """What came of all steps."""
        hits, misses = np.diff(np.array(self._counted), axis=0).T
        counted = self._counter is not None
        return Recording(
            self._steps,
            np.concatenate(self._logits),
            tuple(np.concatenate(ids) for ids in zip(*self._ids, strict=True)),
            tuple(int(n) for n in hits) if counted else (),
            tuple(int(n) for n in misses) if counted else (),
        )


def _managed(counter: Counter | None) -> list[Layer]:
    return [layer for layer in counter.layers() if layer.reason is Reason.MANAGED] if counter is not None else []


def _selections(counter: Counter | None) -> tuple[int, int]:
    """Hits and misses so far, all layers together."""
    layers = _managed(counter)
    return sum(layer.hits for layer in layers), sum(layer.misses for layer in layers)
