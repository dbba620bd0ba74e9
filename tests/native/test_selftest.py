"""The self-test on the library that was really built, and what the parent says when the child dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from daemon.native import selftest as child
from daemon.native.locate import read_build
from hotset_tools import selftest


@pytest.fixture(scope="module")
def output(library_path: Path) -> list[dict[str, object]]:
    """What the child prints for the real library."""
    command = [sys.executable, "-m", "daemon.native.selftest", str(library_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_the_library_computes_right(output: list[dict[str, object]]) -> None:
    assert output[-1]["wrong"] == []
    errors = output[-1]["errors"]
    assert isinstance(errors, dict)
    assert set(errors) == {"weights", "mul_mat", "mul_mat_id"}
    assert 0 < errors["mul_mat"] < child.PRODUCT_BOUND


def test_every_type_is_multiplied_and_weights_are_rearranged_too(output: list[dict[str, object]]) -> None:
    ran = [str(line["running"]) for line in output if "running" in line]
    assert all(f"{name} mul_mat of 32 in CPU" in ran for name in child.TYPES)
    assert all(f"{name} mul_mat_id of 1 in CPU" in ran for name in child.TYPES)
    assert any("in CPU_REPACK" in name for name in ran)


def test_the_build_says_what_its_selftest_measured(library_path: Path) -> None:
    info = read_build(library_path)
    assert info is not None
    assert set(info.selftest) == {"weights", "mul_mat", "mul_mat_id"}


def test_a_wrong_result_is_seen(library_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that adds one to a single element of a product fails."""
    monkeypatch.setattr(child, "TYPES", {"q4_K": child.TYPES["q4_K"]})
    test = child.Selftest(library_path, lambda name: None)
    compute = test._compute

    def off_by_one(context: int, result: int) -> child.Floats:
        got = compute(context, result).copy()
        got[0] += 50.0
        return got

    monkeypatch.setattr(test, "_compute", off_by_one)
    test.run()
    assert any(line.startswith("q4_K mul_mat of 1 in CPU: relative error") for line in test.wrong)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os, signal; print('{\"running\": \"q4_K in AMX\"}', flush=True); os.kill(os.getpid(), signal.SIGILL)",
         "SIGILL in the self-test, at q4_K in AMX"),
        ("raise SystemExit('cannot open the library')", "the self-test failed at start: cannot open the library"),
    ],
)  # fmt: skip
def test_a_child_that_dies_is_a_verdict(tmp_path: Path, code: str, reason: str) -> None:
    assert selftest.check(tmp_path, ("-c", code)).reason == reason


def test_a_directory_without_a_library_is_a_verdict(tmp_path: Path) -> None:
    verdict = selftest.check(tmp_path)
    assert verdict.reason is not None
    assert "libggml" in verdict.reason


def test_relative_error_of_nan_is_never_within_a_bound() -> None:
    nan = np.array([1.0, np.nan], np.float32)
    assert not child.relative_error(nan, np.ones(2, np.float32)) <= 1e9


def test_the_rpc_server_of_the_build_starts(library_path: Path) -> None:
    """It finds the backends beside itself, whatever the working directory."""
    result = subprocess.run(
        [library_path / "ggml-rpc-server", "--help"], capture_output=True, text=True, check=False, cwd=os.sep
    )
    assert "--port" in result.stdout + result.stderr
