"""POST /v1/completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from daemon.messages import Tokens
from tests.api.conftest import Daemon
from tests.fakes import BOS, STORY, done, logprob


async def complete(daemon: Daemon, prompt: Any = "Once", **fields: Any) -> Any:
    return await daemon.post("/v1/completions", {"prompt": prompt} | fields)


async def test_whole_answer(daemon: Daemon) -> None:
    reply = await complete(daemon)
    body = reply.json()
    assert body["object"] == "text_completion"
    assert body["id"] == "cmpl-" + reply.headers["x-request-id"]
    assert body["choices"] == [{"index": 0, "text": STORY, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert daemon.fakes.pool.tokenized == [("Once", True, True)]
    assert daemon.fakes.admission.submits[0].prompt == list(b"Once")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        (["a", "bc"], [[97], [98, 99]]),
        ([65, 66], [[65, 66]]),
        ([[65], [66, 67]], [[65], [66, 67]]),
    ],
)
async def test_kinds_of_prompts(daemon: Daemon, prompt: Any, prompts: list[list[int]]) -> None:
    body = (await complete(daemon, prompt)).json()
    assert [submit.prompt for submit in daemon.fakes.admission.submits] == prompts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(prompts)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_index_runs_over_prompts_and_answers(daemon: Daemon) -> None:
    body = (await complete(daemon, ["a", "b"], n=2)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [submit.prompt for submit in daemon.fakes.admission.submits] == [[97], [97], [98], [98]]
    assert body["usage"]["prompt_tokens"] == 2


async def test_empty_prompt_is_bos(daemon: Daemon) -> None:
    assert (await complete(daemon, "")).status == 200
    assert daemon.fakes.admission.submits[0].prompt == [BOS]


async def test_empty_prompt_without_bos(daemon: Daemon) -> None:
    daemon.fakes.pool.info = daemon.fakes.pool.info.model_copy(update={"bos": None})
    reply = await complete(daemon, "")
    assert (reply.status, reply.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("prompt", [[], [[]], None, 5, {"a": 1}, [1, "a"], [999], [-1], [[999]], [1.5], [True]])
async def test_prompts_that_cannot_be_used(daemon: Daemon, prompt: Any) -> None:
    reply = await complete(daemon, prompt)
    assert reply.status == 400
    assert reply.json()["error"]["param"].startswith("prompt")
    assert daemon.fakes.admission.submits == []


async def test_too_many_answers(daemon: Daemon) -> None:
    assert (await complete(daemon, ["a"] * 65)).status == 400
    assert (await complete(daemon, ["a"] * 17, n=4)).status == 400
    assert daemon.fakes.admission.submits == []


async def test_prompt_longer_than_the_context(daemon: Daemon) -> None:
    reply = await complete(daemon, [65] * 4096)
    error = reply.json()["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")


async def test_last_token_that_fits(daemon: Daemon) -> None:
    assert (await complete(daemon, [65] * 4095)).status == 200
    assert daemon.fakes.admission.submits[0].max_tokens == 1


async def test_echo(daemon: Daemon) -> None:
    body = (await complete(daemon, ["It was: ", "So: "], echo=True, max_tokens=1)).json()
    assert [choice["text"] for choice in body["choices"]] == ["It was: Once", "So: Once"]
    body = (await complete(daemon, list(b"Hm "), echo=True, max_tokens=1)).json()
    assert body["choices"][0]["text"] == "Hm Once"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"best_of": 3}, "best_of"), ({"suffix": "end"}, "suffix"), ({"echo": True, "logprobs": 1}, "echo"),
     ({"response_format": {"type": "json_object"}}, "response_format"), ({"logprobs": 21}, "logprobs")],
)  # fmt: skip
async def test_what_is_not_offered(daemon: Daemon, fields: dict[str, Any], param: str) -> None:
    reply = await complete(daemon, **fields)
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)


async def test_best_of_that_asks_for_nothing_more(daemon: Daemon) -> None:
    assert (await complete(daemon, n=2, best_of=2)).status == 200


async def test_logprobs(daemon: Daemon) -> None:
    daemon.fakes.admission.script = lambda submit: [
        Tokens(id=submit.id, tokens=[1], text="Hé", logprobs=[logprob("Hé", 2)]),
        Tokens(id=submit.id, tokens=[2], text="!", logprobs=[logprob("!", 2)]),
        done(submit),
    ]
    logprobs = (await complete(daemon, logprobs=2)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Hé", "!"]
    assert logprobs["text_offset"] == [0, 2]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["top_logprobs"] == [{"Hé": -0.5, "B": -1.5}, {"!": -0.5, "B": -1.5}]
    assert logprobs["content"][0]["bytes"] == list("Hé".encode())
    chunks = (await complete(daemon, logprobs=2, stream=True)).data()
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks[:2]] == [[0], [2]]


async def test_stream_byte_for_byte(daemon: Daemon) -> None:
    daemon.fakes.admission.script = lambda submit: [
        Tokens(id=submit.id, tokens=[1], text="a"),
        done(submit, finish_reason="length", text="b"),
    ]
    reply = await complete(daemon, "Hm ", stream=True, echo=True, stream_options={"include_usage": True})
    created = reply.data()[0]["created"]
    head = (
        f'data: {{"id":"cmpl-{reply.headers["x-request-id"]}","object":"text_completion",'
        f'"created":{created},"model":"tiny-moe","system_fingerprint":"b1-fake","choices":['
    )
    timings = json.dumps(reply.data()[3]["timings"], separators=(",", ":"))
    usage = json.dumps(reply.data()[4]["usage"], separators=(",", ":"))

    def chunk(text: str, reason: str = "null", extra: str = "") -> str:
        return f'{head}{{"index":0,"text":"{text}","logprobs":null,"finish_reason":{reason}}}]{extra}}}\n\n'

    assert reply.body.decode() == (
        chunk("Hm ")
        + chunk("a")
        + chunk("b")
        + chunk("", '"length"', f',"timings":{timings}')
        + f'{head}],"usage":{usage}}}\n\n'
        + "data: [DONE]\n\n"
    )


async def test_stream_without_echo_opens_with_a_comment(daemon: Daemon) -> None:
    reply = await complete(daemon, ["a", "b"], stream=True)
    assert reply.events()[0] == ": queued"
    assert sum(block.startswith(":") for block in reply.events()) == 1
    assert {choice["index"] for item in reply.data() for choice in item["choices"]} == {0, 1}
