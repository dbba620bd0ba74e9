"""Makes slots for experts, as many as the devices have memory for: at the start, and again when budgets change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from daemon.engine import spare
from daemon.engine.learnings import Keeper, Memory
from daemon.engine.mover import Mover
from daemon.engine.placed import Placed
from daemon.engine.residency import Experts
from daemon.engine.residency_report import WHY_NOT
from daemon.engine.wanted import Off, Wanted, strange_reserves
from daemon.hotset import placement, reserve
from daemon.hotset.budget import MIB, Budget, parse
from daemon.hotset.controller import Controller
from daemon.hotset.curves import OBSERVED_TOKENS, expected, observed
from daemon.hotset.hot_set import HotSet, LayerKey
from daemon.hotset.judge import Judge
from daemon.hotset.placement import DevicePlan, ExpertLayer, Plan
from daemon.hotset.refit import refit
from daemon.hotset.reserve import Reserved, Spare
from daemon.messages import Device, ResidencySpec
from daemon.native.context import Context
from daemon.native.hotset import Layer, Reason, Residency, ResidencyError, Status

_SHRINK = 0.75
"""A device that cannot hold the slots is asked for this part of them next."""

Devices = Callable[[], Sequence[Device]]
"""Those that the model is on, as they are when it is called."""


def place(
    context: Context, wanted: Wanted, devices: Devices, whole: Sequence[int], memory: Memory | None = None
) -> Experts | Off:
    """Slots for the wanted experts; nothing is uploaded yet.

    The experts of the layers `whole` were loaded to their device, without a copy in memory. `memory` is what was known
    about the model; None: nothing, and what is learned is not kept.
    """
    try:
        residency = Residency(context.pointer)
    except ResidencyError as error:
        return Off(f"off: no expert can be kept in VRAM: {error.message}", fault=True)
    try:
        return _place(residency, context, wanted, devices, whole, memory)
    except ResidencyError as error:
        residency.close()
        return Off(f"off: no expert can be kept in VRAM: {error.message}", fault=True)


def _place(
    residency: Residency,
    context: Context,
    wanted: Wanted,
    devices: Devices,
    whole: Sequence[int],
    memory: Memory | None,
) -> Experts | Off:
    names = [device.name for device in devices()]
    found = residency.layers()
    layers = _placeable(found, wanted, names, whole)
    placer = Placer(residency, wanted, layers, devices)
    plan = placer.place(wanted.ranking, wanted.budgets, wanted.reserves, residency.resize)
    if not layers or not (plan.n_experts or wanted.live or any(layer.wholly for layer in layers)):
        residency.close()
        return Off(f"off: {_nothing(found, plan)}", fault=True)
    controller = Controller(
        [layer.n_expert for layer in found],
        [layer.expert_bytes for layer in found],
        bytes_per_second=0.0 if wanted.spec.frozen else wanted.spec.upload * MIB,
        padded=residency.ragged,
    )
    keeper = Keeper(memory, _keys(found), controller) if memory else None
    mover = Mover(residency, controller, wanted.seeds(plan, layers), keeper=keeper)
    follower = Follower(placer, mover)
    placed = Placed(plan, wanted.file, wanted.spec)
    return Experts(residency, context.synchronize, placed, layers, names, mover, follower)


@dataclass(frozen=True)
class Follower:
    """Changes the slots of an engine that serves, on the mover's thread."""

    placer: Placer
    mover: Mover

    def follow(self, placed: Placed, spec: ResidencySpec) -> Placed:
        """Put what is live of another [residency] into force; budgets that cannot be change nothing."""
        self.mover.controller.pace(0.0 if spec.frozen else spec.upload * MIB)
        budgets = {name: parse(text) for name, text in spec.vram.items()}
        before = {"vram": placed.spec.vram, "reserve": placed.spec.reserve}
        if problem := self.placer.wanted.problem(budgets):
            note = f"{problem}; budgets stay as they were"
            return replace(placed, spec=spec.model_copy(update=before), note=note)
        followed = replace(placed, spec=spec, note=strange_reserves(spec.reserve, self.placer.wanted.devices))
        if (spec.vram, spec.reserve, spec.frozen) == (placed.spec.vram, placed.spec.reserve, placed.frozen):
            return followed
        reserves = {name: reserve.parse(text) for name, text in spec.reserve.items()}
        order = self.placer.wanted.order(spec.frozen)
        plan = self.placer.place(order, budgets, reserves, self.mover.resize)
        if spec.frozen:
            self.mover.bring(plan.experts)
        return replace(followed, plan=plan)

    def refit(self, placed: Placed, judge: Judge) -> Placed:
        """Other slots within the same budgets, where they are predicted to be clearly faster."""
        control = self.mover.controller
        found = self.placer.residency.layers()
        managed = [layer.index for layer in found if layer.reason is Reason.MANAGED]
        known = control.n_ranked >= OBSERVED_TOKENS
        hits = control.curves()[managed]
        curves = observed(hits, control.n_ranked, [expected(found[index].n_expert) for index in managed])
        slots = [-1] * len(found)
        for account in placed.plan.devices:
            own = [layer.index for layer in self.placer.layers if layer.device == account.device and not layer.wholly]
            places = [managed.index(index) for index in own]
            wholly = sum(layer.bytes for layer in self.placer.layers if layer.wholly and layer.device == account.device)
            better = refit(
                judge.prices(),
                [judge.layers[place] for place in places],
                [curves[place] for place in places],
                hits[places] if known else None,
                [found[index].n_slots for index in own],
                account.effective_bytes - wholly,
            )
            for index, n in zip(own, better or (), strict=bool(better)):
                slots[index] = n
        return self._changed(placed, slots)

    def _changed(self, placed: Placed, slots: Sequence[int]) -> Placed:
        if all(n < 0 for n in slots):
            return placed
        try:
            self.mover.resize(slots)
        except ResidencyError as error:
            if error.refusal is not Status.NO_MEMORY:
                raise
        ranking = self.placer.wanted.followed.largest.by_layer()
        now = self.placer.residency.layers()
        experts = {layer.index: ranking.get(layer.key, [])[: now[layer.index].n_slots] for layer in self.placer.layers}
        return replace(placed, plan=replace(placed.plan, experts=experts))


def _placeable(found: Sequence[Layer], wanted: Wanted, names: Sequence[str], whole: Sequence[int]) -> list[ExpertLayer]:
    """The layers that can have slots, and those that need none because they lie on a device by this plan."""
    expected = {layer.key: layer.device for layer in wanted.layers}
    layers = []
    for layer, key in zip(found, _keys(found), strict=True):
        wholly = layer.il in whole and layer.reason == Reason.ON_DEVICE
        if wholly or layer.reason == Reason.MANAGED:
            device = expected[key] if wholly else names[layer.device]
            layers.append(ExpertLayer(layer.index, key, layer.n_expert, layer.expert_bytes, device, wholly))
    return layers


def _keys(found: Sequence[Layer]) -> list[LayerKey]:
    """Names of the sets of experts; a second set of a layer is found after the first."""
    seen: Counter[int] = Counter()
    keys = []
    for layer in found:
        keys.append((layer.il, seen[layer.il]))
        seen[layer.il] += 1
    return keys


@dataclass(frozen=True)
class Placer:
    """Turns budgets into slots. What slots take already is counted as free: they are what changes."""

    residency: Residency
    wanted: Wanted
    layers: Sequence[ExpertLayer]
    devices: Devices

    def place(
        self,
        order: HotSet,
        budgets: Mapping[str, Budget],
        reserves: Mapping[str, Reserved],
        resize: Callable[[Sequence[int]], None],
    ) -> Plan:
        """Give the layers of one device after another their slots, by `resize`; experts get them in this order.

        Raises:
            ResidencyError: refused for another reason than memory.
        """
        spares = self._spares(budgets, reserves)
        experts: dict[int, Sequence[int]] = {}
        accounts = []
        for first in self._plan(order, budgets, spares).devices:
            own = [layer for layer in self.layers if layer.device == first.device and not layer.wholly]
            plan, account = self._place_on(own, first.device, partial(self._plan, order, budgets), spares, resize)
            experts |= {layer.index: plan.experts[layer.index] for layer in own if layer.index in plan.experts}
            accounts.append(account)
        return Plan(experts, tuple(accounts))

    def _plan(self, order: HotSet, budgets: Mapping[str, Budget], spares: Mapping[str, Spare]) -> Plan:
        return placement.plan(order, self.layers, budgets, spares)

    def _spares(self, budgets: Mapping[str, Budget], reserves: Mapping[str, Reserved]) -> dict[str, Spare]:
        held: Counter[str] = Counter()
        now = self.residency.layers()
        for layer in self.layers:
            if not layer.wholly:
                held[layer.device] += now[layer.index].device_bytes
        return spare.by_device(self.devices(), budgets, reserves, held)

    def _place_on(
        self,
        layers: Sequence[ExpertLayer],
        device: str,
        plan_within: Callable[[Mapping[str, Spare]], Plan],
        spares: Mapping[str, Spare],
        resize: Callable[[Sequence[int]], None],
    ) -> tuple[Plan, DevicePlan]:
        """The slots of one device; where an allocation fails, fewer until it does not."""
        limits, why = dict(spares), ""
        while True:
            plan = plan_within(limits)
            account = next(one for one in plan.devices if one.device == device)
            slots = [-1] * self.residency.n_layers
            for layer in layers:
                slots[layer.index] = len(plan.experts.get(layer.index, ()))
            try:
                resize(slots)
            except ResidencyError as error:
                if error.refusal != Status.NO_MEMORY:
                    raise
                why = why or error.message
                taken = sum(layer.slot_bytes(slots[layer.index]) for layer in layers)
                limits[device] = replace(spares[device], n_bytes=int(_SHRINK * taken))
            else:
                return plan, replace(account, why=why or account.why)


def _nothing(found: Sequence[Layer], plan: Plan) -> str:
    """Why no expert was placed."""
    if not plan.devices:
        reasons = Counter(WHY_NOT[layer.reason] for layer in found)
        return "no layer can keep experts in VRAM: " + ", ".join(f"{n} because {why}" for why, n in reasons.items())
    return placement.no_room(plan)
