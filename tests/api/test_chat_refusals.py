"""POST /v1/chat/completions: what is refused, what is not minded, and what fails on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from daemon.errors import EngineFailed
from daemon.messages import Failed, Tokens
from tests.api.conftest import Daemon
from tests.fakes import done, nothing

UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"grammar": 'root ::= "a"'}, "grammar"),
    ({"json_schema": {}}, "json_schema"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"lora": [{"id": 0, "scale": 1.0}]}, "lora"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"stop_token_ids": [3]}, "stop_token_ids"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}]},
        "messages[0].content[1]",
    ),
]


@pytest.mark.parametrize(("fields", "param"), UNSUPPORTED)
async def test_what_is_not_offered_is_refused_by_name(daemon: Daemon, fields: dict[str, Any], param: str) -> None:
    reply = await daemon.chat(**fields)
    error = reply.json()["error"]
    assert reply.status == 400
    assert (error["code"], error["param"], error["type"]) == ("unsupported", param, "invalid_request_error")
    assert daemon.fakes.admission.submits == []


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"grammar": ""},
        {"grammar": None},
        {"modalities": ["text"]},
        {"min_tokens": 0},
        {"lora": []},
        {"service_tier": "flex", "user": "me", "prompt_cache_key": "k", "store": False, "metadata": {"a": "b"}},
        {"something_new": {"deep": [1, 2]}},
    ],
)
async def test_harmless_fields(daemon: Daemon, fields: dict[str, Any]) -> None:
    assert (await daemon.chat(**fields)).status == 200


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"temperature": 101}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": 10**7}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"typical_p": 0}, "typical_p"),
    ({"mirostat": 3}, "mirostat"),
    ({"seed": 2**70}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"model": 5}, "model"),
    ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
    ({"chat_template_kwargs": {"enable_thinking": {}}}, "chat_template_kwargs.enable_thinking"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS)
async def test_bad_fields(daemon: Daemon, fields: dict[str, Any], param: str) -> None:
    reply = await daemon.chat(**fields)
    error = reply.json()["error"]
    assert reply.status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert daemon.fakes.admission.submits == []


async def test_missing_messages(daemon: Daemon) -> None:
    reply = await daemon.post("/v1/chat/completions", {})
    assert (reply.status, reply.json()["error"]["param"]) == (400, "messages")


async def test_whole_numbers_may_be_written_with_a_point(daemon: Daemon) -> None:
    assert (await daemon.chat(max_tokens=5.0, top_k=3.0)).status == 200
    assert daemon.fakes.admission.submits[0].max_tokens == 5


@pytest.mark.parametrize(
    "model", [None, "", "tiny-moe", "tiny-moe:background", "tiny-moe-Q4_K_M", "tiny-moe-Q4_K_M.gguf"]
)
async def test_names_of_the_served_model(daemon: Daemon, model: str | None) -> None:
    assert (await daemon.chat(model=model)).json()["model"] == "tiny-moe"


@pytest.mark.parametrize("model", ["gpt-4o", "tiny", "tiny-moe:7b", ":background", "tiny-moe:"])
async def test_other_models_are_not_found(daemon: Daemon, model: str) -> None:
    reply = await daemon.chat(model=model)
    assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert "tiny-moe" in reply.json()["error"]["message"]


async def test_engine_failure_before_the_answer(daemon: Daemon) -> None:
    daemon.fakes.admission.script = lambda submit: [Failed(id=submit.id, code="engine_failed", message="it died")]
    reply = await daemon.chat()
    error = {"message": "it died", "type": "server_error", "param": None, "code": "engine_failed"}
    assert (reply.status, reply.json()) == (500, {"error": error})


async def test_engine_failure_with_a_code_of_its_own(daemon: Daemon) -> None:
    daemon.fakes.admission.script = lambda submit: [Failed(id=submit.id, code="invalid_request", message="no")]
    reply = await daemon.chat()
    assert (reply.status, reply.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_engine_failure_in_the_stream(daemon: Daemon) -> None:
    daemon.fakes.admission.script = lambda submit: [
        Tokens(id=submit.id, tokens=[1], text="one"),
        Failed(id=submit.id, code=EngineFailed.code, message="it died"),
    ]
    reply = await daemon.chat(stream=True)
    error = '{"error":{"message":"it died","type":"server_error","param":null,"code":"engine_failed"}}'
    assert reply.status == 200
    assert reply.body.endswith(f"data: {error}\n\n".encode())
    assert b"[DONE]" not in reply.body
    assert b'finish_reason":"' not in reply.body


async def test_one_failed_answer_gives_up_the_others(daemon: Daemon) -> None:
    daemon.fakes.admission.script = lambda submit: (
        [Failed(id=submit.id, code="engine_failed", message="it died")] if submit.id.endswith(".1") else []
    )
    reply = await daemon.chat(n=3)
    assert reply.status == 500
    first, _, third = daemon.fakes.admission.tickets
    assert first.cancelled.is_set()
    assert third.cancelled.is_set()


async def test_ticket_that_ends_without_a_result(daemon: Daemon) -> None:
    daemon.fakes.admission.script = nothing

    async def stop() -> None:
        (await daemon.fakes.admission.ticket()).push(None)

    reply, _ = await asyncio.gather(daemon.chat(), stop())
    assert (reply.status, reply.json()["error"]["code"]) == (500, "engine_failed")


async def test_cancelled_from_elsewhere(daemon: Daemon) -> None:
    daemon.fakes.admission.script = lambda submit: [
        Tokens(id=submit.id, tokens=[1], text="one"),
        done(submit, finish_reason="cancelled"),
    ]
    body = (await daemon.chat()).json()
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["timings"]["cancelled"] is True
