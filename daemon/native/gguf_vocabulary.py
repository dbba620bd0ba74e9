"""Rules for a vocabulary in a file: what llama.cpp would abort on, or what would make a model that cannot be used."""

from __future__ import annotations

from collections import Counter

from daemon.native.gguf_cursor import printable
from daemon.native.gguf_metadata import Metadata
from daemon.native.gguf_reader import Value, c_string
from daemon.native.gguf_types import FLOAT32, INT32, STRING

_TOKENS = "tokenizer.ggml.tokens"
_BYTE_LEVEL = ("gpt2", "gemma4")
_PIECES = "llama"  # SentencePiece: falls back to one token per byte


def check_vocabulary(metadata: Metadata) -> int:
    """The number of tokens.

    Raises:
        ModelUnusable: there is none, or it is inconsistent.
    """
    model = metadata.text("tokenizer.ggml.model", required=True)
    if model in ("no_vocab", "none"):
        raise metadata.fail("the model has no vocabulary: it can neither read nor write text")
    tokens = metadata.array(_TOKENS, STRING)
    if tokens is None:
        raise metadata.fail(f"{_TOKENS} is missing")
    n_vocab = tokens.n or 0
    if not n_vocab:
        raise metadata.fail(f"{_TOKENS} has no tokens")
    _check_tokens(metadata, tokens, model)
    _check_companions(metadata, n_vocab)
    if model in _BYTE_LEVEL:
        _check_merges(metadata)
    metadata.text("tokenizer.chat_template")
    return n_vocab


def _check_tokens(metadata: Metadata, tokens: Value, model: str) -> None:
    """Tokens must differ; llama.cpp calls an empty one by its number."""
    texts = [c_string(text) or b"[EMPTY_%d]" % index for index, text in enumerate(tokens.strings())]
    distinct = set(texts)
    if len(distinct) != len(texts):
        twice = next(text for text, times in Counter(texts).items() if times > 1)
        raise metadata.fail(f"{_TOKENS} has the token {printable(twice)!r} twice")
    if model == _PIECES:
        for byte in range(256):
            if b"<0x%02X>" % byte not in distinct and bytes([byte]) not in distinct:
                raise metadata.fail(f"{_TOKENS} has no token for the byte 0x{byte:02X}")


def _check_companions(metadata: Metadata, n_vocab: int) -> None:
    types = metadata.array("tokenizer.ggml.token_type", INT32)
    value = metadata.value("tokenizer.ggml.scores")
    scores = metadata.array("tokenizer.ggml.scores", INT32 if value and value.kind == INT32 else FLOAT32)
    for name, companion in (("token_type", types), ("scores", scores)):
        if companion is not None and (companion.n or 0) < n_vocab:
            raise metadata.fail(f"tokenizer.ggml.{name} has {companion.n} values for {n_vocab} tokens")
    for name in ("bos_token_id", "eos_token_id", "eot_token_id"):
        metadata.number(f"tokenizer.ggml.{name}", most=n_vocab - 1)
    for name in ("add_bos_token", "add_eos_token"):
        metadata.flag(f"tokenizer.ggml.{name}")


def _check_merges(metadata: Metadata) -> None:
    merges = metadata.array("tokenizer.ggml.merges", STRING)
    if merges is None and metadata.text("tokenizer.ggml.pre") != "kimi-k2":  # the one family that has none
        raise metadata.fail("tokenizer.ggml.merges is missing")
    for index, merge in enumerate(merges.strings() if merges else ()):
        if b" " not in merge[1:]:
            raise metadata.fail(f"tokenizer.ggml.merges: merge {index} is no pair: {printable(merge)!r}")
