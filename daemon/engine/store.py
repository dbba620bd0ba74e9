"""What was found out once and is kept in the cache: one small file for each combination that it holds for."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
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
            record = self._kind.model_validate_json(read(self._path(key), _MOST_BYTES))
        except (OSError, ValidationError):
            return None
        return record if record is not None and record.key == key else None

    def add(self, record: R) -> str | None:
        """Keep a record; returns why it cannot be kept, if so."""
        try:
            write(self._path(record.key), record.model_dump_json(indent=1).encode())
        except OSError as error:
            return error.strerror or "the cache cannot be written"
        return None

    def _path(self, key: Key) -> Path:
        return self._directory / f"{hashlib.sha256(key.model_dump_json().encode()).hexdigest()[:32]}.json"


def read(path: Path, most: int) -> bytes:
    """All of a file of ours.

    Raises:
        OSError: it cannot be read, is a link or no regular file, or has more than `most` bytes, which are not read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if found.st_size > most:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        with open(handle, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(handle)


def write(path: Path, content: bytes) -> None:
    """Put a file there that only its owner may read, all of it or nothing; directories that lack are made.

    It is not forced to the disk: after a loss of power it may be damaged, which whoever reads it must see.

    Raises:
        OSError: it cannot be written; what was there is there still.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(handle, "wb") as file:
            file.write(content)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def now() -> str:
    """UTC, as records have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
