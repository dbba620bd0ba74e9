"""[residency] edited under a real daemon while clients stream: budgets follow, memory is given back, answers stay.

The device is a CPU behind the RPC backend and all weights are F32: numbers may not depend on what is resident at all.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from daemon.errors import EXIT_CONFIG, EXIT_OK
from daemon.native.gguf_check import check
from tests.minigguf import write_moe
from tests.residency_bench import RpcServer, rpc_server
from tests.system.daemon_process import Daemon, eventually, running
from tests.system.test_reload_system import hotset_reload, runtime_directory

N_LAYER, N_EXPERT = 8, 16
SIZES: dict[str, Any] = {"n_layer": N_LAYER, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "head_size": 64, "n_ff": 256}
SIZES |= {"n_expert": N_EXPERT, "n_expert_used": 4, "n_vocab": 512, "n_ctx": 4096}
MIB = 1 << 20
EXPERT_BYTES = 3 * 256 * 256 * 4
PROMPTS = ("What the sea gives", "def main():", "Water boils at", "SELECT * FROM")
N_PREDICT = 80
LEAST_MARGIN = 0.01
"""Between the two likeliest tokens, in nats. The KV cache rounds to F16, so the last bit can matter, also to routers:
stock itself gives these answers whichever of them are computed together; of other prompts it does not."""
BODY = {"n_predict": N_PREDICT, "temperature": 0, "ignore_eos": True, "return_tokens": True}
KEY = "first-key"
Stock = dict[str, list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("model") / "m.gguf", experts="F32", layers="F32", vocab="F32", **SIZES)


@pytest.fixture(scope="module")
def server(library_path: Path) -> Iterator[RpcServer]:
    """Its C library gives every buffer that is freed back to the kernel, as a driver would."""
    with rpc_server(library_path, MALLOC_MMAP_THRESHOLD_=str(1 << 20)) as made:
        yield made


@pytest.fixture(scope="module")
def hot_set(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One size, "some": the first four experts of every layer."""
    path = tmp_path_factory.mktemp("hot") / "hot.json"
    layers = [{"layer": layer, "experts": [0, 1, 2, 3]} for layer in range(N_LAYER)]
    content = {"format": 1, "model": {"fingerprint": check(model).fingerprint}}
    path.write_text(json.dumps(content | {"sizes": [{"name": "some", "layers": layers}]}), "utf-8")
    return path


@dataclass(frozen=True)
class Answer:
    """What a client was sent, and when it asked and had all of it."""

    began: float
    ended: float
    tokens: list[int]
    last: dict[str, Any]


def ask(url: str, prompt: str, n_predict: int = N_PREDICT) -> Answer:
    """One streamed answer."""
    body = BODY | {"prompt": prompt, "n_predict": n_predict, "stream": True}
    began, events = time.monotonic(), []
    headers = {"x-api-key": KEY}
    with httpx.stream("POST", f"{url}/completion", json=body, headers=headers, timeout=100) as reply:
        assert reply.status_code == 200, reply.read()
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    tokens = [token for event in events for token in event.get("tokens", [])]
    return Answer(began, time.monotonic(), tokens, events[-1])


class Client(threading.Thread):
    """Streams one answer after the other, until told to stop."""

    def __init__(self, url: str, prompt: str) -> None:
        super().__init__(daemon=True)
        self.url, self.prompt = url, prompt
        self.answers: list[Answer] = []
        self.fault: Exception | None = None
        self.stopping = False
        self.start()

    def run(self) -> None:
        try:
            while not self.stopping:
                self.answers.append(ask(self.url, self.prompt))
        except Exception as error:  # noqa: BLE001 - told by the test's own thread
            self.fault = error


@pytest.fixture(scope="module")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory, library_path: Path) -> Stock:
    """Prompt -> the answer without residency and without a device."""
    settings = {"MODEL_PATH": str(model), "ENGINE_THREADS": "1", "ENGINE_REPACK": "false"}
    answers = {}
    with running(tmp_path_factory.mktemp("stock"), **settings) as daemon:
        for prompt in PROMPTS:
            said = daemon.client.post("/completion", json=BODY | {"prompt": prompt, "n_probs": 2}).json()
            assert min(map(margin, said["completion_probabilities"])) > LEAST_MARGIN, prompt
            answers[prompt] = said["tokens"]
    return answers


def margin(token: dict[str, Any]) -> float:
    first, second = (one["logprob"] for one in token["top_logprobs"])
    return float(first - second)


@contextmanager
def streaming(daemon: Daemon, stock: Stock) -> Iterator[list[Client]]:
    """Four clients meanwhile; each of their answers is complete and stock's."""
    clients = [Client(daemon.url, prompt) for prompt in PROMPTS]
    try:
        eventually(lambda: all(client.answers or client.fault for client in clients), "an answer for each")
        yield clients
    finally:
        for client in clients:
            client.stopping = True
        for client in clients:
            client.join(100)
    assert [client.fault for client in clients] == [None] * len(clients)
    for client in clients:
        for answer in client.answers:
            assert answer.tokens == stock[client.prompt]
            assert answer.last["stop"] is True


def toml(value: object) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {toml(one)}' for name, one in value.items())} }}"
    return json.dumps(value)


class File:
    """config.toml, edited in the ways in which people and their programs do."""

    def __init__(self, path: Path, **keys: object) -> None:
        self.path, self._keys = path, dict(keys)
        self.edits: list[float] = []
        self.path.write_text(self.text(), "utf-8")

    def text(self, **keys: object) -> str:
        """With these keys from now on; `section__key=value`."""
        self._keys |= keys
        return "".join(f"{name.replace('__', '.')} = {toml(value)}\n" for name, value in self._keys.items())

    def in_place(self, **keys: object) -> None:
        self.path.write_text(self.text(**keys), "utf-8")
        self.edits.append(time.monotonic())

    def replaced(self, **keys: object) -> None:
        new = self.path.with_name(".config.toml.new")
        new.write_text(self.text(**keys), "utf-8")
        new.rename(self.path)
        self.edits.append(time.monotonic())


def residency(daemon: Daemon) -> dict[str, Any]:
    return dict(daemon.client.get("/v1/residency", headers={"x-api-key": KEY}).json())


def device(daemon: Daemon) -> dict[str, Any]:
    (found,) = residency(daemon)["devices"]
    return dict(found)


def budgets(daemon: Daemon) -> dict[str, Any]:
    """What is asked for and what is there."""
    status, found = residency(daemon), device(daemon)
    names = ("asked", "asked_bytes", "effective_bytes", "why", "slots", "bytes", "reserve_asked", "reserve_bytes")
    return {name: found[name] for name in names} | {name: status[name] for name in ("upload", "placement")}


def applied(daemon: Daemon) -> float:
    """Reloads that changed something."""
    families = text_string_to_metric_families(daemon.client.get("/metrics", headers={"x-api-key": KEY}).text)
    samples = [one for family in families for one in family.samples if one.name == "hotset_config_reloads_total"]
    return sum(one.value for one in samples if one.labels["result"] == "applied")


def slot_bytes(share: float) -> int:
    """Of all layers; each has one slot more, which holds zeros."""
    n = round(share * N_EXPERT)
    return N_LAYER * (n + 1) * EXPERT_BYTES if n else 0


def config(model: Path, device: str, **keys: object) -> dict[str, object]:
    values: dict[str, object] = {"model__path": str(model), "model__context": 1024, "engine__device": device}
    values |= {"engine__threads": 1, "engine__max_sequences": 4, "engine__restart_delay_seconds": 0.2}
    values |= {"residency__vram": "25%", "residency__reserve": 0, "residency__gate": False}
    return values | {"residency__remember": False} | keys


def is_full(daemon: Daemon, share: float) -> bool:
    found = device(daemon)
    n = N_LAYER * round(share * N_EXPERT)
    return bool(found["slots"] == n == found["resident"])


def held(server: RpcServer) -> int:
    """Memory of the machine that the device's process takes."""
    return int(psutil.Process(server.process.pid).memory_info().rss)


def test_vram_follows_the_file_while_four_clients_stream(
    model: Path, server: RpcServer, stock: Stock, tmp_path: Path
) -> None:
    file = File(tmp_path / "config.toml", **config(model, server.device))
    with running(tmp_path, device=None) as daemon, streaming(daemon, stock) as clients:
        eventually(lambda: is_full(daemon, 0.25), "slots that are filled")
        before = held(server)
        for share, edit in ((0.5, file.in_place), (0.1, file.replaced), (0.25, file.in_place)):
            vram = f"{share:.0%}"
            edit(residency__vram=vram)
            eventually(lambda vram=vram: device(daemon)["asked"] == vram, "the other budget")
            wanted = slot_bytes(share)
            eventually(lambda share=share: is_full(daemon, share), "slots that are filled")
            found = device(daemon)
            assert (found["asked_bytes"], found["effective_bytes"], found["bytes"], found["why"]) == (wanted,) * 3 + (
                "",
            )
            grown = wanted - slot_bytes(0.25)
            eventually(lambda grown=grown: abs(held(server) - before - grown) < 2 * MIB, "memory that follows")
            assert f"{wanted / MIB:.1f} MiB on RPC0" in residency(daemon)["reason"]
    for client in clients:
        assert len(client.answers) >= 2
    for edit in file.edits:
        assert any(one.began < edit < one.ended for client in clients for one in client.answers), "while answers ran"
    assert "Traceback" not in daemon.output()


def test_the_other_keys_follow_the_file_while_four_clients_stream(
    model: Path, server: RpcServer, hot_set: Path, stock: Stock, tmp_path: Path
) -> None:
    file = File(tmp_path / "config.toml", **config(model, server.device, residency__hot_set=str(hot_set)))
    with running(tmp_path, device=None) as daemon, streaming(daemon, stock):
        eventually(lambda: residency(daemon)["moves"] > 0 and is_full(daemon, 0.25), "moves")

        # More is to stay free than there is: nothing is left for experts.
        most = psutil.virtual_memory().total // MIB
        file.in_place(residency__reserve=most)
        eventually(lambda: device(daemon)["reserve_bytes"] == most * MIB, "the reserve")
        found = device(daemon)
        assert (found["asked"], found["slots"], found["bytes"], found["effective_bytes"]) == ("25%", 0, 0, 0)
        assert found["asked_bytes"] == slot_bytes(0.25)
        assert found["why"].startswith("RPC0 has 0 MiB to spare: ")
        assert f"{most} MiB stay free (residency.reserve)" in found["why"]
        status = residency(daemon)
        assert status["state"] == "off"
        assert found["why"] in status["reason"]
        file.replaced(residency__reserve=0)
        eventually(lambda: is_full(daemon, 0.25), "slots that are filled again")
        assert device(daemon)["why"] == ""

        # No byte of the bus, and experts that are not to move.
        file.in_place(residency__upload=0)
        eventually(lambda: residency(daemon)["upload"]["effective"] == "0 MiB/s", "the pace")
        assert residency(daemon)["upload"] == {"asked": "0 MiB/s", "effective": "0 MiB/s", "why": ""}
        file.in_place(residency__upload=64, residency__frozen=True)
        eventually(lambda: residency(daemon)["placement"] == "static", "experts that stay")
        said = residency(daemon)["upload"]
        assert said == {"asked": "64 MiB/s", "effective": "0 MiB/s", "why": "residency.frozen is true"}
        file.in_place(residency__frozen=False)
        eventually(lambda: residency(daemon)["upload"]["effective"] == "64 MiB/s", "the pace")
        moves = residency(daemon)["moves"]
        eventually(lambda: residency(daemon)["moves"] > moves, "moves")

        # What is not [residency].
        n_applied = applied(daemon)
        file.in_place(log__level="error")
        eventually(lambda: applied(daemon) > n_applied, "the level")
        n_lines = len(daemon.output().splitlines())
        ask(daemon.url, PROMPTS[0], 5)
        assert len(daemon.output().splitlines()) == n_lines
        file.in_place(log__level="info", http__keys=[KEY])
        eventually(lambda: daemon.client.get("/v1/residency").status_code == 401, "keys that count")
        ask(daemon.url, PROMPTS[0], 5)
        eventually(lambda: "path=/completion" in daemon.output().split("key=http.keys")[-1], "lines of requests")
    assert "Traceback" not in daemon.output()


FAULTS = {
    -5: "residency.vram: '-5' is no number of MiB",
    "-5%": "residency.vram: '-5%' is no number of MiB",
    "auto%": "residency.vram: 'auto%' is no number of MiB",
    "101%": "residency.vram: there are no more than 100%",
    "tiny": "residency.vram: tiny is the name of a size, which needs residency.hot_set",
}


def test_a_rejected_edit_changes_nothing_and_says_so(
    model: Path, server: RpcServer, hot_set: Path, stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = File(tmp_path / "config.toml", **config(model, server.device))
    with runtime_directory() as run:
        monkeypatch.setenv("RUNTIME_DIRECTORY", str(run))
        with running(tmp_path, device=None) as daemon, streaming(daemon, stock):
            before = budgets(daemon)
            assert before["slots"] == N_LAYER * 4
            for budget, fault in FAULTS.items():
                file.in_place(residency__vram=budget, residency__upload=7)
                asked = hotset_reload(daemon, run)
                assert asked.returncode == EXIT_CONFIG
                assert fault in asked.stderr
                assert "the last good configuration stays in force" in asked.stderr
                said = daemon.client.get("/props").json()["hotset"]["config"]
                assert (said["last_reload"]["result"], said["faults"]) == ("rejected", ["residency.vram"])
            eventually(lambda: daemon.output().count("config rejected") >= len(FAULTS), "lines in the log")
            assert "config changed" not in daemon.output()
            assert budgets(daemon) == before

            # A good one by each of the other two ways; what waits for a load is said.
            file.in_place(residency__vram="50%", residency__upload=7)
            daemon.process.send_signal(signal.SIGHUP)
            eventually(lambda: "cause=signal" in daemon.output(), "the reload by signal")
            eventually(lambda: device(daemon)["asked"] == "50%", "the other budget")
            asked = reload_before_the_watcher(
                daemon, lambda: file.in_place(residency__vram="10%", engine__ubatch=64, residency__hot_set=str(hot_set))
            )
            assert asked.returncode == EXIT_OK, asked.stderr
            assert "residency.vram: '50%' -> '10%' (in force)\n" in asked.stdout
            assert "engine.ubatch: 512 -> 64 (next load: waits for `hotset reload --load`)\n" in asked.stdout
            assert f"residency.hot_set: '' -> '{hot_set}' (next load: " in asked.stdout
            eventually(lambda: device(daemon)["asked"] == "10%", "the other budget")
            now = budgets(daemon)
            assert (now["slots"], now["upload"]["effective"]) == (N_LAYER * 2, "7 MiB/s")


def reload_before_the_watcher(daemon: Daemon, edit: Callable[[], None]) -> subprocess.CompletedProcess[str]:
    """`hotset reload` asks a service that is stopped while the file is edited: that is what it finds first."""
    command = [sys.executable, "-m", "hotset_tools.cli", "reload", "--pid", str(daemon.process.pid)]
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        edit()
        order = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process = psutil.Process(order.pid)
        waits = lambda: bool(process.net_connections("unix")) and process.status() == psutil.STATUS_SLEEPING  # noqa: E731
        eventually(lambda: order.poll() is not None or waits(), "its order")
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    out, err = order.communicate(timeout=60)
    return subprocess.CompletedProcess(command, order.returncode, out, err)


STRANGE: tuple[tuple[object, str], ...] = (
    ({"Vulkan9": "50%"}, "residency.vram names Vulkan9, but the model is on RPC0"),
    ({"RPC0": "10%", "Vulkan8": "50%"}, "residency.vram names Vulkan8, but the model is on RPC0"),
    ({"RPC0": "tiny"}, "there is no size tiny; its sizes are some"),
)


def test_budgets_for_devices_and_sizes_that_are_not_there(
    model: Path, server: RpcServer, hot_set: Path, stock: Stock, tmp_path: Path
) -> None:
    """Only the engine knows devices and sizes: it keeps the budgets of before, and what else is edited counts."""
    file = File(tmp_path / "config.toml", **config(model, server.device, residency__hot_set=str(hot_set)))
    with running(tmp_path, device=None) as daemon, streaming(daemon, stock):
        before = budgets(daemon)
        for pace, (budget, fault) in enumerate(STRANGE, 7):
            file.in_place(residency__vram=budget, residency__upload=pace)
            said = f"{fault}; budgets stay as they were"
            eventually(lambda said=said: said in residency(daemon)["reason"], "its complaint")
            mib = f"{pace} MiB/s"
            assert budgets(daemon) == before | {"upload": {"asked": mib, "effective": mib, "why": ""}}
            assert said in daemon.output()
        file.in_place(residency__vram="50%")
        eventually(lambda: device(daemon)["asked"] == "50%", "a budget that can be")
        assert device(daemon)["slots"] == N_LAYER * 8
        assert "budgets stay" not in residency(daemon)["reason"]
