"""Who asks and how urgent it is: the class of a request, from what it says and from what it looks like."""

from __future__ import annotations

import re
from dataclasses import dataclass

from aiohttp import web

from daemon.api.schema import ChatRequest, GenerationFields, ServiceTier
from daemon.errors import BadRequest
from daemon.fair_queue import CLASSES
from daemon.messages import Priority

HEADER = "X-Hotset-Priority"
TIERS: dict[ServiceTier, Priority | None] = {
    "auto": None,
    "default": "normal",
    "scale": "normal",
    "flex": "background",
    "priority": "interactive",
}
"""`service_tier` as a class; "auto" leaves it to what else there is."""
AUTOCOMPLETE_TOKENS = 256
"""A completion with a `prompt_cache_key` that asks for no more is taken for what an editor asks while one types."""
_LOOKED_AT = 400
_SIDE_CALL = re.compile(
    r"\s*(?:### Task:\s*)?(?:Generate|Provide|Suggest)\b[^\n]{0,80}\b(?:title|tags|follow-up)\b[^\n]{0,120}"
    r"\b(?:conversation|chat)\b"
)
"""How Open WebUI, LibreChat and Zed begin their requests for titles, tags and follow-up questions."""


@dataclass(frozen=True)
class Standing:
    """What `daemon.messages.Submit` says of who asks; `replaces` as in `Admission.submit`."""

    client: str
    priority: Priority
    replaces: str = ""


def decide(client: str, wanted: Priority | None, ceiling: Priority | None, replaces: str = "") -> Standing:
    """The class of the key is a ceiling, and what counts where nothing else is known."""
    priority = wanted or ceiling or "normal"
    return Standing(client, priority if ceiling is None else max(priority, ceiling, key=CLASSES.index), replaces)


def wanted_by_chat(request: web.Request, body: ChatRequest, alias: Priority | None) -> Priority | None:
    """The class that it asks for or looks like; `alias` is the one that the model's name ended with.

    Raises:
        BadRequest: the header names no class.
    """
    return _stated(request, body, alias) or ("background" if is_side_call(body) else None)


def wanted_by_completion(
    request: web.Request, body: GenerationFields, alias: Priority | None, *, single: bool
) -> tuple[Priority | None, str]:
    """The same, and the key under which the newest one counts alone. `single`: it asks for one answer.

    One that looks like autocompletion is interactive and has such a key, unless it is said to be anything else.

    Raises:
        BadRequest: the header names no class.
    """
    stated = _stated(request, body, alias)
    short = body.limit is not None and body.limit <= AUTOCOMPLETE_TOKENS
    if single and short and body.prompt_cache_key and stated in (None, "interactive"):
        return "interactive", body.prompt_cache_key
    return stated, ""


def is_side_call(body: ChatRequest) -> bool:
    """Whether a front end asks this on its own behalf: a title, tags or follow-up questions for a chat."""
    last = body.messages[-1]
    if last.role != "user":
        return False
    text = last.content if isinstance(last.content, str) else "".join(part.text or "" for part in last.content or [])
    return _SIDE_CALL.match(text[:_LOOKED_AT]) is not None


def _stated(request: web.Request, body: GenerationFields, alias: Priority | None) -> Priority | None:
    """What the request says of itself, the strongest word of it."""
    header = _header(request)
    tier = TIERS[body.service_tier] if body.service_tier is not None else None
    return tier or header or alias


def _header(request: web.Request) -> Priority | None:
    given = request.headers.getall(HEADER, [])
    if not given:
        return None
    for priority in CLASSES:
        if all(value.strip().lower() == priority for value in given):
            return priority
    raise BadRequest(f"{HEADER} must be one of {', '.join(CLASSES)}, and say one thing.", param=HEADER)
