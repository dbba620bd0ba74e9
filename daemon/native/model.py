"""A loaded model: weights and vocabulary, by llama.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from daemon.errors import ModelUnusable
from daemon.messages import Load
from daemon.native import devices
from daemon.native.library import TAIL, backend, load_reason

EXPERT_TENSORS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""The tensors that hold routed experts, by llama.cpp's naming."""

_LOAD_MODES = {"auto": -1, "none": 0, "mmap": 1}


class _BufferOverride(ctypes.Structure):
    """`struct llama_model_tensor_buft_override`, which llama-cpp-python only names."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


class Model:
    """Weights in memory; a context manager. `pointer` and `vocab` are llama.cpp's handles.

    Raises:
        ModelUnusable: llama.cpp refused the file; the message is its last error line.
    """

    def __init__(
        self,
        spec: Load,
        progress: Callable[[float], None],
        *,
        chosen: Sequence[int] | None = None,
        on_device: Collection[int] = (),
    ) -> None:
        """`chosen` are the devices where they are known already; experts of layers `on_device` are no host tensors."""
        self._lib = backend()
        self.devices = devices.choose(spec.device) if chosen is None else list(chosen)
        self._keep: list[Any] = []  # what llama.cpp only points to must live as long as the load
        params = self._params(spec, on_device)
        params.progress_callback = self._callback(progress)
        TAIL.clear()
        self.pointer: Any = self._lib.llama_model_load_from_file(spec.model.encode(), params)
        if not self.pointer:
            raise ModelUnusable(f"{Path(spec.model).name} cannot be loaded: {load_reason()}")
        self.vocab: Any = self._lib.llama_model_get_vocab(self.pointer)
        self.n_vocab = int(self._lib.llama_vocab_n_tokens(self.vocab))

    @property
    def n_params(self) -> int:
        """Parameters, all experts counted."""
        return int(self._lib.llama_model_n_params(self.pointer))

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return int(self._lib.llama_model_size(self.pointer))

    @property
    def description(self) -> str:
        """Llama.cpp's one-line description: architecture, size class, quantisation.

        Where it knows no class ("?B"), the parameters in millions.
        """
        buffer = ctypes.create_string_buffer(256)
        self._lib.llama_model_desc(self.pointer, buffer, len(buffer))
        return buffer.value.decode(errors="replace").replace(" ?B", f" {self.n_params / 1e6:.0f}M")

    @property
    def n_ctx_train(self) -> int:
        """Tokens of context that the model was trained with."""
        return int(self._lib.llama_model_n_ctx_train(self.pointer))

    @property
    def has_decoder(self) -> bool:
        """Whether the model can generate text."""
        return bool(self._lib.llama_model_has_decoder(self.pointer))

    @property
    def has_encoder(self) -> bool:
        """Whether prompts would need an encoder pass first."""
        return bool(self._lib.llama_model_has_encoder(self.pointer))

    @property
    def is_recurrent_or_hybrid(self) -> bool:
        """Whether some layers keep a state that cannot be cut back to an earlier position."""
        return bool(self._lib.llama_model_is_recurrent(self.pointer) or self._lib.llama_model_is_hybrid(self.pointer))

    @property
    def n_swa(self) -> int:
        """Tokens that layers with a sliding window look back; 0: there is no such layer."""
        return int(self._lib.llama_model_n_swa(self.pointer))

    def suppressed_tokens(self) -> tuple[int, ...]:
        """Token ids that the model's file says must never be generated."""
        count = ctypes.c_int32()
        pointer = self._lib.llama_vocab_get_suppress_tokens(self.vocab, ctypes.byref(count))
        return tuple(pointer[i] for i in range(count.value)) if pointer and count.value else ()

    def close(self) -> None:
        """Free the weights; contexts of the model must be closed before."""
        if self.pointer:
            self._lib.llama_model_free(self.pointer)
            self.pointer = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _params(self, spec: Load, on_device: Collection[int]) -> Any:
        params = self._lib.llama_model_default_params()
        params.load_mode = _LOAD_MODES[spec.load_mode]
        params.n_gpu_layers = spec.gpu_layers
        params.use_extra_bufts = spec.repack
        pointers = (ctypes.c_void_p * (len(self.devices) + 1))(*self.devices, None)
        self._keep.append(pointers)
        params.devices = ctypes.addressof(pointers)
        if self.devices:
            params.tensor_buft_overrides = self._experts_to_cpu(spec.cpu_moe_layers, on_device)
        return params

    def _experts_to_cpu(self, n_layers: int, on_device: Collection[int]) -> int:
        """Address of overrides that keep the experts of the first `n_layers` layers (-1: of all) in host memory.

        Where it is all, those of the layers `on_device` are left out.
        """
        if n_layers >= 0:
            patterns = [rf"blk\.{i}{EXPERT_TENSORS}" for i in range(n_layers)]
        elif on_device:
            patterns = [rf"blk\.(?!(?:{'|'.join(map(str, on_device))})\.)\d+{EXPERT_TENSORS}"]
        else:
            patterns = [EXPERT_TENSORS]
        array = (_BufferOverride * (len(patterns) + 1))()
        cpu = devices.ggml().ggml_backend_cpu_buffer_type()
        for slot, pattern in zip(array, patterns, strict=False):
            slot.pattern, slot.buft = pattern.encode(), cpu
        self._keep.append(array)
        return ctypes.addressof(array)

    def _callback(self, progress: Callable[[float], None]) -> Any:
        def report(value: float, _data: Any) -> bool:
            progress(value)
            return True

        callback = self._lib.llama_progress_callback(report)
        self._keep.append(callback)
        return callback
