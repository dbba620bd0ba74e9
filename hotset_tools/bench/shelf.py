"""Loaded models and open contexts of a benchmark: opened when an arm needs them, kept while memory lasts."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from daemon.errors import HotsetError
from daemon.native.gguf_facts import ModelFacts
from hotset_tools.bench.child import Child

_DEVICE_RESERVE, _PART_OF_DEVICE = 2 << 30, 16  # what is left free: so much, on small devices a sixteenth
_HOST_RESERVE = 4 << 30
_WIDE_ROWS = (
    16  # rows of the hidden size that a token's graph keeps at once: a guess, which only decides what is closed
)


@dataclass(frozen=True)
class Place:
    """Where experts are: `library` computes, the first `n_cpu` layers have them in host memory.

    `slots` per layer: None is upstream's path alone, an empty tuple only counts. With `vram`, a budget as in
    residency.vram, experts follow the traffic, and `slots` are those that it should give; `state` is the directory of
    what they learn.
    """

    library: str
    n_cpu: int
    slots: tuple[int, ...] | None = None
    vram: str = ""
    state: str = ""

    @property
    def model(self) -> str:
        """Name of the loaded model within its worker."""
        return f"cpu{self.n_cpu}"

    @property
    def context(self) -> str:
        """Name of the context within its worker."""
        return f"{self.model}:{self.slots}{self.vram}{self.state}"


@dataclass(frozen=True)
class Sizes:
    """What a model and the contexts of a run have in common; bytes."""

    path: str
    load_mode: str
    n_ctx: int
    max_sequences: int
    ubatch: int
    layer_bytes: tuple[int, ...]
    expert_bytes: tuple[int, ...]
    other_bytes: int
    context_bytes: int
    """Cache, logits and compute buffers of one context, roughly."""

    @classmethod
    def of(cls, facts: ModelFacts, *, n_ctx: int, ubatch: int, **settings: Any) -> Sizes:
        """The sizes of a checked model.

        Raises:
            HotsetError: it has layers without experts, which static splits count too.
        """
        layers = facts.layers
        if not layers or not all(layer.experts for layer in layers):
            raise HotsetError("the model has layers without experts; these benchmarks need experts in every layer")
        return cls(
            layer_bytes=tuple(layer.expert_bytes for layer in layers),
            expert_bytes=tuple(layer.bytes_per_expert for layer in layers),
            other_bytes=facts.other_bytes,
            context_bytes=n_ctx * facts.kv_bytes_per_token + 4 * ubatch * (facts.n_vocab + _WIDE_ROWS * facts.n_embd),
            n_ctx=n_ctx,
            ubatch=ubatch,
            **settings,
        )

    def slab_bytes(self, slots: Sequence[int]) -> int:
        """VRAM of slots; each layer that has any has one more, of zeros."""
        return sum((n + 1) * size for n, size in zip(slots, self.expert_bytes, strict=False) if n)

    def device_bytes(self, place: Place) -> int:
        """VRAM of a place's model without contexts."""
        return self.other_bytes + sum(self.layer_bytes[place.n_cpu :])

    def host_bytes(self, place: Place) -> int:
        """Host memory of a place's model."""
        return sum(self.layer_bytes[: place.n_cpu])


class Shelf:
    """Opens places, the experts of each given once; closes what was used longest ago when memory is short.

    Places whose experts follow the traffic stay open, because what they learned would be lost.
    """

    def __init__(self, children: Mapping[str, Child], devices: Mapping[str, str], sizes: Sizes) -> None:
        """`children` and `devices` (as [engine] device) are by library."""
        self._children, self._devices, self.sizes = children, devices, sizes
        self._open: dict[Place, dict[str, Any]] = {}
        self._used: dict[Place, float] = {}
        self._experts: dict[Place, Sequence[Sequence[int]]] = {}
        self._models: set[tuple[str, int]] = set()

    def ask(self, place: Place, do: str, **fields: Any) -> dict[str, Any]:
        """A request about the context of `place`, which is opened if it is not.

        Raises:
            WorkerFailed: memory is too short even for it alone, or the request was refused.
        """
        self.open(place)
        self._used[place] = time.monotonic()
        return self._children[place.library].ask(do, context=place.context, **fields)

    def assign(self, place: Place, experts: Sequence[Sequence[int]]) -> None:
        """Experts of each layer that become resident whenever the context of `place` is opened."""
        self._experts[place] = experts

    def open(self, place: Place) -> dict[str, Any]:
        """What the worker says of the context."""
        if place not in self._open:
            began = time.monotonic()
            self._make_room(place)
            self._load(place)
            child, slots = self._children[place.library], place.slots
            self._open[place] = child.ask(
                "open", context=place.context, model=place.model, n_ctx=self.sizes.n_ctx, threads=4,
                slots=None if slots is None else list(slots), vram=place.vram,
                state=place.state,
            )  # fmt: skip
            if place in self._experts:
                child.ask("place", context=place.context, experts=self._experts[place])
            print(f"  {place.library} {_short(place)}: {time.monotonic() - began:.1f} s", file=sys.stderr)
        self._used[place] = time.monotonic()
        return self._open[place]

    def close(self, place: Place) -> None:
        """Close a context if it is open, and its model if that was the last one."""
        if self._open.pop(place, None) is None:
            return
        child = self._children[place.library]
        child.ask("close", context=place.context)
        if not any((other.library, other.n_cpu) == (place.library, place.n_cpu) for other in self._open):
            child.ask("unload", model=place.model)
            self._models.discard((place.library, place.n_cpu))

    def device_free(self) -> int:
        """Free bytes of the device that may be used, at least 1; 0 where it does not tell."""
        found = self._children["ours"].ask("memory")
        free, total = int(found["free"]), int(found["total"])
        return max(1, free - min(_DEVICE_RESERVE, total // _PART_OF_DEVICE)) if total else 0

    def _load(self, place: Place) -> None:
        if (place.library, place.n_cpu) in self._models:
            return
        sizes = self.sizes
        engine = {
            "device": self._devices[place.library], "cpu_moe_layers": place.n_cpu, "kv_cells": sizes.n_ctx,
            "ubatch": sizes.ubatch, "max_sequences": sizes.max_sequences, "repack": False,
        }  # fmt: skip
        child = self._children[place.library]
        child.ask("load", model=place.model, path=sizes.path, engine=engine, mode=sizes.load_mode)
        self._models.add((place.library, place.n_cpu))

    def _make_room(self, place: Place) -> None:
        loaded = (place.library, place.n_cpu) in self._models
        device = self.sizes.context_bytes + self.sizes.slab_bytes(place.slots or ())
        device += 0 if loaded else self.sizes.device_bytes(place)
        host = 0 if loaded else self.sizes.host_bytes(place)
        while (closable := [other for other in self._open if not other.vram]) and not self._fits(device, host):
            self.close(min(closable, key=lambda other: self._used[other]))

    def _fits(self, device: int, host: int) -> bool:
        available, free = psutil.virtual_memory().available, self.device_free()
        return available - host > _HOST_RESERVE and (not free or free > device)


def _short(place: Place) -> str:
    slots = "" if place.slots is None else f", slots {min(place.slots, default=0)}-{max(place.slots, default=0)}"
    live = f", live with {place.vram}" if place.vram else ""
    return f"experts of {place.n_cpu} layers on the CPU{slots}{live}"
