"""Mini models without the library: blocks are what they claim to be, and head sizes are checked by architecture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from daemon.errors import ModelUnusable
from daemon.native.gguf_metadata import Metadata
from daemon.native.gguf_reader import read_head
from daemon.native.gguf_rules import (
    HEADS_LIKE_EMBEDDING,
    KEYS_FOR_EVERY_HEAD,
    UNIFORM_HEADS,
    VALUES_LIKE_KEYS,
    Sizes,
    check_sizes,
)
from tests.miniarch import blocks
from tests.miniarch.keys import EQUAL_HEADS, Keys
from tests.miniarch.skeleton import write_skeleton
from tests.miniarch.table import MINIS, Mini

N_ELEMENTS = 1 << 16

HEAD_RULES: tuple[tuple[Iterable[str], Keys, str], ...] = (
    (UNIFORM_HEADS, {"rope.dimension_count": 32}, "rope.dimension_count is 32"),
    (VALUES_LIKE_KEYS, {"attention.value_length": 32}, "value_length is 32"),
    (HEADS_LIKE_EMBEDDING, {"attention.head_count": 8, "attention.head_count_kv": 8}, "not as wide as"),
    (KEYS_FOR_EVERY_HEAD, {"attention.head_count_kv": 2}, "must be the number of heads, 4"),
)


def values_of(kind: str, data: blocks.Bytes) -> np.ndarray[Any, Any]:
    """The numbers in the blocks, by gguf's own code."""
    rows = data.reshape(8, -1)
    return np.asarray(dequantize(rows, GGMLQuantizationType[kind])).reshape(-1)


@pytest.mark.parametrize("kind", blocks.KINDS)
@pytest.mark.parametrize("spread", [0.03, 1.0])
def test_blocks_have_the_spread_that_is_asked_for(kind: str, spread: float) -> None:
    data = blocks.draw(kind, N_ELEMENTS, spread, np.random.default_rng(1))
    assert data.nbytes == blocks.size(kind, N_ELEMENTS)
    values = values_of(kind, data)
    assert values.size == N_ELEMENTS
    assert np.isfinite(values).all()
    ratio = values.std() / spread
    assert 0.7 < ratio < 1.42 if kind == "MXFP4" else 0.95 < ratio < 1.05  # MXFP4 has powers of two only
    assert abs(values.mean()) < 0.15 * values.std()
    assert abs(values).max() < 7 * spread


def test_a_row_that_is_no_blocks() -> None:
    with pytest.raises(ValueError, match="no blocks of Q4_K"):
        blocks.size("Q4_K", 128)


def sizes(path: Path, mini: Mini) -> Sizes:
    write_skeleton(path, mini)
    return check_sizes(Metadata(read_head(path)))


@pytest.mark.parametrize("name", MINIS)
def test_the_sizes_of_an_architecture_are_in_order(name: str, tmp_path: Path) -> None:
    found = sizes(tmp_path / "mini.gguf", MINIS[name])
    assert found.n_expert == MINIS[name].n_expert


@pytest.mark.parametrize(("architectures", "keys", "message"), HEAD_RULES, ids=[rule[2] for rule in HEAD_RULES])
def test_heads_that_the_graph_cannot_bear(
    architectures: Iterable[str], keys: Keys, message: str, tmp_path: Path
) -> None:
    for architecture in architectures:
        good = Mini(architecture, EQUAL_HEADS)
        sizes(tmp_path / "good.gguf", good)
        with pytest.raises(ModelUnusable, match=message):
            sizes(tmp_path / "bad.gguf", replace(good, keys=good.keys | keys))


def test_other_architectures_may_have_such_heads(tmp_path: Path) -> None:
    keys: Keys = {}
    for _, changes, _ in HEAD_RULES:
        keys |= changes
    found = sizes(tmp_path / "mini.gguf", Mini("some-new-architecture", keys))
    assert (found.key_length, found.value_length, found.n_head_kv[0]) == (64, 32, 2)
