"""Requests that are read, or wait, while another model takes the place of the one that was served."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from daemon.errors import BadRequest, ContextLengthExceeded
from daemon.prompt.pool import PoolClosed
from tests.api.conftest import Daemon, Reply
from tests.fakes import FakePool, model_info, nothing

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = "user: Hi\nassistant:"


def serve(daemon: Daemon, pool: FakePool | None = None, **info: Any) -> FakePool:
    """Another model, and its vocabulary; None: the one that was there."""
    services, supervisor = daemon.fakes.services, daemon.fakes.supervisor
    supervisor.info = model_info().model_copy(update=info)
    services.pool = pool or daemon.fakes.pool
    return pool or daemon.fakes.pool


async def waiting(daemon: Daemon, path: str, **fields: Any) -> asyncio.Task[Reply]:
    """A request that is in the queue."""
    daemon.fakes.admission.script = nothing
    task = asyncio.create_task(daemon.post(path, fields))
    await daemon.fakes.admission.ticket()
    return task


async def test_texts_are_read_again_with_the_new_vocabulary(daemon: Daemon) -> None:
    asked = await waiting(daemon, CHAT, **ASKED, logit_bias={"x": 1})
    assert daemon.fakes.admission.submits[0].prompt == list(TEXT.encode())
    pool = serve(daemon, FakePool("reversed"), name="other", build="b2", n_ctx=1000)
    submit = await daemon.fakes.admission.make_anew()
    assert submit.prompt == pool.ids(TEXT)
    assert submit.max_tokens == 1000 - len(TEXT)
    assert submit.sampling.logit_bias == ((pool.ids("x")[0], 1.0),)
    daemon.fakes.admission.tickets[0].finish()
    answer = (await asked).json()
    assert (answer["model"], answer["system_fingerprint"]) == ("other", "b2")


async def test_a_stream_says_from_then_on_which_model_answers(daemon: Daemon) -> None:
    daemon.fakes.admission.script = nothing
    body = ASKED | {"stream": True, "stream_options": {"include_usage": True}}
    async with daemon.session.post(daemon.url + CHAT, json=body) as response:
        head = await response.content.readuntil(b"\n\n")
        serve(daemon, FakePool("reversed"), name="other")
        await daemon.fakes.admission.make_anew()
        ticket = daemon.fakes.admission.tickets[0]
        ticket.text("hey")
        ticket.finish()
        chunks = Reply(200, {}, head + await response.content.read()).data()
    assert [chunk["model"] for chunk in chunks] == ["tiny-moe", "other", "other", "other"]


async def test_the_same_model_with_another_context_only_fits_the_tokens_again(daemon: Daemon) -> None:
    asked = await waiting(daemon, CHAT, **ASKED, max_tokens=500)
    serve(daemon, n_ctx=100)
    submit = await daemon.fakes.admission.make_anew()
    assert (submit.prompt, submit.max_tokens) == (list(TEXT.encode()), 100 - len(TEXT))
    assert len(daemon.fakes.pool.chats) == 1
    daemon.fakes.admission.tickets[0].finish()
    assert (await asked).json()["timings"]["max_tokens_clamped"] == 100 - len(TEXT)


async def test_a_new_pool_of_the_same_model_leaves_the_tokens_as_they_are(daemon: Daemon) -> None:
    asked = await waiting(daemon, CHAT, **ASKED)
    same, other = FakePool(), FakePool(template="{{ other }}")
    serve(daemon, same)
    await daemon.fakes.admission.make_anew()
    assert same.chats == []
    serve(daemon, other)
    await daemon.fakes.admission.make_anew()
    assert len(other.chats) == 1
    daemon.fakes.admission.tickets[0].finish()
    assert (await asked).status == 200


async def test_a_prompt_that_no_longer_fits_is_the_ordinary_error(daemon: Daemon) -> None:
    asked = await waiting(daemon, CHAT, **ASKED)
    serve(daemon, n_ctx=4)
    with pytest.raises(ContextLengthExceeded, match="context holds 4"):
        await daemon.fakes.admission.make_anew()
    daemon.fakes.admission.tickets[0].finish()
    await asked


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [72, 105]}),
        ("/v1/completions", {"prompt": [[72, 105], [72]]}),
        ("/v1/completions", {"prompt": "Hi", "logit_bias": {"72": -100}}),
        ("/completion", {"prompt": [72, 105]}),
        ("/completion", {"prompt": ["Hi", 72]}),
        ("/completion", {"prompt": [[72], "Hi"]}),
        ("/completion", {"prompt": "Hi", "logit_bias": [[72, False]]}),
        (CHAT, ASKED | {"logit_bias": {"72": 1}}),
    ],
)
async def test_ids_of_another_vocabulary_are_never_fed_to_it(path: str, fields: dict[str, Any], daemon: Daemon) -> None:
    asked = await waiting(daemon, path, **fields)
    before = daemon.fakes.admission.submits[0]
    serve(daemon, FakePool(template="{{ other }}"))
    again = await daemon.fakes.admission.make_anew()
    assert (again.prompt, again.sampling.logit_bias) == (before.prompt, before.sampling.logit_bias)
    serve(daemon, FakePool("reversed"))
    with pytest.raises(BadRequest, match="another vocabulary"):
        await daemon.fakes.admission.make_anew()
    for ticket in daemon.fakes.admission.tickets:
        ticket.finish()
    await asked


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", {"prompt": ["Hi", "Ho"]}), ("/completion", {"prompt": ["Hi", "Ho"]})],
)
async def test_several_answers_are_made_anew_together(path: str, fields: dict[str, Any], daemon: Daemon) -> None:
    asked = await waiting(daemon, path, **fields)
    await daemon.fakes.admission.ticket(1)
    pool = serve(daemon, FakePool("reversed"), name="other", n_ctx=77)
    submits = await asyncio.gather(*(daemon.fakes.admission.make_anew(index) for index in (1, 0)))
    assert [submit.prompt for submit in submits] == [pool.ids("Ho"), pool.ids("Hi")]
    assert [text for text, *_ in pool.tokenized] == ["Hi", "Ho"]
    for ticket in daemon.fakes.admission.tickets:
        ticket.finish()
    answers = (await asked).json()
    if path == "/completion":
        assert {(one["model"], one["generation_settings"]["n_ctx"]) for one in answers} == {("other", 77)}
    else:
        assert answers["model"] == "other"


async def test_a_prompt_that_is_being_read_meanwhile_is_read_again_before_it_is_queued(daemon: Daemon) -> None:
    daemon.fakes.pool.gate = asyncio.Event()
    asked = asyncio.create_task(daemon.chat())
    await daemon.fakes.pool.asked.wait()
    old, pool = daemon.fakes.pool, serve(daemon, FakePool("reversed"))
    assert old.gate is not None
    old.gate.set()
    assert (await asked).status == 200
    assert [submit.prompt for submit in daemon.fakes.admission.submits] == [pool.ids(TEXT)]


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, ASKED, None),
        ("/apply-template", ASKED, {"prompt": TEXT}),
        ("/tokenize", {"content": "Hi"}, {"tokens": [183, 150]}),
        ("/detokenize", {"tokens": [72]}, {"content": "H"}),
    ],
)
async def test_a_pool_that_is_closed_for_another_one_refuses_nobody(
    path: str, fields: dict[str, Any], expected: object, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = FakePool("reversed")

    async def closed(*_arguments: object, **_options: object) -> None:
        daemon.fakes.services.pool = new
        raise PoolClosed("The service is shutting down.")

    for name in ("chat", "render", "tokenize", "detokenize"):
        monkeypatch.setattr(daemon.fakes.pool, name, closed)
    reply = await daemon.post(path, fields)
    assert reply.status == 200
    assert expected is None or reply.json() == expected


async def test_a_pool_that_is_closed_for_good_says_so(daemon: Daemon) -> None:
    daemon.fakes.pool.error = PoolClosed("The service is shutting down.")
    for path in (CHAT, "/apply-template"):
        reply = await daemon.post(path, ASKED)
        assert (reply.status, reply.json()["error"]["code"]) == (503, "shutting_down")
