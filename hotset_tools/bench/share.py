"""`hotset bench share`: what prompts and chats leave each other of the speed that each has alone; the real engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from daemon.config import Config
from daemon.errors import EngineFailed, HotsetError
from daemon.frames import Pipe
from daemon.messages import REPORT, Cancel, Done, Failed, ModelInfo, Sampling, Snapshot, Step, Submit, Tokens
from hotset_tools.bench import engine, hardware
from hotset_tools.bench.walks import Walks

CHAT_PROMPT = 64
CHAT_TOKENS = 384
PROMPTS_IN_LINE = 2
"""Long prompts that are there at any time: one that is read, one that waits."""
_SETTLE_SHARE = 0.25
"""Of a phase, which goes by before anything is counted."""
_END_SECONDS = 60.0


@dataclass(frozen=True)
class Load:
    """`n_chats` answers that never end, and a stream of prompts of `n_prompt` tokens that want one token each.

    Raises:
        HotsetError: there is nothing to compare.
    """

    n_chats: int = 4
    n_prompt: int = 4096
    seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.n_chats < 1 or self.n_prompt < 64 or self.seconds <= 0:
            raise HotsetError("at least one chat, prompts of at least 64 tokens and some time are needed")


@dataclass(frozen=True)
class Rates:
    """Tokens per second of one phase; None: there were none in it. `n_prompts` were read to their end."""

    chats: float | None
    prompts: float | None
    n_prompts: int
    longest_gap_ms: float | None
    """Of a chat, between two of its tokens, in the part that is counted."""


@dataclass
class Seen:
    """What came back in a phase: when, by kind."""

    tokens: list[tuple[float, str, int]] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    """When long prompts gave their token."""
    computed: list[tuple[float, int]] = field(default_factory=list)
    """Tokens of prompts that the engine had computed by then, of all requests."""

    def rates(self, start: float, end: float) -> Rates:
        """Of what came between two times."""
        counted = [one for one in self.tokens if start <= one[0] < end]
        gaps = [later - earlier for earlier, later in self._pairs(counted)]
        return Rates(
            chats=sum(n for _, _, n in counted) / (end - start) if counted else None,
            prompts=self._prompts(start, end),
            n_prompts=sum(start <= at < end for at in self.read),
            longest_gap_ms=1e3 * max(gaps) if gaps else None,
        )

    def _prompts(self, start: float, end: float) -> float | None:
        """Between the first and the last report within, without the prompts of chats that gave a first token there.

        Several prompts may be read in turns, so that their ends tell little.
        """
        reports = [one for one in self.computed if start <= one[0] < end]
        if len(reports) < 2:
            return None
        (since, before), (until, after) = reports[0], reports[-1]
        first: dict[str, float] = {}
        for at, request, _ in self.tokens:
            first.setdefault(request, at)
        chats = CHAT_PROMPT * sum(since <= at < until for at in first.values())
        n_tokens = after - before - chats
        return n_tokens / (until - since) if n_tokens > 0 else None

    @staticmethod
    def _pairs(counted: list[tuple[float, str, int]]) -> Iterator[tuple[float, float]]:
        last: dict[str, float] = {}
        for at, request, _ in counted:
            if request in last:
                yield last[request], at
            last[request] = at


class Driver:
    """Keeps an engine busy; one request a chat, its number and then a counter in its id."""

    def __init__(self, pipe: Pipe, walks: Walks, load: Load, clock: Callable[[], float] = time.perf_counter) -> None:
        self._pipe, self._walks, self._load, self._clock = pipe, walks, load, clock
        self._running: set[str] = set()
        self._n_made = 0
        self.snapshot: Snapshot | None = None

    def phase(self, chats: bool, prompts: bool) -> Rates:
        """Both kinds or one of them for a while; all is over at its end.

        Raises:
            EngineFailed: a request failed.
        """
        seen, began = Seen(), self._clock()
        end = began + self._load.seconds
        for _ in range(self._load.n_chats if chats else 0):
            self._submit("chat")
        for _ in range(PROMPTS_IN_LINE if prompts else 0):
            self._submit("prompt")
        while self._clock() < end:
            for ended in self._receive(seen):
                self._submit(ended)
        for request in self._running:
            self._pipe.send(Cancel(id=request))
        self._drain()
        return seen.rates(began + _SETTLE_SHARE * self._load.seconds, end)

    def _submit(self, kind: str) -> None:
        self._n_made += 1
        request = f"{kind}-{self._n_made}"
        chat = kind == "chat"
        self._running.add(request)
        self._pipe.send(
            Submit(
                id=request,
                prompt=self._walks.tokens(CHAT_PROMPT if chat else self._load.n_prompt, self._n_made),
                max_tokens=CHAT_TOKENS if chat else 1,
                sampling=Sampling(seed=self._n_made, ignore_eos=True),
                client=request,
            )
        )

    def _receive(self, seen: Seen) -> list[str]:
        """Kinds of the requests that are over."""
        ended = []
        for body in self._pipe.receive(0.05):
            report = REPORT.validate_json(body)
            if not isinstance(report, Step):
                continue
            now = self._clock()
            if report.snapshot is not None:
                self.snapshot = report.snapshot
                seen.computed.append((now, report.snapshot.prompt_tokens))
            for event in report.events:
                kind = event.id.partition("-")[0]
                if isinstance(event, Failed):
                    raise EngineFailed(event.message)
                if isinstance(event, Tokens) and kind == "chat":
                    seen.tokens.append((now, event.id, len(event.tokens)))
                if isinstance(event, Done):
                    self._running.discard(event.id)
                    ended.append(kind)
                    if kind == "prompt" and event.finish_reason != "cancelled":
                        seen.read.append(now)
        return ended

    def _drain(self) -> None:
        until = self._clock() + _END_SECONDS
        while self._running:
            if self._clock() > until:
                raise EngineFailed("the engine did not end what was cancelled")
            self._receive(Seen())


def run(config: Config, load: Load, seed: int = 1) -> dict[str, Any]:
    """Chats alone, prompts alone, both; twice, the second time the other way round. Rates are means of the two.

    Raises:
        ModelUnusable: the engine could not load the model.
        EngineFailed: a request failed.
    """
    with engine.started(config) as (pipe, info):
        driver = Driver(pipe, Walks(Path(config.model.path), info.n_vocab, seed), load)
        driver.phase(chats=True, prompts=False)  # experts that chats use come
        order = [(True, False), (False, True), (True, True)]
        rounds = [{kinds: driver.phase(*kinds) for kinds in way} for way in (order, order[::-1])]
        hits = _hits(driver.snapshot)
    alone = {
        "chats": _mean([one[(True, False)].chats for one in rounds]),
        "prompts": _mean([one[(False, True)].prompts for one in rounds]),
    }
    both = {
        "chats": _mean([one[(True, True)].chats for one in rounds]),
        "prompts": _mean([one[(True, True)].prompts for one in rounds]),
    }
    return {
        "head": hardware.describe() | {"model": Path(config.model.path).name} | _described(config, info, load),
        "alone": alone,
        "together": both,
        "share": {kind: both[kind] / alone[kind] for kind in alone},
        "rounds": [
            [{"chats": kinds[0], "prompts": kinds[1]} | asdict(seen) for kinds, seen in one.items()] for one in rounds
        ],
        "residency": hits,
    }


def configured(model: Path, device: str, vram: str, threads: int, load: Load) -> Config:
    """The daemon's defaults but for these; experts move, and nothing switches them off meanwhile."""
    cells = (load.n_chats * (CHAT_PROMPT + CHAT_TOKENS) + PROMPTS_IN_LINE * (load.n_prompt + 1)) * 5 // 4
    sections = {
        "model": {"path": str(model), "context": -(-max(load.n_prompt, CHAT_TOKENS) * 5 // 4 // 256) * 256},
        "engine": {
            "device": device, "threads": threads, "kv_cells": -(-cells // 256) * 256,
            "max_sequences": load.n_chats + PROMPTS_IN_LINE,
        },
        "residency": {"vram": vram, "gate": False, "remember": False},
    }  # fmt: skip
    return Config.model_validate(sections)


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value]
    if len(known) < len(values):
        raise EngineFailed("nothing was computed in a phase; give it more seconds")
    return sum(known) / len(known)


def _hits(snapshot: Snapshot | None) -> Mapping[str, object] | None:
    found = snapshot.residency if snapshot is not None else None
    return None if found is None else {"state": found.state, "reason": found.reason}


def _described(config: Config, info: ModelInfo, load: Load) -> dict[str, object]:
    return {
        "settings": {
            "vram": config.residency.vram,
            "threads": config.engine.threads,
            "ubatch": config.engine.ubatch,
            "scheduling": config.scheduling.model_dump(),
            "vocabulary": info.n_vocab,
        }
        | asdict(load)
    }


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = [f"{'':8}  {'alone':>10}  {'together':>10}  share", ""]
    for kind in ("chats", "prompts"):
        alone, both = result["alone"][kind], result["together"][kind]
        lines.append(f"{kind:8}  {alone:10.1f}  {both:10.1f}  {result['share'][kind]:5.2f}")
    return "\n".join(lines) + "\ntokens per second"
