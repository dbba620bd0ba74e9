"""The placements that a probe times, made of the slots that there are, and put back as they were.

Slots change hands so that a few layers hold all of their experts; which experts are in use is then only a matter of
publishing, since a slot keeps what was uploaded to it. Everything that takes long is done in pieces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from daemon.hotset.prices import Arm, LayerFacts, Setup
from daemon.native.hotset import Layer, Move, Reason, Residency, ResidencyError, State, Status

MOST_WHOLE = 8
UPLOAD_BYTES = 1 << 30
"""Layers that are made whole, and what may be uploaded for it unless one layer alone needs more."""
PIECE_BYTES = 32 << 20
"""What is uploaded before a request can come in between: some milliseconds."""

Selections = tuple[int, int]
"""Hits and misses."""


class PlacementPort(Protocol):
    """Whoever places experts otherwise."""

    @property
    def settled(self) -> bool:
        """Whether residency is to be had and nothing is being uploaded, moved or resized."""

    @property
    def frozen(self) -> bool:
        """Whether no slot may be lent, since a request that comes meanwhile must find every expert in its place."""

    def hold(self) -> None:
        """Leave slots and residency's state alone until `release`, as soon as possible; what is selected from now on
        is nobody's."""

    @property
    def held(self) -> bool:
        """Whether nobody else changes or uploads anything by now.

        Raises:
            ResidencyError: it cannot be known any more.
        """

    def compute_as(self, state: State) -> None:
        """Switch residency, once it is held."""

    def synchronize(self) -> None:
        """Wait for the step that was begun. Without, what changes slots would wait for a step that never ends."""

    def release(self, missing: Sequence[Move]) -> None:
        """Look at the slots again. They are as they were, where the device still has room, but these experts are gone:
        bring them back, compute as is right, count again. Must not wait for uploads, and may come before `held`."""


class Arms:
    """One placement after the other, on the engine's thread."""

    def __init__(self, residency: Residency, placement: PlacementPort) -> None:
        self._residency, self._placement = residency, placement
        self._managed: list[Layer] = []
        self._former: dict[int, list[int]] = {}
        self._whole: list[int] = []
        self._grown: list[Layer] = []
        self._maps: dict[int, dict[int, int]] = {}
        self._work: Iterator[None] = iter(())

    @property
    def ready(self) -> bool:
        """Whether there are slots that nobody is changing."""
        return self._placement.settled

    @property
    def fits_whole(self) -> bool:
        """Whether the slots that there are could hold all experts of a layer."""
        return not self._placement.frozen and bool(choose_whole(self._slotted(self._layers()))[0])

    @property
    def layers(self) -> list[LayerFacts]:
        """Those that could have slots, in the order of every list here."""
        return [_facts(layer) for layer in self._layers()]

    @property
    def slots(self) -> list[int]:
        """Of each of them now."""
        return [layer.n_slots for layer in self._layers()]

    def setup(self) -> Setup:
        """What the arms are; once arranged."""
        found = self._layers()
        return Setup(
            layers=[_facts(layer) for layer in found],
            slotted=[place for place, layer in enumerate(found) if layer.n_slots],
            whole=[place for place, layer in enumerate(found) if layer.index in self._whole],
        )

    def begin(self, whole: bool) -> None:
        """Take the placement over; with `whole`, to give some layers slots for all of their experts if that may be."""
        self._managed, self._whole, self._grown = [], [], []
        self._former, self._maps = {}, {}
        self._work = self._arrange(whole and not self._placement.frozen)
        self._placement.hold()

    def advance(self) -> bool:
        """Do a piece of it; whether it is done.

        Raises:
            ResidencyError: the library refused something other than memory; `end` is due.
        """
        for _ in self._work:
            return False
        return True

    def show(self, arm: Arm) -> None:
        """Place experts so. No upload."""
        self._placement.compute_as(State.OFF if arm is Arm.OFF else State.ON)
        if arm is not Arm.OFF:
            self._publish({index: self._wanted(arm, index) for index in self._maps})

    def cpu_seconds(self) -> float:
        """Spent in the CPU's chains so far."""
        return self._residency.statistics().cpu_us / 1e6

    def selections(self) -> list[Selections]:
        """Of each layer so far."""
        return [(layer.hits, layer.misses) for layer in self._layers()]

    def end(self) -> None:
        """Put everything back; uploads are left to whoever places experts. Does not wait, and always gives back."""
        self._work = iter(())
        missing: list[Move] = []
        try:
            self._placement.synchronize()  # after a step that failed half-way
            self._restore_slots()
            for index in self._former:
                missing += self._restore_experts(index)
        except ResidencyError:
            pass  # a device that does not do what it did before; whoever asks it next is told
        finally:
            self._whole = []
            self._placement.release(missing)

    # -- slots

    def _arrange(self, whole: bool) -> Iterator[None]:
        while not self._placement.held:
            yield
        self._managed = self._slotted(self._layers())
        self._former = {layer.index: self._residency.resident(layer.index) for layer in self._managed}
        self._maps = {index: _published(owners) for index, owners in self._former.items()}
        if whole:
            yield from self._make_whole()

    def _make_whole(self) -> Iterator[None]:
        """Take slots from some layers, give them to the whole ones, upload what these lack."""
        whole, donors = choose_whole(self._managed)
        for index in donors:
            self._maps[index] = {}
        self._resize(dict.fromkeys(donors, 0))
        yield
        layers = {layer.index: layer for layer in self._managed}
        for layer in (layers[index] for index in whole):
            self._grown.append(layer)
            if not self._resize({layer.index: layer.n_expert}):
                return
            yield
            yield from self._upload_rest(layer)
            self._whole.append(layer.index)

    def _upload_rest(self, layer: Layer) -> Iterator[None]:
        """Experts that are not resident go to the slots that nobody has."""
        has = self._maps[layer.index]
        free = (slot for slot in range(layer.n_expert) if slot not in has)
        n_piece = max(1, PIECE_BYTES // layer.expert_bytes)
        for n, expert in enumerate(sorted(set(range(layer.n_expert)) - set(has.values())), 1):
            slot = next(free)
            self._residency.stage(layer.index, expert, slot)
            has[slot] = expert
            if n % n_piece == 0:
                yield

    def _restore_slots(self) -> None:
        """As many as each layer had, the last one that grew first; experts in the first slots stay where they are."""
        now = {layer.index: len(self._residency.resident(layer.index)) for layer in self._managed}
        larger = [layer for layer in reversed(self._grown) if now[layer.index] > layer.n_slots]
        self._publish({layer.index: {} for layer in larger})
        for layer in (*larger, *(one for one in self._managed if now[one.index] < one.n_slots)):
            self._resize({layer.index: layer.n_slots})

    def _restore_experts(self, index: int) -> list[Move]:
        """Publish those whose slot still has their bytes; the others, as far as they have a slot."""
        n_slots, kept = len(self._residency.resident(index)), self._maps[index]
        former = {slot: expert for slot, expert in _published(self._former[index]).items() if slot < n_slots}
        self._publish({index: {slot: expert for slot, expert in former.items() if kept.get(slot) == expert}})
        return [(index, slot, expert) for slot, expert in former.items() if kept.get(slot) != expert]

    def _resize(self, slots: Mapping[int, int]) -> bool:
        """Whether the device had room; without, nothing changed."""
        try:
            if slots:
                self._residency.resize([slots.get(index, -1) for index in range(self._residency.n_layers)])
        except ResidencyError as error:
            if error.refusal is not Status.NO_MEMORY:
                raise
            return False
        return True

    # -- experts

    def _wanted(self, arm: Arm, index: int) -> dict[int, int]:
        """Slot -> expert of a layer in an arm."""
        if arm is Arm.EMPTY or (arm is not Arm.ON and index not in self._whole):
            return {}
        every = self._maps[index]
        return dict(list(every.items())[:-1]) if arm is Arm.NEARLY else every

    def _publish(self, wanted: Mapping[int, Mapping[int, int]]) -> None:
        gone: list[Move] = []
        come: list[Move] = []
        for index, owners in wanted.items():
            now = _published(self._residency.resident(index))
            gone += [(index, slot, -1) for slot, expert in now.items() if owners.get(slot) != expert]
            come += [(index, slot, expert) for slot, expert in owners.items() if now.get(slot) != expert]
        if gone or come:
            self._residency.publish(gone + come)

    # -- layers

    def _layers(self) -> list[Layer]:
        return [layer for layer in self._residency.layers() if layer.reason is Reason.MANAGED]

    @staticmethod
    def _slotted(layers: Sequence[Layer]) -> list[Layer]:
        return [layer for layer in layers if layer.n_slots]


def choose_whole(layers: Sequence[Layer]) -> tuple[list[int], list[int]]:
    """Indexes of the layers to make whole and of those that give all of their slots for it, on the same device.

    Those that lack the fewest bytes first. Never more memory than now, also while a layer holds its old and its new
    slots together. Half of the layers keep their slots, unless the first whole one needs more.
    """
    whole: list[int] = []
    donors: list[int] = []
    room: defaultdict[int, int] = defaultdict(int)
    uploaded = 0
    for layer in sorted(layers, key=_lacking):
        uploads = uploaded + _lacking(layer)
        if layer.index in donors or len(whole) == MOST_WHOLE or (whole and uploads > UPLOAD_BYTES):
            continue
        others = [one for one in layers if one.index not in (*whole, *donors, layer.index)]
        given = _give(layer, others, room[layer.device])
        if given is not None and not (whole and len(donors) + len(given[0]) > len(layers) // 2):
            whole.append(layer.index)
            donors += given[0]
            room[layer.device], uploaded = given[1], uploads
    return whole, donors


def _give(layer: Layer, others: Sequence[Layer], room: int) -> tuple[list[int], int] | None:
    """Who gives slots so that `layer` can be made whole, and the room that is left then; None: that is not enough."""
    if layer.n_slots == layer.n_expert:
        return [], room
    givers: list[int] = []
    for giver in sorted(others, key=lambda one: one.n_slots):
        if room >= _slab(layer, layer.n_expert):
            break
        if giver.device == layer.device:
            givers.append(giver.index)
            room += _slab(giver, giver.n_slots)
    left = room - _slab(layer, layer.n_expert)
    return (givers, left + _slab(layer, layer.n_slots)) if left >= 0 else None


def _slab(layer: Layer, n_slots: int) -> int:
    return (n_slots + 1) * layer.expert_bytes


def _lacking(layer: Layer) -> int:
    return (layer.n_expert - layer.n_resident) * layer.expert_bytes


def _facts(layer: Layer) -> LayerFacts:
    return LayerFacts(n_expert=layer.n_expert, n_used=layer.n_expert_used, expert_bytes=layer.expert_bytes)


def _published(owners: Sequence[int]) -> dict[int, int]:
    return {slot: expert for slot, expert in enumerate(owners) if expert >= 0}
