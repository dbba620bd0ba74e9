"""Sees which experts the router chooses, by llama.cpp's callback for every node (which switches overlap off)."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from daemon.native.hotset import Layer
from daemon.native.library import backend
from tests.miniarch.ggml_tensor import TensorHead, base_library

Ids = npt.NDArray[np.int32]
_TOP_K = re.compile(rb"ffn_moe_topk-(\d+)")


def by_layer(seen: list[tuple[int, Ids]], layers: Sequence[Layer]) -> list[Ids]:
    """For each layer the ids of all rows of all steps, [n_rows, n_used]; every step must have seen every layer."""
    assert [il for il, _ in seen] == [layer.il for layer in layers] * (len(seen) // len(layers))
    return [np.concatenate([ids for _, ids in seen[index :: len(layers)]]) for index in range(len(layers))]


class Watch:
    """What the router chose since the last `take`; give `callback` to the context's parameters as `cb_eval`."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, Ids]] = []
        self._base = base_library()
        self.callback = backend().ggml_backend_sched_eval_callback(self._see)

    def take(self) -> list[tuple[int, Ids]]:
        """The model's layer and the ids [n_tokens, n_used] of every router, in the order of computation."""
        seen, self._seen = self._seen, []
        return seen

    def _see(self, tensor: int, ask: bool, _data: Any) -> bool:
        match = _TOP_K.fullmatch(self._base.ggml_get_name(tensor))
        if match and not ask:
            self._seen.append((int(match[1]), self._ids(tensor)))
        return bool(match) or not ask

    def _ids(self, tensor: int) -> Ids:
        """The ids of a tensor that may be a view of a wider one."""
        head = TensorHead.from_address(tensor)
        raw = ctypes.create_string_buffer(self._base.ggml_nbytes(tensor))
        self._base.ggml_backend_tensor_get(tensor, raw, 0, len(raw))
        n_used, n_tokens = head.ne[:2]
        strides = (head.nb[1], head.nb[0])
        return np.ndarray((n_tokens, n_used), np.int32, raw, strides=strides).copy()
