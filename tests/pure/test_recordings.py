"""The service's side of a recording, over an engine that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from pydantic import BaseModel

from daemon import recording
from daemon.messages import ModelInfo, Record, Recorded, Recording, RecordingScope, RoutedLayer
from daemon.recording import Recordings
from tests.fakes import Signal, make_fakes

SCOPE = RecordingScope(top_k=1, layers=[RoutedLayer(layer=0, set=0, experts=8)])
PART = Recorded(number=1, answers=[5], ids="AA==")


class Engine:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.capacity, self.reason = 4, ""
        self.info: ModelInfo | None = make_fakes().services.supervisor.info
        self.told: list[BaseModel] = []
        self.signal = Signal()

    def send(self, command: BaseModel) -> None:
        self.told.append(command)
        self.signal.notify()


class Reader:
    """Who records: what was said, how much of it may be, and the wish to leave."""

    def __init__(self, patience: int = 1000) -> None:
        self.lines: list[BaseModel] = []
        self.left = asyncio.Event()
        self.signal = Signal()
        self._patience = patience

    def say(self, line: BaseModel) -> bool:
        self.lines.append(line)
        self.signal.notify()
        return len(self.lines) <= self._patience

    @property
    def end(self) -> str | None:
        last = self.lines[-1]
        assert isinstance(last, Recorded)
        return last.ended


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def recordings(engine: Engine) -> Recordings:
    return Recordings(engine)


@asynccontextmanager
async def recorded(recordings: Recordings, reader: Reader) -> AsyncIterator[asyncio.Task[None]]:
    """A recording that has been ordered of the engine."""
    task = asyncio.create_task(recordings.record(reader.say, reader.left.wait))
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        yield task
        await task


async def test_parts_are_handed_on_from_the_first_to_the_last(engine: Engine, recordings: Recordings) -> None:
    reader = Reader()
    async with recorded(recordings, reader):
        assert engine.told == [Record(number=1)]
        recordings.deliver(Recorded(number=1, scope=SCOPE))
        recordings.deliver(PART)
        reader.left.set()
        await engine.signal.wait_for(lambda: len(engine.told) == 2)
        assert engine.told[1] == Record(number=1, wanted=False)
        last = PART.model_copy(update={"ended": ""})
        recordings.deliver(last)
    info = engine.info
    assert info is not None
    begun = Recording(fingerprint=info.fingerprint, name=info.name, architecture=info.architecture, scope=SCOPE)
    assert reader.lines == [begun, PART, last]
    recordings.deliver(PART)
    recordings.engine_lost("too late")
    assert len(reader.lines) == 3


async def test_a_first_part_may_have_tokens(recordings: Recordings) -> None:
    reader = Reader()
    async with recorded(recordings, reader):
        recordings.deliver(PART.model_copy(update={"scope": SCOPE, "ended": "switched off"}))
    assert isinstance(reader.lines[0], Recording)
    assert reader.lines[1] == PART.model_copy(update={"ended": "switched off"})


async def test_an_engine_that_refuses(engine: Engine, recordings: Recordings) -> None:
    reader = Reader()
    async with recorded(recordings, reader):
        recordings.deliver(Recorded(number=1, ended="not applicable: a dense model has no experts to place"))
    assert [type(line) for line in reader.lines] == [Recorded]
    assert reader.end == "not applicable: a dense model has no experts to place"


async def test_no_engine_no_recording(engine: Engine, recordings: Recordings) -> None:
    engine.capacity, engine.reason = 0, "the model is being loaded"
    reader = Reader()
    await recordings.record(reader.say, reader.left.wait)
    assert reader.end == "no engine is ready: the model is being loaded"
    assert engine.told == []


async def test_only_one_at_a_time(engine: Engine, recordings: Recordings) -> None:
    first, second, third = Reader(), Reader(), Reader()
    async with recorded(recordings, first):
        await recordings.record(second.say, second.left.wait)
        assert second.end == "somebody records already"
        assert engine.told == [Record(number=1)]
        recordings.engine_lost("killed by SIGKILL")
    assert first.end == "the engine ended: killed by SIGKILL"
    async with recorded(recordings, third):
        recordings.deliver(PART)
        assert third.lines == []
        recordings.deliver(Recorded(number=2, scope=SCOPE, ended=""))
    assert len(third.lines) == 2


async def test_who_reads_too_slowly_ends_it(engine: Engine, recordings: Recordings) -> None:
    reader = Reader(patience=2)
    async with recorded(recordings, reader):
        recordings.deliver(Recorded(number=1, scope=SCOPE))
        for _ in range(5):
            recordings.deliver(PART)
    assert reader.lines[1:3] == [PART, PART]
    assert len(reader.lines) == 4
    assert reader.end == "who records reads too slowly"
    assert engine.told[-1] == Record(number=1, wanted=False)


async def test_an_engine_that_sends_no_end_is_not_waited_for(
    recordings: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "FLUSH_SECONDS", 0.01)
    reader = Reader()
    async with recorded(recordings, reader):
        reader.left.set()
    assert reader.end == ""


async def test_who_waits_hears_that_it_goes_on(recordings: Recordings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "HEARTBEAT_SECONDS", 0.001)
    reader = Reader()
    async with recorded(recordings, reader):
        await reader.signal.wait_for(lambda: len(reader.lines) == 3)
        recordings.engine_lost("gone")
    assert reader.lines[0] == Recorded(number=1)


async def test_a_service_that_stops_says_so(engine: Engine, recordings: Recordings) -> None:
    reader = Reader()
    task = asyncio.create_task(recordings.record(reader.say, reader.left.wait))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reader.end == "the service is stopping"
    assert engine.told[-1] == Record(number=1, wanted=False)


async def test_a_connection_that_breaks_ends_it(engine: Engine, recordings: Recordings) -> None:
    async def broken() -> None:
        raise ConnectionResetError

    reader = Reader()
    task = asyncio.create_task(recordings.record(reader.say, broken))
    await engine.signal.wait_for(lambda: len(engine.told) == 2)
    recordings.deliver(Recorded(number=1, ended=""))
    await task
    assert reader.end == ""
