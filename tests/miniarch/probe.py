"""A child process that asks the real library for the tensors of models of which there is only the metadata.

Arguments: metadata-only files. Prints one JSON line for each: path, and either its tensors as [name, dims] or why not.
llama.cpp creates every tensor that a model of such sizes can have, the optional ones too.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

from daemon.native.devices import load_backends
from daemon.native.library import TAIL, backend, load_reason
from tests.miniarch.ggml_tensor import GgufInit, TensorHead, base_library


def tensors_of(base: ctypes.CDLL, path: str) -> list[tuple[str, list[int]]] | None:
    """Every tensor in the order of creation; None where the library refuses the metadata."""
    llama_cpp: Any = backend()
    found: dict[str, list[int]] = {}

    @llama_cpp.llama_model_set_tensor_data_t  # type: ignore[untyped-decorator]
    def note(tensor: int, _data: int) -> None:
        head = TensorHead.from_address(tensor)
        found[base.ggml_get_name(tensor).decode()] = list(head.ne[: base.ggml_n_dims(tensor)])

    metadata = base.gguf_init_from_file(path.encode(), GgufInit(True, None))
    params = llama_cpp.llama_model_default_params()
    params.load_mtp = True  # tensors of prediction layers can only be created, not skipped
    model = llama_cpp.llama_model_init_from_user(metadata, note, None, params)
    base.gguf_free(metadata)
    if not model:
        return None
    llama_cpp.llama_model_free(model)
    return list(found.items())


def main(paths: list[str]) -> None:
    backend()
    load_backends("cpu")
    base = base_library()
    for path in paths:
        TAIL.clear()
        tensors = tensors_of(base, path)
        refusal = load_reason() if tensors is None else None
        print(json.dumps({"path": path, "tensors": tensors, "refusal": refusal}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
