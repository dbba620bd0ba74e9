"""A program that speaks the engine's side of the socket and misbehaves on request: `engine_double.py FD BEHAVIOUR`.

It says that it has the context that it was told to load.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from daemon.frames import Pipe
from daemon.messages import (
    COMMAND,
    Done,
    Load,
    LoadFailed,
    Loading,
    ModelInfo,
    Ready,
    Record,
    Recorded,
    Residency,
    Shutdown,
    Snapshot,
    Step,
    Submit,
    Tokens,
)

INFO = ModelInfo(
    name="double", architecture="none", description="double", fingerprint="0", n_params=1, size=1, n_vocab=10,
    n_ctx_train=100, n_ctx=100, kv_cells=100, kv_bytes_per_token=1, n_layer=1, n_expert=0, n_expert_used=0,
    max_sequences=2, n_ubatch=8, bos=None, eos=None, devices=[], build="double", residency="not applicable",
)  # fmt: skip


def answer(pipe: Pipe, submit: Submit) -> None:
    pipe.send(Step(events=[Tokens(id=submit.id, tokens=[1], text="hi")], snapshot=Snapshot(kv_cells_used=1)))
    done = Done(
        id=submit.id, finish_reason="stop", n_prompt=1, n_cached=0, n_predicted=1,
        wait_ms=0, prompt_ms=1, predicted_ms=1,
    )  # fmt: skip
    pipe.send(Step(events=[done]))


def main(fd: int, behaviour: str) -> int:
    pipe = Pipe(socket.socket(fileno=fd))
    (load,) = map(COMMAND.validate_json, pipe.receive(None))
    assert isinstance(load, Load)
    if behaviour == "hopeless":
        pipe.send(LoadFailed(message="no such model", fatal=True))
        return 1
    if behaviour == "dies loading":
        print("assertion failed: half < whole", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGABRT)
    pipe.send(Loading(progress=0.5))
    if behaviour == "stuck loading":
        time.sleep(3600)
    if behaviour == "slow loading":
        while not any(isinstance(COMMAND.validate_json(body), Shutdown) for body in pipe.receive(None)):
            pass
    pipe.send(Ready(info=INFO.model_copy(update={"n_ctx": load.context})))
    if behaviour == "slow loading":
        return 0
    if behaviour == "closes":
        pipe.close()
        time.sleep(0.5)
        return 0
    if behaviour == "silent":
        time.sleep(3600)
    residency = Residency(moves=5) if behaviour == "moves experts" else None
    while True:
        for body in pipe.receive(0.05):
            command = COMMAND.validate_json(body)
            if isinstance(command, Submit):
                answer(pipe, command)
            elif isinstance(command, Record):
                pipe.send(Step(events=[], recorded=Recorded(number=command.number)))
            elif isinstance(command, Shutdown) and behaviour != "deaf":
                return 0
        pipe.send(Step(events=[], snapshot=Snapshot(residency=residency)))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
