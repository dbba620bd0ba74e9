"""What chats and prompts leave each other: rates from what an engine said and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.errors import EngineFailed, HotsetError
from daemon.messages import Cancel, Done, Event, Failed, Snapshot, Step, Submit, Tokens
from hotset_tools.bench.share import PROMPTS_IN_LINE, Driver, Load, configured, table
from hotset_tools.bench.walks import Walks

LOAD = Load(n_chats=2, n_prompt=100, seconds=8.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Streams(Walks):
    def __init__(self) -> None:
        self.routing, self._n_vocab, self._seed = None, 50, 1


class FakeEngine:
    """A token for every chat in every tenth of a second, and a prompt read in a second."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.requests, self.sent = clock, dict[str, Submit](), list[Submit]()
        self.cancelled: list[str] = []
        self.next_read = 1.0
        self.computed = self.begun = 0
        self.broken = self.deaf = False

    def send(self, message: Submit | Cancel) -> None:
        if isinstance(message, Submit):
            assert message.id not in self.requests
            self.requests[message.id] = message
            self.sent.append(message)
            self.begun += message.id.startswith("chat")
        elif not self.deaf:
            self.cancelled.append(message.id)

    def receive(self, timeout: float | None) -> list[bytes]:
        assert timeout is not None
        self.clock.now += 0.1
        events: list[Event] = [self.over(one, "cancelled") for one in self.cancelled]
        self.cancelled = []
        chats = [one for one in self.requests if one.startswith("chat")]
        prompts = [one for one in self.requests if one.startswith("prompt")]
        events += [Tokens(id=one, tokens=[1], text="a") for one in chats]
        if self.clock.now >= self.next_read and prompts:
            self.next_read = self.clock.now + 1.0 - 1e-9
            events.append(self.over(prompts[0], "length"))
        if self.broken:
            events.append(Failed(id=chats[0], code="engine_failed", message="no more"))
        self.computed += 10 * bool(prompts) + 64 * self.begun
        self.begun = 0
        snapshot = Snapshot(waiting=0, slots=[], prompt_tokens=round(self.computed))
        return [Step(events=events, snapshot=snapshot).model_dump_json().encode()]

    def over(self, request: str, reason: str) -> Done:
        del self.requests[request]
        return Done(id=request, finish_reason=reason, n_prompt=1, n_cached=0, n_predicted=1, wait_ms=0, prompt_ms=0,
                    predicted_ms=0)  # fmt: skip


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(Clock())


def driver(engine: FakeEngine) -> Driver:
    return Driver(engine, Streams(), LOAD, engine.clock)  # type: ignore[arg-type]


def test_chats_alone(engine: FakeEngine) -> None:
    rates = driver(engine).phase(chats=True, prompts=False)
    assert rates.chats == pytest.approx(20, rel=0.02)
    assert (rates.prompts, rates.n_prompts) == (None, 0)
    assert rates.longest_gap_ms == pytest.approx(100)
    assert len(engine.sent) == LOAD.n_chats
    assert not engine.requests, "all is over at the end"


def test_prompts_are_counted_as_the_engine_reads_them_and_follow_each_other(engine: FakeEngine) -> None:
    rates = driver(engine).phase(chats=False, prompts=True)
    assert rates.prompts == pytest.approx(100, rel=0.02)
    assert rates.chats is None
    assert len(engine.sent) > PROMPTS_IN_LINE + 3, "one that is read is followed by another"
    assert {one.max_tokens for one in engine.sent} == {1}
    assert {len(one.prompt) for one in engine.sent} == {100}
    assert len({tuple(one.prompt) for one in engine.sent}) == len(engine.sent), "nothing can be had from a cache"


def test_both(engine: FakeEngine) -> None:
    rates = driver(engine).phase(chats=True, prompts=True)
    assert rates.chats == pytest.approx(20, rel=0.02)
    assert rates.prompts == pytest.approx(100, rel=0.02)


def test_a_request_that_fails_ends_it(engine: FakeEngine) -> None:
    engine.broken = True
    with pytest.raises(EngineFailed, match="no more"):
        driver(engine).phase(chats=True, prompts=False)


def test_an_engine_that_does_not_cancel_is_not_waited_for_for_ever(engine: FakeEngine) -> None:
    engine.deaf = True
    with pytest.raises(EngineFailed, match="did not end"):
        driver(engine).phase(chats=True, prompts=False)


@pytest.mark.parametrize("wrong", [{"n_chats": 0}, {"n_prompt": 1}, {"seconds": 0.0}])
def test_a_load_that_compares_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(HotsetError, match="needed"):
        Load(**wrong)  # type: ignore[arg-type]


def test_everything_fits_into_the_cells() -> None:
    config = configured(Path("m.gguf"), "cpu", "25%", 3, LOAD)
    assert config.engine.max_sequences == LOAD.n_chats + PROMPTS_IN_LINE
    assert config.engine.kv_cells >= LOAD.n_chats * 448 + PROMPTS_IN_LINE * 101
    assert config.residency.vram == "25%"


def test_table() -> None:
    shares = {"chats": 0.5, "prompts": 0.4}
    said = table({"alone": {"chats": 10, "prompts": 100}, "together": {"chats": 5, "prompts": 40}, "share": shares})
    assert "0.50" in said
    assert "0.40" in said
