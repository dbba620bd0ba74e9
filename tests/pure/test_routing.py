"""Generated routing: streams are reproducible and stay where they should, and are as local as the published figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from hotset_tools.bench import moe_models
from hotset_tools.bench.routing_facts import (
    RoutingFacts,
    describe,
    distinct_curve,
    hit_curve,
    popular,
    recent_hits,
    repeats,
    static_hits,
)
from hotset_tools.bench.walks import Walks
from hotset_tools.random_weights import encode
from hotset_tools.routing import KINDS, PREFIX, Embeddings, Routing, from_metadata, make_routing, positions, stream
from tests import minigguf

WIDTH, N_EXPERT, TOP_K, N_IDS = 128, 128, 8, 12_000


def picks(embeddings: np.ndarray, tokens: list[int], routers: np.ndarray) -> np.ndarray:
    """What random routers choose, bool [layers, n_tokens, n_expert]."""
    logits = embeddings[tokens] @ routers
    chosen = np.argpartition(-logits, TOP_K, axis=-1)[..., :TOP_K]
    picked = np.zeros(logits.shape, bool)
    np.put_along_axis(picked, chosen, True, axis=-1)
    return picked


@pytest.fixture(scope="module")
def measured() -> dict[str, RoutingFacts]:
    """The facts of each kind with six random routers."""
    facts = {}
    for kind in KINDS:
        routing = make_routing(kind, N_IDS, 3)
        embeddings = np.concatenate(list(Embeddings(routing, WIDTH).rows(N_IDS)))
        routers = np.random.default_rng(1).standard_normal((6, WIDTH, N_EXPERT)).astype(np.float32)
        learned = picks(embeddings, stream(routing, 3000, 1, "learn"), routers).sum(axis=1)
        facts[kind] = describe(picks(embeddings, stream(routing, 900, 1), routers), learned)
    return facts


def test_local_routing_is_as_published(measured: dict[str, RoutingFacts]) -> None:
    facts = measured["local"]
    assert facts.repeat_next == pytest.approx(0.45, abs=0.04)
    assert facts.repeat_within_8 == pytest.approx(0.80, abs=0.04)
    assert facts.recent[1] == pytest.approx(0.90, abs=0.03)
    assert facts.static == pytest.approx((0.48, 0.70, 0.75, 0.91), abs=0.06)


def test_topics_are_as_local(measured: dict[str, RoutingFacts]) -> None:
    assert measured["topics"].repeat_next == pytest.approx(0.45, abs=0.04)
    assert measured["topics"].recent[1] == pytest.approx(0.90, abs=0.03)


def test_a_list_learned_on_one_topic_covers_another_one_poorly() -> None:
    routing = make_routing("topics", N_IDS, 3)
    embeddings = np.concatenate(list(Embeddings(routing, WIDTH).rows(N_IDS)))
    routers = np.random.default_rng(1).standard_normal((4, WIDTH, N_EXPERT)).astype(np.float32)
    size = N_IDS // routing.n_topics
    heat = [
        picks(embeddings, list(range(start, start + size // 2)), routers).sum(axis=1)
        for topic in range(routing.n_topics)
        for start in (size * topic, size * topic + size // 2)
    ]
    rates: dict[bool, list[float]] = {True: [], False: []}  # by whether it is the same topic
    for a, learned in enumerate(heat):
        for b, counts in enumerate(heat):
            if a != b:
                hits = [static_hits(one, other, 0.25) for one, other in zip(counts, learned, strict=True)]
                rates[a // 2 == b // 2].append(float(np.mean(hits)))
    assert np.mean(rates[True]) > np.mean(rates[False]) + 0.1


def test_uniform_routing_has_no_structure(measured: dict[str, RoutingFacts]) -> None:
    facts = measured["uniform"]
    assert facts.repeat_next == pytest.approx(TOP_K / N_EXPERT, abs=0.02)
    assert facts.static == pytest.approx((0.25, 0.40, 0.50, 0.75), abs=0.08)  # routers this narrow differ in length
    assert facts.recent == pytest.approx((0.25, 0.40, 0.50, 0.75), abs=0.08)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_are_reproducible_and_their_parts_disjoint(kind: str) -> None:
    routing = make_routing(kind, N_IDS, 3)
    one = stream(routing, 3000, 5)
    assert one == stream(routing, 3000, 5)
    assert one != stream(routing, 3000, 6)
    assert len(one) == 3000
    assert not set(one) & set(stream(routing, 3000, 5, "learn"))
    assert 0 <= min(one) <= max(one) < N_IDS


def test_topics_change_every_few_hundred_tokens() -> None:
    routing = make_routing("topics", N_IDS, 3)
    topics = np.array(stream(routing, 6000, 1)) * routing.n_topics // routing.n_ids
    changes = np.flatnonzero(np.diff(topics)) + 1
    stays = np.diff(changes)
    assert len(set(topics.tolist())) >= 4
    assert routing.dwell // 2 <= stays.min() <= stays.max() < routing.dwell * 3 // 2


def test_embeddings_have_the_wanted_parts() -> None:
    routing = make_routing("topics", N_IDS, 3)
    rows = np.concatenate(list(Embeddings(routing, WIDTH).rows(N_IDS + 3)))
    assert rows.shape == (N_IDS + 3, WIDTH)
    assert rows.dtype == np.float32
    assert rows.var() == pytest.approx(1, rel=0.25)
    assert positions(routing).var(axis=0).mean() == pytest.approx(routing.latent + routing.topic, rel=0.4)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_given_values_are_encoded(kind: str) -> None:
    values = np.random.default_rng(1).standard_normal((40, 64), dtype=np.float32)
    values[3] = 0
    back = dequantize(encode(kind, values), GGMLQuantizationType[kind])
    assert np.abs(back - values).max() < {"F32": 1e-9, "F16": 3e-3, "Q8_0": 0.03}[kind]


def test_given_values_cannot_be_encoded_as_everything() -> None:
    with pytest.raises(ValueError, match="Q4_K"):
        encode("Q4_K", np.zeros((1, 256), np.float32))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="there are local, uniform, topics"):
        make_routing("chaos", 100, 1)


def test_metadata_are_complete_or_an_error() -> None:
    routing = make_routing("local", N_IDS, 3)
    stored = routing.as_metadata()
    assert from_metadata(stored | {"general.name": "x"}) == routing
    assert from_metadata({"general.name": "x"}) is None
    del stored[PREFIX + "n_ids"]
    with pytest.raises(ValueError, match="n_ids"):
        from_metadata(stored)


class TestModels:
    """`hotset bench make-model`."""

    def test_a_model_says_how_its_stream_walks(self, tmp_path: Path) -> None:
        path, _ = moe_models.make(tmp_path / "a.gguf", "overhead", "Q8_0", "topics", 7, n_layer=1, n_vocab=900)
        assert moe_models.routing_of(path) == replace(make_routing("topics", 897, 7))
        assert Walks(path, 900, 1).kind == "topics"
        assert max(max(step) for step in Walks(path, 900, 1).steps(50, 3, 0)) < 897

    def test_layers_share_their_data_but_not_their_routers(self, tmp_path: Path) -> None:
        path, _ = moe_models.make(tmp_path / "a.gguf", "overhead", "Q8_0", "local", 7, n_layer=2, n_vocab=900)
        file = minigguf.take_apart(path)
        first, second = (
            {name: file.tensor(f"blk.{layer}.{name}.weight").data for name in ("ffn_up_exps", "ffn_gate_inp")}
            for layer in (0, 1)
        )
        assert first["ffn_up_exps"] == second["ffn_up_exps"]
        assert first["ffn_gate_inp"] != second["ffn_gate_inp"]

    def test_a_model_in_the_cache_is_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOTSET_CACHE", str(tmp_path))
        path, seconds = moe_models.make(None, "overhead", "Q8_0", "local", 1, n_layer=1, n_vocab=900)
        again, none = moe_models.make(None, "overhead", "Q8_0", "local", 1, n_layer=1, n_vocab=900)
        assert (path, seconds > 0, none) == (again, True, 0.0)
        assert path.parent == tmp_path / "models"
        other, _ = moe_models.make(None, "overhead", "Q8_0", "local", 1, n_layer=2, n_vocab=900)
        assert other != path

    def test_an_unknown_quant_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="'Q9'"):
            moe_models.make(tmp_path / "a.gguf", "overhead", "Q9", "local", 1)

    def test_other_models_get_random_tokens(self, tmp_path: Path) -> None:
        walks = Walks(minigguf.write_moe(tmp_path / "a.gguf"), 400, 1)
        assert walks.kind == "random ids"
        assert walks.tokens(50, 1) == walks.tokens(50, 1) != walks.tokens(50, 1, "learn")
        assert max(walks.tokens(500, 1)) < 400


class TestFacts:
    """Statistics on picks that can be counted by hand: one pick a token, experts 0 1 0 2 2 1."""

    picked = np.eye(4, dtype=bool)[[0, 1, 0, 2, 2, 1]]

    def test_repeats(self) -> None:
        assert repeats(self.picked, 1) == pytest.approx(1 / 5)
        assert repeats(self.picked, 2) == pytest.approx(2 / 4)

    def test_recent(self) -> None:
        # From the second token on, with two experts resident: 1 miss, 0 hit, 2 miss, 2 hit, 1 miss.
        assert recent_hits(self.picked, 0.5) == pytest.approx(2 / 5)

    def test_static(self) -> None:
        counts = self.picked.sum(axis=0)
        assert popular(counts) == [0, 1, 2, 3]
        assert static_hits(counts, np.array([0, 0, 5, 1]), 0.5) == pytest.approx(2 / 6)

    def test_curves(self) -> None:
        assert hit_curve(np.array([1, 3]), np.array([1, 1])) == (0.0, 0.5, 1.0)
        assert hit_curve(np.array([1, 3]), np.array([0, 0])) == (0.0, 0.0, 1.0)
        trace = np.array([[3, 0, 1], [1, 0, 0]], np.uint8)
        assert distinct_curve(trace, [0, 1, 2]) == pytest.approx((0.0, 2 / 3, 2 / 3, 1.0))


def test_routing_shares_sum_to_one() -> None:
    assert Routing("local", 10, 1, common=0.2, latent=0.5).noise == pytest.approx(0.3)
