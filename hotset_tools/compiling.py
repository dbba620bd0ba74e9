"""Runs cmake and ninja on a tree, reports progress, and turns a failure into the end of its log."""

from __future__ import annotations

import os
import re
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from daemon.errors import HotsetError
from hotset_tools.reporter import Reporter

_STEP = re.compile(r"^\[(\d+)/(\d+)\]")
_TAIL = 25


class BuildFailed(HotsetError):
    """cmake or the compiler failed; the message has the last lines and names the log."""

    code = "build_failed"


@dataclass(frozen=True)
class Compilation:
    """One tree being built. `log` collects everything that cmake and ninja say."""

    source: Path
    build: Path
    log: Path
    cmake: str
    ninja: str
    environ: Mapping[str, str]
    jobs: int

    def configure(self, options: Mapping[str, str]) -> None:
        """Run cmake; options that were given before and are not now keep their value.

        Raises:
            BuildFailed: cmake did not like it.
        """
        defines = [f"-D{name}={value}" for name, value in sorted(options.items())]
        make = f"-DCMAKE_MAKE_PROGRAM={self.ninja}"
        command = [self.cmake, "-S", str(self.source), "-B", str(self.build), "-G", "Ninja", make, *defines]
        self._run(command, lambda line: None, "cmake")

    def compile(self, targets: Sequence[str], reporter: Reporter) -> None:
        """Build `targets`, counting ninja's steps.

        Raises:
            BuildFailed: a step failed.
        """
        counter = StepCounter(reporter)
        self._run([self.ninja, "-C", str(self.build), "-j", str(self.jobs), *targets], counter.line, "the compiler")

    def _run(self, command: Sequence[str], line_seen: Callable[[str], None], who: str) -> None:
        tail: deque[str] = deque(maxlen=_TAIL)
        with (
            self.log.open("a", encoding="utf-8", errors="replace") as log,
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=dict(self.environ),
                text=True,
                errors="replace",
            ) as process,
        ):
            log.write("$ " + " ".join(command) + "\n")
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                tail.append(line.rstrip())
                line_seen(line)
        if process.returncode != 0:
            raise BuildFailed(_failure(who, process.returncode, tail, self.log))


class StepCounter:
    """Reads ninja's [n/m]; a nested build's smaller counts are not taken for the outer one's."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._total = 0

    def line(self, text: str) -> None:
        """One line of ninja's output."""
        match = _STEP.match(text)
        if match and int(match[2]) >= self._total:
            self._total = int(match[2])
            self._reporter.progress(int(match[1]), self._total)


def compiler_environment(work: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for compilers: ccache sees paths relative to `work`, ninja's status is the one we read."""
    return {
        **environ,
        "CCACHE_BASEDIR": str(work),
        "CCACHE_NOHASHDIR": "true",
        "NINJA_STATUS": "[%f/%t] ",
        "LC_ALL": "C.UTF-8",
    }


def _failure(who: str, code: int, tail: Iterable[str], log: Path) -> str:
    lines = "\n  ".join(tail)
    return f"{who} failed (exit code {code}). The last lines:\n  {lines}\nThe whole log is {log}"
