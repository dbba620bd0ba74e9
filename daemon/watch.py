"""Watching files that may be replaced, moved, or reached through links that change."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import structlog
from watchdog.events import (
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver, ObservedWatch

MOST_LINKS = 40
"""As many symbolic links as Linux follows in one path."""

# Not "modified": who writes in place has not finished before the file is closed. Not "opened": we do that ourselves.
_EVENTS: list[type[FileSystemEvent]] = [
    FileClosedEvent, FileCreatedEvent, FileDeletedEvent, FileMovedEvent,
    DirCreatedEvent, DirDeletedEvent, DirMovedEvent,
]  # fmt: skip

log = structlog.get_logger("hotset.config")


def directories(path: Path) -> set[str]:
    """The directories whose entries decide which file `path` is: its own, and that of every symbolic link on the way.

    Editors replace files, so the file itself cannot be watched; and an edit of a link's target gives no event in the
    directory of the link.
    """
    names, here, found = list(reversed(path.absolute().parts[1:])), "/", set[str]()
    links = 0
    while names:
        name = names.pop()
        if name == "..":
            here = os.path.dirname(here)
            continue
        entry = os.path.join(here, name)
        if os.path.islink(entry) and links < MOST_LINKS:
            links += 1
            found.add(here)
            target = Path(os.readlink(entry))
            here = "/" if target.is_absolute() else here
            names += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        elif names:
            here = entry
        else:
            found.add(here)
    return found


class Watcher:
    """Calls `changed` once after each burst of events around `files`, and every `rescan` seconds.

    An event counts when `quiet` seconds have passed without another one, at the latest after `longest`. The rescan is
    for what gives no event: network file systems, a directory that was itself replaced, a machine out of watches.
    `files` is asked again each time.
    """

    def __init__(
        self,
        files: Callable[[], Iterable[Path]],
        changed: Callable[[], Awaitable[None]],
        *,
        quiet: float = 0.2,
        longest: float = 2.0,
        rescan: float = 5.0,
    ) -> None:
        self._files, self._changed = files, changed
        self._quiet, self._longest, self._rescan = quiet, longest, rescan
        self._touched = asyncio.Event()
        self.watching = asyncio.Event()
        """Set once the first watches are in place."""

    async def run(self) -> None:
        """Watch until cancelled."""
        watches = await asyncio.to_thread(_Watches, _Handler(asyncio.get_running_loop(), self._touched))
        try:
            while True:
                # Watches before the reading: what is written after that gives an event.
                files = tuple(self._files())
                await asyncio.to_thread(watches.follow, {name for file in files for name in directories(file)})
                await self._changed()
                if tuple(self._files()) == files:
                    self.watching.set()
                    await self._wait()
        finally:
            await asyncio.shield(asyncio.to_thread(watches.close))

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._touched.wait(), self._rescan)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._longest):
                while self._touched.is_set():
                    self._touched.clear()
                    await asyncio.sleep(self._quiet)
        self._touched.clear()


class _Watches:
    """The directories under watch; one that cannot be watched now is tried again by the next call.

    Without descriptors for an observer there will be no events: each attempt would leave one more descriptor open.
    """

    def __init__(self, handler: FileSystemEventHandler) -> None:
        self._handler = handler
        self._observer = self._start()
        self._watches: dict[tuple[str, int], ObservedWatch] = {}
        self._complained: set[str] = set()

    def follow(self, names: set[str]) -> None:
        """Watch these directories and no others."""
        if self._observer is None:
            return
        # By inode too: the watch of a directory that was deleted says nothing about the one that came after it.
        wanted = {(name, inode) for name in names if (inode := _inode(name)) is not None}
        for key in self._watches.keys() - wanted:
            with contextlib.suppress(KeyError, OSError):
                self._observer.unschedule(self._watches.pop(key))
        for key in wanted - self._watches.keys():
            try:
                self._watches[key] = self._observer.schedule(self._handler, key[0], event_filter=_EVENTS)
            except OSError as error:
                self._complain(key[0], error)

    def close(self) -> None:
        """End the observer's threads."""
        if self._observer is not None:
            self._observer.stop()
            self._observer.join()

    @staticmethod
    def _start() -> BaseObserver | None:
        try:
            observer = Observer()
            observer.start()
        except OSError as error:
            log.warning("nothing can be watched: changes are seen late", reason=error.strerror or str(error))
            return None
        return observer

    def _complain(self, directory: str, error: OSError) -> None:
        if directory not in self._complained:
            self._complained.add(directory)
            reason = error.strerror or str(error)
            log.warning("a directory cannot be watched: its changes are seen late", directory=directory, reason=reason)


def _inode(directory: str) -> int | None:
    try:
        return os.stat(directory).st_ino
    except OSError:
        return None


class _Handler(FileSystemEventHandler):
    """Carries events from the observer's thread to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, touched: asyncio.Event) -> None:
        self._loop, self._touched = loop, touched

    def on_any_event(self, event: FileSystemEvent) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._touched.set)
