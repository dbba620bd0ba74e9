"""Every architecture with experts, and every quant type: slots on a device agree with stock at any residency.

Each model's walk is computed in a context as the daemon has it, and once more in one whose router is watched: watching
switches overlap off, the numbers must be the same bit for bit, and the ids tell which rows the router sent elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest

from daemon.engine.wanted import expert_sets
from daemon.native.gguf_check import check
from daemon.native.hotset import Layer, Mode, Reason, Residency, State
from daemon.verify.compare import distance, flipped
from daemon.verify.tolerance import FLIPS, KL_FLOAT, KL_QUANTISED
from tests.miniarch import writer
from tests.miniarch.blocks import KINDS
from tests.miniarch.shapes import Tensor, shapes
from tests.miniarch.table import MINIS, Quants, all_of
from tests.miniarch.watch import Ids, Watch, by_layer
from tests.residency_bench import Bench, Logits, changed_params, fill, open_bench

QUANTS: dict[str, Quants] = {kind: all_of(kind) for kind in KINDS if kind != "F32"}
QUANTS |= {"mixed": ("IQ4_XS", "Q4_K", "Q6_K")}
"""What experts are of, beside F32: the types of the gate, up and down matrices (a fused one has the gate's)."""

SEPARATE = [name for name, mini in MINIS.items() if not mini.fused]
FUSED = [name for name, mini in MINIS.items() if mini.fused]


def quantised() -> Iterator[tuple[str, str]]:
    """Models and their types: every model, and every type with gate and up apart and as one."""
    for names in (SEPARATE, FUSED):
        yield from islice(zip(cycle(names), cycle(QUANTS), strict=False), max(len(names), len(QUANTS)))


CASES = {f"{name}-F32": replace(mini, quants=all_of("F32")) for name, mini in MINIS.items()}
CASES |= {f"{name}-{kind}": replace(MINIS[name], quants=QUANTS[kind]) for name, kind in quantised()}

N_PROMPT, N_STEPS, N_SEQUENCES = 40, 8, 4


@dataclass(frozen=True)
class Seen:
    """All rows of a walk: logits [n_rows, n_vocab], and for each router its ids [n_rows, n_used]."""

    logits: Logits
    ids: list[Ids]


def walk(bench: Bench, between: Callable[[int], None] = lambda _: None) -> Logits:
    """A prompt, single tokens, four of one sequence and of four, steps of 12 and of 31."""
    bench.clear()
    rows = [bench.logits([(7 * i % 300, i, 0) for i in range(N_PROMPT)])]
    position = N_PROMPT
    for i in range(N_STEPS):
        between(i)
        rows.append(bench.logits([(11 * i % 300, position + i, 0)]))
    position += N_STEPS
    for width in (12, 4, 31):
        rows.append(bench.logits([(13 * i % 300, position + i, 0) for i in range(width)]))
        position += width
    for i in range(2):
        between(N_STEPS + i)
        rows.append(bench.logits([((17 * i + s) % 300, i + position * (s == 0), s) for s in range(N_SEQUENCES)]))
    return np.concatenate(rows)


class Placement:
    """Says what is resident in all layers; the same call leaves the same placement, whatever was there before."""

    def __init__(self, hs: Residency) -> None:
        self.hs = hs
        self.layers = hs.layers()

    def slots(self, part: float) -> None:
        """So many slots of each layer's experts, all free."""
        self.hs.resize([0] * len(self.layers))
        self.hs.resize([max(1, int(layer.n_expert * part)) for layer in self.layers])

    def part(self, part: float, first: int = 0) -> None:
        """This part of each layer's experts, beginning with `first`."""
        self.slots(part)
        fill(self.hs, {layer.index: _experts(layer, part, first) for layer in self.layers})

    def every_mode(self) -> None:
        """Layers in turn are full, partial and cold."""
        parts = [(1.0, 0.5, 0.0)[layer.index % 3] for layer in self.layers]
        self.hs.resize([0] * len(self.layers))
        self.hs.resize([int(layer.n_expert * part) for layer, part in zip(self.layers, parts, strict=True)])
        fill(self.hs, {layer.index: _experts(layer, p, 0) for layer, p in zip(self.layers, parts, strict=True) if p})

    def change(self, i: int) -> None:
        """For `walk`: another part of other experts before each step."""
        self.part((0.25, 0.5, 1.0, 0.5)[i % 4], i)


def _experts(layer: Layer, part: float, first: int) -> list[int]:
    step = 2 if part == 0.5 else 1
    return [(first + step * slot) % layer.n_expert for slot in range(max(1, int(layer.n_expert * part)))]


@pytest.fixture(scope="module")
def tensors(library_path: Path) -> dict[str, list[Tensor]]:
    return shapes(CASES, library_path)


@pytest.fixture
def path(name: str, tensors: dict[str, list[Tensor]], tmp_path: Path) -> Iterator[Path]:
    """The model of the case `name`."""
    path = tmp_path / "mini.gguf"
    writer.write(path, CASES[name], tensors[name], seed=1)
    yield path
    path.unlink()


@pytest.mark.parametrize("name", CASES)
def test_slots_agree_with_stock(name: str, path: Path, rpc_device: str) -> None:
    with open_bench(rpc_device, path, n_ctx=256, max_sequences=N_SEQUENCES) as bench:
        stock = walk(bench)
        with Residency(bench.context.pointer) as hs:
            place = Placement(hs)
            assert {layer.reason for layer in place.layers} == {Reason.MANAGED}
            check_described(path, place.layers)
            same(walk(bench), stock)
            place.slots(0.5)
            same(walk(bench), stock)
            place.part(1.0)
            assert {layer.mode for layer in hs.layers()} == {Mode.FULL}
            same(walk(bench), stock)
            place.part(0.5)
            half = walk(bench)
            changing = walk(bench, place.change)
        same(walk(bench), stock)
    watched_walks_agree(name, path, rpc_device, stock, half, changing)


def check_described(path: Path, layers: list[Layer]) -> None:
    """A hot set is checked against the file before the model is loaded: it has to tell the same sets of experts."""
    told = expert_sets(check(path).facts)
    assert [(one.key[0], one.n_expert, one.expert_bytes) for one in told] == [
        (layer.il, layer.n_expert, layer.expert_bytes) for layer in layers
    ]


def watched_walks_agree(name: str, path: Path, device: str, stock: Logits, half: Logits, changing: Logits) -> None:
    watch = Watch()
    with (
        changed_params(cb_eval=watch.callback),
        open_bench(device, path, n_ctx=256, max_sequences=N_SEQUENCES) as bench,
        Residency(bench.context.pointer) as hs,
    ):
        place = Placement(hs)

        def see(between: Callable[[int], None] = lambda _: None) -> Seen:
            watch.take()
            logits = walk(bench, between)
            return Seen(logits, by_layer(watch.take(), place.layers))

        hs.set_state(State.OFF)
        reference = see()
        same(reference.logits, stock)
        hs.set_state(State.ON)
        place.part(0.5)
        seen = [see(), see(place.change)]
        for found, logits in zip(seen, (half, changing), strict=True):
            same(found.logits, logits)
            near(name, found, reference)
        place.every_mode()
        seen.append(see())
        near(name, seen[-1], reference)
        hs.set_state(State.COUNT)
        seen.append(see())
        same(seen[-1].logits, stock)
        counts_are_a_recount(hs, CASES[name].n_expert, seen)


def counts_are_a_recount(hs: Residency, n_expert: int, seen: list[Seen]) -> None:
    for layer, together in zip(hs.layers(), hs.all_counts(), strict=True):
        ids = np.concatenate([walk.ids[layer.index] for walk in seen])
        ids = ids * layer.n_expert // n_expert  # grovemoe's second experts serve a group of the router's each
        np.testing.assert_array_equal(together, np.bincount(ids.flat, minlength=layer.n_expert))
        np.testing.assert_array_equal(together, hs.counts(layer.index))
        assert layer.hits + layer.misses == hs.statistics().tokens * layer.n_expert_used


def same(logits: Logits, stock: Logits) -> None:
    np.testing.assert_array_equal(logits, stock)


def near(name: str, seen: Seen, stock: Seen) -> None:
    flips = flipped(stock.ids, seen.ids, len(stock.logits))
    apart = distance(stock.logits, seen.logits, flips)
    if name.endswith("-F32"):
        assert apart.kl_max <= KL_FLOAT
    else:
        assert apart.flips <= FLIPS
        assert apart.kl_unflipped <= KL_QUANTISED


def test_the_cases_are_those_that_must_be() -> None:
    """Each model with F32 and another type, each type with gate and up apart and as one."""
    names = {name.rsplit("-", 1)[0] for name in CASES if not name.endswith("-F32")}
    assert names == {name.rsplit("-", 1)[0] for name in CASES if name.endswith("-F32")} == set(MINIS)
    for kind in QUANTS:
        assert {MINIS[name].fused for name in MINIS if f"{name}-{kind}" in CASES} == {True, False}
