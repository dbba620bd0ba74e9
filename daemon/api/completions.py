"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from typing import cast

from aiohttp import web

from daemon.api.context import read_body, services_of
from daemon.api.delivery import deliver_stream, deliver_whole, submit
from daemon.api.draft import Draft, Read
from daemon.api.names import check_model, served_name
from daemon.api.plan import MAX_ANSWERS, Planned, Source, check_tokens, plan
from daemon.api.record import current_record
from daemon.api.refused import refuse_fields, unsupported
from daemon.api.sampling import names_tokens, read_sampling
from daemon.api.schema import CompletionRequest
from daemon.api.services import TextPool
from daemon.api.shapes import CompletionStream, Head, completion_body
from daemon.api.standing import wanted_by_completion
from daemon.errors import BadRequest
from daemon.messages import ModelInfo


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or more prompts, whole or as a stream."""
    services = services_of(request)
    body, data = await read_body(request, CompletionRequest)
    alias = check_model(body.model, services)
    refuse_fields(data)
    _refuse_combinations(body)
    record = current_record()
    single = body.n == len(_prompts(body)) == 1
    standing = record.standing(*wanted_by_completion(request, body, alias, single=single))
    head = Head(record.id, "text_completion")

    async def read(pool: TextPool, info: ModelInfo) -> Read:
        sampling = await read_sampling(body, services.config.sampling, pool, info.n_vocab)
        return Read(await _sources(body, pool, info.n_vocab), sampling)

    def planned(read: Read, info: ModelInfo) -> list[Planned]:
        head.name_model(served_name(services), info.build)
        return plan(
            record.id,
            read.sources,
            body,
            read.sampling,
            info,
            standing,
            param="prompt",
            n=body.n,
            logprobs=body.logprobs,
        )

    ids = names_tokens(body.logit_bias) or any(isinstance(prompt, list) for prompt in _prompts(body))
    answers = await submit(Draft(services, read, planned, names_tokens=ids), services)
    if body.stream:
        shape = CompletionStream(head, body.stream_options.include_usage, echo=body.echo)
        return await deliver_stream(request, answers, shape, services)
    return await deliver_whole(answers, lambda collected: completion_body(head, collected, echo=body.echo), services)


async def prompt_tokens(prompt: str, pool: TextPool) -> list[int]:
    """A raw prompt as tokens, special ones read as such; an empty one is the BOS token where the model has one."""
    tokens = await pool.tokenize(prompt, add_special=True, parse_special=True)
    if not tokens and pool.info.bos is not None:
        return [pool.info.bos]
    return tokens


async def _sources(body: CompletionRequest, pool: TextPool, n_vocab: int) -> list[Source]:
    prompts = _prompts(body)
    if len(prompts) * body.n > MAX_ANSWERS:
        raise BadRequest(f"At most {MAX_ANSWERS} answers can be asked for at once.", param="prompt")
    return list(await asyncio.gather(*(_source(prompt, body.echo, pool, n_vocab) for prompt in prompts)))


async def _source(prompt: str | list[int], echo: bool, pool: TextPool, n_vocab: int) -> Source:
    if isinstance(prompt, str):
        return Source(await prompt_tokens(prompt, pool), prompt if echo else "")
    check_tokens(prompt, n_vocab, "prompt")
    return Source(prompt, await pool.detokenize(prompt) if echo and prompt else "")


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """One or more prompts; a list of numbers is one."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise BadRequest("The prompt is empty.", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return list(cast("list[str | list[int]]", prompt))


def _refuse_combinations(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of > body.n:
        raise unsupported("best_of")
    if body.echo and body.logprobs is not None:
        raise BadRequest("echo together with logprobs is not offered by this server.", param="echo")
