"""Log probabilities in the shapes of OpenAI's two endpoints and of llama-server, all with ids and bytes."""

from __future__ import annotations

from typing import Any

from daemon.messages import Candidate, TokenLogprob


def chat_logprobs(items: list[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    return {"content": [entry(item) for item in items], "refusal": None}


def completion_logprobs(items: list[TokenLogprob], offset: int) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; `offset` is where the first token starts in the answer's text.

    `content` holds the same with bytes, because two tokens may read the same.
    """
    texts = [_text(item) for item in items]
    return {
        "tokens": texts,
        "token_logprobs": [item.logprob for item in items],
        "top_logprobs": [{_text(top): top.logprob for top in item.top} for item in items],
        "text_offset": _offsets(texts, offset),
        "content": [entry(item) for item in items],
    }


def entry(item: TokenLogprob) -> dict[str, Any]:
    """One token with the likeliest ones at its place."""
    return _candidate(item) | {"top_logprobs": [_candidate(top) for top in item.top]}


def text_length(items: list[TokenLogprob]) -> int:
    """Characters that these tokens add to `text_offset`."""
    return sum(len(_text(item)) for item in items)


def _offsets(texts: list[str], start: int) -> list[int]:
    offsets = []
    for text in texts:
        offsets.append(start)
        start += len(text)
    return offsets


def _candidate(item: Candidate) -> dict[str, Any]:
    return {"id": item.token, "token": _text(item), "logprob": item.logprob, "bytes": item.bytes}


def _text(item: Candidate) -> str:
    return bytes(item.bytes).decode("utf-8", "replace")
