"""Characters that mark a place in text which clients wrote: ones that occur nowhere in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from daemon.errors import BadRequest


def strings(value: Any) -> Iterator[str]:
    """Every string inside a JSON value, the keys of objects included."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            rest.extend(item.keys())
            rest.extend(item.values())
        elif isinstance(item, list | tuple):
            rest.extend(item)


def unused(texts: Iterable[str]) -> Iterator[str]:
    """Characters without meaning that occur in none of `texts`: noncharacters first, then private use.

    None of them is white space, changes with case, or is escaped by JSON.

    Raises:
        BadRequest: all of them occur.
    """
    taken: set[str] = set()
    for text in texts:
        taken.update(character for character in set(text) if character >= "\ufdd0")
    noncharacters = range(0xFDD0, 0xFDF0)
    private_use = range(0x100000, 0x10FFFE)
    for code in itertools.chain(noncharacters, private_use):
        if chr(code) not in taken:
            yield chr(code)
    raise BadRequest("The messages use every private character of Unicode; none is left to mark places with.")
