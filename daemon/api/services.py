"""What the HTTP layer needs from the rest of the service, as interfaces; `daemon.app` fills them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from daemon.api.guard import KeyRing
from daemon.config import Config
from daemon.messages import Card, Done, Failed, ModelInfo, Reload, Residency, Snapshot, Submit, Tokens
from daemon.metrics import Metrics
from daemon.prompt.pool import ChatPrompt, Prompt, VocabInfo

EngineState = Literal["loading", "ready", "restarting", "failed", "stopped"]


class Ticket(Protocol):
    """One answer on its way: iterates any number of Tokens, then one Done or Failed, then it ends."""

    @property
    def id(self) -> str:
        """The id of its Submit."""

    @property
    def position(self) -> int | None:
        """Place in the queue from 0; None once it runs."""

    def cancel(self) -> None:
        """Give it up, at any stage; may be called again."""

    def __aiter__(self) -> AsyncIterator[Tokens | Done | Failed]: ...


class Queueing(Protocol):
    """How many requests run and wait."""

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def max_waiting(self) -> int: ...


class Admission(Protocol):
    """The bounded queue before the engine."""

    def submit(
        self, submit: Submit, *, client: str = "", again: Callable[[], Awaitable[Submit]] | None = None
    ) -> Ticket:
        """Queue one answer; `again` makes it anew for another model that is served before it has started.

        Raises:
            QueueFull: no room.
            ModelLoading: no engine to wait for.
        """

    def cancel(self, request_id: str) -> bool:
        """Give up the answer with this Submit id; False when there is none."""

    @property
    def closing(self) -> bool:
        """Whether nothing more is taken, because the service is about to stop."""

    def statistics(self) -> Queueing:
        """One immutable view."""


class TextPool(Protocol):
    """Templates and tokens, off the event loop; methods raise BadRequest or TemplateFailed."""

    @property
    def info(self) -> VocabInfo:
        """The vocabulary of the served model."""

    async def chat(self, chat: ChatPrompt) -> Prompt: ...

    async def render(self, chat: ChatPrompt) -> str: ...

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...

    async def pieces(self, tokens: list[int]) -> list[bytes]: ...

    async def detokenize(self, tokens: list[int]) -> str: ...


class Supervisor(Protocol):
    """The engine process as the service sees it."""

    @property
    def info(self) -> ModelInfo | None:
        """The loaded model; None before the first load."""

    @property
    def state(self) -> EngineState: ...

    @property
    def reason(self) -> str:
        """Why the state is what it is, in words; may be empty."""

    @property
    def progress(self) -> float:
        """Progress of a load, 0 to 1."""

    @property
    def snapshot(self) -> Snapshot: ...

    @property
    def residency(self) -> Residency:
        """Which experts are in VRAM, as the engine said last."""

    @property
    def restarts(self) -> int: ...


@dataclass
class Services:
    """Everything a handler may use. `config` and `keys` follow the file while the service runs: ask, do not keep."""

    config: Config
    pool: TextPool
    admission: Admission
    supervisor: Supervisor
    metrics: Metrics
    version: str
    keys: KeyRing
    card: Callable[[str], Card | None]
    """What the kernel says of the card at an address of the PCI bus; never fails."""
    reload: Reload | None = None
    """What came of reading the configuration again the last time."""
