"""`hotset top` against the real application in every state, and against what is no hotsetd."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from daemon.messages import Residency, SlotState, Snapshot
from hotset_tools.top import polling
from hotset_tools.top.picture import GENERATED, MOVES, Picture
from hotset_tools.top.polling import Reading, Service
from tests.api.conftest import Daemon, Start
from tests.fakes import MOVING

KEY = "a-good-key"


async def look(url: str, key: str = "") -> Reading:
    """One look, as the tool does it, while the application goes on."""
    return await asyncio.to_thread(Service(url, key, clock=lambda: 5.0).read)


async def test_a_service_that_is_ready(daemon: Daemon) -> None:
    slot = SlotState(seq_id=1, request="r", phase="decode", n_prompt=3, n_past=5, n_predicted=2)
    daemon.fakes.supervisor.snapshot = Snapshot(slots=[slot], kv_cells=10)
    daemon.fakes.supervisor.residency = MOVING
    daemon.fakes.metrics.experts.report(MOVING)
    await daemon.chat(max_tokens=4)
    found = await look(daemon.url)
    assert (found.at, found.state, found.reason) == (5.0, "ready", "")
    assert found.residency == MOVING
    assert found.slots == (False, True, False, False)
    assert [found.metrics.total(name) for name in (GENERATED, MOVES, "hotset_running")] == [4, 9, 0]
    assert found.metrics.total("hotset_expert_hits_total") == 60
    assert found.metrics.labels("hotset_model_info")["name"] == "tiny-moe"
    assert Picture(daemon.url, found).as_json()["version"] == "0.0-test"


async def test_residency_that_is_off(daemon: Daemon) -> None:
    found = await look(daemon.url)
    assert found.residency == Residency(reason="not applicable: no device")
    assert Picture(daemon.url, found).good
    assert found.metrics.total("hotset_expert_hits_total") is None


@pytest.mark.parametrize("state", ["loading", "restarting", "failed", "stopped"])
@pytest.mark.parametrize("loaded_before", [True, False])
async def test_a_service_that_is_not_ready(daemon: Daemon, state: Any, loaded_before: bool) -> None:
    supervisor = daemon.fakes.supervisor
    supervisor.state, supervisor.reason, supervisor.progress = state, "because", 0.25
    if not loaded_before:
        supervisor.info = None
    found = await look(daemon.url)
    assert (found.state, found.reason, found.progress) == (state, "because", 0.25)
    assert (found.residency is not None, found.slots is not None) == (loaded_before, loaded_before)
    assert found.metrics.total("hotset_ready") == 0
    assert not Picture(daemon.url, found).good


async def test_keys(start: Start) -> None:
    daemon: Daemon = await start(http={"keys": [KEY]})
    for key, state, word in (("", "refused", "HOTSET_KEY"), ("wrong-key", "refused", "this key"), (KEY, "ready", "")):
        found = await look(daemon.url, key)
        assert (found.state, word in found.reason) == (state, True)
        assert key == "" or key not in found.reason


async def test_a_host_that_is_not_allowed(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name in the address is what the service is asked for."""
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: resolve("127.0.0.1" if host == "box.example" else host,
                                                                    *rest, **more)
    )  # fmt: skip
    found = await look(f"http://box.example:{daemon.port}")
    assert (found.state, "http.allowed_hosts" in found.reason) == ("refused", True)


async def test_proxies_of_the_environment_are_not_asked(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with closed_port() as port:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        assert (await look(daemon.url)).state == "ready"


# -- what is no hotsetd


@contextmanager
def closed_port() -> Iterator[int]:
    """A port on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


Answers = dict[str, tuple[int, bytes]]


@contextmanager
def answering(answers: Answers, headers: dict[str, str] | None = None) -> Iterator[tuple[str, list[str]]]:
    """A server that answers as told; gives its address and the paths that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status, body = answers[self.path]
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


GOOD: Answers = {
    "/health": (200, b'{"status": "ok"}'),
    "/metrics": (200, b"# TYPE hotset_running gauge\nhotset_running 1.0\n"),
    "/v1/residency": (200, MOVING.model_dump_json().encode()),
    "/slots": (200, b'[{"id": 0, "is_processing": true}, {"id": -1, "is_processing": false}]'),
}


def test_the_answers_of_this_test_are_good_ones() -> None:
    with answering(GOOD) as (url, asked):
        found = Service(url).read()
    assert (found.state, found.slots, found.residency) == ("ready", (True,), MOVING)
    assert sorted(asked) == sorted(GOOD)


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/health", 200, b"<html>"),
        ("/health", 200, b"[]"),
        ("/health", 200, b"{}"),
        ("/health", 200, b'{"status": "fine"}'),
        ("/health", 503, b'{"status": ["ok"]}'),
        ("/health", 404, b""),
        ("/health", 500, b"{}"),
        ("/health", 302, b""),
        ("/metrics", 200, b"<html>\xff"),
        ("/metrics", 200, b"a{b="),
        ("/metrics", 404, b""),
        ("/v1/residency", 200, b"null"),
        ("/v1/residency", 200, json.dumps(MOVING.model_dump() | {"new": 1}).encode()),
        ("/v1/residency", 403, b"no"),
        ("/slots", 200, b'[{"id": 0}]'),
        ("/slots", 200, b'[{"is_processing": true}]'),
        ("/slots", 501, b"{}"),
    ],
)
def test_what_answers_is_no_hotsetd(path: str, status: int, body: bytes) -> None:
    with answering(GOOD | {path: (status, body)}, {"Location": "/elsewhere"}) as (url, asked):
        found = Service(url, KEY).read()
    assert (found.state, "no hotsetd" in found.reason) == ("unknown", True)
    assert "/elsewhere" not in asked, "a key must not follow"


def test_an_answer_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "_MOST_BYTES", 1000)
    with answering(GOOD | {"/metrics": (200, b"#" * 2000)}) as (url, _):
        assert Service(url).read().state == "unknown"


def test_nobody_listens() -> None:
    with closed_port() as port:
        found = Service(f"http://127.0.0.1:{port}").read()
    assert (found.state, found.reason) == ("away", "nobody answers: Connection refused")


def test_a_name_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert Service("http://nowhere.example").read().reason == "nobody answers: Name or service not known"


@contextmanager
def talking(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does with its one connection what `talk` says."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                talk(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    "said",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}", b"HTTP/1.1 503 No\r\nContent-Length: 100\r\n\r\n{}",
     b"SSH-2.0\r\n", b"HTTP/1.1 200 OK\r\n" * 300],
)  # fmt: skip
def test_a_connection_that_breaks(said: bytes) -> None:
    def talk(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(said)

    with talking(talk) as url:
        found = Service(url).read()
    assert found.state == "away"
    assert found.reason.startswith("nobody answers: ")


def test_a_service_that_accepts_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "ANSWER_SECONDS", 0.05)
    over = threading.Event()
    with talking(lambda connection: over.wait(30)) as url:  # type: ignore[arg-type,return-value]
        found = Service(url).read()
        over.set()
    assert (found.state, found.reason) == ("away", "no answer within 0.05 s")


def test_a_service_that_stops_in_the_middle_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "ANSWER_SECONDS", 0.05)
    over = threading.Event()

    def talk(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        over.wait(30)

    with talking(talk) as url:
        found = Service(url).read()
        over.set()
    assert (found.state, found.reason) == ("away", "no answer within 0.05 s")
