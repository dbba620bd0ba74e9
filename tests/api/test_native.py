"""llama-server's shapes."""

from __future__ import annotations

from typing import Any

import pytest

from daemon.messages import SlotState, Snapshot, Tokens
from tests.api.conftest import Daemon
from tests.fakes import STORY, done, logprob


async def complete(daemon: Daemon, prompt: Any = "Once", **fields: Any) -> Any:
    return await daemon.post("/completion", {"prompt": prompt} | fields)


async def test_whole_answer(daemon: Daemon) -> None:
    body = (await complete(daemon, n_predict=-1, seed=3, stop=["@"])).json()
    assert body["content"] == STORY
    assert body["stop"] is True
    assert (body["stop_type"], body["stopping_word"]) == ("eos", "")
    assert body["tokens"] == []
    assert body["tokens_evaluated"] == 4
    assert body["tokens_predicted"] == len(STORY.split(" "))
    assert body["tokens_cached"] == 0
    assert body["truncated"] is False
    assert body["prompt"] == "Once"
    assert body["model"] == "tiny-moe"
    settings = body["generation_settings"]
    assert (settings["seed"], settings["stop"], settings["temperature"]) == (3, ["@"], 0.8)
    assert settings["n_predict"] == 4092
    assert body["timings"]["predicted_n"] == body["tokens_predicted"]


@pytest.mark.parametrize(
    ("fields", "kind", "word"), [({"n_predict": 2}, "limit", ""), ({"stop": [" fox"]}, "word", " fox"), ({}, "eos", "")]
)
async def test_stop_types(daemon: Daemon, fields: dict[str, Any], kind: str, word: str) -> None:
    body = (await complete(daemon, **fields)).json()
    assert (body["stop_type"], body["stopping_word"]) == (kind, word)


async def test_tokens_and_probabilities(daemon: Daemon) -> None:
    daemon.fakes.admission.script = lambda submit: [
        Tokens(id=submit.id, tokens=[7], text="é", logprobs=[logprob("é", submit.logprobs or 0)]),
        done(submit),
    ]
    body = (await complete(daemon, n_probs=2, return_tokens=True)).json()
    assert body["tokens"] == [7]
    [item] = body["completion_probabilities"]
    assert (item["id"], item["token"], item["bytes"], item["logprob"]) == (0, "é", [0xC3, 0xA9], -0.5)
    assert len(item["top_logprobs"]) == 2
    assert daemon.fakes.admission.submits[0].logprobs == 2


async def test_no_probabilities_unless_asked_for(daemon: Daemon) -> None:
    assert "completion_probabilities" not in (await complete(daemon, n_probs=0)).json()
    assert daemon.fakes.admission.submits[0].logprobs is None


async def test_stream(daemon: Daemon) -> None:
    daemon.fakes.admission.script = lambda submit: [
        Tokens(id=submit.id, tokens=[7], text="a", logprobs=[logprob("a", 1)] if submit.logprobs else None),
        done(submit, text="b", n_predicted=1),
    ]
    reply = await complete(daemon, stream=True)
    first, held, last = reply.data()
    assert reply.events()[0] == ": queued"
    assert first == {
        "index": 0,
        "content": "a",
        "tokens": [7],
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": 1,
        "tokens_evaluated": 4,
    }
    assert held["content"] == "b"
    assert (last["content"], last["stop"], last["stop_type"]) == ("", True, "eos")
    assert "timings" in last
    assert b"[DONE]" not in reply.body
    with_probabilities = (await complete(daemon, stream=True, n_probs=1)).data()[0]
    assert with_probabilities["completion_probabilities"][0]["token"] == "a"


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ([65, "BC", 68], [65, 66, 67, 68]),
        ([65, 66], [65, 66]),
        ({"prompt_string": "AB"}, [65, 66]),
    ],
)
async def test_one_prompt_in_other_forms(daemon: Daemon, prompt: Any, tokens: list[int]) -> None:
    body = (await complete(daemon, prompt)).json()
    assert daemon.fakes.admission.submits[0].prompt == tokens
    assert body["prompt"] == bytes(tokens).decode()


async def test_several_prompts_give_a_list(daemon: Daemon) -> None:
    bodies = (await complete(daemon, ["a", "b"])).json()
    assert [body["prompt"] for body in bodies] == ["a", "b"]
    bodies = (await complete(daemon, [[65, "B"], {"prompt_string": "c"}, "d"])).json()
    assert [body["prompt"] for body in bodies] == ["AB", "c", "d"]
    assert len((await complete(daemon, ["a"])).json()) == 1


@pytest.mark.parametrize("prompt", [[], [[1], 2], 5, [999], ["a"] * 65, {"prompt": "x"}, None])
async def test_bad_prompts(daemon: Daemon, prompt: Any) -> None:
    reply = await complete(daemon, prompt)
    assert reply.status == 400
    assert reply.json()["error"]["param"].startswith("prompt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}}, "multimodal_data"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"json_schema": {"type": "object"}}, "json_schema"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"response_fields": ["content"]}, "response_fields"),
        ({"n_indent": 2}, "n_indent"),
        ({"t_max_predict_ms": 5}, "t_max_predict_ms"),
        ({"image_data": [{"data": "x"}]}, "image_data"),
    ],
)
async def test_what_is_not_offered(daemon: Daemon, fields: dict[str, Any], param: str) -> None:
    reply = await daemon.post("/completion", {"prompt": "x"} | fields)
    assert (reply.status, reply.json()["error"]["code"], reply.json()["error"]["param"]) == (400, "unsupported", param)


async def test_tokenize(daemon: Daemon) -> None:
    assert (await daemon.post("/tokenize", {"content": "Aé"})).json() == {"tokens": [65, 0xC3, 0xA9]}
    body = {"content": "Aé", "with_pieces": True, "add_special": True, "parse_special": False}
    pieces = (await daemon.post("/tokenize", body)).json()["tokens"]
    assert pieces == [{"id": 65, "piece": "A"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]
    assert daemon.fakes.pool.tokenized == [("Aé", False, True), ("Aé", True, False)]


async def test_detokenize(daemon: Daemon) -> None:
    assert (await daemon.post("/detokenize", {"tokens": [72, 105]})).json() == {"content": "Hi"}
    assert (await daemon.post("/detokenize", {"tokens": []})).json() == {"content": ""}
    for tokens in ([258], [-1], ["a"], None, 5):
        reply = await daemon.post("/detokenize", {"tokens": tokens})
        assert reply.status == 400
        assert reply.json()["error"]["param"].startswith("tokens")


async def test_apply_template(daemon: Daemon) -> None:
    reply = await daemon.post("/apply-template", {"messages": [{"role": "user", "content": "Hi"}]})
    assert reply.json() == {"prompt": "user: Hi\nassistant:"}
    assert daemon.fakes.admission.submits == []
    assert (await daemon.post("/apply-template", {"messages": []})).status == 400


async def test_props(daemon: Daemon) -> None:
    body = (await daemon.get("/props")).json()
    assert body["default_generation_settings"]["n_ctx"] == 4096
    assert body["default_generation_settings"]["params"]["temperature"] == 0.8
    assert body["total_slots"] == 4
    assert body["model_path"] == "tiny-moe-Q4_K_M.gguf"
    assert body["chat_template"] == "{{ messages }}"
    assert (body["bos_token"], body["eos_token"]) == ("<s>", "</s>")
    assert body["build_info"] == "b1-fake"


async def test_slots(daemon: Daemon) -> None:
    busy = SlotState(seq_id=1, request="r", phase="decode", n_prompt=10, n_past=14, n_predicted=4)
    daemon.fakes.supervisor.snapshot = Snapshot(slots=[busy])
    slots = (await daemon.get("/slots")).json()
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3]
    assert [slot["is_processing"] for slot in slots] == [False, True, False, False]
    assert slots[1]["n_prompt_tokens_processed"] == 10
    assert slots[1]["next_token"][0]["n_decoded"] == 4
    assert (await daemon.get("/slots?fail_on_no_slot=1")).status == 200
    all_busy = [busy.model_copy(update={"seq_id": seq_id}) for seq_id in range(4)]
    parked = busy.model_copy(update={"seq_id": -1, "request": "p", "phase": "parked", "priority": "background"})
    daemon.fakes.supervisor.snapshot = Snapshot(slots=[*all_busy, parked])
    assert (await daemon.get("/slots?fail_on_no_slot=1")).status == 503
    *held, last = (await daemon.get("/slots")).json()
    assert [slot["id"] for slot in held] == [0, 1, 2, 3]
    told = {"id": -1, "request": "p", "phase": "parked", "priority": "background", "is_processing": False}
    assert told.items() <= last.items()


@pytest.mark.parametrize("prompt", [[65] * 4097, [[65] * 4097], [65, *[""] * 4096], [[65, *[""] * 4096]]])
async def test_prompts_of_too_many_parts(daemon: Daemon, prompt: Any) -> None:
    reply = await complete(daemon, prompt)
    assert (reply.status, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert reply.json()["error"]["param"] == "prompt"


async def test_pieces_of_a_huge_text_are_refused(daemon: Daemon) -> None:
    body = {"content": "a" * 100_001, "with_pieces": True}
    reply = await daemon.post("/tokenize", body)
    assert reply.status == 400
    assert "100001" in reply.json()["error"]["message"]
