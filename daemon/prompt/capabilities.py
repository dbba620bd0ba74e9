"""What a chat template can express, found out by rendering small conversations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from daemon.errors import TemplateFailed
from daemon.prompt.conversation import Json

_SYSTEM, _USER, _ANSWER, _KEY, _VALUE = "PROBE-SYSTEM", "PROBE-USER", "PROBE-ANSWER", "probe_key", "PROBE-VALUE"
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "PROBE-TOOL",
        "parameters": {"type": "object", "properties": {"probe_field": {"type": "string", "description": "PROBE"}}},
    },
}
Render = Callable[[dict[str, Any]], str]


@dataclass(frozen=True)
class Capabilities:
    """What the template takes as it is; everything else is brought into a shape that it takes."""

    string_content: bool
    part_content: bool
    system_role: bool
    object_arguments: bool


def probe(render: Render) -> Capabilities:
    """Ask the template; `render` takes the variables and raises `TemplateFailed`."""
    string_content = _USER in _try(render, [_user(_USER)])
    parts = _try(render, [_user([{"type": "text", "text": _USER}])])
    # A template that prints the list itself shows its keys.
    part_content = _USER in parts and "'type'" not in parts and '"type"' not in parts
    user = _user(_USER if string_content or not part_content else [{"type": "text", "text": _USER}])
    with_system = _try(render, [{"role": "system", "content": _like(user, _SYSTEM)}, user])
    return Capabilities(
        string_content=string_content or not part_content,
        part_content=part_content,
        system_role=_SYSTEM in with_system,
        object_arguments=_takes_objects(render, user),
    )


def _takes_objects(render: Render, user: Json) -> bool:
    """Whether arguments come out of a tool call as values, and not as Python prints an object."""
    messages = [
        user,
        {"role": "assistant", "content": _like(user, ""), "tool_calls": [_call({_KEY: _VALUE})]},
        {"role": "tool", "tool_call_id": "call00001", "name": "probe_tool", "content": _like(user, "PROBE-RESULT")},
        {"role": "assistant", "content": _like(user, _ANSWER)},
        user,
    ]
    text = _try(render, messages, [_TOOL])
    return _VALUE in text and f"'{_KEY}'" not in text


def _call(arguments: Any) -> Json:
    return {"id": "call00001", "type": "function", "function": {"name": "probe_tool", "arguments": arguments}}


def _user(content: Any) -> Json:
    return {"role": "user", "content": content}


def _like(message: Json, text: str) -> Any:
    """`text` as content of the same kind as the message's."""
    return text if isinstance(message["content"], str) else [{"type": "text", "text": text}]


def _try(render: Render, messages: list[Json], tools: list[Json] | None = None) -> str:
    try:
        return render({"messages": messages} | ({"tools": tools} if tools else {}))
    except TemplateFailed:
        return ""
