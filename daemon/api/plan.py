"""From prompts and fields to the Submits of one request."""

from __future__ import annotations

from dataclasses import dataclass

from daemon.api.sampling import derive_seed
from daemon.api.schema import GenerationFields
from daemon.api.standing import Standing
from daemon.errors import BadRequest, ContextLengthExceeded
from daemon.messages import ModelInfo, Sampling, Submit

MAX_ANSWERS = 64


@dataclass(frozen=True)
class Planned:
    """One answer to come: its Submit, which prompt it continues, and the limit when the client's was lowered."""

    submit: Submit
    prompt_index: int
    clamped: int | None
    text: str
    """The prompt's text, for echo; empty where nobody asks for it."""
    replaces: str
    """As in `Admission.submit`."""


@dataclass(frozen=True)
class Source:
    """One prompt as tokens, with its text where that is shown."""

    tokens: list[int]
    text: str = ""


def plan(
    request_id: str,
    sources: list[Source],
    fields: GenerationFields,
    sampling: Sampling,
    info: ModelInfo,
    standing: Standing,
    *,
    param: str,
    n: int = 1,
    logprobs: int | None = None,
) -> list[Planned]:
    """`n` answers for each prompt, in the order of their index.

    Raises:
        BadRequest: an empty prompt, a token id that does not exist, too many answers.
        ContextLengthExceeded: a prompt that leaves no room.
    """
    if len(sources) * n > MAX_ANSWERS:
        raise BadRequest(f"At most {MAX_ANSWERS} answers can be asked for at once.", param=param)
    planned: list[Planned] = []
    for prompt_index, source in enumerate(sources):
        check_tokens(source.tokens, info.n_vocab, param)
        max_tokens, clamped = fit(len(source.tokens), fields.limit, info.n_ctx, param)
        for _ in range(n):
            index = len(planned)
            submit = Submit(
                id=request_id if index == 0 else f"{request_id}.{index}",
                prompt=source.tokens,
                max_tokens=max_tokens,
                sampling=sampling.model_copy(update={"seed": derive_seed(sampling.seed, index)}),
                stop=fields.stops,
                logprobs=logprobs,
                priority=standing.priority,
                client=standing.client,
            )
            planned.append(Planned(submit, prompt_index, clamped, source.text, standing.replaces))
    return planned


def fit(n_prompt: int, wanted: int | None, n_ctx: int, param: str) -> tuple[int, int | None]:
    """(tokens that the answer may have, that number again if the client asked for more).

    Raises:
        BadRequest: no prompt.
        ContextLengthExceeded: no room for one token.
    """
    if n_prompt == 0:
        raise BadRequest("The prompt is empty.", param=param)
    room = n_ctx - n_prompt
    if room < 1:
        error = ContextLengthExceeded(n_prompt, n_ctx)
        error.param = param
        raise error
    if wanted is None:
        return room, None
    return (wanted, None) if wanted <= room else (room, room)


def check_tokens(tokens: list[int], n_vocab: int, param: str) -> None:
    """Token ids that came from a client.

    Raises:
        BadRequest: one that the vocabulary does not have.
    """
    if tokens and not 0 <= min(tokens) <= max(tokens) < n_vocab:
        raise BadRequest(f"Token ids go from 0 to {n_vocab - 1}.", param=param)
