"""What the policy is compared with: rankings of a layer's experts whose first ones have the slots. Pure.

Each rival is free to move as much as it likes before every token, which no machine can; uploads tell how much that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from statistics import fmean

import numpy as np
import numpy.typing as npt

from hotset_tools.replay.clairvoyant import Ids, Slots

Scores = npt.NDArray[np.int64]
"""Of one layer before each token, [n_tokens, n_expert]; the highest have slots, none has one that scores 0."""
WINDOWS = (16, 64, 256)


@dataclass(frozen=True)
class Played:
    """What came of a policy: hits [n_tokens, cases] of all layers together, uploads [cases]."""

    hits: npt.NDArray[np.int64]
    uploads: npt.NDArray[np.int64]


def last_use(ids: Ids, n_expert: int) -> Scores:
    """LRU: the experts that were chosen last. `ids` [n_tokens, top_k]; of one token's the first place counts more."""
    n_tokens, top_k = ids.shape
    used = np.zeros((n_tokens + 1, n_expert), np.int64)
    times = np.arange(n_tokens)[:, None] * top_k + np.arange(top_k, 0, -1)
    used[np.arange(1, n_tokens + 1)[:, None], ids] = times
    latest: Scores = np.maximum.accumulate(used, axis=0)[:-1]
    return latest


def frequency(ids: Ids, n_expert: int, window: int = 0) -> Scores:
    """LFU: the most chosen so far, or within the last `window` tokens; of equal ones the last used."""
    n_tokens, top_k = ids.shape
    picked = np.zeros((n_tokens + 1, n_expert), np.int64)
    picked[np.arange(1, n_tokens + 1)[:, None], ids] = 1
    counts = np.cumsum(picked, axis=0)[:-1]
    if window:
        counts[window:] -= counts[:-window].copy()
    scores: Scores = counts * (n_tokens * top_k + 1) + np.where(counts, last_use(ids, n_expert), 0)
    return scores


RIVALS: Mapping[str, Callable[[Ids, int], Scores]] = {
    "lru": last_use,
    "lfu": frequency,
    **{f"window-{window}": partial(frequency, window=window) for window in WINDOWS},
}


def play(score: Callable[[Ids, int], Scores], ids: Ids, n_expert: Sequence[int], slots: Slots) -> Played:
    """Play a ranking; `ids` [n_tokens, layers, top_k], `slots` [cases, layers]."""
    hits = np.zeros((len(ids), len(slots)), np.int64)
    uploads = np.zeros(len(slots), np.int64)
    tokens = np.arange(len(ids))[:, None]
    for layer, count in enumerate(n_expert):
        scores = score(ids[:, layer], count)
        ranks = np.empty(scores.shape, np.int64)
        np.put_along_axis(ranks, np.argsort(-scores, axis=1, kind="stable"), np.arange(count)[None], axis=1)
        ranks[scores == 0] = count
        for case, most in enumerate(slots[:, layer]):
            resident = ranks < most
            hits[:, case] += resident[tokens, ids[:, layer]].sum(axis=1)
            uploads[case] += int(resident[0].sum() + (resident[1:] & ~resident[:-1]).sum())
    return Played(hits, uploads)


def static(ids: Ids, n_expert: Sequence[int], slots: Slots) -> list[float]:
    """Hit rates of the experts that the whole trace uses most, [cases]: what no list can know beforehand."""
    return [_coverage(counts(ids, n_expert), counts(ids, n_expert), most) for most in slots]


def frozen(ids: Ids, segments: Sequence[slice], n_expert: Sequence[int], slots: Slots) -> list[float]:
    """Hit rates of lists learned on one of several segments and serving another: the mean of all pairs, [cases]."""
    learned = [counts(ids[segment], n_expert) for segment in segments]
    return [fmean(_coverage(one, other, most) for one, other in permutations(learned, 2)) for most in slots]


def counts(ids: Ids, n_expert: Sequence[int]) -> list[npt.NDArray[np.int64]]:
    """Selections of each expert, for every layer."""
    return [np.bincount(ids[:, layer].ravel(), minlength=count) for layer, count in enumerate(n_expert)]


def _coverage(ranked_by: list[Scores], served: list[Scores], slots: npt.NDArray[np.int64]) -> float:
    hits = sum(
        int(traffic[np.argsort(-heat, kind="stable")[:most]].sum())
        for heat, traffic, most in zip(ranked_by, served, slots, strict=True)
    )
    return hits / sum(int(traffic.sum()) for traffic in served)
