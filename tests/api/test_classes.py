"""The class of a request: from its key, its body, a header, the model's name, or from what it looks like."""

from __future__ import annotations

from typing import Any

import pytest

from daemon.admission import Waiting
from daemon.errors import ClientQueueFull
from tests.api.conftest import Daemon, Start
from tests.fakes import nothing

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    TEXT: {"prompt": "def f(", "max_tokens": 8},
    NATIVE: {"prompt": "def f(", "n_predict": 8},
}
PATHS = list(BODIES)
HEADER = "X-Hotset-Priority"


async def standing(daemon: Daemon, path: str = CHAT, headers: dict[str, str] | None = None, **fields: Any) -> str:
    """The class with which such a request is queued."""
    reply = await daemon.post(path, BODIES[path] | fields, headers=headers or {})
    assert reply.status == 200, reply.body
    return daemon.fakes.admission.submits[-1].priority


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("tier", "priority"),
    [
        ("flex", "background"),
        ("priority", "interactive"),
        ("default", "normal"),
        ("auto", "normal"),
        ("scale", "normal"),
        (None, "normal"),
    ],
)
async def test_service_tier(daemon: Daemon, path: str, tier: str | None, priority: str) -> None:
    assert await standing(daemon, path, service_tier=tier) == priority


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("priority", ["interactive", "normal", "background"])
async def test_header_and_alias(daemon: Daemon, path: str, priority: str) -> None:
    assert await standing(daemon, path, {HEADER: f" {priority.upper()} "}) == priority
    assert await standing(daemon, path, model=f"tiny-moe:{priority}") == priority
    assert await standing(daemon, path, model=f"tiny-moe-Q4_K_M.gguf:{priority}") == priority
    reply = await daemon.get(f"/v1/models/tiny-moe:{priority}")
    assert (reply.status, reply.json()["id"]) == (200, "tiny-moe")


async def test_the_answer_says_the_class_and_names_the_model_without_it(daemon: Daemon) -> None:
    reply = (await daemon.chat(model="tiny-moe:background")).json()
    assert (reply["model"], reply["timings"]["priority"]) == ("tiny-moe", "background")


async def test_a_model_whose_name_ends_like_a_class_is_no_alias(daemon: Daemon) -> None:
    daemon.fakes.configure(model={"name": "box:background"})
    assert await standing(daemon, model="box:background") == "normal"
    assert await standing(daemon, model="box:background:interactive") == "interactive"


async def test_the_body_is_stronger_than_the_header_and_the_header_than_the_name(daemon: Daemon) -> None:
    background = {HEADER: "background"}
    assert await standing(daemon, headers=background, service_tier="priority", model="tiny-moe:normal") == "interactive"
    assert await standing(daemon, headers=background, model="tiny-moe:interactive") == "background"
    assert await standing(daemon, headers=background, service_tier="auto") == "background", "auto says nothing"


@pytest.mark.parametrize(
    ("key", "asked", "priority"),
    [
        ("background", "interactive", "background"),
        ("background", "normal", "background"),
        ("background", None, "background"),
        ("normal", "interactive", "normal"),
        ("normal", "background", "background"),
        ("normal", None, "normal"),
        ("interactive", None, "interactive"),
        ("interactive", "normal", "normal"),
        ("interactive", "background", "background"),
        (None, "interactive", "interactive"),
        (None, None, "normal"),
    ],
)
async def test_the_class_of_a_key_is_a_ceiling(start: Start, key: str | None, asked: str | None, priority: str) -> None:
    text = f"{key}:a-long-key" if key else "a-long-key"
    daemon: Daemon = await start(http={"keys": [text]})
    headers = {"Authorization": "Bearer a-long-key"} | ({HEADER: asked} if asked else {})
    assert await standing(daemon, headers=headers) == priority
    assert (await daemon.post(CHAT, BODIES[CHAT], headers={"x-api-key": f"background:{text}"})).status == 401


async def test_a_key_that_stands_there_with_two_classes_has_the_lower_one(start: Start) -> None:
    keys = ["interactive:a-long-key", "normal:a-long-key", "a-long-key"]
    daemon: Daemon = await start(http={"keys": keys})
    assert await standing(daemon, headers={"x-api-key": "a-long-key", HEADER: "interactive"}) == "normal"


async def test_the_key_of_a_class_limits_what_looks_interactive_too(start: Start) -> None:
    daemon: Daemon = await start(http={"keys": ["normal:a-long-key"]})
    headers = {"x-api-key": "a-long-key"}
    assert await standing(daemon, TEXT, headers, prompt_cache_key="file.py") == "normal"
    assert daemon.fakes.admission.replaced == ["file.py"], "it still is one that the next one replaces"


@pytest.mark.parametrize("path", PATHS)
async def test_bad_values_are_named(daemon: Daemon, path: str) -> None:
    for fields, headers, param in (
        ({"service_tier": "fast"}, {}, "service_tier"),
        ({"service_tier": 1}, {}, "service_tier"),
        ({"prompt_cache_key": 7}, {}, "prompt_cache_key"),
        ({"prompt_cache_key": "k" * 1025}, {}, "prompt_cache_key"),
        ({}, {HEADER: "urgent"}, HEADER),
        ({}, {HEADER: ""}, HEADER),
        ({}, [(HEADER, "normal"), (HEADER, "background")], HEADER),
    ):
        reply = await daemon.post(path, BODIES[path] | fields, headers=headers)
        assert (reply.status, reply.json()["error"]["param"]) == (400, param)
        assert param in reply.json()["error"]["message"]
    reply = await daemon.post(path, BODIES[path] | {"model": "tiny-moe:urgent"})
    assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert daemon.fakes.admission.submits == []


# -- what a request looks like

SIDE_CALLS = [
    "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n### Guidelines:\n...",
    "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history, along with 1-3 more ...",
    "### Task:\nSuggest 3-5 relevant follow-up questions or prompts that the user might naturally ask next in this "
    "conversation as a user, based on the chat history",
    "Generate a concise 3-7 word title for this conversation, omitting punctuation.",
    "Provide a concise, 5-word-or-less title for the conversation, using title case conventions.",
]
CHATS = [
    "Can you generate a title for this conversation?",
    "Generate a title for my essay about whales.",
    "### Task:\nAnalyze the chat history to determine the necessity of generating search queries",
    "Hello\nGenerate a title for this conversation",
    "",
]


@pytest.mark.parametrize("text", SIDE_CALLS)
async def test_side_calls_of_front_ends_are_background(daemon: Daemon, text: str) -> None:
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    for content in (text, [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]):
        messages = [*history, {"role": "user", "content": content}]
        assert await standing(daemon, messages=messages) == "background"
    assert await standing(daemon, messages=messages, service_tier="default") == "normal", "what it says is stronger"
    assert await standing(daemon, messages=[*messages, {"role": "assistant", "content": "A"}]) == "normal"


@pytest.mark.parametrize("text", CHATS)
async def test_what_only_resembles_them_is_not(daemon: Daemon, text: str) -> None:
    assert await standing(daemon, messages=[{"role": "user", "content": text}]) == "normal"


@pytest.mark.parametrize("path", [TEXT, NATIVE])
async def test_short_completions_with_a_cache_key_are_interactive_and_replace_each_other(
    daemon: Daemon, path: str
) -> None:
    assert await standing(daemon, path, prompt_cache_key="file.py") == "interactive"
    assert (
        await standing(daemon, path, prompt_cache_key="file.py", max_tokens=256, service_tier="auto") == "interactive"
    )
    assert await standing(daemon, path, {HEADER: "interactive"}, prompt_cache_key="file.py") == "interactive"
    assert daemon.fakes.admission.replaced == ["file.py"] * 3


@pytest.mark.parametrize("path", [TEXT, NATIVE])
@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, "normal"),
        ({"prompt_cache_key": ""}, "normal"),
        ({"prompt_cache_key": None}, "normal"),
        ({"prompt_cache_key": "k", "max_tokens": 257, "n_predict": 257}, "normal"),
        ({"prompt_cache_key": "k", "max_tokens": None, "n_predict": -1}, "normal"),
        ({"prompt_cache_key": "k", "prompt": ["a", "b"]}, "normal"),
        ({"prompt_cache_key": "k", "service_tier": "flex"}, "background"),
        ({"prompt_cache_key": "k", "service_tier": "default"}, "normal"),
        ({"prompt_cache_key": "k", "model": "tiny-moe:background"}, "background"),
        ({"service_tier": "priority"}, "interactive"),
    ],
)
async def test_other_completions_replace_nothing(
    daemon: Daemon, path: str, fields: dict[str, Any], priority: str
) -> None:
    assert await standing(daemon, path, **fields) == priority
    assert set(daemon.fakes.admission.replaced) == {""}


async def test_chats_and_completions_with_several_answers_replace_nothing(daemon: Daemon) -> None:
    assert await standing(daemon, prompt_cache_key="k", max_tokens=8, service_tier="priority") == "interactive"
    assert await standing(daemon, TEXT, prompt_cache_key="k", n=2) == "normal"
    assert set(daemon.fakes.admission.replaced) == {""}


# -- what is told of the queue


async def test_a_client_that_waits_too_often_is_told_so(daemon: Daemon) -> None:
    daemon.fakes.admission.error = ClientQueueFull("2 requests of this client are waiting.", retry_after=11)
    reply = await daemon.chat()
    assert (reply.status, reply.headers["retry-after"]) == (429, "11")
    assert (reply.json()["error"]["code"], reply.json()["error"]["type"]) == ("client_queue_full", "rate_limit_error")
    assert 'hotset_rejected_total{reason="client_queue_full"} 1.0' in (await daemon.get("/metrics")).body.decode()


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_that_is_queued_says_its_place_at_once(start: Start, path: str) -> None:
    daemon: Daemon = await start(http={"ping_seconds": 300.0})
    daemon.fakes.admission.position = 4
    reply = await daemon.post(path, BODIES[path] | {"stream": True})
    assert ": queued, position 5" in reply.events()[:2]
    daemon.fakes.admission.position = None
    assert b"position" not in (await daemon.post(path, BODIES[path] | {"stream": True})).body


async def test_of_several_answers_the_place_of_the_next_one_counts(start: Start) -> None:
    daemon: Daemon = await start(http={"ping_seconds": 0.05})
    daemon.fakes.admission.script = nothing
    daemon.fakes.admission.position = 7
    async with daemon.session.post(daemon.url + CHAT, json=BODIES[CHAT] | {"stream": True, "n": 3}) as response:
        first, second, third = [await daemon.fakes.admission.ticket(index) for index in range(3)]
        second.position = 2
        while b": queued, position 3" not in await response.content.readline():
            pass
        for ticket in (first, second, third):
            ticket.finish()
        await response.read()


async def test_slots_shows_who_waits_without_naming_them(daemon: Daemon) -> None:
    daemon.fakes.admission.queue = [
        Waiting("r1", 0, "interactive", "10.0.0.1", 0.25),
        Waiting("r2", 1, "background", "10.0.0.1", 12.3456),
        Waiting("r3", 2, "background", "10.0.0.2/anna", 0.0),
    ]
    reply = await daemon.get("/slots")
    slots = reply.json()
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3, -1, -1, -1]
    waiting = slots[4:]
    assert [slot["request"] for slot in waiting] == ["r1", "r2", "r3"]
    assert [slot["position"] for slot in waiting] == [1, 2, 3]
    assert [slot["priority"] for slot in waiting] == ["interactive", "background", "background"]
    assert [slot["age_seconds"] for slot in waiting] == [0.25, 12.346, 0.0]
    assert {slot["is_processing"] for slot in waiting} == {False}
    assert waiting[0]["client"] == waiting[1]["client"] != waiting[2]["client"]
    assert b"10.0.0" not in reply.body
    assert b"anna" not in reply.body


async def test_metrics_tell_classes_apart(daemon: Daemon) -> None:
    daemon.fakes.admission.position = 0
    daemon.fakes.admission.script = nothing
    body = BODIES[CHAT] | {"service_tier": "flex", "stream": True}
    async with daemon.session.post(daemon.url + CHAT, json=body) as response:
        ticket = await daemon.fakes.admission.ticket()
        text = (await daemon.get("/metrics")).body.decode()
        assert 'hotset_waiting{class="background"} 1.0' in text
        assert 'hotset_waiting{class="interactive"} 0.0' in text
        ticket.position = None
        ticket.finish(wait_ms=2500.0)
        await response.read()
    lines = (await daemon.get("/metrics")).body.decode().splitlines()
    assert 'hotset_queue_seconds_sum{class="background"} 2.5' in lines
    assert 'hotset_queue_seconds_count{class="normal"} 0.0' in lines
