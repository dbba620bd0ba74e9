"""Experts that follow the traffic in the engine: they move while it decodes, and the answers stay the same.

The device is a CPU behind the RPC backend and all weights are F32: numbers may not depend on what is resident at all.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.config import Config
from daemon.engine.loading import Loaded
from daemon.engine.loop import Loop
from daemon.engine.ports import IdlePort
from daemon.engine.probe import Measured
from daemon.engine.proofs import Proofs
from daemon.engine.residency import Experts
from daemon.engine.roster import Limits
from daemon.engine.store import Store
from daemon.hotset.answers import Answers
from daemon.hotset.files import ModelId
from daemon.hotset.trace import TraceLayer
from daemon.messages import Adjust, Done, Record, Recorded, Residency, ResidencySpec, Sampling, Submit, Tokens
from daemon.model_files import load_command, residency_spec
from daemon.native import hotset
from daemon.native.gguf_check import check
from tests.engine_fakes import FakePipe
from tests.minigguf import write_moe
from tests.residency_bench import rpc_server

N_EXPERT, N_LAYER, TOP_K = 16, 4, 4
SIZES: dict[str, Any] = {"n_layer": N_LAYER, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "head_size": 64}
SIZES |= {"n_vocab": 512, "n_expert": N_EXPERT, "n_expert_used": TOP_K, "n_ff": 256}
EXPERT_MIB = 0.75
MIB = 1 << 20
N_TOKENS = 48


@pytest.fixture(scope="module")
def server(library_path: Path) -> Iterator[str]:
    with rpc_server(library_path) as found:
        yield found.device


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("model") / "m.gguf", experts="F32", layers="F32", vocab="F32", **SIZES)


class Engine:
    """A loop that is turned by the test."""

    def __init__(self, made: Loaded, idle: IdlePort | None = None) -> None:
        self.made, self.pipe = made, FakePipe()
        limits = Limits(n_ubatch=512, max_sequences=8, kv_cells=512, n_ctx=512)
        self.loop = Loop(made.context, made.vocab, self.pipe, limits, residency=made.experts, idle=idle)
        self._n = 0

    @property
    def experts(self) -> Experts:
        assert isinstance(self.made.experts, Experts)
        return self.made.experts

    def submit(self, start: int = 7, n: int = N_TOKENS) -> str:
        self._n += 1
        prompt = [start * i % 500 for i in range(40)]
        sampling = Sampling(temperature=0, ignore_eos=True)
        self.pipe.put(Submit(id=str(self._n), prompt=prompt, max_tokens=n, sampling=sampling))
        return str(self._n)

    def answer(self, start: int = 7, n: int = N_TOKENS) -> list[int]:
        name = self.submit(start, n)
        self.turn_until(lambda: self.pipe.end(name) is not None)
        return self.tokens(name)

    def tokens(self, name: str) -> list[int]:
        return [token for event in self.pipe.events(name) if isinstance(event, Tokens) for token in event.tokens]

    def done(self, name: str) -> Done:
        end = self.pipe.end(name)
        assert isinstance(end, Done)
        return end

    def turn_until(self, ended: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not ended():
            assert time.monotonic() < deadline
            self.loop.turn()

    def adjust(self, **residency: Any) -> None:
        self.pipe.put(Adjust(residency=spec(**residency)))

    @property
    def at_rest(self) -> bool:
        """Whether status shows everything that was moved."""
        picture = self.experts.mover.picture
        return picture.at_rest and picture.n_moves == self.experts.residency.statistics().staged

    def status(self) -> Residency:
        return self.experts.status()


def config(model: Path, device: str, residency: dict[str, Any], **engine: Any) -> Config:
    settings = {"device": device, "threads": 1, "kv_cells": 512, "cache_type_k": "f32", "cache_type_v": "f32"}
    return Config.model_validate(
        {"model": {"path": str(model)}, "engine": settings | engine, "residency": residency | {"reserve": 0}}
    )


def spec(**residency: Any) -> ResidencySpec:
    return residency_spec(Config.model_validate({"residency": residency | {"reserve": 0}}))


@contextmanager
def running(model: Path, device: str, **residency: Any) -> Iterator[Engine]:
    with Loaded(load_command(config(model, device, residency)), lambda _: None) as made:
        engine = Engine(made)
        made.experts.start()
        yield engine


@pytest.fixture(scope="module")
def stock(model: Path) -> dict[int, list[int]]:
    with Loaded(load_command(config(model, "cpu", {}, repack=False)), lambda _: None) as made:
        engine = Engine(made)
        return {start: engine.answer(start) for start in (7, 11, 13)}


def test_slots_fill_with_what_is_used_and_answers_stay(server: str, model: Path, stock: dict[int, list[int]]) -> None:
    with running(model, server, vram="50%") as engine:
        before = engine.status()
        assert (before.placement, before.moves, before.hit_rate) == ("live", 0, None)
        assert {layer.slots for layer in before.layers} == {N_EXPERT // 2}
        for start in (7, 11, 13, 7):
            assert engine.answer(start) == stock[start]
        engine.turn_until(lambda: engine.at_rest)
        status = engine.status()
        assert status.state == "on"
        assert status.moves >= sum(layer.resident for layer in status.layers) > 0
        assert all(0 < layer.resident <= N_EXPERT // 2 for layer in status.layers)
        assert status.hit_rate is not None
        assert 0 < status.hit_rate <= 1
        heat = status.layers[0].heat
        assert heat is not None
        assert 0 < heat.resident_share <= 1
        assert 1 <= heat.for_half <= heat.for_ninety <= N_EXPERT
        assert status.uploaded_bytes == status.moves * EXPERT_MIB * MIB


def test_only_decode_steps_teach(server: str, model: Path) -> None:
    with running(model, server, vram="50%") as engine:
        name = engine.submit(n=1)
        engine.turn_until(lambda: engine.pipe.end(name) is not None)
        assert engine.done(name).expert_selections == 0
        assert engine.experts.mover.controller.n_tokens == 0
        name = engine.submit(n=9)
        engine.turn_until(lambda: engine.pipe.end(name) is not None)
        done = engine.done(name)
        assert done.expert_selections == 8 * N_LAYER * TOP_K
        assert 0 <= done.expert_hits <= done.expert_selections
        engine.turn_until(lambda: engine.experts.mover.controller.n_tokens == 8)


def test_what_teaches_is_what_the_routers_chose(server: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(model, server, vram="25%") as engine:
        seen: list[np.ndarray] = []
        observe = engine.experts.mover.observe

        def note(ids: np.ndarray, n_sequences: int, ranks: bool) -> None:
            residency = engine.experts.residency
            each = [residency.router_ids(layer, len(ids)) for layer in range(N_LAYER)]
            assert (ids == np.stack(each, axis=1)).all()
            assert n_sequences == len(ids)
            assert ranks
            seen.append(ids)
            observe(ids, n_sequences, ranks)

        monkeypatch.setattr(engine.experts.mover, "observe", note)
        names = [engine.submit(start, 12) for start in (7, 11, 13)]
        engine.turn_until(lambda: all(engine.pipe.end(name) for name in names))
        assert max(map(len, seen)) == 3
        assert sum(map(len, seen)) == 3 * 11


def recorded(engine: Engine) -> list[Recorded]:
    return [step.recorded for step in engine.pipe.sent if step.recorded is not None]


def test_what_is_recorded_is_what_the_routers_chose(server: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(model, server, vram="25%") as engine:
        chosen: dict[int, list[np.ndarray]] = {}
        step = engine.loop._recorder.step

        def note(answers: list[int]) -> None:
            residency = engine.experts.residency
            each = [residency.router_ids(layer, len(answers)) for layer in range(N_LAYER)]
            for row, answer in enumerate(answers):
                chosen.setdefault(answer, []).append(np.stack([ids[row] for ids in each]))
            step(answers)

        monkeypatch.setattr(engine.loop._recorder, "step", note)
        engine.pipe.put(Record(number=5))
        names = [engine.submit(start, 12 + start) for start in (7, 11, 13)]
        engine.turn_until(lambda: all(engine.pipe.end(name) for name in names))
        engine.pipe.put(Record(number=5, wanted=False))
        engine.loop.turn()
        parts = recorded(engine)
    assert parts[0].scope is not None
    assert [(one.layer, one.experts) for one in parts[0].scope.layers] == [(at, N_EXPERT) for at in range(N_LAYER)]
    assert (parts[0].scope.top_k, parts[-1].ended) == (TOP_K, "")
    layers = [TraceLayer(layer=one.layer, experts=one.experts) for one in parts[0].scope.layers]
    answers = Answers(layers, TOP_K, 1 << 20)
    for part in parts:
        answers.add(part.answers, base64.b64decode(part.ids))
    found = answers.trace(ModelId(fingerprint="0" * 64), "", "now")
    assert [segment.tokens for segment in found.header.segments] == [11 + start for start in (7, 11, 13)]
    for (_, tokens), own in zip(found.segments(), chosen.values(), strict=True):
        assert np.array_equal(found.ids[tokens], np.sort(own, axis=-1))


def test_recording_changes_no_answer_and_ends_where_residency_does(
    server: str, model: Path, stock: dict[int, list[int]]
) -> None:
    with running(model, server, vram="50%") as engine:
        engine.pipe.put(Record(number=1))
        assert engine.answer(7) == stock[7]
        name = engine.submit(11)
        for _ in range(9):
            engine.loop.turn()
        assert [part.ended for part in recorded(engine)] == [None] * len(recorded(engine))
        engine.experts.switch_off("a test says so")
        engine.turn_until(lambda: engine.pipe.end(name) is not None)
        assert engine.tokens(name) == stock[11]
        assert recorded(engine)[-1].ended == "off: a test says so"
        n_recorded = sum(len(part.answers) for part in recorded(engine))
        assert N_TOKENS - 1 < n_recorded < 2 * (N_TOKENS - 1)
        engine.pipe.put(Record(number=2))
        engine.loop.turn()
        assert (recorded(engine)[-1].number, recorded(engine)[-1].ended) == (2, "off: a test says so")


def test_there_is_nothing_to_record_where_no_expert_may_have_a_slot(server: str, model: Path) -> None:
    for device, vram, why in (("cpu", "50%", "on the CPU alone"), (server, 0, "no expert has a slot")):
        with running(model, device, vram=vram) as engine:
            engine.pipe.put(Record(number=1))
            engine.answer(7, 4)
            (part,) = recorded(engine)
            assert why in (part.ended or "")


def test_budgets_change_while_answers_run(server: str, model: Path, stock: dict[int, list[int]]) -> None:
    with running(model, server, vram="25%") as engine:
        names = {start: engine.submit(start) for start in stock}
        for share in (0.5, 0.125, 1.0, 0.0, 0.25):
            engine.adjust(vram=f"{share * 100:g}%")
            slots = round(share * N_EXPERT)
            for _ in range(3):
                engine.loop.turn()
            engine.turn_until(lambda slots=slots: {layer.slots for layer in engine.status().layers} == {slots})
            engine.turn_until(lambda share=share: engine.status().devices[0].asked == f"{share * 100:g}%")
            (device,) = engine.status().devices
            assert device.bytes == (N_LAYER * (slots + 1) * EXPERT_MIB * MIB if slots else 0)
            assert all(layer.resident <= slots for layer in engine.status().layers)
        engine.turn_until(lambda: all(engine.pipe.end(name) for name in names.values()))
        for start, name in names.items():
            assert engine.tokens(name) == stock[start]
        engine.answer(7)
        assert all(layer.resident > 0 for layer in engine.status().layers)


def test_a_budget_of_nothing_says_so_and_can_be_raised(server: str, model: Path, stock: dict[int, list[int]]) -> None:
    with running(model, server, vram=0) as engine:
        assert engine.answer() == stock[7]
        assert "off: no expert has a slot: RPC" in engine.status().reason
        assert "was asked for 0 MiB" in engine.status().reason
        engine.adjust(vram="50%")
        engine.turn_until(lambda: engine.status().devices[0].slots > 0)
        assert engine.answer() == stock[7]
        assert engine.status().state == "on"


def test_frozen_and_pace_are_live(server: str, model: Path) -> None:
    with running(model, server, vram="25%", upload=0.0) as engine:
        engine.answer()
        assert (engine.status().moves, engine.status().devices[0].resident) == (0, 0)
        engine.adjust(vram="25%", upload=100.0)
        engine.turn_until(lambda: engine.status().upload.effective == "100 MiB/s")  # type: ignore[union-attr]
        engine.answer()
        engine.turn_until(lambda: engine.status().moves > 0)


def test_the_hot_set_comes_first_and_gives_way_to_what_is_used(server: str, model: Path, tmp_path: Path) -> None:
    path = hot_set(model, tmp_path, "few", [[3, 1]] * N_LAYER)
    with running(model, server, hot_set=path, vram="25%") as engine:
        engine.turn_until(lambda: engine.experts.mover.seeded)
        assert [set(engine.experts.residency.resident(layer)) for layer in range(N_LAYER)] == [{3, 1, -1}] * N_LAYER
        assert engine.status().moves == 0
        for start in (7, 11, 13):
            engine.answer(start)
        status = engine.status()
        assert status.moves > 0
        assert {layer.slots for layer in status.layers} == {4}
        engine.turn_until(lambda: {layer.resident for layer in engine.status().layers} == {4})


def test_an_engine_without_slots_says_what_a_change_needs(model: Path) -> None:
    with Loaded(load_command(config(model, "cpu", {"vram": ""})), lambda _: None) as made:
        engine = Engine(made)
        engine.adjust(vram="50%")
        engine.loop.turn()
        assert made.experts.status().reason.endswith("needs a new load (`hotset reload --load`)")


def test_it_ends_in_the_middle_of_moves(server: str, model: Path) -> None:
    with running(model, server, vram="50%", upload=1.0) as engine:
        engine.submit()
        for _ in range(12):
            engine.loop.turn()
        engine.adjust(vram="25%")
        engine.loop.turn()


class Clock:
    """Each look takes 20 ms, or another time while experts in VRAM are used."""

    def __init__(self, experts: Experts, with_experts: float) -> None:
        self._experts, self._with_experts, self._now = experts, with_experts, 0.0

    def __call__(self) -> float:
        on = self._experts.residency.statistics().state == hotset.State.ON
        self._now += self._with_experts if on else 0.02
        return self._now


@contextmanager
def timed(model: Path, server: str, tmp_path: Path, with_experts: float, **residency: Any) -> Iterator[Engine]:
    """An engine whose probe believes that steps with experts in VRAM take so long."""
    with Loaded(load_command(config(model, server, residency)), lambda _: None) as made:
        probe = made.probe(Store(tmp_path / "prices", Measured))
        assert probe is not None
        assert isinstance(made.experts, Experts)
        probe._clock = Clock(made.experts, with_experts)
        engine = Engine(made, probe)
        made.experts.start()
        yield engine


def test_what_does_not_pay_is_switched_off_and_says_why(
    server: str, model: Path, stock: dict[int, list[int]], tmp_path: Path
) -> None:
    with timed(model, server, tmp_path, 0.1, vram="50%") as engine:
        assert engine.answer() == stock[7]
        engine.turn_until(lambda: engine.status().gate.state == "closed")
        status = engine.status()
        assert status.state == "off"
        assert status.reason == f"off: {status.gate.reason}"
        assert status.gate.on is not None
        assert status.gate.off is not None
        assert status.gate.on < status.gate.off
        engine.turn_until(lambda: engine.experts.mover.picture.at_rest)
        moves = engine.status().moves
        assert engine.answer(11) == stock[11]
        assert engine.experts.residency.statistics().state in (hotset.State.OFF, hotset.State.COUNT)
        assert engine.status().moves == moves
        assert engine.experts.mover.controller.n_tokens > 0, "it goes on counting"
        engine.adjust(vram="50%", gate=False)
        engine.turn_until(lambda: engine.status().state == "on")
        assert engine.answer(13) == stock[13]
        assert engine.experts.residency.statistics().state == hotset.State.ON


def test_a_closed_gate_ends_a_recording_and_refuses_the_next_one(server: str, model: Path, tmp_path: Path) -> None:
    with timed(model, server, tmp_path, 0.1, vram="50%") as engine:
        engine.pipe.put(Record(number=1))
        engine.answer()
        assert recorded(engine)[0].scope is not None
        engine.turn_until(lambda: engine.status().gate.state == "closed")
        for start in (7, 11, 13):
            engine.answer(start)
        assert (recorded(engine)[-1].ended or "").startswith("off: closed: residency does not pay")
        engine.pipe.put(Record(number=2))
        engine.loop.turn()
        assert (recorded(engine)[-1].number, recorded(engine)[-1].scope) == (2, None)
        assert (recorded(engine)[-1].ended or "").startswith("off: closed: residency does not pay")


def test_what_pays_stays_on_and_is_remembered(
    server: str, model: Path, stock: dict[int, list[int]], tmp_path: Path
) -> None:
    for remembered in (False, True):
        with timed(model, server, tmp_path, 0.002, vram="50%") as engine:
            assert len(list((tmp_path / "prices").glob("*.json"))) == remembered
            assert engine.answer() == stock[7]
            engine.turn_until(lambda: engine.status().gate.state == "open")
            assert engine.status().state == "on"
            assert engine.answer(11) == stock[11]


def test_what_is_measured_in_idle_time_moves_and_teaches_nothing(
    server: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with timed(model, server, tmp_path, 0.002, vram="50%") as engine:
        probe, engine.loop._idle = engine.loop._idle, None
        monkeypatch.setattr(engine.experts, "refit", lambda judge: None)  # prices may ask for other slots
        engine.answer()
        engine.turn_until(lambda: engine.at_rest)
        engine.loop._idle = probe
        control = engine.experts.mover.controller
        before = control.n_tokens, control.n_moves
        layers = engine.status().layers
        residents = [set(engine.experts.residency.resident(layer)) for layer in range(N_LAYER)]
        engine.turn_until(lambda: engine.status().gate.state == "open")
        assert (control.n_tokens, control.n_moves) == before
        engine.turn_until(lambda: [set(engine.experts.residency.resident(n)) for n in range(N_LAYER)] == residents)
        now = engine.status().layers
        assert [(one.hits, one.misses) for one in now] == [(one.hits, one.misses) for one in layers]


def test_by_default_a_device_is_used_and_a_machine_without_one_is_no_fault(server: str, model: Path) -> None:
    with Loaded(load_command(config(model, "cpu", {})), lambda _: None) as made:
        assert made.experts.status().reason.startswith("off: the model is on the CPU alone")
        assert made.info.warnings == []
    with running(model, server) as engine:
        (device,) = engine.status().devices
        assert device.asked == "auto"
        assert device.slots == N_LAYER * N_EXPERT, "there is room for all"


@pytest.mark.parametrize("prices", [True, False])
def test_a_budget_that_changes_in_the_middle_of_the_probe_is_followed_at_once(
    server: str, model: Path, tmp_path: Path, prices: bool
) -> None:
    with timed(model, server, tmp_path, 0.002, vram="50%") as engine:
        engine.answer()
        if not prices:  # the comparison of the placement as it stands
            engine.turn_until(lambda: engine.status().gate.state == "open")
            engine.experts.gatekeeper.compare()
        engine.turn_until(lambda: engine.experts.held)
        for _ in range(30):
            engine.loop.turn()
        assert engine.experts.held
        engine.adjust(vram="25%")
        engine.turn_until(lambda: engine.status().devices[0].asked == "25%")
        assert {layer.slots for layer in engine.status().layers} == {4}
        assert not engine.experts.held
        assert engine.answer() == engine.answer()
        assert not engine.experts.mover.fault


def layout(engine: Engine) -> list[list[int]]:
    """What is in each slot, once nobody resizes any while it is read."""
    while True:
        with contextlib.suppress(hotset.ResidencyError):
            return [engine.experts.residency.resident(layer) for layer in range(N_LAYER)]


def test_no_budget_and_a_budget_again_need_no_new_load(server: str, model: Path, stock: dict[int, list[int]]) -> None:
    with running(model, server, vram="50%") as engine:
        engine.answer()
        engine.adjust(vram="")
        name = engine.status().devices[0].device
        engine.turn_until(lambda: f"{name} was asked for nothing" in engine.status().reason)
        status = engine.status()
        assert (status.state, status.devices[0].slots, status.devices[0].bytes) == ("off", 0, 0)
        assert engine.answer(11) == stock[11]
        engine.adjust(vram="25%")
        engine.turn_until(lambda: engine.status().devices[0].slots == N_LAYER * 4)
        assert engine.answer(13) == stock[13]
        engine.turn_until(lambda: engine.status().state == "on")


def hot_set(model: Path, tmp_path: Path, name: str, listed: list[list[int]]) -> str:
    path = tmp_path / "hot.json"
    layers = [{"layer": layer, "experts": experts} for layer, experts in enumerate(listed)]
    content = {"format": 1, "model": {"fingerprint": check(model).fingerprint}}
    path.write_text(json.dumps(content | {"sizes": [{"name": name, "layers": layers}]}), "utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("vram", "why"),
    [
        ({"Vulkan7": "50%"}, "residency.vram names Vulkan7, but the model is on RPC"),
        ("many", "there is no size many; its sizes are few"),
    ],
)
def test_a_budget_that_cannot_be_is_told_and_costs_nothing(
    server: str, model: Path, tmp_path: Path, vram: Any, why: str
) -> None:
    path = hot_set(model, tmp_path, "few", [[3, 1]] * N_LAYER)
    with running(model, server, hot_set=path, vram="50%") as engine:
        engine.answer()
        engine.turn_until(lambda: engine.at_rest or engine.status().state == "on")
        engine.adjust(hot_set=path, vram=vram, upload=7.0)
        engine.turn_until(lambda: why in engine.status().reason)
        status = engine.status()
        assert "; budgets stay as they were" in status.reason
        assert {layer.slots for layer in status.layers} == {N_EXPERT // 2}
        assert all(layer.resident > 0 for layer in status.layers)
        assert (status.state, status.devices[0].asked) == ("on", "50%")
        assert status.upload is not None
        assert status.upload.effective == "7 MiB/s", "the rest is in force"
        engine.adjust(hot_set=path, vram="50%", upload=7.0)
        engine.turn_until(lambda: why not in engine.status().reason)
        assert not engine.experts.mover.fault


def test_a_reserve_for_a_device_that_is_not_there_is_told(server: str, model: Path) -> None:
    with running(model, server, vram="50%") as engine:
        asked = Config.model_validate({"residency": {"vram": "25%", "reserve": {"Vulkan7": 100}}})
        engine.pipe.put(Adjust(residency=residency_spec(asked)))
        engine.turn_until(lambda: engine.status().devices[0].asked == "25%")
        assert "residency.reserve names Vulkan7, but there is only RPC" in engine.status().reason


def test_what_is_no_budget_leaves_slots_as_the_gate_has_shared_them_out(server: str, model: Path) -> None:
    with running(model, server, vram="50%") as engine:
        engine.answer()
        engine.turn_until(lambda: engine.at_rest)
        engine.experts.mover.post(lambda: engine.experts.mover.resize([16, 8, 8, 0]))
        engine.turn_until(lambda: engine.experts.slots() == [16, 8, 8, 0])
        for change in ({"upload": 7.0}, {"gate": False}, {}):
            wanted = spec(vram="50%", **change)
            engine.adjust(vram="50%", **change)
            engine.turn_until(lambda wanted=wanted: engine.experts.placed.spec == wanted)
            assert engine.experts.slots() == [16, 8, 8, 0]
        engine.adjust(vram="25%")
        engine.turn_until(lambda: engine.experts.slots() == [4, 4, 4, 4])


def test_another_budget_is_shared_out_and_measured_again_on_the_engine_s_thread(
    server: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with timed(model, server, tmp_path, 0.002, vram="50%") as engine:
        engine.answer()
        engine.turn_until(lambda: engine.status().gate.state == "open")
        keeper, threads = engine.experts.gatekeeper, []
        for name in ("refit", "restart", "obey"):
            act = getattr(keeper, name)
            note = lambda act=act, name=name: (threads.append((name, threading.current_thread())), act())[1]  # noqa: E731
            monkeypatch.setattr(keeper, name, note)
        engine.adjust(vram="25%")
        engine.turn_until(lambda: {"refit", "restart", "obey"} <= {name for name, _ in threads})
        assert {thread for _, thread in threads} == {threading.current_thread()}


def test_frozen_experts_are_those_of_the_hot_set_whatever_the_budget(server: str, model: Path, tmp_path: Path) -> None:
    listed = [[(3 * layer + 5 * n) % N_EXPERT for n in range(8)] for layer in range(N_LAYER)]
    path = hot_set(model, tmp_path, "half", listed)

    def residents(engine: Engine) -> list[set[int]]:
        return [set(owners) for owners in layout(engine)]

    with running(model, server, hot_set=path, vram="25%", frozen=True) as engine:
        for share in (0.25, 0.5, 0.125, 0.5):
            n = round(share * N_EXPERT)
            engine.adjust(hot_set=path, vram=f"{share * 100:g}%", frozen=True)
            engine.turn_until(lambda n=n: residents(engine) == [set(experts[:n]) for experts in listed])
            engine.answer(7)
        engine.adjust(hot_set=path, vram="75%")
        engine.turn_until(lambda: set(engine.experts.slots()) == {12})
        for start in (7, 11, 13):
            engine.answer(start)
        assert any(set(experts) != found for experts, found in zip(listed, residents(engine), strict=True))
        engine.adjust(hot_set=path, vram="75%", frozen=True)
        engine.turn_until(lambda: residents(engine) == [set(experts) for experts in listed])
        engine.turn_until(lambda: "lists no more experts" in engine.status().devices[0].why)


def test_frozen_experts_serve_a_request_that_interrupts_the_probe(
    server: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hot_set(model, tmp_path, "half", [list(range(8))] * N_LAYER)
    with timed(model, server, tmp_path, 0.002, hot_set=path, vram="50%", frozen=True) as engine:
        engine.turn_until(lambda: engine.experts.mover.seeded)
        before = layout(engine)
        engine.turn_until(lambda: engine.experts.mover.held)
        for _ in range(60):
            engine.loop.turn()
        assert engine.experts.held
        missing: list[object] = []
        monkeypatch.setattr(engine.experts.mover, "release", lambda moves, paused: missing.extend(moves))
        engine.submit()
        engine.loop.turn()
        assert missing == []
        assert layout(engine) == before


def test_slots_that_come_later_are_tested_too(server: str, model: Path, tmp_path: Path) -> None:
    with Loaded(load_command(config(model, server, {"vram": 0})), lambda _: None) as made:
        engine = Engine(made, made.selftest(Proofs(tmp_path)))
        made.experts.start()
        engine.answer()
        assert engine.status().selftest == "waiting"
        engine.adjust(vram="50%")
        engine.turn_until(lambda: set(engine.experts.slots()) == {8})
        engine.answer()
        engine.turn_until(lambda: engine.status().selftest == "passed")
        assert "cannot be remembered" not in engine.status().selftest_detail
        assert len(list(tmp_path.glob("*.json"))) == 1
