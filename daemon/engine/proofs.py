"""Self-tests that were passed, kept in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from daemon.engine.store import Key, Record, Store, now

__all__ = ["Key", "Proof", "Proofs"]


class Proof(Record):
    """A test that was passed: the mean divergence in nats that it saw, and when (UTC)."""

    format: Literal[1] = 1
    kl: float
    passed: str


class Proofs:
    """The directory of them."""

    def __init__(self, directory: Path) -> None:
        self._store = Store(directory, Proof)

    def find(self, key: Key) -> Proof | None:
        """The proof for `key`, None when there is none or the file is damaged."""
        return self._store.find(key)

    def add(self, key: Key, kl: float) -> str | None:
        """Keep a test that was passed; returns why it cannot be kept, if so."""
        return self._store.add(Proof(key=key, kl=kl, passed=now()))
