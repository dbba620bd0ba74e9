"""Plays a plan to a server: each request at its time, whatever became of the earlier ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from daemon.errors import HotsetError
from hotset_tools.bench import heard
from hotset_tools.bench.clients import Endpoint, Reply, stream
from hotset_tools.bench.load.bodies import PATHS, Scale, counting_body, scale
from hotset_tools.bench.load.figures import Outcome
from hotset_tools.bench.load.plan import Arrival

_FEW, _MANY = 37, 370
"""Words of the two requests that show how words become tokens."""


class ServerUnusable(HotsetError):
    """The server under test does not answer a plain request."""

    code = "server_unusable"


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that one request may be silent, and that all may take beyond the last arrival."""

    silence: float = 60.0
    grace: float = 120.0


async def play(
    endpoint: Endpoint, plan: Sequence[Arrival], bodies: Sequence[bytes], patience: Patience
) -> list[Outcome]:
    """What came of every request of the plan, in its order; comes back at the latest `patience.grace` seconds after the
    last arrival.
    """
    began = time.perf_counter()
    tasks: list[asyncio.Task[Reply]] = []
    try:
        for arrival, body in zip(plan, bodies, strict=True):
            await asyncio.sleep(max(0.0, began + arrival.at - time.perf_counter()))
            request = stream(endpoint, PATHS[arrival.kind.name], body, silence_seconds=patience.silence)
            tasks.append(asyncio.create_task(request))
        if tasks:
            await asyncio.wait(tasks, timeout=patience.grace)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    now = time.perf_counter()
    return [_outcome(arrival, task, began, now, patience) for arrival, task in zip(plan, tasks, strict=True)]


def _outcome(arrival: Arrival, task: asyncio.Task[Reply], began: float, now: float, patience: Patience) -> Outcome:
    if task.cancelled():
        fault = f"not over {patience.grace:g} s after the last arrival"
        return Outcome(arrival, arrival.at, now - began, heard.Heard(fault=fault))
    reply = task.result()
    pieces = [(at - began, data) for at, data in reply.pieces]
    answer = heard.understand(pieces, reply.failure)
    return Outcome(arrival, reply.sent - began, reply.ended - began, answer)


async def measure_scale(endpoint: Endpoint, model: str, patience: Patience) -> Scale:
    """How many tokens words are to this server; two requests, and it is warm afterwards.

    Raises:
        ServerUnusable: it does not answer, or not with counts that can be.
    """
    few, many = [await _count(endpoint, n_words, model, patience) for n_words in (_FEW, _MANY)]
    try:
        return scale((_FEW, few), (_MANY, many))
    except ValueError as error:
        raise ServerUnusable(f"{endpoint.host}:{endpoint.port} counts tokens oddly: {error}") from None


async def warm_up(endpoint: Endpoint, model: str, patience: Patience) -> None:
    """One request that is not counted.

    Raises:
        ServerUnusable: it does not answer.
    """
    await _count(endpoint, _FEW, model, patience)


async def _count(endpoint: Endpoint, n_words: int, model: str, patience: Patience) -> int:
    body = counting_body(n_words, model)
    reply = await stream(endpoint, "/chat/completions", body, silence_seconds=patience.silence)
    answer = heard.understand(reply.pieces, reply.failure)
    if answer.fault:
        raise ServerUnusable(f"{endpoint.host}:{endpoint.port} cannot be measured: {answer.fault}")
    if not answer.n_prompt:
        raise ServerUnusable(f"{endpoint.host}:{endpoint.port} does not count tokens (usage.prompt_tokens)")
    return answer.n_prompt
