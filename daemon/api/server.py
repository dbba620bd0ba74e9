"""The HTTP application: routes, middleware, and the runner that cancels a handler whose client left."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from daemon.api.connection import Connection
from daemon.api.context import SERVICES, UNKNOWN
from daemon.api.info import view
from daemon.api.middleware import ENDPOINTS, MIDDLEWARES, add_headers
from daemon.api.openapi import OPENAPI_PATH, rendered
from daemon.api.routes import TABLE, Handler
from daemon.api.services import Services

MIB = 1024 * 1024
KEEPALIVE_SECONDS = 75.0


def make_app(services: Services) -> web.Application:
    """The application over `services`; it starts and closes nothing itself."""
    app = web.Application(middlewares=MIDDLEWARES, client_max_size=services.config.http.max_body_mib * MIB)
    app[SERVICES] = services
    app[UNKNOWN] = set()
    app[ENDPOINTS] = {}
    app.on_response_prepare.append(add_headers)
    services.metrics.watch(lambda: view(services))
    _add_routes(app, services.version)
    return app


def make_runner(app: web.Application, *, shutdown_timeout: float = 0.0) -> web.AppRunner:
    """The runner that must be used: a closed socket cancels its handler, no access log, connections with limits.

    Bodies are not unpacked: they are refused, and what cannot be unpacked would end in a traceback of aiohttp's.
    """
    return _Runner(
        app,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=KEEPALIVE_SECONDS,
        shutdown_timeout=shutdown_timeout,
    )


def _add_routes(app: web.Application, version: str) -> None:
    body = rendered(version)

    async def openapi(request: web.Request) -> web.Response:
        return web.Response(text=body, content_type="application/json")

    for variant in (OPENAPI_PATH, "/v1" + OPENAPI_PATH):
        _add(app, "GET", variant, openapi, OPENAPI_PATH)
    for endpoint in TABLE:
        for variant in endpoint.variants():
            _add(app, endpoint.method, variant, endpoint.handler, endpoint.path)


def _add(app: web.Application, method: str, path: str, handler: Handler, shown: str) -> None:
    """Model ids may hold slashes, so that one parameter takes the rest of the path."""
    if path.endswith("/models/{id}/"):
        return
    path = path.replace("/models/{id}", "/models/{id:.+}")
    route = app.router.add_route(method, path, handler, expect_handler=_offer_continue)
    if method == "GET":
        app.router.add_route("HEAD", path, handler, expect_handler=_offer_continue)
    assert route.resource is not None
    app[ENDPOINTS][route.resource.canonical] = shown


async def _offer_continue(request: web.Request) -> None:
    """Runs before any middleware; what else a client may expect is refused by `check_callers`, in JSON."""
    if request.version == (1, 1) and request.headers["Expect"].lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


class _Server(web.Server):
    def __init__(self, server: web.Server, services: Services, kwargs: dict[str, Any]) -> None:
        super().__init__(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
        )
        self._services, self._protocol_kwargs = services, kwargs

    def __call__(self) -> web.RequestHandler:
        return Connection(self, self._services, loop=self._loop, **self._protocol_kwargs)


class _Runner(web.AppRunner):
    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _Server(server, self.app[SERVICES], server._kwargs)
