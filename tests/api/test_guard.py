"""Keys, Host and Origin."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.api.conftest import Daemon, Start
from tests.api.test_edge import check, message

KEY = "correct-horse"
GET = {"method": "GET", "path": "/v1/models"}


@pytest.fixture
async def locked(start: Start) -> Daemon:
    """An application that asks for a key."""
    return await start(http={"keys": [KEY, "another-key"]})


@pytest.mark.parametrize(
    "header",
    [f"Authorization: Bearer {KEY}", f"authorization: bearer {KEY}", f"x-api-key: {KEY}", "X-API-Key: another-key",
     f"Authorization: Bearer wrong\r\nx-api-key: {KEY}"],
)  # fmt: skip
async def test_right_key(locked: Daemon, header: str) -> None:
    assert (await locked.raw(message(b"", **GET, extra=header + "\r\n"))).status == 200


@pytest.mark.parametrize(
    "header",
    ["", "Authorization: Bearer wrong-horse\r\n", "Authorization: Bearer \r\n", f"Authorization: Basic {KEY}\r\n",
     f"Authorization: {KEY}\r\n", f"x-api-key: {KEY}x\r\n", "x-api-key: \xff\xfe\r\n", f"Cookie: key={KEY}\r\n"],
)  # fmt: skip
async def test_wrong_key(locked: Daemon, header: str) -> None:
    reply = await locked.raw(message(b"", **GET, extra=header))
    check(reply, 401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"
    assert KEY not in reply.body.decode()


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/slots", "/props", "/openapi.json", "/nope"])
async def test_everything_but_health_needs_the_key(locked: Daemon, path: str) -> None:
    assert (await locked.get(path)).status == 401
    assert (await locked.get("/health")).status == 200
    assert (await locked.get("/v1/health/")).status == 200


@pytest.mark.parametrize("header", ["", "Authorization: Bearer anything\r\n", "x-api-key: \r\n"])
async def test_any_key_when_none_is_asked_for(daemon: Daemon, header: str) -> None:
    assert (await daemon.raw(message(b"", **GET, extra=header))).status == 200


async def test_keys_are_replaced_while_running(locked: Daemon) -> None:
    locked.fakes.services.keys.replace(["brand-new-key"])
    assert (await locked.get("/v1/models", headers={"x-api-key": KEY})).status == 401
    assert (await locked.get("/v1/models", headers={"x-api-key": "brand-new-key"})).status == 200


async def test_keys_from_a_file(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("file-key-one\nfile-key-two\n")
    daemon: Daemon = await start(http={"keys_file": str(file)})
    assert (await daemon.get("/v1/models", headers={"x-api-key": "file-key-two"})).status == 200
    assert (await daemon.get("/v1/models")).status == 401


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8117", "127.0.0.1:1", "192.168.1.5", "[::1]:8117", "[fe80::1]", "localhost.",
     socket.gethostname(), socket.gethostname() + ".local:8117", "box.example:80"],
)  # fmt: skip
async def test_hosts_that_are_this_machine(start: Start, host: str) -> None:
    daemon: Daemon = await start(http={"allowed_hosts": ["Box.example"]})
    assert (await daemon.raw(message(b"", **GET, host=host))).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example:8117",
        "",
        "[evil]",
        "@localhost",
    ],
)
async def test_foreign_hosts(daemon: Daemon, host: str) -> None:
    check(await daemon.raw(message(b"", **GET, host=host)), 403, "forbidden")


async def test_host_must_be_there_once(daemon: Daemon) -> None:
    check(await daemon.raw(b"GET /health HTTP/1.0\r\n\r\n"), 400, "invalid_request")
    twice = await daemon.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
    assert twice.status == 400


@pytest.mark.parametrize(
    "origin",
    ["http://localhost", "http://localhost:3000", "http://127.0.0.1:5173", "tauri://localhost", "app://obsidian.md",
     "app://-", "http://192.168.1.5:8117"],
)  # fmt: skip
async def test_allowed_origins(daemon: Daemon, origin: str) -> None:
    reply = await daemon.raw(message(b"", **GET, host="192.168.1.5:8117", extra=f"Origin: {origin}\r\n"))
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == origin
    assert "x-request-id" in reply.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in reply.headers
    assert reply.headers["vary"] == "Origin"


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "https://localhost", "null", "http://localhost.evil.example", "tauri://evil", "file://",
     "http://localhost@evil.example", ""],
)  # fmt: skip
async def test_foreign_origins(daemon: Daemon, origin: str) -> None:
    reply = await daemon.raw(message(b"", **GET, host="localhost:8117", extra=f"Origin: {origin}\r\n"))
    check(reply, 403, "forbidden")
    assert "access-control-allow-origin" not in reply.headers


async def test_origin_with_a_port_matches_that_port_only(start: Start) -> None:
    daemon: Daemon = await start(http={"allowed_origins": ["https://chat.example:8443"]})
    assert (await daemon.get("/health", headers={"Origin": "https://chat.example:8443"})).status == 200
    assert (await daemon.get("/health", headers={"Origin": "https://chat.example"})).status == 403
    assert (await daemon.get("/health", headers={"Origin": "http://localhost"})).status == 403


async def test_preflight_needs_no_key(locked: Daemon) -> None:
    headers = {
        "Origin": "http://localhost:3000",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
        "Access-Control-Request-Private-Network": "true",
    }
    reply = await locked.request("OPTIONS", "/v1/chat/completions", headers=headers)
    assert reply.status == 204
    assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-headers"] == "authorization, content-type, x-stainless-os"
    assert reply.headers["access-control-allow-private-network"] == "true"
    assert "access-control-allow-credentials" not in reply.headers


async def test_preflight_from_a_foreign_origin(daemon: Daemon) -> None:
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    reply = await daemon.request("OPTIONS", "/v1/chat/completions", headers=headers)
    check(reply, 403, "forbidden")


async def test_errors_and_streams_carry_cors_headers_too(daemon: Daemon) -> None:
    headers = {"Origin": "http://localhost:3000"}
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    for reply in (
        await daemon.get("/nope", headers=headers),
        await daemon.post("/v1/chat/completions", body, headers=headers),
    ):
        assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert reply.headers["x-request-id"]
