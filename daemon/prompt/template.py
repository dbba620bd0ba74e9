"""A chat template: messages in, the prompt's text out. Pure but for the clock that it is given.

The texts are those of llama.cpp's server wherever that is sensible; `tests/vectors` holds what it says for every
template and names each difference with its reason.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Iterable
from typing import Protocol

from pydantic import Field

from daemon.errors import BadRequest, TemplateFailed
from daemon.messages import Message
from daemon.prompt import conversation, families, marks
from daemon.prompt.capabilities import Capabilities, probe
from daemon.prompt.conversation import Json
from daemon.prompt.sandbox import Clock, Refused, compiled

MAX_CHARACTERS = 32 * 1024 * 1024
"""Longest prompt that a template may write."""

_THINKS = re.compile(r"<[|/]?think|think[|]?>|THINK|:think|think_begin|channel")
"""Where thoughts have a place in a template; one without is not asked to make the model think."""

KEEP_REASONING = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}
"""Templates that can drop the reasoning of earlier answers are told not to, as llama.cpp does: what a client sends back
is shown, and a growing conversation keeps a common beginning."""

Scalar = str | int | float | bool | None

TEMPLATE_KWARGS = frozenset(
    {
        "clear_thinking",
        "date_string",
        "drop_thinking",
        "enable_thinking",
        "keep_past_thinking",
        "model_identity",
        "preserve_thinking",
        "reasoning_effort",
        "skip_thinking",
        "thinking",
        "thinking_budget",
        "thinking_effort",
        "thinking_mode",
        "thinking_option",
        "truncate_history_thinking",
    }
)
"""Names that `chat_template_kwargs` may have; the API refuses others. None replaces what the daemon itself passes."""


class ChatPrompt(Message):
    """What a chat needs to become tokens; messages and tools are as the client sent them, not yet checked.

    `continue_final_message` lets the model go on with the last message, an assistant's: the prompt ends exactly with
    that message's content (its reasoning, where it has no content), and whatever the template writes behind it, such
    as the end of the turn, is cut off. `add_generation_prompt` is then without effect.
    """

    messages: list[Json]
    tools: list[Json] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Scalar] = Field(default={})


class Protector(Protocol):
    """Marks what a client's text must not become; see `daemon.prompt.tokens`."""

    def protect(self, variables: Json, mark: str, rewrites: tuple[tuple[str, str], ...]) -> Json:
        """Copies of the variables with `mark` put into their strings; `rewrites` is what the template replaces."""
        ...


class Template:
    """A compiled chat template.

    Args:
        source: the template's text.
        bos_token, eos_token: the texts of these tokens, "" where there are none.
        add_bos, add_eos: whether the tokenizer adds them, so that the template's own are cut off.
        clock: local time.

    Raises:
        TemplateFailed: the source is no template.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        add_bos: bool = False,
        add_eos: bool = False,
        clock: Clock = datetime.datetime.now,
    ) -> None:
        self._source = source
        self._bos, self._eos = bos_token, eos_token
        self._add_bos, self._add_eos = add_bos, add_eos
        self._clock = clock
        self._program = compiled(source, clock)

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        """What the template takes."""
        return probe(lambda variables: self._execute(self._defaults() | {"add_generation_prompt": True} | variables))

    def render(self, chat: ChatPrompt) -> str:
        """The prompt's text.

        Raises:
            BadRequest: messages or tools that are malformed.
            TemplateFailed: the template refused them, failed, or wrote too much.
        """
        return self.render_marked(chat, None)[0]

    def render_marked(self, chat: ChatPrompt, protector: Protector | None) -> tuple[str, str]:
        """The prompt's text, which may hold the mark that the protector was given, and that mark.

        Raises:
            as `render`.
        """
        variables = self._variables(chat)
        end, mark = _two(marks.unused(marks.strings([variables, self._source])))
        if chat.continue_final_message:
            variables["messages"][-1] = _with_end(variables["messages"][-1], end)
        variables["messages"] = self._shaped(variables["messages"])
        if protector is not None:
            variables = protector.protect(variables, mark, self._program.rewrites)
        text = self._execute(self._defaults() | variables)
        if chat.continue_final_message:
            text = _cut(text, end)
        elif chat.add_generation_prompt:
            text = families.close(self._source, text, families.GEMMA_OPENING)
        return self._without_own_ends(text), mark

    def _variables(self, chat: ChatPrompt) -> Json:
        """What the client decides, checked."""
        messages = conversation.messages(chat.messages)
        if chat.continue_final_message and (messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]):
            raise BadRequest(
                "continue_final_message needs a last message of the assistant without tool calls.",
                param="continue_final_message",
            )
        variables: Json = dict(chat.template_kwargs)
        if isinstance(effort := variables.get("reasoning_effort"), str):
            variables.setdefault("reasoning_strength", effort)
        variables["messages"] = messages
        if tools := conversation.tools(chat.tools):
            variables["tools"] = tools
        if chat.add_generation_prompt and not chat.continue_final_message:
            variables["add_generation_prompt"] = True
        return variables

    def _defaults(self) -> Json:
        """What the daemon decides. Dates are in the two formats that llama.cpp offers."""
        now = self._clock()
        return {
            "bos_token": self._bos,
            "eos_token": self._eos,
            "enable_thinking": bool(_THINKS.search(self._source)),
            **KEEP_REASONING,
            "date_string": now.strftime("%d %b %Y"),
            "datetime": now.strftime("%b %d %Y"),
        }

    def _shaped(self, messages: list[Json]) -> list[Json]:
        """The messages in a shape that this template takes."""
        can = self.capabilities
        if not can.part_content:
            messages = [message | {"content": conversation.joined(message["content"])} for message in messages]
        elif not can.string_content:
            messages = [message | {"content": _parts(message["content"])} for message in messages]
        if "<|channel|>" not in self._source:
            # Of the templates that mention developers only gpt-oss means by it what clients do.
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        if not can.system_role:
            messages = _without_system(messages)
        if can.object_arguments:
            messages = conversation.parsed_arguments(messages)
        return families.adapt(self._source, messages)

    def _execute(self, variables: Json) -> str:
        try:
            return _limited(self._program.template.generate(variables))
        except TemplateFailed:
            raise
        except Refused as error:
            raise TemplateFailed(self._refusal(str(error))) from None
        except MemoryError:
            raise TemplateFailed("The chat template took more memory than text.memory_mib allows.") from None
        except Exception as error:  # noqa: BLE001 - a template can fail with anything that Python raises
            raise TemplateFailed(f"The chat template failed with {type(error).__name__}.") from None

    def _refusal(self, message: str) -> str:
        """What the template says, as far as it is written in the template: the rest may be the client's text."""
        known = max((text for text in self._program.literals if text and message.startswith(text)), key=len, default="")
        if len(known) < 4:
            return "The chat template refused the messages."
        return f"The chat template refused the messages: {known.strip()[:300]}"

    def _without_own_ends(self, text: str) -> str:
        if self._add_bos and self._bos:
            text = text.removeprefix(self._bos)
        if self._add_eos and self._eos:
            text = text.removesuffix(self._eos)
        return text


def _limited(pieces: Iterable[str]) -> str:
    length = 0
    kept = []
    for piece in pieces:
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise TemplateFailed(f"The chat template wrote more than {MAX_CHARACTERS} characters.")
        kept.append(piece)
    return "".join(kept)


def _two(characters: Iterable[str]) -> tuple[str, str]:
    each = iter(characters)
    return next(each), next(each)


def _with_end(message: Json, end: str) -> Json:
    """The message with `end` behind what is to be continued."""
    content = message["content"]
    if not content and "reasoning_content" in message:
        return message | {"reasoning_content": message["reasoning_content"] + end}
    if isinstance(content, str):
        return message | {"content": content + end}
    return message | {"content": [*content[:-1], content[-1] | {"text": content[-1]["text"] + end}]}


def _cut(text: str, end: str) -> str:
    """The text before the last `end`.

    Raises:
        TemplateFailed: the template left out what was to be continued.
    """
    kept, found, _ = text.rpartition(end)
    if not found:
        raise TemplateFailed("The chat template leaves out the last message, so it cannot be continued.")
    return kept.replace(end, "")


def _parts(content: str | list[Json]) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _without_system(messages: list[Json]) -> list[Json]:
    """System texts at the head of the user's message that follows, or as one where none does."""
    result: list[Json] = []
    texts: list[str] = []
    for message in messages:
        if message["role"] == "system":
            texts.append(conversation.joined(message["content"]))
        elif texts and message["role"] == "user":
            text = "\n".join([*texts, conversation.joined(message["content"])])
            result.append(message | {"content": text if isinstance(message["content"], str) else _parts(text)})
            texts = []
        else:
            result.append(message)
    return [*result, {"role": "user", "content": "\n".join(texts)}] if texts else result
