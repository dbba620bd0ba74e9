"""Request bodies as typed models: every number is bounded, unknown fields are ignored, null means not given."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from daemon.errors import BadRequest

MAX_N = 4
MAX_STOPS = 16
MAX_BREAKERS = 16
"""llama.cpp compares each of them with the whole vocabulary, on the thread that decodes."""
MAX_TOP = 20
MAX_TOKENS = 2**31 - 1
MAX_BIASES = 4096
MAX_KWARGS = 32
ItemT = TypeVar("ItemT")
Many = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list that is read up to its first fault: each fault costs microseconds and a kilobyte, and a body has room for
millions."""
ServiceTier = Literal["auto", "default", "flex", "priority", "scale"]
LogitBias = dict[str, float] | Many[Many[int | float | str | bool]]
Tokens = Many[int]


class Body(BaseModel):
    """Base of every body. Values are not coerced, but a whole number may be written as 5.0."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _tidy(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        whole = {name for name, info in cls.model_fields.items() if info.annotation in (int, int | None)}
        return {
            name: int(value) if name in whole and isinstance(value, float) and value.is_integer() else value
            for name, value in data.items()
            if value is not None
        }


BodyT = TypeVar("BodyT", bound=Body)


class SamplingFields(Body):
    """Samplers under llama.cpp's names; what is not given comes from [sampling] of the configuration."""

    temperature: float | None = Field(None, ge=-1, le=100, description="0 or less always takes the likeliest token.")
    dynatemp_range: float | None = Field(None, ge=0, le=100)
    dynatemp_exponent: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=-1, le=1_000_000, description="0 or -1 keeps all.")
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    top_n_sigma: float | None = Field(None, ge=-1, le=1000)
    typical_p: float | None = Field(None, gt=0, le=1)
    xtc_probability: float | None = Field(None, ge=0, le=1)
    xtc_threshold: float | None = Field(None, ge=0, le=1)
    repeat_last_n: int | None = Field(None, ge=-1, le=1_000_000)
    repeat_penalty: float | None = Field(None, gt=0, le=10)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    dry_multiplier: float | None = Field(None, ge=0, le=100)
    dry_base: float | None = Field(None, ge=1, le=100)
    dry_allowed_length: int | None = Field(None, ge=0, le=1_000_000)
    dry_penalty_last_n: int | None = Field(None, ge=-1, le=1_000_000)
    dry_sequence_breakers: Many[str] | None = Field(None, max_length=MAX_BREAKERS)
    mirostat: int | None = Field(None, ge=0, le=2)
    mirostat_tau: float | None = Field(None, ge=0, le=100)
    mirostat_eta: float | None = Field(None, ge=0, le=1)
    min_keep: int | None = Field(None, ge=0, le=1_000_000)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1, description="Negative: a random one.")
    ignore_eos: bool | None = None
    logit_bias: LogitBias | None = Field(
        None,
        description='{"token id": bias} or [[id or text, bias or false]]; -100 or false: never.',
    )

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_biases(cls, bias: Any) -> Any:
        return _at_most(MAX_BIASES, "tokens can have a bias", bias)

    @field_validator("dry_sequence_breakers")
    @classmethod
    def _short_breakers(cls, breakers: list[str] | None) -> list[str] | None:
        if any(not 0 < len(breaker) <= 64 for breaker in breakers or []):
            raise ValueError("each sequence breaker needs 1 to 64 characters")
        return breakers


class GenerationFields(SamplingFields):
    """What every generating endpoint shares."""

    model: str | None = Field(None, max_length=512)
    stream: bool = False
    service_tier: ServiceTier | None = Field(None, description="flex: background, priority: interactive.")
    prompt_cache_key: str | None = Field(None, max_length=1024)
    stop: str | Many[str] | None = Field(None, description=f"At most {MAX_STOPS}, none of them empty.")
    max_tokens: int | None = Field(None, ge=-1, le=MAX_TOKENS, description="-1: all that fits.")
    max_completion_tokens: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    n_predict: int | None = Field(None, ge=-1, le=MAX_TOKENS)

    @field_validator("stop")
    @classmethod
    def _usable_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings")
        if any(not 0 < len(text) <= 1024 for text in stops):
            raise ValueError("each stop string needs 1 to 1024 characters")
        return stop

    @field_validator("max_tokens", "max_completion_tokens", "n_predict")
    @classmethod
    def _not_zero(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("0 tokens would be no answer; give -1 for all that fits")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def limit(self) -> int | None:
        """The smallest token limit that was given; None: all that fits."""
        given = (self.max_tokens, self.max_completion_tokens, self.n_predict)
        return min((value for value in given if value is not None and value > 0), default=None)


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool = False


class ContentPart(Body):
    """One part of a message; only text is offered."""

    type: str
    text: str | None = None


class FunctionCall(Body):
    """The call inside a tool call of the history."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Body):
    """A tool call of the history."""

    id: str | None = None
    type: str = "function"
    function: FunctionCall


class ChatMessage(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[ContentPart] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatFields(Body):
    """What becomes a prompt through the chat template."""

    messages: Many[ChatMessage] = Field(min_length=1)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = Field(None, max_length=MAX_KWARGS)
    reasoning_effort: str | None = Field(None, max_length=32)
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _few_kwargs(cls, kwargs: Any) -> Any:
        return _at_most(MAX_KWARGS, "template arguments", kwargs)


class ChatRequest(GenerationFields, ChatFields):
    """POST /v1/chat/completions."""

    n: int = Field(1, ge=1, le=MAX_N)
    stream_options: StreamOptions = StreamOptions()
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: str | Many[str] | Tokens | Many[Tokens]
    n: int = Field(1, ge=1, le=MAX_N)
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    echo: bool = False
    suffix: str | None = None
    stream_options: StreamOptions = StreamOptions()
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)


class PromptObject(Body):
    """A prompt of /completion written as an object."""

    prompt_string: str
    multimodal_data: Any = None


NativePrompt = str | PromptObject | Many[int | str]


class NativeRequest(GenerationFields):
    """POST /completion, llama-server's shape."""

    prompt: NativePrompt | Many[NativePrompt]
    n_probs: int = Field(0, ge=0, le=100)
    return_tokens: bool = False


class TokenizeRequest(Body):
    """POST /tokenize."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: Tokens


def validate(model: type[BodyT], data: dict[str, Any]) -> BodyT:
    """The typed body.

    Raises:
        BadRequest: names the first field at fault, as deep as it is known; never quotes what the client sent.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
    first = max((fault for fault in faults if fault["loc"][:1] == faults[0]["loc"][:1]), key=_depth)
    path = _path(first["loc"])
    what = str(first["msg"]).removeprefix("Value error, ")
    raise BadRequest(f"{path}: {what}" if path else what, param=path or None)


def _at_most(limit: int, what: str, given: Any) -> Any:
    """Before each value is looked at: objects are read to their end, however many faults they have."""
    if isinstance(given, dict | list) and len(given) > limit:
        raise ValueError(f"at most {limit} {what}")
    return given


def unknown_names(model: type[Body], data: dict[str, Any]) -> set[str]:
    """Top-level names that the model does not have."""
    return data.keys() - model.model_fields.keys()


def _depth(fault: ErrorDetails) -> int:
    return _path(fault["loc"]).count("[") + _path(fault["loc"]).count(".")


def _path(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content`; names of union branches, which pydantic adds, are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _BRANCHES:
            path += f".{part}" if path else part
    return path


_BRANCHES = frozenset({"str", "int", "float", "bool", "dict", "list", "ContentPart", "PromptObject"})
