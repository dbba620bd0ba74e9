"""What people lose when things go wrong: nothing that was not being streamed."""

from __future__ import annotations

import json
import signal
import socket
import threading
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from tests.system.daemon_process import Daemon, eventually, running

LONG = {"messages": [{"role": "user", "content": "Tell a long story."}], "ignore_eos": True, "temperature": 0.8}


class Stream(threading.Thread):
    """One streaming client; `chunks` are the parsed data lines, `ended` the sentinel if it came."""

    def __init__(self, url: str, **fields: object) -> None:
        super().__init__(daemon=True)
        self.url, self.body = url, LONG | {"stream": True} | fields
        self.chunks: list[dict[str, object]] = []
        self.ended = False
        self.status = 0
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=self.body, timeout=120) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    self.ended = True
                elif line.startswith("data: "):
                    self.chunks.append(json.loads(line[6:]))

    @property
    def has_text(self) -> bool:
        return any("choices" in c and c["choices"] and c["choices"][0]["delta"].get("content") for c in self.chunks)  # type: ignore[index]

    @property
    def error(self) -> object:
        return self.chunks[-1].get("error") if self.chunks else None

    @property
    def n_terminal(self) -> int:
        """Events that say how the answer ended: a reason to finish, or an error."""
        errors = sum("error" in chunk for chunk in self.chunks)
        return errors + sum(bool(c["choices"][0]["finish_reason"]) for c in self.chunks if c.get("choices"))  # type: ignore[index]

    @property
    def finished_well(self) -> bool:
        reasons = [c["choices"][0]["finish_reason"] for c in self.chunks if c.get("choices")]  # type: ignore[index]
        return self.ended and [reason for reason in reasons if reason] == ["length"]


def test_a_killed_engine_costs_only_what_was_streaming(tmp_path: Path, library_path: Path) -> None:
    """8 run and 8 wait: 8 error events, 8 answers, 503 in between, no hang."""
    with running(tmp_path, ENGINE_RESTART_DELAY_SECONDS="1.5") as daemon:
        first = [Stream(daemon.url, max_tokens=3000) for _ in range(8)]
        eventually(lambda: all(stream.has_text for stream in first), "all eight streams running")
        second = [Stream(daemon.url, max_tokens=20) for _ in range(8)]
        eventually(lambda: all(stream.chunks for stream in second), "all eight others queued")
        assert not any(stream.has_text for stream in second)
        daemon.engine().send_signal(signal.SIGKILL)
        eventually(lambda: daemon.health() == 503, "503")
        refused = daemon.client.post("/v1/chat/completions", json=LONG)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "model_loading"
        assert int(refused.headers["Retry-After"]) >= 1
        for stream in (*first, *second):
            stream.join(60)
            assert not stream.is_alive(), "no stream may hang"
        assert [bool(stream.error) and not stream.ended for stream in first] == [True] * 8
        assert [stream.finished_well for stream in second] == [True] * 8
        assert daemon.health() == 200


def test_the_engine_ends_when_the_service_is_killed(tmp_path: Path, library_path: Path) -> None:
    with running(tmp_path) as daemon:
        children = psutil.Process(daemon.process.pid).children(recursive=True)
        assert len(children) >= 2
        daemon.process.kill()
        daemon.process.wait()
        _, alive = psutil.wait_procs(children, timeout=15)
        assert not alive


def test_sigterm_lets_a_running_answer_finish_and_fails_what_waits(tmp_path: Path, library_path: Path) -> None:
    with running(tmp_path, ENGINE_MAX_SEQUENCES="1", HTTP_SHUTDOWN_SECONDS="90") as daemon:
        runs = Stream(daemon.url, max_tokens=2000)  # long enough that the second one still waits when the signal comes
        eventually(lambda: runs.has_text, "the first stream running")
        waits = Stream(daemon.url, max_tokens=5)
        eventually(lambda: bool(waits.chunks), "the second one queued")
        assert daemon.stop() == 0
        runs.join(10)
        waits.join(10)
        assert runs.finished_well
        assert waits.error


def test_a_second_signal_does_not_wait(tmp_path: Path, library_path: Path) -> None:
    with running(tmp_path, ENGINE_MAX_SEQUENCES="1") as daemon:
        runs = Stream(daemon.url, max_tokens=3900)
        eventually(lambda: runs.has_text, "the stream running")
        daemon.process.send_signal(signal.SIGINT)
        eventually(lambda: daemon.health() in (0, 503), "the first signal taken")
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.process.wait(20) == 1
        assert "without waiting" in daemon.output()
        assert "Traceback" not in daemon.output()


def test_sigterm_while_everything_starts(tmp_path: Path, library_path: Path) -> None:
    with running(tmp_path, wait=False) as daemon:
        eventually(lambda: daemon.health() == 503, "the address open, the model loading")
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.output()


def test_a_client_that_goes_away_frees_its_sequence(tmp_path: Path, library_path: Path) -> None:
    with running(tmp_path, ENGINE_MAX_SEQUENCES="1") as daemon:
        body = json.dumps(LONG | {"stream": True, "max_tokens": 3500}).encode()
        lines = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}")
        head = "\r\n".join(("POST /v1/chat/completions HTTP/1.1", *lines, "", ""))
        with socket.create_connection(("127.0.0.1", daemon.port)) as client:
            client.sendall(head.encode() + body)
            assert client.recv(100)
        answer = daemon.client.post("/v1/chat/completions", json=LONG | {"max_tokens": 3})
        assert answer.status_code == 200
        slots = [slot for slot in daemon.client.get("/slots").json() if slot.get("is_processing")]
        assert slots == []


def test_a_client_that_goes_away_without_streaming_frees_its_sequence(tmp_path: Path, library_path: Path) -> None:
    with running(tmp_path, ENGINE_MAX_SEQUENCES="1") as daemon:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{daemon.url}/v1/chat/completions", json=LONG | {"max_tokens": 3900}, timeout=0.5)
        answer = daemon.client.post("/v1/chat/completions", json=LONG | {"max_tokens": 3})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("arguments", "environ", "code", "text"),
    [
        (("--check", "bad.toml"), {}, 78, "engine.repak"),
        (("bad.toml",), {}, 78, "engine.ubatch"),
        (("missing.toml",), {}, 78, "cannot be read"),
        ((), {"MODEL_PATH": "nowhere.gguf"}, 78, "model.path"),
        ((), {"HTTP_HOST": "0.0.0.0"}, 78, "http.keys"),
        ((), {"ENGINE_DEVICE": "Warp9"}, 78, "Warp9"),
    ],
)
def test_what_cannot_be_served_is_one_message_and_an_exit_code(
    arguments: tuple[str, ...], environ: dict[str, str], code: int, text: str, tmp_path: Path, library_path: Path
) -> None:
    (tmp_path / "bad.toml").write_text("[engine]\nubatch = 1\nrepak = true\n", "utf-8")
    with running(tmp_path, *arguments, wait=False, **environ) as daemon:
        assert daemon.process.wait(60) == code
        assert text in daemon.output()
        assert "Traceback" not in daemon.output()


def test_a_busy_port_is_one_message(daemon: Daemon, tmp_path: Path) -> None:
    with running(tmp_path, wait=False, HTTP_PORT=str(daemon.port)) as other:
        assert other.process.wait(30) == 1
        assert other.output().count(str(daemon.port)) == 1
        assert "cannot be listened on: Address already in use" in other.output()
        assert "Traceback" not in other.output()
