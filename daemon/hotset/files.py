"""Files of ours: they are written whole, and whoever reads one lists everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from daemon.errors import HotsetError

_SHOWN = 20
_LENGTH = 200


class FaultyFile(HotsetError):
    """The file cannot be used; `faults` lists everything that is wrong."""

    code = "faulty_file"

    def __init__(self, file: str, faults: list[str]) -> None:
        faults = [_plain(fault) for fault in faults]
        shown = faults[:_SHOWN]
        more = [f"and {len(faults) - len(shown)} more"] if len(faults) > len(shown) else []
        super().__init__(f"{file} cannot be used: {'; '.join([*shown, *more])}")
        self.faults = faults


class Part(BaseModel):
    """Base of all parts of a file: no unknown fields, nothing coerced, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelId(Part):
    """The model whose routing was looked at; only the fingerprint decides whether a file fits."""

    fingerprint: str = Field(pattern=r"^[0-9a-f]{64}$")
    name: str = ""
    architecture: str = ""


def reasons(error: ValidationError) -> Iterator[str]:
    """What pydantic found, one fault a line."""
    for item in error.errors():
        place = ".".join(map(str, item["loc"]))
        text = "there is no such field" if item["type"] == "extra_forbidden" else item["msg"]
        for line in text.removeprefix("Value error, ").splitlines():
            yield f"{place}: {line}" if place else line


def _plain(fault: str) -> str:
    """Names in a file may be long and hold anything, what terminals obey too."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in fault)
    return printable if len(printable) <= _LENGTH else f"{printable[:_LENGTH]}..."


def read(path: Path, most: int, unusable: type[FaultyFile]) -> bytes:
    """All of a file that has at most so many bytes.

    Raises:
        FaultyFile: of the type `unusable`; it cannot be read, is larger, or is something that might never end.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise unusable(path.name, ["it is no regular file"])
        if path.stat().st_size > most:
            raise unusable(path.name, [f"it has more than {most >> 20} MiB"])
        return path.read_bytes()
    except OSError as error:
        raise unusable(path.name, [f"it cannot be read: {error.strerror}"]) from None


def obstacle(path: Path) -> str | None:
    """Why no file can be put there, as far as it shows before there is something to write."""
    if not path.absolute().parent.is_dir():
        return f"{path.parent} is no directory"
    if path.exists() and not path.is_file():
        return "what is there is no file"
    return None


def replace(path: Path, content: bytes) -> None:
    """Write the file, all of it or nothing; one that is there is replaced.

    Raises:
        OSError: it cannot be written; what was there is there still.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except BaseException:  # Ctrl-C too
        with suppress(OSError):
            temporary.unlink()
        raise
