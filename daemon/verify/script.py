"""What is computed to compare two placements: the same rows in the same steps; pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PREFILL, DECODE, SEQUENCES, STEPS = "prefill", "decode", "sequences", "steps"
PHASES = (PREFILL, DECODE, SEQUENCES, STEPS)

N_SEQUENCES = 6
"""Sequence ids that `long_script` uses, from 0 on."""

Row = tuple[int, int, int]
"""Token, position, sequence id."""


@dataclass(frozen=True, slots=True)
class Step:
    """Rows that are computed together; `phase` is one of PHASES."""

    phase: str
    rows: tuple[Row, ...]


def long_script(tokens: Sequence[int], bos: int | None = None) -> list[Step]:
    """Every kind of step: prompts that devices read by copies of experts (32 tokens and more), single tokens, four
    sequences together, and the widths from 9 to 31 of several people or of a draft that is checked.

    `tokens` is repeated as often as needed; `bos` begins every sequence of a model that wants it.
    """
    writer = _Writer(tokens, bos)
    writer.step(PREFILL, {0: 64})
    writer.step(PREFILL, {0: 40})
    for _ in range(24):
        writer.step(DECODE, {0: 1})
    # As many of each: a model with recurrent layers would split the step otherwise.
    writer.step(SEQUENCES, {1: 7, 2: 7, 3: 7, 4: 7})
    for _ in range(10):
        writer.step(SEQUENCES, {1: 1, 2: 1, 3: 1, 4: 1})
    for width in (9, 12, 16, 24, 31):
        writer.step(STEPS, {5: width})
    return writer.steps


def short_script(tokens: Sequence[int], seq_id: int, bos: int | None = None) -> list[Step]:
    """One sequence: a prompt, single tokens, and a step of a few."""
    writer = _Writer(tokens, bos)
    writer.step(PREFILL, {seq_id: 32})
    for _ in range(8):
        writer.step(DECODE, {seq_id: 1})
    writer.step(STEPS, {seq_id: 9})
    return writer.steps


def one_by_one(steps: Sequence[Step]) -> list[Step]:
    """The same rows in the same order, each in a step of its own."""
    return [Step(step.phase, (row,)) for step in steps for row in step.rows]


def n_rows(steps: Sequence[Step], phase: str | None = None) -> int:
    """Rows of all steps, or of one phase."""
    return sum(len(step.rows) for step in steps if phase in (None, step.phase))


def n_sequences(steps: Sequence[Step], phase: str) -> int:
    """How many sequences the widest step of a phase computes together."""
    return max((len({seq_id for _, _, seq_id in step.rows}) for step in steps if step.phase == phase), default=0)


class _Writer:
    """Gives each sequence the next tokens at its next positions."""

    def __init__(self, tokens: Sequence[int], bos: int | None) -> None:
        self.steps: list[Step] = []
        self._tokens = itertools.cycle(tokens)
        self._bos = bos
        self._positions: dict[int, int] = {}

    def step(self, phase: str, widths: Mapping[int, int]) -> None:
        """`widths` says how many tokens of which sequence."""
        rows = [self._row(seq_id) for seq_id, width in widths.items() for _ in range(width)]
        self.steps.append(Step(phase, tuple(rows)))

    def _row(self, seq_id: int) -> Row:
        position = self._positions.get(seq_id, 0)
        self._positions[seq_id] = position + 1
        token = self._bos if position == 0 and self._bos is not None else next(self._tokens)
        return token, position, seq_id
