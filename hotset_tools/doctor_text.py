"""Prints the report of `hotset doctor` for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotset_tools.diagnosis import gib

_DISPLAYS = {"connected": "yes", "boot": "perhaps", "none": "no", "unknown": "not known"}


def print_report(report: dict[str, Any], console: Console | None = None) -> None:
    """Every part that has something to say, the problems last."""
    out = console or Console(soft_wrap=True)
    _native(report["native"], out)
    _devices(report["llama"], out)
    _backends(report["backends"], out)
    _rest(report, out)
    for line in report["use"]:
        _say(out, f"would use {line}")
    for line in report["problems"]:
        _say(out, f"PROBLEM {line}", "bold red")
    if not report["problems"]:
        _say(out, "nothing keeps the daemon from serving", "green")


def _say(out: Console, text: str, style: str = "") -> None:
    out.print(Text(text, style=style))


def _native(native: dict[str, Any], out: Console) -> None:
    if not native["directory"]:
        return
    _say(out, f"native build: {native['directory']} ({native['reason']})")
    if native["flags"]:
        _say(out, f"  CPU compiled for {native['flags']}; patch series {native['series']}")
    for line in native["fallback"]:
        _say(out, f"  smaller instruction set than announced: {line}")


def _devices(seen: dict[str, Any], out: Console) -> None:
    if not seen.get("devices"):
        return
    columns = ("device", "kind", "description", "memory free", "memory total", "reserve", "display", "memory")
    table = Table(*columns, title="Devices as llama.cpp sees them")
    cards = [device for device in seen["devices"] if "reserve_bytes" in device]
    for device in seen["devices"]:
        sizes = (gib(device["free"]), gib(device["memory_total"]))
        more = (gib(device["reserve_bytes"]), _DISPLAYS[device["display"]], _memory(device)) if device in cards else ()
        table.add_row(device["name"], device["kind"], device["description"], *sizes, *more)
    out.print(table)
    for device in cards:
        kept = f"{gib(device['reserve_bytes'])} stay free of experts ({device['reserve_why']})"
        _say(out, f"  {device['name']}: {kept}")
    for line in seen["errors"]:
        _say(out, f"  llama.cpp: {line}")


def _memory(device: dict[str, Any]) -> str:
    return "shared with the CPU" if device["shared_memory"] else "its own"


def _backends(backends: list[dict[str, Any]], out: Console) -> None:
    table = Table("backend", "built", "missing for building", title="Backends")
    for backend in backends:
        table.add_row(backend["name"], "yes" if backend["built"] else "no", Text(_lack(backend)))
    out.print(table)


def _lack(backend: dict[str, Any]) -> str:
    if backend["missing"]:
        return f"{', '.join(backend['missing'])}. {backend['install']}"
    return "" if backend["built"] else f"nothing: `hotset build --backend {backend['name']}` builds it"


def _rest(report: dict[str, Any], out: Console) -> None:
    memory, cache, glslc = report["memory"], report["cache"], report["glslc"]
    _say(out, f"memory: {gib(memory['available'])} available of {gib(memory['total'])}")
    if glslc:
        _say(out, f"glslc {glslc['version']}: {glslc['verdict']}")
    for file in report["access"]:
        if not file["usable"]:
            _say(out, f"{file['path']} is closed to this user; sudo usermod -aG {file['group']} $USER", "yellow")
    rights = "writable" if cache["writable"] else "NOT writable"
    _say(out, f"cache: {cache['directory']} ({rights}, {gib(cache['free'])} free, {len(cache['builds'])} builds)")
