"""Reading the configuration again while the service runs: compare by key, apply what is live, tell what has to wait."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import structlog

from daemon import config, settings
from daemon.config import Effect
from daemon.errors import ConfigError
from daemon.messages import Change, LoadResult, LoadStep, Reload
from daemon.settings import Settings

Cause = Literal["watcher", "signal", "command"]
Say = Callable[[LoadStep], None]
Exchange = Callable[[config.Config, Callable[[], None], Say], Awaitable[LoadResult]]
"""`daemon.exchange.Exchange.load`."""
NOW = (Effect.LIVE,)
LOADED = (Effect.LIVE, Effect.NEXT_LOAD)

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


def merge(running: Settings, wanted: Settings, effects: Collection[Effect] = NOW) -> Settings:
    """What can be in force: `wanted` for keys with one of these effects, live among them, `running` for all others.

    Raises:
        ConfigError: the two do not go together, for example no API key while the old address is still listened on.
    """
    merged = config.merge(running.config, wanted.config, effects)
    problems = config.cross_checks(merged)
    if problems:
        beside = " (beside what stays in force until the service starts again)"
        if Effect.NEXT_LOAD not in effects:
            beside = " (beside what stays in force until `hotset reload --load` or the next start)"
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
        self._wanted = running
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

    async def load(self, exchange: Exchange, *, force: bool, say: Say) -> Reload:
        """As `reload`; then `exchange` serves what waits for a new load. Without such a key only if `force`.

        Other reloads go on meanwhile. Keys that were not loaded stay pending.
        """
        async with self._lock:
            first = await self._attempt(ordered=True)
            if first.result == "rejected":
                return self._tell("command", first)
            self._tell("command", first, ordered=True)
            target = merge(self._running, self._wanted, LOADED)
        keys = [change for change in first.pending if change.effect != Effect.RESTART.value]
        if not keys and not force:
            return self._loaded(first, LoadResult(result="nothing"))
        result = await exchange(target.config, lambda: self._adopt(target, keys), say)
        if result.result == "loaded":
            result = result.model_copy(update={"loaded": keys})
        return self._loaded(first, result)

    def _adopt(self, target: Settings, keys: list[Change]) -> None:
        """The new load is served. What is live may have changed again since it was ordered."""
        withheld = any(change.effect == Effect.LIVE.value for change in keys)
        merged = config.merge(self._running.config, target.config, LOADED if withheld else (Effect.NEXT_LOAD,))
        self._running = Settings(merged, target.api_keys if withheld else self._running.api_keys)
        self._apply(self._running)

    def _loaded(self, first: Reload, result: LoadResult) -> Reload:
        """What came of an order; `first` is what reading the file had given. Other readings may have come since."""
        pending = changes(self._running, self._wanted)
        ended = first.model_copy(update={"at": self._clock(), "pending": pending, "load": result})
        if self._last is first or self._last is None:
            self._last = ended
        else:
            newer = {} if self._last.result == "rejected" else {"pending": pending}
            self._last = self._last.model_copy(update={"load": result} | newer)
        self._tell_load(result)
        self._report(self._last)
        return ended

    async def _attempt(self, *, ordered: bool = False) -> Reload:
        try:
            wanted, shadowed = await asyncio.to_thread(self._read)
            merged = self._at_once(wanted, ordered)
        except ConfigError as error:
            return Reload(result="rejected", at=self._clock(), faults=error.problems)
        self._wanted = wanted
        found = changes(self._running, wanted)
        applied = [one for one in found if one.effect == Effect.LIVE.value and merged is not self._running]
        pending = [one for one in found if one not in applied]
        if applied:
            self._apply(merged)
            self._running = merged
        result: Literal["applied", "unchanged"] = "applied" if applied else "unchanged"
        return Reload(result=result, at=self._clock(), applied=applied, pending=pending, shadowed=shadowed)

    def _at_once(self, wanted: Settings, ordered: bool) -> Settings:
        """What is in force before any load; all as it was, where live keys go only with those that are loaded."""
        if not ordered:
            return merge(self._running, wanted)
        merge(self._running, wanted, LOADED)  # raises before anything is in force
        try:
            return merge(self._running, wanted)
        except ConfigError:
            return self._running

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

    def _tell(self, cause: Cause, outcome: Reload, *, ordered: bool = False) -> Reload:
        self._last = outcome
        for key, what in outcome.faults:
            log.error("config rejected, the last good one stays in force", key=key or None, fault=what, cause=cause)
        for change in outcome.applied:
            log.info("config changed", key=change.key, old=change.old, new=change.new, cause=cause)
        for change in outcome.pending:
            values = {"key": change.key, "running": change.old, "file": change.new, "cause": cause}
            if change.effect == Effect.RESTART.value:
                log.warning("config change waits for the next start of the service", **values)
            elif ordered:
                log.info("config change is ordered to be loaded", **values)
            else:
                log.warning("config change waits for hotset reload --load", **values)
        for key in outcome.shadowed:
            log.warning("config key of the file is not used: the environment overrides it", key=key, cause=cause)
        if outcome.result == "unchanged":
            log.info("config read again: nothing to apply", cause=cause)
        self._report(outcome)
        return outcome

    def _tell_load(self, result: LoadResult) -> None:
        values = {"seconds": round(result.seconds, 1), "cut_off": result.cut_off}
        if result.result == "loaded":
            log.info("new load is served", keys=[change.key for change in result.loaded], **values)
        elif result.result == "nothing":
            log.info("nothing to load: no changed key waits for a new load")
        else:
            log.error(f"new load {result.result}", reason=result.reason, **values)


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
