"""Endpoints that only tell: models, health, metrics, properties, slots, and what is not offered."""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import Any

from aiohttp import web

from daemon.api.context import services_of
from daemon.api.errors import error_object
from daemon.api.names import RETRY_AFTER, check_model, loaded, loading_message, served_name, state_of, vocabulary
from daemon.api.native_shapes import sampling_settings, slot, waiting
from daemon.api.services import Services
from daemon.errors import ModelLoading, NotImplementedHere
from daemon.messages import Card, Sampling
from daemon.metrics import CONTENT_TYPE, View

STARTED = int(time.time())
_SECRET = secrets.token_bytes(32)


def model_item(services: Services) -> dict[str, Any]:
    """The one entry of /v1/models; sizes are 0 until the model is loaded."""
    info = services.supervisor.info
    name = served_name(services)
    n_ctx = info.n_ctx if info else services.config.model.context
    meta = {
        "n_ctx": n_ctx,
        "n_ctx_train": info.n_ctx_train if info else 0,
        "n_params": info.n_params if info else 0,
        "size": info.size if info else 0,
        "n_vocab": info.n_vocab if info else 0,
    }
    return {
        "id": name,
        "object": "model",
        "created": STARTED,
        "owned_by": "hotset",
        "name": name,
        "context_length": n_ctx,
        "max_model_len": n_ctx,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "meta": meta,
        "status": {"value": "loaded" if services.supervisor.state == "ready" else services.supervisor.state},
    }


async def models(request: web.Request) -> web.Response:
    """GET /v1/models, from memory."""
    return web.json_response({"object": "list", "data": [model_item(services_of(request))]})


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}; ids may hold slashes."""
    services = services_of(request)
    check_model(request.match_info["id"].rstrip("/"), services)
    return web.json_response(model_item(services))


async def health(request: web.Request) -> web.Response:
    """200 when requests are answered; 503 with the reason while loading, restarting, stopping or failed."""
    services = services_of(request)
    supervisor, state = services.supervisor, state_of(services)
    if state == "ready":
        return web.json_response({"status": "ok"})
    body = {
        "status": state,
        "reason": supervisor.reason,
        "progress": supervisor.progress,
        "error": error_object(ModelLoading(loading_message(services))),
    }
    return web.json_response(body, status=503, headers={"Retry-After": str(RETRY_AFTER)})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics."""
    body = services_of(request).metrics.render()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def props(request: web.Request) -> web.Response:
    """GET /props: the model's file name without its directory, its template and the default samplers."""
    services = services_of(request)
    info = loaded(services)
    vocab = vocabulary(services)
    params = sampling_settings(Sampling(**services.config.sampling.model_dump()))
    params |= {"n_predict": -1, "max_tokens": -1, "stop": [], "stream": True}
    return web.json_response(
        {
            "default_generation_settings": {"params": params, "n_ctx": info.n_ctx},
            "total_slots": info.max_sequences,
            "model_alias": info.name,
            "model_path": services.config.model.path.rpartition("/")[2] or info.name,
            "modalities": {"vision": False, "audio": False, "video": False},
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "chat_template": vocab.chat_template,
            "bos_token": vocab.bos_token,
            "eos_token": vocab.eos_token,
            "build_info": info.build,
            "is_sleeping": False,
            "hotset": {
                "version": services.version,
                "residency": services.supervisor.residency.reason,
                "warnings": info.warnings,
                "config": _reload_status(services),
            },
        }
    )


def _reload_status(services: Services) -> dict[str, Any]:
    """How the last reading of the configuration went: keys only, because values and faults may name paths."""
    last = services.reload
    if last is None:
        return {"last_reload": None, "pending": [], "overridden": [], "faults": []}
    return {
        "last_reload": {"at": int(last.at), "result": last.result},
        "pending": [{"key": change.key, "effect": change.effect} for change in last.pending],
        "overridden": last.shadowed,
        "faults": [key or "file" for key, _ in last.faults],
    }


async def residency(request: web.Request) -> web.Response:
    """GET /v1/residency: which experts are in VRAM, device by device and layer by layer, and why."""
    services = services_of(request)
    loaded(services)
    return web.json_response(services.supervisor.residency.model_dump())


async def slots(request: web.Request) -> web.Response:
    """GET /slots: one entry for each sequence, then what is parked, then what waits, the next one first.

    503 with ?fail_on_no_slot=1 when no sequence is free.
    """
    services = services_of(request)
    info = loaded(services)
    states = services.supervisor.snapshot.slots
    busy = {state.seq_id: state for state in states}
    items = [slot(seq_id, busy.get(seq_id), info.n_ctx) for seq_id in range(info.max_sequences)]
    if request.query.get("fail_on_no_slot") and all(item["is_processing"] for item in items):
        raise ModelLoading("No slot is free.", retry_after=1)
    parked = [slot(-1, state, info.n_ctx) for state in states if state.phase == "parked"]
    queue = [waiting(item, info.n_ctx, _shown(item.client)) for item in services.admission.waiting()]
    return web.json_response([*items, *parked, *queue])


def _shown(client: str) -> str:
    """Tells clients apart without naming them: another one in each run of the service."""
    return hashlib.blake2b(client.encode(), key=_SECRET, digest_size=6).hexdigest()


async def embeddings(request: web.Request) -> web.Response:
    """POST /v1/embeddings: the engine generates only."""
    raise NotImplementedHere("The loaded model generates text; this server offers no embeddings.")


async def not_offered(request: web.Request) -> web.Response:
    """Endpoints that clients try and this server does not have."""
    raise NotImplementedHere("This endpoint is not offered by this server.")


def view(services: Services) -> View:
    """What the gauges of /metrics show."""
    queue = services.admission.statistics()
    supervisor = services.supervisor
    return View(
        version=services.version,
        running=queue.running,
        waiting=queue.waiting_in,
        ready=supervisor.state == "ready",
        snapshot=supervisor.snapshot,
        info=supervisor.info,
        residency=supervisor.residency,
        config=services.config,
        cards=_cards(services),
    )


def _cards(services: Services) -> dict[str, Card]:
    info = services.supervisor.info
    found = {device.name: services.card(device.pci) for device in info.devices} if info else {}
    return {name: card for name, card in found.items() if card is not None}
