"""What a step costs by its tokens, learned from steps that were computed; pure.

Steps are put into bins by their size; a bin keeps its last few times and stands for them with its medians, so that one
slow step (another program, a page fault) changes nothing; nor does a bin with few times that stands above larger ones,
since more tokens never take less time. Between bins prices are linear. Steps up to
`WIDEST_PARTIAL` tokens and wider ones are priced apart: where experts lie in VRAM in part, these are different ways to
compute, and the price jumps in between.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from daemon.hotset.controller import WIDEST_PARTIAL

_N = TypeVar("_N", int, float)
_KEPT = 9
"""Times of each bin: the median of fewer follows noise, of more it lags behind what has changed."""
_ENOUGH = 3
"""Times of a size before their median is trusted."""
FIRST_TRIED = 64
"""Tokens of the wide step that is tried first."""
_EXACT = 1e-9


def _middle(values: list[_N]) -> _N:
    """The median, of two in the middle the lower one: what goes wrong makes steps slower."""
    return sorted(values)[(len(values) - 1) // 2]


class Curve:
    """Seconds by tokens. `bin_of` says which sizes are one point of it."""

    def __init__(self, bin_of: Callable[[int], int]) -> None:
        self._bin_of = bin_of
        self._bins: dict[int, deque[tuple[int, float]]] = {}
        self._middles: dict[int, tuple[int, float]] = {}
        self._points: list[tuple[int, float]] = []

    def add(self, n: int, seconds: float) -> None:
        """A step of `n` tokens (at least 1) took so long."""
        place = self._bin_of(n)
        kept = self._bins.setdefault(place, deque(maxlen=_KEPT))
        kept.append((n, seconds))
        self._middles[place] = _middle([n for n, _ in kept]), _middle([one for _, one in kept])
        points, most = sorted(self._middles.values()), math.inf
        for i in reversed(range(len(points))):
            most = min(most, points[i][1])
            points[i] = points[i][0], most
        self._points = points

    def known(self, n: int) -> int:
        """Times that are kept of the bin of `n` tokens."""
        return len(self._bins.get(self._bin_of(n), ()))

    @property
    def sizes(self) -> list[int]:
        """Of the points, ascending."""
        return [n for n, _ in self._points]

    def __bool__(self) -> bool:
        """Whether there is anything to go by."""
        return bool(self._points)

    def price(self, n: float) -> float:
        """Seconds of a step of `n` tokens; 0 where nothing is known.

        From a single point the price is proportional; beyond the points the nearest two go on.
        """
        return max(0.0, self._line(n))

    def _line(self, n: float) -> float:
        points = self._points
        if len(points) < 2:
            return points[0][1] * n / points[0][0] if points else 0.0
        i = next((i for i, (at, _) in enumerate(points[1:-1], 1) if n <= at), len(points) - 1)
        (left, low), (right, high) = points[i - 1], points[i]
        slope = (high - low) / (right - left)
        return low + slope * (n - left)

    def widest(self, seconds: float, low: int, high: int) -> int:
        """The most tokens in [low, high] whose price is at most `seconds`; `low` - 1 if there are none."""
        if high < low:
            return low - 1
        sizes = np.arange(low, high + 1)
        fits = np.flatnonzero(self._prices(sizes) <= seconds + _EXACT)
        return low + int(fits[-1]) if len(fits) else low - 1

    def _prices(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """`price` of ascending sizes: linear between those at the points and at both ends."""
        ends = [float(sizes[0]), float(sizes[-1])]
        knots = sorted({*ends, *(at for at, _ in self._points if ends[0] < at < ends[1])})
        return np.maximum(0.0, np.interp(sizes, knots, [self._line(at) for at in knots]))


class StepPrices:
    """Prices of decode steps by their width, and of steps with a prompt in them by all their tokens."""

    def __init__(self) -> None:
        self._decode = Curve(lambda width: width)
        self._narrow, self._wide = Curve(int.bit_length), Curve(int.bit_length)
        self._seen: dict[int, int] = {}
        self._n_steps = 0

    def observe(self, n_decode: int, n_prompt: int, seconds: float) -> None:
        """A step with so many generated tokens and tokens of prompts took so long."""
        self._n_steps += 1
        n = n_decode + n_prompt
        if not n_prompt:
            self._decode.add(n_decode, seconds)
            self._seen[n_decode] = self._n_steps
        else:
            (self._narrow if n <= WIDEST_PARTIAL else self._wide).add(n, seconds)

    def decode(self, width: int) -> float:
        """Seconds of a step that computes a generated token for each of `width` sequences and no prompt."""
        return self._decode.price(width)

    def age(self, width: int) -> float:
        """Steps since one without a prompt and with this width was timed; infinite where too few were."""
        return self._n_steps - self._seen[width] if self._decode.known(width) >= _ENOUGH else math.inf

    def mixed(self, n: int, width: int) -> float:
        """Seconds of a step of `n` tokens, prompts among them, `width` of them generated."""
        return max(self._curve(n).price(n), self._decode.price(width))

    @property
    def knows_small(self) -> bool:
        """Whether a small wide step was timed often enough that one slow one does not decide."""
        return self._wide.known(FIRST_TRIED) >= _ENOUGH

    @property
    def untried(self) -> int:
        """Tokens of a wide step that would tell what wide ones cost; 0 where two sizes are known, which is enough."""
        sizes = self._wide.sizes
        if len(sizes) > 1:
            return 0
        if not sizes:
            return FIRST_TRIED
        smaller = min(FIRST_TRIED, sizes[0] // 2)
        return smaller if smaller > WIDEST_PARTIAL else 2 * sizes[0]

    def widest(self, seconds: float, width: int, most: int) -> tuple[int, int]:
        """The largest narrow and the largest wide step within `seconds`, in tokens, prompts among them.

        0 where there is none. A wide one is told only where a narrow one cannot take all of `most`.
        """
        low = width + 1
        narrow = self._curve(low if low <= WIDEST_PARTIAL else WIDEST_PARTIAL).widest(
            seconds, low, min(most, WIDEST_PARTIAL)
        )
        wide_low = max(low, WIDEST_PARTIAL + 1)
        wide = self._curve(wide_low).widest(seconds, wide_low, most)
        return (narrow if narrow >= low else 0), (wide if wide >= wide_low else 0)

    def _curve(self, n: int) -> Curve:
        """What is known best: steps of that kind, else those of the other kind, else decode steps."""
        own, other = (self._narrow, self._wide) if n <= WIDEST_PARTIAL else (self._wide, self._narrow)
        return own or other or self._decode
