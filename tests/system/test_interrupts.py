"""Tools that are interrupted: nothing half written, no process left, no abort of the library."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from daemon.model_files import EMBEDDED_MODEL
from tests.system.daemon_process import eventually

LEARN = ("hot-set", "--out", "hot.json", "--tokens", "4000")


@pytest.mark.parametrize(
    ("words", "said", "n_children", "number", "code"),
    [
        (LEARN, "stands in for one", 2, signal.SIGINT, 130),
        (LEARN, "stands in for one", 2, signal.SIGTERM, 143),
        (["verify"], "stock with the experts in memory", 2, signal.SIGINT, 130),
    ],
)
def test_nothing_is_left(
    words: Sequence[str], said: str, n_children: int, number: int, code: int, tmp_path: Path, library_path: Path
) -> None:
    """Ctrl-C reaches every process of the terminal's job, SIGTERM the tool alone."""
    tool, *options = words
    command = [sys.executable, "-m", "hotset_tools.cli", tool, str(EMBEDDED_MODEL), "--threads", "1", *options]
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any(said in line for line in lines)
        tree = psutil.Process(process.pid)
        eventually(lambda: len(tree.children(recursive=True)) == n_children, "what the tool starts")
        children = tree.children(recursive=True)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        rest = process.stderr.read()
        assert process.wait(30) == code, rest
    assert not psutil.wait_procs(children, timeout=10)[1]
    assert not list(tmp_path.iterdir())
    assert "Traceback" not in rest
