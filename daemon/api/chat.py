"""POST /v1/chat/completions, and the chat part of /apply-template."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from daemon.api.context import read_body, services_of
from daemon.api.delivery import deliver_stream, deliver_whole, submit
from daemon.api.draft import Draft, Read
from daemon.api.names import check_model, served_name
from daemon.api.plan import Planned, Source, plan
from daemon.api.record import current_record
from daemon.api.refused import refuse_fields, refuse_tools
from daemon.api.sampling import names_tokens, read_sampling
from daemon.api.schema import ChatFields, ChatRequest
from daemon.api.services import TextPool
from daemon.api.shapes import ChatStream, Head, chat_body
from daemon.api.standing import wanted_by_chat
from daemon.errors import BadRequest, Unsupported
from daemon.messages import ModelInfo
from daemon.prompt.pool import TEMPLATE_KWARGS, ChatPrompt


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat, whole or as a stream."""
    services = services_of(request)
    body, data = await read_body(request, ChatRequest)
    alias = check_model(body.model, services)
    refuse_fields(data)
    chat = chat_prompt(body, data)
    logprobs = _logprobs(body)
    record = current_record()
    standing = record.standing(wanted_by_chat(request, body, alias))
    head = Head(record.id, "chat.completion.chunk" if body.stream else "chat.completion")

    async def read(pool: TextPool, info: ModelInfo) -> Read:
        sampling = await read_sampling(body, services.config.sampling, pool, info.n_vocab)
        return Read([Source((await pool.chat(chat)).tokens)], sampling)

    def planned(read: Read, info: ModelInfo) -> list[Planned]:
        head.name_model(served_name(services), info.build)
        return plan(
            record.id, read.sources, body, read.sampling, info, standing, param="messages", n=body.n, logprobs=logprobs
        )

    draft = Draft(services, read, planned, names_tokens=names_tokens(body.logit_bias))
    answers = await submit(draft, services)
    if body.stream:
        return await deliver_stream(request, answers, ChatStream(head, body.stream_options.include_usage), services)
    return await deliver_whole(answers, lambda collected: chat_body(head, collected), services)


def chat_prompt(body: ChatFields, data: dict[str, Any]) -> ChatPrompt:
    """What the template gets.

    Raises:
        Unsupported: tools, or content that is no text.
        BadRequest: template arguments that are not on the list.
    """
    refuse_tools(data)
    _refuse_media(body)
    return ChatPrompt(
        messages=data["messages"],
        tools=None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=_template_kwargs(body),
    )


def _template_kwargs(body: ChatFields) -> dict[str, str | int | float | bool | None]:
    given = dict(body.chat_template_kwargs or {})
    for name in given:
        if name not in TEMPLATE_KWARGS:
            allowed = ", ".join(sorted(TEMPLATE_KWARGS))
            raise BadRequest(f"chat_template_kwargs takes only {allowed}.", param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        given.setdefault("reasoning_effort", body.reasoning_effort)
    return given


def _refuse_media(body: ChatFields) -> None:
    for i, message in enumerate(body.messages):
        parts = message.content if isinstance(message.content, list) else []
        for j, part in enumerate(parts):
            place = f"messages[{i}].content[{j}]"
            if part.type != "text":
                raise Unsupported(f"{place}: only text parts are offered by this server.", param=place)
            if part.text is None:
                raise BadRequest(f"{place}: a text part needs text.", param=place)


def _logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return None
