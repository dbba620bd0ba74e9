"""The service as a child: started, told of signals, and gone when the demo is."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from daemon.errors import EXIT_FAILURE
from daemon.native.process import die_with_parent
from hotset_tools.signals import calling

LOOK_SECONDS = 0.2
END_SECONDS = 60.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Process = subprocess.Popen[bytes]


@contextmanager
def child(command: Sequence[str], environ: Mapping[str, str]) -> Iterator[Process]:
    """A process that ends with this block, and at once where this process is killed."""
    dying = functools.partial(die_with_parent, os.getpid())
    # A session of its own: a terminal's Ctrl-C reaches the demo alone, which says once what it means.
    with subprocess.Popen(
        command, env=dict(environ), stdin=subprocess.DEVNULL, preexec_fn=dying, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            _end(process)


def _end(process: Process) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


@contextmanager
def passing_on(process: Process, stopping: Callable[[], None]) -> Iterator[None]:
    """Tell the service to stop when this process is: the second time it does not wait for what runs."""

    def pass_on() -> None:
        stopping()
        process.terminate()

    with calling(pass_on, _SIGNALS):
        yield


def attend(
    process: Process,
    stand_in: Process,
    ready: Callable[[], bool],
    announce: Callable[[], None],
    say: Callable[[str], None],
) -> int:
    """Until the service has ended; returns the exit code of the demo.

    `announce` is called once, when the service is `ready`. Without its device a service could only fail again and
    again, so it is told to stop.
    """
    announced = lost = False
    while (code := _wait(process)) is None:
        if not lost and stand_in.poll() is not None:
            lost = True
            say(f"the stand-in for a device ended with {stand_in.returncode}; stopping")
            process.terminate()
        if not announced and ready():
            announced = True
            announce()
    if code < 0:
        say(f"hotsetd was killed by signal {-code}")
        return 128 - code
    return code or (EXIT_FAILURE if lost else code)


def _wait(process: Process) -> int | None:
    try:
        return process.wait(LOOK_SECONDS)
    except subprocess.TimeoutExpired:
        return None
