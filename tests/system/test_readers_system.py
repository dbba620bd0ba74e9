"""Clients of a real daemon that leave, stall or read slowly: what they held is free again, and nobody else notices."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from daemon.model_files import EMBEDDED_MODEL
from hotset_tools.bench import soak
from hotset_tools.bench.soak import total
from hotset_tools.bench.soak_judge import Sample, Tally
from hotset_tools.cli import main
from tests.system.daemon_process import Daemon, eventually, running
from tests.system.test_faults import LONG

SHORT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
READ_LONG = {"messages": [{"role": "user", "content": "word " * 3300}]}
SAMPLE = Sample(0.0, {}, {}, 0, 0, 0)
RESET = struct.pack("ii", 1, 0)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory, library_path: Path) -> Iterator[Daemon]:
    """A daemon with two places, which reads prompts in many steps and soon gives up who does not read."""
    directory = tmp_path_factory.mktemp("crowded")
    environ = {"ENGINE_MAX_SEQUENCES": "2", "ENGINE_UBATCH": "32", "ENGINE_THREADS": "1"}
    with running(directory, HTTP_WRITE_TIMEOUT_SECONDS="0.5", **environ) as daemon:
        yield daemon


class Client:
    """A request on a raw socket."""

    made: ClassVar[list[Client]] = []

    def __init__(self, daemon: Daemon, **fields: object) -> None:
        self.sock = socket.socket()
        self.made.append(self)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.sock.connect(("127.0.0.1", daemon.port))
        body = json.dumps(LONG | {"max_tokens": 500} | fields).encode()
        lines = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}")
        head = "\r\n".join(("POST /v1/chat/completions HTTP/1.1", *lines, "", ""))
        self.sock.sendall(head.encode() + body)

    def leave(self, how: str) -> None:
        if how == "half":
            with contextlib.suppress(OSError):  # it may have lost the connection already, because it does not read
                self.sock.shutdown(socket.SHUT_WR)
            return
        if how == "reset":
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.sock.close()


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Every socket, at the end of its test."""
    yield
    while Client.made:
        Client.made.pop().sock.close()


def metric(daemon: Daemon, prefix: str) -> int:
    return total(daemon.client.get("/metrics").text, prefix)


def phases(daemon: Daemon) -> list[str]:
    return [slot["phase"] for slot in daemon.client.get("/slots").json() if slot["is_processing"]]


def all_free(daemon: Daemon) -> bool:
    held = [metric(daemon, name) for name in ("hotset_running", "hotset_waiting", 'hotset_kv_cells{state="used"')]
    return held == [0, 0, 0] and phases(daemon) == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_who_leaves_while_it_is_computed(crowded: Daemon, stage: str, stream: bool, how: str) -> None:
    fields: dict[str, object] = READ_LONG if stage == "prefill" else {"max_tokens": 3000}
    clients = [Client(crowded, stream=stream, **fields) for _ in range(2)]
    eventually(lambda: stage in phases(crowded), f"{stage} of an answer")
    for client in clients:
        client.leave(how)
    eventually(lambda: all_free(crowded), "that all is free")
    assert crowded.client.post("/v1/chat/completions", json=SHORT).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_who_leaves_while_it_waits(crowded: Daemon, stream: bool, how: str) -> None:
    run = [Client(crowded, stream=True, max_tokens=3000) for _ in range(2)]
    eventually(lambda: metric(crowded, "hotset_running") == 2, "two that run")
    engine = crowded.engine()
    engine.suspend()
    try:
        wait = [Client(crowded, stream=stream) for _ in range(3)]
        eventually(lambda: metric(crowded, "hotset_waiting") == 3, "three that wait")
        for client in wait:
            client.leave(how)
        eventually(lambda: metric(crowded, "hotset_waiting") == 0, "that nobody waits")
        assert metric(crowded, "hotset_running") == 2
    finally:
        engine.resume()
    for client in run:
        client.leave(how)
    eventually(lambda: all_free(crowded), "that all is free")


def test_many_leave_at_random(crowded: Daemon) -> None:
    dice = random.Random(5)
    for _ in range(6):
        clients = [Client(crowded, stream=dice.random() < 0.5, **dice.choice(({}, READ_LONG))) for _ in range(10)]
        for client in clients[:5]:
            client.leave(dice.choice(("close", "reset", "half")))
        answer = crowded.client.post("/v1/chat/completions", json=SHORT | {"service_tier": "default"})
        assert answer.status_code == 200
        for client in clients[5:]:
            client.leave(dice.choice(("close", "reset", "half")))
    eventually(lambda: all_free(crowded), "that all is free")
    assert "Traceback" not in crowded.output()


def test_who_does_not_read_loses_its_answer_and_its_place(crowded: Daemon) -> None:
    """For one reason or the other: how fast tokens come decides whether it lags too far before its time is over."""
    given_up = "hotset_connections_given_up_total"
    before = metric(crowded, given_up)
    Client(crowded, stream=True, max_tokens=3900, logprobs=True, top_logprobs=20)
    eventually(lambda: metric(crowded, given_up) == before + 1, "that it is given up")
    eventually(lambda: all_free(crowded), "that all is free")
    assert "outcome=slow_reader" in crowded.output()


def test_it_stops_although_a_client_does_not_read(tmp_path: Path, library_path: Path) -> None:
    with running(tmp_path, HTTP_SHUTDOWN_SECONDS="1", ENGINE_THREADS="1") as daemon:
        Client(daemon, stream=True, max_tokens=3900, logprobs=True, top_logprobs=20)
        eventually(lambda: "decode" in phases(daemon), "its answer")
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.output()


def settings(**changes: object) -> soak.Settings:
    values = {"model": EMBEDDED_MODEL, "clients": 24, "minutes": 0.25, "sequences": 4, "threads": 1}
    values |= {"max_waiting": 8, "margin_mib": 48, "seed": 1}
    return soak.Settings(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.timeout(300)
def test_a_short_soak(library_path: Path) -> None:
    said: list[str] = []
    report = soak.run(settings(), said.append)
    assert report.faults == []
    assert report.ok
    assert said
    told = json.loads(json.dumps(report.as_json()))
    assert sum(told["outcomes"].values()) == told["requests"]
    assert told["outcomes"]["answered"] > 0
    assert told["rejected"].keys() <= {"queue_full", "client_limit", "model_loading"}
    assert told["memory"].keys() == {"service", "engine"}


def test_a_soak_that_finds_faults_ends_with_1(
    library_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = soak.Report(settings(), Tally(sent=1), [], SAMPLE, SAMPLE, 0, 0, {}, ["one request was lost"])
    monkeypatch.setattr(soak, "run", lambda settings, say: report)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "soak"])
    assert ended.value.code == 1
    assert "FAULT one request was lost\nnot ok" in capsys.readouterr().out
