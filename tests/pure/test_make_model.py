"""Generated models: the same seed gives the same file, blocks are valid, the tokenizer is whole, files appear whole."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from daemon.native.gguf_check import check
from daemon.native.gguf_reader import read_head
from hotset_tools import make_model
from hotset_tools.cli import main
from hotset_tools.make_model import total_size, write_model
from hotset_tools.model_shapes import SHAPES, Shape, tensors
from hotset_tools.random_weights import BLOCK, WeightType, row_bytes, rows
from hotset_tools.synthetic_vocab import N_MIN, SPECIAL, byte_letters, make_vocab
from tests import minigguf

KINDS = list(BLOCK)


def run(*arguments: str) -> int:
    """The exit code of `hotset ...`."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(stop.value.code or 0)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_have_the_wanted_spread_around_zero(kind: WeightType) -> None:
    data = rows(kind, 512, 512, 0.05, np.random.default_rng(1))
    values = dequantize(data, GGMLQuantizationType[kind])
    assert values.shape == (512, 512)
    assert np.isfinite(values).all()
    assert abs(values.mean()) < 0.002
    assert values.std() == pytest.approx(0.05, rel=0.05)


@pytest.mark.parametrize(("kind", "width"), [("Q8_0", 48), ("Q4_K", 128)])
def test_a_row_that_is_no_whole_number_of_blocks_is_refused(kind: WeightType, width: int) -> None:
    with pytest.raises(ValueError, match=f"a row of {width} elements cannot be {kind}"):
        row_bytes(kind, width)


@pytest.mark.parametrize("size", [N_MIN, 300, 1000, 32_768, 151_936])
def test_a_vocabulary_is_whole(size: int) -> None:
    vocab = make_vocab(size)
    tokens = set(vocab.tokens)
    assert len(vocab.tokens) == len(tokens) == len(vocab.types) == size
    assert tokens >= set(byte_letters())
    assert vocab.tokens[-3:] == list(SPECIAL)
    for merge in vocab.merges:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= tokens


@pytest.mark.parametrize("size", [0, N_MIN - 1, 1_000_000])
def test_a_vocabulary_of_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"not {size}"):
        make_vocab(size)


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.gguf" for name in ("first", "again", "other")}
    seeds = {"first": 1, "again": 1, "other": 2}
    first, again, other = (minigguf.write_moe(path, seed=seeds[name]).read_bytes() for name, path in files.items())
    assert first == again
    assert first != other
    assert len(first) == len(other)


def test_layers_share_data_when_asked(tmp_path: Path) -> None:
    write_model(tmp_path / "a.gguf", minigguf.MOE, 1, reuse_layer=True)
    file = minigguf.take_apart(tmp_path / "a.gguf")
    assert file.tensor("blk.0.ffn_up_exps.weight").data == file.tensor("blk.1.ffn_up_exps.weight").data
    assert file.tensor("blk.0.ffn_up_exps.weight").data != file.tensor("blk.0.ffn_gate_exps.weight").data


def test_tokens_that_end_an_answer_have_a_logit_of_zero(tmp_path: Path) -> None:
    file = minigguf.take_apart(minigguf.write_moe(tmp_path / "a.gguf"))
    head = np.frombuffer(file.tensor("output.weight").data, dtype=np.float16).reshape(minigguf.MOE.n_vocab, -1)
    assert [row for row in range(len(head)) if not head[row].any()] == make_vocab(minigguf.MOE.n_vocab).ends


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_what_it_says(name: str, tmp_path: Path) -> None:
    shape = replace(SHAPES[name], n_layer=1, n_expert=8, n_vocab=1000)
    write_model(tmp_path / "a.gguf", shape, 1)
    head, facts = read_head(tmp_path / "a.gguf"), check(tmp_path / "a.gguf").facts
    assert (facts.n_layer, facts.n_expert, facts.n_vocab, facts.n_embd) == (1, 8, 1000, shape.n_embd)
    assert [(t.name, t.dims[::-1], t.quant.name) for t in head.tensors] == [
        (t.name, t.dims, t.kind) for t in tensors(shape)
    ]
    assert total_size(shape) <= head.size < total_size(shape) + 200_000


def test_the_largest_shape_has_the_known_dimensions() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    assert sum(math.prod(t.dims) for t in tensors(shape)) == pytest.approx(30.5e9, rel=0.01)
    assert (shape.n_layer, shape.n_embd, shape.n_expert, shape.n_expert_used, shape.n_ff) == (48, 2048, 128, 8, 768)


def test_step20_stays_below_its_limit() -> None:
    assert total_size(SHAPES["step20"]) < 1.5e9


class TestCommand:
    """`hotset make-model`."""

    @pytest.fixture
    def out(self, tmp_path: Path) -> Path:
        return tmp_path / "out.gguf"

    @pytest.fixture
    def make(self, out: Path) -> Callable[..., int]:
        small = ("--shape", "overhead", "--layers", "1", "--vocab", "400")
        return lambda *more: run("make-model", str(out), *small, *more)

    def test_writes_a_model(self, out: Path, make: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
        assert make("--experts", "4", "--top-k", "3", "--seed", "5") == 0
        facts = check(out).facts
        assert (facts.n_expert, facts.n_expert_used, facts.n_layer) == (4, 3, 1)
        assert "shape overhead, seed 5" in capsys.readouterr().out
        assert out.stat().st_mode & 0o777 == 0o644

    def test_never_overwrites_without_force(
        self, out: Path, make: Callable[..., int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        out.write_text("precious")
        assert make() == 1
        assert "exists; --force replaces it" in capsys.readouterr().err
        assert out.read_text() == "precious"
        assert make("--force") == 0
        assert check(out).facts.n_layer == 1

    def test_refuses_what_cannot_be(self, make: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
        assert make("--experts", "2", "--top-k", "3") == 1
        assert "3 experts per token are more than the 2" in capsys.readouterr().err

    def test_names_the_shapes(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("make-model", str(out), "--shape", "cube") == 1
        assert "the shapes are overhead, step20, load, qwen3-30b-a3b" in capsys.readouterr().err

    def test_refuses_a_full_disk(
        self, out: Path, make: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        assert make() == 1
        assert "GB free" in capsys.readouterr().err
        assert not out.exists()

    def test_leaves_nothing_behind_when_it_fails(
        self, out: Path, make: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(make_model._Data, "pieces", fail)
        assert make() == 1
        assert "No space left on device" in capsys.readouterr().err
        assert list(out.parent.iterdir()) == []


def test_shapes_are_hashable_values() -> None:
    assert len({*SHAPES.values(), Shape(**vars(SHAPES["overhead"]))}) == len(SHAPES)
