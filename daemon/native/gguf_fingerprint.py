"""A model's fingerprint: the same for the same model wherever it lies and however it is split; and its vocabulary's."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

from daemon.native.gguf_cursor import open_model
from daemon.native.gguf_reader import Head, TensorEntry

_FORMAT = b"hotset model fingerprint 1"
SAMPLE = 4096
"""Bytes read at the start, in the middle and at the end of every tensor."""


def fingerprint(heads: Iterable[Head]) -> str:
    """SHA-256, in hex, over the metadata, the tensor table and three samples of every tensor.

    Keys and tensors are taken in the order of their names and without their place in the file, and the keys that
    describe a split are left out.

    Raises:
        ModelUnusable: a file cannot be read.
    """
    heads = tuple(heads)
    digest = hashlib.sha256(_FORMAT)
    for key, value in sorted(heads[0].metadata.items()):
        if not key.startswith("split."):
            for part in (key.encode(), value.type_name.encode(), value.raw):
                digest.update(len(part).to_bytes(8, "little") + part)
    samples = [(tensor.name, _line(tensor) + sample) for head in heads for tensor, sample in _samples(head)]
    for _, sample in sorted(samples):
        digest.update(sample)
    return digest.hexdigest()


def vocabulary(head: Head) -> str:
    """SHA-256, in hex, over the tokens and how texts become them: where it is the same, token ids mean the same.

    Chat templates are left out. `head` is that of the first part.
    """
    digest = hashlib.sha256(_FORMAT)
    for key, value in sorted(head.metadata.items()):
        if key.startswith("tokenizer.") and not key.startswith("tokenizer.chat_template"):
            for part in (key.encode(), value.type_name.encode(), value.raw):
                digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _line(tensor: TensorEntry) -> bytes:
    """The tensor's line of the table, without its offset."""
    return repr((tensor.name, tensor.dims, tensor.quant.name, tensor.size)).encode() + b"\n"


def _samples(head: Head) -> Iterable[tuple[TensorEntry, bytes]]:
    handle = open_model(head.path)
    try:
        for tensor in head.tensors:
            raw = b"".join(_read(handle, head, tensor, start) for start in _starts(tensor.size))
            yield tensor, hashlib.sha256(raw).digest()
    finally:
        os.close(handle)


def _starts(size: int) -> list[int]:
    """Where samples begin; one sample is all of a small tensor."""
    if size <= SAMPLE:
        return [0]
    return [0, (size - SAMPLE) // 2, size - SAMPLE]


def _read(handle: int, head: Head, tensor: TensorEntry, start: int) -> bytes:
    wanted = min(SAMPLE, tensor.size)
    try:
        piece = os.pread(handle, wanted, tensor.offset + start)
    except OSError as error:
        raise head.fail(f"cannot be read: {error.strerror}") from None
    if len(piece) != wanted:
        raise head.fail("the file became shorter while it was read")
    return piece
