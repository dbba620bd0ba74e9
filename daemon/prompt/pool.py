"""The text pool: templates and tokenising in processes of their own, so that no text can stop or fill the service.

Each worker is a pool of one process, so that ending it harms nobody else's work, and takes one job at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from daemon.errors import HotsetError, ModelUnusable, QueueFull, TemplateFailed
from daemon.prompt import worker
from daemon.prompt.template import TEMPLATE_KWARGS, ChatPrompt
from daemon.prompt.worker import Prompt, VocabInfo

__all__ = ["TEMPLATE_KWARGS", "ChatPrompt", "Prompt", "TextPool", "VocabInfo"]

T = TypeVar("T")
GRACE_SECONDS = 2.0
"""What a worker gets beyond its own time limit before it is killed."""
START_SECONDS = 120.0
"""What a worker gets to start and to read a vocabulary, which may lie on a slow disk."""


class PoolClosed(HotsetError):
    """The service is shutting down (503)."""

    status = 503
    code = "shutting_down"


MAX_WAITING = 256
"""Each may hold a body of http.max_body_mib."""


class TextPool:
    """Renders and tokenises. `start` first; every method may then be called from many tasks.

    Args:
        model: the GGUF file whose vocabulary is used.
        workers: processes.
        timeout: seconds for one job.
        memory_mib: memory for one worker beyond the vocabulary.
        template_file: replaces the model's chat template.
        max_waiting: jobs that may wait for a worker; one more is `QueueFull`.
    """

    info: VocabInfo

    def __init__(
        self,
        model: Path,
        *,
        workers: int,
        timeout: float,
        memory_mib: int,
        template_file: Path | None,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._timeout, self._max_waiting, self._n_waiting = timeout, max_waiting, 0
        self._template_file = template_file
        self._lanes = [_Lane(model, timeout, memory_mib) for _ in range(workers)]
        self._idle: asyncio.Queue[_Lane] = asyncio.Queue()
        self._jobs: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def start(self) -> VocabInfo:
        """Start every worker.

        Raises:
            ModelUnusable: the vocabulary or the template file cannot be read.
        """
        source = await asyncio.to_thread(_read, self._template_file)
        started = await asyncio.gather(*(lane.start(source) for lane in self._lanes), return_exceptions=True)
        failures = [result for result in started if isinstance(result, BaseException)]
        if failures:
            await self.close()
            raise failures[0]
        self.info = next(result for result in started if isinstance(result, VocabInfo))
        for lane in self._lanes:
            self._idle.put_nowait(lane)
        return self.info

    async def close(self) -> None:
        """End every worker; jobs that wait or run fail. Idempotent; no process is left."""
        self._closed = True
        await asyncio.gather(*(lane.stop() for lane in self._lanes))
        while self._jobs:
            await asyncio.wait(self._jobs)

    async def chat(self, chat: ChatPrompt) -> Prompt:
        """A chat's prompt.

        Raises:
            BadRequest: messages or tools that are malformed.
            TemplateFailed: the template refused them, or time or memory ran out.
        """
        return await self._do(worker.chat, chat)

    async def render(self, chat: ChatPrompt) -> str:
        """A chat's text; raises as `chat`."""
        return await self._do(worker.render, chat)

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids, as `daemon.native.vocab.Vocab.tokenize`."""
        return await self._do(worker.tokenize, text, add_special, parse_special)

    async def pieces(self, tokens: list[int]) -> list[bytes]:
        """The bytes of each token; `BadRequest` for an id that is none."""
        return await self._do(worker.pieces, tokens)

    async def detokenize(self, tokens: list[int]) -> str:
        """The tokens' text; `BadRequest` for an id that is none."""
        return await self._do(worker.detokenize, tokens)

    async def _do(self, job: Callable[..., T], *arguments: object) -> T:
        """Run a job on the next idle worker.

        A caller that is cancelled leaves: a job that has begun ends in its time, another never begins.
        """
        if self._closed:
            raise PoolClosed("The service is shutting down.")
        lane = await self._free_lane()
        task = asyncio.ensure_future(self._on_lane(lane, job, arguments))
        self._jobs.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    async def _free_lane(self) -> _Lane:
        if self._n_waiting >= self._max_waiting and self._idle.empty():
            raise QueueFull("Too many texts wait to be read.", retry_after=math.ceil(self._timeout))
        self._n_waiting += 1
        try:
            return await self._idle.get()
        finally:
            self._n_waiting -= 1

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._jobs.discard(task)
        if not task.cancelled():
            task.exception()  # a caller that left does not fetch it

    async def _on_lane(self, lane: _Lane, job: Callable[..., T], arguments: tuple[object, ...]) -> T:
        try:
            if self._closed:
                raise PoolClosed("The service is shutting down.")
            return await lane.run(job, arguments)
        except (BrokenProcessPool, ModelUnusable) as error:
            if self._closed:
                raise PoolClosed("The service is shutting down.") from None
            if isinstance(error, ModelUnusable):
                raise
            raise TemplateFailed(
                "The process that worked on the text ended twice; text.memory_mib may be too small for it."
            ) from None
        except MemoryError:
            raise TemplateFailed("The text took more memory than text.memory_mib allows.") from None
        finally:
            self._idle.put_nowait(lane)


class _Lane:
    """One worker process, and its successors."""

    def __init__(self, model: Path, timeout: float, memory_mib: int) -> None:
        self._model, self._timeout, self._memory_mib = model, timeout, memory_mib
        self._source: str | None = None
        self._executor: ProcessPoolExecutor | None = None
        self._pid = 0
        self._stopped = False

    async def start(self, template_source: str | None) -> VocabInfo:
        """Start the first process.

        Raises:
            ModelUnusable: it could not read the vocabulary.
        """
        self._source = template_source
        return await self._open()

    async def run(self, job: Callable[..., T], arguments: tuple[object, ...]) -> T:
        """Run a job; one whose process was ended from outside is tried once more in a new one.

        Raises:
            TemplateFailed: the time was up.
            BrokenProcessPool: the process ended both times.
        """
        try:
            return await self._attempt(job, arguments)
        except BrokenProcessPool:
            await self._discard()
        try:
            return await self._attempt(job, arguments)
        except BrokenProcessPool:
            await self._discard()
            raise

    async def stop(self) -> None:
        """End the process for good."""
        self._stopped = True
        await self._discard()

    async def _attempt(self, job: Callable[..., T], arguments: tuple[object, ...]) -> T:
        if self._executor is None:
            await self._open()
        assert self._executor is not None
        future = asyncio.wrap_future(self._executor.submit(job, *arguments))
        try:
            return await asyncio.wait_for(future, self._timeout + GRACE_SECONDS)
        except TimeoutError:
            await self._discard()
            raise TemplateFailed(
                f"The text took longer than text.timeout_seconds ({self._timeout:g} s) and had to be killed."
            ) from None
        except OSError as error:
            # The process ended while the job was still being written to it.
            raise BrokenProcessPool(str(error)) from None

    async def _open(self) -> VocabInfo:
        if self._stopped:
            raise PoolClosed("The service is shutting down.")
        context = multiprocessing.get_context("spawn")
        executor = self._executor = ProcessPoolExecutor(1, mp_context=context, initializer=worker.begin)
        try:
            return await self._opened(executor)
        except BaseException:
            await self._discard()
            raise

    async def _opened(self, executor: ProcessPoolExecutor) -> VocabInfo:
        try:
            # The first submission starts the process, which blocks for some milliseconds.
            self._pid = await asyncio.wrap_future(await asyncio.to_thread(executor.submit, os.getpid))
            opening = executor.submit(worker.open_vocab, self._model, self._source, self._timeout, self._memory_mib)
            return await asyncio.wait_for(asyncio.wrap_future(opening), START_SECONDS)
        except (BrokenProcessPool, TimeoutError):
            raise ModelUnusable("The process that read the model's vocabulary ended without a word.") from None
        except RuntimeError:  # submitted to an executor that `stop` has shut down
            raise PoolClosed("The service is shutting down.") from None

    async def _discard(self) -> None:
        """Kill the process and wait until it is gone."""
        executor, pid = self._executor, self._pid
        self._executor, self._pid = None, 0
        if executor is None:
            return
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Nothing is cancelled here: what the killed process leaves fails as broken, and doing both at once is a race
        # inside the executor.
        await asyncio.to_thread(executor.shutdown, wait=True)


def _read(template_file: Path | None) -> str | None:
    if template_file is None:
        return None
    try:
        return template_file.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        raise ModelUnusable("The file of model.chat_template cannot be read as UTF-8.") from None
