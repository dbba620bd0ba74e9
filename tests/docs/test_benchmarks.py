"""docs/benchmarks.md shows what the JSON beside it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotset_tools.bench.load.report import table
from hotset_tools.bench.tables import read, replace_between, tables

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_tables_are_those_of_the_reports() -> None:
    """`hotset bench tables docs/benchmarks/*.json --into docs/benchmarks.md` writes them."""
    page = (DOCS / "benchmarks.md").read_text("utf-8")
    reports = [(path.name, read(path)) for path in sorted((DOCS / "benchmarks").glob("*.json"))]
    assert replace_between(page, tables(reports)) == page


@pytest.mark.parametrize("path", sorted((DOCS / "benchmarks" / "load").glob("*.json")), ids=lambda path: path.name)
def test_load_tables_are_those_of_their_reports(path: Path) -> None:
    """What `hotset bench load` prints without --json."""
    page = (DOCS / "benchmarks.md").read_text("utf-8")
    assert f"docs/benchmarks/load/{path.name}" in page
    assert table(json.loads(path.read_text("utf-8"))) in page
