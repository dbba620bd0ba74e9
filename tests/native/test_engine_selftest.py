"""The self-test of a loaded engine: what it is made of, and that the real library passes it in between requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from daemon.config import Config
from daemon.engine.loading import Loaded
from daemon.engine.loop import Loop
from daemon.engine.proofs import Proofs
from daemon.engine.roster import Limits
from daemon.model_files import load_command
from tests.engine_fakes import FakePipe
from tests.minigguf import write_moe
from tests.native.test_engine_residency import SIZES, write_hot_set


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("model") / "m.gguf", experts="Q4_K", layers="F32", vocab="F32", **SIZES)


@pytest.fixture
def open_model(model: Path, rpc_device: str, tmp_path: Path) -> Any:
    hot_set = write_hot_set(tmp_path / "hot.json", model)

    def opened(vram: str, context: int = 256) -> Loaded:
        engine = {"device": rpc_device, "threads": 1, "kv_cells": context}
        sections = {"model": {"path": str(model), "context": context}, "engine": engine}
        residency = {"hot_set": str(hot_set), "vram": vram} if vram else {"vram": ""}
        return Loaded(load_command(Config.model_validate(sections | {"residency": residency})), lambda _: None)

    return opened


def test_the_engine_passes_and_counts_nothing(open_model: Any, tmp_path: Path) -> None:
    with open_model("half") as loaded:
        test = loaded.selftest(Proofs(tmp_path))
        loop = Loop(
            loaded.context,
            loaded.vocab,
            FakePipe(),
            Limits(n_ubatch=512, max_sequences=8, kv_cells=256, n_ctx=256),
            residency=loaded.experts,
            idle=test,
        )
        loaded.experts.start()
        while not loaded.experts.filled:
            loop.turn()
        for _ in range(50):
            if test.pending:
                loop.turn()
        status = loop.snapshot().residency
        assert status is not None
        assert (status.selftest, status.state) == ("passed", "on"), status.selftest_detail
        assert {(layer.hits, layer.misses) for layer in status.layers} == {(0, 0)}
        assert sum(int(loaded.experts.counts.by_expert(index).sum()) for index in range(4)) == 0
        assert sum(layer.hits for layer in loaded.experts.residency.layers()) > 0, "the library did count"
        assert loaded.selftest(Proofs(tmp_path)).pending is False, "it is remembered"
        assert loaded.selftest(Proofs(tmp_path / "other")).pending is True


def test_other_settings_ask_for_another_test(open_model: Any) -> None:
    keys = []
    for vram, context in (("half", 256), ("all", 256), ("half", 320), ("half", 256)):
        with open_model(vram, context) as loaded:
            keys.append(loaded.selftest()._key())
    assert keys[0] == keys[3]
    assert len({key.settings for key in keys}) == 3
    assert len({key.model_copy(update={"settings": ""}).model_dump_json() for key in keys}) == 1


def test_without_experts_in_slots_or_cells_for_it_there_is_none(open_model: Any) -> None:
    for vram, context in (("", 256), ("half", 32)):
        with open_model(vram, context) as loaded:
            assert loaded.selftest() is None
