"""Runs the self-test of a library in a child process, and steps down to smaller instruction sets until it passes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import daemon
from daemon.errors import HotsetError
from hotset_tools import cpuflags

TIMEOUT = 300.0


class SelftestFailed(HotsetError):
    """Even the smallest instruction set computes wrong results or dies."""

    code = "selftest_failed"


@dataclass(frozen=True)
class Verdict:
    """`reason` is None when the library computes right; `errors` are the largest relative errors by kind."""

    reason: str | None
    errors: dict[str, float] = field(default_factory=dict)


Check = Callable[[Path], Verdict]


@dataclass(frozen=True)
class Settled:
    """The flags that work, what the test measured with them, and one line for each larger set that did not."""

    flags: frozenset[str]
    errors: dict[str, float]
    fallback: list[str]


def check(directory: Path, command: tuple[str, ...] = ("-m", "daemon.native.selftest")) -> Verdict:
    """Test the library of `directory` in a child; a child that dies or hangs is a verdict, not an exception."""
    environ = {**os.environ, "PYTHONPATH": str(Path(daemon.__file__).resolve().parents[1])}
    try:
        result = subprocess.run(
            [sys.executable, *command, str(directory)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            env=environ,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Verdict(f"the self-test did not end within {TIMEOUT:.0f} s")
    return read_verdict(result.returncode, result.stdout, result.stderr)


def read_verdict(code: int, output: str, errors: str) -> Verdict:
    """What a child's exit code (negative: the signal that ended it) and its lines say."""
    reports = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    running = next((report["running"] for report in reversed(reports) if "running" in report), "start")
    if code < 0:
        return Verdict(f"{signal.Signals(-code).name} in the self-test, at {running}")
    if code != 0 or not reports or "errors" not in reports[-1]:
        last = errors.strip().splitlines()[-1:] or ["no message"]
        return Verdict(f"the self-test failed at {running}: {last[0]}")
    wrong = reports[-1]["wrong"]
    return Verdict(f"{len(wrong)} wrong results, first {wrong[0]}" if wrong else None, reports[-1]["errors"])


def settle(
    flags: frozenset[str], compile_for: Callable[[frozenset[str]], Path], check: Check, note: Callable[[str], None]
) -> Settled:
    """Compile for `flags`, test, and take the next smaller set until a library passes.

    Raises:
        SelftestFailed: none passes; the message has every reason.
    """
    fallback: list[str] = []
    for step in cpuflags.ladder(flags):
        verdict = check(compile_for(step))
        if verdict.reason is None:
            return Settled(step, verdict.errors, fallback)
        fallback.append(f"{verdict.reason} (compiled for {cpuflags.describe(step)})")
        note(f"Self-test: {fallback[-1]}; trying a smaller instruction set.")
    raise SelftestFailed("No instruction set passes the self-test:\n  " + "\n  ".join(fallback))
