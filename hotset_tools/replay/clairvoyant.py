"""The best hit rate that any placement could have, knowing every later selection. Pure.

Belady's MIN (1966) per layer, with bypass: an expert that was missed need not get a slot. All experts of a token are
looked up before anything changes, moves cost nothing, slots are empty at first, and an expert can only come in when it
is chosen. A hit is then an expert that was kept since it was last chosen, so a plan is a choice of such spans, of which
at most `slots` overlap anywhere. Dropping the span that ends last whenever there are too many is optimal (Carlisle and
Lloyd, "On the k-coloring of intervals", 1995), and is what MIN does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotset_tools.replay.meter import Tell, unheard

Ids = npt.NDArray[np.uint16]
Slots = npt.NDArray[np.int64]


def clairvoyant(
    ids: Ids, n_expert: int, slots: Slots, tell: Tell = unheard
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Hits [n_tokens, cases] and uploads [cases] with `slots` [cases, layers], `ids` [n_tokens, layers, top_k]."""
    n_tokens, n_layers, _ = ids.shape
    layers = np.arange(n_layers)[:, None]
    following, never = next_uses(ids, n_expert)
    upcoming = np.full((n_layers, n_expert), never)
    resident = np.zeros((len(slots), n_layers, n_expert), bool)
    hits = np.zeros((n_tokens, len(slots)), np.int64)
    uploads = np.zeros(len(slots), np.int64)
    last = np.maximum(slots - 1, 0)[..., None]
    for token in range(n_tokens):
        chosen = ids[token]
        hits[token] = resident[:, layers, chosen].sum(axis=(1, 2))
        upcoming[layers, chosen] = following[token]
        kept = resident.copy()
        kept[:, layers, chosen] = True
        when = np.where(kept, upcoming, never)
        bound = np.take_along_axis(np.sort(when, axis=-1), last, axis=-1)
        kept = (when <= bound) & (when < never) & (slots[..., None] > 0)
        uploads += (kept & ~resident).sum(axis=(1, 2))
        resident = kept
        tell(1 / n_tokens)
    return hits, uploads


def next_uses(ids: Ids, n_expert: int) -> tuple[npt.NDArray[np.int64], int]:
    """When the same layer chooses each selected expert again [n_tokens, layers, top_k], and what stands for never.

    Times are unique within a layer: token x top_k + place.
    """
    n_tokens, n_layers, top_k = ids.shape
    layers, places, never = np.arange(n_layers)[:, None], np.arange(top_k), n_tokens * top_k
    upcoming = np.full((n_layers, n_expert), never)
    following = np.empty(ids.shape, np.int64)
    for token in reversed(range(n_tokens)):
        following[token] = upcoming[layers, ids[token]]
        upcoming[layers, ids[token]] = token * top_k + places
    return following, never
