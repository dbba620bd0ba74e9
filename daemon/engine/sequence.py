"""One request while the engine works on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from daemon.engine.ports import SamplerPort
from daemon.engine.stops import TextOut
from daemon.messages import Done, FinishReason, Priority, SlotState, Submit

_RANKS: dict[Priority, int] = {priority: rank for rank, priority in enumerate(get_args(Priority))}


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one request; changed by `daemon.engine.loop` and `daemon.engine.roster` only.

    Invariant: cells [0, n_past) of `seq_id` hold exactly `tokens[:n_past]`. A waiting sequence has no `seq_id` and
    n_past 0; `n_parked` is then how many of its tokens are in the parked state, if there is one. It is in prefill while
    more than one token is left to compute, or none was sampled yet.
    """

    submit: Submit
    arrived: float
    out: TextOut
    tokens: list[int]
    number: int = 0
    """Of the request, in the order in which they came."""
    seq_id: int = -1
    n_past: int = 0
    n_parked: int = 0
    n_cached: int = 0
    """Tokens of the prompt that were taken from another sequence."""
    n_predicted: int = 0
    expert_hits: int = 0
    expert_selections: int = 0
    sampler: SamplerPort | None = None
    started: float = 0.0
    first_token: float = 0.0
    leader: Sequence | None = None
    """The running sequence whose first `n_awaited` tokens it waits for; it computes nothing until then."""
    n_awaited: int = 0
    n_passed: int = 0
    """Sequences that came later and were started before it."""
    favoured: bool = False
    """It was passed so often that it counts as one of the first class now."""
    row: int = field(default=-1)
    """Row of the current batch whose logits decide the next token; -1: none."""

    @property
    def id(self) -> str:
        """The request's id."""
        return self.submit.id

    @property
    def rank(self) -> int:
        """0 for the class that goes first."""
        return 0 if self.favoured else _RANKS[self.submit.priority]

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: the better class, then who came first."""
        return self.rank, self.number

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.submit.prompt)

    @property
    def n_left(self) -> int:
        """Tokens known but not computed yet; at least 1 between steps."""
        return len(self.tokens) - self.n_past

    @property
    def decoding(self) -> bool:
        """Whether the next step computes one token that was sampled before."""
        return self.n_predicted > 0 and self.n_left == 1

    @property
    def n_more(self) -> int:
        """Tokens that it may still be given."""
        return self.submit.max_tokens - self.n_predicted

    def state(self) -> SlotState:
        """The sequence as `/slots` shows it."""
        return SlotState(
            seq_id=self.seq_id,
            request=self.id,
            phase=self._phase(),
            priority=self.submit.priority,
            n_prompt=self.n_prompt,
            n_past=self.n_past or self.n_parked,
            n_predicted=self.n_predicted,
        )

    def _phase(self) -> Literal["prefill", "decode", "following", "parked"]:
        if self.seq_id < 0:
            return "parked"
        if self.leader is not None:
            return "following"
        return "decode" if self.decoding else "prefill"

    def done(self, reason: FinishReason, now: float) -> Done:
        """What its end says, at `now`."""
        started = self.started or now
        first = self.first_token or now
        text = "" if reason == "cancelled" else self.out.finish()
        return Done(
            id=self.id,
            finish_reason=reason if self.out.stop_word is None else "stop",
            stop_word=self.out.stop_word,
            text=text,
            n_prompt=self.n_prompt,
            n_cached=self.n_cached,
            n_predicted=self.n_predicted,
            expert_hits=self.expert_hits,
            expert_selections=self.expert_selections,
            wait_ms=(started - self.arrived) * 1e3,
            prompt_ms=(first - started) * 1e3,
            predicted_ms=(now - first) * 1e3,
        )
