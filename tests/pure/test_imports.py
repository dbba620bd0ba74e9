"""Imports point one way, and only daemon/native knows the library."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE = {
    "daemon", "daemon.errors", "daemon.messages", "daemon.frames", "daemon.config", "daemon.text", "daemon.model_files",
}  # fmt: skip
ALLOWED = {
    "daemon.errors": set(),
    "daemon.text": set(),
    "daemon.descriptors": set(),
    "daemon.messages": set(),
    "daemon.frames": set(),
    "daemon.hotset": {"daemon.errors"},
    "daemon.config": {"daemon.errors", "daemon.hotset", "daemon.messages"},
    "daemon.model_files": {"daemon.config", "daemon.errors", "daemon.hotset", "daemon.messages"},
    "daemon.settings": {"daemon.config", "daemon.errors", "daemon.model_files"},
    "daemon.reload": BASE | {"daemon.settings"},
    "daemon.watch": set(),
    "daemon.control": {"daemon.messages"},
    "daemon.log": BASE,
    "daemon.metrics": BASE | {"daemon.expert_metrics", "daemon.fair_queue"},
    "daemon.expert_metrics": BASE,
    "daemon.native": BASE,
    "daemon.verify": BASE | {"daemon.native"},
    "daemon.engine": BASE | {"daemon.native", "daemon.hotset", "daemon.verify"},
    "daemon.recording": {"daemon.messages"},
    "daemon.replacement": {"daemon.messages"},
    "daemon.supervisor": BASE | {"daemon.replacement"},
    "daemon.fair_queue": {"daemon.messages"},
    "daemon.service_times": {"daemon.messages"},
    "daemon.queue_limits": {"daemon.errors", "daemon.messages"},
    "daemon.ticket": {"daemon.messages"},
    "daemon.places": {"daemon.fair_queue", "daemon.messages", "daemon.queue_limits"},
    "daemon.admission": BASE
    | {
        "daemon.fair_queue",
        "daemon.places",
        "daemon.queue_limits",
        "daemon.service_times",
        "daemon.supervisor",
        "daemon.ticket",
    },
    "daemon.prompt": BASE | {"daemon.native"},
    "daemon.exchange": BASE | {"daemon.admission", "daemon.prompt", "daemon.replacement", "daemon.supervisor"},
    "daemon.api": BASE
    | {
        "daemon.prompt",
        "daemon.admission",
        "daemon.fair_queue",
        "daemon.supervisor",
        "daemon.metrics",
        "daemon.log",
    },
}
WIRING = {"daemon.app", "daemon.__main__"}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module in ("daemon",))


def owner(module: str) -> str:
    """daemon.engine.loop -> daemon.engine."""
    return ".".join(module.split(".")[:2])


def modules(top: str) -> list[Path]:
    return sorted((ROOT / top).rglob("*.py"))


@pytest.mark.parametrize("path", modules("daemon"), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    me = owner(dotted)
    if me in WIRING or dotted == "daemon.__init__":
        return
    known = {owner(name) for name in imports(path) if name.startswith("daemon")}
    exist = {name for name in known if name == "daemon" or (ROOT / name.replace(".", "/")).exists()
             or (ROOT / (name.replace(".", "/") + ".py")).exists()}  # fmt: skip
    assert exist - {me, "daemon"} <= ALLOWED[me]


@pytest.mark.parametrize("path", modules("daemon"), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_and_the_web_server_have_one_home(path: Path) -> None:
    parts = path.relative_to(ROOT).parts
    top = {name.split(".")[0] for name in imports(path)}
    if "native" not in parts:
        assert not top & {"ctypes", "llama_cpp"}
    if "api" not in parts and path.name != "app.py":
        assert "aiohttp" not in top
    assert "hotset_tools" not in top
    assert not top & {"pickle", "diskcache", "shelve"}
