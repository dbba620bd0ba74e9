"""A library that traps or computes wrong results is rebuilt for ever smaller instruction sets."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from daemon.native.cpuinfo import GGML_FLAGS
from hotset_tools.selftest import SelftestFailed, Verdict, read_verdict, settle

ALL = frozenset(GGML_FLAGS)


class Machine:
    """Compiles by noting the flags; running code for a set in `traps` ends the child with SIGILL."""

    def __init__(self, *traps: str) -> None:
        self.traps = set(traps)
        self.compiled: list[frozenset[str]] = []

    def compile_for(self, flags: frozenset[str]) -> Path:
        self.compiled.append(flags)
        return Path("/staged")

    def check(self, directory: Path) -> Verdict:
        assert directory == Path("/staged")
        if self.traps & self.compiled[-1]:
            return read_verdict(-signal.SIGILL, '{"running": "q4_K mul_mat of 32 in AMX"}\n', "")
        return Verdict(None, {"mul_mat": 0.007})


def test_a_library_that_passes_is_compiled_once() -> None:
    machine = Machine()
    settled = settle(ALL, machine.compile_for, machine.check, lambda text: None)
    assert (settled.flags, settled.fallback, machine.compiled) == (ALL, [], [ALL])
    assert settled.errors == {"mul_mat": 0.007}


def test_amx_that_traps_is_left_out_and_said() -> None:
    machine, notes = Machine("AMX_TILE"), list[str]()
    settled = settle(ALL, machine.compile_for, machine.check, notes.append)
    assert settled.flags == {flag for flag in ALL if not flag.startswith("AMX")}
    assert len(machine.compiled) == 2
    assert settled.fallback[0].startswith("SIGILL in the self-test, at q4_K mul_mat of 32 in AMX (compiled for SSE42 ")
    assert "trying a smaller instruction set" in notes[0]


def test_avx512_goes_next() -> None:
    machine = Machine("AMX_INT8", "AVX512")
    settled = settle(ALL, machine.compile_for, machine.check, lambda text: None)
    assert settled.flags == {"SSE42", "AVX", "F16C", "FMA", "BMI2", "AVX2", "AVX_VNNI"}
    assert len(settled.fallback) == 2


def test_when_nothing_passes_every_reason_is_told() -> None:
    machine = Machine("SSE42")
    with pytest.raises(SelftestFailed, match="No instruction set passes") as error:
        settle(ALL, machine.compile_for, machine.check, lambda text: None)
    assert error.value.message.count("SIGILL") == 6


def lines(*reports: object) -> str:
    return "noise\n" + "".join(json.dumps(report) + "\n" for report in reports)


@pytest.mark.parametrize(
    ("code", "output", "errors", "reason"),
    [
        (0, lines({"running": "x"}, {"errors": {"weights": 0.1}, "wrong": []}), "", None),
        (0, lines({"errors": {}, "wrong": ["q4_0: bad", "q4_1: bad"]}), "", "2 wrong results, first q4_0: bad"),
        (-11, lines({"running": "x"}), "", "SIGSEGV in the self-test, at x"),
        (-9, "", "", "SIGKILL in the self-test, at start"),
        (1, lines({"running": "x"}), "Traceback\nOSError: no\n", "the self-test failed at x: OSError: no"),
        (0, lines({"running": "x"}), "", "the self-test failed at x: no message"),
    ],
)
def test_what_a_child_says(code: int, output: str, errors: str, reason: str | None) -> None:
    assert read_verdict(code, output, errors).reason == reason
