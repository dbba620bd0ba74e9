"""A child process that loads a model with the real library and generates; prints JSON. Dies where the library aborts.

Arguments: model file, text. Exit code 0: generated, 3: the library refused the file, 4: no context.
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
from typing import Any

from daemon.native.devices import load_backends
from daemon.native.library import backend

N_TOKENS = 12


def main(path: str, text: str) -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    llama_cpp = backend()
    load_backends("cpu")
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        return 3
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 256, 1, 1
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        return 4
    vocab = llama_cpp.llama_model_get_vocab(model)
    prompt = tokenize(vocab, text)
    tokens = greedy(context, vocab, prompt)
    print(
        json.dumps(
            {
                "round_trip": b"".join(piece(vocab, token) for token in prompt).decode(),
                "n_prompt": len(prompt),
                "tokens": tokens,
                "ended": any(llama_cpp.llama_vocab_is_eog(vocab, token) for token in tokens),
                "pieces": [piece(vocab, token).hex() for token in tokens],
                "n_params": llama_cpp.llama_model_n_params(model),
                "size": llama_cpp.llama_model_size(model),
                "n_vocab": llama_cpp.llama_vocab_n_tokens(vocab),
                "n_ctx_train": llama_cpp.llama_model_n_ctx_train(model),
                "kv_bytes_per_token": kv_bytes(context),
                "template": llama_cpp.llama_model_chat_template(model, None) is not None,
            }
        )
    )
    return 0


def tokenize(vocab: Any, text: str) -> list[int]:
    llama_cpp = backend()
    raw = text.encode()
    out = (ctypes.c_int32 * (len(raw) + 8))()
    count = llama_cpp.llama_tokenize(vocab, raw, len(raw), out, len(out), False, True)
    return list(out[:count])


def piece(vocab: Any, token: int) -> bytes:
    llama_cpp = backend()
    buffer = ctypes.create_string_buffer(256)
    size = llama_cpp.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, True)
    return buffer.raw[:size]


def greedy(context: Any, vocab: Any, prompt: list[int]) -> list[int]:
    """The likeliest token, `N_TOKENS` times; fails where a logit is no number."""
    llama_cpp = backend()
    n_vocab, tokens, out = llama_cpp.llama_vocab_n_tokens(vocab), prompt, []
    for _ in range(N_TOKENS):
        ids = (ctypes.c_int32 * len(tokens))(*tokens)  # the batch only points to it
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, len(ids))):
            raise RuntimeError("decode failed")
        logits = llama_cpp.llama_get_logits_ith(context, -1)[:n_vocab]
        if not all(abs(logit) < 1e6 for logit in logits):
            raise RuntimeError("a logit is no number")
        tokens = [max(range(n_vocab), key=logits.__getitem__)]
        out.append(tokens[0])
    return out


def kv_bytes(context: Any) -> float:
    """Growth of the saved state with the tokens in it: the cache's cells and four or so bytes of bookkeeping."""
    llama_cpp = backend()
    cells = llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(context), 0) + 1
    return float(llama_cpp.llama_state_seq_get_size(context, 0) / cells)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
