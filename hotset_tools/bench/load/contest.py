"""The run without URLs: hotsetd, and the peer's llama-server at three sizes of batch, on one model and machine."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from hotset_tools.bench import hardware, servers
from hotset_tools.bench.clients import Endpoint
from hotset_tools.bench.load.arms import Arm, Workload, race
from hotset_tools.bench.load.report import LoadRun
from hotset_tools.bench.load.runner import Patience

N_SEQUENCES = 8
N_CTX = 4096
PEER_SIZES = ((2048, 512), (256, 256), (64, 64))
"""-b and -ub of llama-server."""


def run(model: Path, workload: Workload, patience: Patience, say: Callable[[str], None]) -> LoadRun:
    """All servers are up, and idle but for the one that is measured.

    Raises:
        PeerMissing: no llama-server.
        HotsetError: a server did not start, or does not answer.
    """
    began = time.monotonic()
    servers.peer_directory()  # said before anything is started
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        arms = [_start(stack, name, settings, make) for name, settings, make in _all(model, Path(directory))]
        ours, *peers = asyncio.run(race(arms, workload, patience, say))
    return LoadRun(ours, tuple(peers), workload.as_json(), model.name, hardware.describe(), time.monotonic() - began)


Making = AbstractContextManager[servers.Server]


def _all(model: Path, logs: Path) -> list[tuple[str, dict[str, object], Making]]:
    common: dict[str, object] = {"sequences": N_SEQUENCES, "context": N_CTX}
    found: list[tuple[str, dict[str, object], Making]] = [
        ("hotsetd", common, servers.hotsetd(model, N_SEQUENCES, N_CTX, logs / "hotsetd.log"))
    ]
    for batch, ubatch in PEER_SIZES:
        name = f"llama-server {batch}/{ubatch}"
        log = logs / f"llama-server-{batch}-{ubatch}.log"
        making = servers.llama_server(model, N_SEQUENCES, N_CTX, log, batch=batch, ubatch=ubatch)
        found.append((name, {**common, "b": batch, "ub": ubatch}, making))
    return found


def _start(stack: ExitStack, name: str, settings: dict[str, object], making: Making) -> Arm:
    server = stack.enter_context(making)
    return Arm(name, Endpoint("127.0.0.1", server.port), settings, server.pid)
