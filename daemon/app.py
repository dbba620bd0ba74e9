"""Wiring only: builds the parts, hands them to each other, closes them in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from aiohttp import web

from daemon import __version__
from daemon.admission import Admission
from daemon.api.server import make_app, make_runner
from daemon.api.services import Services
from daemon.config import Config
from daemon.errors import HotsetError, ModelUnusable
from daemon.metrics import Metrics
from daemon.model_files import load_command, model_path, template_path
from daemon.prompt.pool import TextPool, VocabInfo
from daemon.supervisor import Supervisor

CLOSE_SECONDS = 2.0
"""For connections that are still open when every answer is over; `Admission.drain` gave them their time."""

log = logging.getLogger("hotset.app")


class AddressInUse(HotsetError):
    """The configured address cannot be listened on."""

    code = "address_unusable"


class Parts(NamedTuple):
    """What `build` made; `services` is the HTTP layer's view of the others."""

    services: Services
    supervisor: Supervisor
    admission: Admission
    pool: TextPool


async def serve(config: Config, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then let what runs finish.

    Raises:
        AddressInUse: host and port cannot be bound.
        ModelUnusable: the model can never be loaded with these files and this config.
    """
    parts = build(config)
    async with _listening(parts.services) as address, _engine(parts.supervisor) as life, _closing(parts.pool):
        log.info("listening on http://%s", address)
        texts = asyncio.create_task(parts.pool.start(), name="text pool")
        await _until(stop, life, parts.supervisor, texts)
        log.info("stopping: running answers have %g s to finish", config.http.shutdown_seconds)
        await parts.admission.drain(config.http.shutdown_seconds)


def build(config: Config) -> Parts:
    """The parts, connected but not started."""
    metrics = Metrics()
    supervisor = Supervisor(
        lambda: load_command(services.config), lambda: services.config.engine, restarted=metrics.engine_restarted
    )
    admission = Admission(supervisor, lambda: services.config.queue.max_waiting)
    supervisor.listener = admission
    text = config.text
    pool = TextPool(
        model_path(config),
        workers=text.workers,
        timeout=text.timeout_seconds,
        memory_mib=text.memory_mib,
        template_file=template_path(config),
    )
    services = Services(config, pool, admission, supervisor, metrics, __version__)
    return Parts(services, supervisor, admission, pool)


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
async def _closing(pool: TextPool) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await pool.close()


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
