"""How soon a policy is as good as it gets after the topic changed. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WINDOW = 16
"""Tokens over which a hit rate is taken: of fewer it is mostly noise."""
ENOUGH = 0.9


def tokens_to_90(hits: npt.NDArray[np.int64], segments: Sequence[slice]) -> list[int]:
    """For each segment but the first, the tokens until 90 % of its steady hit rate is reached.

    `hits` [n_tokens] are those of each token. Steady is the second half of the segment. Reached is the end of the first
    `WINDOW` tokens of the segment with so many hits, so `WINDOW` is the least; where there are none, the segment's.
    Segments shorter than two windows tell nothing.
    """
    long_enough = [segment for segment in segments[1:] if segment.stop - segment.start >= 2 * WINDOW]
    return [_reached(hits[segment]) for segment in long_enough]


def _reached(hits: npt.NDArray[np.int64]) -> int:
    steady = hits[len(hits) // 2 :].mean()
    windows = np.convolve(hits, np.ones(WINDOW), "valid") / WINDOW
    found = np.flatnonzero(windows >= ENOUGH * steady)
    return int(found[0]) + WINDOW if len(found) else len(hits)
