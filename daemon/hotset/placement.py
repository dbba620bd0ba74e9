"""Static placement: which experts of a hot set become resident within the budgets of the devices; pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from daemon.hotset.budget import Auto, Budget, Bytes, Share, SizeOf, of_device
from daemon.hotset.hot_set import HotSet, LayerKey
from daemon.hotset.reserve import Spare


@dataclass(frozen=True)
class ExpertLayer:
    """A set of routed experts that could have slots on `device`. `index` is its place in the residency's list.

    `wholly` says that all of it lies on the device already, without slots and without a copy in memory.
    """

    index: int
    key: LayerKey
    n_expert: int
    expert_bytes: int
    device: str
    wholly: bool = False

    @property
    def bytes(self) -> int:
        """All experts together."""
        return self.n_expert * self.expert_bytes

    def slot_bytes(self, n_slots: int) -> int:
        """What slots take on the device: one more than asked for holds zeros, for experts that are not resident."""
        return (n_slots + 1) * self.expert_bytes if n_slots else 0


@dataclass(frozen=True)
class DevicePlan:
    """What a device was asked to hold and what it gets, in bytes; `why` is empty where it is what was asked.

    `spare` is what it had to give; None where that was no matter.
    """

    device: str
    asked: str
    asked_bytes: int
    effective_bytes: int
    why: str
    spare: Spare | None = None


@dataclass(frozen=True)
class Plan:
    """Experts of each layer's slots, in slot order (layer index -> expert ids), and the account of each device."""

    experts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    devices: tuple[DevicePlan, ...] = ()

    @property
    def n_experts(self) -> int:
        """Experts of all layers."""
        return sum(map(len, self.experts.values()))

    def slots(self, n_layers: int) -> list[int]:
        """Slots of each layer, by index."""
        return [len(self.experts.get(index, ())) for index in range(n_layers)]


TOO_LITTLE = "that holds no expert and the zeros beside it"
"""Why a budget that fits the device gives no slot."""


def no_room(plan: Plan) -> str:
    """Why a plan holds no expert."""
    asked = (f"{one.device} was asked for {one.asked}, but {one.why or TOO_LITTLE}" for one in plan.devices)
    return f"no expert has a slot: {'; '.join(asked)}"


def unknown_sizes(hot_set: HotSet, budgets: Mapping[str, Budget]) -> list[str]:
    """A fault for every budget that names a size which the hot set does not have."""
    named = sorted({budget.name for budget in budgets.values() if isinstance(budget, SizeOf)})
    known = ", ".join(size.name for size in hot_set.sizes)
    return [f"there is no size {name}; its sizes are {known}" for name in named if hot_set.size(name) is None]


def asked_bytes(hot_set: HotSet, budget: Budget, layers: Sequence[ExpertLayer]) -> int:
    """Bytes that a budget asks for on the device of `layers`."""
    if isinstance(budget, Bytes):
        return budget.n
    if isinstance(budget, Share | Auto):
        part = 1.0 if isinstance(budget, Auto) else budget.fraction
        return sum(layer.slot_bytes(round(part * layer.n_expert)) for layer in layers)
    size = hot_set.size(budget.name)
    ranking = size.by_layer() if size else {}
    return sum(layer.slot_bytes(len(ranking.get(layer.key, ()))) for layer in layers)


def plan(
    hot_set: HotSet, layers: Sequence[ExpertLayer], budgets: Mapping[str, Budget], spare: Mapping[str, Spare]
) -> Plan:
    """Slots and experts for every layer that can have them.

    Every layer of a device gets the same share of its ranking, so a budget that is too small for a selection takes the
    most used experts of each layer. `spare` is what the devices may give; those without an entry are not limited.
    Layers that lie wholly on the device count against its budget.
    """
    by_device: defaultdict[str, list[ExpertLayer]] = defaultdict(list)
    for layer in layers:
        by_device[layer.device].append(layer)
    experts: dict[int, Sequence[int]] = {}
    accounts = []
    for device, group in by_device.items():
        budget = of_device(budgets, device)
        if budget is None:
            why = "residency.vram has no budget for this device"
            accounts.append(DevicePlan(device, "nothing", 0, 0, why, spare.get(device)))
            continue
        chosen, account = _on_device(hot_set, group, device, budget, spare.get(device))
        experts |= chosen
        accounts.append(account)
    return Plan(experts, tuple(accounts))


def _on_device(
    hot_set: HotSet, layers: Sequence[ExpertLayer], device: str, budget: Budget, spare: Spare | None
) -> tuple[dict[int, Sequence[int]], DevicePlan]:
    asked = asked_bytes(hot_set, budget, layers)
    wholly = sum(layer.bytes for layer in layers if layer.wholly)
    limit = max(asked - wholly, 0)
    left = limit if spare is None or spare.n_bytes is None else min(limit, spare.n_bytes)
    open_layers = [layer for layer in layers if not layer.wholly]
    wanted = _wanted(hot_set, budget, open_layers)
    chosen = _within(wanted, open_layers, left)
    n_chosen, n_wanted = (sum(map(len, lists.values())) for lists in (chosen, wanted))
    why = spare.why if spare is not None and left < limit and n_chosen < n_wanted else ""
    if n_chosen == n_wanted < _n_asked(budget, open_layers, limit):
        why = f"the hot set's size {hot_set.largest.name} lists no more experts"
    if not why and not n_wanted and isinstance(budget, SizeOf):
        why = f"the hot set's size {budget.name} lists no expert of its layers"
    effective = wholly + sum(layer.slot_bytes(len(chosen.get(layer.index, ()))) for layer in open_layers)
    return chosen, DevicePlan(device, str(budget), asked, effective, why, spare)


def _wanted(hot_set: HotSet, budget: Budget, layers: Sequence[ExpertLayer]) -> dict[int, Sequence[int]]:
    """The experts that a budget would take if memory were no matter."""
    size = hot_set.size(budget.name) if isinstance(budget, SizeOf) else hot_set.largest
    ranking = size.by_layer() if size else {}
    wanted: dict[int, Sequence[int]] = {}
    for layer in layers:
        listed = ranking.get(layer.key, [])
        wanted[layer.index] = listed[: round(budget.fraction * layer.n_expert)] if isinstance(budget, Share) else listed
    return wanted


def _n_asked(budget: Budget, layers: Sequence[ExpertLayer], limit: int) -> int:
    """Experts that a ranking of all of them would have given."""
    if isinstance(budget, Share):
        return sum(round(budget.fraction * layer.n_expert) for layer in layers)
    if isinstance(budget, Bytes | Auto):
        everything = {layer.index: range(layer.n_expert) for layer in layers}
        return sum(map(len, _within(everything, layers, limit).values()))
    return 0


def _within(wanted: Mapping[int, Sequence[int]], layers: Sequence[ExpertLayer], limit: int) -> dict[int, Sequence[int]]:
    """The first experts of each list, in equal shares, as many as `limit` bytes hold."""
    sizes = {layer.index: layer for layer in layers}
    n_taken: defaultdict[int, int] = defaultdict(int)
    for rank, index in _in_turn(wanted):
        layer = sizes[index]
        cost = layer.slot_bytes(rank + 1) - layer.slot_bytes(rank)
        if cost > limit:
            break
        limit -= cost
        n_taken[index] = rank + 1
    return {index: wanted[index][:n] for index, n in n_taken.items()}


def _in_turn(wanted: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Every (rank, layer) in the order in which all lists grow alike."""
    steps = sorted(
        (rank / len(experts), index, rank) for index, experts in wanted.items() for rank in range(len(experts))
    )
    return ((rank, index) for _, index, rank in steps)
