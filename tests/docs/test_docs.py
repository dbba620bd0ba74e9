"""Docs that fail the build: every path, command, endpoint, key and variable that they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from daemon import config
from daemon.api.info import view
from daemon.api.routes import TABLE
from daemon.messages import Allowance, ExpertDevice, ExpertLayer, Gate, HeatSummary, Remembered, Residency
from hotset_tools.cli import COMMANDS, make_app
from hotset_tools.top.polling import KEY_VARIABLE
from tests.fakes import make_fakes

ROOT = Path(__file__).resolve().parents[2]
TOP = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "config.toml", "patches/README.md")
PAGES = sorted([*(ROOT / name for name in TOP), *(ROOT / "docs").rglob("*.md")])
OTHER_VARIABLES = {"HOTSET_CACHE", KEY_VARIABLE}
CODE = re.compile(r"`([^`\n]+)`")
FOLDERS = ("daemon", "hotset_tools", "patches", "tests", "docs", "models", "systemd", "scripts")


def names(page: Path, pattern: str) -> set[str]:
    return set(re.findall(pattern, page.read_text("utf-8"), flags=re.M))


def by_page(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_paths_exist(page: Path) -> None:
    found = {span for span in CODE.findall(page.read_text("utf-8")) if span.split("/")[0] in FOLDERS}
    spans = {span.split("::")[0].rstrip("/") for span in found if not set(" *") & set(span) and "..." not in span}
    links = {target for target in names(page, r"\]\(([^)#:]+)\)") if not target.startswith("http")}
    bases = (ROOT, page.parent)
    for name in spans | links:
        candidates = [base / path for base in bases for path in (name, f"{name}.py")]
        assert any(path.exists() for path in candidates), f"{by_page(page)} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_commands_and_their_options_exist(page: Path) -> None:
    for line in names(page, r"(?:^    |`|^    \.venv/bin/)(?:\.venv/bin/)?hotset ([a-z][^`\n#]*)"):
        words = line.split()
        assert words[0] in COMMANDS, f"{by_page(page)}: hotset {line}"
        command = typer.main.get_command(make_app(words[0]))
        node = command
        for word in words:
            subcommands = getattr(node, "commands", {})
            if word in subcommands:
                node = subcommands[word]
        options = {name for parameter in node.params for name in parameter.opts}
        for word in words:
            if word.startswith("--"):
                assert word in options, f"{by_page(page)}: hotset {line}"


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in names(page, r"(?:`|^    )make ([a-z][a-z-]*)"):
        if target not in {"model"}:
            assert re.search(rf"^\.PHONY:.*\b{target}\b|^{target}:", makefile, flags=re.M), f"make {target}"


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_variables_and_keys_exist(page: Path) -> None:
    known = {f"{config.ENV_PREFIX}{path.replace('.', '_').upper()}" for path in config.keys()} | OTHER_VARIABLES
    for variable in names(page, r"\b(HOTSET_[A-Z_]+)\b(?!<)"):
        if not variable.endswith("_"):
            assert variable in known, f"{by_page(page)} names {variable}"
    sections = "|".join(config.Config.model_fields)
    for key in names(page, rf"`((?:{sections})\.[a-z_]+)`"):
        assert key in config.keys() or (ROOT / "daemon" / key).exists(), f"{by_page(page)} names {key}"


def metrics() -> set[str]:
    """Names as /metrics has them."""
    services = make_fakes().services
    services.metrics.watch(lambda: view(services))
    suffixes = {"counter": ["_total"], "gauge": [""], "info": ["_info"], "histogram": ["_bucket", "_sum", "_count"]}
    return {f"{family.name}{end}" for family in services.metrics.registry.collect() for end in suffixes[family.type]}


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_metrics_exist(page: Path) -> None:
    for name in names(page, r"\b(hotset_[a-z_]+)\b"):
        assert name in metrics() or (ROOT / name).exists(), f"{by_page(page)} names {name}"


def test_every_field_of_the_status_is_described() -> None:
    page = (ROOT / "docs/hot-set.md").read_text("utf-8").split("## Reading the status")[1]
    described = {span.removesuffix("[]") for span in CODE.findall(page)}
    parts = (Residency, ExpertDevice, ExpertLayer, HeatSummary, Allowance, Remembered, Gate)
    fields = {name for part in parts for name in part.model_fields}
    assert fields <= described


def test_the_readme_names_every_endpoint_and_no_other() -> None:
    offered = {variant for endpoint in TABLE for variant in endpoint.variants()} | {"/openapi.json"}
    table = (ROOT / "README.md").read_text("utf-8").split("## What the API offers")[1].split("\n## ")[0]
    named = set(re.findall(r"(?<=[` ])(/[A-Za-z0-9/_{}.-]+)(?=[`, ])", table))
    assert named, "the table is found"
    assert named <= offered
    for path in ("/v1/chat/completions", "/v1/completions", "/completion", "/tokenize", "/health", "/metrics"):
        assert path in named or any(path in cell for cell in table.split("`"))


def test_the_changelog_has_a_section_for_what_is_not_released() -> None:
    assert "\n## Unreleased\n" in (ROOT / "CHANGELOG.md").read_text("utf-8")
