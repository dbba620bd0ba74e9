"""A request on its way to Submits, which can be made anew: the model that is served may change while it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from daemon.api.names import loaded
from daemon.api.plan import Planned, Source
from daemon.api.services import Services, TextPool
from daemon.errors import BadRequest, HotsetError
from daemon.messages import ModelInfo, Sampling
from daemon.prompt.pool import PoolClosed, VocabInfo

T = TypeVar("T")


async def ask_pool(services: Services, job: Callable[[TextPool], Awaitable[T]]) -> T:
    """What `job` makes of the vocabulary that is served; once more, where that was replaced in the middle of it."""
    while True:
        pool = services.pool
        try:
            return await job(pool)
        except PoolClosed:
            if services.pool is pool:
                raise


@dataclass(frozen=True)
class Read:
    """What of a request depends on the vocabulary: its prompts as tokens, and biases for tokens."""

    sources: list[Source]
    sampling: Sampling


class Draft:
    """`read` turns texts into tokens, `plan` those into Submits that fit the context.

    `names_tokens`: the client gave token ids, which mean nothing in another vocabulary. Texts are read again where
    model or template are others; the same tokens are only fitted again.
    """

    def __init__(
        self,
        services: Services,
        read: Callable[[TextPool, ModelInfo], Awaitable[Read]],
        plan: Callable[[Read, ModelInfo], list[Planned]],
        *,
        names_tokens: bool,
    ) -> None:
        self._services, self._read_texts, self._plan = services, read, plan
        self._names_tokens = names_tokens
        self._lock = asyncio.Lock()
        self._read: Read | None = None
        self._vocabulary: VocabInfo | None = None
        self._made_for: tuple[TextPool, ModelInfo] | None = None
        self._planned: list[Planned] = []

    async def planned(self) -> list[Planned]:
        """The answers, for the model that is served in the moment in which this returns.

        Raises:
            HotsetError: the request cannot be answered by that model.
        """
        async with self._lock:  # its answers ask for it together
            while True:
                pool, info = self._services.pool, loaded(self._services)
                if self._made_for == (pool, info):
                    return self._planned
                try:
                    planned = await self._make(pool, info)
                except HotsetError:
                    if self._is_served(pool, info):
                        raise
                    continue  # it was refused by what is no longer served
                if self._is_served(pool, info):
                    self._made_for, self._planned = (pool, info), planned

    def _is_served(self, pool: TextPool, info: ModelInfo) -> bool:
        return self._services.pool is pool and self._services.supervisor.info == info

    async def _make(self, pool: TextPool, info: ModelInfo) -> list[Planned]:
        vocabulary: VocabInfo | None = getattr(pool, "info", None)  # None: it is still being read
        known = self._vocabulary
        if self._read is None or known is None or known != vocabulary:
            if known is not None and vocabulary is not None and known.vocabulary != vocabulary.vocabulary:
                self._refuse_ids()
            self._read = await self._read_texts(pool, info)
            self._vocabulary = getattr(pool, "info", None)
        return self._plan(self._read, info)

    def _refuse_ids(self) -> None:
        if self._names_tokens:
            raise BadRequest(
                "The model was replaced while the request waited; its token ids were those of another vocabulary."
            )
