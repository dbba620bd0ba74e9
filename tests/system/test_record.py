"""`hotset record` with the embedded model: the traces of tests/data come from the command in docs/traces.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from daemon.hotset import trace
from daemon.native.gguf_check import check

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tinymoe-41m-Q4_K_M.gguf"


def test_the_beginning_of_a_recorded_trace_comes_again(library_path: Path, tmp_path: Path) -> None:
    names, n_tokens = ["python", "chat"], 48
    prompts = [word for name in names for word in ("--prompts", str(ROOT / "models" / "prompts" / f"{name}.txt"))]
    out = tmp_path / "a.trace"
    command = ["record", str(MODEL), "--out", str(out), *prompts, "--tokens", str(n_tokens), "--threads", "1", "--json"]
    result = subprocess.run(
        [sys.executable, "-m", "hotset_tools.cli", *command], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    found, known = trace.read(out), trace.read(ROOT / "tests" / "data" / "six-domains.trace")
    assert json.loads(result.stdout)["bytes"] == out.stat().st_size
    assert [name for name, _ in found.segments()] == names
    assert found.header.model.fingerprint == known.header.model.fingerprint == check(MODEL).fingerprint
    places = dict(known.segments())
    expected = np.concatenate([known.ids[places[name]][:n_tokens] for name in names])
    assert (found.ids == expected).mean() > 0.95  # batches of other widths round otherwise
