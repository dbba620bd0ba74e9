"""Models for the benchmarks of expert residency: large shapes, one layer's data in all layers, routing of a kind."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from daemon.native import locate
from daemon.native.gguf_reader import read_head
from hotset_tools.make_model import check_target, resized, total_size, write_model
from hotset_tools.model_shapes import Shape
from hotset_tools.random_weights import BLOCK
from hotset_tools.routing import Routing, from_metadata, make_routing
from hotset_tools.synthetic_vocab import SPECIAL

BLOCK_GAIN = 0.2
"""Blocks add so little to the residual stream that the routers of all layers see the embedding."""


def make(
    out: Path | None, shape: str, quant: str, kind: str, seed: int, *, force: bool = False, **sizes: int | None
) -> tuple[Path, float]:
    """Write a model, by default into the cache; returns its path and the seconds it took, 0 if it was there already.

    Raises:
        ValueError: what was asked for cannot be.
        OSError: the disk.
    """
    if quant not in BLOCK:
        raise ValueError(f"experts cannot be {quant!r}; they can be {', '.join(BLOCK)}")
    wanted = bench_shape(shape, experts=quant, layers=quant, **sizes)
    changed = "".join(f"-{name}{value}" for name, value in sizes.items() if value is not None)
    path = out or locate.cache_root() / "models" / f"{shape}{changed}-{quant}-{kind}-seed{seed}.gguf"
    if out is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not force:
            return path, 0.0
    check_target(path, total_size(wanted), force)
    began = time.monotonic()
    report = _Progress(total_size(wanted))
    write_model(path, wanted, seed, reuse_layer=True, routing=bench_routing(wanted, kind, seed), progress=report)
    return path, time.monotonic() - began


def bench_shape(name: str, **changes: Any) -> Shape:
    """A shape whose embeddings can be given and whose blocks are quiet."""
    return replace(resized(name, **changes), vocab="Q8_0", block_gain=BLOCK_GAIN)


def bench_routing(shape: Shape, kind: str, seed: int) -> Routing:
    """Routing over all tokens but the special ones, which are last."""
    return make_routing(kind, shape.n_vocab - len(SPECIAL), seed)


def routing_of(model: Path) -> Routing | None:
    """What a model says of its routing; None where it was not generated so.

    Raises:
        ValueError: it says only part of it.
        ModelUnusable: the file is no model.
    """
    values = read_head(model).metadata
    return from_metadata({key: value.scalar() for key, value in values.items() if value.n is None})


class _Progress:
    """A line on stderr every gigabyte."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._told = total, 0, 0

    def __call__(self, n_bytes: int) -> None:
        self._done += n_bytes
        if self._done - self._told >= 1 << 30:
            self._told = self._done
            print(f"{self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB", file=sys.stderr)
