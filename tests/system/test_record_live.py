"""`hotset record --daemon` beside real services: what clients were answered becomes a trace that other tools take."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon.hotset import trace
from daemon.native.gguf_check import check
from tests.minigguf import write_moe
from tests.residency_bench import RpcServer, rpc_server
from tests.system.daemon_process import Daemon, eventually, running
from tests.system.test_faults import Stream

CLI = [sys.executable, "-m", "hotset_tools.cli"]
N_LAYER, N_EXPERT, TOP_K = 4, 16, 4
SIZES: dict[str, Any] = {"n_layer": N_LAYER, "n_embd": 128, "n_head": 4, "n_head_kv": 2, "head_size": 32, "n_ff": 128}
SIZES |= {"n_expert": N_EXPERT, "n_expert_used": TOP_K, "n_vocab": 512}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("model") / "m.gguf", experts="F32", layers="F32", vocab="F32", **SIZES)


@pytest.fixture(autouse=True)
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A runtime directory with a short name: the address of a socket holds 107 bytes."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("RUNTIME_DIRECTORY", name)
        yield


@pytest.fixture
def server(library_path: Path) -> Iterator[RpcServer]:
    with rpc_server(library_path) as made:
        yield made


@pytest.fixture
def live(model: Path, server: RpcServer, tmp_path: Path) -> Iterator[Daemon]:
    """A service whose experts follow the traffic."""
    settings = {"MODEL_PATH": str(model), "ENGINE_DEVICE": server.device, "ENGINE_THREADS": "1"}
    settings |= {"RESIDENCY_VRAM": "50%", "RESIDENCY_GATE": "false", "ENGINE_RESTART_DELAY_SECONDS": "0.2"}
    with running(tmp_path, **settings) as daemon:
        yield daemon


class Recording:
    """The command while it records."""

    def __init__(self, out: Path, *words: str) -> None:
        self.out = out
        command = [*CLI, "record", "--daemon", "--out", str(out), *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.said = self.process.stderr.readline()

    def end(self, number: int | None = None) -> tuple[int, str]:
        """Exit code and everything that it says."""
        if number is not None:
            self.process.send_signal(number)
        out, errors = self.process.communicate(timeout=60)
        assert "Traceback" not in errors
        return self.process.returncode, self.said + errors + out


Start = Callable[..., Recording]


@pytest.fixture
def record() -> Iterator[Start]:
    """Starts recordings, all of which end with the test."""
    made: list[Recording] = []

    def start(*words: Any) -> Recording:
        made.append(Recording(*words))
        return made[-1]

    yield start
    for recording in made:
        recording.process.kill()
        recording.process.communicate()


def hotset(*words: str) -> Any:
    result = subprocess.run([*CLI, *words, "--json"], capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def ended(streams: list[Stream]) -> bool:
    for stream in streams:
        stream.join(60)
    return all(stream.finished_well for stream in streams)


def test_two_clients_become_two_segments_that_replay_and_plan_take(
    live: Daemon, model: Path, tmp_path: Path, record: Start
) -> None:
    recording = record(tmp_path / "live.trace")
    assert recording.said == f"recording {N_LAYER} layers of m while it answers; Ctrl-C ends it\n"
    streams = [Stream(live.url, max_tokens=n) for n in (150, 170)]
    second = record(tmp_path / "second.trace")
    assert second.end()[0] == 1
    assert "somebody records already" in second.said
    assert ended(streams)
    code, said = recording.end(signal.SIGINT)
    assert code == 0, said

    found = trace.read(recording.out)
    assert found.header.model.fingerprint == check(model).fingerprint
    assert (found.ids.shape[1:], set(found.n_expert)) == ((N_LAYER, TOP_K), {N_EXPERT})
    lengths = sorted(segment.tokens for segment in found.header.segments)
    # The last token of each was not computed; steps with the other's prompt in them are left out.
    assert [140 < lengths[0] <= 149, 160 < lengths[1] <= 169] == [True, True]
    replayed = hotset("replay", str(recording.out), "--slots", "50")
    assert {row["policy"] for row in replayed["rows"]} >= {"hotset", "lru", "clairvoyant"}
    mixed = hotset("replay", str(recording.out), "--slots", "50", "--streams", "1,1")
    assert mixed["rows"]
    planned = hotset("plan", str(recording.out), "--out", str(tmp_path / "hot_set.json"), "--sizes", "50")
    assert planned["file"] == str(tmp_path / "hot_set.json")
    assert "recording of routing ended" in live.output()
    assert str(tmp_path / "live.trace") not in live.output()


def test_an_engine_that_is_killed_ends_it_with_what_there_is(live: Daemon, tmp_path: Path, record: Start) -> None:
    recording = record(tmp_path / "a.trace")
    assert ended([Stream(live.url, max_tokens=40)])
    streams = [Stream(live.url, max_tokens=3000)]
    eventually(lambda: streams[0].has_text, "the stream running")
    live.engine().kill()
    code, said = recording.end()
    assert code == 1
    assert "ended early: the engine ended: killed by SIGKILL" in said
    first = trace.read(recording.out).header.segments[0]
    assert (first.name.partition(" ")[0], first.tokens) == ("answer-1", 39)
    live.wait_until_ready()


def test_another_load_ends_it_too_and_the_next_one_records_again(live: Daemon, tmp_path: Path, record: Start) -> None:
    recording = record(tmp_path / "a.trace")
    assert ended([Stream(live.url, max_tokens=40)])
    load = [*CLI, "reload", "--load", "--force"]
    assert subprocess.run(load, capture_output=True, check=False, timeout=100).returncode == 0
    code, said = recording.end()
    assert code == 1
    assert "ended early: the engine" in said
    assert trace.read(recording.out).header.shape[0] == 39
    recording = record(tmp_path / "b.trace", "--tokens", "20")
    assert ended([Stream(live.url, max_tokens=40)])
    code, said = recording.end()
    assert code == 0
    assert "20 tokens of 1 answer, " in said
    assert trace.read(recording.out).header.shape == (20, N_LAYER, TOP_K)


def test_who_goes_away_costs_the_service_nothing(live: Daemon, tmp_path: Path, record: Start) -> None:
    recording = record(tmp_path / "a.trace")
    recording.end(signal.SIGKILL)
    assert not recording.out.exists()
    eventually(lambda: "recording of routing ended" in live.output(), "the end")
    assert ended([Stream(live.url, max_tokens=40)])
    assert "Traceback" not in live.output()


def test_a_service_that_stops_ends_it(live: Daemon, tmp_path: Path, record: Start) -> None:
    recording = record(tmp_path / "a.trace")
    assert ended([Stream(live.url, max_tokens=40)])
    assert live.stop() == 0
    code, said = recording.end()
    assert code == 1
    assert "ended early: the service is stopping" in said
    assert trace.read(recording.out).header.shape[0] == 39


def test_a_service_without_experts_in_vram_refuses(
    model: Path, library_path: Path, tmp_path: Path, record: Start
) -> None:
    with running(tmp_path, MODEL_PATH=str(model), RESIDENCY_VRAM="50%"):
        recording = record(tmp_path / "a.trace")
        code, said = recording.end()
    assert code == 1
    assert said.startswith("hotset: hotsetd records nothing now: off: the model is on the CPU alone")
    assert not recording.out.exists()
