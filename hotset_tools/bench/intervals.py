"""Medians with intervals, of few paired measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 4000


@dataclass(frozen=True)
class Estimate:
    """A median and its 95 % interval."""

    median: float
    low: float
    high: float


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """The median with its percentile bootstrap interval (Efron, 1979).

    Raises:
        ValueError: there is nothing to estimate.
    """
    if not values:
        raise ValueError("an estimate needs at least one value")
    drawn = np.random.default_rng(seed).choice(np.asarray(values, float), size=(_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return Estimate(statistics.median(values), float(low), float(high))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """How many times faster ours is: the median of their seconds over ours, round by round.

    What disturbs the machine for longer than a round meets both sides of a pair.
    """
    return estimate([there / here for here, there in zip(ours, theirs, strict=True)])
