"""One request while the engine works on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from daemon.engine.ports import SamplerPort
from daemon.engine.stops import TextOut
from daemon.messages import SlotState, Submit


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one request; changed by `daemon.engine.loop` only.

    Invariant: cells [0, n_past) of `seq_id` hold exactly `tokens[:n_past]`. A waiting sequence has no `seq_id` and
    n_past 0. It is in prefill while more than one token is left to compute, or none was sampled yet.
    """

    submit: Submit
    arrived: float
    out: TextOut
    tokens: list[int]
    number: int = 0
    """Of the request, in the order in which they came."""
    seq_id: int = -1
    n_past: int = 0
    n_predicted: int = 0
    expert_hits: int = 0
    expert_selections: int = 0
    sampler: SamplerPort | None = None
    started: float = 0.0
    first_token: float = 0.0
    row: int = field(default=-1)
    """Row of the current batch whose logits decide the next token; -1: none."""

    @property
    def id(self) -> str:
        """The request's id."""
        return self.submit.id

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

    def state(self) -> SlotState:
        """The sequence as `/slots` shows it."""
        return SlotState(
            seq_id=self.seq_id,
            request=self.id,
            phase="decode" if self.decoding else "prefill",
            n_prompt=self.n_prompt,
            n_past=self.n_past,
            n_predicted=self.n_predicted,
        )
