"""Fields that this daemon does not offer: refused by name, because ignoring them would change the answer's meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daemon.errors import Unsupported

_GIVEN: Callable[[Any], bool] = bool
_PRESENT: Callable[[Any], bool] = lambda value: value is not None  # noqa: E731


def _not_text(value: Any) -> bool:
    return value is not None and not (isinstance(value, dict) and value.get("type") == "text")


def _asks_for_audio(value: Any) -> bool:
    return isinstance(value, list) and any(kind != "text" for kind in value)


def _positive(value: Any) -> bool:
    return not isinstance(value, int | float) or value > 0


_REFUSED: dict[str, Callable[[Any], bool]] = {
    "response_format": _not_text,
    "modalities": _asks_for_audio,
    "audio": _GIVEN,
    "web_search_options": _PRESENT,
    "grammar": _GIVEN,
    "json_schema": _PRESENT,
    "guided_json": _PRESENT,
    "guided_regex": _GIVEN,
    "guided_choice": _GIVEN,
    "guided_grammar": _GIVEN,
    "structured_outputs": _GIVEN,
    "suffix": _GIVEN,
    "input_prefix": _GIVEN,
    "input_suffix": _GIVEN,
    "input_extra": _GIVEN,
    "lora": _GIVEN,
    "image_data": _GIVEN,
    "multimodal_data": _GIVEN,
    "response_fields": _GIVEN,
    "post_sampling_probs": _GIVEN,
    "n_indent": _positive,
    "t_max_predict_ms": _positive,
    "adaptive_target": _positive,
    "min_tokens": _positive,
    "stop_token_ids": _GIVEN,
    "logits_processors": _GIVEN,
    "use_beam_search": _GIVEN,
}


def refuse_fields(data: dict[str, Any]) -> None:
    """Check a generating body.

    Raises:
        Unsupported: names the field.
    """
    for name, refused in _REFUSED.items():
        if data.get(name) is not None and refused(data[name]):
            raise unsupported(name)


def refuse_tools(data: dict[str, Any]) -> None:
    """Check the tool fields of a chat; empty lists and tool_choice "none" are fine.

    Raises:
        Unsupported: names the field.
    """
    choice = data.get("tool_choice")
    for name, off in (("tools", choice), ("functions", data.get("function_call"))):
        if data.get(name) and off != "none":
            raise unsupported(name)
    if choice not in (None, "none", "auto"):
        raise unsupported("tool_choice")
    if data.get("function_call") not in (None, "none", "auto"):
        raise unsupported("function_call")


def unsupported(name: str) -> Unsupported:
    """The error for one field."""
    return Unsupported(f"{name} is not offered by this server.", param=name)
