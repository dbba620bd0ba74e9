"""Numbers that say how far two computations of the same rows are apart; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Distance:
    """Of computed rows from the reference's; `kl` in nats, reference first.

    `kl_unflipped` leaves out rows whose router chose otherwise in some layer, and is 0 where all did; `greedy` is the
    share of rows whose likeliest token is the same. Whatever is not finite is infinitely far away.
    """

    n_rows: int
    identical: bool
    max_abs: float
    kl_mean: float
    kl_max: float
    kl_unflipped: float
    greedy: float
    n_flipped: int

    @property
    def flips(self) -> float:
        """The share of rows whose router chose otherwise."""
        return self.n_flipped / self.n_rows


def distance(reference: Logits, other: Logits, flipped: Mask) -> Distance:
    """Compare logits [n_rows, n_vocab] row by row; `flipped` [n_rows] says which rows were routed otherwise."""
    divergence = kl(reference, other)
    unflipped = divergence[~flipped]
    with np.errstate(invalid="ignore"):
        pairs = zip(reference, other, strict=True)  # row by row, as below
        difference = float(np.max([np.abs(a.astype(np.float64) - b).max() for a, b in pairs]))
    return Distance(
        n_rows=len(reference),
        identical=bool(np.array_equal(reference, other)),
        max_abs=difference if np.isfinite(difference) else float("inf"),
        kl_mean=float(divergence.mean()),
        kl_max=float(divergence.max()),
        kl_unflipped=float(unflipped.max()) if len(unflipped) else 0.0,
        greedy=float((reference.argmax(1) == other.argmax(1)).mean()),
        n_flipped=int(flipped.sum()),
    )


def kl(reference: Logits, other: Logits) -> npt.NDArray[np.float64]:
    """Kullback-Leibler divergence KL(reference || other) of the softmax of each row, in nats, never negative.

    A row with something that is not finite in either is at infinity.
    """
    pairs = zip(reference, other, strict=True)  # one row at a time: vocabularies are large
    return np.array([_row_kl(a, b) for a, b in pairs], np.float64)


def flipped(reference: Sequence[Ids], other: Sequence[Ids], n_rows: int) -> Mask:
    """Rows for which the router chose another set of experts in some layer.

    One entry [n_rows, n_used] for each layer; the order within a row does not count, since equal experts with equal
    weights give equal sums.
    """
    out = np.zeros(n_rows, np.bool_)
    for a, b in zip(reference, other, strict=True):
        out |= (np.sort(a, axis=1) != np.sort(b, axis=1)).any(axis=1)
    return out


def _row_kl(reference: Logits, other: Logits) -> float:
    a, b = _log_softmax(reference), _log_softmax(other)
    if a is None or b is None:
        return float("inf")
    # Rounding leaves something around -1e-17 where both are the same.
    return max(0.0, float(np.dot(np.exp(a), a - b)))


def _log_softmax(row: Logits) -> npt.NDArray[np.float64] | None:
    if not np.isfinite(row).all():
        return None
    values = row.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    return values
