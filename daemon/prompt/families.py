"""What the templates of some model families need beyond the common shape of messages.

A template cannot say what it expects, so each rule looks for a text in the template's source that only that family has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from daemon.prompt.conversation import Json


def adapt(source: str, given: list[Json]) -> list[Json]:
    """The messages as the template at hand wants them."""
    messages = given
    if "reasoning_content" not in source and ("message.thinking" in source or '"thinking" in message' in source):
        messages = [_thinking(message, drop_content="<|channel|>" in source) for message in messages]
    if _is_ministral(source):
        messages = [_blocks(message) for message in messages]
    if "following functions in JSONSchema format" in source:
        # StepFun: white space that is left around the contents drives the model into loops.
        messages = [_trimmed(message) for message in messages]
    if "'<|tool_call>call:'" in source and "tool_responses" in source and "OpenAI Chat Completions" not in source:
        messages = list(_gemma_turns(messages))
    return messages


def close(source: str, text: str, opening: str) -> str:
    """`text`, with the assistant's turn opened where a Gemma 4 template forgets to after a tool call."""
    if "'<|tool_call>call:'" in source and text.endswith("<turn|>\n"):
        return text + opening
    return text


GEMMA_OPENING = "<|turn>model\n"


def _thinking(message: Json, drop_content: bool) -> Json:
    """Reasoning under the name that these templates read; gpt-oss takes no content beside it in a tool call."""
    if "reasoning_content" not in message:
        return message
    copy = message | {"thinking": message["reasoning_content"]}
    if drop_content and "tool_calls" in copy:
        del copy["content"]
    return copy


def _is_ministral(source: str) -> bool:
    return all(mark in source for mark in ("[SYSTEM_PROMPT]", "[TOOL_CALLS]", "[ARGS]")) and "[CALL_ID]" not in source


def _blocks(message: Json) -> Json:
    """System and assistant content as a list, reasoning being one of its parts."""
    if message["role"] not in {"system", "assistant"}:
        return message
    copy = dict(message)
    reasoning = copy.pop("reasoning_content", "")
    content = copy["content"]
    blocks: list[Json] = [{"type": "thinking", "thinking": reasoning}] if reasoning else []
    copy["content"] = blocks + ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    return copy


def _trimmed(message: Json) -> Json:
    copy = dict(message)
    if isinstance(copy["content"], str):
        copy["content"] = copy["content"].strip()
    else:
        copy["content"] = [part | {"text": part["text"].strip()} for part in copy["content"]]
    if "reasoning_content" in copy:
        copy["reasoning_content"] = copy["reasoning_content"].strip()
    return copy


def _gemma_turns(messages: list[Json]) -> Iterator[Json]:
    """A call, its results and the answer as one turn, which is how older Gemma 4 templates know tool results."""
    rest = list(reversed(messages))
    while rest:
        message = rest.pop()
        if message["role"] != "assistant" or "tool_calls" not in message:
            yield message
            continue
        turn = {"role": "assistant", "tool_calls": message["tool_calls"]}
        responses: list[Json] = []
        while rest and rest[-1]["role"] == "tool":
            responses.append(_gemma_response(rest.pop(), message["tool_calls"], len(responses)))
        if responses:
            turn["tool_responses"] = responses
        if rest and rest[-1]["role"] == "assistant" and "tool_calls" not in rest[-1] and rest[-1]["content"]:
            turn["content"] = rest.pop()["content"]
        if "reasoning_content" in message:
            turn["reasoning_content"] = message["reasoning_content"]
        yield turn


def _gemma_response(message: Json, calls: list[Json], number: int) -> Json:
    name = calls[number]["function"]["name"] if number < len(calls) else message.get("tool_call_id", "")
    return {"name": name, "response": _value(message["content"])}


def _value(content: Any) -> Any:
    """A tool's result as the value that it spells, or as the text that it is."""
    if not isinstance(content, str):
        return content
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content
