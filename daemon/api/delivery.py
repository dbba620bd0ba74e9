"""From planned answers to a response: streamed or whole, cancelled when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from aiohttp import web

from daemon.api.answer import Answer, follow_all
from daemon.api.draft import Draft
from daemon.api.errors import error_object
from daemon.api.gathered import Gathered
from daemon.api.outlet import Outlet, StreamShape
from daemon.api.record import RequestRecord, current_record
from daemon.api.services import Services
from daemon.api.sse import PING, EventStream, event
from daemon.errors import AnswerTooLarge, HotsetError
from daemon.messages import Done, Submit, Tokens

LARGE = 1024 * 1024
"""Bytes of tokens from which a response is written in a thread: millions of numbers take a second, in which streams go
on."""

log = structlog.get_logger("hotset.api")


class Collected:
    """A whole answer: everything that came, merged."""

    def __init__(self, answer: Answer, gathered: Gathered) -> None:
        done = answer.done
        assert done is not None
        self.answer = answer
        self.done: Done = done
        gathered.add(Tokens(id=done.id, tokens=[], text=done.text))
        self.tokens = gathered.merged(done.id)


async def submit(draft: Draft, services: Services) -> list[Answer]:
    """Queue all answers, or none.

    Raises:
        QueueFull, ModelLoading: from admission.
        HotsetError: from the draft.
    """
    answers: list[Answer] = []

    def again(index: int) -> Callable[[], Awaitable[Submit]]:
        async def submit() -> Submit:
            answers[index].planned = (await draft.planned())[index]
            return answers[index].planned.submit

        return submit

    try:
        # Nothing may be awaited between the two: the tokens are those of the model that is served now.
        for index, item in enumerate(await draft.planned()):
            ticket = services.admission.submit(item.submit, again=again(index), replaces=item.replaces)
            answers.append(Answer(index, item, ticket, services.metrics))
    except HotsetError:
        for answer in answers:
            answer.abandon()
        raise
    return answers


async def deliver_whole(
    answers: list[Answer], build: Callable[[list[Collected]], Any], services: Services
) -> web.Response:
    """Wait for every answer and build one JSON body.

    Raises:
        AnswerTooLarge: the answers take more memory than they may.
        HotsetError: one of them failed.
    """
    gathered = {answer: Gathered() for answer in answers}
    taken = 0

    async def collect(answer: Answer, tokens: Tokens) -> None:
        nonlocal taken
        taken += gathered[answer].add(tokens)
        _check_size(taken, services.config.http.max_answer_mib)

    async def ended(answer: Answer, done: Done) -> None:
        current_record().add(answer)

    def body() -> bytes:
        return json.dumps(build([Collected(answer, gathered[answer]) for answer in answers])).encode()

    try:
        await follow_all(answers, collect, ended)
    finally:
        _abandon(answers)
    written = body() if taken < LARGE else await asyncio.to_thread(body)
    return web.Response(body=written, content_type="application/json", charset="utf-8")


def _check_size(taken: int, max_mib: int) -> None:
    if taken > max_mib * 1024 * 1024:
        raise AnswerTooLarge(
            f"The answer has grown beyond {max_mib} MiB of memory (http.max_answer_mib); ask for a stream, or for "
            "fewer alternatives to its tokens."
        )


async def deliver_stream(
    request: web.Request, answers: list[Answer], shape: StreamShape, services: Services
) -> web.StreamResponse:
    """Stream every answer; a failure becomes one error event and the end of the stream."""
    record = current_record()
    stream = EventStream(request, lambda: services.config.http)
    try:
        async with stream:
            await _stream_answers(stream, answers, shape, record)
            return await stream.finish()
    except (asyncio.CancelledError, ConnectionError) as error:
        record.outcome = "slow_reader" if stream.too_slow else "cancelled"
        if isinstance(error, asyncio.CancelledError):
            raise
        return stream.response
    finally:
        _abandon(answers)


async def _stream_answers(
    stream: EventStream, answers: list[Answer], shape: StreamShape, record: RequestRecord
) -> None:
    outlet = Outlet(stream, shape)

    async def ended(answer: Answer, done: Done) -> None:
        record.add(answer)
        await outlet.end(answer, done)

    await outlet.open(answers)
    stream.comment = lambda: _comment(answers)
    if _place(answers) is not None:
        await stream.send(stream.comment())
    try:
        await follow_all(answers, outlet.put, ended)
    except HotsetError as error:
        await _fail(stream, record, error)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        log.exception("stream failed", id=record.id)
        await _fail(stream, record, HotsetError("The server failed while answering."))
    else:
        await stream.caught_up()
        await stream.send(shape.closing(answers))


def _place(answers: list[Answer]) -> int | None:
    """0-based place in the queue of the one that is next; None where none waits."""
    return min((place for answer in answers if (place := answer.ticket.position) is not None), default=None)


def _comment(answers: list[Answer]) -> bytes:
    """For people: the first place is 1."""
    place = _place(answers)
    return PING if place is None else f": queued, position {place + 1}\n\n".encode()


async def _fail(stream: EventStream, record: RequestRecord, error: HotsetError) -> None:
    """One error event after everything that came before it."""
    record.outcome = "failed"
    record.code = error.code
    await stream.caught_up()
    await stream.send(event({"error": error_object(error)}))


def _abandon(answers: list[Answer]) -> None:
    for answer in answers:
        answer.abandon()
