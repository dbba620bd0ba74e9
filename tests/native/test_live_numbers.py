"""While an engine moves experts its logits are those of stock, as `hotset verify` judges them.

Greedy answers of several sequences are noted step by step, and computed again as upstream does in the same context.

The device is a CPU behind the RPC backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from daemon.engine.loading import Loaded
from daemon.engine.residency import Experts
from daemon.model_files import load_command
from daemon.native.context import DECODED, Context
from daemon.native.hotset import Mode, State
from daemon.verify.compare import Distance, distance, flipped
from daemon.verify.tolerance import Rule, Standard
from tests.minigguf import write_moe
from tests.native.test_live_residency import N_LAYER, SIZES, TOP_K, Engine, config
from tests.residency_bench import changed_params, rpc_server

STARTS = (7, 11, 13, 17)
N_TOKENS = 64
Row = tuple[int, int, int, bool]
Event = list[Row] | int
"""Rows of a step, or the sequence that is forgotten."""


@dataclass(frozen=True)
class Numbers:
    """Logits [n_rows, n_vocab] of the rows that wanted them, and what their routers chose, by layer [n_rows, top_k]."""

    logits: np.ndarray
    ids: list[np.ndarray]

    def apart(self, other: Numbers) -> Distance:
        return distance(self.logits, other.logits, flipped(self.ids, other.ids, len(self.logits)))


class Notes:
    """What a context is asked to do, in order, and what it computes."""

    def __init__(self, context: Context, experts: Experts) -> None:
        self.events: list[Event] = []
        self._context, self._residency = context, experts.residency
        self._decode, self._remove = context.decode, context.remove
        self._logits: list[np.ndarray] = []
        self._ids: list[list[np.ndarray]] = []

    def decode(self, rows: Iterable[Row]) -> int:
        rows = list(rows)
        code = self._decode(rows)
        assert code == DECODED
        self.events.append(rows)
        wanted = [at for at, row in enumerate(rows) if row[3]]
        self._logits += [self._context.logits(at).copy() for at in wanted]
        if wanted and self._residency.statistics().state != State.OFF:
            self._ids.append([*self._chosen(rows, wanted)])
        return code

    def _chosen(self, rows: list[Row], wanted: list[int]) -> Iterator[np.ndarray]:
        for layer in range(N_LAYER - 1):
            yield self._residency.router_ids(layer, len(rows))[wanted]
        yield self._residency.router_ids(N_LAYER - 1, len(wanted))  # it computes no other rows

    def remove(self, seq_id: int) -> None:
        self.events.append(seq_id)
        self._remove(seq_id)

    def numbers(self) -> Numbers:
        """Of what was computed since the last call."""
        logits, ids = np.stack(self._logits), [np.concatenate(layer) for layer in zip(*self._ids, strict=True)]
        self._logits, self._ids = [], []
        return Numbers(logits, ids)

    def again(self, events: Iterable[Event]) -> Numbers:
        """The same once more."""
        for event in events:
            if isinstance(event, int):
                self.remove(event)
            else:
                self.decode(event)
        return self.numbers()


def one_by_one(events: list[Event]) -> Iterator[Event]:
    """Each row in a step of its own."""
    for event in events:
        if isinstance(event, int):
            yield event
        else:
            yield from ([row] for row in event)


@pytest.fixture(scope="module")
def server(library_path: Path) -> Iterator[str]:
    with rpc_server(library_path) as found:
        yield found.device


@pytest.mark.parametrize("experts", ["Q4_K", "F32"])
def test_greedy_answers_while_experts_move_are_within_the_tolerance_of_verify(
    experts: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_moe(tmp_path / "m.gguf", **SIZES | {"experts": experts, "layers": "F32", "vocab": "F32"})  # type: ignore[arg-type]
    settings = config(model, server, {"vram": "25%", "remember": False, "gate": False})
    with changed_params(flash_attn_type=0), Loaded(load_command(settings), lambda _: None) as made:
        engine = Engine(made)
        notes = Notes(made.context, engine.experts)
        monkeypatch.setattr(made.context, "decode", notes.decode)
        monkeypatch.setattr(made.context, "remove", notes.remove)
        made.experts.start()
        live = answered(engine, notes)
        events = list(notes.events)

        # Upstream's own path has no ids; layers without slots compute the same and have them.
        engine.experts.compute_as(State.OFF)
        off = notes.again(events)
        engine.experts.compute_as(State.ON)
        engine.adjust(vram=0)
        engine.turn_until(lambda: {layer.mode for layer in engine.experts.residency.layers()} == {Mode.COLD})
        stock = notes.again(events)
        np.testing.assert_array_equal(stock.logits, off.logits)
        alone = notes.again(one_by_one(events))

    own = stock.apart(alone).kl_unflipped
    standard = Standard(frozenset({experts}), rounds_alike=True, kl_stock=None, kl_alone=own)
    tolerance, apart = standard.moved(), stock.apart(live)
    assert tolerance.rule is Rule.ALIKE
    assert tolerance.problem(apart) is None
    assert not apart.identical, "some experts were computed on the device"


def answered(engine: Engine, notes: Notes) -> Numbers:
    """Four answers beside each other, then one after the other; experts come and go in both."""

    def moved(answer: Callable[[], object]) -> None:
        before = engine.experts.residency.statistics()
        answer()
        after = engine.experts.residency.statistics()
        assert after.staged > before.staged
        assert after.published > before.published

    def together() -> None:
        names = [engine.submit(start, N_TOKENS) for start in STARTS]
        engine.turn_until(lambda: all(engine.pipe.end(name) for name in names))

    moved(together)
    for start in STARTS[:2]:
        moved(lambda start=start: engine.answer(start, N_TOKENS))
    engine.turn_until(lambda: engine.at_rest)
    assert engine.status().moves > 2 * N_LAYER * TOP_K
    layers = engine.status().layers
    assert all(layer.hits and layer.misses for layer in layers)
    return notes.numbers()
