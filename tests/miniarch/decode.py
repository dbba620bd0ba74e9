"""A child process that decodes with many models, one after the other; prints a JSON line for each.

Arguments: model files. For each: a prompt of 64 tokens and a few steps, twice, the first time watching the router.
A model on which the library ends the process gets no line.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from daemon.errors import HotsetError
from daemon.native.devices import load_backends
from daemon.native.library import TAIL, backend, load_reason
from tests.miniarch.watch import Watch

N_PROMPT, N_STEPS, N_THREADS = 64, 4, 1


def decode(model: Any, watch: Watch | None) -> np.ndarray[Any, Any]:
    """The logits of every token of the prompt and of each step; the next token is the likeliest."""
    llama_cpp = backend()
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 256, N_THREADS, N_THREADS
    if watch is not None:
        params.cb_eval = watch.callback
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"no context: {load_reason()}")
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    tokens = [int(token) for token in np.random.default_rng(7).integers(0, n_vocab - 3, N_PROMPT)]
    rows, position = [], 0
    for _ in range(1 + N_STEPS):
        rows.append(step(context, tokens, position, n_vocab))
        position += len(tokens)
        tokens = [int(rows[-1][-1].argmax())]
    llama_cpp.llama_free(context)
    return np.concatenate(rows)


def step(context: Any, tokens: list[int], position: int, n_vocab: int) -> np.ndarray[Any, Any]:
    """The logits of all `tokens`, of which the first stands at `position`."""
    llama_cpp = backend()
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for index, token in enumerate(tokens):
        batch.token[index], batch.pos[index] = token, position + index
        batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, 1
    code = llama_cpp.llama_decode(context, batch)
    llama_cpp.llama_batch_free(batch)
    if code:
        raise RuntimeError(f"decode returned {code}")
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (len(tokens), n_vocab)).copy()


def report(path: str) -> dict[str, Any]:
    """What is to be said of one model."""
    llama_cpp = backend()
    TAIL.clear()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        return {"error": f"refused: {load_reason()}"}
    watch = Watch()
    first = decode(model, watch)
    second = decode(model, None)
    used: defaultdict[int, set[int]] = defaultdict(set)
    for layer, ids in watch.take():
        used[layer].update(map(int, ids.flat))
    out = {
        "logits": [round(float(logit), 5) for logit in first[N_PROMPT - 1]],
        "finite": bool(np.isfinite(first).all()),
        "spread": float(first.std()),
        "equal": bool((first == second).all()),
        "used": {layer: sorted(experts) for layer, experts in sorted(used.items())},
        "n_params": llama_cpp.llama_model_n_params(model),
        "size": llama_cpp.llama_model_size(model),
    }
    llama_cpp.llama_model_free(model)
    return out


def answer_all(paths: list[str], report: Callable[[str], dict[str, Any]]) -> None:
    """A line of JSON for each model: its report, or what went wrong with it."""
    backend()
    load_backends("cpu")
    for path in paths:
        try:
            answer = report(path)
        except (AssertionError, RuntimeError, HotsetError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"path": path, **answer}), flush=True)


if __name__ == "__main__":
    answer_all(sys.argv[1:], report)
