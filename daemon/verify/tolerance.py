"""What is accepted as the same computation; pure.

How far two right computations may be apart depends on the device. One that rounds as the CPU does (a CPU behind the RPC
backend, for example) shows the same logits bit by bit wherever stock llama.cpp puts its layers. Moving single experts
then changes the order in which a few rows are summed: a matter of the last bit. In a layer where two experts are almost
equally likely that may make the router choose the other one; such a row, a *flip*, is another computation, and there
may be few. With experts in F32 everything else stays at the last bit. Quantised matrices quantise their inputs as well:
a value close to a step falls to its other side, which moves the whole row, and later rows that attend to it, by what
quantising costs. Stock does the same when its last bit changes, for example when the same rows are computed one by one
instead of in wide steps; that difference, measured in the same context, is what a row may be apart.

A graphics card rounds otherwise than the CPU, so stock's own logits change when a layer moves, in a model with many
layers for nearly every row. There the measure is what stock itself shows between its two placements: moving some of the
experts may not change more than moving all of them does, and what moves nothing may hardly change anything.

CUDA and ROCm weight and add the CPU's experts in a fused kernel whose products are not rounded. Where a layer has slots
and nothing in them, the CPU adds, and rounds: a matter of the last bit again, which quantised matrices then enlarge, so
that case is judged like the others. Without fusion (`FUSION_OFF`) it is identical, which docs/verify.md shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from daemon.verify.compare import Distance

KL_FLOAT = 1e-8
"""Experts in F32: sums in another order, nats."""

KL_QUANTISED = 1e-4
"""All other types, for rows that are no flips, where stock's own last bit does not matter more."""

FLIPS = 0.01
"""Share of rows that may be flips."""

FACTOR = 2.0
"""Of stock's own difference: over some hundred rows its mean and its largest value vary by less, and a wrong expert
changes both by far more (docs/verify.md has numbers)."""

FACTOR_UNMOVED = 0.1
"""The same where no expert is computed elsewhere than in the reference."""

KL_LEAST = 1e-6
"""Mean that is always accepted of quantised experts on such a device."""

KL_COARSE = 1e-2
"""Mean over all rows where stock's own difference is not known."""


FUSION_OFF = "GGML_CUDA_DISABLE_FUSION"
"""The variable with which ggml-cuda, and what is built from it for ROCm, fuses nothing."""

_FUSING = ("CUDA", "ROCm", "MUSA")


def fuses(device: str, environ: Mapping[str, str]) -> bool:
    """Whether the device of this name adds experts in a fused kernel; the rule of ggml_cuda_try_fuse."""
    off = environ.get(FUSION_OFF, "0").strip()
    return device.startswith(_FUSING) and not (off.lstrip("+-").isdecimal() and int(off))


class Rule(StrEnum):
    """How a case is judged."""

    IDENTICAL = "identical"
    """Every bit."""
    ALIKE = "alike"
    """Flips, and the divergence of all other rows."""
    MEAN = "mean"
    """The mean divergence of all rows."""


@dataclass(frozen=True)
class Tolerance:
    """The rule for a case, and its limit in nats (0 where every bit must be the same)."""

    rule: Rule
    kl: float = 0.0

    def kl_of(self, distance: Distance) -> float:
        """The divergence that the rule looks at."""
        if self.rule is Rule.MEAN:
            return distance.kl_mean
        if self.rule is Rule.IDENTICAL or self.kl <= KL_FLOAT:
            return distance.kl_max
        return distance.kl_unflipped

    def problem(self, distance: Distance) -> str | None:
        """What is wrong, None when nothing is."""
        if self.rule is Rule.IDENTICAL:
            return None if distance.identical else f"not identical: logits differ by {distance.max_abs:.3g}"
        kl = self.kl_of(distance)
        if not kl <= self.kl:
            which = "mean" if self.rule is Rule.MEAN else "largest"
            return f"the {which} divergence is {kl:.3g}, at most {self.kl:.3g} is accepted"
        if self.rule is Rule.ALIKE and not distance.flips <= FLIPS:
            return f"{distance.flips:.1%} of the rows were routed otherwise, at most {FLIPS:.0%} are accepted"
        return None


@dataclass(frozen=True)
class Standard:
    """What the tolerances of a run follow from.

    `types` are those of the experts' matrices. `rounds_alike` says that the device computes what the CPU does, bit by
    bit. `kl_stock` is the mean divergence between stock's two placements, `kl_alone` the largest of an unflipped row
    between stock in wide steps and stock one by one; None: not known. `fuses` says that the device weights and adds the
    experts that the CPU computed in one kernel of its own, which rounds less often than two.
    """

    types: frozenset[str]
    rounds_alike: bool
    kl_stock: float | None
    kl_alone: float | None = None
    fuses: bool = False

    @property
    def needs_own(self) -> bool:
        """Whether `kl_alone` matters."""
        return self.rounds_alike and not self._float

    def untouched(self) -> Tolerance:
        """For upstream's own path."""
        return Tolerance(Rule.IDENTICAL)

    def unmoved(self) -> Tolerance:
        """For a case in which every expert is computed where the reference computes it."""
        return Tolerance(Rule.IDENTICAL) if self.rounds_alike else self._mean(FACTOR_UNMOVED)

    def summed(self) -> Tolerance:
        """The same for experts that all are computed by the CPU, and added there instead of on the device."""
        return self._mean(FACTOR) if self.fuses and not self.rounds_alike else self.unmoved()

    def moved(self) -> Tolerance:
        """For a case in which experts are computed elsewhere than in the reference."""
        if not self.rounds_alike:
            return self._mean(FACTOR)
        if self._float:
            return Tolerance(Rule.ALIKE, KL_FLOAT)
        return Tolerance(Rule.ALIKE, max(KL_QUANTISED, FACTOR * (self.kl_alone or 0.0)))

    @property
    def _float(self) -> bool:
        return self.types <= {"F32"}

    def _mean(self, factor: float) -> Tolerance:
        if self.kl_stock is None:
            return Tolerance(Rule.MEAN, KL_COARSE)
        return Tolerance(Rule.MEAN, max(factor * self.kl_stock, KL_FLOAT if self._float else KL_LEAST))
