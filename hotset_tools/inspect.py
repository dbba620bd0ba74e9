"""`hotset inspect`: what is in a GGUF model, as tables or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from daemon.native.gguf_check import GgufFile, LayerFacts, ModelFacts, check


def command(
    model: Annotated[Path, typer.Argument(help="GGUF file; the first part of a split one.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe a GGUF file: architecture, layers, experts, bytes, context and KV cache."""
    file = check(model)
    if as_json:
        print(json.dumps(report(file), indent=2))
        return
    console = Console()
    console.print(_overview(file))
    console.print()
    console.print(_layers(file.facts))
    for note in file.facts.notes:
        console.print(f"Note: {note}.", highlight=False)


def report(file: GgufFile) -> dict[str, Any]:
    """Everything that is known, as plain JSON types; sizes in bytes."""
    facts = file.facts
    return {
        **{name: value for name, value in dataclasses.asdict(facts).items() if name not in ("layers", "quants")},
        "quants": dict(facts.quants),
        "is_moe": facts.is_moe,
        "residency": facts.residency,
        "expert_bytes": facts.expert_bytes,
        "other_bytes": facts.other_bytes,
        "active_bytes": facts.active_bytes,
        "kv_bytes_per_token": facts.kv_bytes_per_token,
        "bytes_per_expert": sorted({layer.bytes_per_expert for layer in facts.layers if layer.experts}),
        "gguf_version": file.version,
        "parts": [{"file": part.path.name, "size": part.size} for part in file.parts],
        "fingerprint": file.fingerprint,
        "layers": [_layer_report(layer) for layer in facts.layers],
    }


def _layer_report(layer: LayerFacts) -> dict[str, Any]:
    return {
        **{name: value for name, value in dataclasses.asdict(layer).items() if name != "experts"},
        "n_expert": layer.n_expert,
        "bytes_per_expert": layer.bytes_per_expert,
        "expert_bytes": layer.expert_bytes,
        "experts": [
            {**dataclasses.asdict(tensor), "bytes_per_expert": tensor.bytes_per_expert} for tensor in layer.experts
        ],
    }


def _overview(file: GgufFile) -> Table:
    facts = file.facts
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _lines(file, facts):
        table.add_row(name, value)
    return table


def _lines(file: GgufFile, facts: ModelFacts) -> Iterable[tuple[str, str]]:
    yield "model", facts.name or file.path.name
    yield "architecture", facts.architecture
    yield "parameters", f"{facts.n_params:,}"
    yield "size", f"{_size(facts.size)} ({', '.join(f'{name} {_size(size)}' for name, size in facts.quants)})"
    yield "layers", f"{facts.n_layer}, hidden size {facts.n_embd:,}"
    yield "heads", f"{_range(facts.n_head)}, KV {_range(facts.n_head_kv)}, size {facts.key_length}/{facts.value_length}"
    if facts.is_moe:
        yield "experts", f"{facts.n_expert} in a layer, top {facts.n_expert_used}"
        yield "one expert", ", ".join(_size(size) for size in _expert_sizes(facts))
        yield "expert bytes", f"{_size(facts.expert_bytes)} ({facts.expert_bytes / facts.size:.1%})"
        yield "the rest", f"{_size(facts.other_bytes)} ({facts.other_bytes / facts.size:.1%})"
        yield "per token", f"{_size(facts.active_bytes)} are read at most"
    yield "residency", facts.residency
    yield "vocabulary", f"{facts.n_vocab:,} tokens"
    yield "context", f"{facts.n_ctx_train:,} tokens in training"
    yield "KV cache", f"{facts.kv_bytes_per_token:,} bytes per token (f16)"
    yield "GGUF", f"version {file.version}, {len(file.parts)} {'part' if len(file.parts) == 1 else 'parts'}"
    if len(file.parts) > 1:
        for part in file.parts:
            yield "", f"{part.path.name} ({_size(part.size)})"
    yield "fingerprint", file.fingerprint


def _layers(facts: ModelFacts) -> Table:
    """One row for each run of layers that are alike."""
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for name in ("layers", "kind", "experts", "types", "one expert", "together", "the rest", "KV/token"):
        table.add_column(name, no_wrap=True)
    for _, run in groupby(facts.layers, key=_likeness):
        layers = list(run)
        first, last = layers[0], layers[-1]
        table.add_row(
            str(first.index) if first is last else f"{first.index}-{last.index}",
            first.kind,
            str(first.n_expert or "-"),
            ", ".join(first.expert_quants) or "-",
            _size(first.bytes_per_expert) if first.experts else "-",
            _size(first.expert_bytes) if first.experts else "-",
            _size(first.size - first.expert_bytes),
            f"{first.kv_bytes_per_token:,}",
        )
    return table


def _likeness(layer: LayerFacts) -> tuple[object, ...]:
    return layer.kind, layer.n_expert, layer.expert_quants, layer.size, layer.expert_bytes, layer.kv_bytes_per_token


def _expert_sizes(facts: ModelFacts) -> list[int]:
    return sorted({layer.bytes_per_expert for layer in facts.layers if layer.experts})


def _range(numbers: tuple[int, ...]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _size(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"
