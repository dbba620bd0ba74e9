"""The ways in which files change on a disk, each done for real and seen through the kernel's events alone."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from daemon import settings
from daemon.messages import Reload
from daemon.reload import Reloader
from daemon.settings import Settings
from daemon.watch import Watcher, directories
from tests.fakes import Signal

NEVER = 3600.0


def text(limit: int) -> str:
    return f"[queue]\nmax_waiting = {limit}\n"


class Watched:
    """A file under watch, and the settings in force."""

    def __init__(self, file: Path) -> None:
        self.running = settings.read(file, {})
        self.reports: list[Reload] = []
        self.reloader = Reloader(file, self.running, apply=self.apply, report=self.report, environ={})
        self._reported = Signal()

    def report(self, outcome: Reload) -> None:
        self.reports.append(outcome)
        self._reported.notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a report after which the condition holds."""
        async with asyncio.timeout(10):
            await self._reported.wait_for(condition)

    def apply(self, new: Settings) -> None:
        self.running = new

    @property
    def limit(self) -> int:
        return self.running.config.queue.max_waiting


def write(file: Path, text: str) -> None:
    file.write_text(text)


def append(file: Path, text: str) -> None:
    with file.open("a") as writer:
        writer.write(text)


def delete(file: Path) -> None:
    file.unlink()


def link(file: Path, target: str) -> None:
    """`file` becomes a symbolic link, in one step."""
    new = file.with_name(f"{file.name}.new")
    new.symlink_to(target)
    new.rename(file)


def replace_directory(file: Path) -> None:
    file.parent.rename(file.parent.with_name("old"))
    file.parent.mkdir()
    file.write_text(text(2))


def versions(directory: Path) -> None:
    """directory/1/config.toml and directory/2/config.toml."""
    for version in (1, 2):
        (directory / str(version)).mkdir(parents=True)
        (directory / str(version) / "config.toml").write_text(text(version))


@asynccontextmanager
async def watching(file: Path, rescan: float = NEVER) -> AsyncIterator[Watched]:
    watched = Watched(file)
    watcher = Watcher(watched.reloader.files, watched.reloader.reload_if_changed, quiet=0.05, rescan=rescan)
    task = asyncio.create_task(watcher.run())
    try:
        await asyncio.wait_for(watcher.watching.wait(), 10)
        yield watched
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A config.toml in a directory of its own."""
    (tmp_path / "etc").mkdir()
    path = tmp_path / "etc" / "config.toml"
    path.write_text(text(1))
    return path


def in_place(file: Path) -> None:
    file.write_text(text(2))


def atomic(file: Path) -> None:
    new = file.with_name(".config.toml.tmp")
    new.write_text(text(2))
    new.rename(file)


def from_elsewhere(file: Path) -> None:
    new = file.parent.parent / "new.toml"
    new.write_text(text(2))
    new.rename(file)


def vim(file: Path) -> None:
    file.with_name("4913").touch()
    file.with_name("4913").unlink()
    file.rename(file.with_name("config.toml~"))
    file.write_text(text(2))
    file.with_name("config.toml~").unlink()


def hard_link(file: Path) -> None:
    new = file.with_name("new.toml")
    new.write_text(text(2))
    file.unlink()
    file.hardlink_to(new)


@pytest.mark.parametrize("change", [in_place, atomic, from_elsewhere, vim, hard_link])
async def test_writing(change: Callable[[Path], None], file: Path) -> None:
    async with watching(file) as watched:
        change(file)
        await watched.until(lambda: watched.limit == 2)
        # A second time: the watch outlives the file that it began with.
        write(file, text(3))
        await watched.until(lambda: watched.limit == 3)
    assert [report.result for report in watched.reports] == ["applied", "applied"]


async def test_a_mounted_config_map_is_swapped(file: Path) -> None:
    """Kubernetes: config.toml -> ..data/config.toml, and ..data -> a directory of each version."""
    etc = file.parent
    versions(etc)
    link(etc / "..data", "1")
    link(file, "..data/config.toml")
    async with watching(file) as watched:
        link(etc / "..data", "2")
        shutil.rmtree(etc / "1")
        await watched.until(lambda: watched.limit == 2)
        write(etc / "2" / "config.toml", text(3))
        await watched.until(lambda: watched.limit == 3)


async def test_the_target_of_links_is_edited_and_a_directory_is_switched(tmp_path: Path, file: Path) -> None:
    """etc/config.toml -> ../current/config.toml, current -> releases/1: what changes is far from the link."""
    releases = tmp_path / "releases"
    versions(releases)
    link(tmp_path / "current", "releases/1")
    link(file, "../current/config.toml")
    async with watching(file) as watched:
        write(releases / "1" / "config.toml", text(5))
        await watched.until(lambda: watched.limit == 5)
        link(tmp_path / "current", "releases/2")
        await watched.until(lambda: watched.limit == 2)
        write(releases / "2" / "config.toml", text(7))
        await watched.until(lambda: watched.limit == 7)


async def test_half_a_file_is_not_read_while_its_writer_has_it_open(file: Path) -> None:
    async with watching(file) as watched:
        with open(file, "w") as writer:  # noqa: ASYNC230
            writer.write("[queue]\nmax_wai")
            writer.flush()
            await asyncio.sleep(0.5)
            assert watched.reports == []
            writer.write("ting = 2\n")
        await watched.until(lambda: watched.limit == 2)
    assert [report.result for report in watched.reports] == ["applied"]


async def test_half_a_file_that_is_closed_is_rejected_until_it_is_whole(file: Path) -> None:
    async with watching(file) as watched:
        write(file, "[queue]\nmax_wai")
        await watched.until(lambda: len(watched.reports) == 1)
        assert (watched.reports[0].result, watched.limit) == ("rejected", 1)
        append(file, "ting = 2\n")
        await watched.until(lambda: watched.limit == 2)
    assert [report.result for report in watched.reports] == ["rejected", "applied"]


async def test_deleted_and_back(file: Path) -> None:
    async with watching(file) as watched:
        delete(file)
        await watched.until(lambda: len(watched.reports) == 1)
        assert (watched.reports[0].result, watched.limit) == ("rejected", 1)
        write(file, text(2))
        await watched.until(lambda: watched.limit == 2)


async def test_the_file_of_keys(tmp_path: Path, file: Path) -> None:
    secrets, others = tmp_path / "secrets" / "keys", tmp_path / "others" / "keys"
    for name, key in ((secrets, "first-key"), (others, "third-key")):
        os.mkdir(name.parent)
        write(name, key)
    write(file, "[http]\nkeys_file = '../secrets/keys'\n")
    async with watching(file) as watched:
        write(secrets, "second-key")
        await watched.until(lambda: watched.running.api_keys == ("second-key",))
        # Another file of keys is watched from then on.
        write(file, "[http]\nkeys_file = '../others/keys'\n")
        await watched.until(lambda: watched.running.api_keys == ("third-key",))
        await asyncio.sleep(0.2)
        write(others, "fourth-key")
        await watched.until(lambda: watched.running.api_keys == ("fourth-key",))
    assert [report.result for report in watched.reports] == ["applied"] * 3


async def test_a_directory_that_is_replaced_is_found_by_the_rescan(file: Path) -> None:
    async with watching(file, rescan=0.2) as watched:
        replace_directory(file)
        await watched.until(lambda: watched.limit == 2)
        write(file, text(3))
        await watched.until(lambda: watched.limit == 3)


async def test_a_machine_without_descriptors_is_left_with_the_rescan(file: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with file.open("r+") as editor:  # opened before: the descriptors that are left are for reading
        with open(os.devnull) as lowest:  # noqa: ASYNC230
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno() + 2, hard))  # enough to read, not to watch
        try:
            async with watching(file, rescan=0.1) as watched:
                editor.truncate()
                editor.write(text(2))
                editor.flush()
                await watched.until(lambda: watched.limit == 2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_links_that_go_round_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert directories(tmp_path / "a") == {os.path.realpath(tmp_path)}
