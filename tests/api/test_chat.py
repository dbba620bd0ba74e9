"""POST /v1/chat/completions: what reaches the engine, and what comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from daemon.errors import TemplateFailed
from daemon.messages import Tokens
from tests.api.conftest import Daemon
from tests.fakes import STORY, done, logprob, nothing


async def test_whole_answer(daemon: Daemon) -> None:
    reply = await daemon.chat()
    body = reply.json()
    assert reply.status == 200
    assert body["object"] == "chat.completion"
    assert body["id"] == "chatcmpl-" + reply.headers["x-request-id"]
    assert body["model"] == "tiny-moe"
    assert body["system_fingerprint"] == "b1-fake"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": STORY}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)


async def test_usage_and_timings(daemon: Daemon) -> None:
    daemon.fakes.admission.script = lambda submit: [
        Tokens(id=submit.id, tokens=[1], text="x"),
        done(submit, n_prompt=100, n_cached=60, n_predicted=20, prompt_ms=20.0, predicted_ms=500.0),
    ]
    body = (await daemon.chat()).json()
    assert body["usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "total_tokens": 120,
        "prompt_tokens_details": {"cached_tokens": 60},
    }
    timings = body["timings"]
    assert timings["cache_n"] == 60
    assert timings["prompt_n"] == 40
    assert timings["prompt_per_second"] == 2000.0
    assert timings["predicted_per_second"] == 40.0
    assert timings["queue_ms"] >= 1.0
    assert timings["ttft_ms"] >= 0.0
    assert timings["expert_hit_rate"] is None
    assert timings["max_tokens_clamped"] is None
    assert timings["cancelled"] is False


async def test_stream_byte_for_byte(daemon: Daemon) -> None:
    daemon.fakes.admission.script = lambda submit: [
        Tokens(id=submit.id, tokens=[1], text='Grüße "du"\n'),
        Tokens(id=submit.id, tokens=[2], text=""),
        done(submit, text="!", n_predicted=2),
    ]
    reply = await daemon.chat(stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    first = json.loads(reply.events()[0].removeprefix("data: "))
    head = (
        f'data: {{"id":"chatcmpl-{reply.headers["x-request-id"]}","object":"chat.completion.chunk",'
        f'"created":{first["created"]},"model":"tiny-moe","system_fingerprint":"b1-fake","choices":['
    )
    timings = json.dumps(reply.data()[3]["timings"], separators=(",", ":"))
    usage = '{"prompt_tokens":19,"completion_tokens":2,"total_tokens":21,"prompt_tokens_details":{"cached_tokens":0}}'

    def chunk(delta: str, reason: str = "null", extra: str = "") -> str:
        return f'{head}{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{reason}}}]{extra}}}\n\n'

    assert reply.body.decode() == (
        chunk('{"role":"assistant","content":""}')
        + chunk(r'{"content":"Grüße \"du\"\n"}')
        + chunk('{"content":"!"}')
        + chunk("{}", '"stop"', f',"timings":{timings}')
        + f'{head}],"usage":{usage}}}\n\n'
        + "data: [DONE]\n\n"
    )


async def test_stream_without_usage_has_none(daemon: Daemon) -> None:
    reply = await daemon.chat(stream=True)
    assert all("usage" not in item for item in reply.data())
    assert reply.body.endswith(b"data: [DONE]\n\n")


async def test_every_data_object_has_the_common_fields(daemon: Daemon) -> None:
    reply = await daemon.chat(stream=True, n=2, logprobs=True, stream_options={"include_usage": True})
    for item in reply.data():
        assert {"id", "object", "created", "model", "choices"} <= item.keys()
    reasons = [choice["finish_reason"] for item in reply.data() for choice in item["choices"]]
    assert sum(reason is not None for reason in reasons) == 2
    assert [item for item in reply.data() if "usage" in item] == [reply.data()[-1]]
    assert reply.data()[-1]["choices"] == []


async def test_first_chunk_goes_out_while_the_request_waits(daemon: Daemon) -> None:
    daemon.fakes.admission.script = nothing
    daemon.fakes.admission.position = 3
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    async with daemon.session.post(daemon.url + "/v1/chat/completions", json=body) as response:
        first = await response.content.readuntil(b"\n\n")
        assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"]["role"] == "assistant"
        ticket = await daemon.fakes.admission.ticket()
        ticket.finish()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_several_answers_have_derived_seeds(daemon: Daemon) -> None:
    body = (await daemon.chat(n=3, seed=7)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    submits = daemon.fakes.admission.submits
    assert [submit.sampling.seed for submit in submits] == [7, 8, 9]
    assert len({submit.id for submit in submits}) == 3
    assert body["usage"]["prompt_tokens"] == len(submits[0].prompt)
    assert body["usage"]["completion_tokens"] == 3 * len(STORY.split(" "))


async def test_logprobs_carry_bytes(daemon: Daemon) -> None:
    daemon.fakes.admission.script = lambda submit: [
        Tokens(id=submit.id, tokens=[1], text="é", logprobs=[logprob("é", submit.logprobs or 0)]),
        done(submit),
    ]
    body = (await daemon.chat(logprobs=True, top_logprobs=2)).json()
    [item] = body["choices"][0]["logprobs"]["content"]
    assert item["token"] == "é"
    assert item["bytes"] == [0xC3, 0xA9]
    assert item["logprob"] == -0.5
    assert [top["logprob"] for top in item["top_logprobs"]] == [-0.5, -1.5]
    assert daemon.fakes.admission.submits[0].logprobs == 2
    streamed = (await daemon.chat(logprobs=True, top_logprobs=2, stream=True)).data()
    assert streamed[1]["choices"][0]["logprobs"]["content"][0]["bytes"] == [0xC3, 0xA9]


async def test_samplers_under_llama_cpp_names(daemon: Daemon) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.1,
        "top_k": -1,
        "top_p": 0.5,
        "min_p": 0,
        "typical_p": 0.9,
        "top_n_sigma": 2.0,
        "repeat_penalty": 1.1,
        "repeat_last_n": -1,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "dry_multiplier": 0.8,
        "dry_base": 1.5,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 100,
        "dry_sequence_breakers": ["\n"],
        "xtc_probability": 0.2,
        "xtc_threshold": 0.05,
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
        "dynatemp_range": 0.3,
        "dynatemp_exponent": 1.2,
        "min_keep": 2,
        "ignore_eos": False,
    }
    assert (await daemon.chat(**fields)).status == 200
    sampling = daemon.fakes.admission.submits[0].sampling.model_dump()
    expected = fields | {"top_k": 0, "dry_sequence_breakers": ("\n",)}
    assert {name: sampling[name] for name in expected} == expected


async def test_defaults_come_from_the_configuration_as_it_is_now(daemon: Daemon) -> None:
    daemon.fakes.configure(sampling={"temperature": 0.25, "top_k": 7})
    await daemon.chat(temperature=None)
    sampling = daemon.fakes.admission.submits[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.dry_base) == (0.25, 7, 1.75)


@pytest.mark.parametrize(("seed", "expected"), [(5, 5), (-1, None), (2**32 - 1, None), (2**32 + 3, 4), (None, None)])
async def test_seed(daemon: Daemon, seed: int | None, expected: int | None) -> None:
    await daemon.chat(seed=seed)
    assert daemon.fakes.admission.submits[0].sampling.seed == expected


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ({"65": 5}, ((65, 5.0),)),
        ({"65": -100}, ((65, -1e30),)),
        ({"AB": 1.5}, ((65, 1.5), (66, 1.5))),
        ([[65, 2], [66, False]], ((65, 2.0), (66, -1e30))),
        ([["é", -3.5]], ((0xC3, -3.5), (0xA9, -3.5))),
        ({}, ()),
        ([], ()),
    ],
)
async def test_logit_bias(daemon: Daemon, bias: Any, expected: Any) -> None:
    assert (await daemon.chat(logit_bias=bias)).status == 200
    assert daemon.fakes.admission.submits[0].sampling.logit_bias == expected


@pytest.mark.parametrize(
    "bias",
    [
        {"258": 1},
        {"65": 1001},
        [[65]],
        [[65, True]],
        [[65, "x"]],
        [[True, 1]],
        [[-1, 1]],
        "x",
        [["", 1, 2]],
        {"65": "1"},
    ],
)
async def test_bad_logit_bias(daemon: Daemon, bias: Any) -> None:
    reply = await daemon.chat(logit_bias=bias)
    assert reply.status == 400
    assert reply.json()["error"]["param"].startswith("logit_bias")


async def test_stop_strings(daemon: Daemon) -> None:
    body = (await daemon.chat(stop=[" fox"])).json()
    assert body["choices"][0]["message"]["content"] == "Once upon a time a"
    await daemon.chat(stop="x")
    assert daemon.fakes.admission.submits[1].stop == ("x",)


@pytest.mark.parametrize("fields", [{"max_tokens": 2}, {"max_completion_tokens": 2}, {"n_predict": 2}])
async def test_token_limits(daemon: Daemon, fields: dict[str, int]) -> None:
    body = (await daemon.chat(**fields)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 2


async def test_the_smaller_limit_counts(daemon: Daemon) -> None:
    await daemon.chat(max_tokens=9, max_completion_tokens=4)
    assert daemon.fakes.admission.submits[0].max_tokens == 4


async def test_limit_is_all_that_fits(daemon: Daemon) -> None:
    body = (await daemon.chat(max_tokens=-1)).json()
    [submit] = daemon.fakes.admission.submits
    assert submit.max_tokens == 4096 - len(submit.prompt)
    assert body["timings"]["max_tokens_clamped"] is None


async def test_clamped_limit_is_reported(daemon: Daemon) -> None:
    body = (await daemon.chat(max_tokens=100_000)).json()
    [submit] = daemon.fakes.admission.submits
    assert body["timings"]["max_tokens_clamped"] == submit.max_tokens == 4096 - len(submit.prompt)


async def test_prompt_longer_than_the_context(daemon: Daemon) -> None:
    reply = await daemon.chat(messages=[{"role": "user", "content": "x" * 5000}])
    error = reply.json()["error"]
    assert reply.status == 400
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert "5017" in error["message"]
    assert "4096" in error["message"]
    assert daemon.fakes.admission.submits == []


async def test_history_reaches_the_template(daemon: Daemon) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "easy",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":2}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    assert (await daemon.chat(messages=messages)).status == 200
    assert daemon.fakes.pool.chats[0].messages == messages


async def test_template_fields(daemon: Daemon) -> None:
    reply = await daemon.chat(
        messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "Sure"}],
        add_generation_prompt=False,
        continue_final_message=True,
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
    )
    assert reply.status == 200
    [chat] = daemon.fakes.pool.chats
    assert not chat.add_generation_prompt
    assert chat.continue_final_message
    assert chat.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}


async def test_template_arguments_off_the_list(daemon: Daemon) -> None:
    reply = await daemon.chat(chat_template_kwargs={"messages": "forged"})
    assert reply.status == 400
    assert reply.json()["error"]["param"] == "chat_template_kwargs"


async def test_template_refuses(daemon: Daemon) -> None:
    daemon.fakes.pool.error = TemplateFailed("roles must alternate")
    reply = await daemon.chat()
    assert (reply.status, reply.json()["error"]["code"]) == (400, "template_error")
