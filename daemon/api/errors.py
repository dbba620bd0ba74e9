"""Errors as JSON bodies: the same shape on every path, also for what aiohttp itself refuses."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from daemon.errors import HotsetError, NotFound

_HTTP_CODES = {
    400: "invalid_request",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "payload_too_large",
    417: "expectation_failed",
    431: "headers_too_large",
}


def error_object(error: HotsetError) -> dict[str, Any]:
    """What stands under "error"."""
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.code}


def error_response(error: HotsetError, path: str = "") -> web.Response:
    """The whole response; paths of the Anthropic API get that API's shape."""
    body: dict[str, Any] = {"error": error_object(error)}
    if is_anthropic(path):
        body = {"type": "error", "error": {"type": error.type, "message": error.message}}
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(body, status=error.status, headers=headers)


def from_http(raised: web.HTTPException) -> HotsetError:
    """One of aiohttp's own refusals as an error of this service."""
    if raised.status == 404:
        return NotFound("There is no such path.")
    error = HotsetError(f"{raised.reason}.")
    error.status = raised.status
    error.code = _HTTP_CODES.get(raised.status, "http_error")
    error.type = "invalid_request_error" if raised.status < 500 else "server_error"
    return error


def is_anthropic(path: str) -> bool:
    """Whether clients of this path expect Anthropic's shapes."""
    return path.removeprefix("/v1").startswith("/messages")
