"""The engine child: `python -m daemon.engine FD PARENT_PID`; FD is its end of a socketpair with the service.

It waits for one `Load`, answers `Ready` or `LoadFailed`, then loops. It ends when the service does.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import sys

from daemon.engine.loading import Loaded
from daemon.engine.loop import Loop
from daemon.engine.roster import Limits
from daemon.errors import HotsetError, ModelUnusable
from daemon.frames import Pipe
from daemon.messages import COMMAND, Load, LoadFailed, Loading, Ready
from daemon.native import locate
from daemon.native.process import die_with_parent

PROGRESS_STEP = 0.02


def main(arguments: list[str]) -> int:
    """Run the child; 0 when told to end, 1 when it could not load."""
    fd, parent = int(arguments[0]), int(arguments[1])
    faulthandler.enable()
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # ggml would start a debugger and keep the service waiting
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the service decides what happens
    pipe = Pipe(socket.socket(fileno=fd))
    try:
        spec = wait_for_load(pipe)
    except EOFError:
        return 0
    try:
        loaded = Loaded(spec, _Progress(pipe), locate.state_root())
    except HotsetError as error:
        pipe.send(LoadFailed(message=error.message, fatal=isinstance(error, ModelUnusable)))
        return 1
    with loaded:
        _serve(loaded, pipe)
    return 0


class _Progress:
    """Reports the load's progress in steps, not thousands of times."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe, self._reported = pipe, -1.0

    def __call__(self, value: float) -> None:
        if value - self._reported >= PROGRESS_STEP or value >= 1.0:
            self._reported = value
            self._pipe.send(Loading(progress=value))


def wait_for_load(pipe: Pipe) -> Load:
    """The first command that says what to load; what came with it stays in the pipe."""
    while True:
        bodies = pipe.receive(None)
        for n, body in enumerate(bodies, 1):
            command = COMMAND.validate_json(body)
            if isinstance(command, Load):
                pipe.put_back(bodies[n:])  # a change of budgets, or the order to end, that came with it
                return command


def _serve(loaded: Loaded, pipe: Pipe) -> None:
    info = loaded.info
    limits = Limits(n_ubatch=info.n_ubatch, max_sequences=info.max_sequences, kv_cells=info.kv_cells, n_ctx=info.n_ctx)
    loop = Loop(
        loaded.context,
        loaded.vocab,
        pipe,
        limits,
        residency=loaded.experts,
        idle=loaded.idle(),
        scheduling=loaded.scheduling,
        suppressed=loaded.model.suppressed_tokens(),
        eog=tuple(sorted(loaded.vocab.eog)),
    )
    pipe.send(Ready(info=info, residency=loaded.experts.status()))
    loaded.experts.start()  # nothing waits for an upload
    # Everything alive now stays alive: a collection in the middle of a step would only walk over it again.
    gc.collect()
    gc.freeze()
    loop.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
