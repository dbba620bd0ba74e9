"""Parked states and shared cells in the real library: the same answers as if nothing had happened."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from daemon.config import Config
from daemon.engine.loading import Loaded
from daemon.engine.loop import Loop
from daemon.engine.roster import Limits
from daemon.engine.sharing import LEAST_SHARED
from daemon.messages import Cancel, Done, Sampling, Scheduling, Submit
from daemon.model_files import load_command
from daemon.native.context import DECODED
from tests.engine_fakes import FakePipe
from tests.minigguf import write_dense

CASES = json.loads((Path(__file__).parents[1] / "vectors" / "greedy.json").read_text("utf-8"))["cases"]
GREEDY = Sampling(temperature=0, ignore_eos=True)
LONG = [token for case in CASES for token in case["prompt"]][:600]
"""More than a ubatch, so that followers wait for several steps."""


@pytest.fixture(scope="module")
def loaded(library_path: Path) -> Iterator[Loaded]:
    command = load_command(Config.model_validate({"engine": {"device": "cpu", "kv_cells": 4096, "ubatch": 256}}))
    with Loaded(command, lambda _: None) as model:
        yield model


class Engine:
    """A loop over the loaded model; what it leaves behind would fail its last snapshot."""

    def __init__(self, loaded: Loaded, max_sequences: int = 4, park_mib: int = 64) -> None:
        info, self.pipe = loaded.info, FakePipe()
        limits = Limits(n_ubatch=256, max_sequences=max_sequences, kv_cells=info.kv_cells, n_ctx=info.n_ctx)
        self.loop = Loop(loaded.context, loaded.vocab, self.pipe, limits, scheduling=Scheduling(park_mib=park_mib))

    def turn(self, *commands: Submit | Cancel, times: int = 1) -> None:
        self.pipe.put(*commands)
        for _ in range(times):
            self.loop.turn()

    def finish(self, *names: str) -> None:
        while any(self.pipe.end(name) is None for name in names):
            self.loop.turn()

    def tokens(self, name: str) -> list[int]:
        return [token for event in self.pipe.events(name) if event.kind == "tokens" for token in event.tokens]

    def done(self, name: str) -> Done:
        end = self.pipe.end(name)
        assert isinstance(end, Done), end
        return end


@pytest.fixture
def engine(loaded: Loaded) -> Iterator[Engine]:
    made = Engine(loaded)
    yield made
    assert made.loop.snapshot().slots == []


def ask(name: str, prompt: list[int], n: int = 24, **more: object) -> Submit:
    return Submit(id=name, prompt=prompt, max_tokens=n, sampling=GREEDY, **more)  # type: ignore[arg-type]


def alone(loaded: Loaded, submit: Submit) -> list[int]:
    engine = Engine(loaded, max_sequences=1)
    engine.turn(submit)
    engine.finish(submit.id)
    return engine.tokens(submit.id)


# -- parking


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=5, repeat_penalty=1.3, repeat_last_n=-1, ignore_eos=True)])
def test_what_was_parked_goes_on_as_if_nothing_had_happened(loaded: Loaded, sampling: Sampling) -> None:
    """The sampler too: its random numbers and what it has seen."""
    slow = ask("slow", LONG[:300], 40, priority="background").model_copy(update={"sampling": sampling})
    undisturbed = alone(loaded, slow)
    engine = Engine(loaded, max_sequences=1)
    engine.turn(slow, times=12)
    engine.turn(ask("now", LONG[300:350], 10, priority="interactive"))
    snapshot = engine.loop.snapshot()
    assert {slot.request: slot.phase for slot in snapshot.slots}["slow"] == "parked"
    assert snapshot.parked_bytes > 300 * loaded.info.kv_bytes_per_token
    engine.finish("slow", "now")
    assert engine.tokens("slow") == undisturbed
    assert engine.loop.snapshot().prompt_tokens == 350, "nothing is computed again"


def test_a_prompt_that_was_parked_in_the_middle_goes_on(loaded: Loaded) -> None:
    slow = ask("slow", LONG, 20, priority="background")
    undisturbed = alone(loaded, slow)
    engine = Engine(loaded, max_sequences=1)
    engine.turn(slow)
    engine.turn(ask("now", LONG[:40], 5, priority="interactive"))
    engine.finish("slow", "now")
    assert engine.tokens("slow") == undisturbed
    assert engine.loop.snapshot().prompt_tokens == len(LONG) + 40


def test_without_room_in_ram_it_is_computed_again(loaded: Loaded) -> None:
    slow = ask("slow", LONG[:300], 30, priority="background")
    engine = Engine(loaded, max_sequences=1, park_mib=0)
    engine.turn(slow, times=8)
    engine.turn(ask("now", LONG[300:350], 5, priority="interactive"))
    engine.finish("slow", "now")
    assert engine.done("slow").n_predicted == 30
    assert engine.loop.snapshot().prompt_tokens > 350


def test_a_state_that_is_no_state_is_refused(loaded: Loaded) -> None:
    context = loaded.context
    assert context.decode([(token, at, 0, False) for at, token in enumerate(LONG[:20])]) == DECODED
    state = context.save(0)
    assert state is not None
    context.remove(0)
    assert not context.restore(0, bytearray(state[: len(state) // 2]))
    context.remove(0)
    assert not context.restore(0, bytearray(len(state)))
    context.remove(0)
    assert context.restore(0, state)
    assert context.last_position(0) == 19
    context.remove(0)
    assert context.last_position(0) == -1


# -- common beginnings


def test_two_identical_prompts_are_computed_once(engine: Engine, loaded: Loaded) -> None:
    prompt = (LONG * 4)[:2000]
    engine.turn(ask("a", prompt, 8), ask("b", prompt, 8))
    engine.finish("a", "b")
    assert engine.loop.snapshot().prompt_tokens == 2001
    assert (engine.done("a").n_cached, engine.done("b").n_cached) == (0, 1999)
    assert engine.tokens("a") == engine.tokens("b") == alone(loaded, ask("c", prompt, 8))


def test_a_follower_answers_as_alone_with_its_prompt_split_where_it_was_shared(loaded: Loaded) -> None:
    """Bit by bit: shared cells hold what the same pieces would have put into its own."""
    context, shared, n_prompt = loaded.context, 300, 340
    prompt = LONG[:n_prompt]

    def compute(seq_id: int, begin: int, end: int) -> None:
        rows = [(prompt[at], at, seq_id, at == n_prompt - 1) for at in range(begin, end)]
        assert context.decode(rows) == DECODED

    def logits(seq_id: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        compute(seq_id, shared, n_prompt)
        return context.logits(n_prompt - shared - 1).copy()

    compute(0, 0, 256)
    compute(0, 256, shared)
    context.share(0, 1, shared)
    assert context.last_position(1) == shared - 1
    follower = logits(1)
    context.remove(1)
    own = logits(0)
    context.remove(0)
    np.testing.assert_array_equal(follower, own)


def test_cells_outlive_the_leader_and_a_parked_follower_takes_all_of_them_along(loaded: Loaded) -> None:
    context = loaded.context
    assert context.decode([(token, at, 0, False) for at, token in enumerate(LONG[:100])]) == DECODED
    context.share(0, 1, 80)
    context.remove(0)
    assert (context.last_position(0), context.last_position(1)) == (-1, 79)
    state = context.save(1)
    assert state is not None
    context.remove(1)
    assert context.restore(2, state)
    assert context.last_position(2) == 79
    context.remove(2)


def test_followers_share_with_each_other_and_go_on_without_a_leader(engine: Engine, loaded: Loaded) -> None:
    ends = {"b": [11, 12, 13], "c": [14]}
    engine.turn(ask("a", LONG, 8), *(ask(name, LONG[:500] + end, 8) for name, end in ends.items()))
    assert {slot.phase for slot in engine.loop.snapshot().slots if slot.request != "a"} == {"following"}
    engine.turn(Cancel(id="a"))
    engine.finish("b", "c")
    assert engine.done("a").finish_reason == "cancelled"
    assert engine.done("c").n_cached == 500 or engine.done("b").n_cached == 500
    for name, end in ends.items():
        assert engine.tokens(name) == alone(loaded, ask(name, LONG[:500] + end, 8))


def test_less_than_is_worth_it_is_not_shared(engine: Engine) -> None:
    prompt = LONG[:LEAST_SHARED]
    engine.turn(ask("a", prompt, 3), ask("b", prompt, 3))
    engine.finish("a", "b")
    assert engine.done("b").n_cached == 0


# -- which memories can share


def test_plain_cells_can_be_shared(loaded: Loaded, tmp_path: Path) -> None:
    assert loaded.context.can_share
    path = write_dense(tmp_path / "dense.gguf")
    command = load_command(Config.model_validate({"model": {"path": str(path)}, "engine": {"device": "cpu"}}))
    with Loaded(command, lambda _: None) as model:
        assert model.context.can_share


@pytest.mark.parametrize("fact", ["recurrent or hybrid", "window", "no shift"])
def test_other_memories_cannot(loaded: Loaded, fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context = loaded.context
    name = {"recurrent or hybrid": "llama_model_is_hybrid", "window": "llama_model_n_swa"}.get(fact)
    if name:
        monkeypatch.setattr(context._lib, name, lambda _: 1)
    else:
        monkeypatch.setattr(context._lib, "llama_memory_can_shift", lambda _: ctypes.c_bool(False).value)
    assert not context.can_share
