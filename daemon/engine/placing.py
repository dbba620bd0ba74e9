"""Makes slots for the wanted experts, as many as the devices have memory for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from daemon.engine import spare
from daemon.engine.residency import WHY_NOT, Experts
from daemon.engine.wanted import Off, Wanted
from daemon.hotset import placement
from daemon.hotset.placement import DevicePlan, ExpertLayer, Plan
from daemon.hotset.reserve import Spare
from daemon.messages import Device
from daemon.native.context import Context
from daemon.native.hotset import Layer, Reason, Residency, ResidencyError, Status

_SHRINK = 0.75
"""A device that cannot hold the slots is asked for this part of them next."""

Replan = Callable[[Mapping[str, Spare]], Plan]
"""A plan within what the devices have to spare."""


def place(
    context: Context, wanted: Wanted, devices: Callable[[], Sequence[Device]], whole: Sequence[int]
) -> Experts | Off:
    """Slots for the wanted experts; nothing is uploaded yet.

    `devices` describes those that the model is on as they are when it is called; the experts of the layers `whole` were
    loaded to their device, without a copy in memory.
    """
    try:
        residency = Residency(context.pointer)
    except ResidencyError as error:
        return Off(f"off: no expert can be kept in VRAM: {error.message}", fault=True)
    try:
        return _place(residency, context, wanted, devices(), whole)
    except ResidencyError as error:
        residency.close()
        return Off(f"off: no expert can be kept in VRAM: {error.message}", fault=True)


def _place(
    residency: Residency, context: Context, wanted: Wanted, devices: Sequence[Device], whole: Sequence[int]
) -> Experts | Off:
    names = [device.name for device in devices]
    found = residency.layers()
    layers = _placeable(found, wanted, names, whole)
    spares = spare.by_device(devices, wanted.budgets, wanted.reserves)
    plan = _allocate(
        residency, layers, spares, lambda limits: placement.plan(wanted.hot_set, layers, wanted.budgets, limits)
    )
    if plan.n_experts or any(layer.wholly for layer in layers):
        return Experts(residency, context.synchronize, wanted.file, plan, layers, names)
    residency.close()
    return Off(f"off: {_nothing(found, plan)}", fault=True)


def _placeable(found: Sequence[Layer], wanted: Wanted, names: Sequence[str], whole: Sequence[int]) -> list[ExpertLayer]:
    """The layers that can have slots, and those that need none because they lie on a device by this plan."""
    seen: Counter[int] = Counter()
    expected = {layer.key: layer.device for layer in wanted.layers}
    layers = []
    for layer in found:
        key = (layer.il, seen[layer.il])
        seen[layer.il] += 1
        wholly = layer.il in whole and layer.reason == Reason.ON_DEVICE
        if wholly or layer.reason == Reason.MANAGED:
            device = expected[key] if wholly else names[layer.device]
            layers.append(ExpertLayer(layer.index, key, layer.n_expert, layer.expert_bytes, device, wholly))
    return layers


def _allocate(residency: Residency, layers: Sequence[ExpertLayer], spares: Mapping[str, Spare], replan: Replan) -> Plan:
    """Give the layers of one device after another their slots."""
    experts: dict[int, Sequence[int]] = {}
    accounts = []
    for first in replan(spares).devices:
        own = [layer for layer in layers if layer.device == first.device and not layer.wholly]
        plan, account = _allocate_on(residency, own, first.device, spares, replan)
        experts |= {layer.index: plan.experts[layer.index] for layer in own if layer.index in plan.experts}
        accounts.append(account)
    return Plan(experts, tuple(accounts))


def _allocate_on(
    residency: Residency, layers: Sequence[ExpertLayer], device: str, spares: Mapping[str, Spare], replan: Replan
) -> tuple[Plan, DevicePlan]:
    """The slots of one device; where an allocation fails, fewer until it does not."""
    limits, why = dict(spares), ""
    while True:
        plan = replan(limits)
        account = next(one for one in plan.devices if one.device == device)
        slots = [-1] * residency.n_layers
        for layer in layers:
            slots[layer.index] = len(plan.experts.get(layer.index, ()))
        try:
            residency.resize(slots)
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
