"""Request bodies: the same bytes for every server; pure.

Unless history is to be shared (`cached`), every body begins with a number that occurs nowhere else, and says
`cache_prompt: false`: nobody wins by remembering a prompt.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from hotset_tools.bench.load.plan import Arrival

PATHS = {"chat": "/chat/completions", "long": "/chat/completions", "title": "/chat/completions",
         "autocomplete": "/completions"}  # fmt: skip
WORDS = (
    "harbour boat rope tide gull market stone lamp letter winter bread glass river clock garden window paper song mill "
    "ladder copper honey thunder saddle candle meadow basket anchor velvet orchard needle pepper bridge hammer willow "
    "barrel lantern pebble feather cellar"
).split()


@dataclass(frozen=True, slots=True)
class Scale:
    """How words become tokens: `per_word` tokens each, and `fixed` for the template and the rest of a request."""

    per_word: float
    fixed: float

    def n_words(self, n_tokens: int) -> int:
        """Words of a request of about `n_tokens` tokens, at least one."""
        return max(1, int((n_tokens - self.fixed) / self.per_word))


def scale(few: tuple[int, int], many: tuple[int, int]) -> Scale:
    """From two requests that were counted by a server: (words, tokens) each.

    Raises:
        ValueError: counts that cannot be.
    """
    per_word = (many[1] - few[1]) / (many[0] - few[0])
    if per_word <= 0:
        raise ValueError(f"{few[0]} words are counted as {few[1]} tokens and {many[0]} words as {many[1]}")
    return Scale(per_word, max(0.0, few[1] - few[0] * per_word))


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes the bodies of one run."""

    seed: int
    scale: Scale
    model: str = ""
    cached: bool = False

    def body(self, arrival: Arrival) -> bytes:
        """The JSON of one request."""
        kind = arrival.kind
        value: dict[str, Any] = {
            **({"model": self.model} if self.model else {}),
            **self._prompt(arrival),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": kind.n_output,
            "ignore_eos": True,
            "cache_prompt": self.cached,
            "temperature": 0.8,
            "seed": arrival.number,
            "user": arrival.client,
        }
        return json.dumps(value, separators=(",", ":")).encode()

    def _prompt(self, arrival: Arrival) -> dict[str, Any]:
        n_words = self.scale.n_words(arrival.kind.n_prompt)
        if arrival.kind.name == "autocomplete":
            return {"prompt": self._text(arrival, "prompt", n_words, opens=True)}
        turn = arrival.turn % arrival.kind.n_turns
        each = max(1, n_words // (2 * turn + 1))
        last = n_words - each * 2 * turn
        messages = [
            {"role": "assistant" if i % 2 else "user", "content": self._text(arrival, str(i), each, opens=i == 0)}
            for i in range(2 * turn)
        ]
        messages.append({"role": "user", "content": self._text(arrival, str(2 * turn), last, opens=turn == 0)})
        return {"messages": messages}

    def _text(self, arrival: Arrival, part: str, n_words: int, *, opens: bool) -> str:
        """`n_words` words that the place in the conversation decides; what opens it has its name in front."""
        own = f"{arrival.client}-{arrival.turn // arrival.kind.n_turns}" if self.cached else f"{arrival.number}"
        name = f"{self.seed}-{own}"
        return " ".join([name, *words(n_words - 1, f"{name}/{part}")] if opens else words(n_words, f"{name}/{part}"))


def words(n: int, seed: str) -> list[str]:
    """`n` words, each about equally often in random order, so that texts of one length have about as many tokens."""
    draw = random.Random(seed)
    rounds = (draw.sample(WORDS, len(WORDS)) for _ in range(-(-n // len(WORDS))))
    return [word for one in rounds for word in one][:n]


def counting_body(n_words: int, model: str) -> bytes:
    """A request whose `usage` tells how many tokens a prompt of `n_words` words is."""
    text = " ".join(words(n_words, str(n_words)))
    value = {"messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": 1,
             "stream_options": {"include_usage": True}, "cache_prompt": False}  # fmt: skip
    return json.dumps({**({"model": model} if model else {}), **value}).encode()
