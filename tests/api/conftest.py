"""The application on a free port, over fakes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from daemon.api.server import make_app, make_runner
from daemon.config import Config
from tests.fakes import Fakes, make_fakes

MODEL_PATH = "models/tiny-moe-Q4_K_M.gguf"


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[str]:
        """The blocks of an event stream."""
        return self.body.decode().split("\n\n")[:-1]

    def data(self) -> list[Any]:
        """The decoded data of an event stream, without comments and the end mark."""
        lines = [block.removeprefix("data: ") for block in self.events() if block.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


class Daemon:
    """The running application, its fakes and a client."""

    def __init__(
        self, fakes: Fakes, app: web.Application, runner: web.AppRunner, session: aiohttp.ClientSession
    ) -> None:
        self.fakes = fakes
        self.app = app
        self.runner = runner
        self.port = port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        self.session = session

    @property
    def connections(self) -> int:
        """Clients that are connected."""
        assert self.runner.server is not None
        return len(self.runner.server.connections)

    async def stop(self) -> None:
        """End the application; what is open is closed."""
        await self.session.close()
        await self.runner.cleanup()

    async def request(self, method: str, path: str, **options: Any) -> Reply:
        async with self.session.request(method, self.url + path, **options) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return Reply(response.status, headers, await response.read())

    async def get(self, path: str, **options: Any) -> Reply:
        return await self.request("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> Reply:
        return await self.request("POST", path, json=body, **options)

    async def chat(self, **fields: Any) -> Reply:
        body = {"messages": [{"role": "user", "content": "Hi"}]} | fields
        return await self.post("/v1/chat/completions", body)

    async def raw(self, data: bytes) -> Reply:
        """Send bytes as they are; read until the server closes or the announced body is complete."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            return Reply(int(lines[0].split(" ")[1]), headers, body)
        finally:
            writer.close()
            await writer.wait_closed()


Start = Callable[..., Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start applications with other settings: `await start(http={"ping_seconds": 0.05})`."""
    running: list[tuple[web.AppRunner, aiohttp.ClientSession]] = []

    async def make(**sections: dict[str, Any]) -> Daemon:
        config = Config.model_validate({"model": {"path": MODEL_PATH}} | sections, strict=False)
        fakes = make_fakes(config)
        app = make_app(fakes.services)
        runner = make_runner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        session = aiohttp.ClientSession()
        running.append((runner, session))
        return Daemon(fakes, app, runner, session)

    yield make
    for runner, session in running:
        await session.close()
        await runner.cleanup()


@pytest.fixture
async def daemon(start: Start) -> Daemon:
    """The application with default settings."""
    return await start()
