"""Reading the configuration again while the service runs: compare by key, apply what is live, tell what has to wait."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import structlog

from daemon import config, settings
from daemon.config import Effect
from daemon.errors import ConfigError
from daemon.messages import Change, Reload
from daemon.settings import Settings

Cause = Literal["watcher", "signal", "command"]

log = structlog.get_logger("hotset.config")


def changes(running: Settings, wanted: Settings) -> list[Change]:
    """Every key that differs, with when its change takes effect; API keys are counted, never shown."""
    found = [
        Change(key=key, effect=config.effect(key).value, old=_shown(key, old), new=_shown(key, new))
        for key, (old, new) in config.difference(running.config, wanted.config).items()
    ]
    same_file = running.config.http.keys_file == wanted.config.http.keys_file
    before, after = running.keys_of_file, wanted.keys_of_file
    if same_file and before != after:
        key, old, new = "http.keys_file", _count(before), f"{_count(after)} in the same file"
        found.append(Change(key=key, effect=config.effect(key).value, old=old, new=new))
    return found


def merge(running: Settings, wanted: Settings) -> Settings:
    """What can be in force now: `wanted` for live keys, `running` for all others.

    Raises:
        ConfigError: the two do not go together, for example no API key while the old address is still listened on.
    """
    merged = config.merge(running.config, wanted.config)
    problems = config.cross_checks(merged)
    if problems:
        beside = " (beside what stays in force until the service starts again)"
        raise ConfigError([(key, what + beside) for key, what in problems])
    return Settings(merged, wanted.api_keys)


def _count(keys: Sequence[str]) -> str:
    return "1 key" if len(keys) == 1 else f"{len(keys)} keys"


def _shown(key: str, value: Any) -> str:
    if key == "http.keys":
        return _count(value)
    return repr(list(value) if isinstance(value, tuple) else value)


class Reloader:
    """Reads `path` again, one call after the other. Belongs to the event loop; files are read in a thread.

    `apply` puts settings into force and is called only with valid ones; `report` hears the result of every reload.
    A rejected file changes nothing.
    """

    def __init__(
        self,
        path: Path | None,
        running: Settings,
        *,
        apply: Callable[[Settings], None],
        report: Callable[[Reload], None],
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._running, self._environ, self._clock = path, running, environ, clock
        self._apply, self._report = apply, report
        self._lock = asyncio.Lock()
        self._seen = _fingerprints(self.files())
        self._last: Reload | None = None

    def files(self) -> tuple[Path, ...]:
        """The files whose contents are in force."""
        return self._files_of(self._running)

    async def reload(self, cause: Cause) -> Reload:
        """Read, compare, apply, and tell the log and `report`."""
        async with self._lock:
            return self._tell(cause, await self._attempt())

    async def reload_if_changed(self) -> None:
        """The watcher's way: silent while nothing is new.

        A rejected file is tried each time, because its fault may lie in another one that it names.
        """
        async with self._lock:
            rejected = self._last is not None and self._last.result == "rejected"
            if not rejected and await asyncio.to_thread(_fingerprints, self.files()) == self._seen:
                return
            outcome = await self._attempt()
            if self._last is None or outcome.result != "rejected" or outcome.faults != self._last.faults:
                self._tell("watcher", outcome)

    async def _attempt(self) -> Reload:
        try:
            wanted, shadowed = await asyncio.to_thread(self._read)
            merged = merge(self._running, wanted)
        except ConfigError as error:
            return Reload(result="rejected", at=self._clock(), faults=error.problems)
        found = changes(self._running, wanted)
        applied = [change for change in found if change.effect == Effect.LIVE.value]
        pending = [change for change in found if change.effect != Effect.LIVE.value]
        if applied:
            self._apply(merged)
            self._running = merged
        result: Literal["applied", "unchanged"] = "applied" if applied else "unchanged"
        return Reload(result=result, at=self._clock(), applied=applied, pending=pending, shadowed=shadowed)

    def _read(self) -> tuple[Settings, list[str]]:
        """What the files say; `_seen` is their state before they were read, so that later changes show."""
        files = self.files()
        while True:
            self._seen = _fingerprints(files)
            wanted, shadowed = self._read_once()
            if self._files_of(wanted) == files:
                return wanted, shadowed
            files = self._files_of(wanted)  # another file of keys, read before it was looked at

    def _files_of(self, wanted: Settings) -> tuple[Path, ...]:
        names = (self._path, wanted.config.http.keys_file)
        return tuple(Path(name) for name in names if name)

    def _read_once(self) -> tuple[Settings, list[str]]:
        if self._path is None:
            return settings.read(None, self._environ), []
        if _is_blank(self._path):
            # An editor's or a full disk's half of a change: taken as it is, it would remove every API key.
            raise ConfigError([("", f"{self._path} is empty")])
        return settings.read(self._path, self._environ), config.shadowed(self._path, self._environ)

    def _tell(self, cause: Cause, outcome: Reload) -> Reload:
        self._last = outcome
        for key, what in outcome.faults:
            log.error("config rejected, the last good one stays in force", key=key or None, fault=what, cause=cause)
        for change in outcome.applied:
            log.info("config changed", key=change.key, old=change.old, new=change.new, cause=cause)
        for change in outcome.pending:
            log.warning(
                "config change waits for the next start of the service",
                key=change.key, effect=change.effect, running=change.old, file=change.new, cause=cause,
            )  # fmt: skip
        for key in outcome.shadowed:
            log.warning("config key of the file is not used: the environment overrides it", key=key, cause=cause)
        if outcome.result == "unchanged":
            log.info("config read again: nothing to apply", cause=cause)
        self._report(outcome)
        return outcome


def _is_blank(path: Path) -> bool:
    try:
        return not path.read_bytes().strip()
    except OSError:
        return False  # whoever reads it next says why


def _fingerprints(files: tuple[Path, ...]) -> tuple[bytes, ...]:
    return tuple(_fingerprint(file) for file in files)


def _fingerprint(file: Path) -> bytes:
    """Tells contents apart; what cannot be read is told by its error."""
    try:
        return hashlib.sha256(file.read_bytes()).digest()
    except OSError as error:
        return str(error.errno).encode()
