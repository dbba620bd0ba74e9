"""docs/verify.md shows what the reports of `hotset verify` in docs/benchmarks/verify say, judged by today's rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from daemon.verify.tolerance import FUSION_OFF, Rule, Standard, Tolerance, fuses

DOCS = Path(__file__).resolve().parents[2] / "docs"
REPORTS = sorted((DOCS / "benchmarks" / "verify").glob("*.json"))
CASES = ("cold", "empty", "half", "changing", "full")
UNFUSED = "-unfused"
"""Ends the names of reports made with `FUSION_OFF`, which reports do not say."""


def tolerances(path: Path, report: dict[str, Any]) -> dict[str, Tolerance]:
    """By case; the reports are of devices that round otherwise than the CPU, with room for all experts."""
    assert not report["rounds_alike"]
    assert report["kl_stock"] is not None
    unfused = {FUSION_OFF: "1"} if path.stem.endswith(UNFUSED) else {}
    fused = fuses(report["device"], unfused)
    standard = Standard(frozenset(report["expert_types"]), False, report["kl_stock"], report["kl_alone"], fused)
    moved = standard.moved()
    return dict(zip(CASES, (standard.untouched(), standard.summed(), moved, moved, standard.unmoved()), strict=True))


def phases(report: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The lines of a case."""
    return [case for case in report["cases"] if case["name"] == name]


def identical(report: dict[str, Any], name: str) -> bool:
    """Whether a case is stock bit by bit."""
    return all(phase["identical"] for phase in phases(report, name))


def mean(report: dict[str, Any], name: str) -> float:
    """The divergence of a case over all of its rows."""
    found = phases(report, name)
    return float(sum(phase["kl_mean"] * phase["tokens"] for phase in found) / sum(phase["tokens"] for phase in found))


def row(path: Path, report: dict[str, Any]) -> str:
    """The line of the table: means over all rows, and what is accepted where not every bit is the same."""
    limits = tolerances(path, report)
    cells = [
        "identical" if identical(report, name) else f"{mean(report, name):.1e}, at most {limits[name].kl:.1e}"
        for name in CASES
    ]
    device = f"{report['device']}{' without fusion' if path.stem.endswith(UNFUSED) else ''}"
    return f"| {device}, {report['model']} | {' | '.join(cells)} | {report['kl_stock']:.1e} |"


def test_there_are_reports() -> None:
    assert REPORTS
    unfused = {path.stem for path in REPORTS if path.stem.endswith(UNFUSED)}
    assert unfused
    assert {stem.removesuffix(UNFUSED) for stem in unfused} <= {path.stem for path in REPORTS}


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_the_table_says_what_the_report_says(path: Path) -> None:
    report = json.loads(path.read_text("utf-8"))
    assert row(path, report) in (DOCS / "verify.md").read_text("utf-8").splitlines()
    assert report["ok"] is all(case["ok"] for case in report["cases"])


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_the_numbers_are_within_the_rules_of_today(path: Path) -> None:
    report = json.loads(path.read_text("utf-8"))
    for name, limit in tolerances(path, report).items():
        assert identical(report, name) or (limit.rule is Rule.MEAN and mean(report, name) <= limit.kl)


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_the_reports_were_judged_by_the_rules_of_today(path: Path) -> None:
    report = json.loads(path.read_text("utf-8"))
    for name, limit in tolerances(path, report).items():
        found = phases(report, name)
        assert found
        assert {(phase["rule"], phase["kl_limit"]) for phase in found} == {(limit.rule, limit.kl)}
    assert report["ok"] is True
