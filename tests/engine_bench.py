"""A loop with everything around it faked, and what the fake model answers."""

from __future__ import annotations

import itertools

from daemon.engine.loop import Loop
from daemon.engine.roster import Limits
from daemon.messages import Cancel, Scheduling, Submit
from tests.engine_fakes import EOS, FakeContext, FakePipe, FakeVocab, next_token


class Bench:
    """`run` turns until nothing is left to do."""

    def __init__(
        self,
        *,
        n_ubatch: int = 8,
        max_sequences: int = 4,
        kv_cells: int = 256,
        n_ctx: int = 128,
        scheduling: Scheduling | None = None,
    ) -> None:
        self.context = FakeContext(kv_cells)
        self.pipe = FakePipe()
        ticks = itertools.count()
        limits = Limits(n_ubatch=n_ubatch, max_sequences=max_sequences, kv_cells=kv_cells, n_ctx=n_ctx)
        self.loop = Loop(
            self.context,
            FakeVocab(),
            self.pipe,
            limits,
            scheduling=scheduling,
            suppressed=(7,),
            eog=(EOS,),
            clock=lambda: next(ticks) * 1e-3,
        )

    def run(self, *commands: Submit | Cancel, turns: int = 2000) -> None:
        self.pipe.put(*commands)
        self.loop.turn()
        for _ in range(turns):
            self.loop.turn()
            if self.pipe.timeouts[-1] and not self.pipe.inbox:
                return
        raise AssertionError("the loop did not come to rest")

    def turn(self, *commands: Submit | Cancel, times: int = 1) -> None:
        self.pipe.put(*commands)
        for _ in range(times):
            self.loop.turn()

    def phases(self) -> dict[str, str]:
        """What each request in /slots does."""
        return {slot.request: slot.phase for slot in self.loop.snapshot().slots}


def submit(request: str, prompt: list[int], n: int = 5, **fields: object) -> Submit:
    return Submit(id=request, prompt=prompt, max_tokens=n, **fields)  # type: ignore[arg-type]


def expected(prompt: list[int], n: int) -> str:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens))
    return "".join(map(chr, tokens[len(prompt) :]))
