"""Fixtures of the native tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.native import devices
from tests.lavapipe import environment
from tests.residency_bench import rpc_server


@pytest.fixture(scope="module")
def child_device(library_path: Path) -> Iterator[str]:
    """The name of another one, which this process holds no connection to: for a child."""
    with rpc_server(library_path) as server:
        yield server.device


@pytest.fixture(scope="session")
def rpc_device(library_path: Path) -> Iterator[str]:
    """The name of a CPU behind the RPC backend.

    One for all tests: ggml keeps every server that it was told of, and ends the process when one is gone. It is told
    once, since the server serves one connection and lets others wait.
    """
    with rpc_server(library_path) as server:
        devices.load_backends(server.device)
        (pointer,) = devices.choose(server.device) or ()
        yield devices.ggml().ggml_backend_dev_name(pointer).decode()


@pytest.fixture(scope="session")
def lavapipe(library_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a child whose device Vulkan0 is Mesa's software Vulkan."""
    return environment(library_path, tmp_path_factory.mktemp("lavapipe"))
