"""The parent's end of a `worker`: starts it over one native library and asks it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from daemon.errors import HotsetError
from daemon.native import locate
from daemon.native.process import die_with_parent

_ROOT = Path(__file__).resolve().parents[2]


class WorkerFailed(HotsetError):
    """A worker refused a request, or it has ended."""

    code = "worker_failed"

    def __init__(self, message: str, *, ended: bool = False) -> None:
        super().__init__(message)
        self.ended = ended


class Child:
    """A worker process over the library in `directory`; a context manager. One request at a time."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")
        paths = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hotset_tools.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {locate.OVERRIDE: str(directory), "PYTHONPATH": paths},
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """The reply to a request.

        Raises:
            WorkerFailed: it was refused, or the worker has ended; the message has the reason.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerFailed(f"the worker {self.name!r} ended during {do}: {self._last_words()}", ended=True)
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerFailed(f"{self.name}: {do}: {reply['error']}")
        return reply

    def stop(self) -> None:
        """End the process, which frees everything that it holds."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None and not issubclass(kind, Exception):  # Ctrl-C does not wait for what it computes
            self._process.kill()
        self.stop()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return " / ".join([f"exit code {code}", *lines[-5:]])
