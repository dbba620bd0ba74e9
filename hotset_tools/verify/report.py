"""What `hotset verify` found, for people and for scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from daemon.verify.cases import Case, PhaseResult
from daemon.verify.script import Step, n_rows, n_sequences
from daemon.verify.tolerance import FUSION_OFF
from hotset_tools.verify.run import Outcome

_HEAD = ("case", "resident", "phase", "rows", "hits", "misses", "flips", "KL", "KL stock", "max abs", "greedy")


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Everything; shares are 0-1, divergences in nats, numbers that are not finite are null."""
    target, standard = outcome.target, outcome.comparison.standard
    return {
        "ok": outcome.ok,
        "model": target.file.path.name,
        "architecture": target.file.facts.architecture,
        "fingerprint": target.file.fingerprint,
        "expert_types": sorted(standard.types),
        "device": target.spec.device,
        "device_description": _description(outcome),
        "stand_in": target.stand_in,
        "rounds_alike": standard.rounds_alike,
        "kl_stock": standard.kl_stock,
        "kl_stock_missing": outcome.no_stock,
        "kl_alone": standard.kl_alone,
        "layers_managed": outcome.n_managed,
        "layers_unmanaged": outcome.unmanaged or None,
        "build": outcome.build,
        "threads": target.threads,
        "cases": [row for case in outcome.comparison.cases for row in _rows(case, outcome.comparison.steps)],
        "skipped": [{"name": skipped.name, "reason": skipped.reason} for skipped in outcome.comparison.skipped],
        "problems": [f"{case.name}: {problem}" for case in outcome.comparison.cases for problem in case.problems],
    }


def table(outcome: Outcome) -> str:
    """The same as text."""
    return "\n".join(_lines(outcome))


def _rows(case: Case, steps: Sequence[Step]) -> Iterator[dict[str, Any]]:
    for part in case.phases:
        apart = part.distance
        yield {
            "name": case.name,
            "phase": part.phase,
            "resident": case.resident,
            "reference": case.reference,
            "sequences": n_sequences(steps, part.phase),
            "tokens": n_rows(steps, part.phase),
            "kl": _finite(part.kl),
            "kl_stock": None if part.kl_stock is None else _finite(part.kl_stock),
            "kl_mean": _finite(apart.kl_mean),
            "kl_max": _finite(apart.kl_max),
            "max_abs": _finite(apart.max_abs),
            "identical": apart.identical,
            "greedy": apart.greedy,
            "hits": part.hits,
            "misses": part.misses,
            "flips": apart.flips,
            "flipped_rows": apart.n_flipped,
            "rule": case.tolerance.rule.value,
            "kl_limit": case.tolerance.kl,
            "ok": not case.problems,
        }


def _lines(outcome: Outcome) -> Iterator[str]:
    target, comparison = outcome.target, outcome.comparison
    standard = comparison.standard
    types = ", ".join(sorted(standard.types))
    yield f"model {target.file.path.name}, {target.file.facts.architecture}, experts {types}"
    yield f"device {target.spec.device} ({_description(outcome)}), {target.threads} threads"
    yield f"layers managed: {outcome.n_managed}"
    if outcome.unmanaged:
        yield f"not managed: {outcome.unmanaged}"
    yield _stock_line(outcome)
    yield ""
    rows = [_HEAD, *(_cells(case, part) for case in comparison.cases for part in case.phases)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    yield ""
    for skipped in comparison.skipped:
        yield f"skipped {skipped.name}: {skipped.reason}"
    for case in comparison.cases:
        yield from (f"WRONG {case.name}: {problem}" for problem in case.problems)
    yield "within tolerance" if outcome.ok else "NOT within tolerance"


def _description(outcome: Outcome) -> str:
    return ", ".join(device.description for device in outcome.target.devices)


def _stock_line(outcome: Outcome) -> str:
    standard = outcome.comparison.standard
    if standard.kl_stock is None:
        how = "the device rounds as the CPU does" if standard.rounds_alike else "a coarse limit applies"
        return f"stock on the device was not computed: {outcome.no_stock}; {how}"
    if standard.rounds_alike:
        alone = "" if standard.kl_alone is None else f"; row by row it differs by KL {standard.kl_alone:.2g} (largest)"
        return f"stock gives the same bits with its experts in memory and on the device{alone}"
    fused = f", also of `empty`: the device adds in a fused kernel, unless {FUSION_OFF}=1" if standard.fuses else ""
    return f"stock's own two placements differ by KL {standard.kl_stock:.2g} (mean); this is the measure{fused}"


def _cells(case: Case, part: PhaseResult) -> tuple[str, ...]:
    apart = part.distance
    return (
        case.name,
        f"{case.resident:.0%}",
        part.phase,
        str(apart.n_rows),
        str(part.hits),
        str(part.misses),
        str(apart.n_flipped),
        "identical" if apart.identical else f"{part.kl:.2g}",
        "-" if part.kl_stock is None else f"{part.kl_stock:.2g}",
        f"{apart.max_abs:.2g}",
        f"{apart.greedy:.1%}",
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
