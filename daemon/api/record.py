"""What is remembered of one request for its log line and its metrics: ids, counts and times, never text."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic
from typing import Any

from daemon.api.answer import Answer
from daemon.api.standing import Standing, decide
from daemon.messages import Priority


@dataclass
class RequestRecord:
    """Filled by the handlers. `outcome` None means: as the status says."""

    id: str
    started: float
    client: str = ""
    ceiling: Priority | None = None
    """The class of the key, where it has one."""
    priority: Priority | None = None
    """The class of the request, once it is known."""
    outcome: str | None = None
    code: str | None = None
    n_prompt: int = 0
    n_cached: int = 0
    n_predicted: int = 0
    queue_ms: float | None = None
    ttft_ms: float | None = None

    def add(self, answer: Answer) -> None:
        """Count an answer that is done."""
        timings = answer.timings()
        self.n_prompt += timings["cache_n"] + timings["prompt_n"]
        self.n_cached += timings["cache_n"]
        self.n_predicted += timings["predicted_n"]
        self.queue_ms = max(self.queue_ms or 0.0, timings["queue_ms"])
        if timings["ttft_ms"] is not None:
            self.ttft_ms = min(self.ttft_ms or timings["ttft_ms"], timings["ttft_ms"])

    def standing(self, wanted: Priority | None, replaces: str = "") -> Standing:
        """Who asks, once it is known which class the request wants."""
        standing = decide(self.client, wanted, self.ceiling, replaces)
        self.priority = standing.priority
        return standing

    def fields(self) -> dict[str, Any]:
        """For the log line; what is unknown is left out."""
        values = {
            "id": self.id,
            "client": self.client or None,
            "priority": self.priority,
            "code": self.code,
            "n_prompt": self.n_prompt or None,
            "n_cached": self.n_cached or None,
            "n_predicted": self.n_predicted or None,
            "queue_ms": self.queue_ms,
            "ttft_ms": self.ttft_ms,
            "total_ms": round((monotonic() - self.started) * 1000, 1),
        }
        return {name: value for name, value in values.items() if value is not None}


_CURRENT: ContextVar[RequestRecord] = ContextVar("hotset_record")
"""aiohttp runs each request in a task, and so in a context, of its own."""


def start_record(request_id: str) -> RequestRecord:
    """A new record for the request that this task handles."""
    record = RequestRecord(id=request_id, started=monotonic())
    _CURRENT.set(record)
    return record


def current_record() -> RequestRecord:
    """The record that the first middleware started."""
    return _CURRENT.get()


def current_id() -> str | None:
    """The request's id; None where aiohttp answers before any middleware (an unknown `Expect`)."""
    record = _CURRENT.get(None)
    return record.id if record is not None else None
