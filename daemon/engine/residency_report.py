"""What status says of experts in VRAM."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from daemon.engine.mover import Mover, Picture
from daemon.engine.placed import Placed
from daemon.hotset import placement
from daemon.hotset.budget import MIB
from daemon.hotset.controller import Spread
from daemon.hotset.placement import DevicePlan, ExpertLayer
from daemon.messages import ExpertDevice, HeatSummary, Remembered
from daemon.messages import ExpertLayer as LayerState
from daemon.messages import Residency as Report
from daemon.native.hotset import Layer, Memory, Mode, Reason

_MODES: dict[Mode, Literal["cold", "partial", "full"]] = {
    Mode.COLD: "cold",
    Mode.PARTIAL: "partial",
    Mode.FULL: "full",
}
_MEMORY: dict[Memory, Literal["", "pinned", "pageable", "mapped"]] = {
    Memory.NONE: "",
    Memory.PINNED: "pinned",
    Memory.PAGEABLE: "pageable",
    Memory.MAPPED: "mapped",
}
_LIES_IN = {
    "pinned": "pinned memory",
    "pageable": "pageable memory, which devices read more slowly",
    "mapped": 'the mapped file, which devices read more slowly (model.load = "none" does not map it)',
}

WHY_NOT = {
    Reason.MANAGED: "",
    Reason.LORA: "an adapter changes these experts",
    Reason.REPACKED: "the CPU has these weights in its own layout",
    Reason.NOT_HOST: "the weights are not in memory that the CPU can read",
    Reason.ON_DEVICE: "the experts lie on the device, without a copy in memory",
    Reason.NO_DEVICE: "the layer belongs to the CPU",
    Reason.UNSUPPORTED: "the device cannot multiply weights of this type or shape by expert",
}

_STUCK = "no expert moves any more, and changes of [residency] wait for a new load (`hotset reload --load`)"


class Describer:
    """Words and numbers for one context. `names` are those of the devices; `wholly` lies on them without slots."""

    def __init__(self, names: Sequence[str], wholly: Sequence[ExpertLayer]) -> None:
        self._names = names
        self._wholly: Mapping[int, ExpertLayer] = {layer.index: layer for layer in wholly}

    def report(self, found: Sequence[Layer], placed: Placed, mover: Mover, off: str, closed: str = "") -> Report:
        """The state of this moment; `off` is why residency was switched off, `closed` why the gate is, else ""."""
        picture = mover.picture
        layers = [self._layer(layer, picture) for layer in found]
        n_seeds = sum(map(len, mover.seeds.values()))
        n_resident = sum(layer.resident for layer in layers if layer.slots)
        filling = not (mover.seeded or mover.fault)
        n_slots = sum(layer.slots for layer in layers)
        off = off or ("" if n_slots or self._wholly else placement.no_room(placed.plan)) or closed
        state: Literal["off", "filling", "on"] = "off" if off else "filling" if filling else "on"
        words = [off] if off else self._words(layers, placed, mover.fault)
        words += [placed.note] if placed.note else []
        words += [f"uploads ended early: {mover.fault}; {_STUCK}"] if mover.fault else []
        return Report(
            state=state,
            reason=f"{state}: {'; '.join(words)}",
            filled=n_resident / n_seeds if filling and n_seeds else n_resident / n_slots if n_slots else 1.0,
            devices=[self._device(account, layers, found) for account in placed.plan.devices],
            layers=layers,
            placement="static" if placed.frozen or mover.fault else "live",
            moves=picture.n_moves,
            hit_rate=picture.hit_rate,
            upload=placed.upload(),
            remembered=mover.keeper.report if mover.keeper else Remembered(),
        )

    def _words(self, layers: Sequence[LayerState], placed: Placed, fault: str) -> list[str]:
        accounts, whole = placed.plan.devices, len(self._wholly)
        memory = Counter(layer.memory for layer in layers if layer.device)
        slots, experts = sum(layer.slots for layer in layers), sum(layer.experts for layer in layers)
        follow = "" if placed.frozen or fault else ", which follow the traffic"
        return [
            f"{slots} of {experts} experts{f' of {placed.file}' if placed.file else ''} have slots{follow}",
            *(f"{one.effective_bytes / MIB:.1f} MiB on {one.device}" for one in accounts if one.effective_bytes),
            *([f"{whole} layers lie there without a copy in memory, which is short"] if whole else []),
            *(f"{one.device} was asked for {one.asked}, but {one.why}" for one in accounts if one.why),
            *(f"{one.device} shares the CPU's memory" for one in accounts if one.spare and one.spare.shared),
            *(f"{n} layers' weights lie in {_LIES_IN[kind]}" for kind, n in memory.items() if kind),
        ]

    def _layer(self, layer: Layer, picture: Picture) -> LayerState:
        wholly = self._wholly.get(layer.index)
        device = wholly.device if wholly else self._names[layer.device] if layer.device >= 0 else ""
        rate = picture.hit_rates[layer.index] if picture.hit_rates else math.nan
        heat = picture.spreads[layer.index] if picture.spreads else None
        return LayerState(
            layer=layer.il,
            device=device,
            mode="device" if layer.reason == Reason.ON_DEVICE else _MODES[layer.mode],
            reason=WHY_NOT[layer.reason],
            memory=_MEMORY[layer.memory],
            experts=layer.n_expert,
            slots=layer.n_slots,
            resident=layer.n_resident,
            hits=layer.hits,
            misses=layer.misses,
            hit_rate=None if math.isnan(rate) else rate,
            heat=_summary(heat),
        )

    def _bytes(self, device: str, found: Sequence[Layer]) -> int:
        """What experts take on a device, in slots and in whole layers."""
        whole = sum(layer.bytes for layer in self._wholly.values() if layer.device == device)
        return whole + sum(one.device_bytes for one in found if one.device >= 0 and self._names[one.device] == device)

    def _device(self, account: DevicePlan, layers: Sequence[LayerState], found: Sequence[Layer]) -> ExpertDevice:
        own = [layer for layer in layers if layer.device == account.device]
        kept = account.spare.reserve if account.spare else None
        return ExpertDevice(
            device=account.device,
            asked=account.asked,
            asked_bytes=account.asked_bytes,
            effective_bytes=account.effective_bytes,
            why=account.why,
            reserve_asked=kept.asked if kept else "",
            reserve_bytes=kept.n_bytes if kept else 0,
            reserve_why=kept.why if kept else "",
            shared_memory=account.spare is not None and account.spare.shared,
            bytes=self._bytes(account.device, found),
            layers=len(own),
            slots=sum(layer.slots for layer in own),
            resident=sum(layer.resident for layer in own),
            hits=sum(layer.hits for layer in own),
            misses=sum(layer.misses for layer in own),
        )


def _summary(heat: Spread | None) -> HeatSummary | None:
    if heat is None:
        return None
    return HeatSummary(
        resident_share=heat.resident_share,
        for_half=heat.for_half,
        for_ninety=heat.for_ninety,
        hottest=list(heat.hottest),
    )
