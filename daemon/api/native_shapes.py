"""The JSON of llama-server's /completion, /props and /slots."""

from __future__ import annotations

import json
from dataclasses import dataclass
from json.encoder import encode_basestring as quote
from typing import Any

from daemon.api.answer import Answer
from daemon.api.delivery import Collected
from daemon.api.logprobs import entry
from daemon.api.services import Waiting
from daemon.api.sse import event
from daemon.messages import Done, Sampling, SlotState, Submit, Tokens

RANDOM_SEED = 2**32 - 1


@dataclass
class Settings:
    """What `generation_settings` says beyond the samplers; `model` and `n_ctx` are those of the model that answers."""

    stream: bool
    n_probs: int
    model: str = ""
    n_ctx: int = 0


def sampling_settings(sampling: Sampling) -> dict[str, Any]:
    """The samplers under llama.cpp's names; a random seed is 4294967295."""
    values = sampling.model_dump()
    values["seed"] = RANDOM_SEED if sampling.seed is None else sampling.seed
    values["dry_sequence_breakers"] = list(sampling.dry_sequence_breakers)
    values["logit_bias"] = [{"token": token, "bias": bias} for token, bias in sampling.logit_bias]
    return values


def generation_settings(submit: Submit, settings: Settings) -> dict[str, Any]:
    """`generation_settings` of an answer."""
    return sampling_settings(submit.sampling) | {
        "stop": list(submit.stop),
        "max_tokens": submit.max_tokens,
        "n_predict": submit.max_tokens,
        "n_keep": 0,
        "n_discard": 0,
        "stream": settings.stream,
        "n_probs": settings.n_probs,
        "n_ctx": settings.n_ctx,
        "model": settings.model,
    }


def stop_type(done: Done) -> str:
    """llama-server's word for why it ended; "none" when it was cancelled."""
    if done.finish_reason == "stop":
        return "eos" if done.stop_word is None else "word"
    return "limit" if done.finish_reason == "length" else "none"


def final(answer: Answer, settings: Settings, content: str, tokens: list[int]) -> dict[str, Any]:
    """The object with `"stop": true`."""
    done = answer.done
    assert done is not None
    return {
        "index": answer.index,
        "content": content,
        "tokens": tokens,
        "id_slot": -1,
        "stop": True,
        "model": settings.model,
        "tokens_predicted": done.n_predicted,
        "tokens_evaluated": done.n_prompt,
        "generation_settings": generation_settings(answer.planned.submit, settings),
        "prompt": answer.planned.text,
        "truncated": False,
        "stop_type": stop_type(done),
        "stopping_word": done.stop_word or "",
        "tokens_cached": done.n_cached,
        "timings": answer.timings(),
    }


def native_body(item: Collected, settings: Settings, *, return_tokens: bool) -> dict[str, Any]:
    """The whole answer."""
    body = final(item.answer, settings, item.tokens.text, item.tokens.tokens if return_tokens else [])
    if item.tokens.logprobs is not None:
        body["completion_probabilities"] = [entry(logprob) for logprob in item.tokens.logprobs]
    return body


class NativeStream:
    """Events of a streamed /completion: no end mark, the last object has `"stop": true`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def opening(self, answer: Answer) -> bytes:
        """A comment, so that the headers go out."""
        return b": queued\n\n" if answer.index == 0 else b""

    def delta(self, answer: Answer, tokens: Tokens) -> bytes:
        """New text and its tokens."""
        probabilities = ""
        if tokens.logprobs is not None:
            items = [entry(logprob) for logprob in tokens.logprobs]
            probabilities = ',"completion_probabilities":' + json.dumps(items, ensure_ascii=False)
        return (
            f'data: {{"index":{answer.index},"content":{quote(tokens.text)},"tokens":{tokens.tokens},"stop":false,'
            f'"id_slot":-1,"tokens_predicted":{answer.n_tokens},"tokens_evaluated":'
            f"{len(answer.planned.submit.prompt)}{probabilities}}}\n\n"
        ).encode()

    def finish(self, answer: Answer, done: Done) -> bytes:
        """The last object of one answer."""
        return event(final(answer, self._settings, "", []))

    def closing(self, answers: list[Answer]) -> bytes:
        """Nothing."""
        return b""


def slot(seq_id: int, state: SlotState | None, n_ctx: int) -> dict[str, Any]:
    """One entry of /slots; the prompt itself is never shown. What is parked has the id -1 and is not processed."""
    base: dict[str, Any] = {"id": seq_id, "n_ctx": n_ctx, "speculative": False, "is_processing": state is not None}
    if state is None:
        return base
    return base | {
        "is_processing": state.phase != "parked",
        "request": state.request,
        "phase": state.phase,
        "priority": state.priority,
        "n_prompt_tokens": state.n_prompt,
        "n_prompt_tokens_processed": min(state.n_past, state.n_prompt),
        "next_token": [{"has_next_token": True, "n_decoded": state.n_predicted}],
    }


def waiting(item: Waiting, n_ctx: int, client: str) -> dict[str, Any]:
    """One that waits, as an entry behind those of /slots; `client` stands for who asks, the first place is 1."""
    return {
        "id": -1,
        "n_ctx": n_ctx,
        "speculative": False,
        "is_processing": False,
        "request": item.id,
        "phase": "waiting",
        "position": item.position + 1,
        "priority": item.priority,
        "client": client,
        "age_seconds": round(item.seconds, 3),
    }
