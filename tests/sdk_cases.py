"""The openai SDK as a client, for any running daemon.

A suite imports these functions and gives three fixtures: `base_url` (ending in /v1), `api_key`, and `idle`, a
coroutine function that returns once the daemon works on nothing. Nothing here depends on what the model says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

MESSAGES: Any = [{"role": "user", "content": "Tell me a story about a fox."}]
GREEDY: Any = {"temperature": 0.0, "seed": 1}
ENDLESS: Any = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}
Idle = Callable[[], Awaitable[None]]


@pytest.fixture
async def client(base_url: str, api_key: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as made:
        yield made


@pytest.fixture
async def model(client: AsyncOpenAI) -> str:
    """The id of the served model."""
    return (await client.models.list()).data[0].id


async def text_of(stream: Any) -> str:
    """The whole text of a streamed chat."""
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def test_models(client: AsyncOpenAI, model: str) -> None:
    found = await client.models.retrieve(model)
    assert (found.id, found.object) == (model, "model")
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("no-such-model")


async def test_chat(client: AsyncOpenAI, model: str) -> None:
    answer = await client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8, **GREEDY)
    choice = answer.choices[0]
    assert (choice.index, choice.message.role) == (0, "assistant")
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint


async def test_chat_from_a_thread(base_url: str, api_key: str, model: str) -> None:
    """The synchronous client, streaming and not."""

    def run() -> tuple[str, str]:
        with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            create = client.chat.completions.create
            whole = create(model=model, messages=MESSAGES, max_tokens=8, **GREEDY).choices[0].message.content or ""
            stream = create(model=model, messages=MESSAGES, max_tokens=8, stream=True, **GREEDY)
            return whole, "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    whole, streamed = await asyncio.to_thread(run)
    assert whole
    assert streamed == whole


async def test_stream_says_the_same(client: AsyncOpenAI, model: str) -> None:
    options: Any = {"model": model, "messages": MESSAGES, "max_tokens": 12, **GREEDY}
    whole = await client.chat.completions.create(**options)
    chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **options)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


async def test_include_usage(client: AsyncOpenAI, model: str) -> None:
    stream = await client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    last = chunks[-1]
    assert last.choices == []
    assert last.usage is not None
    assert 0 < last.usage.completion_tokens <= 5
    assert [chunk for chunk in chunks if chunk.usage is not None] == [last]


async def test_logprobs(client: AsyncOpenAI, model: str) -> None:
    answer = await client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3, **GREEDY
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    data = b""
    for item in logprobs.content:
        assert item.bytes is not None
        assert item.logprob <= 0
        assert len(item.top_logprobs) == 3
        assert item.top_logprobs[0].logprob == max(top.logprob for top in item.top_logprobs)
        data += bytes(item.bytes)
    content = answer.choices[0].message.content or ""
    assert data.decode("utf-8", "ignore").startswith(content)


async def test_logprobs_in_a_stream(client: AsyncOpenAI, model: str) -> None:
    stream = await client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=4, logprobs=True, stream=True, **GREEDY
    )
    choices = [chunk.choices[0] async for chunk in stream]
    items = [item for choice in choices if choice.logprobs for item in choice.logprobs.content or []]
    assert 0 < len(items) <= 4
    assert all(item.top_logprobs == [] for item in items)


async def test_several_answers(client: AsyncOpenAI, model: str) -> None:
    answer = await client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=4, n=3, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    stream = await client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=4, n=2, seed=5, stream=True
    )
    ends = [chunk.choices[0].index async for chunk in stream if chunk.choices[0].finish_reason]
    assert sorted(ends) == [0, 1]


async def test_stop(client: AsyncOpenAI, model: str) -> None:
    options: Any = {"model": model, "messages": MESSAGES, "max_tokens": 24, **GREEDY}
    text = (await client.chat.completions.create(**options)).choices[0].message.content or ""
    stop = text[len(text) // 2 :][:4]
    cut = await client.chat.completions.create(stop=[stop, "never to be seen"], **options)
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].message.content == text[: text.index(stop)]
    streamed = await text_of(await client.chat.completions.create(stop=stop, stream=True, **options))
    assert streamed == text[: text.index(stop)]


async def test_token_limit(client: AsyncOpenAI, model: str) -> None:
    answer = await client.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=3, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


async def test_text_completion(client: AsyncOpenAI, model: str) -> None:
    answer = await client.completions.create(
        model=model, prompt=["Once upon", "In the"], max_tokens=4, echo=True, **GREEDY
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith("Once upon")
    assert answer.choices[1].text.startswith("In the")
    stream = await client.completions.create(
        model=model, prompt="Once upon", max_tokens=4, stream=True, logprobs=2, **GREEDY
    )
    chunks = [chunk async for chunk in stream]
    tokens = [
        token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.tokens or []
    ]
    assert 0 < len(tokens) <= 4
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


async def test_closing_a_stream_stops_the_work(client: AsyncOpenAI, model: str, idle: Idle) -> None:
    stream = await client.chat.completions.create(model=model, messages=MESSAGES, stream=True, **ENDLESS)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await idle()


async def test_giving_up_a_call_stops_the_work(client: AsyncOpenAI, model: str, idle: Idle) -> None:
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(model=model, messages=MESSAGES, timeout=0.3, **ENDLESS)
    await idle()


async def test_errors_have_their_classes(client: AsyncOpenAI, model: str) -> None:
    create: Any = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model=model, messages=MESSAGES, temperature=1000)
    assert (bad.value.code, bad.value.param) == ("invalid_request", "temperature")
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="no-such-model", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as tools:
        await create(model=model, messages=MESSAGES, response_format={"type": "json_object"})
    assert tools.value.code == "unsupported"
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model=model, prompt=[1] * 200_000)
    assert long.value.code == "context_length_exceeded"


async def test_embeddings_are_a_clear_501(client: AsyncOpenAI, model: str) -> None:
    with pytest.raises(openai.InternalServerError) as error:
        await client.embeddings.create(model=model, input="x")
    assert error.value.status_code == 501
    assert error.value.code == "not_implemented"
