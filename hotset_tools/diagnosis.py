"""Judges the facts of `hotset doctor`: what keeps the daemon from serving, and what it would use; pure."""

from __future__ import annotations

from typing import Any

from daemon.config import Config
from daemon.engine import spare
from daemon.hotset import reserve
from daemon.hotset.reserve import Ram
from daemon.messages import Device


def problems(native: dict[str, Any], seen: dict[str, Any], model: dict[str, Any]) -> list[str]:
    """Everything that keeps the daemon from serving, each with what to do."""
    found = []
    if not native["directory"]:
        found.append(native["reason"])
    if seen.get("error"):
        found.append(seen["error"])
    if model and not model["exists"]:
        found.append(f"there is no file {model['path']}; set model.path")
    elif model and not model["readable"]:
        found.append(f"{model['path']} cannot be read by this user; change its rights or those of {model['directory']}")
    return found


def use(loaded: Config, seen: dict[str, Any], model: dict[str, Any], memory: dict[str, int]) -> list[str]:
    """What the daemon would use and why, one line for each choice."""
    if not model or not model["exists"] or seen.get("error"):
        return []
    which = "the embedded model: model.path is empty" if model["embedded"] else "model.path"
    return [f"model: {model['path']} ({which})", _device(loaded, seen), _weights(model, memory)]


def device(found: dict[str, Any], loaded: Config | None, memory: dict[str, int]) -> dict[str, Any]:
    """A device with its free bytes and, where experts can be, which of them stay free."""
    facts = spare.facts(Device.model_validate(found))
    free = {"free": reserve.free(facts, Ram(memory["total"], memory["available"]))}
    if found["kind"] not in {"gpu", "igpu"}:
        return found | free
    asked = reserve.parse_all(loaded.residency.reserve if loaded else "auto")
    kept = reserve.reserve(reserve.of_device(asked, found["name"]), facts)
    more = {"reserve_bytes": kept.n_bytes, "reserve_asked": kept.asked, "reserve_why": kept.why}
    return found | free | more | {"display": facts.display, "shared_memory": facts.shared}


def _device(loaded: Config, seen: dict[str, Any]) -> str:
    names = [device["name"] for device in seen.get("devices", []) if device["kind"] in {"gpu", "igpu"}]
    asked = loaded.engine.device
    if asked != "auto":
        return f"device: {asked} (engine.device says so)"
    if not names:
        return 'device: the CPU (engine.device is "auto", and llama.cpp sees no GPU)'
    return f'device: {", ".join(names)} (engine.device is "auto")'


def _weights(model: dict[str, Any], memory: dict[str, int]) -> str:
    size, available = gib(model["size"]), gib(memory["available"])
    if model["size"] <= memory["available"]:
        return f"weights: {size} fit the {available} of memory that is available"
    return f"weights: {size} are more than the {available} of available memory; they are read from disk again and again"


def gib(size: int) -> str:
    """Bytes as GiB or MiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
