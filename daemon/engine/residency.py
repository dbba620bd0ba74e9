"""Experts in VRAM for one engine: the upload beside serving, and what status says of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal

from daemon.engine.counts import Counts
from daemon.hotset.budget import MIB
from daemon.hotset.placement import DevicePlan, ExpertLayer, Plan
from daemon.messages import ExpertDevice, SelfTestState
from daemon.messages import ExpertLayer as LayerState
from daemon.messages import Residency as Report
from daemon.native.hotset import Layer, Memory, Mode, Reason, Residency, ResidencyError, State

_MODES: dict[Mode, Literal["cold", "partial", "full"]] = {
    Mode.COLD: "cold",
    Mode.PARTIAL: "partial",
    Mode.FULL: "full",
}
_MEMORY: dict[Memory, Literal["", "pinned", "pageable", "mapped"]] = {
    Memory.NONE: "",
    Memory.PINNED: "pinned",
    Memory.PAGEABLE: "pageable",
    Memory.MAPPED: "mapped",
}
_LIES_IN = {
    "pinned": "pinned memory",
    "pageable": "pageable memory, which devices read more slowly",
    "mapped": 'the mapped file, which devices read more slowly (model.load = "none" does not map it)',
}

WHY_NOT = {
    Reason.MANAGED: "",
    Reason.LORA: "an adapter changes these experts",
    Reason.REPACKED: "the CPU has these weights in its own layout",
    Reason.NOT_HOST: "the weights are not in memory that the CPU can read",
    Reason.ON_DEVICE: "the experts lie on the device, without a copy in memory",
    Reason.NO_DEVICE: "the layer belongs to the CPU",
    Reason.UNSUPPORTED: "the device cannot multiply weights of this type or shape by expert",
}


class Experts:
    """Slots of one context, filled in the background; a context manager that must end before the context.

    `status` may be asked by any thread; all else belongs to that of the engine. `counts` are what requests selected.
    """

    def __init__(
        self,
        residency: Residency,
        synchronize: Callable[[], None],
        file: str,
        plan: Plan,
        layers: Sequence[ExpertLayer],
        names: Sequence[str],
    ) -> None:
        self.residency, self.plan = residency, plan
        self._synchronize, self._file, self._names = synchronize, file, names
        self._wholly = {layer.index: layer for layer in layers if layer.wholly}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="experts", daemon=True)
        self._fault = ""
        self._off = ""
        self._set = State.ON
        self.counts = Counts(residency)
        self._selftest: tuple[SelfTestState, str] = ("none", "")

    @property
    def filled(self) -> bool:
        """Whether the upload has begun and is over."""
        return self._thread.ident is not None and not self._thread.is_alive()

    @property
    def complete(self) -> bool:
        """Whether the upload brought every planned expert."""
        return self.filled and not self._fault and not self._stop.is_set()

    def start(self) -> None:
        """Begin to upload while decoding goes on; a layer's experts are used once all of them are there."""
        try:
            self._thread.start()
        except RuntimeError:  # no memory for its stack
            self._fault = "no thread can be started"

    def switch_off(self, reason: str) -> None:
        """Compute as upstream does from now on, for this reason, and upload no more."""
        self._stop.set()
        self.compute_as(State.OFF)
        self._off = reason

    def compute_as(self, state: State) -> None:
        """Switch residency for the next steps; slots keep their experts."""
        self._synchronize()
        self.residency.set_state(state)
        self._set = state

    def stop_counting(self) -> None:
        """What is selected from now on is not of requests."""
        self.counts.stop()

    def count_again(self) -> None:
        """Selections are of requests again."""
        self.counts.resume()

    def tell(self, state: SelfTestState, detail: str = "") -> None:
        """What status says of the self-test."""
        self._selftest = (state, detail)

    def close(self) -> None:
        """End the upload and free the slots."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.residency.close()

    def __enter__(self) -> Experts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _fill(self) -> None:
        """Upload layer by layer. Publishing does not wait: a context that is freed has no next boundary."""
        try:
            for index, experts in self.plan.experts.items():
                for slot, expert in enumerate(experts):
                    if self._stop.is_set():
                        return
                    self.residency.stage(index, expert, slot)
                moves = [(index, slot, expert) for slot, expert in enumerate(experts)]
                self.residency.publish(moves, wait=False)
        except ResidencyError as error:
            self._fault = error.message

    # -- status

    def status(self) -> Report:
        """Counted anew from the library."""
        found = self.counts.layers()
        layers = [self._layer(layer) for layer in found]
        selftest, detail = self._selftest
        statistics = self.residency.statistics()
        if statistics.state == State.OFF != self._set:
            self._off = "a device had no room for the compute buffers that a step needs with experts in VRAM"
        n_resident, n_planned = sum(layer.resident for layer in layers if layer.slots), self.plan.n_experts
        state: Literal["off", "filling", "on"] = (
            "off" if self._off else "on" if n_resident >= n_planned or self._fault else "filling"
        )
        return Report(
            state=state,
            reason=self._reason(state, layers),
            filled=n_resident / n_planned if n_planned else 1.0,
            devices=[self._device(account, layers, found) for account in self.plan.devices],
            layers=layers,
            uploaded_bytes=statistics.staged_bytes,
            published=statistics.published,
            selftest=selftest,
            selftest_detail=detail,
        )

    def _reason(self, state: str, layers: Sequence[LayerState]) -> str:
        if self._off:
            return f"off: {self._off}"
        accounts, whole = self.plan.devices, len(self._wholly)
        memory = Counter(layer.memory for layer in layers if layer.device)
        words = [
            f"{self.plan.n_experts} of {sum(layer.experts for layer in layers)} experts of {self._file} have slots",
            *(f"{one.effective_bytes / MIB:.1f} MiB on {one.device}" for one in accounts if one.effective_bytes),
            *([f"{whole} layers lie there without a copy in memory, which is short"] if whole else []),
            *(f"{one.device} was asked for {one.asked}, but {one.why}" for one in accounts if one.why),
            *(f"{one.device} shares the CPU's memory" for one in accounts if one.spare and one.spare.shared),
            *(f"{n} layers' weights lie in {_LIES_IN[kind]}" for kind, n in memory.items() if kind),
            *([f"the upload ended early: {self._fault}"] if self._fault else []),
        ]
        return f"{state}: {'; '.join(words)}"

    def _layer(self, layer: Layer) -> LayerState:
        wholly = self._wholly.get(layer.index)
        device = wholly.device if wholly else self._names[layer.device] if layer.device >= 0 else ""
        return LayerState(
            layer=layer.il,
            device=device,
            mode="device" if layer.reason == Reason.ON_DEVICE else _MODES[layer.mode],
            reason=WHY_NOT[layer.reason],
            memory=_MEMORY[layer.memory],
            experts=layer.n_expert,
            slots=layer.n_slots,
            resident=layer.n_resident,
            hits=layer.hits,
            misses=layer.misses,
        )

    def _bytes(self, device: str, found: Sequence[Layer]) -> int:
        """What experts take on a device, in slots and in whole layers."""
        whole = sum(layer.bytes for layer in self._wholly.values() if layer.device == device)
        return whole + sum(one.device_bytes for one in found if one.device >= 0 and self._names[one.device] == device)

    def _device(self, account: DevicePlan, layers: Sequence[LayerState], found: Sequence[Layer]) -> ExpertDevice:
        own = [layer for layer in layers if layer.device == account.device]
        kept = account.spare.reserve if account.spare else None
        return ExpertDevice(
            device=account.device,
            asked=account.asked,
            asked_bytes=account.asked_bytes,
            effective_bytes=account.effective_bytes,
            why=account.why,
            reserve_asked=kept.asked if kept else "",
            reserve_bytes=kept.n_bytes if kept else 0,
            reserve_why=kept.why if kept else "",
            shared_memory=account.spare is not None and account.spare.shared,
            bytes=self._bytes(account.device, found),
            layers=len(own),
            slots=sum(layer.slots for layer in own),
            resident=sum(layer.resident for layer in own),
            hits=sum(layer.hits for layer in own),
            misses=sum(layer.misses for layer in own),
        )
