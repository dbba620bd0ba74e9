"""What a budget that changes did to the sequences that decode, and when memory followed. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hotset_tools.bench.rows import BudgetChange, BudgetChanges

SEEN = 0.9
"""The part of a change of memory that counts as all of it: others use the device too."""

Sample = Sequence[float]
"""Seconds, bytes that the driver says are free (0: it does not tell), bytes of slots."""


def judge(reply: Mapping[str, Any], budgets: Sequence[str], n_sequences: int, threads: int) -> BudgetChanges:
    """A worker's reply to `change_budgets`: `ends` of steps, `asked` times of `budgets[1:]`, `memory` samples.

    Raises:
        ValueError: a budget had no step, or there were no samples of memory before or after it.
    """
    ends, asked = list(reply["ends"]), list(reply["asked"])
    parts = [_between(ends, start, end) for start, end in zip([0.0, *asked], [*asked, float("inf")], strict=True)]
    if len(asked) != len(budgets) - 1 or not all(parts) or len(parts[0]) < 2:
        raise ValueError("there are no steps with every budget")
    changes = []
    for number, at in enumerate(asked):
        until = asked[number + 1] if number + 1 < len(asked) else float("inf")
        steps = [parts[number][-1], *parts[number + 1]]
        changes.append(
            BudgetChange(
                before=budgets[number],
                after=budgets[number + 1],
                longest_gap_ms=1e3 * max(_gaps(steps)),
                tokens=(len(parts[number + 1]),) * n_sequences,
                **_memory(reply["memory"], at, until),
            )
        )
    quiet = list(_gaps(parts[0]))
    return BudgetChanges(
        sequences=n_sequences,
        threads=threads,
        usual_gap_ms=1e3 * statistics.median(quiet),
        quiet_gap_ms=1e3 * max(quiet),
        changes=tuple(changes),
    )


def _between(ends: Sequence[float], start: float, end: float) -> list[float]:
    return [at for at in ends if start < at <= end]


def _gaps(ends: Sequence[float]) -> Iterator[float]:
    return (later - earlier for earlier, later in itertools.pairwise(ends))


def _memory(samples: Sequence[Sample], at: float, until: float) -> dict[str, Any]:
    """Memory as it was when a change was asked for, and at its end."""
    before = [one for one in samples if one[0] <= at]
    after = [one for one in samples if at < one[0] <= until]
    if not before or not after:
        raise ValueError("memory was not looked at with every budget")
    (_, free, slots), last = before[-1], after[-1]
    change = last[2] - slots
    times = [one[0] - at for one in after]
    told = free > 0
    return {
        "slot_bytes": (int(slots), int(last[2])),
        "free_bytes": (int(free), int(last[1])),
        "seconds_to_slots": _followed(times, [one[2] - slots for one in after], change),
        "seconds_to_memory": _followed(times, [free - one[1] for one in after], change) if told else None,
    }


def _followed(times: Sequence[float], grown: Sequence[float], change: float) -> float | None:
    """When what has `grown` is most of the change, and stays so to the end."""
    if not change or grown[-1] / change < SEEN:
        return None
    less = (number for number in reversed(range(len(grown))) if grown[number] / change < SEEN)
    return times[next(less, -1) + 1]
