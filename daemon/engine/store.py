"""What was found out once and is kept in the cache: one small file for each combination that it holds for."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from daemon.hotset.files import Part

_MOST_BYTES = 64 * 1024


class Key(Part):
    """What something holds for; any other value of any of it asks for another look."""

    build: str
    driver: str
    device: str
    model: str
    settings: str


class Record(Part):
    """Base of what is kept."""

    key: Key


R = TypeVar("R", bound=Record)


class Store(Generic[R]):
    """The directory of one kind. Nothing here is trusted: what is not exactly a record of the key counts as none."""

    def __init__(self, directory: Path, kind: type[R]) -> None:
        self._directory, self._kind = directory, kind

    def find(self, key: Key) -> R | None:
        """The record for `key`, None when there is none or the file is damaged."""
        try:
            handle = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(handle, "rb") as file:
                data = file.read(_MOST_BYTES + 1)
            record = self._kind.model_validate_json(data) if len(data) <= _MOST_BYTES else None
        except (OSError, ValidationError):
            return None
        return record if record is not None and record.key == key else None

    def add(self, record: R) -> str | None:
        """Keep a record; returns why it cannot be kept, if so."""
        path = self._path(record.key)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(handle, "w", encoding="utf-8") as file:
                file.write(record.model_dump_json(indent=1))
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            return error.strerror or "the cache cannot be written"
        return None

    def _path(self, key: Key) -> Path:
        return self._directory / f"{hashlib.sha256(key.model_dump_json().encode()).hexdigest()[:32]}.json"


def now() -> str:
    """UTC, as records have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
