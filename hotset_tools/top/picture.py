"""What is shown, made of two looks at the service; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hotset_tools.top.polling import Reading

GENERATED = "hotset_generated_tokens_total"
MOVES = "hotset_expert_swaps_total"
UPLOADED = "hotset_expert_upload_bytes_total"
HITS, MISSES = "hotset_expert_hits_total", "hotset_expert_misses_total"


@dataclass(frozen=True)
class Picture:
    """The service at `url` as `now` says, and the look before that, for what is counted by the second."""

    url: str
    now: Reading
    before: Reading | None = None

    @property
    def good(self) -> bool:
        """Whether the service is ready and said everything."""
        return self.now.state == "ready" and self.now.residency is not None

    def rate(self, name: str) -> float | None:
        """What came to a counter, by the second; None without two looks at the same counter."""
        if self.before is None or self.now.at <= self.before.at:
            return None
        new, old = self.now.metrics.total(name), self.before.metrics.total(name)
        if new is None or old is None or new < old:  # another service has taken its place
            return None
        return (new - old) / (self.now.at - self.before.at)

    def as_json(self) -> dict[str, Any]:
        """As scripts read it; null is what is not known."""
        now = self.now
        metrics = now.metrics
        model = metrics.labels("hotset_model_info")
        return {
            "url": self.url,
            "state": now.state,
            "reason": now.reason,
            "progress": now.progress,
            "version": metrics.labels("hotset_build_info").get("version"),
            "model": dict(model) or None,
            "running": metrics.total("hotset_running"),
            "waiting": metrics.total("hotset_waiting"),
            "sequences": None if now.slots is None else {"busy": sum(now.slots), "total": len(now.slots)},
            "tokens_per_second": self.rate(GENERATED),
            "moves_per_second": self.rate(MOVES),
            "upload_bytes_per_second": self.rate(UPLOADED),
            "counted": {
                "generated_tokens": metrics.total(GENERATED),
                "hits": metrics.total(HITS),
                "misses": metrics.total(MISSES),
                "moves": metrics.total(MOVES),
                "uploaded_bytes": metrics.total(UPLOADED),
            },
            "residency": None if now.residency is None else now.residency.model_dump(),
        }
