"""OpenAI's shapes: the constant part of a stream's chunks is serialised once."""

from __future__ import annotations

import json
import time
from json.encoder import encode_basestring as quote
from typing import Any

from daemon.api.answer import Answer, finish_reason, usage
from daemon.api.delivery import Collected
from daemon.api.logprobs import chat_logprobs, completion_logprobs, text_length
from daemon.api.sse import DONE
from daemon.messages import Done, Tokens


def dump(value: Any) -> str:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class Head:
    """The fields that every object of one response repeats; `text` is how a chunk begins."""

    def __init__(self, request_id: str, kind: str, created: int | None = None) -> None:
        prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
        self.fields: dict[str, Any] = {
            "id": f"{prefix}-{request_id}",
            "object": kind,
            "created": int(time.time()) if created is None else created,
        }
        self.text = ""

    def name_model(self, model: str, fingerprint: str) -> None:
        """Say which model answers; another one, when it was replaced while the request waited."""
        self.fields |= {"model": model, "system_fingerprint": fingerprint}
        self.text = "data: " + dump(self.fields)[:-1] + ',"choices":['


class ChatStream:
    """Chunks of /v1/chat/completions."""

    def __init__(self, head: Head, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage

    def opening(self, answer: Answer) -> bytes:
        """The role."""
        return self._chunk(answer, '{"role":"assistant","content":""}', "null", "null", "")

    def delta(self, answer: Answer, tokens: Tokens) -> bytes:
        """New text, with log probabilities where they were asked for."""
        if not tokens.text and not tokens.logprobs:
            return b""
        logprobs = dump(chat_logprobs(tokens.logprobs)) if tokens.logprobs else "null"
        return self._chunk(answer, f'{{"content":{quote(tokens.text)}}}', logprobs, "null", "")

    def finish(self, answer: Answer, done: Done) -> bytes:
        """The one chunk with a finish_reason, and the timings."""
        timings = f',"timings":{dump(answer.timings())}'
        return self._chunk(answer, "{}", "null", f'"{finish_reason(done)}"', timings)

    def closing(self, answers: list[Answer]) -> bytes:
        """Usage where it was asked for, then the end mark."""
        return _usage_chunk(self._head.text, answers) + DONE if self._include_usage else DONE

    def _chunk(self, answer: Answer, delta: str, logprobs: str, reason: str, extra: str) -> bytes:
        return (
            f'{self._head.text}{{"index":{answer.index},"delta":{delta},"logprobs":{logprobs},'
            f'"finish_reason":{reason}}}]{extra}}}\n\n'
        ).encode()


class CompletionStream:
    """Chunks of /v1/completions."""

    def __init__(self, head: Head, include_usage: bool, *, echo: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self._echo = echo
        self._offsets: dict[Answer, int] = {}

    def opening(self, answer: Answer) -> bytes:
        """The prompt when it is echoed; otherwise a comment, so that the headers go out."""
        if self._echo:
            return self._chunk(answer, answer.planned.text, "null", "null", "")
        return b": queued\n\n" if answer.index == 0 else b""

    def delta(self, answer: Answer, tokens: Tokens) -> bytes:
        """New text, with log probabilities where they were asked for."""
        if not tokens.text and not tokens.logprobs:
            return b""
        return self._chunk(answer, tokens.text, self._logprobs(answer, tokens), "null", "")

    def finish(self, answer: Answer, done: Done) -> bytes:
        """The one chunk with a finish_reason, and the timings."""
        return self._chunk(answer, "", "null", f'"{finish_reason(done)}"', f',"timings":{dump(answer.timings())}')

    def closing(self, answers: list[Answer]) -> bytes:
        """Usage where it was asked for, then the end mark."""
        return _usage_chunk(self._head.text, answers) + DONE if self._include_usage else DONE

    def _logprobs(self, answer: Answer, tokens: Tokens) -> str:
        if not tokens.logprobs:
            return "null"
        offset = self._offsets.get(answer, 0)
        self._offsets[answer] = offset + text_length(tokens.logprobs)
        return dump(completion_logprobs(tokens.logprobs, offset))

    def _chunk(self, answer: Answer, text: str, logprobs: str, reason: str, extra: str) -> bytes:
        return (
            f'{self._head.text}{{"index":{answer.index},"text":{quote(text)},"logprobs":{logprobs},'
            f'"finish_reason":{reason}}}]{extra}}}\n\n'
        ).encode()


def chat_body(head: Head, collected: list[Collected]) -> dict[str, Any]:
    """The whole answer of /v1/chat/completions."""
    choices = [
        {
            "index": item.answer.index,
            "message": {"role": "assistant", "content": item.tokens.text},
            "logprobs": None if item.tokens.logprobs is None else chat_logprobs(item.tokens.logprobs),
            "finish_reason": finish_reason(item.done),
        }
        for item in collected
    ]
    return _body(head, choices, collected)


def completion_body(head: Head, collected: list[Collected], *, echo: bool) -> dict[str, Any]:
    """The whole answer of /v1/completions."""
    choices = [
        {
            "index": item.answer.index,
            "text": (item.answer.planned.text if echo else "") + item.tokens.text,
            "logprobs": None if item.tokens.logprobs is None else completion_logprobs(item.tokens.logprobs, 0),
            "finish_reason": finish_reason(item.done),
        }
        for item in collected
    ]
    return _body(head, choices, collected)


def _body(head: Head, choices: list[dict[str, Any]], collected: list[Collected]) -> dict[str, Any]:
    answers = [item.answer for item in collected]
    return head.fields | {"choices": choices, "usage": usage(answers), "timings": answers[0].timings()}


def _usage_chunk(head: str, answers: list[Answer]) -> bytes:
    return f'{head}],"usage":{dump(usage(answers))}}}\n\n'.encode()
