"""Self-tests that were passed, kept in the cache: one small file for each combination that was tested."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

_MOST_BYTES = 64 * 1024


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Key(_Strict):
    """What a test holds for; any other value of any of it asks for another test."""

    build: str
    driver: str
    device: str
    model: str
    settings: str


class Proof(_Strict):
    """A test that was passed: the mean divergence in nats that it saw, and when (UTC)."""

    format: Literal[1] = 1
    key: Key
    kl: float
    passed: str


class Proofs:
    """The directory of them. Nothing here is trusted: what is not exactly a proof of the key counts as none."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, key: Key) -> Proof | None:
        """The proof for `key`, None when there is none or the file is damaged."""
        try:
            handle = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(handle, "rb") as file:
                data = file.read(_MOST_BYTES + 1)
            proof = Proof.model_validate_json(data) if len(data) <= _MOST_BYTES else None
        except (OSError, ValidationError):
            return None
        return proof if proof is not None and proof.key == key else None

    def add(self, key: Key, kl: float) -> str | None:
        """Keep a test that was passed; returns why it cannot be kept, if so."""
        path = self._path(key)
        proof = Proof(key=key, kl=kl, passed=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(handle, "w", encoding="utf-8") as file:
                file.write(proof.model_dump_json(indent=1))
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            return error.strerror or "the cache cannot be written"
        return None

    def _path(self, key: Key) -> Path:
        return self._directory / f"{hashlib.sha256(key.model_dump_json().encode()).hexdigest()[:32]}.json"
