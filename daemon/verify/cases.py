"""The cases of a comparison: one context, several residencies, each judged against stock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from daemon.errors import HotsetError
from daemon.native.hotset import Residency, ResidencyError, State, Status
from daemon.verify.compare import Distance, Ids, distance, flipped
from daemon.verify.placing import Churn, fill, give_slots, managed, resident_share
from daemon.verify.script import PHASES, Step, one_by_one
from daemon.verify.tolerance import Standard, Tolerance
from daemon.verify.walk import Decoder, Recording, walk

COLD, EMPTY, HALF, CHANGING, FULL = "cold", "empty", "half", "changing", "full"
HALF_SHARES = (0.5, 0.25, 0.125)
"""What is tried for the cases that hold half of the experts, until the device has room."""


class StockBroken(HotsetError):
    """Upstream itself does not compute this model."""

    code = "stock_broken"


@dataclass(frozen=True)
class Run:
    """One residency over the whole script. `resident` is the share of experts, a mean where it changes."""

    name: str
    resident: float
    recording: Recording


@dataclass(frozen=True)
class Skipped:
    """A residency that cannot be had here."""

    name: str
    reason: str


@dataclass(frozen=True)
class PhaseResult:
    """One phase of a run beside the reference; `kl_stock` is what stock itself shows, both as the rule measures."""

    phase: str
    distance: Distance
    kl: float
    kl_stock: float | None
    hits: int
    misses: int


@dataclass(frozen=True)
class Case:
    """A run that has been judged; `reference` is "stock" or "device" (stock with its experts on the device)."""

    name: str
    resident: float
    reference: str
    tolerance: Tolerance
    whole: Distance
    phases: tuple[PhaseResult, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class References:
    """Stock's own numbers: with experts in memory, and with all of them on the device where it has room."""

    stock: Recording
    device: Recording | None


@dataclass(frozen=True)
class Comparison:
    """All cases of one context, and the standard that they were judged by."""

    steps: tuple[Step, ...]
    standard: Standard
    cases: tuple[Case, ...]
    skipped: tuple[Skipped, ...]


def compare(
    context: Decoder,
    residency: Residency,
    steps: Sequence[Step],
    *,
    device: Recording | None,
    types: Iterable[str],
    rounds_alike: bool,
    seed: int,
    fuses: bool = False,
) -> Comparison:
    """Let stock and then every residency compute `steps` in one context.

    `device` is what stock computes with its experts on the device, `types` are those of the experts, `rounds_alike`
    says that the device is known to compute what the CPU does, `fuses` that it adds experts in a fused kernel.

    Raises:
        StockBroken: stock's logits are not finite.
    """
    references = References(_reference(context, residency, steps), device)
    per_row = sum(layer.n_expert_used for layer in managed(residency))
    cold = _cold(context, residency, steps)
    ids = cold.recording.ids  # stock's own, which does not count by itself
    standard = Standard(frozenset(types), *_own_differences(references, rounds_alike), fuses=fuses)
    if standard.needs_own:
        alone = walk(context, one_by_one(steps), residency)
        own = distance(cold.recording.logits, alone.logits, flipped(ids, alone.ids, len(alone.logits)))
        standard = replace(standard, kl_alone=own.kl_unflipped)
    cases, skipped = [_judge(cold, ids, references, standard, per_row)], []
    for run in _warm(context, residency, steps, seed):
        if isinstance(run, Skipped):
            skipped.append(run)
        else:
            cases.append(_judge(run, ids, references, standard, per_row))
    return Comparison(tuple(steps), standard, tuple(cases), tuple(skipped))


def _reference(context: Decoder, residency: Residency, steps: Sequence[Step]) -> Recording:
    """What upstream computes in this very context."""
    residency.set_state(State.OFF)
    recording = walk(context, steps)
    residency.set_state(State.ON)
    if not np.isfinite(recording.logits).all():
        raise StockBroken("stock's own logits are not finite: the model is broken")
    return recording


def _own_differences(references: References, rounds_alike: bool) -> tuple[bool, float | None]:
    """Whether stock's two placements give the same bits, and their mean divergence if it is known."""
    if references.device is None:
        return rounds_alike, None
    stock, device = references.stock.logits, references.device.logits
    apart = distance(stock, device, np.zeros(len(stock), np.bool_))
    return apart.identical, apart.kl_mean


def _cold(context: Decoder, residency: Residency, steps: Sequence[Step]) -> Run:
    give_slots(residency, 0.0)
    return Run(COLD, 0.0, walk(context, steps, residency))


def _warm(context: Decoder, residency: Residency, steps: Sequence[Step], seed: int) -> Iterator[Run | Skipped]:
    """Slots with nothing in them, half of the experts, a half that changes, and all of them."""
    share = _first_that_fits(residency, HALF_SHARES)
    if share is None:
        reason = f"the device has no room for {HALF_SHARES[-1]:.1%} of the experts"
        yield from (Skipped(name, reason) for name in (EMPTY, HALF, CHANGING, FULL))
        return
    yield Run(EMPTY, 0.0, walk(context, steps, residency))
    fill(residency, managed(residency), np.random.default_rng([seed, 1]))
    yield Run(HALF, resident_share(residency), walk(context, steps, residency))
    churn = Churn(residency, np.random.default_rng([seed, 2]), share)
    try:
        recording = walk(context, steps, residency, churn)
    finally:
        churn.close()
    yield Run(CHANGING, float(np.mean(churn.shares)), recording)
    if _first_that_fits(residency, (1.0,)) is None:
        yield Skipped(FULL, "the device has no room for all experts in slots")
        return
    fill(residency, managed(residency), np.random.default_rng([seed, 3]))
    yield Run(FULL, resident_share(residency), walk(context, steps, residency))


def _judge(run: Run, ids: Sequence[Ids], references: References, standard: Standard, per_row: int) -> Case:
    """Compare a run with the reference that it should equal most.

    `ids` are the router's in stock, `per_row` the selections that a row makes in all managed layers.
    """
    by_device = run.name == FULL and references.device is not None
    against = references.device if by_device and references.device is not None else references.stock
    tolerance = _tolerance(run.name, by_device, standard)
    changed = flipped(ids, run.recording.ids, len(run.recording.logits))
    whole = distance(against.logits, run.recording.logits, changed)
    problems = [problem] if (problem := tolerance.problem(whole)) else []
    problems += _count_problems(run, per_row)
    phases = tuple(_phase(phase, run, ids, against, references, tolerance) for phase in PHASES)
    name = "device" if by_device else "stock"
    return Case(run.name, run.resident, name, tolerance, whole, phases, tuple(problems))


def _first_that_fits(residency: Residency, shares: Sequence[float]) -> float | None:
    """Give every managed layer the first of these shares that the device has room for."""
    for share in shares:
        try:
            give_slots(residency, share)
        except ResidencyError as error:
            if error.refusal is not Status.NO_MEMORY:
                raise
        else:
            return share
    return None


def _tolerance(name: str, by_device: bool, standard: Standard) -> Tolerance:
    if name == COLD:
        return standard.untouched()
    if name == EMPTY:
        return standard.summed()
    if by_device or (name == FULL and standard.rounds_alike):
        return standard.unmoved()
    return standard.moved()


def _phase(
    phase: str, run: Run, ids: Sequence[Ids], against: Recording, references: References, tolerance: Tolerance
) -> PhaseResult:
    mine, theirs = run.recording.phase(phase), against.phase(phase)
    rows = run.recording.rows(phase)
    changed = flipped([layer[rows] for layer in ids], mine.ids, len(mine.logits))
    apart = distance(theirs.logits, mine.logits, changed)
    kl_stock = None
    if references.device is not None:
        stock, device = references.stock.phase(phase).logits, references.device.phase(phase).logits
        kl_stock = tolerance.kl_of(distance(stock, device, np.zeros(len(stock), np.bool_)))
    return PhaseResult(phase, apart, tolerance.kl_of(apart), kl_stock, sum(mine.hits), sum(mine.misses))


def _count_problems(run: Run, per_row: int) -> Iterator[str]:
    """Numbers that would be plausible although nothing was tested."""
    hits, misses = sum(run.recording.hits), sum(run.recording.misses)
    selections = per_row * len(run.recording.logits)
    if hits + misses != selections:
        yield f"{hits} hits and {misses} misses are not the {selections} selections that the router made"
    if run.resident > 0 and not hits:
        yield "experts were resident, but none was computed on the device"
    if run.resident == 0 and hits:
        yield f"nothing was resident, but there were {hits} hits"
