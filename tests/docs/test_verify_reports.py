"""docs/verify.md shows what the reports of `hotset verify` in docs/benchmarks/verify say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
REPORTS = sorted((DOCS / "benchmarks" / "verify").glob("*.json"))
CASES = ("cold", "empty", "half", "changing", "full")


def row(report: dict[str, Any]) -> str:
    """The line of the table: means over all rows, and what is accepted where not every bit must be the same."""
    cells = [_cell([case for case in report["cases"] if case["name"] == name]) for name in CASES]
    return f"| {report['device']}, {report['model']} | {' | '.join(cells)} | {report['kl_stock']:.1e} |"


def _cell(phases: list[dict[str, Any]]) -> str:
    if all(phase["identical"] for phase in phases):
        return "identical"
    mean = sum(phase["kl_mean"] * phase["tokens"] for phase in phases) / sum(phase["tokens"] for phase in phases)
    text = f"{mean:.1e}, at most {phases[0]['kl_limit']:.1e}"
    return text if all(phase["ok"] for phase in phases) else f"**{text}**"


def test_there_are_reports() -> None:
    assert REPORTS


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_the_table_says_what_the_report_says(path: Path) -> None:
    report = json.loads(path.read_text("utf-8"))
    assert row(report) in (DOCS / "verify.md").read_text("utf-8").splitlines()
    assert report["ok"] is all(case["ok"] for case in report["cases"])
