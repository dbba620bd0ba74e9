"""Which prompts begin alike; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

LEAST_SHARED = 64
"""Tokens of a common beginning for which it is worth to wait for another sequence."""

Tokens = Sequence[int]


class Match(NamedTuple):
    """The best of several sequences to share a beginning with, by its place among them, and how much of it."""

    place: int
    n_tokens: int


def common_beginning(first: Tokens, second: Tokens) -> int:
    """How many tokens two sequences have in common from their beginning on; compares slices, which C does."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def best_match(tokens: Tokens, others: Iterable[Tokens]) -> Match | None:
    """With whom to share, or None where no beginning is long enough; the first of equals.

    The last token is never shared: it must be computed for its logits.
    """
    best = None
    for place, other in enumerate(others):
        if other[:LEAST_SHARED] != tokens[:LEAST_SHARED]:
            continue
        n = min(common_beginning(tokens, other), len(tokens) - 1)
        if n >= LEAST_SHARED and (best is None or n > best.n_tokens):
            best = Match(place, n)
    return best
