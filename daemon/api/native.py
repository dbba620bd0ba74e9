"""llama-server's own endpoints that work on text and tokens."""

from __future__ import annotations

from typing import Any, cast

from aiohttp import web

from daemon.api.chat import chat_prompt
from daemon.api.completions import prompt_tokens
from daemon.api.context import read_body, services_of
from daemon.api.delivery import deliver_stream, deliver_whole, submit
from daemon.api.draft import Draft, Read, ask_pool
from daemon.api.names import check_model, served_name, vocabulary
from daemon.api.native_shapes import NativeStream, Settings, native_body
from daemon.api.plan import MAX_ANSWERS, Planned, Source, check_tokens, plan
from daemon.api.record import current_record
from daemon.api.refused import refuse_fields, unsupported
from daemon.api.sampling import names_tokens, read_sampling
from daemon.api.schema import (
    ChatFields,
    DetokenizeRequest,
    NativePrompt,
    NativeRequest,
    PromptObject,
    TokenizeRequest,
)
from daemon.api.services import TextPool
from daemon.api.standing import wanted_by_completion
from daemon.errors import BadRequest, ContextLengthExceeded
from daemon.messages import ModelInfo

MAX_PIECES = 100_000
"""Tokens that /tokenize shows with their pieces; more would be a reply of many megabytes, made beside all streams."""


async def completion(request: web.Request) -> web.StreamResponse:
    """POST /completion: several prompts give a list of answers."""
    services = services_of(request)
    body, data = await read_body(request, NativeRequest)
    alias = check_model(body.model, services)
    refuse_fields(data)
    record = current_record()
    standing = record.standing(*wanted_by_completion(request, body, alias, single=not _is_several(body)))
    logprobs = body.n_probs if body.n_probs > 0 else None
    settings = Settings(stream=body.stream, n_probs=body.n_probs)

    async def read(pool: TextPool, info: ModelInfo) -> Read:
        sampling = await read_sampling(body, services.config.sampling, pool, info.n_vocab)
        _refuse_long(body.prompt, info)
        return Read([await _source(prompt, pool, info) for prompt in _prompts(body)], sampling)

    def planned(read: Read, info: ModelInfo) -> list[Planned]:
        settings.model, settings.n_ctx = served_name(services), info.n_ctx
        return plan(record.id, read.sources, body, read.sampling, info, standing, param="prompt", logprobs=logprobs)

    draft = Draft(services, read, planned, names_tokens=names_tokens(body.logit_bias) or _has_ids(body.prompt))
    answers = await submit(draft, services)
    if body.stream:
        return await deliver_stream(request, answers, NativeStream(settings), services)
    single = len(answers) == 1 and not _is_several(body)

    def build(collected: list[Any]) -> Any:
        bodies = [native_body(item, settings, return_tokens=body.return_tokens) for item in collected]
        return bodies[0] if single else bodies

    return await deliver_whole(answers, build, services)


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: ids, or ids with their pieces (a list of bytes where a piece is no UTF-8)."""
    body, _ = await read_body(request, TokenizeRequest)
    return web.json_response({"tokens": await ask_pool(services_of(request), lambda pool: _tokens(body, pool))})


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize."""
    services = services_of(request)
    body, _ = await read_body(request, DetokenizeRequest)
    check_tokens(body.tokens, vocabulary(services).n_vocab, "tokens")
    return web.json_response({"content": await ask_pool(services, lambda pool: pool.detokenize(body.tokens))})


async def apply_template(request: web.Request) -> web.Response:
    """POST /apply-template: the text that a chat becomes, without running it."""
    body, data = await read_body(request, ChatFields)
    chat = chat_prompt(body, data)
    return web.json_response({"prompt": await ask_pool(services_of(request), lambda pool: pool.render(chat))})


async def _tokens(body: TokenizeRequest, pool: TextPool) -> list[Any]:
    tokens = await pool.tokenize(body.content, add_special=body.add_special, parse_special=body.parse_special)
    if not body.with_pieces:
        return tokens
    if len(tokens) > MAX_PIECES:
        raise BadRequest(f"Pieces are shown for {MAX_PIECES} tokens at most; these are {len(tokens)}.", param="content")
    pieces = await pool.pieces(tokens)
    return [{"id": token, "piece": _piece(piece)} for token, piece in zip(tokens, pieces, strict=True)]


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)


def _is_several(body: NativeRequest) -> bool:
    """A list is one prompt as long as it holds only tokens, or tokens with text between them."""
    prompt = body.prompt
    if not isinstance(prompt, list):
        return False
    return any(isinstance(part, list | PromptObject) for part in prompt) or all(isinstance(p, str) for p in prompt)


def _has_ids(prompt: Any) -> bool:
    """Whether a token id is in it, at any depth."""
    return isinstance(prompt, int) or (isinstance(prompt, list) and any(_has_ids(part) for part in prompt))


def _prompts(body: NativeRequest) -> list[NativePrompt]:
    if body.prompt == []:
        raise BadRequest("The prompt is empty.", param="prompt")
    if not _is_several(body):
        return [cast(NativePrompt, body.prompt)]
    prompts = cast("list[NativePrompt]", body.prompt)
    if len(prompts) > MAX_ANSWERS:
        raise BadRequest(f"At most {MAX_ANSWERS} answers can be asked for at once.", param="prompt")
    if any(isinstance(prompt, int) for prompt in prompts):
        raise BadRequest("A list of prompts cannot hold bare token ids.", param="prompt")
    return prompts


def _refuse_long(prompt: Any, info: ModelInfo) -> None:
    """Before each part is looked at: millions of them would hold every stream up, or the text pool."""
    if isinstance(prompt, list) and len(prompt) > max(info.n_ctx, MAX_ANSWERS):
        error = ContextLengthExceeded(len(prompt), info.n_ctx)
        error.param = "prompt"
        raise error


async def _source(prompt: NativePrompt, pool: TextPool, info: ModelInfo) -> Source:
    if isinstance(prompt, PromptObject):
        if prompt.multimodal_data:
            raise unsupported("multimodal_data")
        prompt = prompt.prompt_string
    if isinstance(prompt, str):
        return Source(await prompt_tokens(prompt, pool), prompt)
    _refuse_long(prompt, info)
    tokens: list[int] = []
    for place, part in enumerate(prompt):
        if isinstance(part, str):
            tokens += await pool.tokenize(part, add_special=place == 0, parse_special=True)
        else:
            tokens.append(part)
    check_tokens(tokens, info.n_vocab, "prompt")
    return Source(tokens, await pool.detokenize(tokens))
