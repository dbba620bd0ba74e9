"""Every architecture with experts, and every quant type: slots on a device agree with stock at any residency."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.native.hotset import Layer, Mode, Reason, Residency
from tests.residency_bench import Bench, Logits, kl, open_bench

miniarch = pytest.importorskip("tests.miniarch.table")
writer = pytest.importorskip("tests.miniarch.writer")
blocks = pytest.importorskip("tests.miniarch.blocks")

F32 = {name: replace(mini, quants=miniarch.all_of("F32")) for name, mini in miniarch.MINIS.items()}
QUANTISED = {
    f"{name}-{kind}": replace(miniarch.MINIS[name], quants=miniarch.all_of(kind))
    for name in ("qwen3moe", "gpt-oss", "deepseek2-fused")
    for kind in blocks.KINDS
    if kind != "F32"
}
CASES = {**{f"{name}-F32": mini for name, mini in F32.items()}, **QUANTISED}


@contextmanager
def opened(name: str, rpc_device: str, directory: Path, library: Path) -> Iterator[Bench]:
    path = writer.write_minis(directory, {"mini": CASES[name]}, library)["mini"]
    with open_bench(rpc_device, path, max_sequences=1, n_ctx=256) as bench:
        yield bench
    path.unlink()


def walk(bench: Bench, between: Callable[[int], None] = lambda _: None) -> Logits:
    """Prefill, single tokens, steps of 12 and of 4."""
    if bench.context.memory:  # text diffusion models keep nothing
        bench.context.remove(0)
    rows = [bench.logits([(7 * i % 300, i, 0) for i in range(40)])]
    for i in range(8):
        between(i)
        rows.append(bench.logits([(11 * i % 300, 40 + i, 0)]))
    rows.append(bench.logits([(13 * i % 300, 48 + i, 0) for i in range(12)]))
    rows.append(bench.logits([(17 * i % 300, 60 + i, 0) for i in range(4)]))
    return np.concatenate(rows)


def fill(hs: Residency, layers: list[Layer], part: float, first: int = 0) -> None:
    """This part of each layer's experts, beginning with one of them, in as many slots."""
    n_slots = [max(1, int(layer.n_expert * part)) for layer in layers]
    hs.resize([0] * len(layers))
    hs.resize(n_slots)
    moves = [
        (layer.index, slot, (first + slot * (2 if part == 0.5 else 1)) % layer.n_expert)
        for layer, n in zip(layers, n_slots, strict=True)
        for slot in range(n)
    ]
    for index, slot, expert in moves:
        hs.stage(index, expert, slot)
    hs.publish(moves)


@pytest.mark.parametrize("name", CASES)
def test_slots_agree_with_stock(name: str, rpc_device: str, tmp_path: Path, library_path: Path) -> None:
    with opened(name, rpc_device, tmp_path, library_path) as bench:
        stock = walk(bench)
        with Residency(bench.context.pointer) as hs:
            layers = hs.layers()
            assert {layer.reason for layer in layers} == {Reason.MANAGED}
            same(walk(bench), stock)
            hs.resize([layer.n_expert // 2 for layer in layers])
            same(walk(bench), stock)
            fill(hs, layers, 1.0)
            assert {hs.layer(layer.index).mode for layer in layers} == {Mode.FULL}
            same(walk(bench), stock)
            fill(hs, layers, 0.5)
            near(name, walk(bench), stock)
            near(name, walk(bench, lambda i: fill(hs, layers, (0.25, 0.5, 1.0, 0.5)[i % 4], i)), stock)
            for layer in map(hs.layer, range(hs.n_layers)):
                assert layer.hits + layer.misses == hs.counts(layer.index).sum()
        same(walk(bench), stock)


def same(logits: Logits, stock: Logits) -> None:
    np.testing.assert_array_equal(logits, stock)


def near(name: str, logits: Logits, stock: Logits) -> None:
    divergence: Any = kl(stock, logits)
    if name.endswith("-F32"):
        assert divergence.max() <= 1e-8
    else:
        assert (divergence > 1e-4).mean() <= 0.01
