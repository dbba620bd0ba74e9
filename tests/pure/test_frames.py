"""Frames: any split of the stream gives the same messages; nonsense is refused."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon import frames
from daemon.config import Config
from daemon.engine.__main__ import wait_for_load
from daemon.messages import COMMAND, Adjust, Cancel, ResidencySpec, Sampling, Shutdown, Submit
from daemon.model_files import load_command


@given(st.lists(st.text(max_size=50), max_size=6), st.data())
def test_any_split_gives_the_same_frames(ids: list[str], data: st.DataObject) -> None:
    stream = b"".join(frames.encode(Cancel(id=name)) for name in ids)
    decoder, got = frames.Decoder(), []
    while stream:
        n = data.draw(st.integers(1, len(stream)))
        got += decoder.feed(stream[:n])
        stream = stream[n:]
    assert [COMMAND.validate_json(body) for body in got] == [Cancel(id=name) for name in ids]
    assert decoder.pending == 0


def test_a_submit_survives_the_wire() -> None:
    submit = Submit(
        id="x", prompt=[1, 2], max_tokens=3, sampling=Sampling(logit_bias=((5, -1e30),), seed=2**32 - 1), stop=("\n",)
    )
    (body,) = frames.Decoder().feed(frames.encode(submit))
    assert COMMAND.validate_json(body) == submit


def test_a_length_beyond_the_limit_is_refused() -> None:
    with pytest.raises(frames.FrameError, match="announces"):
        frames.Decoder().feed(struct.pack(">I", frames.MAX_FRAME + 1))


def test_a_message_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 10)
    with pytest.raises(frames.FrameError, match="larger"):
        frames.encode(Cancel(id="too long for ten bytes"))


def test_the_pipe_waits_no_longer_than_asked_and_tells_the_end() -> None:
    ours, theirs = socket.socketpair()
    pipe = frames.Pipe(theirs)
    assert pipe.receive(0) == []
    ours.sendall(frames.encode(Cancel(id="a")) + frames.encode(Cancel(id="b"))[:3])
    assert [COMMAND.validate_json(body) for body in pipe.receive(None)] == [Cancel(id="a")]
    pipe.send(Cancel(id="c"))
    assert COMMAND.validate_json(frames.Decoder().feed(ours.recv(100))[0]) == Cancel(id="c")
    ours.close()
    with pytest.raises(EOFError):
        pipe.receive(None)
    pipe.close()


def test_what_comes_together_with_the_load_is_for_the_loop() -> None:
    ours, theirs = socket.socketpair()
    load, later = load_command(Config()), [Adjust(residency=ResidencySpec(vram={"": "50%"})), Shutdown()]
    ours.sendall(b"".join(frames.encode(command) for command in (load, *later)))
    pipe = frames.Pipe(theirs)
    assert wait_for_load(pipe) == load
    assert [COMMAND.validate_json(body) for body in pipe.receive(0)] == later
    assert pipe.receive(0) == []
    ours.close()
    pipe.close()
