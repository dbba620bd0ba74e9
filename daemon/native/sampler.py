"""A chain of llama.cpp samplers, owned by one sequence."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from daemon.native.library import backend


class Sampler:
    """Built from (stage name, arguments) pairs, see `daemon.engine.sampling.Stage`; freed by `close`.

    Belongs to the thread that owns the context.
    """

    def __init__(self, stages: Iterable[tuple[str, tuple[Any, ...]]], vocab: Any, n_vocab: int) -> None:
        self._lib = backend()
        self._vocab = vocab
        self._n_vocab = n_vocab
        params = self._lib.llama_sampler_chain_default_params()
        params.no_perf = True
        self.pointer: Any = self._lib.llama_sampler_chain_init(params)
        for name, args in stages:
            self._lib.llama_sampler_chain_add(self.pointer, self._stage(name, args))

    def accept(self, tokens: Sequence[int]) -> None:
        """Let the stages that look back see `tokens`, oldest first."""
        accept = self._lib.llama_sampler_accept
        for token in tokens:
            accept(self.pointer, token)

    def close(self) -> None:
        """Free the chain; the object is unusable afterwards."""
        if self.pointer is not None:
            self._lib.llama_sampler_free(self.pointer)
            self.pointer = None

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _stage(self, name: str, args: tuple[Any, ...]) -> Any:
        if name == "logit_bias":
            return self._logit_bias(*args)
        if name == "dry":
            return self._dry(*args)
        if name in ("penalties", "mirostat"):
            args = (self._n_vocab, *args)
        return getattr(self._lib, f"llama_sampler_init_{name}")(*args)

    def _logit_bias(self, biases: Sequence[tuple[int, float]]) -> Any:
        array = (self._lib.llama_logit_bias * len(biases))()
        for slot, (token, bias) in zip(array, biases, strict=True):
            slot.token, slot.bias = token, bias
        return self._lib.llama_sampler_init_logit_bias(self._n_vocab, len(biases), array)

    def _dry(self, multiplier: float, base: float, allowed: int, last_n: int, breakers: Sequence[str]) -> Any:
        encoded = [text.encode("utf-8") for text in breakers]
        array = (ctypes.c_char_p * len(encoded))(*encoded)
        return self._lib.llama_sampler_init_dry(self._vocab, multiplier, base, allowed, last_n, array, len(encoded))
