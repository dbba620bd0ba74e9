"""Recording fakes of the parts behind the HTTP layer: text pool, admission with scripted tickets, supervisor."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from daemon.admission import Waiting
from daemon.api.guard import KeyRing
from daemon.api.services import EngineState, Services
from daemon.config import Config, api_keys
from daemon.errors import BadRequest, HotsetError
from daemon.messages import (
    Allowance,
    Candidate,
    Done,
    ExpertDevice,
    ExpertLayer,
    Failed,
    Gate,
    HeatSummary,
    ModelInfo,
    Priority,
    Residency,
    Snapshot,
    Submit,
    TokenLogprob,
    Tokens,
)
from daemon.metrics import Metrics
from daemon.prompt.pool import ChatPrompt, Prompt, VocabInfo

BOS, EOS, N_VOCAB = 256, 257, 258
STORY = "Once upon a time a fox, quick and brown, met a dog; the dog slept on while the fox told stories to the moon."
Event = Tokens | Done | Failed
Script = Callable[[Submit], Iterable[Event]]


class Signal:
    """Lets tests wait for a condition that some call makes true."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Something changed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds; it is looked at after every change."""
        while not condition():
            await self._changed.wait()


class RecordingMetrics(Metrics):
    """Real metrics that also remember how each request ended, and why connections were given up."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[tuple[str, str]] = []
        self.reasons: list[str] = []
        self._signal = Signal()

    def request(self, endpoint: str, outcome: str, seconds: float) -> None:
        super().request(endpoint, outcome, seconds)
        self.outcomes.append((endpoint, outcome))
        self._signal.notify()

    def given_up(self, reason: str) -> None:
        super().given_up(reason)
        self.reasons.append(reason)
        self._signal.notify()

    async def gave_up(self, reason: str) -> None:
        """Wait until a connection was given up for this reason."""
        await self._signal.wait_for(lambda: reason in self.reasons)

    async def ended(self, outcome: str) -> None:
        """Wait until a request has ended like this."""
        await self._signal.wait_for(lambda: outcome in [found for _, found in self.outcomes])


class FakePool:
    """A vocabulary of the 256 bytes, BOS and EOS; a chat is written as role: content lines. Records every chat.

    Another `vocabulary` has other ids: those of the bytes from the last to the first.
    """

    def __init__(self, vocabulary: str = "bytes", template: str = "{{ messages }}") -> None:
        self.vocabulary = vocabulary
        self.info = VocabInfo(
            n_vocab=N_VOCAB,
            bos=BOS,
            eos=EOS,
            add_bos=False,
            add_eos=False,
            bos_token="<s>",
            eos_token="</s>",
            chat_template=template,
            vocab_type="bpe",
            model=vocabulary,
            vocabulary=vocabulary,
        )
        self.chats: list[ChatPrompt] = []
        self.tokenized: list[tuple[str, bool, bool]] = []
        self.error: HotsetError | None = None
        self.gate: asyncio.Event | None = None
        self.asked = asyncio.Event()

    async def chat(self, chat: ChatPrompt) -> Prompt:
        text = await self.render(chat)
        return Prompt(tokens=self.ids(text), text=text)

    def ids(self, text: str) -> list[int]:
        """The text's tokens."""
        return [byte if self.vocabulary == "bytes" else BOS - 1 - byte for byte in text.encode()]

    async def render(self, chat: ChatPrompt) -> str:
        self.chats.append(chat)
        self.asked.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        lines = [f"{message['role']}: {message.get('content') or ''}\n" for message in chat.messages]
        return "".join(lines) + ("assistant:" if chat.add_generation_prompt else "")

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        self.tokenized.append((text, add_special, parse_special))
        return self.ids(text)

    async def pieces(self, tokens: list[int]) -> list[bytes]:
        if any(token >= N_VOCAB for token in tokens):
            raise BadRequest("no such token", param="tokens")
        return [bytes([token]) if token < BOS else b"" for token in tokens]

    async def detokenize(self, tokens: list[int]) -> str:
        return b"".join(await self.pieces(tokens)).decode("utf-8", "replace")


class FakeTicket:
    """Iterates over what its script gave and what a test pushes; ends after Done or Failed, or once cancelled."""

    def __init__(self, submit: Submit, events: Iterable[Event], position: int | None) -> None:
        self.submit = submit
        self.position = position
        self.cancelled = asyncio.Event()
        self.n_read = 0
        self._signal = Signal()
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._over = False
        self.push(*events)

    @property
    def id(self) -> str:
        return self.submit.id

    def push(self, *events: Event | None) -> None:
        """Add events; None ends the iteration without a result."""
        for event in events:
            self._events.put_nowait(event)

    def text(self, text: str) -> None:
        """Push one token with this text."""
        self.push(Tokens(id=self.id, tokens=[65], text=text))

    def finish(self, **changes: object) -> None:
        """Push the Done."""
        self.push(done(self.submit, **changes))

    @property
    def begun(self) -> bool:
        return self.position is None

    def cancel(self) -> None:
        self.cancelled.set()
        self._events.put_nowait(None)

    def __aiter__(self) -> FakeTicket:
        return self

    async def __anext__(self) -> Event:
        if self._over:
            raise StopAsyncIteration
        event = await self._events.get()
        if event is None:
            self._over = True
            raise StopAsyncIteration
        self._over = not isinstance(event, Tokens)
        self.n_read += 1
        self._signal.notify()
        return event

    async def read(self, count: int) -> None:
        """Wait until this many events have been taken."""
        await self._signal.wait_for(lambda: self.n_read >= count)

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self._over or self.cancelled.is_set()


@dataclass(frozen=True)
class FakeStatistics:
    running: int
    waiting: int
    max_waiting: int
    waiting_in: dict[Priority, int]


class FakeAdmission:
    """Answers every Submit by `script`; a script without an end leaves the ticket to the test."""

    def __init__(self) -> None:
        self.script: Script = story
        self.error: HotsetError | None = None
        self.error_after = 0
        self.closing = False
        self.position: int | None = None
        self.submits: list[Submit] = []
        self.replaced: list[str] = []
        self.queue: list[Waiting] = []
        self.n_refreshed = 0
        self.agains: list[Callable[[], Awaitable[Submit]] | None] = []
        self.tickets: list[FakeTicket] = []
        self.asked_to_cancel: list[str] = []
        self._signal = Signal()

    def submit(
        self, submit: Submit, *, again: Callable[[], Awaitable[Submit]] | None = None, replaces: str = ""
    ) -> FakeTicket:
        if self.error is not None and len(self.submits) >= self.error_after:
            raise self.error
        ticket = FakeTicket(submit, self.script(submit), self.position)
        self.submits.append(submit)
        self.replaced.append(replaces)
        self.agains.append(again)
        self.tickets.append(ticket)
        self._signal.notify()
        return ticket

    def cancel(self, request_id: str) -> bool:
        self.asked_to_cancel.append(request_id)
        tickets = [ticket for ticket in self.tickets if ticket.id == request_id]
        for ticket in tickets:
            ticket.finish(finish_reason="cancelled")
        return bool(tickets)

    def statistics(self) -> FakeStatistics:
        live = [ticket for ticket in self.tickets if not ticket.over]
        waits = Counter(ticket.submit.priority for ticket in live if ticket.position is not None)
        n = waits.total()
        return FakeStatistics(running=len(live) - n, waiting=n, max_waiting=64, waiting_in=dict(waits))

    def waiting(self) -> list[Waiting]:
        return self.queue

    def refresh(self) -> None:
        self.n_refreshed += 1

    async def make_anew(self, index: int = 0) -> Submit:
        """What becomes of a Submit when another model is served before it has started."""
        again = self.agains[index]
        assert again is not None
        return await again()

    async def ticket(self, index: int = 0) -> FakeTicket:
        """The ticket with this index, as soon as it exists."""
        await self._signal.wait_for(lambda: len(self.tickets) > index)
        return self.tickets[index]


def model_info() -> ModelInfo:
    """A small model with a context of 4096 tokens."""
    return ModelInfo(
        name="tiny-moe",
        architecture="qwen3moe",
        description="tiny",
        fingerprint="f" * 16,
        n_params=41_000_000,
        size=25_000_000,
        n_vocab=N_VOCAB,
        n_ctx_train=8192,
        n_ctx=4096,
        kv_cells=8192,
        kv_bytes_per_token=2048,
        n_layer=4,
        n_expert=16,
        n_expert_used=2,
        max_sequences=4,
        n_ubatch=512,
        bos=BOS,
        eos=EOS,
        devices=[],
        build="b1-fake",
        residency="not applicable: no device",
    )


MOVING = Residency(
    state="on",
    reason="on: 8 of 32 experts",
    filled=0.5,
    devices=[
        ExpertDevice(
            device="Vulkan0", asked="50%", asked_bytes=100, effective_bytes=90, why="so much is free", bytes=96,
            layers=2, slots=8, resident=7, hits=30, misses=10,
        )
    ],
    layers=[
        ExpertLayer(
            layer=number, device="Vulkan0", mode="partial", reason="", memory="pinned", experts=16, slots=8, resident=7,
            hits=30, misses=10, hit_rate=rate, heat=heat,
        )
        for number, (rate, heat) in enumerate(
            [(None, None), (0.75, HeatSummary(resident_share=0.8, for_half=3, for_ninety=9, hottest=[5, 1, 0]))]
        )
    ],
    uploaded_bytes=70,
    placement="live",
    moves=9,
    hit_rate=0.75,
    upload=Allowance(asked="64 MiB/s", effective="60 MiB/s", why="the bus is slow"),
    gate=Gate(state="open", reason="it pays", on=20.0, off=11.5),
    selftest="passed",
)  # fmt: skip
"""Experts that move: every field says something, and each that may be None is so in one layer."""


@dataclass
class FakeSupervisor:
    info: ModelInfo | None = field(default_factory=model_info)
    state: EngineState = "ready"
    reason: str = ""
    progress: float = 1.0
    snapshot: Snapshot = field(default_factory=lambda: Snapshot(kv_cells_used=10, kv_cells=8192, parked_bytes=7))
    residency: Residency = field(default_factory=lambda: Residency(reason="not applicable: no device"))
    restarts: int = 0


def done(submit: Submit, **changes: object) -> Done:
    """A Done with round numbers; `changes` replaces fields."""
    values: dict[str, object] = {
        "id": submit.id,
        "finish_reason": "stop",
        "n_prompt": len(submit.prompt),
        "n_cached": 0,
        "n_predicted": 3,
        "wait_ms": 1.0,
        "prompt_ms": 10.0,
        "predicted_ms": 30.0,
    }
    return Done.model_validate(values | changes)


def nothing(submit: Submit) -> list[Event]:
    """A script that leaves everything to the test."""
    return []


def story(submit: Submit) -> list[Event]:
    """A script that tells STORY word by word; obeys max_tokens, stop and logprobs like an engine.

    With ignore_eos and a high limit it never ends.
    """
    words = [word if i == 0 else " " + word for i, word in enumerate(STORY.split(" "))][: submit.max_tokens]
    text, word = _cut("".join(words), submit.stop)
    events: list[Event] = []
    shown = 0
    for number, piece in enumerate(words):
        visible = text[shown : shown + len(piece)]
        if not visible:
            break
        shown += len(visible)
        logprobs = None if submit.logprobs is None else [logprob(piece, submit.logprobs)]
        events.append(Tokens(id=submit.id, tokens=[number], text=visible, logprobs=logprobs))
    if submit.sampling.ignore_eos and submit.max_tokens > len(words):
        return events
    reason = "length" if word is None and len(words) == submit.max_tokens else "stop"
    return [*events, done(submit, finish_reason=reason, stop_word=word, n_predicted=len(events))]


def logprob(piece: str, n_top: int) -> TokenLogprob:
    """A logprob whose alternatives get less likely."""
    data = list(piece.encode())
    top = [Candidate(token=i, bytes=data if i == 0 else [65 + i], logprob=-0.5 - i) for i in range(n_top)]
    return TokenLogprob(token=0, bytes=data, logprob=-0.5, top=top)


def _cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    at, stop = min(found)
    return text[:at], stop


@dataclass
class Fakes:
    """Everything that a test of the HTTP layer holds in its hands."""

    services: Services
    pool: FakePool
    admission: FakeAdmission
    supervisor: FakeSupervisor
    metrics: RecordingMetrics

    def configure(self, **sections: dict[str, object]) -> None:
        """Replace keys of the running configuration, section by section."""
        data = self.services.config.model_dump()
        for section, values in sections.items():
            data[section] |= values
        self.services.config = Config.model_validate(data, strict=False)


def make_fakes(config: Config | None = None) -> Fakes:
    """Services made of fakes."""
    pool, admission, supervisor = FakePool(), FakeAdmission(), FakeSupervisor()
    config = config or Config.model_validate({"model": {"path": str(Path("models") / "tiny-moe-Q4_K_M.gguf")}})
    metrics = RecordingMetrics()
    keys = KeyRing(api_keys(config))
    services = Services(config, pool, admission, supervisor, metrics, "0.0-test", keys, card=lambda pci: None)
    return Fakes(services, pool, admission, supervisor, metrics)
