"""Whose prompt is read next; pure.

The shortest one first, within its class; and nobody waits for ever: a prompt gains credit for the tokens that others
are given meanwhile, and pays with it for its own. A client that was given more than others stands behind them by that
much, so that several prompts at once bring no one a larger part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

CLASS_STEP = 16_384
"""Tokens by which a class stands before the next one."""
GAIN = (1.0, 1.0, 0.25)
"""Credit for each token that others are given, by rank: how fast a class catches up."""
AHEAD = 2.0
"""How much a token counts that a client was given more than another one."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with tokens to compute. `number` tells it from others, `rank` 0 is the class that goes first."""

    number: int
    n_left: int
    rank: int
    client: str


class Turns:
    """Credits of prompts and what clients were given, since they have been waiting."""

    def __init__(self) -> None:
        self._credit: dict[int, float] = {}
        self._given: dict[str, int] = {}

    def order(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Who goes first; the older one of equals."""
        given = self._of_clients(prompts)
        least = min(given.values(), default=0)

        def key(prompt: Prompt) -> tuple[float, int]:
            ahead = AHEAD * (given[prompt.client] - least)
            behind = prompt.rank * CLASS_STEP + prompt.n_left + ahead - self._credit.get(prompt.number, 0.0)
            return behind, prompt.number

        return sorted(prompts, key=key)

    def computed(self, prompts: Sequence[Prompt], tokens: Mapping[int, int]) -> None:
        """So many tokens of prompts, by number, were computed while all of `prompts` wanted to be."""
        total = sum(tokens.values())
        self._credit = {one.number: self._after(one, tokens.get(one.number, 0), total) for one in prompts}
        given = self._of_clients(prompts)
        for prompt in prompts:
            given[prompt.client] += tokens.get(prompt.number, 0)
        self._given = given

    def _after(self, prompt: Prompt, own: int, total: int) -> float:
        credit = self._credit.get(prompt.number, 0.0)
        return max(0.0, credit - own) + GAIN[prompt.rank] * (total - own)

    def _of_clients(self, prompts: Iterable[Prompt]) -> dict[str, int]:
        """What the clients of these prompts were given; one that comes anew begins with the least of them."""
        clients = {prompt.client for prompt in prompts}
        least = min((given for client, given in self._given.items() if client in clients), default=0)
        return {client: self._given.get(client, least) for client in clients}
