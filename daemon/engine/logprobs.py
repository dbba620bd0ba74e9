"""Log probabilities as messages carry them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from daemon.engine.ports import VocabPort
from daemon.messages import Candidate, TokenLogprob


def log_softmax_top(logits: npt.NDArray[np.float32], chosen: int, n_top: int) -> tuple[float, list[tuple[int, float]]]:
    """The natural-log probability of `chosen`, and the `n_top` most likely (token, log probability), best first.

    `logits` is [n_vocab] and stays as it is; -inf is allowed, at least one must be finite.
    """
    shifted = logits.astype(np.float64) - float(logits.max())
    shifted -= np.log(np.exp(shifted).sum())
    n_top = min(n_top, len(shifted))
    top = np.argpartition(shifted, -n_top)[-n_top:].tolist() if n_top else []
    best = sorted(((i, float(shifted[i])) for i in top), key=lambda item: (-item[1], item[0]))
    return float(shifted[chosen]), best


def token_logprob(logits: npt.NDArray[np.float32], token: int, n_top: int, vocab: VocabPort) -> TokenLogprob:
    """The chosen token and the `n_top` most likely ones, before any sampler touched the logits."""
    own, best = log_softmax_top(logits, token, n_top)
    return TokenLogprob(
        token=token,
        bytes=list(vocab.piece(token)),
        logprob=_finite(own),
        top=[Candidate(token=i, bytes=list(vocab.piece(i)), logprob=_finite(value)) for i, value in best],
    )


def _finite(value: float) -> float:
    """JSON has no -inf; OpenAI's clients know -9999 as "impossible"."""
    return max(value, -9999.0)
