"""Reading the configuration again: what differs, what applies, what waits, and what a bad file cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon import config, reload, settings
from daemon.config import Config, Effect
from daemon.errors import ConfigError
from daemon.messages import Reload
from daemon.reload import Reloader
from daemon.settings import Settings

OTHER = {
    "model.load": "mmap",
    "engine.cache_type_k": "f32",
    "engine.cache_type_v": "f32",
    "log.level": "debug",
    "log.format": "json",
    "http.keys": ["another-key"],
    "http.allowed_hosts": ["box.example"],
    "http.allowed_origins": ["https://box.example"],
    "residency.vram": "50%",
    "residency.reserve": 512,
    "scheduling.target_latency": 3.0,
}


def other(path: str) -> object:
    """A valid value that is not the default."""
    default = config.keys()[path].default
    if path in OTHER:
        return OTHER[path]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1
    return default / 2 + 0.05 if isinstance(default, float) else f"other-{default}"


@pytest.mark.parametrize("path", sorted(config.keys()))
def test_each_key_is_told_and_applies_exactly_when_it_is_live(path: str) -> None:
    section, key = path.split(".")
    wanted = Settings(Config.model_validate({section: {key: other(path)}}, strict=False))
    [change] = reload.changes(Settings(Config()), wanted)
    assert (change.key, change.effect) == (path, config.effect(path).value)
    merged = config.merge(Config(), wanted.config)
    assert merged == (wanted.config if config.effect(path) is Effect.LIVE else Config())


def test_keys_are_counted_and_never_shown() -> None:
    old = Settings(Config.model_validate({"http": {"keys": ("old-secret",)}}), ("old-secret", "file-secret"))
    new = Settings(Config.model_validate({"http": {"keys": ("new-secret",)}}), ("new-secret", "fresh-secret"))
    found = reload.changes(old, new)
    assert [change.key for change in found] == ["http.keys", "http.keys_file"]
    assert "secret" not in repr(found)


def test_a_key_is_not_given_up_while_the_old_address_is_listened_on() -> None:
    open_to_all = Settings(Config.model_validate({"http": {"host": "0.0.0.0", "keys": ("long-enough",)}}))
    with pytest.raises(ConfigError, match="off loopback needs"):
        reload.merge(open_to_all, Settings(Config()))


class Service:
    """A reloader over a real file, what it put into force, and what it reported."""

    def __init__(self, directory: Path, text: str = "[queue]\nmax_waiting = 5\n", **environ: str) -> None:
        self.file = directory / "config.toml"
        self.file.write_text(text, "utf-8")
        self.running = settings.read(self.file, environ)
        self.reports: list[Reload] = []
        self.reloader = Reloader(
            self.file, self.running, apply=self.apply, report=self.reports.append, environ=environ, clock=lambda: 7.0
        )

    def apply(self, new: Settings) -> None:
        self.running = new

    async def write(self, text: str) -> Reload:
        self.file.write_text(text, "utf-8")
        return await self.reloader.reload("command")


async def test_live_keys_apply_and_the_others_wait_until_they_are_as_before(tmp_path: Path) -> None:
    service = Service(tmp_path)
    text = "[queue]\nmax_waiting = 6\n[http]\nport = 1\n[model]\nname = 'x'\n"
    outcome = await service.write(text)
    assert outcome.result == "applied"
    assert [(c.key, c.old, c.new) for c in outcome.applied] == [("queue.max_waiting", "5", "6")]
    waits = [("model.name", "next load"), ("http.port", "restart")]
    assert [(c.key, c.effect) for c in outcome.pending] == waits
    running = service.running.config
    assert (running.queue.max_waiting, running.http.port, running.model.name) == (6, 8117, "")

    again = await service.reloader.reload("signal")
    assert (again.result, again.applied) == ("unchanged", [])
    assert [(c.key, c.effect) for c in again.pending] == waits
    assert (await service.write("[queue]\nmax_waiting = 6\n")).pending == []
    assert service.reports[-1].result == "unchanged"


async def test_a_rejected_file_changes_nothing_and_every_fault_is_listed(tmp_path: Path) -> None:
    service = Service(tmp_path)
    before = service.running
    outcome = await service.write("[queue]\nmax_waiting = -1\n[http]\nport = 1.5\nnothing = 1\n[sampling]\ntop_k = 9\n")
    assert outcome.result == "rejected"
    assert {key for key, _ in outcome.faults} == {"queue.max_waiting", "http.port", "http.nothing"}
    assert service.running is before


@pytest.mark.parametrize(
    "text",
    ["", " \n\n", "[queue]\nmax_wai", "\0", "a = " + "[" * 5000, "[http]\nkeys_file = 'no-file'\n",
     '[http]\nkeys_file = "a\\u0000b"\n', '[model]\npath = "a\\u0000b"\n'],
)  # fmt: skip
async def test_what_cannot_be_used_or_an_interrupted_writer_leaves_is_rejected(text: str, tmp_path: Path) -> None:
    service = Service(tmp_path, "[http]\nkeys = ['long-enough']\n")
    assert (await service.write(text)).result == "rejected"
    assert service.running.api_keys == ("long-enough",)


async def test_a_file_that_is_gone_and_comes_back(tmp_path: Path) -> None:
    service = Service(tmp_path)
    text = service.file.read_text("utf-8")
    service.file.unlink()
    assert "No such file" in (await service.reloader.reload("signal")).faults[0][1]
    assert (await service.write(text)).result == "unchanged"


async def test_the_contents_of_the_file_of_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first-key second-key", "utf-8")
    service = Service(tmp_path, "[http]\nkeys_file = 'keys'\n")
    (tmp_path / "keys").write_text("first-key", "utf-8")
    [change] = (await service.reloader.reload("signal")).applied
    assert (change.key, change.old, change.new) == ("http.keys_file", "2 keys", "1 key in the same file")
    assert service.running.api_keys == ("first-key",)

    (tmp_path / "keys").write_text("", "utf-8")
    assert (await service.reloader.reload("signal")).faults == [("http.keys_file", "the file holds no key")]
    assert service.running.api_keys == ("first-key",)


async def test_what_the_environment_overrides_is_said(tmp_path: Path) -> None:
    service = Service(tmp_path, HOTSET_QUEUE_MAX_WAITING="9")
    outcome = await service.write("[queue]\nmax_waiting = 6\n[http]\nkeys = ['long-enough']\n")
    assert outcome.shadowed == ["queue.max_waiting"]
    assert service.running.config.queue.max_waiting == 9
    assert (await service.write("[queue]\nmax_waiting = 9\n")).shadowed == []


async def test_the_watcher_is_silent_while_nothing_is_new(tmp_path: Path) -> None:
    service = Service(tmp_path)
    await service.reloader.reload_if_changed()
    assert service.reports == []
    service.file.write_text("[model]\nchat_template = 'late.jinja'\n", "utf-8")
    for _ in range(3):
        await service.reloader.reload_if_changed()
    assert [report.result for report in service.reports] == ["rejected"]
    # The file itself stays as it is; what it names is there now.
    (tmp_path / "late.jinja").touch()
    for _ in range(3):
        await service.reloader.reload_if_changed()
    assert [report.result for report in service.reports] == ["rejected", "applied"]


async def test_a_service_without_a_file(tmp_path: Path) -> None:
    reloader = Reloader(None, Settings(Config()), apply=pytest.fail, report=lambda _: None, environ={})
    assert reloader.files() == ()
    assert (await reloader.reload("signal")).result == "unchanged"
