"""hot_set.json: experts per layer in the order of their use, in several sizes (docs/hot-set.md is its description)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from daemon.hotset import files
from daemon.hotset.budget import RESERVED, SIZE_NAME
from daemon.hotset.files import FaultyFile, ModelId, Part, reasons

MAX_BYTES = 64 << 20
"""Larger files are refused unread; a list of all experts of the largest models takes less than 1 MiB a size."""

EVERY_EXPERT = "every-expert"
"""The name of the size that `completed` adds."""

_T = TypeVar("_T")

LayerKey = tuple[int, int]
"""A set of routed experts: the model's layer, and which of its sets (0 in nearly every model)."""


class HotSetUnusable(FaultyFile):
    """The file is no hot set, or not one for this model."""

    code = "hot_set_unusable"


class Source(Part):
    """What the ranking was learned from; for people, the daemon reads none of it."""

    texts: list[str] = Field(default=[])
    tokens: int = Field(default=0, ge=0)
    """Tokens whose routing was counted."""
    method: str = ""
    created: str = ""


class LayerExperts(Part):
    """The experts of one layer, the most used first. `set` tells the sets of a layer with several apart."""

    layer: int = Field(ge=0)
    set: int = Field(default=0, ge=0)
    experts: list[Annotated[int, Field(ge=0)]]

    @property
    def key(self) -> LayerKey:
        """What names the set of experts."""
        return self.layer, self.set


class Size(Part):
    """One selection. `coverage` is the share of the counted selections that it would have served, 0-1."""

    name: str
    coverage: float | None = Field(default=None, ge=0, le=1)
    layers: list[LayerExperts]

    @property
    def n_experts(self) -> int:
        """Experts of all layers together."""
        return sum(len(layer.experts) for layer in self.layers)

    def by_layer(self) -> dict[LayerKey, list[int]]:
        """The ranking of each set of experts."""
        return {layer.key: layer.experts for layer in self.layers}


class HotSet(Part):
    """The whole file."""

    format: Literal[1]
    model: ModelId
    learned_from: Source = Source()
    sizes: list[Size] = Field(min_length=1, max_length=64)

    @model_validator(mode="after")
    def _consistent(self) -> HotSet:
        faults = list(_doubles(self.sizes))
        if faults:
            raise ValueError("\n".join(faults))
        return self

    @property
    def largest(self) -> Size:
        """The size with the most experts: what budgets in MiB and percent take the first ones of."""
        return max(self.sizes, key=lambda size: size.n_experts)

    def size(self, name: str) -> Size | None:
        """The size of that name."""
        return next((size for size in self.sizes if size.name == name), None)


def read(path: Path) -> HotSet:
    """The file, checked as far as it goes without its model.

    Raises:
        HotSetUnusable: it cannot be read or is no hot set; every fault is listed.
    """
    text = files.read(path, MAX_BYTES, HotSetUnusable)
    try:
        return HotSet.model_validate_json(text)
    except ValidationError as error:
        raise HotSetUnusable(path.name, list(reasons(error))) from None


def of_all(fingerprint: str, n_experts: Mapping[LayerKey, int]) -> HotSet:
    """All experts of a model, in the order of their ids: where nothing is known about their use."""
    nothing = HotSet(format=1, model=ModelId(fingerprint=fingerprint), sizes=[Size(name=EVERY_EXPERT, layers=[])])
    return completed(nothing, n_experts)


def completed(hot_set: HotSet, n_experts: Mapping[LayerKey, int]) -> HotSet:
    """The same, and the largest size goes on with all experts that it does not list."""
    listed = hot_set.largest.by_layer()
    layers = [
        LayerExperts(layer=key[0], set=key[1], experts=_with_the_rest(listed.get(key, []), count))
        for key, count in n_experts.items()
    ]
    whole = Size(name=EVERY_EXPERT, layers=layers)
    others = [size for size in hot_set.sizes if size.name != EVERY_EXPERT]
    return hot_set.model_copy(update={"sizes": [*others, whole]})


def led(hot_set: HotSet, first: Mapping[LayerKey, Sequence[int]]) -> HotSet:
    """The same sizes with as many experts each, where those of `first` come before those that are listed."""
    sizes = [
        size.model_copy(update={"layers": [_led(layer, first.get(layer.key, ())) for layer in size.layers]})
        for size in hot_set.sizes
    ]
    return hot_set.model_copy(update={"sizes": sizes})


def _led(layer: LayerExperts, first: Sequence[int]) -> LayerExperts:
    experts = list(dict.fromkeys([*first, *layer.experts]))
    return layer.model_copy(update={"experts": experts[: len(layer.experts)]})


def _with_the_rest(listed: Sequence[int], count: int) -> list[int]:
    there = set(listed)
    return [*listed, *(expert for expert in range(count) if expert not in there)]


def faults(hot_set: HotSet, fingerprint: str, n_experts: Mapping[LayerKey, int]) -> list[str]:
    """Why the file does not fit a model with this fingerprint and so many experts in each set; empty where it does."""
    if hot_set.model.fingerprint != fingerprint:
        return [
            f"it was made for another model: its fingerprint begins with {hot_set.model.fingerprint[:12]}, "
            f"that of the loaded one with {fingerprint[:12]}"
        ]
    return [fault for size in hot_set.sizes for fault in _foreign(size, n_experts)]


def _foreign(size: Size, n_experts: Mapping[LayerKey, int]) -> Iterator[str]:
    for layer in size.layers:
        count = n_experts.get(layer.key)
        where = f"size {size.name}: {_place(layer.key)}"
        if count is None:
            yield f"{where} has no routed experts in this model"
        elif beyond := [expert for expert in layer.experts if expert >= count]:
            yield f"{where} has {count} experts, not {_some(beyond)}"


def _doubles(sizes: list[Size]) -> Iterator[str]:
    for name in _repeated([size.name for size in sizes]):
        yield f"size {name} is there twice"
    for size in sizes:
        if not SIZE_NAME.fullmatch(size.name) or size.name in RESERVED:
            yield f"{size.name!r} is no name for a size: it begins with a letter and is not {', '.join(RESERVED)}"
        for key in _repeated([layer.key for layer in size.layers]):
            yield f"size {size.name}: {_place(key)} is there twice"
        for layer in size.layers:
            if double := _repeated(layer.experts):
                yield f"size {size.name}: {_place(layer.key)} names {_some(double)} twice"


def _repeated(values: list[_T]) -> list[_T]:
    return [value for value, count in Counter(values).items() if count > 1]


def _place(key: LayerKey) -> str:
    layer, number = key
    return f"layer {layer}" if number == 0 else f"set {number} of layer {layer}"


def _some(experts: list[int]) -> str:
    shown = ", ".join(map(str, experts[:4]))
    return f"expert {shown}" if len(experts) == 1 else f"experts {shown}{', ...' if len(experts) > 4 else ''}"
