"""What [residency] asks for, as far as it can be told from the files, before the model is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from daemon.engine import spare
from daemon.hotset import hot_set as hot_sets
from daemon.hotset import placement, reserve, whole_layers
from daemon.hotset.budget import EVERY_DEVICE, Auto, Budget, of_device, parse
from daemon.hotset.hot_set import HotSet, HotSetUnusable, LayerKey
from daemon.hotset.learned import Learned
from daemon.hotset.placement import ExpertLayer, Plan
from daemon.hotset.reserve import Reserved
from daemon.messages import Device, Load, Residency, ResidencySpec
from daemon.native.gguf_check import GgufFile, LayerFacts, ModelFacts


@dataclass
class Off:
    """No expert is kept in VRAM; `reason` is the whole sentence. `fault`: something that was asked for is not done."""

    reason: str
    fault: bool = False
    _later: str = field(default="", init=False)

    def status(self) -> Residency:
        """Only what is asked for later changes it."""
        return Residency(reason=self.reason + self._later)

    def start(self) -> None:
        """Nothing to do."""

    def prepare(self, width: int) -> None:
        """There is one way only."""

    def synchronize(self) -> None:
        """Nobody needs it."""

    def decoded(self, _width: int, _seconds: float) -> None:
        """Nothing is learned."""

    @property
    def chosen(self) -> None:
        """Nothing is read."""

    def recordable(self) -> str:
        """Nothing is."""
        return self.reason

    def adjust(self, spec: ResidencySpec) -> None:
        """Slots need weights that were loaded for it."""
        asked = spec.enabled and bool(spec.vram)
        self._later = "; what [residency] asks for now needs a new load (`hotset reload --load`)" if asked else ""


@dataclass(frozen=True)
class Wanted:
    """What [residency] asks for, and the model's sets of experts with the devices they belong to.

    `hot_set` is what the file `file` says, None without one. Experts that move get slots in the order of `followed`,
    which lists all of them; of each set, the first `known` are worth an upload at the start, the others are there
    because slots fill with what is used. `devices` are those that the model is to be on, as they were before it was
    loaded.
    """

    file: str
    spec: ResidencySpec
    hot_set: HotSet | None
    followed: HotSet
    known: Mapping[LayerKey, int]
    budgets: Mapping[str, Budget]
    reserves: Mapping[str, Reserved]
    layers: Sequence[ExpertLayer]
    devices: Sequence[Device]

    def order(self, frozen: bool) -> HotSet:
        """Experts in the order in which they get slots; if they stay where they are, only those of the hot set."""
        return self.hot_set if frozen and self.hot_set else self.followed

    @property
    def ranking(self) -> HotSet:
        """The order at the start."""
        return self.order(self.spec.frozen)

    @property
    def live(self) -> bool:
        """Whether experts may come to slots that are empty at first."""
        return not self.spec.frozen

    def problem(self, budgets: Mapping[str, Budget]) -> str:
        """Why these budgets cannot be, "" if they can."""
        unknown = placement.unknown_sizes(self.hot_set or self.followed, budgets)
        return "; ".join(filter(None, [_strange_devices(budgets, self.devices), *unknown]))

    def seeds(self, plan: Plan, layers: Sequence[ExpertLayer]) -> dict[int, Sequence[int]]:
        """Experts to upload at the start, by layer index."""
        keys = {layer.index: layer.key for layer in layers}
        return {index: experts[: self.known[keys[index]]] for index, experts in plan.experts.items()}

    def whole_layers(self, shortage: int, other_bytes: int) -> list[int]:
        """Layers whose experts are to lie on their device alone, because memory is short by so many bytes.

        `other_bytes` go to the devices before them.
        """
        room = {}
        for device, given in spare.by_device(self.devices, self.budgets, self.reserves).items():
            budget = of_device(self.budgets, device)
            own = [layer for layer in self.layers if layer.device == device]
            asked = placement.asked_bytes(self.ranking, budget, own) if budget else 0
            room[device] = min(asked, (given.n_bytes or 0) - other_bytes // len(self.devices))
        return whole_layers.choose(self.layers, shortage, room)


def prepare(spec: Load, file: GgufFile, devices: Sequence[Device], learned: Learned | None = None) -> Wanted | Off:
    """What [residency] asks for, as far as it can be told before the model is loaded.

    Unless experts stay where they are, those that were `learned` come first.
    """
    wish = spec.residency
    if not file.facts.is_moe:
        return Off("not applicable: a dense model has no experts to place")
    if not wish.enabled:
        return Off("off: residency.enabled is false")
    if not wish.vram:
        return Off("off: residency.vram is empty, so no VRAM is meant for experts")
    budgets = {name: parse(text) for name, text in wish.vram.items()}
    explicit = bool(wish.hot_set) or any(not isinstance(one, Auto) for one in budgets.values())
    if not devices:
        return Off("off: the model is on the CPU alone, there is no device to keep experts on", fault=explicit)
    layers = _in_memory(spec, file.facts, devices)
    try:
        hot_set, followed, known = _rankings(wish, budgets, file, {} if wish.frozen or not learned else learned.order())
    except HotSetUnusable as error:
        return Off(f"off: {error.message}", fault=True)
    if strange := _strange_devices(budgets, devices):
        return Off(f"off: {strange}", fault=True)
    reserves = {name: reserve.parse(text) for name, text in wish.reserve.items()}
    spares = spare.by_device(devices, budgets, reserves)
    refused = {name: given for name, given in spares.items() if given.refused}
    made = Wanted(Path(wish.hot_set).name, wish, hot_set, followed, known, budgets, reserves, layers, devices)
    plan = placement.plan(made.ranking, layers, budgets, refused)
    if not layers:
        keys = "engine.gpu_layers and engine.cpu_moe_layers"
        return Off(f"off: {keys} leave no layer both a device and experts in memory", fault=explicit)
    if not plan.n_experts and (wish.frozen or all(layer.device in refused for layer in layers)):
        return Off(f"off: {placement.no_room(plan)}", fault=any(layer.device not in refused for layer in layers))
    return made


def _strange_devices(budgets: Mapping[str, Budget], devices: Sequence[Device]) -> str:
    names = [device.name for device in devices]
    strange = ", ".join(sorted(budgets.keys() - {*names, EVERY_DEVICE}))
    return f"residency.vram names {strange}, but the model is on {', '.join(names)}" if strange else ""


def strange_reserves(named: Iterable[str], devices: Sequence[Device]) -> str:
    """A reserve for a device that is not there protects none, which must be said; the others keep theirs."""
    names = [device.name for device in devices]
    strange = ", ".join(sorted({*named} - {*names, EVERY_DEVICE}))
    return f"residency.reserve names {strange}, but there is only {', '.join(names)}" if strange else ""


def _rankings(
    wish: ResidencySpec, budgets: Mapping[str, Budget], file: GgufFile, first: Mapping[LayerKey, Sequence[int]]
) -> tuple[HotSet | None, HotSet, dict[LayerKey, int]]:
    """The hot set; all experts, `first` first, then its; and how many of each set are known to be worth a slot.

    Raises:
        HotSetUnusable: lists everything that is wrong with the hot set.
    """
    counts = {one.key: one.n_expert for one in expert_sets(file.facts)}
    hot_set = read_hot_set(Path(wish.hot_set), budgets, file) if wish.hot_set else None
    listed = hot_set.largest.by_layer() if hot_set else {}
    known = {key: len({*first.get(key, ()), *listed.get(key, ())}) for key in counts}
    whole = hot_sets.completed(hot_set, counts) if hot_set else hot_sets.of_all(file.fingerprint, counts)
    return hot_set, hot_sets.led(whole, first), known


def _in_memory(spec: Load, facts: ModelFacts, devices: Sequence[Device]) -> list[ExpertLayer]:
    """Sets of experts that the config leaves in memory, in layers that belong to a device."""
    free = [device.memory_free for device in devices]
    layers = []
    for one in expert_sets(facts):
        layer = one.key[0]
        place = whole_layers.device_of_layer(layer, facts.n_layer, spec.gpu_layers, free)
        if place is not None and not 0 <= spec.cpu_moe_layers <= layer:
            layers.append(replace(one, device=devices[place].name))
    return layers


def read_hot_set(path: Path, budgets: Mapping[str, Budget], file: GgufFile) -> HotSet:
    """The hot set, if it fits the model and has the sizes that the budgets name.

    Raises:
        HotSetUnusable: lists everything that is wrong.
    """
    hot_set = hot_sets.read(path)
    n_experts = {one.key: one.n_expert for one in expert_sets(file.facts)}
    faults = hot_sets.faults(hot_set, file.fingerprint, n_experts)
    if faults := faults + placement.unknown_sizes(hot_set, budgets):
        raise HotSetUnusable(path.name, faults)
    return hot_set


def expert_sets(facts: ModelFacts) -> list[ExpertLayer]:
    """Sets of routed experts by the names of their tensors; a second one ("chexps") is computed after the first."""
    found: list[ExpertLayer] = []
    for layer in facts.layers:
        if layer.kind != "prediction":
            found += [one for number in (0, 1) if (one := _set(layer, number, len(found)))]
    return [replace(one, index=index) for index, one in enumerate(found)]


def _set(layer: LayerFacts, number: int, index: int) -> ExpertLayer | None:
    tensors = [tensor for tensor in layer.experts if ("_chexps." in tensor.name) is bool(number)]
    if not tensors:
        return None
    size = sum(tensor.bytes_per_expert for tensor in tensors)
    return ExpertLayer(index, (layer.index, number), tensors[0].n_expert, size, device="")
