"""What the next step computes, and who may start; pure.

Decode goes first: every sequence that has a sampled token gets its row. What is left of the step goes to prompts, in
order of arrival. A sequence starts when its prompt and a few tokens of answer fit the free KV cells; when cells run
out, the youngest running sequence gives its own back and waits again (its tokens are kept and computed once more).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEADROOM = 64
"""Cells beyond its tokens that a sequence must find free to start, so that it is not sent back at once."""


@dataclass(frozen=True, slots=True)
class Work:
    """One running sequence as the scheduler sees it: its place in the caller's list, and tokens not computed yet."""

    index: int
    n_left: int
    decoding: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """(index, tokens) pairs in the order of their rows; `n_tokens` is their sum."""

    parts: tuple[tuple[int, int], ...]
    n_tokens: int


def plan_step(running: Sequence[Work], budget: int) -> StepPlan:
    """Fill a step of at most `budget` tokens (at least the number of running sequences)."""
    parts = [(work.index, 1) for work in running if work.decoding]
    left = budget - len(parts)
    for work in running:
        if not work.decoding and left > 0:
            n = min(work.n_left, left)
            parts.append((work.index, n))
            left -= n
    return StepPlan(tuple(parts), budget - left)


def may_start(n_tokens: int, max_more: int, free_cells: int, others: bool) -> bool:
    """Whether a sequence of `n_tokens` known tokens and at most `max_more` new ones may take a free sequence id.

    Alone (`others` false) it only has to fit as it is.
    """
    headroom = min(HEADROOM, max_more) if others else 1
    return n_tokens + headroom <= free_cells


def n_to_send_back(planned: int, free_cells: int, held: Sequence[int]) -> int:
    """How many of the youngest sequences must give their cells back before `planned` more tokens fit.

    `held` are the cells of the running sequences, oldest first; the oldest one always stays.
    """
    n = 0
    for cells in reversed(held[1:]):
        if planned <= free_cells:
            break
        free_cells += cells
        n += 1
    return n
