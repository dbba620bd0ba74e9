"""What a handler finds on its request: the services, the ids, and its body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog
from aiohttp import web

from daemon.api.body import read_json
from daemon.api.schema import Body, BodyT, unknown_names, validate
from daemon.api.services import Services

SERVICES: web.AppKey[Services] = web.AppKey("services", Services)
UNKNOWN: web.AppKey[set[str]] = web.AppKey("unknown", set)
MAX_UNKNOWN = 256

log = structlog.get_logger("hotset.api")


def services_of(request: web.Request) -> Services:
    """The parts of the service."""
    return request.app[SERVICES]


async def read_body(request: web.Request, model: type[BodyT]) -> tuple[BodyT, dict[str, Any]]:
    """The typed body and the raw one; unknown names are logged once each.

    Raises:
        BadRequest and the other errors of `daemon.api.body`.
    """
    data = await read_json(request)
    note_unknown(request.app, model, data)
    return validate(model, data), data


def note_unknown(app: Mapping[web.AppKey[set[str]], set[str]] | web.Application, model: type[Body], data: Any) -> None:
    """Log each unknown name the first time that a client sends it; a bounded number of names is remembered."""
    seen = app[UNKNOWN]
    for name in sorted(unknown_names(model, data) - seen):
        if len(seen) >= MAX_UNKNOWN:
            return
        seen.add(name)
        log.info("body field ignored", field=name[:64] if name.isidentifier() else "(no identifier)")
