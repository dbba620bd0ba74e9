"""`hotset record --daemon` over the control socket: what it asks for, its words, files and exit codes."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import select
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from daemon import control
from daemon.hotset import trace
from daemon.messages import Recorded, Recording, RecordingScope, RoutedLayer
from hotset_tools import record_live
from hotset_tools.cli import make_app
from hotset_tools.service import NoService
from tests.fakes import Signal

SCOPE = RecordingScope(
    top_k=2, layers=[RoutedLayer(layer=0, set=0, experts=8), RoutedLayer(layer=2, set=0, experts=8)], left_out=[1]
)
BEGUN = Recording(fingerprint="a" * 64, name="some model", architecture="qwen3moe", scope=SCOPE)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory with a short name: the address of a socket holds 107 bytes."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("RUNTIME_DIRECTORY", name)
        yield Path(name)


def part(*answers: int, ended: str | None = None) -> Recorded:
    ids = base64.b64encode(bytes([7, answer % 7, 0, 3][at] for answer in answers for at in range(4))).decode()
    return Recorded(number=1, answers=list(answers), ids=ids, ended=ended)


class Service:
    """Says these lines, waits until who records leaves, says the others."""

    def __init__(self, *lines: BaseModel, last: BaseModel | None = None) -> None:
        self._lines, self._last = lines, last
        self.signal = Signal()
        self.state = ""
        self.fast = True

    async def __call__(self, say: Callable[[BaseModel], bool], leave: Callable[[], Awaitable[object]]) -> None:
        for line in self._lines:
            self.fast = say(line)
        self.become("said")
        if self._last is not None:
            await leave()
            say(self._last)
        self.become("over")

    def become(self, state: str) -> None:
        self.state = state
        self.signal.notify()

    async def reach(self, state: str) -> None:
        async with asyncio.timeout(30):
            await self.signal.wait_for(lambda: self.state == state)


async def unwanted(*_: object) -> None:
    raise AssertionError("nobody ordered that")


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[Service]:
    async with control.listening(unwanted, unwanted, service):  # type: ignore[arg-type]
        yield service


async def start(out: Path, *words: str) -> Process:
    command = ["-m", "hotset_tools.cli", "record", "--daemon", "--out", str(out), *words]
    return await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE, stderr=PIPE)


async def ended(process: Process) -> tuple[int, str, str]:
    async with asyncio.timeout(60):
        out, errors = await process.communicate()
    assert b"Traceback" not in errors
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


async def hotset(service: Service, out: Path, *words: str) -> tuple[int, str, str]:
    async with serving(service):
        return await ended(await start(out, *words))


async def test_answers_are_written_one_after_the_other(run: Path, tmp_path: Path) -> None:
    service = Service(Recorded(number=1), BEGUN, part(40, 41, 40), part(41), part(50, ended="switched off"))
    code, said, errors = await hotset(service, tmp_path / "a.trace")
    assert code == 1, "something else than what was asked for ended it"
    assert errors.splitlines() == [
        "recording 2 layers of some model while it answers; Ctrl-C ends it",
        "left out, because their routing is not read: layers 1",
        "the recording has ended early: switched off",
    ]
    found = trace.read(tmp_path / "a.trace")
    assert said == f"{record_live.summary(tmp_path / 'a.trace', found.header, 'answer')}\n"
    assert "5 tokens of 3 answers, 2 layers, 2 experts each" in said
    header = found.header
    assert (header.model.fingerprint, header.model.name, header.method) == ("a" * 64, "some model", record_live.METHOD)
    assert [(one.layer, one.experts) for one in header.layers] == [(0, 8), (2, 8)]
    assert [name.partition(" of ")[0] for name, _ in found.segments()] == ["answer-1", "answer-2", "answer-3"]
    assert [segment.tokens for segment in header.segments] == [2, 2, 1]
    assert found.ids[:, 0].tolist() == [[answer % 7, 7] for answer in (40, 40, 41, 41, 50)]
    assert found.ids[:, 1].tolist() == [[0, 3]] * 5


async def test_json_is_the_result_alone(run: Path, tmp_path: Path) -> None:
    code, said, errors = await hotset(Service(BEGUN, part(1, ended="a reason")), tmp_path / "a.trace", "--json")
    assert (code, errors) == (1, "")
    result = json.loads(said)
    assert (result["ended"], result["left_out"], result["segments"][0]["tokens"]) == ("a reason", [1], 1)
    assert result["bytes"] == (tmp_path / "a.trace").stat().st_size


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_and_what_is_left_comes_too(number: int, run: Path, tmp_path: Path) -> None:
    async with serving(Service(BEGUN, part(1, 2), last=part(1, ended=""))) as service:
        process = await start(tmp_path / "a.trace")
        assert process.stderr is not None
        await process.stderr.readline()
        process.send_signal(number)
        code, said, _ = await ended(process)
        await service.reach("over")
    assert code == 0
    assert "3 tokens of 2 answers" in said
    assert trace.read(tmp_path / "a.trace").header.n_selections == 12


class Session:
    """Something that signals stop."""

    def __init__(self) -> None:
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True


def test_the_second_signal_does_not_wait_and_one_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    session = Session()
    try:
        with record_live.heeding_signals(session):
            signal.raise_signal(signal.SIGTERM)
            assert not session.stopped
            signal.raise_signal(signal.SIGINT)
            assert session.stopped
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


class Impatient(record_live.Silent):
    """Told to stop twice when the second part has come."""

    n_parts = 0

    def progress(self, text: str) -> None:
        self.n_parts += 1
        if self.n_parts == 2:
            raise KeyboardInterrupt


async def test_what_came_before_the_second_signal_is_written(run: Path, tmp_path: Path) -> None:
    order = record_live.Order(tmp_path / "a.trace")
    async with serving(Service(BEGUN, part(1, 2), part(1), part(3), last=part(4))):
        await asyncio.to_thread(recorded, order, Impatient())
    assert trace.read(order.out).header.shape == (3, 2, 2)


@pytest.mark.parametrize(("words", "n_tokens"), [(["--tokens", "3"], 3), (["--seconds", "0.1"], 4)])
async def test_it_ends_by_itself(words: list[str], n_tokens: int, run: Path, tmp_path: Path) -> None:
    async with serving(Service(BEGUN, part(1, 2, 1, 2), last=part(ended=""))) as service:
        code, _, _ = await ended(await start(tmp_path / "a.trace", *words))
        await service.reach("over")
    assert code == 0
    assert sum(one.tokens for one in trace.read(tmp_path / "a.trace").header.segments) == n_tokens


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([Recorded(number=0, ended="somebody records already")], "hotsetd records nothing now: somebody records"),
        ([], "nothing was recorded: hotsetd went away"),
        ([BEGUN], "nothing was recorded: hotsetd went away"),
        ([BEGUN, part(ended="")], "nothing was recorded: no answer was decoded"),
        ([BEGUN, part(ended="off: closed: it does not pay")], "nothing was recorded: off: closed: it does not pay"),
        ([BEGUN, Recorded(number=1, answers=[1], ids="AA==")], "hotsetd is stuck, or sent what is no recording"),
        ([BEGUN, Recorded(number=1, answers=[1], ids="?")], "hotsetd is stuck, or sent what is no recording"),
        ([SCOPE], "hotsetd is stuck, or sent what is no recording"),
    ],
)
async def test_what_gives_no_trace(lines: list[BaseModel], said: str, run: Path, tmp_path: Path) -> None:
    async with serving(Service(*lines)):
        with pytest.raises(record_live.CannotRecord, match=said):
            await asyncio.to_thread(recorded, record_live.Order(tmp_path / "a.trace"), record_live.Silent())
    assert os.listdir(tmp_path) == []


def recorded(order: record_live.Order, shown: record_live.Shown) -> None:
    """Without heeding signals, which only a main thread may."""
    with record_live.connect(order.pid) as connection:
        session = record_live.Session(connection, order, shown)
        session.run()
        record_live.write(session, order.out, shown)


async def test_what_came_before_the_service_went_away_is_written(run: Path, tmp_path: Path) -> None:
    code, said, errors = await hotset(Service(BEGUN, part(1, 2)), tmp_path / "a.trace")
    assert (code, "2 tokens of 2 answers" in said) == (1, True)
    assert "ended early: hotsetd went away" in errors


async def test_without_a_service_and_with_several(run: Path, tmp_path: Path) -> None:
    with pytest.raises(NoService):
        record_live.record(record_live.Order(tmp_path / "a.trace"))
    async with serving(Service()):
        (run / "2.sock").symlink_to(f"{os.getpid()}.sock")
        with pytest.raises(NoService, match="--pid 2, --pid"):
            record_live.record(record_live.Order(tmp_path / "a.trace"))
        assert "went away" in (await ended(await start(tmp_path / "a.trace", "--pid", "2")))[2]


async def test_what_is_not_read_is_bounded_and_dropped_in_the_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "READ_SECONDS", 0.1)
    big = Recorded(number=1, ids="A" * (1 << 20))
    service = Service(*[big] * (control.MAX_BEHIND >> 20), big)
    async with serving(service):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(control.socket_path(os.getpid())))
            client.sendall(control.RECORD)
            await service.reach("over")
            assert not service.fast
            assert await asyncio.to_thread(dropped, client)


def dropped(client: socket.socket) -> bool:
    """Whether the other end goes away though nothing is read."""
    poll = select.poll()
    poll.register(client, 0)
    return bool(poll.poll(30_000))


def test_only_a_trace_is_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    for out, why in (("a.gguf", "is no trace"), ("none/a.trace", "is no directory"), ("", "is no file")):
        with pytest.raises(record_live.CannotRecord, match=why):
            record_live.record(record_live.Order(tmp_path / out))
    assert (tmp_path / "a.gguf").read_bytes() == b"GGUF"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["m.gguf", "--daemon"], "MODEL"),
        (["--daemon", "--prompts", "x"], "--prompts"),
        (["--daemon", "--device", "auto"], "--device"),
        (["--daemon", "--threads", "0"], "--threads"),
        (["m.gguf", "--pid", "0"], "--pid"),
        (["m.gguf", "--seconds", "3"], "--seconds"),
        (["--daemon", "--seconds", "0"], "--seconds"),
        (["--daemon", "--tokens", "0"], "--tokens"),
        ([], "or --daemon"),
    ],
)
def test_texts_and_a_daemon_exclude_each_other(words: list[str], said: str) -> None:
    result = CliRunner().invoke(make_app("record"), ["record", "--out", "a.trace", *words])
    assert (result.exit_code, said in result.output) == (2, True)


def test_progress_comes_at_intervals_and_never_beside_json(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    shown = record_live.Shown(lambda: now[0])
    for at in (1.0, record_live.SHOW_SECONDS, record_live.SHOW_SECONDS + 1, 2 * record_live.SHOW_SECONDS):
        now[0] = at
        shown.progress(f"at {at:g}")
    assert capsys.readouterr().err.splitlines() == ["at 10", "at 20"]
    silent = record_live.make_shown(json=True)
    silent.say("something")
    silent.progress("something")
    assert capsys.readouterr() == ("", "")
