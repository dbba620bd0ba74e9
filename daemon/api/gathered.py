"""What has come of an answer and has not been sent yet, in as little memory as it needs."""

from __future__ import annotations

import io

from daemon.messages import TokenId, TokenLogprob, Tokens

TOKEN_BYTES = 64
CHARACTER_BYTES = 4
LOGPROB_BYTES = 720
CANDIDATE_BYTES = 650
"""What Python takes for one of each; tests/pure/test_gathered.py measures it."""


class Gathered:
    """The tokens of one answer, one after the other, merged. `weight` is the memory that they take, in bytes."""

    def __init__(self) -> None:
        self.weight = 0
        self._tokens: list[TokenId] = []
        self._text = io.StringIO()
        self._logprobs: list[TokenLogprob] | None = None

    def add(self, part: Tokens) -> int:
        """Append a part; returns the bytes that it weighs."""
        self._tokens += part.tokens
        self._text.write(part.text)
        if part.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs += part.logprobs
        added = weight(part)
        self.weight += added
        return added

    def merged(self, request: str) -> Tokens:
        """All of it as one delta of this request."""
        return Tokens(id=request, tokens=self._tokens, text=self._text.getvalue(), logprobs=self._logprobs)


def weight(part: Tokens) -> int:
    """Bytes of memory that a part takes once it is merged with others."""
    return (
        TOKEN_BYTES * len(part.tokens)
        + CHARACTER_BYTES * len(part.text)
        + sum(LOGPROB_BYTES + CANDIDATE_BYTES * len(item.top) for item in part.logprobs or [])
    )
