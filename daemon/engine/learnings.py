"""What engines learn about the use of a model's experts, kept in a file from one to the next."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from daemon.engine import store
from daemon.engine.wanted import expert_sets
from daemon.hotset import learned as files
from daemon.hotset.controller import Controller
from daemon.hotset.files import ModelId
from daemon.hotset.hot_set import LayerKey
from daemon.hotset.learned import Learned, LearnedUnusable
from daemon.messages import Remembered, ResidencySpec
from daemon.native.gguf_check import GgufFile

SAVE_SECONDS = 300.0
"""What was learned is at most so old before it is saved."""


@dataclass(frozen=True)
class Memory:
    """What is known about one model at the load, and where it is kept; `path` is None where it is not."""

    model: ModelId
    path: Path | None
    report: Remembered
    learned: Learned | None = None


def recall(directory: Path | None, wish: ResidencySpec, file: GgufFile) -> Memory:
    """What is kept in `directory` about this model; whatever is wrong with it is told in the report alone."""
    model = ModelId(fingerprint=file.fingerprint, architecture=file.facts.architecture)
    if not wish.remember:
        return Memory(model, None, Remembered(reason="residency.remember is false"))
    if directory is None:
        return Memory(model, None, Remembered(reason="there is no directory to keep it in"))
    path = directory / f"learned-{file.fingerprint[:32]}.bin"
    try:
        learned = _read(path, file)
    except FileNotFoundError:
        return Memory(model, path, Remembered(reason="nothing was learned about this model before"))
    except (OSError, LearnedUnusable) as error:
        why = error.message if isinstance(error, LearnedUnusable) else f"{path.name} cannot be read: {error.strerror}"
        return Memory(model, path, Remembered(reason="what was learned before cannot be used", fault=why))
    header = learned.header
    words = f"experts learned from {header.tokens:,} tokens until {header.saved}"
    start = "cold" if wish.frozen else "warm"
    reason = f"{words}; residency.frozen is true, so the hot set rules" if wish.frozen else words
    return Memory(model, path, Remembered(start=start, reason=reason), learned)


def _read(path: Path, file: GgufFile) -> Learned:
    """The file.

    Raises:
        OSError: it cannot be read.
        LearnedUnusable: it is damaged, or does not fit the model.
    """
    learned = files.decode(path.name, store.read(path, files.MAX_BYTES))
    if faults := files.faults(learned, file.fingerprint, {one.key: one.n_expert for one in expert_sets(file.facts)}):
        raise LearnedUnusable(path.name, faults)
    return learned


class Keeper:
    """Teaches a new controller what is known, and saves what it learns. Belongs to the controller's thread; `report`,
    what status says, may be read by any. `keys` are the controller's layers."""

    def __init__(
        self,
        memory: Memory,
        keys: Sequence[LayerKey],
        controller: Controller,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory, self._keys, self._controller, self._clock = memory, list(keys), controller, clock
        self.report = memory.report
        self._n_before = 0
        if memory.learned is not None:
            files.teach(controller, self._keys, memory.learned)
            self._n_before = memory.learned.header.tokens
        self._saved = self._state()
        self._due = clock() + SAVE_SECONDS

    def wait(self) -> float | None:
        """Seconds until it is time to save, not more than 0 when it is; None: nothing was learned since."""
        if self._memory.path is None or self._state() == self._saved:
            return None
        return self._due - self._clock()

    def save(self) -> None:
        """Write what is known now, if that is anything new; where it cannot be written the report says why."""
        path, state = self._memory.path, self._state()
        if path is None or state == self._saved:
            return
        self._due = self._clock() + SAVE_SECONDS
        learned = files.learned_by(self._controller, self._memory.model, self._keys, store.now(), self._n_before)
        try:
            store.write(path, files.encode(learned))
        except OSError as error:
            why = f"{path.name} cannot be written: {error.strerror}"
            self.report = self.report.model_copy(update={"fault": why})
            return
        self._saved = state
        self.report = self.report.model_copy(update={"saved": learned.header.saved, "fault": ""})

    def close(self) -> None:
        """Save for the last time. Nobody asks for the report any more: what is wrong then goes to stderr, if new."""
        told = self.report.fault
        self.save()
        if self.report.fault not in ("", told):
            print(f"what was learned about experts is lost: {self.report.fault}", file=sys.stderr, flush=True)

    def _state(self) -> tuple[int, int]:
        """Changes with all that is learned."""
        return self._controller.n_tokens, self._controller.n_moves
