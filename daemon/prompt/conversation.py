"""Messages and tools as clients send them, checked and brought into the one shape that templates get.

Only known fields pass, in a fixed order, because templates print whole objects. Nothing of the client's is changed in
place.
"""

from __future__ import annotations

import json
from typing import Any

from daemon.errors import BadRequest, Unsupported

ROLES = ("system", "developer", "user", "assistant", "tool")
Json = dict[str, Any]


def messages(given: list[Json]) -> list[Json]:
    """Checked copies: `content` is a string or a list of {"type": "text", "text"}; null and missing are "".

    Raises:
        BadRequest: a message that is none, with its place.
        Unsupported: content that is not text.
    """
    if not given:
        raise BadRequest("There must be at least one message.", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def tools(given: list[Json] | None) -> list[Json] | None:
    """Checked copies with name, description and parameters; None when there are none.

    Raises:
        BadRequest: a tool that is no function with a name.
    """
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given or [])] or None


def joined(content: str | list[Json]) -> str:
    """Content as one string; parts are lines."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def parsed_arguments(given: list[Json]) -> list[Json]:
    """Messages whose tool calls carry objects; for templates that look into the arguments.

    Raises:
        BadRequest: arguments that are no JSON object.
    """
    result = []
    for index, message in enumerate(given):
        calls = [
            _with_arguments(call, _object(call["function"]["arguments"], f"messages[{index}].tool_calls[{number}]"))
            for number, call in enumerate(message.get("tool_calls", ()))
        ]
        result.append(message | {"tool_calls": calls} if calls else message)
    return result


def _message(message: Json, place: str) -> Json:
    role = message.get("role")
    if role not in ROLES:
        raise BadRequest(f"{place}.role must be one of {', '.join(ROLES)}.", param=f"{place}.role")
    result: Json = {"role": role, "content": _content(message.get("content"), f"{place}.content")}
    reasoning = _text(message, "reasoning_content", place) or _text(message, "reasoning", place)
    if reasoning:
        result["reasoning_content"] = reasoning
    for key in ("name", "tool_call_id"):
        if text := _text(message, key, place):
            result[key] = text
    calls = message.get("tool_calls")
    if calls:
        result["tool_calls"] = [
            _call(call, f"{place}.tool_calls[{n}]") for n, call in enumerate(_list(calls, f"{place}.tool_calls"))
        ]
    return result


def _content(content: object, place: str) -> str | list[Json]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = [_part(part, f"{place}[{n}]") for n, part in enumerate(_list(content, place))]
    return parts or ""


def _part(part: Any, place: str) -> Json:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise Unsupported(f"{place}: only parts of type text are offered.", param=place)
    if not isinstance(part.get("text"), str):
        raise BadRequest(f"{place}.text must be a string.", param=place)
    return {"type": "text", "text": part["text"]}


def _call(call: Any, place: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise BadRequest(f"{place} must be a call of a function.", param=place)
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(function.get("name"), str) or not isinstance(arguments, str):
        raise BadRequest(f"{place}.function needs a name and arguments.", param=place)
    result: Json = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if identity := _text(call, "id", place):
        result["id"] = identity
    return result


def _tool(tool: Any, place: str) -> Json:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise BadRequest(f"{place} must be a function.", param=place)
    parameters = function.get("parameters")
    if not isinstance(function.get("name"), str) or not isinstance(parameters, dict | None):
        raise BadRequest(f"{place}.function needs a name, and parameters that are an object.", param=place)
    description = _text(function, "description", place) or ""
    shape = {"name": function["name"], "description": description, "parameters": parameters or {}}
    return {"type": "function", "function": shape}


def _with_arguments(call: Json, arguments: Json) -> Json:
    return call | {"function": call["function"] | {"arguments": arguments}}


def _object(arguments: str, place: str) -> Json:
    try:
        value = json.loads(arguments or "{}", parse_constant=_no_number)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadRequest(f"{place}.function.arguments is no JSON object.", param=place)
    return value


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _text(of: Json, key: str, place: str) -> str | None:
    value = of.get(key)
    if not isinstance(value, str | None):
        raise BadRequest(f"{place}.{key} must be a string.", param=f"{place}.{key}")
    return value


def _list(value: object, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadRequest(f"{place} must be a list.", param=place)
    return value
