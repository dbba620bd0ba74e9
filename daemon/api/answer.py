"""One answer on its way: what came of its ticket, when, and what it adds up to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any, Literal

from daemon import errors
from daemon.api.plan import Planned
from daemon.api.services import Ticket
from daemon.errors import EngineFailed, HotsetError
from daemon.messages import Done, Failed, Tokens
from daemon.metrics import Metrics

Stage = Literal["queued", "prefill", "decode"]


class Answer:
    """One choice of a response.

    `started` is when it was queued, `first` when its first token came, both in seconds of a monotonic clock.
    """

    def __init__(
        self, index: int, planned: Planned, ticket: Ticket, metrics: Metrics, clock: Callable[[], float] = monotonic
    ) -> None:
        self.index = index
        self.planned = planned
        self.ticket = ticket
        self.started = clock()
        self.first: float | None = None
        self.n_tokens = 0
        self.done: Done | None = None
        self._settled = False
        self._last = self.started
        self._clock = clock
        self._metrics = metrics

    @property
    def stage(self) -> Stage:
        """Where it is, or where it was given up."""
        if self.first is not None:
            return "decode"
        return "prefill" if self.ticket.begun else "queued"

    async def follow(self, sink: Callable[[Answer, Tokens], Awaitable[None]]) -> Done:
        """Hand every Tokens to `sink`; return the Done. Leaving early cancels the ticket.

        Raises:
            HotsetError: the engine failed this request.
        """
        try:
            async for event in self.ticket:
                if isinstance(event, Tokens):
                    self._count(event)
                    await sink(self, event)
                elif isinstance(event, Done):
                    self._finish(event)
                    return event
                else:
                    self._settled = True
                    raise failure(event)
        finally:
            self.abandon()
        raise EngineFailed("The engine ended the answer without a result.")

    def abandon(self) -> None:
        """Give the ticket up unless it is over; may be called again."""
        if self.done is not None or self._settled:
            return
        self._settled = True
        self._metrics.cancelled(self.stage)
        self.ticket.cancel()

    def _count(self, event: Tokens) -> None:
        now = self._clock()
        if self.first is None:
            self.first = now
            self._metrics.first_tokens(now - self.started, len(event.tokens))
        else:
            self._metrics.next_tokens(now - self._last, len(event.tokens))
        self._last = now
        self.n_tokens += len(event.tokens)

    def _finish(self, done: Done) -> None:
        self.done = done
        if done.finish_reason == "cancelled":
            self._metrics.cancelled(self.stage)
        if not self.ticket.begun:
            return
        priority = self.planned.submit.priority
        self._metrics.answered(done, priority, self.queue_ms / 1000, self.n_tokens)

    @property
    def queue_ms(self) -> float:
        """Time before the engine read the first token of the prompt."""
        assert self.done is not None
        seen = (self.first if self.first is not None else self._clock()) - self.started
        return max(self.done.wait_ms, seen * 1000 - self.done.prompt_ms, 0.0)

    def timings(self) -> dict[str, Any]:
        """The `timings` object; `max_tokens_clamped` is the limit that applied when the client asked for more."""
        done = self.done
        assert done is not None
        computed = done.n_prompt - done.n_cached
        return {
            "cache_n": done.n_cached,
            "prompt_n": computed,
            "prompt_ms": round(done.prompt_ms, 3),
            "prompt_per_second": rate(computed, done.prompt_ms),
            "predicted_n": done.n_predicted,
            "predicted_ms": round(done.predicted_ms, 3),
            "predicted_per_second": rate(done.n_predicted, done.predicted_ms),
            "queue_ms": round(self.queue_ms, 3),
            "ttft_ms": None if self.first is None else round((self.first - self.started) * 1000, 3),
            "expert_hit_rate": hit_rate(done),
            "max_tokens_clamped": self.planned.clamped,
            "cancelled": done.finish_reason == "cancelled",
            "priority": self.planned.submit.priority,
        }


def hit_rate(done: Done) -> float | None:
    """Share of the answer's selections of experts that were in VRAM, 0-1; None where that is not known."""
    return round(done.expert_hits / done.expert_selections, 4) if done.expert_selections else None


def rate(count: int, milliseconds: float) -> float:
    """Per second; 0 where no time passed."""
    return round(count / milliseconds * 1000, 3) if milliseconds > 0 else 0.0


def usage(answers: list[Answer]) -> dict[str, Any]:
    """The `usage` object: each prompt counts once, however many answers continue it."""
    prompts = {answer.planned.prompt_index: answer.done for answer in reversed(answers)}
    n_prompt = sum(done.n_prompt for done in prompts.values() if done)
    n_cached = sum(done.n_cached for done in prompts.values() if done)
    n_predicted = sum(answer.done.n_predicted for answer in answers if answer.done)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_predicted,
        "total_tokens": n_prompt + n_predicted,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }


def finish_reason(done: Done) -> str:
    """OpenAI's word; an answer that was cancelled from elsewhere says "stop", and `timings.cancelled`."""
    return "length" if done.finish_reason == "length" else "stop"


async def follow_all(
    answers: list[Answer],
    sink: Callable[[Answer, Tokens], Awaitable[None]],
    ended: Callable[[Answer, Done], Awaitable[None]],
) -> None:
    """Follow all answers at once, telling `ended` as each is done; the first failure gives the others up.

    Raises:
        HotsetError: the first failure.
    """

    async def one(answer: Answer) -> None:
        await ended(answer, await answer.follow(sink))

    if len(answers) == 1:
        await one(answers[0])
        return
    try:
        async with asyncio.TaskGroup() as group:
            for answer in answers:
                group.create_task(one(answer))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def failure(failed: Failed) -> HotsetError:
    """The error that a Failed stands for."""
    error = HotsetError(failed.message)
    kind = _KINDS.get(failed.code, EngineFailed)
    error.status, error.code, error.type = kind.status, failed.code, kind.type
    return error


_KINDS: dict[str, type[HotsetError]] = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HotsetError)
}
