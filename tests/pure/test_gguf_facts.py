"""What is said about a model: layers, experts, bytes, KV cache, and what to expect when memory is short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from daemon.native.gguf_check import ModelFacts, check, memory_warning
from daemon.native.gguf_types import BOOL, INT32, STRING
from tests import minigguf
from tests.minigguf import MiniFile, MiniTensor, array, scalar, u32

GIB = 1 << 30
MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> MiniFile:
    return minigguf.take_apart(minigguf.write_moe(tmp_path_factory.mktemp("good") / "mini.gguf"))


def facts_of(file: MiniFile, directory: Path) -> ModelFacts:
    (directory / "mini.gguf").write_bytes(file.to_bytes())
    return check(directory / "mini.gguf").facts


def as_architecture(file: MiniFile, name: str) -> MiniFile:
    """The same file under another architecture's name."""
    keys = tuple((key.replace(b"qwen3moe.", name.encode() + b"."), value) for key, value in file.keys)
    return replace(file, keys=keys).with_key("general.architecture", scalar(STRING, name))


def with_tensors(file: MiniFile, *names: str) -> MiniFile:
    """Small F32 tensors added at the end."""
    extra = tuple(MiniTensor(name.encode(), (8,), 0, bytes(32)) for name in names)
    return replace(file, tensors=file.tensors + extra)


def test_a_moe_model(parts: MiniFile, tmp_path: Path) -> None:
    facts = facts_of(parts, tmp_path)
    expert = 3 * 64 * 64 * 2
    assert (facts.architecture, facts.name, facts.is_moe, facts.residency) == (
        "qwen3moe", "random mini", True, "applicable",
    )  # fmt: skip
    assert (facts.n_layer, facts.n_expert, facts.n_expert_used, facts.n_embd, facts.n_ctx_train) == (2, 4, 2, 64, 512)
    assert [layer.bytes_per_expert for layer in facts.layers] == [expert, expert]
    assert facts.expert_bytes == 2 * 4 * expert
    assert facts.size == sum(len(tensor.data) for tensor in parts.tensors)
    assert facts.other_bytes == facts.size - facts.expert_bytes
    assert facts.active_bytes == facts.other_bytes + 2 * 2 * expert
    assert facts.n_params == sum(int(np.prod(tensor.dims)) for tensor in parts.tensors)
    assert dict(facts.quants)["F16"] > dict(facts.quants)["F32"] > 0
    assert facts.layers[0].expert_quants == ("F16",)


def test_a_dense_model_has_no_residency(tmp_path: Path) -> None:
    facts = check(minigguf.write_dense(tmp_path / "dense.gguf")).facts
    assert (facts.is_moe, facts.n_expert, facts.expert_bytes) == (False, 0, 0)
    assert facts.residency == "not applicable: the model is dense"
    assert facts.active_bytes == facts.size


@pytest.mark.parametrize(("kind", "size"), [("F32", 4), ("F16", 2), ("Q8_0", 34 / 32), ("Q4_K", 144 / 256)])
def test_bytes_of_an_expert_follow_its_type(kind: str, size: float, tmp_path: Path) -> None:
    path = minigguf.write_moe(tmp_path / "mini.gguf", n_embd=256, n_ff=256, head_size=32, experts=kind)
    assert check(path).facts.layers[0].bytes_per_expert == 3 * 256 * 256 * size


def test_the_embedded_model_is_described_as_its_card_says() -> None:
    facts = check(MODELS / "tinymoe-41m-Q4_K_M.gguf").facts
    assert (facts.architecture, facts.n_layer, facts.n_expert, facts.n_expert_used) == ("qwen3moe", 6, 32, 4)
    assert (facts.n_vocab, facts.n_ctx_train, facts.n_embd) == (8192, 4096, 256)
    assert facts.n_params == pytest.approx(41.08e6, rel=1e-3)
    assert facts.kv_bytes_per_token == 6 * 2 * (64 + 64) * 2
    assert {layer.bytes_per_expert for layer in facts.layers} == {110_592, 127_488}


class TestCache:
    """KV bytes per token, for the layouts that llama.cpp has."""

    def test_grouped_heads(self, parts: MiniFile, tmp_path: Path) -> None:
        assert facts_of(parts, tmp_path).kv_bytes_per_token == 2 * 1 * (32 + 32) * 2

    def test_heads_per_layer(self, parts: MiniFile, tmp_path: Path) -> None:
        facts = facts_of(parts.with_key("qwen3moe.attention.head_count_kv", array(INT32, [2, 1])), tmp_path)
        assert [layer.kv_bytes_per_token for layer in facts.layers] == [2 * 64 * 2, 1 * 64 * 2]

    def test_without_key_and_value_length(self, parts: MiniFile, tmp_path: Path) -> None:
        file = parts.without_key("qwen3moe.attention.key_length").without_key("qwen3moe.attention.value_length")
        assert facts_of(file, tmp_path).key_length == 64 // 2

    def test_latent_attention_keeps_keys_only(self, parts: MiniFile, tmp_path: Path) -> None:
        file = as_architecture(parts, "deepseek2").with_key("deepseek2.attention.kv_lora_rank", u32(24))
        for key, value in (("key_length", 32), ("value_length", 24), ("key_length_mla", 16), ("head_count_kv", 1)):
            file = file.with_key(f"deepseek2.attention.{key}", u32(value))
        facts = facts_of(file, tmp_path)
        assert facts.kv_bytes_per_token == 2 * 1 * 32 * 2
        assert any("latent" in note for note in facts.notes)

    def test_recurrent_layers_have_no_cells(self, parts: MiniFile, tmp_path: Path) -> None:
        file = as_architecture(parts, "hybrid").without_tensor("blk.0.attn_k.weight")
        facts = facts_of(with_tensors(file, "blk.0.ssm_a", "blk.0.attn_qkv.weight", "blk.1.ssm_a"), tmp_path)
        assert [layer.kind for layer in facts.layers] == ["recurrent", "mixed"]
        assert [layer.kv_bytes_per_token for layer in facts.layers] == [0, 1 * 64 * 2]
        assert any("2 recurrent layers" in note for note in facts.notes)

    def test_a_sliding_window_is_noted(self, parts: MiniFile, tmp_path: Path) -> None:
        file = as_architecture(parts, "windowed").with_key("windowed.attention.sliding_window", u32(128))
        assert "some or all layers look back 128 tokens" in facts_of(file, tmp_path).notes[0]
        file = file.with_key("windowed.attention.sliding_window_pattern", array(BOOL, [1, 0]))
        file = file.with_key("windowed.attention.key_length_swa", u32(16))
        facts = facts_of(file, tmp_path)
        assert [layer.kind for layer in facts.layers] == ["window", "attention"]
        assert [layer.kv_bytes_per_token for layer in facts.layers] == [(16 + 32) * 2, (32 + 32) * 2]
        assert facts.notes[0].startswith("1 layers look back 128 tokens")

    def test_layers_that_share_a_cache(self, parts: MiniFile, tmp_path: Path) -> None:
        file = as_architecture(parts, "sharing").with_key("sharing.attention.shared_kv_layers", u32(1))
        assert [layer.kv_bytes_per_token for layer in facts_of(file, tmp_path).layers] == [128, 0]

    def test_prediction_layers_are_no_part_of_decoding(self, parts: MiniFile, tmp_path: Path) -> None:
        facts = facts_of(parts.with_key("qwen3moe.nextn_predict_layers", u32(1)), tmp_path)
        assert [layer.kind for layer in facts.layers] == ["attention", "prediction"]
        assert facts.layers[1].kv_bytes_per_token == 0


class TestMemoryWarning:
    """`memory_warning`."""

    @pytest.fixture
    def large(self, parts: MiniFile, tmp_path: Path) -> ModelFacts:
        """The mini model, as if every byte were 100,000."""
        facts = facts_of(parts, tmp_path)
        layers = tuple(
            replace(layer, experts=tuple(replace(t, size=t.size * 100_000) for t in layer.experts))
            for layer in facts.layers
        )
        return replace(facts, layers=layers, size=facts.size * 100_000)

    def test_none_while_it_fits(self, large: ModelFacts) -> None:
        assert memory_warning(large, large.size + GIB) is None

    def test_says_how_many_experts_fit_and_what_a_token_reads(self, large: ModelFacts) -> None:
        half = large.other_bytes + large.expert_bytes // 2
        warning = memory_warning(large, half + GIB)
        assert warning is not None
        assert f"The model has {large.size / GIB:.1f} GiB" in warning
        assert "holds 50% of the experts" in warning
        routed = 2 * 2 * large.layers[0].bytes_per_expert
        assert f"each token reads {routed / GIB:.1f} GiB of experts, about {routed / 2 / GIB:.1f} GiB" in warning

    def test_expects_seconds_when_not_even_the_rest_fits(self, large: ModelFacts) -> None:
        warning = memory_warning(large, GIB)
        assert warning is not None
        assert "Expect seconds per token" in warning

    def test_a_dense_model_reads_what_is_missing(self, large: ModelFacts) -> None:
        dense = replace(large, layers=())
        warning = memory_warning(dense, large.size)
        assert warning is not None
        assert f"about {1.0:.1f} GiB for every token" in warning
