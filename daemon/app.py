"""Wiring only: builds the parts, hands them to each other, closes them in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from daemon import __version__, control
from daemon.admission import Admission
from daemon.api.guard import KeyRing
from daemon.api.server import make_app, make_runner
from daemon.api.services import Services
from daemon.config import Config
from daemon.errors import HotsetError, ModelUnusable
from daemon.exchange import Exchange
from daemon.log import set_level
from daemon.messages import Adjust, LoadStep, Reload
from daemon.metrics import Metrics
from daemon.model_files import load_command, model_path, residency_spec, scheduling, template_path
from daemon.native import cards
from daemon.prompt.pool import TextPool, VocabInfo
from daemon.recording import Recordings
from daemon.reload import Reloader
from daemon.settings import Settings
from daemon.supervisor import Supervisor
from daemon.watch import Watcher

CLOSE_SECONDS = 2.0
"""For connections that are still open when every answer is over; `Admission.drain` gave them their time."""

log = logging.getLogger("hotset.app")


class AddressInUse(HotsetError):
    """The configured address cannot be listened on."""

    code = "address_unusable"


class Pools:
    """The text pool of `services`, and how others are made; see `daemon.exchange.Pools`."""

    def __init__(self, config: Config) -> None:
        self.current = self.make(config)
        self.services: Services | None = None

    def make(self, config: Config) -> TextPool:
        text = config.text
        return TextPool(
            model_path(config),
            workers=text.workers,
            timeout=text.timeout_seconds,
            memory_mib=text.memory_mib,
            template_file=template_path(config),
        )

    def serve(self, pool: TextPool) -> None:
        assert self.services is not None
        self.current = self.services.pool = pool


class Parts(NamedTuple):
    """What `build` made; `services` is the HTTP layer's view of the others."""

    services: Services
    supervisor: Supervisor
    admission: Admission
    pools: Pools
    recordings: Recordings


async def serve(path: Path | None, settings: Settings, stop: asyncio.Event, hangup: asyncio.Event) -> None:
    """Serve until `stop` is set, then let what runs finish; read `path` again when it changes or `hangup` is set.

    Raises:
        AddressInUse: host and port cannot be bound.
        ModelUnusable: the model can never be loaded with these files and this config.
    """
    parts = build(settings)
    services = parts.services
    async with (
        _listening(services) as address,
        _engine(parts.supervisor) as life,
        _closing(parts.pools),
    ):
        log.info("listening on http://%s", address)
        reloads = reloader(path, settings, services, adjuster(parts.supervisor.send, settings.config))
        async with _obeying(reloads, exchange(parts), parts.recordings, hangup):
            texts = asyncio.create_task(parts.pools.current.start(), name="text pool")
            await _until(stop, life, parts.supervisor, texts)
        seconds = services.config.http.shutdown_seconds
        log.info("stopping: running answers have %g s to finish", seconds)
        await parts.admission.drain(seconds)


def build(settings: Settings) -> Parts:
    """The parts, connected but not started."""
    config, metrics = settings.config, Metrics()
    supervisor = Supervisor(
        lambda: load_command(services.config),
        lambda: services.config.engine,
        restarted=metrics.engine_restarted,
        counts=metrics.experts,
    )
    admission = Admission(supervisor, lambda: services.config.queue)
    supervisor.listener = admission
    recordings = supervisor.recordings = Recordings(supervisor)
    pools = Pools(config)
    keys = KeyRing(settings.api_keys)
    services = pools.services = Services(
        config, pools.current, admission, supervisor, metrics, __version__, keys, cards.read
    )
    return Parts(services, supervisor, admission, pools, recordings)


def exchange(parts: Parts) -> Exchange:
    """What carries out orders to load anew."""
    seconds = lambda: parts.services.config.http.shutdown_seconds  # noqa: E731
    return Exchange(parts.supervisor, parts.admission, parts.pools, seconds)


def reloader(path: Path | None, settings: Settings, services: Services, adjust: Callable[[Config], None]) -> Reloader:
    """What reads `path` again on behalf of `services`, which were built from `settings`.

    `adjust` tells a running engine of what is live for it; one that starts later reads it from `services.config`.
    """

    def apply(new: Settings) -> None:
        """The one place where keys come into force: whoever needs another one asks `services.config` each time."""
        services.config = new.config
        adjust(new.config)
        services.keys.replace(new.api_keys)
        services.admission.refresh()
        set_level(new.config.log.level)

    def report(outcome: Reload) -> None:
        services.reload = outcome
        if outcome.load is None:
            services.metrics.config_reloaded(outcome.result)
        else:
            services.metrics.config_loaded(outcome.load.result)

    return Reloader(path, settings, apply=apply, report=report)


def adjuster(send: Callable[[Adjust], None], config: Config) -> Callable[[Config], None]:
    """What tells an engine, which was loaded with `config` or told before, of each section that is another one now."""
    told = {"residency": residency_spec(config), "scheduling": scheduling(config)}

    def adjust(new: Config) -> None:
        now = {"residency": residency_spec(new), "scheduling": scheduling(new)}
        changed = {name: spec for name, spec in now.items() if spec != told[name]}
        told.update(now)
        if changed:
            send(Adjust.model_validate(changed))

    return adjust


@contextlib.asynccontextmanager
async def _obeying(
    reloader: Reloader, exchange: Exchange, recordings: Recordings, hangup: asyncio.Event
) -> AsyncIterator[None]:
    """The three ways to a reload: a file changed, SIGHUP, and `hotset reload`; and `hotset record`.

    A load or a recording that is under way ends here.
    """

    async def load(force: bool, say: Callable[[LoadStep], None]) -> Reload:
        return await reloader.load(exchange.load, force=force, say=say)

    async def on_hangup() -> None:
        while await hangup.wait():
            hangup.clear()
            await reloader.reload("signal")

    async with control.listening(lambda: reloader.reload("command"), load, recordings.record):
        watcher = Watcher(reloader.files, reloader.reload_if_changed)
        tasks = [asyncio.create_task(watcher.run(), name="watcher"), asyncio.create_task(on_hangup(), name="hangup")]
        for task in tasks:
            task.add_done_callback(_tell_failure)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _tell_failure(task: asyncio.Task[None]) -> None:
    """The service is worth more than a way to a reload: it goes on, but not in silence."""
    if not task.cancelled() and (error := task.exception()):
        log.error("config changes are not seen any more (%s)", task.get_name(), exc_info=error)


@contextlib.asynccontextmanager
async def _listening(services: Services) -> AsyncIterator[str]:
    http = services.config.http
    runner = make_runner(make_app(services), shutdown_timeout=CLOSE_SECONDS)
    await runner.setup()
    try:
        site = web.TCPSite(runner, http.host, http.port)
        try:
            await site.start()
        except OSError as error:
            raise AddressInUse(f"{http.host}:{http.port} cannot be listened on: {_plain(error)}") from None
        host, port = runner.addresses[0][:2]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        await runner.cleanup()


def _plain(error: OSError) -> str:
    """The system's words; asyncio puts the address into them once more."""
    if error.errno is not None and error.errno in errno.errorcode:
        return os.strerror(error.errno)
    return error.strerror or str(error)


@contextlib.asynccontextmanager
async def _engine(supervisor: Supervisor) -> AsyncIterator[asyncio.Task[None]]:
    life = asyncio.create_task(supervisor.run(), name="supervisor")
    try:
        yield life
    finally:
        await supervisor.stop()
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


@contextlib.asynccontextmanager
async def _closing(pools: Pools) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await pools.current.close()


async def _until(
    stop: asyncio.Event, life: asyncio.Task[None], supervisor: Supervisor, texts: asyncio.Task[VocabInfo]
) -> None:
    """Wait for the order to stop, while the parts start too.

    The supervisor ends by itself only when the model is hopeless; a text pool that cannot start is as bad.
    """
    waiting = asyncio.create_task(stop.wait())
    tasks: set[asyncio.Task[Any]] = {waiting, life, texts}
    try:
        while not waiting.done():
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            tasks -= done
            if texts in done:
                texts.result()
            if life in done:
                life.result()
                raise ModelUnusable(supervisor.reason)
    finally:
        for task in (waiting, texts):
            task.cancel()
        await asyncio.gather(waiting, texts, return_exceptions=True)
