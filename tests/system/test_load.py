"""`hotset reload --load` under a real daemon: another load takes the place of the one that is served, nothing is lost.

An engine that is suspended makes a stage last until the test has looked at it, on any machine.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from tests import minigguf
from tests.system.daemon_process import Daemon, eventually, running
from tests.system.test_faults import LONG, Stream

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = "tinymoe-41m-Q4_K_M"
DRAFT = ROOT / "models" / "tinymoe-draft-1.5m-Q8_0.gguf"
IDS = {"prompt": [400, 401, 402], "max_tokens": 3, "temperature": 0}


class Service:
    """A daemon with a configuration that the test writes, and the command that talks to it."""

    def __init__(self, daemon: Daemon, file: Path) -> None:
        self.daemon, self._file = daemon, file

    def write(self, **keys: object) -> None:
        """Another configuration; `section__key=value` beside those of the fixture."""
        write(self._file, **keys)

    def order(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "hotset_tools.cli", "reload", "--load", *words]
        command += ["--pid", str(self.daemon.process.pid)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def load(self, *words: str) -> tuple[int, str]:
        """Exit code and everything that it says."""
        return ended(self.order(*words))

    def stage(self, status: str, reason: str) -> None:
        """Wait until /health says this."""

        def reached() -> bool:
            said = self.daemon.client.get("/health").json()
            return said["status"] == status and reason in said.get("reason", "")

        eventually(reached, f"{status}: {reason}")

    def model(self) -> tuple[str, int]:
        """Name and context of what is served."""
        (item,) = self.daemon.client.get("/v1/models").json()["data"]
        return item["id"], item["context_length"]

    def metric(self, sample: str) -> bool:
        return sample in self.daemon.client.get("/metrics").text.splitlines()

    def next_engine(self, before: int) -> psutil.Process:
        """The engine that comes after the one with this process id, as soon as it is there."""
        found: list[psutil.Process] = []

        def started() -> bool:
            children = psutil.Process(self.daemon.process.pid).children()
            found[:] = [child for child in children if child.pid != before and "daemon.engine" in command_line(child)]
            return bool(found)

        eventually(started, "the next engine")
        return found[0]

    def streams(self, count: int, **fields: object) -> list[Stream]:
        made = [Stream(self.daemon.url, **fields) for _ in range(count)]
        eventually(lambda: all(stream.chunks for stream in made), "their acceptance")
        return made

    def held_up(self) -> tuple[list[Stream], list[Stream], psutil.Process]:
        """Two streams that run, two that wait, and the engine, which is suspended."""
        first = self.streams(2, max_tokens=300)
        eventually(lambda: all(stream.has_text for stream in first), "two streams that run")
        engine = self.daemon.engine()
        engine.suspend()
        return first, self.streams(2, max_tokens=5), engine


def write(file: Path, **keys: object) -> None:
    values: dict[str, object] = {"model__context": 1024, "engine__device": "cpu", "engine__threads": 1}
    values |= {"engine__max_sequences": 2, "engine__restart_delay_seconds": 0.2, "http__shutdown_seconds": 60}
    text = "".join(f"{name.replace('__', '.')} = {value!r}\n" for name, value in (values | keys).items())
    file.write_text(text, "utf-8")


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture
def service(tmp_path: Path, library_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with started(tmp_path, monkeypatch) as made:
        yield made


@contextmanager
def started(directory: Path, monkeypatch: pytest.MonkeyPatch, **keys: object) -> Iterator[Service]:
    with tempfile.TemporaryDirectory() as run:  # a short name: the address of a socket holds 107 bytes
        monkeypatch.setenv("RUNTIME_DIRECTORY", run)
        file = directory / "config.toml"
        write(file, **keys)
        with running(directory, device=None) as daemon:
            yield Service(daemon, file)


def ended(order: subprocess.Popen[str]) -> tuple[int, str]:
    out, errors = order.communicate(timeout=100)
    assert "Traceback" not in errors
    return order.returncode, errors + out


def all_well(streams: list[Stream]) -> bool:
    for stream in streams:
        stream.join(60)
    return [(stream.finished_well, stream.n_terminal) for stream in streams] == [(True, 1)] * len(streams)


def test_another_context_while_answers_run_and_wait(service: Service) -> None:
    daemon = service.daemon
    first, second, engine = service.held_up()
    long = service.streams(1, messages=[{"role": "user", "content": "word " * 400}])[0]
    edited = {"model__context": 256, "model__name": "renamed", "queue__max_waiting": 5}
    service.write(**edited)
    order = service.order()
    service.stage("loading", "finished first")
    code, said = service.load()
    assert code == 1
    assert "not loaded: another load is under way (draining)" in said
    third = service.streams(1, max_tokens=5)
    service.write(**edited | {"queue__max_waiting": 4}, http__max_body_mib=9)
    eventually(lambda: "key=queue.max_waiting new=4" in daemon.output(), "a live key that is changed meanwhile")
    assert daemon.client.post("/v1/chat/completions", json=LONG).status_code == 429
    assert service.model() == (EMBEDDED, 1024)

    engine.resume()
    code, said = ended(order)
    assert code == 0, said
    for part in (
        "draining: 2 answers still run",
        "model.context: 1024 -> 256 (loaded)",
        "http.max_body_mib: 32 -> 9 (restart",
        "ready in",
    ):
        assert part in said
    assert all_well(first + second + third)
    long.join(60)
    assert (long.n_terminal, long.error["code"]) == (1, "context_length_exceeded")  # type: ignore[index]
    assert (service.model(), daemon.health()) == (("renamed", 256), 200)
    assert service.metric('hotset_engine_restarts_total{reason="reload"} 1.0')
    assert service.metric('hotset_config_loads_total{result="loaded"} 1.0')
    pending = daemon.client.get("/props").json()["hotset"]["config"]["pending"]
    assert pending == [{"key": "http.max_body_mib", "effect": "restart"}]

    # An engine that dies later loads the same again.
    daemon.engine().kill()
    eventually(lambda: service.metric('hotset_engine_restarts_total{reason="signal"} 1.0'), "its end")
    daemon.wait_until_ready()
    assert service.model() == ("renamed", 256)


def test_another_model_reads_what_waits_with_its_own_vocabulary(service: Service, tmp_path: Path) -> None:
    daemon = service.daemon
    path = minigguf.write_moe(tmp_path / "other.gguf")
    first, second, engine = service.held_up()
    before = daemon.client.post("/tokenize", json={"content": "the sea"}).json()
    with ThreadPoolExecutor(1) as pool:
        ids: Future[httpx.Response] = pool.submit(
            httpx.post, f"{daemon.url}/v1/completions", json=IDS | {"model": EMBEDDED}, timeout=100
        )
        eventually(lambda: service.metric('hotset_waiting{class="normal"} 3.0'), "the queue")
        service.write(model__path=str(path), model__context=0)
        order = service.order()
        service.stage("loading", "finished first")
        engine.resume()
        code, said = ended(order)
        assert code == 0, said
        assert all_well(first + second)
        assert ids.result().status_code == 400
        assert "another vocabulary" in ids.result().json()["error"]["message"]
    assert {stream.chunks[-1]["model"] for stream in first} == {EMBEDDED}
    assert {stream.chunks[-1]["model"] for stream in second} == {"other"}
    assert service.model()[0] == "other"
    assert daemon.client.post("/tokenize", json={"content": "the sea"}).json() != before
    assert daemon.client.get("/props").json()["model_path"] == "other.gguf"


def test_the_draft_model_has_the_same_vocabulary_so_ids_are_kept(service: Service) -> None:
    first, second, engine = service.held_up()
    with ThreadPoolExecutor(1) as pool:
        ids: Future[httpx.Response] = pool.submit(
            httpx.post, f"{service.daemon.url}/v1/completions", json=IDS, timeout=100
        )
        eventually(lambda: service.metric('hotset_waiting{class="normal"} 3.0'), "the queue")
        service.write(model__path=str(DRAFT))
        order = service.order()
        service.stage("loading", "finished first")
        engine.resume()
        assert ended(order)[0] == 0
        assert all_well(first + second)
        assert ids.result().json()["usage"]["prompt_tokens"] == len(IDS["prompt"])  # type: ignore[arg-type]
        assert ids.result().json()["model"] == DRAFT.stem


@pytest.mark.parametrize("fault", ["vocabulary", "device"])
def test_a_load_that_fails_leaves_everything_as_it_was(fault: str, service: Service, tmp_path: Path) -> None:
    """A model file that is cut off is seen before anything is stopped, a device that is not there by the engine."""
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((ROOT / "models" / f"{EMBEDDED}.gguf").read_bytes()[:1_000_000])
    first, second, engine = service.held_up()
    if fault == "device":
        service.write(engine__device="Warp9")
    else:
        service.write(model__path=str(cut))
    order = service.order()
    if fault == "device":
        service.stage("loading", "finished first")
        engine.resume()
    code, said = ended(order)
    assert code == 1
    assert ("Warp9" if fault == "device" else "cut.gguf is cut off") in said
    assert "waits for `hotset reload --load`" in said
    engine.resume() if fault == "vocabulary" else None
    assert all_well(first + second)
    assert (service.model(), service.daemon.health()) == ((EMBEDDED, 1024), 200)
    assert service.metric('hotset_config_loads_total{result="failed"} 1.0')
    assert (service.daemon.engine().pid == engine.pid) == (fault == "vocabulary")
    service.write(model__context=512)
    assert service.load()[0] == 0
    assert service.model() == (EMBEDDED, 512)


@pytest.mark.parametrize("stage", ["draining", "loading"])
def test_an_engine_that_is_killed_in_the_middle(stage: str, service: Service) -> None:
    """The one of before costs what ran on it, a new one is tried again."""
    first, second, engine = service.held_up()
    service.write(model__context=512)
    order = service.order()
    service.stage("loading", "finished first")
    if stage == "loading":
        engine.resume()
        service.next_engine(engine.pid).kill()
    else:
        engine.kill()
    code, said = ended(order)
    assert code == 0, said
    assert all_well(second)
    for stream in first:
        stream.join(60)
    assert [stream.n_terminal for stream in first] == [1, 1]
    assert [stream.finished_well for stream in first] == [stage == "loading"] * 2
    assert service.model() == (EMBEDDED, 512)
    assert service.metric('hotset_engine_restarts_total{reason="signal"} 1.0')


def test_answers_that_take_too_long_get_an_error_event(
    tmp_path: Path, library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path, monkeypatch, http__shutdown_seconds=0) as service:
        first, second, engine = service.held_up()
        service.write(model__context=512, http__shutdown_seconds=0)
        code, said = service.load()
        assert code == 0, said
        assert "2 answers were ended: http.shutdown_seconds was over" in said
        for stream in first:
            stream.join(60)
            assert (stream.n_terminal, stream.error["code"]) == (1, "engine_failed")  # type: ignore[index]
        assert all_well(second)
        assert not engine.is_running(), "a suspended engine is killed"


def test_the_service_is_stopped_while_it_drains(service: Service) -> None:
    first, second, engine = service.held_up()
    service.write(model__context=512)
    order = service.order()
    service.stage("loading", "finished first")
    service.daemon.process.terminate()
    code, said = ended(order)
    assert code == 1
    assert "went away" in said
    engine.resume()
    assert service.daemon.process.wait(60) == 0
    assert all_well(first)
    for stream in second:
        stream.join(60)
        assert stream.n_terminal == 1
        assert stream.error
    assert "Traceback" not in service.daemon.output()


def test_the_service_is_stopped_while_the_engine_loads(service: Service) -> None:
    first = service.daemon.engine()
    service.write(model__context=512)
    order = service.order()
    service.next_engine(first.pid).suspend()
    waits = service.streams(1, max_tokens=5)[0]
    assert service.daemon.stop() == 0
    assert ended(order)[0] == 1
    waits.join(60)
    assert waits.n_terminal == 1
    assert "Traceback" not in service.daemon.output()


def test_nothing_is_restarted_where_nothing_waits_but_files_are_read_again_by_force(
    tmp_path: Path, library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("first {{ messages[0].content }}", "utf-8")
    with started(tmp_path, monkeypatch, model__chat_template="chat.jinja") as service:
        pid = service.daemon.engine().pid
        code, said = service.load()
        assert (code, service.daemon.engine().pid) == (0, pid)
        assert "nothing to load" in said
        template.write_text("second {{ messages[0].content }}", "utf-8")
        assert service.load("--force")[0] == 0
        assert service.daemon.engine().pid != pid
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        assert service.daemon.client.post("/apply-template", json=chat).json() == {"prompt": "second Hi"}
        template.write_text("{% broken", "utf-8")
        assert service.load("--force")[0] == 0, "as at the start: chats are refused, all else works"
        assert service.daemon.client.post("/apply-template", json=chat).status_code == 400
        template.write_bytes(b"\xff")
        code, said = service.load("--force")
        assert code == 1
        assert "model.chat_template" in said
