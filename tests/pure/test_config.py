"""The config: the file is the manual, the environment overrides it, every fault is listed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from daemon import config
from daemon.__main__ import main
from daemon.config import Config, Effect
from daemon.errors import EXIT_CONFIG, ConfigError
from daemon.model_files import check_files, load_command

ROOT = Path(__file__).resolve().parents[2]


def problems(text: str, tmp_path: Path, **environ: str) -> dict[str, str]:
    file = tmp_path / "config.toml"
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as caught:
        config.load(file, environ)
    return dict(caught.value.problems)


def test_the_manual_lists_every_key_with_its_default() -> None:
    written = tomllib.loads((ROOT / "config.toml").read_text("utf-8"))
    listed = {f"{section}.{key}" for section, table in written.items() for key in table}
    assert listed == set(config.keys())
    assert config.difference(config.load(ROOT / "config.toml", {}), Config()) == {}


def test_the_manual_names_the_effect_and_the_range_of_every_key() -> None:
    """Each comment block ends with the effect of its keys; numbers of the bounds stand in it."""
    text = (ROOT / "config.toml").read_text("utf-8")
    for path, info in config.keys().items():
        section, key = path.split(".")
        table = text.split(f"[{section}]\n")[1].split("\n[")[0]
        before = re.split(rf"^{key} = ", table, flags=re.M)[0]
        comment = before if section == "sampling" else before.rstrip("\n").split("\n\n")[-1]
        assert f"[{config.effect(path)}]" in comment, path
        for bound in info.metadata:
            for limit in ("ge", "gt", "le", "lt"):
                value = getattr(bound, limit, None)
                if value is not None:
                    assert re.search(rf"(?<![\d.]){re.escape(f'{value:g}' if value < 1e6 else str(value))}", comment), (
                        path, limit, value,
                    )  # fmt: skip


def test_every_fault_is_listed_with_its_path(tmp_path: Path) -> None:
    found = problems(
        '[http]\nport = 99999\nhots = "x"\nkeys = ["short"]\n[engine]\nubatch = "big"\n[nonsense]\na = 1\n', tmp_path
    )
    assert set(found) == {"http.port", "http.hots", "http.keys", "engine.ubatch", "nonsense"}
    assert found["http.hots"] == found["nonsense"] == "no such key"


@pytest.mark.parametrize(
    ("text", "what"), [("[http", "is not TOML"), ("a = [1,", "is not TOML"), ("\x00", "is not TOML")]
)
def test_what_is_no_toml_is_said_so(text: str, what: str, tmp_path: Path) -> None:
    assert what in problems(text, tmp_path)[""]


def test_a_file_that_cannot_be_read_or_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(tmp_path / "missing.toml", {})
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        config.load(tmp_path / "binary.toml", {})


def test_missing_files_of_all_kinds_are_listed_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[http]\nkeys_file = "none"\n[model]\nchat_template = "none"\n', "utf-8")
    monkeypatch.setattr("sys.argv", ["hotsetd", "--check", str(file)])
    assert main() == EXIT_CONFIG
    errors = capsys.readouterr().err
    assert "http.keys_file: " in errors
    assert "model.chat_template: " in errors


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[http]\nport = 1234\n", "utf-8")
    environ = {
        "HOTSET_HTTP_PORT": "0",
        "HOTSET_HTTP_KEYS": "first-key, second-key",
        "HOTSET_ENGINE_REPACK": "false",
        "HOTSET_QUEUE_MAX_WAITING": "7",
        "HOTSET_SAMPLING_TOP_P": "0.5",
        "HOTSET_CACHE": "elsewhere",
    }
    loaded = config.load(file, environ)
    assert (loaded.http.port, loaded.http.keys) == (0, ("first-key", "second-key"))
    assert (loaded.engine.repack, loaded.queue.max_waiting, loaded.sampling.top_p) == (False, 7, 0.5)


@pytest.mark.parametrize(
    ("name", "text", "path"),
    [
        ("HOTSET_HTTP_PORT", "many", "HOTSET_HTTP_PORT"),
        ("HOTSET_HTTP_PORT", "1_8", "HOTSET_HTTP_PORT"),
        ("HOTSET_ENGINE_REPACK", "maybe", "HOTSET_ENGINE_REPACK"),
        ("HOTSET_HTTP_PORT", "80.5", "HOTSET_HTTP_PORT"),
        ("HOTSET_SAMPLING_TOP_P", "much", "HOTSET_SAMPLING_TOP_P"),
        ("HOTSET_HTTP_PROT", "1", "HOTSET_HTTP_PROT"),
        ("HOTSET_HTTP_PORT", "70000", "http.port"),
        ("HOTSET_SAMPLING_TOP_P", "nan", "sampling.top_p"),
    ],
)
def test_an_unusable_variable_is_a_fault(name: str, text: str, path: str, tmp_path: Path) -> None:
    assert path in problems("", tmp_path, **{name: text})


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('[http]\nhost = "0.0.0.0"\n', "http.host"),
        (
            "[engine]\nrestart_delay_seconds = 9.0\nrestart_delay_max_seconds = 1.0\n",
            "engine.restart_delay_max_seconds",
        ),
        ("[model]\ncontext = 4096\n[engine]\nkv_cells = 100\n", "engine.kv_cells"),
        ("[sampling]\ntemperature = inf\n", "sampling.temperature"),
        ("[http]\nport = 80.5\n", "http.port"),
        ("[http]\nport = true\n", "http.port"),
        ('[http]\nallowed_hosts = ["box:8117"]\n', "http.allowed_hosts"),
        ('[http]\nallowed_hosts = ["*.example"]\n', "http.allowed_hosts"),
        ('[http]\nallowed_origins = ["localhost"]\n', "http.allowed_origins"),
        ('[http]\nallowed_origins = ["*"]\n', "http.allowed_origins"),
        ('[http]\nallowed_origins = ["http"]\n', "http.allowed_origins"),
        ('[residency]\nvram = "-1"\n', "residency.vram"),
        ('[residency]\nvram = "auto%"\n', "residency.vram"),
        ("[residency]\nvram = true\n", "residency.vram"),
        ('[residency]\nvram = { Vulkan0 = "auto", Vulkan1 = "much of it" }\n', "residency.vram"),
        ('[residency]\nreserve = "-1"\n', "residency.reserve"),
        ("[residency]\nreserve = -1\n", "residency.reserve"),
        ("[residency]\nreserve = 16777217\n", "residency.reserve"),
        ("[residency]\nreserve = 1.5\n", "residency.reserve"),
        ("[residency]\nreserve = false\n", "residency.reserve"),
        ('[residency]\nreserve = ""\n', "residency.reserve"),
        ('[residency]\nreserve = "10%"\n', "residency.reserve"),
        ('[residency]\nreserve = "auto%"\n', "residency.reserve"),
        ('[residency]\nreserve = { Vulkan0 = "some" }\n', "residency.reserve"),
        ("[residency]\nreserve = { Vulkan0 = { a = 1 } }\n", "residency.reserve"),
        ('[residency]\nreserve = { "" = 1 }\n', "residency.reserve"),
    ],
)
def test_keys_that_do_not_go_together_or_have_no_such_value(text: str, path: str, tmp_path: Path) -> None:
    assert path in problems(text, tmp_path)


@pytest.mark.parametrize("name", ["VRAM", "RESERVE"])
@pytest.mark.parametrize("text", ["Vulkan0=auto, =5", "Vulkan0=1,Vulkan0=2", "auto%", "-1", "Vulkan0=auto,"])
def test_budgets_of_the_environment_that_are_none(name: str, text: str, tmp_path: Path) -> None:
    found = problems("", tmp_path, **{f"HOTSET_RESIDENCY_{name}": text})
    assert list(found) == [f"residency.{name.lower()}"]


def test_budgets_and_reserves_reach_the_engine_by_device(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[residency]\nhot_set = "h.json"\nvram = { Vulkan0 = "auto", Vulkan1 = 5 }\nreserve = 7\n', "utf-8")
    spec = load_command(config.load(file, {})).residency
    assert (spec.vram, spec.reserve) == ({"Vulkan0": "auto", "Vulkan1": "5 MiB"}, {"": "7 MiB"})
    environ = {"HOTSET_RESIDENCY_VRAM": "auto", "HOTSET_RESIDENCY_RESERVE": "Vulkan0=3072 MiB, Vulkan1=auto"}
    spec = load_command(config.load(file, environ)).residency
    assert (spec.vram, spec.reserve) == ({"": "auto"}, {"Vulkan0": "3072 MiB", "Vulkan1": "auto"})
    assert load_command(Config()).residency.reserve == {"": "auto"}


def test_an_address_off_loopback_is_fine_with_a_key(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[http]\nhost = "0.0.0.0"\nkeys = ["long-enough"]\n', "utf-8")
    assert config.load(file, {}).http.host == "0.0.0.0"


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[model]\npath = "m.gguf"\nchat_template = "/abs/t.jinja"\n', "utf-8")
    loaded = config.load(file, {})
    assert loaded.model.path == str(tmp_path / "m.gguf")
    assert loaded.model.chat_template == "/abs/t.jinja"


def test_difference_and_effect() -> None:
    new = Config.model_validate({"http": {"port": 1}, "queue": {"max_waiting": 3}})
    assert config.difference(Config(), new) == {"http.port": (8117, 1), "queue.max_waiting": (64, 3)}
    assert config.effect("queue.max_waiting") is Effect.LIVE
    assert config.effect("model.path") is Effect.NEXT_LOAD
    assert config.effect("http.port") is Effect.RESTART
    with pytest.raises(KeyError):
        config.effect("http.nothing")


def test_keys_come_from_the_file_too(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("third-key\nfourth-key\n", "utf-8")
    loaded = Config.model_validate({"http": {"keys": ["first-key"], "keys_file": str(tmp_path / "keys")}})
    assert config.api_keys(loaded) == ("first-key", "third-key", "fourth-key")
    for bad in (b"short", b"\xff\xff", b"", b" \n", None):
        if bad is None:
            (tmp_path / "keys").unlink()
        else:
            (tmp_path / "keys").write_bytes(bad)
        with pytest.raises(ConfigError) as caught:
            config.api_keys(loaded)
        assert caught.value.problems[0][0] == "http.keys_file"


@pytest.mark.parametrize(
    ("text", "priority", "key"),
    [
        ("background:long-enough", "background", "long-enough"),
        ("normal:long-enough", "normal", "long-enough"),
        ("interactive:normal:long", "interactive", "normal:long"),
        ("urgent:long-enough", None, "urgent:long-enough"),
        ("long-enough", None, "long-enough"),
    ],
)
def test_a_class_may_stand_before_a_key(tmp_path: Path, text: str, priority: str | None, key: str) -> None:
    assert config.split_key(text) == (priority, key)
    (tmp_path / "keys").write_text(text, "utf-8")
    loaded = Config.model_validate({"http": {"keys": [text], "keys_file": str(tmp_path / "keys")}})
    assert config.api_keys(loaded) == (text, text)


def test_a_class_does_not_make_a_key_longer() -> None:
    with pytest.raises(ConfigError, match=r"http\.keys: a key needs at least 8"):
        config.load(None, {"HOTSET_HTTP_KEYS": "background:short"})


@pytest.mark.parametrize("host", ["127.example.org", "127.0.0.1.evil.net", "::", "localhost.example.org"])
def test_only_addresses_of_this_machine_are_loopback(host: str) -> None:
    assert not config.is_loopback(host)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_addresses_of_this_machine_need_no_key(host: str) -> None:
    assert config.is_loopback(host)


@pytest.mark.parametrize("key", ["path", "chat_template"])
def test_files_that_cannot_be_reached(key: str, tmp_path: Path) -> None:
    model = {"path": str(tmp_path / "model.gguf"), key: "/" + "x" * 5000}
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError) as caught:
        check_files(Config.model_validate({"model": model}))
    assert [path for path, _ in caught.value.problems] == [f"model.{key}"]
    assert "File name too long" in caught.value.problems[0][1]


def test_what_is_live_of_scheduling_reaches_the_engine() -> None:
    wanted = {"target_latency": 4.0, "decode_share": 0.25, "park_mib": 7}
    assert load_command(Config.model_validate({"scheduling": wanted})).scheduling.model_dump() == wanted
