"""Every architecture with experts in the real library: tiny models that load, route over their experts, and decode."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.errors import ModelUnusable
from daemon.native import pin
from daemon.native.gguf_check import check
from daemon.native.gguf_facts import LayerFacts, ModelFacts
from daemon.native.gguf_rules import HEADS_LIKE_EMBEDDING, UNIFORM_HEADS, VALUES_LIKE_KEYS
from hotset_tools import source
from tests.miniarch.blocks import KINDS, QUANTS
from tests.miniarch.keys import N_EMBD, N_FF, N_USED, Keys
from tests.miniarch.run import Report, decode_all
from tests.miniarch.source_scan import architectures_with_experts
from tests.miniarch.table import LEFT_OUT, MINIS, Mini, all_of
from tests.miniarch.writer import write_minis

SMALL_HEADS: Keys = {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32}
HALF_ROTATED: Keys = {"rope.dimension_count": 32}
HALF_VALUES: Keys = {"attention.value_length": 32}
SHARED_KEYS: Keys = {"attention.head_count_kv": 2}

QUANT_CASES = {
    f"{name}-{kind}": replace(MINIS[name], quants=all_of(kind))
    for name in ("qwen3moe", "gpt-oss", "deepseek2-fused")
    for kind in KINDS
}


def _with_other_heads(mini: Mini) -> Mini:
    """The model with the smallest heads that its architecture is known to bear."""
    keys: Keys = {}
    if mini.architecture not in HEADS_LIKE_EMBEDDING:
        keys |= SMALL_HEADS
    if mini.architecture not in UNIFORM_HEADS | {"llama"}:
        keys |= {"rope.dimension_count": 16}
    if mini.architecture not in VALUES_LIKE_KEYS:
        keys |= {"attention.value_length": 16}
    return replace(mini, keys=mini.keys | keys)


HEAD_CASES = {
    name: _with_other_heads(mini)
    for name, mini in MINIS.items()
    if name == mini.architecture and not {"attention.kv_lora_rank", "hyper_connection.count"} & mini.keys.keys()
}

FATAL: dict[str, tuple[str, Keys]] = {
    # what a model that is else in order would end the process with
    "rotation of half of a head": ("mistral3", HALF_ROTATED),
    "values of other size than keys": ("glm4moe", HALF_VALUES),
    "heads that are not as wide as the embedding": ("jamba", SMALL_HEADS),
    "heads that share keys": ("olmoe", SHARED_KEYS),
}


@dataclass(frozen=True)
class Result:
    """What the checker and the library say of one model."""

    facts: ModelFacts
    report: Report


def results(minis: Mapping[str, Mini], library: Path, **seeds: int) -> dict[str, Result]:
    """All models written, checked and decoded; the files are gone afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        paths = write_minis(Path(directory), minis, library, **seeds)
        facts = {name: check(path).facts for name, path in paths.items()}
        reports = decode_all(paths.values(), library)
        return {name: Result(facts[name], reports[path]) for name, path in paths.items()}


@pytest.fixture(scope="module")
def minis(library_path: Path) -> dict[str, Result]:
    return results(MINIS, library_path)


@pytest.fixture(scope="module")
def quants(library_path: Path) -> dict[str, Result]:
    return results(QUANT_CASES, library_path)


@pytest.fixture(scope="module")
def other_experts(library_path: Path) -> dict[str, Result]:
    return results(MINIS, library_path, expert_seed=2)


@pytest.fixture(scope="module")
def other_heads(library_path: Path) -> dict[str, Result]:
    return results(HEAD_CASES, library_path)


def assert_decodes(result: Result) -> None:
    report = result.report
    assert not {"died", "error"} & report.keys(), report
    assert report["finite"]
    assert report["equal"]
    assert 0.5 < report["spread"] < 10


def assert_routes_widely(result: Result) -> None:
    """Every layer with experts was seen, but for those of prediction, and at least half of its experts were used."""
    used = {int(layer): experts for layer, experts in result.report["used"].items()}
    layers = [layer for layer in result.facts.layers if layer.experts and layer.kind != "prediction"]
    assert sorted(used) == [layer.index for layer in layers]
    for layer in layers:
        assert set(used[layer.index]) <= set(range(result.facts.n_expert))
        assert len(used[layer.index]) >= result.facts.n_expert / 2


def expert_bytes(mini: Mini, layer: LayerFacts) -> int:
    """One expert's bytes by the table; smaller tensors (biases, scales, grovemoe's second experts) as they are."""
    gate, up, down = (N_EMBD * N_FF // QUANTS[kind].elements * QUANTS[kind].bytes for kind in mini.quants)
    names = {tensor.name.split(".", 2)[2] for tensor in layer.experts}
    matrices = {
        "ffn_gate_exps.weight": gate,
        "ffn_up_exps.weight": up,
        "ffn_down_exps.weight": down,
        "ffn_gate_up_exps.weight": 2 * gate,
    }
    others = sum(t.bytes_per_expert for t in layer.experts if t.name.split(".", 2)[2] not in matrices)
    return sum(size for name, size in matrices.items() if name in names) + others


def assert_facts(mini: Mini, result: Result) -> None:
    facts = result.facts
    assert facts.architecture == mini.architecture
    assert facts.n_expert == mini.n_expert
    assert facts.n_expert_used == mini.n_expert_used
    layers = [layer for layer in facts.layers if layer.experts]
    assert layers
    for layer in layers:
        assert layer.n_expert == facts.n_expert
        assert layer.bytes_per_expert == expert_bytes(mini, layer)
        fused = any("gate_up" in tensor.name for tensor in layer.experts)
        assert fused == mini.fused
    if "nextn_predict_layers" not in mini.keys:  # which the library leaves out
        assert (result.report["n_params"], result.report["size"]) == (facts.n_params, facts.size)


@pytest.mark.parametrize("name", MINIS)
def test_an_architecture_decodes_and_uses_its_experts(name: str, minis: dict[str, Result]) -> None:
    assert_decodes(minis[name])
    assert_routes_widely(minis[name])


@pytest.mark.parametrize("name", MINIS)
def test_the_checker_knows_its_experts(name: str, minis: dict[str, Result]) -> None:
    assert_facts(MINIS[name], minis[name])


@pytest.mark.parametrize("name", MINIS)
def test_experts_decide_what_it_says(name: str, minis: dict[str, Result], other_experts: dict[str, Result]) -> None:
    """A test of residency on these models would see a wrong expert."""
    logits, others = (np.array(found[name].report["logits"]) for found in (minis, other_experts))
    assert np.std(logits - others) > 0.03 * np.std(logits)


@pytest.mark.parametrize("name", QUANT_CASES)
def test_experts_of_every_type(name: str, quants: dict[str, Result]) -> None:
    assert_decodes(quants[name])
    assert_routes_widely(quants[name])
    assert_facts(QUANT_CASES[name], quants[name])


@pytest.mark.parametrize("name", HEAD_CASES)
def test_the_checker_lets_pass_only_heads_that_the_library_can_multiply(
    name: str, other_heads: dict[str, Result]
) -> None:
    assert_decodes(other_heads[name])


@pytest.mark.parametrize("fault", FATAL)
def test_heads_that_would_end_the_process_are_refused_before(fault: str, library_path: Path, tmp_path: Path) -> None:
    name, keys = FATAL[fault]
    broken = replace(MINIS[name], keys=MINIS[name].keys | keys)
    path = write_minis(tmp_path, {name: broken}, library_path)[name]
    with pytest.raises(ModelUnusable):
        check(path)
    assert "died" in decode_all([path], library_path)[path]


def test_the_same_seed_gives_the_same_file(library_path: Path, tmp_path: Path) -> None:
    chosen = {"qwen3moe": MINIS["qwen3moe"]}

    def written(folder: str, **seeds: int) -> bytes:
        (tmp_path / folder).mkdir()
        return write_minis(tmp_path / folder, chosen, library_path, **seeds)["qwen3moe"].read_bytes()

    assert written("a") == written("b")
    assert written("c", expert_seed=2) != (tmp_path / "a" / "qwen3moe.gguf").read_bytes()


def test_every_architecture_of_the_source_is_covered_or_left_out_for_a_reason(cache_root: Path) -> None:
    sdist = source.cached_sdist(cache_root)
    if sdist is None:
        pytest.skip("the sdist is not in the cache")
    covered = {mini.architecture for mini in MINIS.values()}
    assert not covered & LEFT_OUT.keys()
    assert architectures_with_experts(sdist, pin.upstream().vendored) == covered | LEFT_OUT.keys()


def test_the_table_covers_what_it_must() -> None:
    """The types and forms that residency has to manage."""
    kinds = {kind for mini in MINIS.values() for kind in mini.quants}
    assert kinds == set(KINDS)
    wanted: dict[str, Callable[[Mini], Any]] = {
        "mixed types": lambda mini: len(set(mini.quants)) == 3,
        "fused": lambda mini: mini.fused,
        "leading dense layers": lambda mini: "leading_dense_block_count" in mini.keys,
        "shared experts": lambda mini: "expert_shared_count" in mini.keys,
        "groups": lambda mini: "expert_group_count" in mini.keys,
        "scales": lambda mini: "*_exps.scale" in mini.optional,
        "prediction layers": lambda mini: "nextn_predict_layers" in mini.keys,
        "one expert per token": lambda mini: mini.n_expert_used == 1,
        "more experts per token": lambda mini: mini.n_expert_used > N_USED,
    }
    assert not [what for what, has in wanted.items() if not any(has(mini) for mini in MINIS.values())]
