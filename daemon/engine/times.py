"""Where the time of the last steps went."""

from __future__ import annotations

import numpy as np

from daemon.messages import StepTimes

_KEPT = 2048


class TimeLog:
    """A ring of the last `_KEPT` steps: total, decode and sampling seconds, and tokens sampled."""

    def __init__(self) -> None:
        self._ring = np.zeros((_KEPT, 4))
        self.n_steps = 0

    def add(self, total: float, decode: float, sample: float, n_sampled: int) -> None:
        """Record one step; times in seconds."""
        self._ring[self.n_steps % _KEPT] = (total, decode, sample, n_sampled)
        self.n_steps += 1

    def summary(self) -> StepTimes | None:
        """Percentiles over the ring, or None before the first step."""
        if not self.n_steps:
            return None
        rows = self._ring[: min(self.n_steps, _KEPT)] * (1e3, 1e3, 1e3, 1)
        total, decode, sample, n_sampled = rows.T
        outside = np.percentile(total - decode - sample, (50, 99))
        return StepTimes(
            n_steps=len(rows),
            step_p50=float(np.median(total)),
            decode_p50=float(np.median(decode)),
            sample_p50=float(np.median(sample)),
            outside_p50=float(outside[0]),
            outside_p99=float(outside[1]),
            sample_per_token=float(sample.sum() / max(1.0, n_sampled.sum())),
        )
