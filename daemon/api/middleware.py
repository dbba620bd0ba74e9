"""What happens around every handler: ids, checks, errors as JSON, one log line, response headers."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable
from time import monotonic

import structlog
from aiohttp import web

from daemon.api.body import too_large
from daemon.api.context import services_of
from daemon.api.errors import error_response, from_http
from daemon.api.guard import check_host, check_origin
from daemon.api.record import RequestRecord, current_id, current_record, start_record
from daemon.errors import HotsetError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ENDPOINTS: web.AppKey[dict[str, str]] = web.AppKey("endpoints", dict)
PUBLIC = frozenset({"/health"})
REJECTIONS = frozenset(
    {"queue_full", "client_queue_full", "model_loading", "invalid_api_key", "forbidden", "payload_too_large"}
)
_TOKENS = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}")

log = structlog.get_logger("hotset.request")


@web.middleware
async def record_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: gives the request its id, and writes one log line when it is over."""
    record = start_record(uuid.uuid4().hex)
    status = 499
    try:
        response = await handler(request)
        status = response.status
        return response
    except asyncio.CancelledError:
        record.outcome = record.outcome or "cancelled"
        raise
    finally:
        _log(request, record, status)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every exception into the error body of this service."""
    try:
        return await handler(request)
    except HotsetError as error:
        return _error(request, error)
    except web.HTTPRequestEntityTooLarge:
        return _error(request, too_large(request))
    except web.HTTPException as raised:
        response = _error(request, from_http(raised))
        if "Allow" in raised.headers:
            response.headers["Allow"] = raised.headers["Allow"]
        return response
    except ConnectionError:
        raise asyncio.CancelledError("the client is gone") from None
    except Exception:
        log.exception("handler failed", id=current_record().id)
        return _error(request, HotsetError("The server failed while handling this request."))


@web.middleware
async def check_callers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Host, Origin, preflight, key and announced size, before the handler or a 404 is reached."""
    services = services_of(request)
    http = services.config.http
    check_host(request.headers.getall("Host", []), http.allowed_hosts)
    origin = request.headers.get("Origin")
    if origin is not None:
        check_origin(origin, request.headers["Host"], http.allowed_origins)
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return _preflight(request)
    if _endpoint(request) not in PUBLIC:
        key, record = services.keys.check(request.headers), current_record()
        record.client = _client(request, key and key.name)
        record.ceiling = key and key.priority
    if request.headers.get("Expect", "100-continue").lower() != "100-continue":
        raise web.HTTPExpectationFailed
    if request.content_length is not None and request.content_length > request.client_max_size:
        raise too_large(request)
    return await handler(request)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal before headers go out, for streams too: the request id, and CORS for an accepted Origin."""
    request_id = current_id()
    response.headers["x-request-id"] = request_id or uuid.uuid4().hex
    if request_id is None and isinstance(response, web.HTTPException):
        # aiohttp refused before any middleware ran (an unknown `Expect` on an unknown path).
        refusal = error_response(from_http(response))
        assert isinstance(refusal.body, bytes)
        response.body, response.content_type = refusal.body, "application/json"
        response.headers["Content-Length"] = str(len(refusal.body))
    response.headers["X-Content-Type-Options"] = "nosniff"
    origin = request.headers.get("Origin")
    if origin is not None and response.status != 403:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = "x-request-id, retry-after"
    response.headers["Vary"] = "Origin"


MIDDLEWARES = (record_requests, errors_as_json, check_callers)


def _preflight(request: web.Request) -> web.Response:
    headers = {"Access-Control-Allow-Methods": "GET, POST, OPTIONS", "Access-Control-Max-Age": "600"}
    asked = request.headers.get("Access-Control-Request-Headers", "")
    if _TOKENS.fullmatch(asked):
        headers["Access-Control-Allow-Headers"] = asked
    if "Access-Control-Request-Private-Network" in request.headers:
        headers["Access-Control-Allow-Private-Network"] = "true"
    return web.Response(status=204, headers=headers)


def _client(request: web.Request, key: str | None) -> str:
    """Who asks, for fair shares: the key or the address, and the user that Open WebUI names behind it."""
    client = key or request.remote or "local"
    user = request.headers.get("X-OpenWebUI-User-Id", "")
    return f"{client}/{user[:64]}" if user.isascii() and user.isprintable() and user else client


def _error(request: web.Request, error: HotsetError) -> web.Response:
    record = current_record()
    record.code = error.code
    if error.code in REJECTIONS:
        services_of(request).metrics.rejected(error.code)
    return error_response(error, request.path)


def _endpoint(request: web.Request) -> str:
    """The route's entry in the table: the only form of a path that reaches metrics."""
    resource = request.match_info.route.resource
    canonical = "" if resource is None else resource.canonical
    return request.app[ENDPOINTS].get(canonical, "unknown")


def _log(request: web.Request, record: RequestRecord, status: int) -> None:
    endpoint = _endpoint(request)
    outcome = record.outcome or ("ok" if status < 400 else f"{status // 100}xx")
    services_of(request).metrics.request(endpoint, outcome, monotonic() - record.started)
    polled = request.method == "GET" and (status < 400 or status == 503)
    write = log.debug if polled else log.info
    write("request", method=request.method[:16], path=endpoint, status=status, outcome=outcome, **record.fields())
