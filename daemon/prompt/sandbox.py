"""The jinja2 environment of chat templates: what model authors rely on, and nothing that reaches further."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, Template, TemplateSyntaxError, Undefined, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from daemon.errors import TemplateFailed

_BEYOND_ASCII = re.compile(r"[^\x00-\x7f\ufdd0-\ufdef\U00100000-\U0010ffff]")
"""What is escaped in ASCII; not the characters of `daemon.prompt.marks`, which must be found again."""

Clock = Callable[[], datetime.datetime]
"""Local wall-clock time, which is what templates print."""


class Refused(Exception):
    """The template called `raise_exception`."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Immutable, but a list may grow and shrink.

    Templates of the Kimi family queue tool calls in a list. Everything that a rendering sees was copied for it, so
    a change reaches nothing else.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) is list and attr in {"append", "pop"}:
            return True
        return super().is_safe_attribute(obj, attr, value)


class _Missing(Undefined):
    """An undefined value that adds nothing to a text; every other use of it still fails."""

    def __add__(self, other: Any) -> Any:
        return other if isinstance(other, str) else self._fail_with_undefined_error()

    __radd__ = __add__


class _Generation(Extension):
    """`{% generation %}` marks what a trainer learns from; here its body is text like any other."""

    tags = {"generation"}  # noqa: RUF012 - the base class has it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment(clock: Clock) -> Environment:
    """An environment with the filters and functions that transformers and llama.cpp offer to templates."""
    made = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        undefined=_Missing,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    # Nothing is escaped, so nothing is marked as safe: marked text would escape what is added to it.
    made.filters["safe"] = str
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda format: clock().strftime(format)
    return made


@dataclass(frozen=True)
class Program:
    """A compiled template, every text that is written in its source, and what it replaces: (old, new)."""

    template: Template
    literals: frozenset[str]
    rewrites: tuple[tuple[str, str], ...]


def compiled(source: str, clock: Clock) -> Program:
    """Compile `source`.

    Raises:
        TemplateFailed: it is no template.
    """
    made = environment(clock)
    try:
        tree = made.parse(source)
        literals = frozenset(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
        return Program(made.from_string(source), literals, tuple(dict.fromkeys(_rewrites(tree))))
    except TemplateSyntaxError as error:
        raise TemplateFailed(f"The chat template has a syntax error in line {error.lineno}.") from None
    except RecursionError:
        raise TemplateFailed("The chat template is nested too deeply.") from None


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON with the text left as it is: no HTML escapes, no \\u escapes unless asked for."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys, default=_no_json
    )
    return _BEYOND_ASCII.sub(lambda match: json.dumps(match.group())[1:-1], text) if ensure_ascii else text


def _rewrites(tree: nodes.Template) -> Iterator[tuple[str, str]]:
    """What `replace` is called with as a method or a filter; what is split at can be joined without it."""
    calls = [(getattr(call.node, "attr", ""), call.args) for call in tree.find_all(nodes.Call)]
    calls += [(filtered.name, filtered.args) for filtered in tree.find_all(nodes.Filter)]
    for name, arguments in calls:
        texts = [item.value for item in arguments if isinstance(item, nodes.Const) and isinstance(item.value, str)]
        if name == "replace" and len(texts) >= 2 and texts[0]:
            yield texts[0], texts[1]
        elif name == "split" and texts and texts[0]:
            yield texts[0], ""


def _no_json(value: Any) -> list[Any] | None:
    if isinstance(value, Undefined):
        return None
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _raise(message: str) -> None:
    raise Refused(str(message))
