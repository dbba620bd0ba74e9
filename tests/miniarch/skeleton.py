"""Metadata-only GGUF files: everything of a mini model but its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotset_tools.synthetic_vocab import add_to, make_vocab
from tests.miniarch.keys import N_VOCAB, Value
from tests.miniarch.table import Mini


def header(path: Path, mini: Mini) -> Any:
    """A GGUF writer of `path` with the metadata; the caller adds tensors, writes and closes."""
    import gguf  # slow

    writer = gguf.GGUFWriter(path, mini.architecture)
    writer.add_name(f"mini {mini.architecture}")
    for key, value in mini.metadata.items():
        _add(writer, f"{mini.architecture}.{key}", value)
    add_to(writer, make_vocab(N_VOCAB))
    return writer


def write_skeleton(path: Path, mini: Mini) -> None:
    """The metadata alone."""
    writer = header(path, mini)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _add(writer: Any, key: str, value: Value) -> None:
    import gguf

    kinds = gguf.GGUFValueType
    scalars = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    if isinstance(value, list):
        writer.add_key_value(key, value, kinds.ARRAY, scalars[type(value[0])])
    else:
        writer.add_key_value(key, value, scalars[type(value)])
