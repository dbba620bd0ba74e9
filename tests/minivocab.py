"""GGUF files that hold a small vocabulary and no weights, of the kinds that the embedded model is not."""

from __future__ import annotations

from pathlib import Path

import gguf

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁h", "e", "l", "o", "ll", "▁hell", "i", "▁system", "s", "y", "t", "m", "<", ">", "|", "/", "end", "\n"]
CONTROL = ["<|turn|>", "<|end|>", "<|think|>", "<mask>", "<|endoftext|>"]
USER_DEFINED = ["<tool>", "\n\n"]


def write_spm(path: Path, *, name: str = "mini", add_bos: bool | None = None, without: tuple[str, ...] = ()) -> Path:
    """A sentencepiece vocabulary: <unk>, BOS <s>, EOS </s>, bytes, words, control and user-defined tokens.

    `name` decides special treatment in llama.cpp: one with "phi-3" makes control tokens eat the white space that
    follows. `without` leaves out keys.
    """
    kinds = gguf.TokenType
    rows = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)]
    rows += [(token, kinds.BYTE) for token in BYTES]
    rows += [(token, kinds.NORMAL) for token in WORDS]
    rows += [(token, kinds.CONTROL) for token in CONTROL]
    rows += [(token, kinds.USER_DEFINED) for token in USER_DEFINED]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    _add_sizes(writer)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token for token, _ in rows])
    writer.add_token_scores([-float(number) for number in range(len(rows))])
    writer.add_token_types([int(kind) for _, kind in rows])
    if "bos" not in without:
        writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_without_vocab(path: Path) -> Path:
    """A model that says that it has no tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    _add_sizes(writer)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
