"""From a `Load` to a model, a context and what there is to say about them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from daemon.engine import learnings, memory, placing, probe, sizes, wanted
from daemon.engine.arms import Arms
from daemon.engine.idle import IdleWorks
from daemon.engine.learnings import Memory
from daemon.engine.probe import Measured, Probe
from daemon.engine.proofs import Proofs
from daemon.engine.residency import Experts
from daemon.engine.selftest import N_CELLS, SelfTest
from daemon.engine.store import Key, Store
from daemon.engine.wanted import Off, Wanted
from daemon.errors import ModelUnusable
from daemon.messages import Device, Load, ModelInfo, Scheduling
from daemon.native import abi, devices, drivers, gguf_check, library, locate
from daemon.native.context import Context
from daemon.native.gguf_check import GgufFile
from daemon.native.model import Model
from daemon.native.vocab import Vocab
from daemon.verify.text import TEXT

_CACHE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32,
                "q4_1": 20 / 32, "q4_0": 18 / 32}  # fmt: skip


class Loaded:
    """A model ready to decode; a context manager that frees everything in reverse order.

    Raises:
        ModelUnusable: the file is missing, broken, of an unknown architecture, or does not fit.
    """

    def __init__(self, spec: Load, progress: Callable[[float], None], state: Path | None = None) -> None:
        """`state` is where what is learned is kept; None: nowhere."""
        file = gguf_check.check(Path(spec.model))
        self._exports = abi.bind(library.handle())
        devices.load_backends(spec.device)
        chosen = devices.choose(spec.device)
        self._devices = devices.list_devices(chosen)
        known = learnings.recall(state, spec.residency, file)
        wish = wanted.prepare(spec, file, [devices.describe(device) for device in chosen], known.learned)
        room = Room(spec, file, self._devices)
        whole = room.whole_layers(wish) if isinstance(wish, Wanted) else []
        lack = gguf_check.memory_warning(file.facts, room.bytes(file.facts.bytes_of_experts(whole)))
        pins = any(devices.reads_host_memory(device) for device in chosen)
        spec = _for_memory(_for_slots(spec, wish, pins), lack)
        with ExitStack() as stack:
            self.model = stack.enter_context(Model(spec, progress, chosen=chosen, on_device=whole))
            if not self.model.has_decoder or self.model.has_encoder:
                raise ModelUnusable(f"{file.path.name} is no decoder-only text model; hotset cannot serve it")
            self.vocab = Vocab.of_model(self.model.pointer)
            n_ctx, cells = _context_sizes(spec, file, self.model.n_ctx_train)
            decode_threads, batch_threads = _threads(spec)
            self.context = stack.enter_context(
                Context(self.model, spec, n_ctx=cells, n_threads=decode_threads, n_threads_batch=batch_threads)
            )
            self.experts: Experts | Off = self._place(wish, whole, known)
            if isinstance(self.experts, Experts):
                stack.enter_context(self.experts)
            self.info = self._describe(spec, file, n_ctx, lack, _strange_reserves(wish, self._devices))
            self._spec = spec
            self._stack = stack.pop_all()

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    @property
    def scheduling(self) -> Scheduling:
        """How steps are to be shared, as the load said."""
        return self._spec.scheduling

    def selftest(self, proofs: Proofs | None = None) -> SelfTest | None:
        """The comparison to make once the engine is idle; None where none can have a slot, or there are no cells.

        `proofs` replaces those of the cache.
        """
        experts = self.experts
        if not isinstance(experts, Experts) or not experts.slots() or self.info.n_ctx < N_CELLS:
            return None
        tokens = self.vocab.tokenize(TEXT, add_special=False, parse_special=False)
        bos = self.vocab.bos if self.vocab.add_bos else None
        proofs = proofs or Proofs(locate.cache_root() / "selftests")
        return SelfTest(self.context, experts, tokens, proofs, lambda: self._tested(experts), bos)

    def probe(self, store: Store[Measured] | None = None) -> Probe | None:
        """What times experts in VRAM once the engine is idle; None where none can have a slot, or there are no cells.

        `store` replaces that of the cache.
        """
        experts = self.experts
        if not isinstance(experts, Experts) or not experts.slots() or self.info.n_ctx < probe.N_CELLS:
            return None
        tokens = self.vocab.tokenize(TEXT, add_special=False, parse_special=False)
        store = store or Store(locate.cache_root() / "prices", Measured)
        arms = Arms(experts.residency, experts)
        made = Probe(self.context, arms, tokens, store, self._key({}), experts.gatekeeper)
        experts.gatekeeper.compare = made.compare
        return made

    def idle(self) -> IdleWorks:
        """Everything that is to be done while nobody asks for anything."""
        return IdleWorks([work for work in (self.selftest(), self.probe()) if work is not None])

    def _tested(self, experts: Experts) -> Key:
        """What the self-test depends on."""
        placed = experts.placed
        experts_by_layer = {index: list(ids) for index, ids in placed.plan.experts.items()}
        slots = {index: len(ids) for index, ids in placed.plan.experts.items()}
        return self._key({"experts": experts_by_layer} if placed.frozen else {"slots": slots})

    def _key(self, more: dict[str, Any]) -> Key:
        """What is measured here depends on all of this."""
        settings = self._spec.model_dump(exclude={"kind", "model", "name", "residency", "scheduling"}) | more
        build = Path(os.environ[locate.OVERRIDE])
        return Key(
            build=f"{self.info.build}, {build.name}, {(build / 'libllama.so').stat().st_mtime_ns}",
            driver=drivers.identity(),
            device=", ".join(f"{device.name} {device.description}" for device in self.info.devices),
            model=self.info.fingerprint,
            settings=hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
        )

    def _place(self, wish: Wanted | Off, whole: list[int], known: Memory) -> Experts | Off:
        """Right after the context: some drivers do not survive new buffers after long use."""
        if isinstance(wish, Off):
            return wish
        return placing.place(
            self.context, wish, lambda: [devices.describe(device) for device in self.model.devices], whole, known
        )

    def _describe(
        self, spec: Load, file: GgufFile, n_ctx: int, lack: str | None, more_warnings: Sequence[str]
    ) -> ModelInfo:
        facts = file.facts
        return ModelInfo(
            name=spec.name or _plain_name(file),
            architecture=facts.architecture,
            description=self.model.description,
            fingerprint=file.fingerprint,
            n_params=self.model.n_params,
            size=self.model.size,
            n_vocab=self.model.n_vocab,
            n_ctx_train=self.model.n_ctx_train,
            n_ctx=n_ctx,
            kv_cells=self.context.n_ctx,
            kv_bytes_per_token=_kv_bytes(spec, file),
            n_layer=facts.n_layer,
            n_expert=facts.n_expert,
            n_expert_used=facts.n_expert_used,
            max_sequences=spec.max_sequences,
            n_ubatch=self.context.n_ubatch,
            bos=self.vocab.bos,
            eos=self.vocab.eos,
            devices=self._devices,
            build=", ".join(f"{key} {value}" for key, value in self._exports.build_info.items()),
            residency=self.experts.status().reason,
            warnings=[
                *_device_warnings(spec, self._devices),
                *_warnings(file, n_ctx, lack),
                *_residency_warnings(self.experts),
                *more_warnings,
            ],
        )


def _plain_name(file: GgufFile) -> str:
    """The file's name without its suffix, and without the part number of a split model."""
    stem = file.path.stem
    return stem.rsplit("-", 3)[0] if len(file.parts) > 1 else stem


def _kv_bytes(spec: Load, file: GgufFile) -> int:
    """KV cache of one token in the types that are configured; the facts count two bytes a value."""
    both = _CACHE_BYTES[spec.cache_type_k] + _CACHE_BYTES[spec.cache_type_v]
    return round(file.facts.kv_bytes_per_token / 4 * both)


def _context_sizes(spec: Load, file: GgufFile, n_ctx_train: int) -> tuple[int, int]:
    n_ctx = sizes.context_length(spec.context, n_ctx_train)
    return n_ctx, sizes.kv_cells(spec.kv_cells, n_ctx, spec.max_sequences, _kv_bytes(spec, file))


def _threads(spec: Load) -> tuple[int, int]:
    allowed = len(os.sched_getaffinity(0))
    decode = sizes.threads(spec.threads, psutil.cpu_count(logical=False), allowed)
    return decode, spec.threads_batch or decode


class Room:
    """Memory for the weights, on the host and on devices; bytes."""

    def __init__(self, spec: Load, file: GgufFile, found: list[Device]) -> None:
        self._spec, self._facts = spec, file.facts
        self._host = memory.available()
        self._device = sum(device.memory_free for device in found if device.kind == "gpu")

    def bytes(self, experts_on_devices: int = 0) -> int:
        """All of it, when so many bytes of experts go to devices besides those that the config sends there."""
        facts = self._facts
        share = self._spec.gpu_layers / max(1, facts.n_layer) if self._spec.gpu_layers >= 0 else 1.0
        experts = facts.expert_bytes if self._spec.cpu_moe_layers == 0 else experts_on_devices
        return self._host + sizes.bytes_on_devices(self._device, share, facts.other_bytes, experts)

    def whole_layers(self, wish: Wanted) -> list[int]:
        """Layers whose experts go to devices alone, because memory is short and engine.cpu_moe_layers says nothing."""
        shortage = gguf_check.shortage(self._facts, self.bytes())
        if self._spec.cpu_moe_layers >= 0 or shortage <= 0:
            return []
        return wish.whole_layers(shortage, self._facts.other_bytes)


def _for_slots(spec: Load, wish: Wanted | Off, pins: bool) -> Load:
    """Weights that the CPU has rearranged cannot be copied into slots, and those of a mapped file only slowly.

    `pins`: the device copies faster from memory of its own choice, which takes what is read in and not what is mapped.
    """
    if isinstance(wish, Off):
        return spec
    read_in = {"load_mode": "none"} if pins and spec.load_mode == "auto" else {}
    return spec.model_copy(update={"repack": False} | read_in)


def _residency_warnings(experts: Experts | Off) -> list[str]:
    return [f"residency is {experts.reason}"] if isinstance(experts, Off) and experts.fault else []


def _strange_reserves(wish: Wanted | Off, found: Sequence[Device]) -> list[str]:
    strange = wanted.strange_reserves(wish.reserves, found) if isinstance(wish, Wanted) else ""
    return [strange] if strange else []


def _for_memory(spec: Load, lack: str | None) -> Load:
    """A model that memory cannot hold stays in its file: what is rearranged or read in is a copy that the kernel cannot
    drop, so it would kill the engine instead."""
    return spec if lack is None else spec.model_copy(update={"repack": False, "load_mode": "mmap"})


def _device_warnings(spec: Load, found: list[Device]) -> list[str]:
    if spec.device == "auto" and all(device.kind == "cpu" for device in found):
        return ["engine.device is auto and llama.cpp sees no GPU: the CPU computes; `hotset doctor` says why"]
    return []


def _warnings(file: GgufFile, n_ctx: int, lack: str | None) -> list[str]:
    warnings = []
    if lack is not None:
        warnings.append(f'{lack} For this, engine.repack counts as false and model.load as "mmap".')
    trained = file.facts.n_ctx_train
    if trained and n_ctx > trained:
        warnings.append(f"model.context is {n_ctx}, but the model was trained for {trained} tokens")
    return warnings
