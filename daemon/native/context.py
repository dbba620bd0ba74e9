"""A llama.cpp context: the KV cache, one batch buffer, decoding and sampling."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from daemon.errors import ModelUnusable
from daemon.messages import Load
from daemon.native.library import backend, recent_errors
from daemon.native.model import Model
from daemon.native.sampler import Sampler

_CACHE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}

_FLASH_OFF = 0  # enum llama_flash_attn_type

DECODED = 0
NO_CELLS = 1
ABORTED = 2


class Context:
    """Decodes batches of many sequences over one unified KV buffer. One thread only; a context manager.

    Without `flash_attention` attention is computed in its parts; with it llama.cpp decides.

    Raises:
        ModelUnusable: llama.cpp could not make the context (usually: not enough memory).
    """

    def __init__(
        self,
        model: Model,
        spec: Load,
        *,
        n_ctx: int,
        n_threads: int,
        n_threads_batch: int,
        flash_attention: bool = True,
    ) -> None:
        self._lib = backend()
        self._model = model
        params = self._lib.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = spec.ubatch
        params.n_seq_max = spec.max_sequences
        params.n_threads, params.n_threads_batch = n_threads, n_threads_batch
        params.type_k, params.type_v = _CACHE_TYPES[spec.cache_type_k], _CACHE_TYPES[spec.cache_type_v]
        params.kv_unified = True
        if not flash_attention:
            params.flash_attn_type = _FLASH_OFF
        params.no_perf = True
        self.pointer: Any = self._lib.llama_init_from_model(model.pointer, params)
        if not self.pointer:
            reason = (recent_errors() or ["llama.cpp gave no reason"])[-1].strip()
            raise ModelUnusable(f"no context of {n_ctx} cells could be made: {reason}")
        self.memory: Any = self._lib.llama_get_memory(self.pointer)
        self.n_ctx = int(self._lib.llama_n_ctx(self.pointer))
        self.n_ubatch = int(self._lib.llama_n_ubatch(self.pointer))
        self._batch = self._new_batch(self.n_ubatch)

    def decode(self, rows: Iterable[tuple[int, int, int, bool]]) -> int:
        """Compute one batch of (token, position, sequence id, want logits) rows, at most `n_ubatch` of them.

        Returns llama.cpp's code: `DECODED`, `NO_CELLS` (nothing changed), `ABORTED`, or a negative error (nothing
        changed). Row numbers of this batch address `sample` and `logits` until the next call.
        """
        batch = self._batch
        tokens, positions, ids, wants = batch.token, batch.pos, batch.seq_id, batch.logits
        n = 0
        for token, position, seq_id, want in rows:
            tokens[n] = token
            positions[n] = position
            ids[n][0] = seq_id
            wants[n] = want
            n += 1
        batch.n_tokens = n
        return int(self._lib.llama_decode(self.pointer, batch))

    def synchronize(self) -> None:
        """Wait until everything that was queued is computed."""
        self._lib.llama_synchronize(self.pointer)

    def sample(self, sampler: Sampler, row: int) -> int:
        """Choose and accept a token from the logits of `row`."""
        return int(self._lib.llama_sampler_sample(sampler.pointer, self.pointer, row))

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """The logits of `row`, [n_vocab]; a view that the next decode overwrites."""
        pointer = self._lib.llama_get_logits_ith(self.pointer, row)
        return np.ctypeslib.as_array(pointer, shape=(self._model.n_vocab,))

    def new_sampler(self, stages: Iterable[tuple[str, tuple[Any, ...]]]) -> Sampler:
        """A sampler chain for this model's vocabulary."""
        return Sampler(stages, self._model.vocab, self._model.n_vocab)

    def remove(self, seq_id: int) -> None:
        """Free every cell of a sequence."""
        self._lib.llama_memory_seq_rm(self.memory, seq_id, -1, -1)

    def last_position(self, seq_id: int) -> int:
        """The largest position that the sequence has in the cache, -1 when it has none."""
        return int(self._lib.llama_memory_seq_pos_max(self.memory, seq_id))

    @property
    def can_share(self) -> bool:
        """Whether a sequence can have exactly the beginning of another one, sharing its cells.

        Not where layers keep a state of the last position alone (recurrent, hybrid) or a window (SWA), nor where
        llama.cpp says that positions cannot be shifted, which is how it marks caches that are no plain cells.
        """
        model = self._model
        if model.is_recurrent_or_hybrid or model.n_swa > 0 or not self.memory:
            return False
        return bool(self._lib.llama_memory_can_shift(self.memory))

    def share(self, source: int, target: int, n: int) -> None:
        """Let `target`, which is empty, have the cells of positions [0, n) of `source` too; only where `can_share`."""
        self._lib.llama_memory_seq_cp(self.memory, source, target, 0, n)

    def state_size(self, seq_id: int) -> int:
        """Bytes of a sequence's state."""
        return int(self._lib.llama_state_seq_get_size(self.pointer, seq_id))

    def save(self, seq_id: int) -> bytearray | None:
        """The state of a sequence, its cells as they are; None where llama.cpp could not write it.

        Raises:
            MemoryError: there is no room for it.
        """
        state = bytearray(self.state_size(seq_id))
        buffer = (ctypes.c_uint8 * len(state)).from_buffer(state)
        written = int(self._lib.llama_state_seq_get_data(self.pointer, buffer, len(state), seq_id))
        return state if state and written == len(state) else None

    def restore(self, seq_id: int, state: bytearray) -> bool:
        """Put a saved state into an empty sequence, in whatever cells are free.

        False where llama.cpp refuses it, which may leave a part of it in the sequence.
        """
        buffer = (ctypes.c_uint8 * len(state)).from_buffer(state)
        return int(self._lib.llama_state_seq_set_data(self.pointer, buffer, len(state), seq_id)) == len(state)

    def close(self) -> None:
        """Free the context and its buffers."""
        if self.pointer:
            self._lib.llama_batch_free(self._batch)
            self._lib.llama_free(self.pointer)
            self.pointer = None

    def __enter__(self) -> Context:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _new_batch(self, capacity: int) -> Any:
        batch = self._lib.llama_batch_init(capacity, 0, 1)
        for i in range(capacity):
            batch.n_seq_id[i] = 1
        return batch
