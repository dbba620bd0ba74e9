"""A warm start: an engine begins where the last one stopped, with any budget, unless its placement is frozen.

The embedded model, with a CPU behind the RPC backend as the device, and texts that it was trained on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.config import Config
from daemon.engine.loading import Loaded
from daemon.engine.loop import Loop
from daemon.engine.residency import Experts
from daemon.engine.roster import Limits
from daemon.hotset.learned import Learned, decode
from daemon.messages import Done, Sampling, Submit
from daemon.model_files import EMBEDDED_MODEL, load_command
from tests.engine_fakes import FakePipe
from tests.native.test_engine_residency import write_hot_set
from tests.residency_bench import rpc_server

N_LAYER, N_EXPERT = 6, 32
DOMAINS = ("fiction", "python", "lang_zh", "chat", "c", "scripture")
N_FIRST = 64


@pytest.fixture(scope="module")
def servers(library_path: Path) -> Iterator[list[str]]:
    with rpc_server(library_path) as first, rpc_server(library_path) as second:
        yield [first.device, second.device]


@pytest.fixture(scope="module")
def server(servers: list[str]) -> str:
    return servers[0]


class Engine:
    """One life of an engine; `prompts` are tokens of a text, far from each other."""

    def __init__(self, made: Loaded) -> None:
        self.made = made
        assert isinstance(made.experts, Experts)
        self.experts = made.experts
        self._n = 0

    def seeded(self) -> Engine:
        deadline = time.monotonic() + 60
        while not self.experts.mover.seeded:
            assert time.monotonic() < deadline
            self.loop(FakePipe()).turn()
        return self

    def loop(self, pipe: FakePipe) -> Loop:
        limits = Limits(n_ubatch=512, max_sequences=8, kv_cells=1024, n_ctx=1024)
        eog = tuple(sorted(self.made.vocab.eog))
        return Loop(self.made.context, self.made.vocab, pipe, limits, residency=self.experts, eog=eog)

    def prompts(self, domain: str, n: int = 5) -> list[list[int]]:
        text = (EMBEDDED_MODEL.parent / "prompts" / f"{domain}.txt").read_text("utf-8")
        tokens = self.made.vocab.tokenize(text, add_special=False, parse_special=False)
        return [tokens[start : start + 64] for start in range(0, len(tokens) - 64, len(tokens) // n)]

    def answer(self, prompt: Sequence[int], n: int = N_FIRST) -> tuple[int, int]:
        """Hits and selections of the `n` tokens that are decoded after the first, which comes of the prompt."""
        pipe = FakePipe()
        loop = self.loop(pipe)
        sampling = Sampling(temperature=0.8, seed=1, ignore_eos=True)
        pipe.put(Submit(id="a", prompt=list(prompt), max_tokens=n + 1, sampling=sampling))
        while (end := pipe.end("a")) is None:
            loop.turn()
        assert isinstance(end, Done)
        assert end.expert_selections == n * N_LAYER * 4
        return end.expert_hits, end.expert_selections

    def resident(self) -> list[set[int]]:
        return [set(self.experts.residency.resident(layer)) - {-1} for layer in range(N_LAYER)]


@contextmanager
def engine(device: str, state: Path | None, **residency: Any) -> Iterator[Engine]:
    values = {"engine": {"device": device, "threads": 1, "kv_cells": 1024}, "residency": residency | {"reserve": 0}}
    with Loaded(load_command(Config.model_validate(values)), lambda _: None, state) as made:
        made.experts.start()
        yield Engine(made)


def taught(device: str, state: Path, domain: str = "fiction", **residency: Any) -> Learned:
    """Let an engine learn from a text; what it left."""
    with engine(device, state, **residency) as first:
        for prompt in first.prompts(domain)[:2]:
            first.answer(prompt)
    return left(state)


def left(state: Path) -> Learned:
    (path,) = state.iterdir()
    return decode(path.name, path.read_bytes())


def had_slots(learned: Learned) -> list[set[int]]:
    return [set(np.flatnonzero(learned.resident[at])) for _, at in learned.layers()]


def share(pairs: Sequence[tuple[int, int]]) -> float:
    hits, selections = (sum(each) for each in zip(*pairs, strict=True))
    return hits / selections


@pytest.mark.parametrize("vram", ["25%", "50%"])
def test_the_hit_rate_of_before_comes_back_for_another_prompt(server: str, tmp_path: Path, vram: str) -> None:
    before, warm, cold = [], [], []
    for domain in DOMAINS:
        with engine(server, tmp_path / domain, vram=vram) as first:
            prompts = first.prompts(domain)
            first.answer(prompts[0], 192)
            before += [first.answer(prompt) for prompt in prompts[1:3]]
        with engine(server, tmp_path / domain, vram=vram) as second:
            warm.append(second.seeded().answer(prompts[3]))
        with engine(server, None, vram=vram) as third:
            cold.append(third.seeded().answer(prompts[3]))
    assert share(warm) >= 0.9 * share(before)
    assert share(warm) > share(cold)


def test_the_same_experts_are_back_before_the_first_token(server: str, tmp_path: Path) -> None:
    known = taught(server, tmp_path, vram="25%")
    assert {len(experts) for experts in had_slots(known)} == {N_EXPERT // 4}
    with engine(server, tmp_path, vram="25%") as second:
        before = second.experts.status()
        assert (before.remembered.start, before.moves, before.remembered.saved) == ("warm", 0, "")
        assert f"{known.header.tokens:,} tokens until {known.header.saved}" in before.remembered.reason
        assert second.seeded().resident() == had_slots(known)
        assert second.experts.mover.controller.n_ranked == known.header.ranked == 2 * N_FIRST
        second.answer(second.prompts("fiction")[2])
        assert second.experts.mover.controller.n_moves > 0, "they go on following"
    assert left(tmp_path).header.tokens == 3 * N_FIRST


def test_an_engine_that_decodes_nothing_leaves_the_file_alone(server: str, tmp_path: Path) -> None:
    known = taught(server, tmp_path, vram="25%")
    with engine(server, tmp_path, vram="25%") as second:
        second.seeded()
    assert left(tmp_path).header == known.header


@pytest.mark.parametrize(("vram", "slots"), [("12.5%", 4), ("50%", 16), ("100%", 32)])
def test_with_another_budget_the_best_come_first(server: str, tmp_path: Path, vram: str, slots: int) -> None:
    known = taught(server, tmp_path, vram="25%")
    with engine(server, tmp_path, vram=vram) as second:
        wanted = [set(experts[:slots]) for experts in known.order().values()]
        assert [set(experts) for experts in second.experts.mover.seeds.values()] == wanted
        both = zip(second.seeded().resident(), wanted, strict=True)
        assert all(resident == experts if slots < N_EXPERT else resident >= experts for resident, experts in both)


def test_on_other_devices(servers: list[str], tmp_path: Path) -> None:
    known = taught(servers[0], tmp_path, vram="25%")
    with engine(",".join(servers), tmp_path, vram="25%") as second:
        assert second.seeded().resident() == had_slots(known)
        assert len({layer.device for layer in second.experts.status().layers}) == 2


def test_the_hot_set_fills_what_was_not_learned_and_rules_where_it_is_frozen(server: str, tmp_path: Path) -> None:
    hot = str(write_hot_set(tmp_path / "hot.json", EMBEDDED_MODEL, N_LAYER))
    state = tmp_path / "state"
    known = taught(server, state, vram="12.5%")
    listed = [*range(0, 16, 2), *range(1, 16, 2)]
    with engine(server, state, vram="75%", hot_set=hot) as second:
        for resident, first in zip(second.seeded().resident(), known.order().values(), strict=True):
            assert resident == set(list(dict.fromkeys([*first, *listed]))[:24])
    with engine(server, state, vram="half", hot_set=hot, frozen=True) as third:
        assert third.seeded().resident() == [set(range(0, 16, 2))] * N_LAYER
        assert third.experts.status().remembered.start == "cold"
        assert third.experts.status().remembered.reason.endswith("residency.frozen is true, so the hot set rules")


def test_nothing_is_read_or_written_where_that_is_not_wanted(server: str, tmp_path: Path) -> None:
    taught(server, tmp_path, vram="25%")
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    with engine(server, tmp_path, vram="25%", remember=False) as second:
        assert second.experts.status().remembered.reason == "residency.remember is false"
        second.seeded().answer(second.prompts("chat")[0])
    assert path.read_bytes() == before


def test_a_damaged_file_is_no_obstacle(server: str, tmp_path: Path) -> None:
    taught(server, tmp_path, vram="25%")
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with engine(server, tmp_path, vram="25%") as second:
        assert second.experts.status().remembered.start == "cold"
        assert "checksum is wrong" in second.experts.status().remembered.fault
        assert second.seeded().resident() == [set()] * N_LAYER
        second.answer(second.prompts("fiction")[0])
    assert left(tmp_path).header.tokens == N_FIRST
