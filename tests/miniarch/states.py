"""A child process that parks sequences of many models and lets others share their beginnings; a JSON line for each.

Arguments: model files. What comes out is compared with the same pieces of the same prompt, undisturbed. A model on
which the library ends the process gets no line.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from daemon.config import Config
from daemon.model_files import load_command
from daemon.native.context import DECODED, Context
from daemon.native.model import Model
from tests.miniarch.decode import answer_all

N_PROMPT, N_SPLIT, N_OTHER = 64, 40, 24
Logits = np.ndarray[Any, Any]


class Walk:
    """Pieces of two prompts in the sequences of one context."""

    def __init__(self, context: Context, n_vocab: int) -> None:
        self._context = context
        random = np.random.default_rng(7)
        self._prompts = random.integers(0, n_vocab - 3, (2, N_PROMPT)).tolist()

    def compute(self, seq_id: int, begin: int, end: int, prompt: int = 0) -> Logits:
        """The logits of the last token of a piece."""
        tokens = self._prompts[prompt][begin:end]
        code = self._context.decode((token, begin + i, seq_id, i == end - begin - 1) for i, token in enumerate(tokens))
        if code != DECODED:
            raise RuntimeError(f"decode returned {code}")
        return self._context.logits(end - begin - 1).copy()

    def clear(self) -> None:
        for seq_id in range(3):
            self._context.remove(seq_id)

    def undisturbed(self) -> Logits:
        self.compute(0, 0, N_SPLIT)
        logits = self.compute(0, N_SPLIT, N_PROMPT)
        self.clear()
        return logits

    def parked(self) -> Logits:
        """Begun in one sequence beside another, gone on with in a third, in cells that others had meanwhile."""
        self.compute(0, 0, N_SPLIT)
        self.compute(1, 0, N_OTHER, prompt=1)
        state = self._context.save(0)
        assert state is not None
        self._context.remove(0)
        self.compute(1, N_OTHER, N_PROMPT, prompt=1)
        assert self._context.restore(2, state)
        logits = self.compute(2, N_SPLIT, N_PROMPT)
        self.clear()
        return logits

    def after_another_beginning(self) -> Logits:
        """What a wrong state would give."""
        self.compute(0, 0, N_SPLIT, prompt=1)
        logits = self.compute(0, N_SPLIT, N_PROMPT)
        self.clear()
        return logits

    def shared(self) -> Logits:
        """From the beginning of a sequence that has gone further and has left."""
        self.compute(0, 0, N_SPLIT)
        self.compute(0, N_SPLIT, N_PROMPT)
        self._context.share(0, 1, N_SPLIT)
        self._context.remove(0)
        self.compute(2, 0, N_OTHER, prompt=1)
        logits = self.compute(1, N_SPLIT, N_PROMPT)
        self.clear()
        return logits


def report(path: str) -> dict[str, Any]:
    """How far logits are from those of an undisturbed sequence, in parts of their spread."""
    engine = {"device": "cpu", "threads": 1, "kv_cells": 512, "max_sequences": 3, "ubatch": 64}
    command = load_command(Config.model_validate({"model": {"path": path}, "engine": engine}))
    model = Model(command, lambda _: None)
    context = Context(model, command, n_ctx=512, n_threads=1, n_threads_batch=1)
    walk = Walk(context, model.n_vocab)
    wanted = walk.undisturbed()
    spread = float(wanted.std())
    out = {
        "can_share": context.can_share,
        "plain": not model.is_recurrent_or_hybrid and not model.n_swa,
        "memory": bool(context.memory),
        "other": float(np.abs(walk.after_another_beginning() - wanted).max()) / spread,
        "parked": float(np.abs(walk.parked() - wanted).max()) / spread,
        "shared": float(np.abs(walk.shared() - wanted).max()) / spread if context.can_share else None,
    }
    context.close()
    model.close()
    return out


if __name__ == "__main__":
    answer_all(sys.argv[1:], report)
