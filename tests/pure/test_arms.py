"""Placements for a probe: what each arm holds, that no memory beyond what was there is taken, that all comes back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.engine import arms as module
from daemon.engine.arms import MOST_WHOLE, Arms, choose_whole
from daemon.hotset.prices import Arm
from daemon.native.hotset import Layer, Mode, Move, Reason, ResidencyError, State, Status

SIZE = 10


@dataclass
class Slab:
    """Slots of one layer, as the library keeps them."""

    n_expert: int
    device: int = 0
    reason: Reason = Reason.MANAGED
    owner: list[int] = field(default_factory=list)
    staged: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return (len(self.owner) + 1) * SIZE if self.owner else 0

    def resize(self, n: int) -> None:
        keep = min(n, len(self.owner))
        for slot in range(keep, len(self.owner)):
            if self.owner[slot] >= 0 and -1 in self.owner[:keep]:
                free = self.owner.index(-1)
                self.owner[free] = self.staged[free] = self.owner[slot]
        self.owner = self.owner[:keep] + [-1] * (n - keep)
        self.staged = self.staged[:keep] + [-1] * (n - keep)


class Library:
    """Behaves as the C API says, and notes the most bytes that were held at once on each device."""

    def __init__(self, slabs: list[Slab]) -> None:
        self.slabs, self.n_layers = slabs, len(slabs)
        self.peak: dict[int, int] = {}
        self.staged = 0
        self.cpu_us = 0
        self.computing = False
        self.refuse_above: int | None = None
        self._note({})

    def held(self, device: int) -> int:
        return sum(slab.bytes for slab in self.slabs if slab.device == device)

    def _note(self, more: dict[int, int]) -> None:
        for device in {slab.device for slab in self.slabs}:
            now = self.held(device) + more.get(device, 0)
            self.peak[device] = max(self.peak.get(device, 0), now)

    def layers(self) -> list[Layer]:
        return [self._layer(index, slab) for index, slab in enumerate(self.slabs)]

    def _layer(self, index: int, slab: Slab) -> Layer:
        resident = sum(owner >= 0 for owner in slab.owner)
        mode = Mode.COLD if not slab.owner else Mode.FULL if resident == slab.n_expert else Mode.PARTIAL
        return Layer(index, index, slab.n_expert, 2, len(slab.owner), resident, mode, slab.reason, slab.device, SIZE,
                     slab.bytes, 7 * index, index)  # fmt: skip

    def resident(self, index: int) -> list[int]:
        return list(self.slabs[index].owner)

    def stage(self, index: int, expert: int, slot: int) -> None:
        slab = self.slabs[index]
        if slab.owner[slot] >= 0:
            raise ResidencyError(Status.SLOT_IN_USE, "in use")
        slab.staged[slot] = expert
        self.staged += 1

    def publish(self, moves: Iterable[Move]) -> None:
        assert not self.computing, "nobody would ever come to a boundary"
        owners = [list(slab.owner) for slab in self.slabs]
        for index, slot, expert in moves:
            if expert >= 0 and (owners[index][slot] >= 0 or self.slabs[index].staged[slot] != expert):
                raise ResidencyError(Status.NOT_STAGED, "not staged")
            if expert >= 0 and expert in owners[index]:
                raise ResidencyError(Status.RESIDENT, "already there")
            owners[index][slot] = expert
        for slab, owner in zip(self.slabs, owners, strict=True):
            slab.owner = owner

    def resize(self, slots: Sequence[int]) -> None:
        assert not self.computing, "nobody would ever come to a boundary"
        changed = [(slab, n) for slab, n in zip(self.slabs, slots, strict=True) if n not in (-1, len(slab.owner))]
        more: dict[int, int] = {}
        for slab, n in changed:
            more[slab.device] = more.get(slab.device, 0) + (n + 1) * SIZE * bool(n)
        if self.refuse_above is not None and any(n > self.refuse_above for _, n in changed):
            raise ResidencyError(Status.NO_MEMORY, "too little memory")
        self._note(more)
        for slab, n in changed:
            slab.resize(n)

    def statistics(self) -> Any:
        return self


class Placement:
    """Remembers what is asked of it."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.settled, self.held, self.frozen = True, False, False
        self.patience = 0
        self.asked = False
        self.state = State.ON
        self.missing: list[Move] = []

    def hold(self) -> None:
        assert not self.asked
        self.asked = True
        self.held = not self.patience

    def compute_as(self, state: State) -> None:
        assert self.held
        self.state = state

    def synchronize(self) -> None:
        self.library.computing = False

    def release(self, missing: Sequence[Move]) -> None:
        assert self.asked
        self.asked = self.held = False
        self.missing = list(missing)
        for index, slot, expert in missing:
            self.library.stage(index, expert, slot)
        self.library.publish(missing)


def slab(n_expert: int, resident: Sequence[int], n_slots: int | None = None, **more: Any) -> Slab:
    owner = [*resident, *[-1] * ((len(resident) if n_slots is None else n_slots) - len(resident))]
    return Slab(n_expert, owner=list(owner), staged=list(owner), **more)


def quarter(n_layers: int = 12, n_expert: int = 16) -> list[Slab]:
    return [slab(n_expert, [(index + n) % n_expert for n in range(n_expert // 4)]) for index in range(n_layers)]


def made(slabs: list[Slab]) -> tuple[Arms, Library, Placement]:
    library = Library(slabs)
    placement = Placement(library)
    return Arms(library, placement), library, placement  # type: ignore[arg-type]


def arrange(arms: Arms, whole: bool = True) -> int:
    arms.begin(whole)
    n = 0
    while not arms.advance():
        n += 1
    return n


def test_each_arm_holds_what_it_says() -> None:
    arms, library, placement = made(quarter())
    arrange(arms)
    setup = arms.setup()
    assert setup.whole
    assert set(setup.whole) < set(setup.slotted) < set(range(12))
    for arm, n_each in ((Arm.WHOLE, 16), (Arm.EMPTY, 0), (Arm.NEARLY, 15), (Arm.EMPTY, 0), (Arm.WHOLE, 16)):
        arms.show(Arm.OFF)
        assert placement.state is State.OFF
        arms.show(arm)
        assert placement.state is State.ON
        residents = [layer.n_resident for layer in library.layers()]
        assert residents == [n_each if place in setup.whole else 0 for place in range(12)]


def test_arms_change_without_an_upload() -> None:
    arms, library, _ = made(quarter())
    arrange(arms)
    before = library.staged
    for arm in (*Arm, *Arm):
        if arm is not Arm.ON:
            arms.show(arm)
    assert library.staged == before == sum(12 for _ in arms.setup().whole)


def test_everything_comes_back() -> None:
    arms, library, placement = made(quarter())
    former = [library.resident(index) for index in range(12)]
    arrange(arms)
    arms.show(Arm.NEARLY)
    arms.end()
    assert placement.held is False
    assert [library.resident(index) for index in range(12)] == former
    assert library.peak == {0: 12 * 5 * SIZE}, "never more than before"


def test_frozen_experts_are_back_at_once_whenever_a_request_comes() -> None:
    arms, library, placement = made(quarter())
    former = [library.resident(index) for index in range(12)]
    placement.frozen = True
    assert not arms.fits_whole
    arrange(arms)
    assert arms.setup().whole == []
    arms.show(Arm.EMPTY)
    arms.end()
    assert (placement.missing, library.staged) == ([], 0)
    assert [library.resident(index) for index in range(12)] == former


def test_whoever_moves_experts_may_finish_first() -> None:
    arms, library, placement = made(quarter())
    placement.patience = 1
    arms.begin(whole=True)
    assert not any(arms.advance() for _ in range(5))
    assert library.peak == {0: 12 * 5 * SIZE}
    assert library.staged == 0
    library.slabs[0].owner[0] = library.slabs[0].staged[0] = 15  # the last move
    placement.held = True
    while not arms.advance():
        pass
    arms.show(Arm.EMPTY)
    arms.end()
    assert library.resident(0) == [15, 1, 2, 3]


def test_given_up_before_it_began_it_changes_nothing() -> None:
    arms, library, placement = made(quarter())
    placement.patience = 1
    arms.begin(whole=True)
    arms.advance()
    arms.end()
    assert (placement.asked, placement.missing, library.staged) == (False, [], 0)


def test_the_placement_as_it_stands_costs_nothing_to_time() -> None:
    arms, library, placement = made(quarter())
    former = [library.resident(index) for index in range(12)]
    assert arrange(arms, whole=False) == 0
    for arm in (Arm.OFF, Arm.ON, Arm.OFF):
        arms.show(arm)
        assert [library.resident(index) for index in range(12)] == former
    arms.end()
    assert (placement.missing, library.staged) == ([], 0)


def test_long_work_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 2 * SIZE)
    arms, library, _ = made(quarter())
    arms.begin(whole=True)
    steps = []
    while True:
        before = library.staged
        done = arms.advance()
        steps.append(library.staged - before)
        if done:
            break
    assert max(steps) == 2
    assert sum(steps) == 12 * len(arms.setup().whole)


def test_a_device_without_room_has_fewer_whole_layers_or_none() -> None:
    arms, library, placement = made(quarter())
    former = [library.resident(index) for index in range(12)]
    library.refuse_above = 4
    arrange(arms)
    assert arms.setup().whole == []
    arms.show(Arm.EMPTY)
    arms.end()
    assert [library.resident(index) for index in range(12)] == former
    assert placement.held is False


def test_slots_that_do_not_come_back_are_not_asked_for() -> None:
    arms, library, placement = made(quarter())
    arrange(arms)
    library.refuse_above = 0
    arms.end()
    donors = [index for index in range(12) if not library.slabs[index].owner]
    assert donors
    assert all(index not in donors for index, _, _ in placement.missing)
    assert placement.held is False


def test_other_refusals_are_not_swallowed() -> None:
    arms, library, _ = made(quarter())
    arms.begin(whole=True)
    library.slabs[0].owner.clear()
    library.resize = lambda _slots: (_ for _ in ()).throw(ResidencyError(Status.FAILED, "lost"))  # type: ignore
    with pytest.raises(ResidencyError, match="lost"):
        arms.advance()


def test_whatever_is_refused_at_the_end_the_placement_is_given_back() -> None:
    arms, library, placement = made(quarter())
    arrange(arms)
    library.resize = lambda _slots: (_ for _ in ()).throw(ResidencyError(Status.FAILED, "lost"))  # type: ignore
    arms.end()
    assert not placement.held


def test_after_a_step_that_failed_half_way_nobody_waits_for_its_end() -> None:
    arms, library, placement = made(quarter())
    former = [library.resident(index) for index in range(12)]
    arrange(arms)
    arms.show(Arm.EMPTY)
    library.computing = True
    arms.end()
    assert [library.resident(index) for index in range(12)] == former
    assert not placement.held


def test_layers_that_cannot_have_slots_are_left_out() -> None:
    slabs = [slab(4, [0, 1]), Slab(4, reason=Reason.LORA), slab(4, [1, 2]), Slab(4), slab(4, [3, 0])]
    arms, library, _ = made(slabs)
    assert (len(arms.layers), arms.slots) == (4, [2, 2, 0, 2])
    assert arms.selections() == [(0, 0), (14, 2), (21, 3), (28, 4)]
    assert arms.fits_whole
    arrange(arms)
    setup = arms.setup()
    assert (setup.slotted, setup.whole) == ([0], [0])
    library.cpu_us = 1500
    assert arms.cpu_seconds() == 0.0015


slabs = st.lists(
    st.builds(
        lambda n_expert, order, n_resident, n_more, device: slab(
            n_expert,
            [expert for expert in order if expert < n_expert][: min(n_resident, n_expert)],
            min(n_expert, n_resident + n_more),
            device=device,
        ),
        st.integers(1, 6),
        st.permutations(range(6)),
        st.integers(0, 6),
        st.integers(0, 3),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=8,
)


@given(slabs, st.booleans(), st.integers(0, 40), st.lists(st.sampled_from(list(Arm)), max_size=4))
def test_whenever_it_ends_nothing_is_lost_and_memory_kept(
    slabs: list[Slab], whole: bool, n_steps: int, shown: list[Arm]
) -> None:
    arms, library, placement = made(slabs)
    former, held = [library.resident(index) for index in range(len(slabs))], dict(library.peak)
    arms.begin(whole)
    done = any(arms.advance() for _ in range(n_steps))
    if done:
        for arm in shown:
            if arm is not Arm.ON or not whole:
                arms.show(arm)
    arms.end()
    assert [library.resident(index) for index in range(len(slabs))] == former
    assert not placement.held
    assert library.peak == held


class TestChoice:
    def layers(self, slabs: list[Slab]) -> list[Layer]:
        return [layer for layer in Library(slabs).layers() if layer.n_slots]

    def test_those_that_lack_least_are_made_whole(self) -> None:
        found = self.layers([slab(8, [0, 1]), slab(8, range(7)), slab(8, [0, 1]), slab(8, [0, 1])])
        whole, donors = choose_whole(found)
        assert whole == [1]
        assert donors == [0, 2, 3]

    def test_full_layers_are_whole_already(self) -> None:
        assert choose_whole(self.layers([slab(4, range(4)), slab(4, range(4))])) == ([0, 1], [])

    def test_one_layer_alone_cannot_grow(self) -> None:
        assert choose_whole(self.layers([slab(4, [0, 1])])) == ([], [])

    def test_slots_stay_on_their_device(self) -> None:
        found = self.layers([slab(4, [0, 1]), *[slab(4, [0, 1], device=1) for _ in range(5)]])
        whole, donors = choose_whole(found)
        assert 0 not in (*whole, *donors)
        assert whole

    def test_not_more_than_can_be_uploaded_soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self.layers(quarter(200, 16))
        assert len(choose_whole(found)[0]) == MOST_WHOLE
        monkeypatch.setattr(module, "UPLOAD_BYTES", 2 * 12 * SIZE)
        assert len(choose_whole(found)[0]) == 2
        monkeypatch.setattr(module, "UPLOAD_BYTES", 1)
        assert len(choose_whole(found)[0]) == 1

    def test_half_of_the_layers_keep_their_slots(self) -> None:
        whole, donors = choose_whole(self.layers(quarter(20, 16)))
        assert (len(whole), len(donors)) == (3, 9)
