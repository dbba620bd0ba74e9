"""With residency off llama.cpp computes what it computes unpatched, node by node, in every MoE architecture."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotset_tools.stand_in import rpc_server
from tests.miniarch.table import MINIS
from tests.miniarch.writer import write_minis
from tests.node_lists import NodeLists, digests, in_processes

RECORDED: dict[str, dict[str, str]] = json.loads((Path(__file__).parents[1] / "vectors" / "nodes.json").read_text())


@pytest.fixture(scope="module")
def device(library_path: Path) -> Iterator[str]:
    with rpc_server(library_path) as server:
        yield server.device


@pytest.fixture(scope="module")
def paths(library_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return list(write_minis(tmp_path_factory.mktemp("minis"), MINIS, library_path).values())


def test_every_model_is_recorded() -> None:
    """`tests/vectors/record_nodes.py` has to run again after a change of the models or of llama.cpp."""
    assert RECORDED.keys() == MINIS.keys()


@pytest.mark.parametrize("state", ["none", "OFF"])
def test_the_nodes_are_those_of_the_unpatched_library(
    state: str, paths: list[Path], library_path: Path, device: str
) -> None:
    seen = in_processes(device, state, paths, library_path)
    assert {name: digests(nodes) for name, nodes in seen.items()} == RECORDED


def test_counting_adds_a_copy_of_the_ids_and_nothing_else(paths: list[Path], library_path: Path, device: str) -> None:
    off = in_processes(device, "OFF", paths, library_path)
    counting = in_processes(device, "COUNT", paths, library_path)
    for name, nodes in counting.items():
        assert _without_ids(nodes) == _without_ids(off[name]), name
        assert nodes != off[name]


def _without_ids(nodes: NodeLists) -> NodeLists:
    """Nameless nodes are numbered, so one more node gives all behind it other names."""
    return {
        step: [re.sub(r"node_\d+", "node", node) for node in names if " hotset_ids" not in node]
        for step, names in nodes.items()
    }
