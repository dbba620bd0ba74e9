"""What `hotset demo` changes of a configuration, where it sends clients, what it asks, and how it ends."""

from __future__ import annotations

import itertools
import signal
import socket
from pathlib import Path
from typing import cast

import pytest

from daemon import config
from daemon.errors import ConfigError
from hotset_tools.demo import attending, settings
from hotset_tools.demo.traffic import ANSWERS_PER_TOPIC, PROMPT_CHARACTERS, NoTopics, Prompt, prompts, topics

OWN = """
[model]
path = "own.gguf"
name = "own"
chat_template = "own.jinja"
[engine]
device = "Vulkan0"
gpu_layers = 3
cpu_moe_layers = 5
[residency]
enabled = false
hot_set = "own.json"
frozen = true
vram = { Vulkan0 = "75%" }
[http]
port = 0
[sampling]
temperature = 0.25
"""


def test_the_file_counts_but_for_what_the_demo_is_about(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(OWN)
    found = config.load(file, settings.overrides("rpc:127.0.0.1:5", "25%", {}))
    assert (found.engine.device, found.engine.gpu_layers, found.engine.cpu_moe_layers) == ("rpc:127.0.0.1:5", -1, -1)
    residency = found.residency
    assert (residency.enabled, residency.hot_set, residency.frozen, residency.vram) == (True, "", False, "25%")
    assert (found.model.path, found.model.name, found.model.chat_template) == ("", "", "")
    assert found.sampling.temperature == 0.25


def test_a_model_that_the_environment_names_is_served() -> None:
    found = settings.overrides("rpc:127.0.0.1:5", "25%", {"HOTSET_MODEL_PATH": "/models/m.gguf"})
    assert not [name for name in found if name.startswith("HOTSET_MODEL_")]


@pytest.fixture
def port() -> int:
    """One on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_where_the_service_is_found_and_with_which_key(tmp_path: Path, port: int) -> None:
    file = tmp_path / "config.toml"
    (tmp_path / "keys").write_text("background:from-a-file\n")
    file.write_text(f'[http]\nhost = "0.0.0.0"\nport = {port}\nkeys_file = "keys"\n')
    found = settings.read(file, "rpc:127.0.0.1:5", "25%", {"PATH": "/bin"})
    assert (found.url, found.key) == (f"http://127.0.0.1:{port}", "from-a-file")
    assert found.environment["PATH"] == "/bin"
    assert found.environment["HOTSET_ENGINE_DEVICE"] == "rpc:127.0.0.1:5"
    assert "HOTSET_HTTP_PORT" not in found.environment


def test_a_free_port_is_chosen_here_so_that_it_is_known() -> None:
    found = settings.read(None, "rpc:127.0.0.1:5", "25%", {"HOTSET_HTTP_PORT": "0"})
    assert found.url == f"http://127.0.0.1:{found.environment['HOTSET_HTTP_PORT']}"
    assert not found.url.endswith(":0")


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:9"), ("::", "http://[::1]:9"), ("::1", "http://[::1]:9"), ("box", "http://box:9")],
)
def test_addresses(host: str, url: str) -> None:
    assert settings.address(host, 9) == url


def test_a_port_that_is_taken_is_told_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(settings.PortTaken, match=rf"127.0.0.1:{taken} .*Address already in use.*HOTSET_HTTP_PORT"):
            settings.read(None, "rpc:127.0.0.1:5", "25%", {"HOTSET_HTTP_PORT": str(taken)})


def test_an_address_of_another_machine_is_told_without_a_hint_about_ports() -> None:
    environ = {"HOTSET_HTTP_HOST": "203.0.113.9", "HOTSET_HTTP_KEYS": "some-good-key"}
    with pytest.raises(settings.PortTaken, match=r"203.0.113.9:8117 cannot be listened on: Cannot assign") as caught:
        settings.read(None, "rpc:127.0.0.1:5", "25%", environ)
    assert "PORT" not in caught.value.message


def test_every_fault_of_the_configuration_is_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        settings.read(None, "rpc:127.0.0.1:5", "200%", {"HOTSET_HTTP_PORT": "high"})
    assert {key for key, _ in caught.value.problems} == {"residency.vram", "HOTSET_HTTP_PORT"}


# -- what is asked


def test_topics_are_the_texts_of_the_repository() -> None:
    texts = topics()
    assert {"python", "fiction", "lang_zh"} <= set(texts)
    assert sorted(texts) == sorted(path.stem for path in Path("models/prompts").glob("*.txt"))
    assert [*texts] != sorted(texts), "neighbours in the alphabet, such as languages, do not follow each other"


def test_no_texts(tmp_path: Path) -> None:
    with pytest.raises(NoTopics, match="no texts"):
        topics(tmp_path)


def test_prompts_change_their_topic_and_come_from_other_places() -> None:
    texts = {"a": "".join(map(chr, range(200, 5000))), "b": "short"}
    found = list(itertools.islice(prompts(texts), 4 * ANSWERS_PER_TOPIC))
    assert [prompt.topic for prompt in found] == [
        *["a"] * ANSWERS_PER_TOPIC, *["b"] * ANSWERS_PER_TOPIC, *["a"] * ANSWERS_PER_TOPIC, *["b"] * ANSWERS_PER_TOPIC,
    ]  # fmt: skip
    of_a = [prompt.text for prompt in found if prompt.topic == "a"]
    assert len(set(of_a)) == len(of_a)
    assert {len(text) for text in of_a} == {PROMPT_CHARACTERS}
    assert Prompt("b", "short") in found


# -- how it ends


class FakeProcess:
    """Ends with `code` once it was waited for `lasts` times, or as `terminated` says once it was told to."""

    def __init__(self, code: int | None, lasts: int = 0, terminated: int = 0) -> None:
        self.returncode = None if lasts else code
        self._code, self._left, self._terminated = code, lasts, terminated
        self.n_terminated = 0

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, seconds: float) -> int:
        self._left -= 1
        if self._left <= 0 and self._code is not None:
            self.returncode = self._code
        if self.returncode is None:
            raise attending.subprocess.TimeoutExpired("x", seconds)
        return self.returncode

    def terminate(self) -> None:
        self.n_terminated += 1
        self._code, self._left = self._terminated, 2


def attend(process: FakeProcess, stand_in: FakeProcess, ready: bool = True) -> tuple[int, list[str]]:
    said: list[str] = []
    code = attending.attend(
        cast(attending.Process, process),
        cast(attending.Process, stand_in),
        lambda: ready,
        lambda: said.append("ready"),
        said.append,
    )
    return code, said


@pytest.mark.parametrize("code", [0, 1, 78])
def test_the_exit_code_is_that_of_the_service(code: int) -> None:
    assert attend(FakeProcess(code, lasts=4), FakeProcess(None)) == (code, ["ready"])
    assert attend(FakeProcess(code, lasts=4), FakeProcess(None), ready=False) == (code, [])


def test_a_service_that_is_killed() -> None:
    code, said = attend(FakeProcess(-signal.SIGKILL, lasts=2), FakeProcess(None))
    assert (code, said[-1]) == (137, "hotsetd was killed by signal 9")


@pytest.mark.parametrize(("last", "code"), [(0, 1), (78, 78)])
def test_without_the_stand_in_the_service_is_told_to_stop_once(last: int, code: int) -> None:
    process = FakeProcess(None, terminated=last)
    found, said = attend(process, FakeProcess(-signal.SIGSEGV))
    assert (found, process.n_terminated) == (code, 1)
    assert "the stand-in for a device ended with -11; stopping" in said


def test_signals_are_passed_on_unless_they_are_ignored() -> None:
    stopped: list[None] = []
    process = FakeProcess(None)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        before = signal.getsignal(signal.SIGTERM)
        with attending.passing_on(cast(attending.Process, process), lambda: stopped.append(None)):
            signal.raise_signal(signal.SIGHUP)
            assert process.n_terminated == 0
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
        assert (process.n_terminated, len(stopped)) == (2, 2)
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGHUP, hangup)
        signal.signal(signal.SIGINT, interrupt)
