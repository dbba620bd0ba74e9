"""What the HTTP layer needs from the rest of the service, as interfaces; `daemon.app` fills them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from daemon.api.guard import KeyRing
from daemon.config import Config
from daemon.messages import Card, Done, Failed, ModelInfo, Priority, Reload, Residency, Snapshot, Submit, Tokens
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

    @property
    def begun(self) -> bool:
        """Whether the engine has got it, also once it is over."""

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

    @property
    def waiting_in(self) -> Mapping[Priority, int]:
        """How many wait in each class."""


class Waiting(Protocol):
    """One that waits; `position` from 0, `seconds` since it came."""

    @property
    def id(self) -> str: ...

    @property
    def position(self) -> int: ...

    @property
    def priority(self) -> Priority: ...

    @property
    def client(self) -> str: ...

    @property
    def seconds(self) -> float: ...


class Admission(Protocol):
    """The bounded queue before the engine."""

    def submit(
        self, submit: Submit, *, again: Callable[[], Awaitable[Submit]] | None = None, replaces: str = ""
    ) -> Ticket:
        """Queue one answer; `again` makes it anew for another model that is served before it has started.

        A `replaces` that is not empty ends the one of the same client that was submitted with it before.

        Raises:
            QueueFull: no room, for anybody or for this client.
            ModelLoading: no engine to wait for.
        """

    def cancel(self, request_id: str) -> bool:
        """Give up the answer with this Submit id; False when there is none."""

    @property
    def closing(self) -> bool:
        """Whether nothing more is taken, because the service is about to stop."""

    def statistics(self) -> Queueing:
        """One immutable view."""

    def waiting(self) -> Sequence[Waiting]:
        """All that wait, those that are next first."""

    def refresh(self) -> None:
        """Limits may be others now."""


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
