"""The parts of a split model: finds them beside the first one, and makes sure that they belong together."""

from __future__ import annotations

import re
from pathlib import Path

from daemon.errors import ModelUnusable
from daemon.native.gguf_cursor import printable
from daemon.native.gguf_reader import Head, Value, read_head
from daemon.native.gguf_types import INT32, UINT16, VALUE_NAMES

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def read_parts(path: Path) -> tuple[Head, ...]:
    """The heads of all parts of the model whose first part is `path`; one head for a model that is not split.

    Raises:
        ModelUnusable: a part is missing, unusable, or of another model; or `path` is not the first.
    """
    first = read_head(path)
    count = _number(first, "split.count", UINT16)
    if count is None or count <= 1:
        return (first,)
    names = _names(first, count)
    heads = [first, *(_read_part(path.parent / name, index, count) for index, name in enumerate(names[1:], 1))]
    _check_together(heads)
    return tuple(heads)


def _names(first: Head, count: int) -> list[str]:
    """The files' names, from the name of the first."""
    number = _number(first, "split.no", UINT16)
    match = _NAME.fullmatch(first.path.name)
    if number is None:
        raise first.fail(f"the file is one of {count} parts and does not say which: split.no is missing")
    if match is None or int(match["number"]) != number + 1 or int(match["count"]) != count:
        wanted = f"NAME-{number + 1:05d}-of-{count:05d}.gguf"
        raise first.fail(f"the file is part {number + 1} of {count} and must be called {wanted}")
    names = [f"{match['stem']}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1)]
    if number:
        raise first.fail(f"this is part {number + 1} of {count}; name the first one, {printable(names[0])}")
    return names


def _read_part(path: Path, index: int, count: int) -> Head:
    if not path.exists():
        raise ModelUnusable(f"part {index + 1} of {count} is missing: {printable(path.name)}")
    head = read_head(path)
    number, claimed = _number(head, "split.no", UINT16), _number(head, "split.count", UINT16)
    if number is None:
        raise head.fail("the file is called a part of a model and does not say which: split.no is missing")
    if number != index or claimed not in (None, count):
        where = f"part {number + 1} of {'?' if claimed is None else claimed}"
        raise head.fail(f"the file says that it is {where}, not {index + 1} of {count}")
    return head


def _check_together(heads: list[Head]) -> None:
    first = heads[0]
    seen: dict[str, Head] = {}
    for head in heads:
        _check_architecture(first, head)
        for tensor in head.tensors:
            if tensor.name in seen:
                raise head.fail(f"tensor {tensor.name} is in {seen[tensor.name].label} too: the parts do not fit")
            seen[tensor.name] = head
    total = _number(first, "split.tensors.count", INT32)
    if total is None:
        raise first.fail("split.tensors.count is missing")
    if total != len(seen):
        raise first.fail(f"the parts have {len(seen)} tensors together, the first says {total}: they do not fit")


def _check_architecture(first: Head, head: Head) -> None:
    """A part may leave the architecture out; one that names another is foreign."""
    mine, theirs = (h.metadata.get("general.architecture") for h in (first, head))
    if mine is not None and theirs is not None and mine.raw != theirs.raw:
        raise head.fail(f"the part is of another model: {_shown(theirs)}, and {first.label} is {_shown(mine)}")


def _shown(value: Value) -> str:
    return printable(value.raw[8:])


def _number(head: Head, key: str, kind: int) -> int | None:
    """A number of exactly the type that llama.cpp asserts."""
    value = head.metadata.get(key)
    if value is None:
        return None
    if value.n is not None or value.kind != kind:
        raise head.fail(f"{key} must be {VALUE_NAMES[kind]}, not {value.type_name}")
    return int(value.scalar())
