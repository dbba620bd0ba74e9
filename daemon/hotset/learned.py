"""What was learned about the use of a model's experts, as it is kept for the next start (docs/learned.md). Pure."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError, model_validator

from daemon.hotset.controller import Controller
from daemon.hotset.files import FaultyFile, ModelId, Part, reasons
from daemon.hotset.hot_set import LayerKey
from daemon.hotset.policy import Settings

MAX_BYTES = 16 << 20
"""Larger files are refused unread; the largest models take less than 1 MiB."""

_MAX_HEADER = 1 << 20
_MAX_EXPERTS = 1 << 20
_MOST = 1e9
"""More than any heat or count that decays can reach."""
_MOST_TOKENS = 1 << 53
_CHECKSUM = hashlib.sha256().digest_size

Numbers = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


class LearnedUnusable(FaultyFile):
    """The bytes are nothing that was learned, or are damaged."""

    code = "learned_unusable"


class LearnedLayer(Part):
    """A set of routed experts: the model's layer, which of its sets, and how many experts it has."""

    layer: int = Field(ge=0)
    set: int = Field(default=0, ge=0)
    experts: int = Field(ge=1, le=65536)

    @property
    def key(self) -> LayerKey:
        """What names the set of experts."""
        return self.layer, self.set


class Header(Part):
    """The first line. `tokens` taught heat, `ranked` of them the ranks; `saved` is UTC."""

    format: Literal["hotset-learned-1"] = "hotset-learned-1"
    model: ModelId
    saved: str = Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")
    tokens: int = Field(ge=0, le=_MOST_TOKENS)
    ranked: int = Field(ge=0, le=_MOST_TOKENS)
    layers: list[LearnedLayer] = Field(min_length=1, max_length=4096)

    @model_validator(mode="after")
    def _consistent(self) -> Header:
        doubles = [key for key, count in Counter(layer.key for layer in self.layers).items() if count > 1]
        if doubles:
            raise ValueError(f"set {doubles[0][1]} of layer {doubles[0][0]} is there twice")
        if self.n_experts > _MAX_EXPERTS:
            raise ValueError(f"it speaks of {self.n_experts:,} experts; {_MAX_EXPERTS:,} are allowed")
        return self

    @property
    def n_experts(self) -> int:
        """Of all layers."""
        return sum(layer.experts for layer in self.layers)


@dataclass(frozen=True)
class Learned:
    """All arrays are [n_experts], the layers one after the other. By expert: its heat, and whether it had a slot;
    by rank, the hottest of its layer first: how often such an expert was chosen (`RankCounts`)."""

    header: Header
    heat: Numbers
    ranks: Numbers
    resident: Flags

    def layers(self) -> Iterator[tuple[LayerKey, slice]]:
        """Each layer's name and its place in the arrays."""
        start = 0
        for layer in self.header.layers:
            yield layer.key, slice(start, start + layer.experts)
            start += layer.experts

    def order(self, settings: Settings | None = None) -> dict[LayerKey, list[int]]:
        """The experts of each layer that had a slot or were chosen, in the order in which the policy keeps them: a
        newcomer must be hotter than a resident by its margin."""
        worth = self.heat + (settings or Settings()).margin * self.resident
        return {key: _descending(worth[at], self.resident[at] | (self.heat[at] > 0)) for key, at in self.layers()}


def _descending(worth: Numbers, chosen: Flags) -> list[int]:
    order = np.argsort(-worth, kind="stable")
    return [int(expert) for expert in order if chosen[expert]]


def learned_by(controller: Controller, model: ModelId, keys: Sequence[LayerKey], saved: str, n_before: int) -> Learned:
    """What `controller` knows now, `keys` being its layers' names; `n_before` tokens had taught before it."""
    counts = controller.n_expert
    layers = [LearnedLayer(layer=key[0], set=key[1], experts=n) for key, n in zip(keys, counts, strict=True)]
    header = Header(
        model=model, saved=saved, tokens=n_before + controller.n_tokens, ranked=controller.n_ranked, layers=layers
    )
    heat, ranks, taken = (
        np.concatenate([row[:n] for row, n in zip(rows, counts, strict=True)])
        for rows in (controller.heat.values, controller.ranks.counts, controller.taken)
    )
    return Learned(header, heat.astype(np.float32), ranks.astype(np.float32), taken)


def teach(controller: Controller, keys: Sequence[LayerKey], learned: Learned) -> None:
    """Let a new controller go on from there; its slots stay as they are."""
    places = dict(learned.layers())
    for index, key in enumerate(keys):
        if key in places:
            controller.recall(index, learned.heat[places[key]], learned.ranks[places[key]])
    controller.n_ranked = learned.header.ranked


def encode(learned: Learned) -> bytes:
    """The whole file."""
    line = learned.header.model_dump_json().encode() + b"\n"
    numbers = learned.heat.astype("<f4").tobytes() + learned.ranks.astype("<f4").tobytes()
    content = line + numbers + learned.resident.astype(np.uint8).tobytes()
    return content + hashlib.sha256(content).digest()


def decode(file: str, data: bytes) -> Learned:
    """What the file of this name holds, wholly checked but for its model.

    Raises:
        LearnedUnusable: it is damaged, or no such file; all faults are listed.
    """
    content, checksum = data[:-_CHECKSUM], data[-_CHECKSUM:]
    if hashlib.sha256(content).digest() != checksum:
        raise LearnedUnusable(file, ["its checksum is wrong: it is damaged, or was not written by hotset"])
    line, end, body = content.partition(b"\n")
    if not end or len(line) > _MAX_HEADER:
        raise LearnedUnusable(file, ["it does not begin with a line that describes it"])
    try:
        header = Header.model_validate_json(line)
    except ValidationError as error:
        raise LearnedUnusable(file, list(reasons(error))) from None
    n = header.n_experts
    if len(body) != 9 * n:
        raise LearnedUnusable(file, [f"{n:,} experts take {9 * n:,} bytes, and there are {len(body):,}"])
    heat, ranks = (np.frombuffer(body, "<f4", n, at).astype(np.float32) for at in (0, 4 * n))
    flags = np.frombuffer(body, np.uint8, n, 8 * n)
    good = {"heat": _within(heat, _MOST), "ranks": _within(ranks, _MOST), "slots": bool((flags <= 1).all())}
    if not all(good.values()):
        raise LearnedUnusable(file, [f"its {name} hold impossible values" for name, is_so in good.items() if not is_so])
    return Learned(header, heat, ranks, flags.astype(bool))


def _within(values: Numbers, most: float) -> bool:
    return bool(((values >= 0) & (values <= most)).all())  # neither is true of NaN


def faults(learned: Learned, fingerprint: str, n_experts: Mapping[LayerKey, int]) -> list[str]:
    """Why it does not fit a model with this fingerprint and so many experts in each set; empty where it does."""
    header = learned.header
    if header.model.fingerprint != fingerprint:
        return [
            f"it was learned from another model: its fingerprint begins with {header.model.fingerprint[:12]}, "
            f"that of the loaded one with {fingerprint[:12]}"
        ]
    wrong = [one for one in header.layers if n_experts.get(one.key) != one.experts]
    return [
        f"it knows {one.experts} experts in layer {one.layer}, set {one.set}; "
        f"this model has {n_experts.get(one.key, 0)} there"
        for one in wrong
    ]
