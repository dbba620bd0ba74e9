"""What the policy is compared with: rankings of a layer's experts whose first ones have the slots. Pure.

Each rival is free to move as much as it likes before every token, which no machine can; uploads tell how much that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from hotset_tools.replay.clairvoyant import Ids, Slots
from hotset_tools.replay.meter import Tell, unheard

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


def play(
    score: Callable[[Ids, int], Scores], ids: Ids, n_expert: Sequence[int], slots: Slots, tell: Tell = unheard
) -> Played:
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
        tell(1 / len(n_expert))
    return Played(hits, uploads)


def static(ids: Ids, n_expert: Sequence[int], slots: Slots) -> list[float]:
    """Hit rates of the experts that the whole trace uses most, [cases]: what no list can know beforehand."""
    whole = _counts(ids, n_expert)
    total = int(whole.sum())
    return [int(whole[_listed(whole, most)].sum()) / total for most in slots]


def frozen(ids: Ids, segments: Sequence[slice], n_expert: Sequence[int], slots: Slots) -> list[float]:
    """Hit rates of lists learned on one of several segments and serving another: the mean of all pairs, [cases].

    Pairs are not gone through one by one, a trace may have thousands of segments: a list serves the others what it
    serves of all their shares together, less its own.
    """
    together = sum((_shares(ids[segment], n_expert) for segment in segments), np.zeros(1))
    rates = np.zeros(len(slots))
    for segment in segments:
        own = _shares(ids[segment], n_expert)
        rates += [float((together - own)[_listed(own, most)].sum()) for most in slots]
    return [float(rate) for rate in rates / (len(segments) * (len(segments) - 1))]


def _shares(ids: Ids, n_expert: Sequence[int]) -> npt.NDArray[np.float64]:
    """The part of all selections that falls on each expert, [layers, n_expert of the largest]."""
    found = _counts(ids, n_expert)
    shares: npt.NDArray[np.float64] = found / found.sum()
    return shares


def _counts(ids: Ids, n_expert: Sequence[int]) -> npt.NDArray[np.int64]:
    """Selections of each expert, [layers, n_expert of the largest]."""
    most = max(n_expert)
    return np.stack([np.bincount(ids[:, layer].ravel(), minlength=most) for layer in range(len(n_expert))])


def _listed(
    used: npt.NDArray[np.float64] | npt.NDArray[np.int64], slots: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Whether an expert is among the most used ones that have the slots of its layer, [layers, n_expert]."""
    ranks = np.argsort(np.argsort(-used, axis=1, kind="stable"), axis=1)
    listed: npt.NDArray[np.bool_] = ranks < slots[:, None]
    return listed
