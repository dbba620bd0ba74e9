"""Has a model computed by stock on either side and with slots, and everything compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from daemon.engine.residency_report import WHY_NOT
from daemon.errors import ModelUnusable
from daemon.native import abi, library
from daemon.native.hotset import Layer, Reason, Residency
from daemon.native.model import Model
from daemon.verify import tolerance
from daemon.verify.cases import Comparison, compare
from daemon.verify.placing import managed
from daemon.verify.walk import Recording, walk
from hotset_tools.verify.opening import CannotVerify, Request, Target, context_of, opened, prompt_steps, without_room


@dataclass(frozen=True)
class Outcome:
    """Everything that was found. `no_stock` says why stock's own difference is not known, `unmanaged` which layers no
    case could move, and why."""

    target: Target
    build: dict[str, str]
    n_managed: int
    unmanaged: str
    no_stock: str | None
    comparison: Comparison

    @property
    def ok(self) -> bool:
        """Whether every case that could be had is within its tolerance."""
        return not any(case.problems for case in self.comparison.cases)


def verify(request: Request, note: Callable[[str], None]) -> Outcome:
    """Compute and compare; `note` is told what is going on.

    Raises:
        HotsetError: nothing could be compared: no such file or device, no experts, too little memory, no managed layer.
    """
    with opened(request, note) as target:
        on_device, no_stock = _stock_on_device(target, note)
        note("stock with the experts in memory, then with slots")
        with Model(target.spec, lambda _: None) as model, context_of(model, target) as context:
            if not context.memory:
                raise CannotVerify("the model keeps nothing between steps, so there is no decoding to compare")
            steps = prompt_steps(target, model)
            with Residency(context.pointer) as residency:
                layers, taken = residency.layers(), managed(residency)
                unmanaged = _why_not(layer for layer in layers if layer.reason is not Reason.MANAGED)
                if not taken:
                    raise CannotVerify(f"no layer can be managed: {unmanaged or 'llama.cpp found no routed experts'}")
                comparison = compare(
                    context,
                    residency,
                    steps,
                    device=on_device,
                    types={name for layer in target.file.facts.layers for name in layer.expert_quants},
                    rounds_alike=target.stand_in,
                    seed=request.seed,
                    fuses=any(tolerance.fuses(device.name, os.environ) for device in target.devices),
                )
        if not any(case.resident for case in comparison.cases):
            raise CannotVerify(f"nothing could be made resident: {comparison.skipped[0].reason}")
        build = abi.bind(library.handle()).build_info
        return Outcome(target, build, len(taken), unmanaged, no_stock, comparison)


def _stock_on_device(target: Target, note: Callable[[str], None]) -> tuple[Recording | None, str | None]:
    """What stock computes with all experts on the device; else why it cannot."""
    reason = without_room(target)
    if reason is not None:
        return None, reason
    note("stock with the experts on the device")
    spec = target.spec.model_copy(update={"cpu_moe_layers": 0})
    try:
        with Model(spec, lambda _: None) as model, context_of(model, target) as context:
            return walk(context, prompt_steps(target, model)), None
    except ModelUnusable as error:
        return None, error.message


def _why_not(layers: Iterable[Layer]) -> str:
    """Runs of layers with the same reason, in words."""
    parts = []
    for reason, run in groupby(layers, key=lambda layer: layer.reason):
        numbers = [layer.il for layer in run]
        where = f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {numbers[0]}-{numbers[-1]}"
        parts.append(f"{where}: {WHY_NOT[reason]}")
    return "; ".join(parts)
