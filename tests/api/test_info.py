"""Endpoints that only tell, in every state of the engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from daemon.api.routes import TABLE
from daemon.app import build
from daemon.config import Config
from daemon.errors import ModelLoading, QueueFull
from daemon.messages import Device, ExpertDevice, ExpertLayer, Residency
from daemon.native import cards
from daemon.settings import Settings
from tests.api.conftest import Daemon, Start
from tests.fakes import MOVING, done, model_info, nothing


async def test_model_item(daemon: Daemon) -> None:
    body = (await daemon.get("/v1/models")).json()
    [item] = body["data"]
    assert body["object"] == "list"
    created = item.pop("created")
    assert isinstance(created, int)
    assert item == {
        "id": "tiny-moe",
        "object": "model",
        "owned_by": "hotset",
        "name": "tiny-moe",
        "context_length": 4096,
        "max_model_len": 4096,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "meta": {"n_ctx": 4096, "n_ctx_train": 8192, "n_params": 41_000_000, "size": 25_000_000, "n_vocab": 258},
        "status": {"value": "loaded"},
    }


async def test_model_by_id(daemon: Daemon) -> None:
    assert (await daemon.get("/v1/models/tiny-moe")).json()["id"] == "tiny-moe"
    assert (await daemon.get("/v1/models/tiny-moe/")).json()["id"] == "tiny-moe"
    reply = await daemon.get("/v1/models/some/other")
    assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/models/", "/v1/models/"])
async def test_models_while_loading(daemon: Daemon, path: str) -> None:
    daemon.fakes.supervisor.info = None
    daemon.fakes.supervisor.state = "loading"
    [item] = (await daemon.get(path)).json()["data"]
    assert item["id"] == "tiny-moe-Q4_K_M"
    assert item["status"] == {"value": "loading"}


async def test_health_ready(daemon: Daemon) -> None:
    reply = await daemon.get("/health")
    assert (reply.status, reply.json()) == (200, {"status": "ok"})


async def test_health_while_the_service_drains(daemon: Daemon) -> None:
    daemon.fakes.admission.closing = True
    reply = await daemon.get("/health")
    assert reply.status == 503
    assert reply.json()["status"] == "stopped"
    assert reply.json()["error"]["message"] == "The service is stopping."


async def test_health_while_the_vocabulary_is_read(daemon: Daemon) -> None:
    del daemon.fakes.pool.info
    reply = await daemon.get("/health")
    assert (reply.status, reply.json()["status"]) == (503, "loading")


@pytest.mark.parametrize("state", ["loading", "restarting", "failed", "stopped"])
async def test_health_not_ready(daemon: Daemon, state: Any) -> None:
    daemon.fakes.supervisor.state = state
    daemon.fakes.supervisor.reason = "because"
    daemon.fakes.supervisor.progress = 0.5
    reply = await daemon.get("/health")
    body = reply.json()
    assert reply.status == 503
    assert int(reply.headers["retry-after"]) > 0
    assert (body["status"], body["reason"], body["progress"]) == (state, "because", 0.5)
    assert body["error"]["code"] == "model_loading"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("POST", "/v1/completions", {"prompt": "x"}),
        ("POST", "/completion", {"prompt": "x"}),
        ("GET", "/props", None),
        ("GET", "/slots", None),
    ],
)
async def test_loading(daemon: Daemon, method: str, path: str, body: Any) -> None:
    daemon.fakes.supervisor.info = None
    daemon.fakes.supervisor.state = "loading"
    daemon.fakes.supervisor.progress = 0.25
    reply = await daemon.request(method, path, json=body)
    assert (reply.status, reply.json()["error"]["code"]) == (503, "model_loading")
    assert "25%" in reply.json()["error"]["message"]
    assert re.fullmatch(r"[1-9]\d*", reply.headers["retry-after"])


@pytest.mark.parametrize("stream", [False, True])
async def test_queue_full(daemon: Daemon, stream: bool) -> None:
    daemon.fakes.admission.error = QueueFull("64 requests are waiting.", retry_after=7)
    reply = await daemon.chat(stream=stream)
    assert (reply.status, reply.headers["retry-after"]) == (429, "7")
    assert (reply.json()["error"]["code"], reply.json()["error"]["type"]) == ("queue_full", "rate_limit_error")
    assert 'hotset_rejected_total{reason="queue_full"} 1.0' in (await daemon.get("/metrics")).body.decode()


async def test_restarting_is_told_by_admission(daemon: Daemon) -> None:
    daemon.fakes.admission.error = ModelLoading("The engine is being restarted.", retry_after=2)
    reply = await daemon.chat(stream=True)
    assert (reply.status, reply.headers["retry-after"]) == (503, "2")


async def test_queue_that_fills_up_between_two_answers(daemon: Daemon) -> None:
    daemon.fakes.admission.script = nothing
    daemon.fakes.admission.error = QueueFull("full", retry_after=1)
    daemon.fakes.admission.error_after = 1
    assert (await daemon.chat(n=2)).status == 429
    assert daemon.fakes.admission.tickets[0].cancelled.is_set()


async def test_vocabulary_not_read_yet(daemon: Daemon) -> None:
    del daemon.fakes.pool.info
    for reply in (await daemon.get("/props"), await daemon.post("/detokenize", {"tokens": [1]})):
        assert (reply.status, reply.json()["error"]["code"]) == (503, "model_loading")


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/embeddings", "/v1/responses", "/infill", "/v1/rerank", "/rerank", "/v1/messages",
     "/v1/messages/count_tokens"],
)  # fmt: skip
async def test_not_offered(daemon: Daemon, path: str) -> None:
    reply = await daemon.post(path, {"input": "x"})
    assert reply.status == 501
    assert reply.json()["error"]["message"]
    assert reply.headers["content-type"].startswith("application/json")


async def test_anthropic_paths_have_anthropic_errors(daemon: Daemon) -> None:
    body = (await daemon.post("/v1/messages", {})).json()
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}


EXPERTS = Residency(
    state="on",
    reason="on: 8 of 32 experts",
    filled=1.0,
    devices=[
        ExpertDevice(
            device="Vulkan0", asked="50%", asked_bytes=100, effective_bytes=90, why="", bytes=96,
            layers=2, slots=8, resident=7, hits=30, misses=10,
        )
    ],
    layers=[
        ExpertLayer(
            layer=1, device="Vulkan0", mode="partial", reason="", memory="", experts=16, slots=8, resident=7,
            hits=30, misses=10,
        )
    ],
    uploaded_bytes=70,
)  # fmt: skip


async def test_residency_is_what_the_engine_said_last(daemon: Daemon) -> None:
    assert (await daemon.get("/v1/residency")).json()["reason"] == "not applicable: no device"
    daemon.fakes.supervisor.residency = EXPERTS
    assert Residency.model_validate((await daemon.get("/v1/residency")).json()) == EXPERTS
    assert (await daemon.get("/props")).json()["hotset"]["residency"] == EXPERTS.reason
    text = (await daemon.get("/metrics")).body.decode()
    for name, value in (("slots_total", 8), ("slots_resident", 7), ("vram_bytes", 96)):
        assert f'hotset_expert_{name}{{device="Vulkan0"}} {value}.0' in text
    assert not any(line.startswith("hotset_expert_hit_rate") for line in text.splitlines()), "no step was decoded yet"
    daemon.fakes.supervisor.info = None
    assert (await daemon.get("/v1/residency")).status == 503


async def test_metrics_of_experts_that_move(daemon: Daemon) -> None:
    daemon.fakes.supervisor.residency = MOVING
    daemon.fakes.metrics.experts.report(MOVING)
    lines = (await daemon.get("/metrics")).body.decode().splitlines()
    for line in (
        'hotset_expert_hits_total{device="Vulkan0",tier="vram"} 60.0',
        'hotset_expert_misses_total{device="Vulkan0",tier="ram"} 20.0',
        "hotset_expert_swaps_total 9.0",
        "hotset_expert_upload_bytes_total 70.0",
        "hotset_expert_hit_rate 0.75",
        'hotset_expert_gate{state="open"} 1.0',
        'hotset_expert_gate{state="closed"} 0.0',
        'hotset_expert_selftest{result="passed"} 1.0',
    ):
        assert line in lines


async def test_memory_of_cards_is_read_anew_and_told_where_the_kernel_knows_it(daemon: Daemon, tmp_path: Path) -> None:
    for number, pci in enumerate(("0000:03:00.0", "0000:04:00.0")):
        (tmp_path / pci).mkdir()
        (tmp_path / pci / "mem_info_vram_total").write_text("4096")
        (tmp_path / pci / "mem_info_vram_used").write_text(f"{number}000")
    plain = Device(name="A", description="", kind="gpu", memory_free=0, memory_total=0)
    addresses = {"A": "0000:03:00.0", "B": "0000:04:00.0", "C": "0000:05:00.0", "D": ""}
    devices = [plain.model_copy(update={"name": name, "pci": pci}) for name, pci in addresses.items()]
    daemon.fakes.supervisor.info = model_info().model_copy(update={"devices": devices})
    daemon.fakes.services.card = lambda pci: cards.read(pci, tmp_path)

    async def found() -> set[str]:
        reply = await daemon.get("/metrics")
        assert reply.status == 200
        return {line for line in reply.body.decode().splitlines() if line.startswith(("hotset_vram", "hotset_gtt"))}

    total = {f'hotset_vram_total_bytes{{device="{name}"}} 4096.0' for name in "AB"}
    assert await found() == total | {
        'hotset_vram_used_bytes{device="A"} 0.0', 'hotset_vram_used_bytes{device="B"} 1000.0'
    }  # fmt: skip
    (tmp_path / "0000:03:00.0/mem_info_vram_used").write_text("7")
    (tmp_path / "0000:04:00.0/mem_info_vram_used").write_text("nonsense")
    assert await found() == total - {'hotset_vram_total_bytes{device="B"} 4096.0'} | {
        'hotset_vram_used_bytes{device="A"} 7.0'
    }  # fmt: skip
    daemon.fakes.supervisor.info = None
    assert await found() == set()


def test_the_service_reads_cards_from_the_kernel() -> None:
    assert build(Settings(Config())).services.card is cards.read


async def test_every_spelling_of_every_path(daemon: Daemon) -> None:
    for endpoint in TABLE:
        for variant in endpoint.variants():
            path = variant.replace("{id}", "x")
            reply = await daemon.request(endpoint.method, path, json={} if endpoint.body else None)
            assert reply.headers["content-type"].split(";")[0] in ("application/json", "text/plain"), path
            code = "" if endpoint.text or reply.status < 400 else str(reply.json()["error"].get("code"))
            assert code not in ("not_found",) or "requests" in path, path
            assert reply.status != 405, path


async def test_cancel_by_id(daemon: Daemon) -> None:
    daemon.fakes.admission.script = nothing
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "n": 2}
    async with daemon.session.post(daemon.url + "/v1/chat/completions", json=body) as response:
        request_id = response.headers["x-request-id"]
        await daemon.fakes.admission.ticket(1)
        reply = await daemon.post(f"/v1/requests/chatcmpl-{request_id}/cancel")
        assert reply.json() == {"id": request_id, "cancelled": 2}
        text = (await response.read()).decode()
    assert text.count('"finish_reason":"stop"') == 2
    assert text.endswith("data: [DONE]\n\n")


async def test_cancel_of_an_unknown_id(daemon: Daemon) -> None:
    reply = await daemon.post("/v1/requests/nobody/cancel")
    assert (reply.status, reply.json()["error"]["code"]) == (404, "not_found")


async def test_metrics(daemon: Daemon) -> None:
    daemon.fakes.admission.script = lambda submit: [
        done(submit, n_prompt=10, n_cached=4, n_predicted=5, prompt_ms=100.0, predicted_ms=200.0)
    ]
    await daemon.chat()
    await daemon.chat(temperature=1000)
    daemon.fakes.services.metrics.engine_restarted("exit")
    reply = await daemon.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = reply.body.decode().splitlines()
    for line in (
        'hotset_requests_total{endpoint="/v1/chat/completions",outcome="ok"} 1.0',
        'hotset_requests_total{endpoint="/v1/chat/completions",outcome="4xx"} 1.0',
        'hotset_prompt_tokens_total{source="computed"} 6.0',
        'hotset_prompt_tokens_total{source="live"} 4.0',
        "hotset_generated_tokens_total 5.0",
        "hotset_prefill_seconds_sum 0.1",
        "hotset_request_prompt_tokens_sum 10.0",
        "hotset_request_completion_tokens_sum 5.0",
        'hotset_request_seconds_count{endpoint="/v1/chat/completions"} 2.0',
        "hotset_decode_seconds_sum 0.2",
        'hotset_engine_restarts_total{reason="exit"} 1.0',
        "hotset_running 0.0",
        'hotset_waiting{class="normal"} 0.0',
        "hotset_ready 1.0",
        'hotset_kv_cells{state="used"} 10.0',
        'hotset_kv_cells{state="free"} 8182.0',
        "hotset_parked_bytes 7.0",
    ):
        assert line in lines
    assert any(line.startswith("hotset_build_info{") and 'version="0.0-test"' in line for line in lines)
    assert any(line.startswith("hotset_config_info{") for line in lines)
    assert not any("_created" in line for line in lines)


async def test_tokens_count_when_they_come_and_each_once(daemon: Daemon) -> None:
    async def generated() -> str:
        text = (await daemon.get("/metrics")).body.decode()
        return next(line for line in text.splitlines() if line.startswith("hotset_generated_tokens_total"))

    daemon.fakes.admission.script = nothing
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    async with daemon.session.post(daemon.url + "/v1/chat/completions", json=body) as response:
        ticket = await daemon.fakes.admission.ticket()
        for text in ("a", "b"):
            ticket.text(text)
        await ticket.read(2)
        assert await generated() == "hotset_generated_tokens_total 2.0"
        ticket.finish(n_predicted=3)
        await response.read()
    assert await generated() == "hotset_generated_tokens_total 3.0"


async def test_metrics_never_hold_what_a_client_sent(daemon: Daemon) -> None:
    await daemon.get("/some/secret-path")
    await daemon.chat(user="secret-user", model="secret-model")
    await daemon.session.get(daemon.url + "/v1/models/secret-id", headers={"X-OpenWebUI-User-Id": "secret-user"})
    text = (await daemon.get("/metrics")).body.decode()
    assert "secret" not in text
    assert 'endpoint="unknown"' in text


async def test_clients_are_told_apart(start: Start) -> None:
    daemon: Daemon = await start(http={"keys": ["first-key", "second-key"]})
    body = {"messages": [{"role": "user", "content": "x"}]}
    for key, user in (("first-key", ""), ("second-key", ""), ("first-key", "anna"), ("first-key", "bob")):
        headers = {"x-api-key": key} | ({"X-OpenWebUI-User-Id": user} if user else {})
        assert (await daemon.post("/v1/chat/completions", body, headers=headers)).status == 200
    clients = [submit.client for submit in daemon.fakes.admission.submits]
    assert len(set(clients)) == 4
    assert not any("key" in client for client in clients)
