"""What status says of experts in VRAM, whatever the library does."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from daemon.engine.mover import Mover
from daemon.engine.placed import Placed
from daemon.engine.residency import Experts
from daemon.hotset.controller import Controller
from daemon.hotset.gate import State as GateState
from daemon.hotset.gate import Verdict
from daemon.hotset.placement import DevicePlan, ExpertLayer, Plan
from daemon.hotset.reserve import Reserve, Spare
from daemon.messages import Allowance, ResidencySpec
from daemon.native.hotset import Memory, Mode, Reason, Residency, ResidencyError, State, Status
from tests.residency_fakes import MIB, FakeResidency, layer


def made(
    residency: FakeResidency, why: str = "", wholly: tuple[ExpertLayer, ...] = (), spare: Spare | None = None
) -> Experts:
    plan = Plan({0: [7, 3, 1, 0], 1: [2, 5, 4, 6]}, (DevicePlan("V0", "50%", 12 * MIB, 10 * MIB, why, spare),))
    n = residency.n_layers
    controller = Controller([8] * n, [MIB] * n, bytes_per_second=0.0)
    placed = Placed(plan, "hot.json", ResidencySpec(frozen=True, upload=100.0))
    mover = Mover(cast(Residency, residency), controller, plan.experts)
    return Experts(cast(Residency, residency), lambda: None, placed, wholly, ["V0"], mover, lambda _: placed)


def filled(experts: Experts) -> Experts:
    experts.start()
    deadline = time.monotonic() + 10
    while not (experts.mover.seeded or experts.mover.fault):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return experts


def test_it_is_filling_until_every_planned_expert_is_there() -> None:
    residency = FakeResidency(layer(0), layer(1))
    experts = made(residency, "V0 has 10 MiB to spare")
    before = experts.status()
    assert (before.state, before.filled) == ("filling", 0.0)
    assert before.reason == (
        "filling: 8 of 16 experts of hot.json have slots; 10.0 MiB on V0; V0 was asked for 50%, but V0 has 10 MiB to "
        "spare; 2 layers' weights lie in pinned memory"
    )
    after = filled(experts).status()
    assert (after.state, after.filled, after.uploaded_bytes) == ("on", 1.0, 8 * MIB)
    assert residency.staged[:2] == [(0, 7, 0), (0, 3, 1)]
    assert (after.placement, after.moves, after.hit_rate) == ("static", 0, None)
    assert after.upload == Allowance(asked="100 MiB/s", effective="0 MiB/s", why="residency.frozen is true")
    assert (after.devices[0].bytes, after.devices[0].resident, after.devices[0].asked_bytes) == (10 * MIB, 8, 12 * MIB)
    experts.close()
    assert residency.closed


def test_the_reserve_of_a_device_and_shared_memory_are_told() -> None:
    kept = Reserve(64 * MIB, "auto", "for the system")
    own = made(FakeResidency(layer(0), layer(1)), spare=Spare(MIB, kept, "")).status()
    (device,) = own.devices
    assert (device.reserve_asked, device.reserve_bytes, device.reserve_why) == ("auto", 64 * MIB, "for the system")
    assert not device.shared_memory
    assert "shares" not in own.reason
    shared = made(FakeResidency(layer(0), layer(1)), spare=Spare(MIB, kept, "", shared=True)).status()
    assert shared.devices[0].shared_memory
    assert "; V0 shares the CPU's memory" in shared.reason


def test_an_upload_that_fails_keeps_what_is_there() -> None:
    residency = FakeResidency(layer(0), layer(1))
    residency.refuse_at = 6
    status = filled(made(residency)).status()
    assert (status.state, status.filled) == ("on", 0.5)
    assert "uploads ended early: the device is gone; no expert moves any more" in status.reason


def test_whoever_waits_for_a_mover_that_failed_is_told() -> None:
    residency = FakeResidency(layer(0), layer(1))
    experts = filled(made(residency))
    residency.refuse_resize = ResidencyError(Status.FAILED, "the device is gone")
    experts.compute_as(State.OFF)
    experts.gatekeeper.gate.verdict = Verdict(GateState.CLOSED, "closed: residency does not pay")
    experts.hold()
    experts.mover.post(lambda: experts.mover.resize([2, 2]))
    experts.mover._thread.join(10)
    with pytest.raises(ResidencyError, match="the device is gone"):
        assert experts.held
    assert not experts.settled
    assert "off: closed: residency does not pay; uploads ended early: the device is gone" in experts.status().reason


def test_news_of_the_mover_wait_until_slots_are_given_back() -> None:
    experts = filled(made(FakeResidency(layer(0), layer(1))))
    heard: list[str] = []
    experts.hold()
    experts._news.append(lambda: heard.append("budgets have changed"))
    experts.synchronize()
    assert heard == []
    experts.release(())
    experts.synchronize()
    assert heard == ["budgets have changed"]
    experts.close()


def test_what_was_switched_off_for_good_moves_no_more_whatever_is_changed() -> None:
    residency = FakeResidency(layer(0), layer(1))
    residency.owners = [[-1] * 4, [-1] * 4]
    experts = filled(made(residency))
    experts.mover.controller.pace(1e12)
    experts.switch_off("the self-test failed")
    for change in (lambda: experts.let_move(True), experts.hold, lambda: experts.release(())):
        change()
    n_staged = len(residency.staged)
    for _ in range(3):
        experts.mover.observe(np.tile(np.array([4, 6], np.int32), (1, 2, 1)), 1)
    passed = threading.Event()
    for _ in range(2):  # a turn comes between them
        passed.clear()
        experts.mover.post(passed.set)
        assert passed.wait(10)
    experts.close()
    assert len(residency.staged) == n_staged


def test_no_thread_for_the_upload_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    experts = made(FakeResidency(layer(0), layer(1)))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    experts.start()
    assert "no thread can be started" in experts.status().reason
    experts.close()


def test_switched_off_by_us_or_by_the_library_is_told_with_its_reason() -> None:
    residency = FakeResidency(layer(0), layer(1))
    experts = filled(made(residency))
    experts.compute_as(State.OFF)
    assert experts.status().state == "on", "only for a while"
    experts.compute_as(State.ON)
    residency.state = State.OFF
    assert experts.status().reason.startswith("off: a device had no room for the compute buffers")
    other = filled(made(FakeResidency(layer(0), layer(1))))
    other.switch_off("the self-test failed")
    assert (other.status().state, other.status().reason) == ("off", "off: the self-test failed")


def test_a_gate_is_no_reason_where_there_is_nothing_to_switch_off() -> None:
    residency = FakeResidency(layer(0), layer(1))
    experts = filled(made(residency))
    verdict = Verdict(GateState.CLOSED, "closed: residency does not pay")
    experts.gatekeeper.gate.verdict = verdict
    experts.placed = replace(experts.placed, note="there is no size many; budgets stay as they were")
    told = "off: closed: residency does not pay; there is no size many; budgets stay as they were"
    assert experts.status().reason == told
    residency.resize([0, 0])
    assert experts.status().reason.startswith("off: no expert has a slot: V0 was asked for 50%")
    assert experts.status().reason.endswith("; there is no size many; budgets stay as they were")
    experts.close()


def test_what_was_chosen_before_residency_went_off_is_not_taken_for_news() -> None:
    residency = FakeResidency(layer(0), layer(1))
    experts = filled(made(residency))
    assert experts.decoded(1, 0.01) is not None
    residency.state = State.OFF
    experts.status()
    assert experts.decoded(1, 0.01) is None
    assert experts.chosen is None
    experts.close()


def test_layers_without_slots_say_why_and_those_without_a_copy_are_counted() -> None:
    gone = {"n_slots": 0, "device_bytes": 0, "mode": Mode.COLD, "memory": Memory.NONE, "device": -1}
    whole = ExpertLayer(2, (3, 0), 8, MIB, "V0", wholly=True)
    residency = FakeResidency(
        layer(0, memory=Memory.MAPPED),
        layer(1, memory=Memory.PAGEABLE),
        layer(2, reason=Reason.ON_DEVICE, **gone),
        layer(3, reason=Reason.NO_DEVICE, **gone | {"memory": Memory.PINNED}),
    )
    status = filled(made(residency, wholly=(whole,))).status()
    assert [one.mode for one in status.layers] == ["partial", "partial", "device", "cold"]
    assert [one.memory for one in status.layers] == ["mapped", "pageable", "", "pinned"]
    assert [bool(one.reason) for one in status.layers] == [False, False, True, True]
    assert [one.device for one in status.layers] == ["V0", "V0", "V0", ""]
    assert status.devices[0].bytes == 18 * MIB
    assert "1 layers lie there without a copy in memory" in status.reason
    assert "mapped file" in status.reason
    assert "pinned" not in status.reason, "no device reads what a layer of the CPU lies in"


def test_a_hold_while_slots_fill_leaves_the_rest_until_it_is_over() -> None:
    class Holding(FakeResidency):
        def stage(self, index: int, expert: int, slot: int) -> None:
            if not self.staged:
                experts.mover.hold()
            super().stage(index, expert, slot)

    residency = Holding(layer(0), layer(1))
    experts = made(residency)
    experts.start()
    deadline = time.monotonic() + 10
    while not experts.mover.held:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.02)
    assert {index for index, _, _ in residency.staged} == {0}
    assert sorted(residency.owners[0]) == [0, 1, 3, 7]
    experts.mover.release((), paused=False)
    while not experts.mover.seeded:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert experts.status().filled == 1.0
    assert sorted(residency.owners[1]) == [2, 4, 5, 6]
    experts.close()
