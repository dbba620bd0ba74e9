"""A trace: which experts the router chose for each token (docs/traces.md is the format's description)."""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from daemon.hotset import files
from daemon.hotset.files import FaultyFile, ModelId, Part, reasons

Ids = npt.NDArray[np.uint16]

MAX_BYTES = 1 << 30
"""Larger files are refused unread."""
MAX_SELECTIONS = 1 << 29
"""A million tokens of a model with 64 layers that chooses 8 experts."""

MAX_HEADER = 1 << 20
"""Bytes of the line that describes it."""

_MAX_XZ_MEMORY = 1 << 27
_FAULTS_PER_KIND = 4


IdType = np.dtype[np.uint8] | np.dtype[np.uint16]


class TraceUnusable(FaultyFile):
    """The file is no trace, or a damaged one."""

    code = "trace_unusable"


class TraceLayer(Part):
    """A set of routed experts: the model's layer, which of its sets, and how many experts it has."""

    layer: int = Field(ge=0)
    set: int = Field(default=0, ge=0)
    experts: int = Field(ge=1, le=65536)


class Segment(Part):
    """Tokens of one text, one after the other."""

    name: str = Field(min_length=1, max_length=200)
    tokens: int = Field(ge=1)


class Header(Part):
    """The first line of the file."""

    format: Literal["hotset-trace-1"] = "hotset-trace-1"
    model: ModelId
    method: str = ""
    top_k: int = Field(ge=1, le=65536)
    layers: list[TraceLayer] = Field(min_length=1, max_length=4096)
    segments: list[Segment] = Field(min_length=1)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens, layers, selections of each."""
        return sum(segment.tokens for segment in self.segments), len(self.layers), self.top_k

    @property
    def n_selections(self) -> int:
        """All of them."""
        tokens, layers, top_k = self.shape
        return tokens * layers * top_k

    @property
    def dtype(self) -> IdType:
        """How an id is stored."""
        return id_type(layer.experts for layer in self.layers)


@dataclass(frozen=True)
class Trace:
    """`ids` [tokens, layers, top_k], ascending within a token and layer."""

    header: Header
    ids: Ids

    @property
    def n_expert(self) -> list[int]:
        """Experts of each layer."""
        return [layer.experts for layer in self.header.layers]

    def segments(self) -> Iterator[tuple[str, slice]]:
        """Each segment's name and its tokens."""
        ends = accumulate((segment.tokens for segment in self.header.segments), initial=0)
        for segment, (start, end) in zip(self.header.segments, pairwise(ends), strict=True):
            yield segment.name, slice(start, end)


def id_type(n_expert: Iterable[int]) -> IdType:
    """How ids of layers with so many experts are stored."""
    return np.dtype(np.uint8) if max(n_expert) <= 256 else np.dtype("<u2")


def write(path: Path, trace: Trace) -> None:
    """Write the file, all of it or nothing; one that is there is replaced.

    Raises:
        TraceUnusable: the trace is faulty, or the file cannot be written.
    """
    faults = list(_faults(trace.header, trace.ids))
    if faults:
        raise TraceUnusable(path.name, faults)
    line = trace.header.model_dump_json().encode()
    if len(line) > MAX_HEADER:
        raise TraceUnusable(path.name, [f"{len(trace.header.segments):,} segments are more than it can describe"])
    ids = np.ascontiguousarray(trace.ids, trace.header.dtype)
    try:
        files.replace(path, line + b"\n" + lzma.compress(ids.tobytes()))
    except OSError as error:
        raise TraceUnusable(path.name, [f"it cannot be written: {error.strerror}"]) from None


def begins_one(path: Path) -> bool:
    """Whether a file begins as a trace does, whatever follows."""
    try:
        with path.open("rb") as file:
            Header.model_validate_json(file.readline(MAX_HEADER + 1))
    except (OSError, ValidationError):
        return False
    return True


def read(path: Path) -> Trace:
    """The file, wholly checked.

    Raises:
        TraceUnusable: it cannot be read or is no trace; every fault is listed.
    """
    line, end, packed = files.read(path, MAX_BYTES, TraceUnusable).partition(b"\n")
    if not end or len(line) > MAX_HEADER:
        raise TraceUnusable(path.name, ["it does not begin with a line that describes it"])
    try:
        header = Header.model_validate_json(line)
    except ValidationError as error:
        raise TraceUnusable(path.name, list(reasons(error))) from None
    if header.n_selections > MAX_SELECTIONS:
        raise TraceUnusable(path.name, [f"it has {header.n_selections:,} selections; {MAX_SELECTIONS:,} are allowed"])
    trace = Trace(header, _unpacked(path.name, packed, header))
    faults = list(_faults(header, trace.ids))
    if faults:
        raise TraceUnusable(path.name, faults)
    return trace


def _unpacked(file: str, packed: bytes, header: Header) -> Ids:
    """At most one byte more than the header promises is unpacked, so a small file cannot fill memory."""
    size = header.n_selections * header.dtype.itemsize
    try:
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, _MAX_XZ_MEMORY)
        content = unpacker.decompress(packed, size + 1)
        if len(content) == size and not unpacker.eof:
            content += unpacker.decompress(b"", 1)
    except (lzma.LZMAError, EOFError) as error:
        raise TraceUnusable(file, [f"its selections are damaged: {error}"]) from None
    if len(content) > size:
        raise TraceUnusable(file, [f"it holds more than the {header.n_selections:,} selections it speaks of"])
    if len(content) < size or not unpacker.eof:
        raise TraceUnusable(file, [f"it ends before all of its {header.n_selections:,} selections"])
    if unpacker.unused_data:
        raise TraceUnusable(file, [f"{len(unpacker.unused_data):,} bytes follow its end"])
    return np.frombuffer(content, header.dtype).astype(np.uint16).reshape(header.shape)


def _faults(header: Header, ids: Ids) -> Iterator[str]:
    if ids.shape != header.shape:
        yield f"its ids have the shape {list(ids.shape)}, its header says {list(header.shape)}"
        return
    keys = [(layer.layer, layer.set) for layer in header.layers]
    if keys != sorted(set(keys)):
        yield "its layers are not in ascending order, each once"
    for index, layer in enumerate(header.layers):
        where = f"layer {layer.layer}" + (f", set {layer.set}" if layer.set else "")
        if header.top_k > layer.experts:
            yield f"{where} has {layer.experts} experts, of which no {header.top_k} can be chosen"
        yield from _at(ids[:, index].max(axis=1) >= layer.experts, f"{where} has {layer.experts} experts, not those of")
        yield from _at((np.diff(ids[:, index].astype(int)) <= 0).any(axis=1), f"{where}: ids do not ascend at")


def _at(wrong: npt.NDArray[np.bool_] | np.bool_, what: str) -> Iterator[str]:
    tokens = np.flatnonzero(wrong)
    if len(tokens):
        shown = ", ".join(map(str, tokens[:_FAULTS_PER_KIND]))
        yield f"{what} token{'s' * (len(tokens) > 1)} {shown}{', ...' * (len(tokens) > _FAULTS_PER_KIND)}"
