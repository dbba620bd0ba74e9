"""What a closed gate computes, step by step in an engine: the nodes of the unpatched library, and while it counts one
copy of the ids more.

The device is a CPU behind the RPC backend; the probe's clock says that experts in VRAM make steps slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from daemon.engine.loading import Loaded
from daemon.engine.probe import Measured
from daemon.engine.residency import Experts
from daemon.engine.store import Store
from daemon.hotset.bursts import BURST
from daemon.model_files import load_command
from daemon.native.hotset import State
from tests.miniarch.table import MINIS
from tests.miniarch.writer import write_minis
from tests.native.test_live_residency import Clock, Engine, config
from tests.native.test_node_lists import RECORDED, _without_ids
from tests.node_lists import NodeLists, Nodes, digests, walk
from tests.residency_bench import Bench, changed_params, rpc_server


@pytest.fixture(scope="module")
def device(library_path: Path) -> Iterator[str]:
    with rpc_server(library_path) as server:
        yield server.device


@contextmanager
def running(path: Path, device: str, cache: Path, nodes: Nodes, vram: str) -> Iterator[Engine]:
    """As large as the contexts whose nodes are recorded."""
    settings = config(path, device, {"vram": vram, "remember": False}, ubatch=64, repack=False)
    with (
        changed_params(cb_eval=nodes.callback, flash_attn_type=0),
        Loaded(load_command(settings), lambda _: None) as made,
    ):
        probe = made.probe(Store(cache, Measured))
        if probe is not None:
            assert isinstance(made.experts, Experts)
            probe._clock = Clock(made.experts, 0.1)
        made.experts.start()
        engine = Engine(made, probe)
        engine.loop._eog = tuple(sorted(made.vocab.eog))  # answers have the length that was asked for
        yield engine


def answer(engine: Engine, nodes: Nodes, n: int) -> list[list[str]]:
    """The nodes of each step of an answer: its prompt, then single tokens."""
    name, steps = engine.submit(n=n), []
    while engine.pipe.end(name) is None:
        nodes.take()
        engine.loop.turn()
        steps.append(nodes.take())
    return [step for step in steps if step]


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_a_closed_gate_computes_the_nodes_of_the_unpatched_library(
    name: str, device: str, library_path: Path, tmp_path: Path
) -> None:
    path = write_minis(tmp_path, {name: MINIS[name]}, library_path)[name]
    nodes, n = Nodes(), BURST + 8
    with running(path, device, tmp_path / "stock", nodes, "") as stock:
        expected = answer(stock, nodes, n)
    with running(path, device, tmp_path / "prices", nodes, "50%") as closed:
        experts = closed.experts
        before = answer(closed, nodes, 8)
        assert before[-1] != expected[7]
        closed.turn_until(lambda: closed.status().gate.state == "closed")
        seen = answer(closed, nodes, n)
        assert experts.residency.statistics().state == State.OFF
        assert len(seen) == len(expected) == n
        # The prompt and what follows on the burst of counting.
        same = [one == other for one, other in zip(seen, expected, strict=True)]
        assert same == [True] + [False] * BURST + [True] * (n - BURST - 1)
        assert stripped(seen) == stripped(expected)
        assert digests(walk(Bench(closed.made.model, closed.made.context), nodes)) == RECORDED[name]


def stripped(steps: list[list[str]]) -> NodeLists:
    """Without the copies of the ids."""
    return _without_ids({str(number): step for number, step in enumerate(steps)})
