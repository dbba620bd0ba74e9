"""docs/benchmarks.md shows what the JSON beside it says."""

from __future__ import annotations

from pathlib import Path

from hotset_tools.bench.tables import read, replace_between, tables

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_tables_are_those_of_the_reports() -> None:
    """`hotset bench tables docs/benchmarks/*.json --into docs/benchmarks.md` writes them."""
    page = (DOCS / "benchmarks.md").read_text("utf-8")
    reports = [(path.name, read(path)) for path in sorted((DOCS / "benchmarks").glob("*.json"))]
    assert replace_between(page, tables(reports)) == page
