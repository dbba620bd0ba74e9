"""Decodes with many models in few child processes, and says of each what came out or how the library ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.miniarch.shapes import PROJECT

Report = dict[str, Any]


def decode_all(paths: Iterable[Path], library: Path, module: str = "tests.miniarch.decode") -> dict[Path, Report]:
    """What `module` says of each model; a model that ends the child gets the reason as "died"."""
    waiting, reports = list(paths), {}
    while waiting:
        answers, last_words = _child(waiting, library, module)
        reports.update(answers)
        if last_words is None:
            return reports
        reports[waiting[len(answers)]] = {"died": last_words}
        waiting = waiting[len(answers) + 1 :]
    return reports


def _child(paths: list[Path], library: Path, module: str) -> tuple[dict[Path, Report], str | None]:
    """Reports in the order of `paths`, and the end of stderr if the child died on the one behind the last."""
    command = [sys.executable, "-m", module, *map(str, paths)]
    environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(library), "GGML_NO_BACKTRACE": "1"}
    result = subprocess.run(
        command,
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=100,
        check=False,
    )
    if result.returncode > 0:
        raise RuntimeError(f"the child that decodes failed: {result.stderr[-2000:]}")
    answers = {Path(line.pop("path")): line for line in map(json.loads, result.stdout.splitlines())}
    died = result.stderr.strip()[-300:] or f"signal {-result.returncode}"
    return answers, died if result.returncode else None
