"""Endpoints that change something: cancellation."""

from __future__ import annotations

from aiohttp import web

from daemon.api.context import services_of
from daemon.api.plan import MAX_ANSWERS
from daemon.errors import NotFound


async def cancel_request(request: web.Request) -> web.Response:
    """POST /v1/requests/{id}/cancel: by the x-request-id of a request, or the id in its answer.

    All answers of the request are given up; each ends as cancelled.
    """
    request_id = request.match_info["id"].removeprefix("chatcmpl-").removeprefix("cmpl-")
    admission = services_of(request).admission
    ids = [request_id, *(f"{request_id}.{index}" for index in range(1, MAX_ANSWERS))]
    cancelled = sum(admission.cancel(one) for one in ids)
    if not cancelled:
        raise NotFound("No running request has this id.", param="id")
    return web.json_response({"id": request_id, "cancelled": cancelled})
