"""A device for machines without one: a CPU behind llama.cpp's own RPC backend, on loopback."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from daemon.errors import HotsetError
from daemon.native.process import die_with_parent
from hotset_tools.bench.servers import free_port

START_SECONDS = 20.0


class NoStandIn(HotsetError):
    """The server for the stand-in is missing or does not start."""

    code = "no_stand_in"


@dataclass(frozen=True)
class RpcServer:
    """A CPU behind llama.cpp's RPC backend, for one connection at a time."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def device(self) -> str:
        """Its name in `engine.device`."""
        return f"rpc:127.0.0.1:{self.port}"


@contextmanager
def rpc_server(library: Path, n_threads: int = 1, **environment: str) -> Iterator[RpcServer]:
    """The server of the build in `library` on loopback, with these variables beside those of this process.

    Raises:
        NoStandIn: the build has no ggml-rpc-server, or it does not listen.
    """
    program = library / "ggml-rpc-server"
    if not program.is_file():
        raise NoStandIn("the native build has no ggml-rpc-server; `hotset build --force` makes it")
    port = free_port()
    command = [str(program), "-H", "127.0.0.1", "-p", str(port), "-t", str(n_threads)]
    quiet = subprocess.DEVNULL
    dying = functools.partial(die_with_parent, os.getpid())
    variables = {**os.environ, **environment}
    # A session of its own: where Ctrl-C ended it, ggml would abort whoever is waiting for its answer. SIGPIPE stays
    # ignored, as Python has it: otherwise an answer to a client that was killed would end the server.
    with subprocess.Popen(
        command, env=variables, stdin=quiet, stdout=quiet, stderr=quiet, preexec_fn=dying, start_new_session=True,
        restore_signals=False,
    ) as process:  # fmt: skip
        try:
            _wait(process, port)
            yield RpcServer(process, port)
        finally:
            process.kill()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise NoStandIn(f"ggml-rpc-server does not listen (exit code {process.poll()})")
