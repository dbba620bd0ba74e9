"""The short form of `hotset verify`, in the engine that serves: a few tokens with experts in VRAM and without.

It runs after the service is ready, when nothing else is to do, one step at a time; a request that arrives takes the
engine at once, and the test begins anew when that is over. What it computes is not counted. A failed test switches
residency off; a passed one is remembered and not repeated as long as nothing changes that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from daemon.engine.proofs import Key, Proofs
from daemon.errors import HotsetError
from daemon.messages import SelfTestState
from daemon.native.hotset import State
from daemon.verify.compare import Distance, Logits, distance
from daemon.verify.script import n_rows, short_script
from daemon.verify.tolerance import KL_COARSE, Rule, Tolerance
from daemon.verify.walk import Decoder, Walker

N_CELLS = 64
"""KV cells that the test needs at most."""

_SEQUENCE = 0  # nobody has it while the engine is idle


class ExpertsPort(Protocol):
    """What the test needs of `daemon.engine.residency.Experts`."""

    @property
    def filled(self) -> bool:
        """Whether the upload is over."""

    @property
    def complete(self) -> bool:
        """Whether it brought every planned expert."""

    def compute_as(self, state: State) -> None:
        """Switch residency for a while."""

    def switch_off(self, reason: str) -> None:
        """Switch it off for good."""

    def stop_counting(self) -> None:
        """What is selected from now on is nobody's."""

    def count_again(self) -> None:
        """Selections count again."""

    def tell(self, state: SelfTestState, detail: str = "") -> None:
        """What status says of the self-test."""


class SelfTest:
    """The loop asks whether it is `pending`, lets it `step` when idle, and `interrupt`s it when a request comes.

    `tokens` are what is computed. `key` gives what the test depends on, slots among it, which may change meanwhile; one
    that `proofs` knows needs no test.
    """

    def __init__(
        self,
        context: Decoder,
        experts: ExpertsPort,
        tokens: Sequence[int],
        proofs: Proofs,
        key: Callable[[], Key],
        bos: int | None = None,
    ) -> None:
        self._context, self._experts = context, experts
        self._proofs, self._key = proofs, key
        self._steps = short_script(tokens, _SEQUENCE, bos)
        assert n_rows(self._steps) <= N_CELLS
        self._walker: Walker | None = None
        self._stock: Logits | None = None
        self._tested: Key | None = None
        known = proofs.find(key())
        self._over = known is not None
        if known is not None:
            experts.tell("passed", f"on {known.passed}, with the same build, driver, device, model and settings")
        else:
            experts.tell("waiting")

    @property
    def pending(self) -> bool:
        """Whether there is something to compute now."""
        return not self._over and self._experts.filled

    @property
    def underway(self) -> bool:
        """Whether it holds cells, and residency is not as requests want it."""
        return self._walker is not None

    def step(self) -> None:
        """One decode call; the last one gives the verdict."""
        try:
            walker = self._walker or self._begin_stock()
            walker.step()
            if walker.done:
                self._end_of_pass(walker)
        except HotsetError as error:
            # Without residency it is no news of residency.
            (self._give_up if self._stock is None else self._fail)(error.message)

    def interrupt(self) -> None:
        """Give everything back; the test begins anew later."""
        walker, with_slots = self._walker, self._stock is not None
        self._walker = self._stock = None
        if walker is None:
            return
        walker.clear()
        if with_slots:
            self._experts.count_again()
        else:
            self._experts.compute_as(State.ON)

    def _begin_stock(self) -> Walker:
        """First as upstream computes, which counts nothing."""
        self._experts.compute_as(State.OFF)
        self._walker = Walker(self._context, self._steps)
        return self._walker

    def _begin_slots(self, stock: Logits) -> None:
        self._experts.compute_as(State.ON)
        self._experts.stop_counting()
        self._tested = self._key()
        self._stock, self._walker = stock, Walker(self._context, self._steps)

    def _end_of_pass(self, walker: Walker) -> None:
        logits, stock = walker.recording().logits, self._stock
        walker.clear()
        if stock is not None:
            self._judge(distance(stock, logits, np.zeros(len(stock), np.bool_)))
        elif np.isfinite(logits).all():
            self._begin_slots(logits)
        else:
            self._give_up("without residency the model's numbers are not finite either")

    def _judge(self, apart: Distance) -> None:
        problem = Tolerance(Rule.MEAN, KL_COARSE).problem(apart)
        if problem is not None:
            self._fail(problem)
            return
        self._finish()
        assert self._tested is not None
        unkept = self._proofs.add(self._tested, apart.kl_mean) if self._experts.complete else "experts are missing"
        detail = f"divergence {apart.kl_mean:.2g}"
        self._experts.tell("passed", f"{detail}; it cannot be remembered: {unkept}" if unkept else detail)

    def _fail(self, problem: str) -> None:
        self._finish()
        self._experts.switch_off(f"the self-test failed: {problem}")
        self._experts.tell("failed", problem)

    def _give_up(self, why: str) -> None:
        self._finish()
        self._experts.tell("skipped", why)

    def _finish(self) -> None:
        self.interrupt()
        self._over = True
