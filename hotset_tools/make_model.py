"""`hotset make-model`: models with random weights from a seed, written straight to disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
import typer

from daemon.errors import HotsetError
from hotset_tools.model_shapes import SHAPES, Shape, Tensor, tensors
from hotset_tools.random_weights import Bytes, chunks, encode, row_bytes, rows
from hotset_tools.routing import Embeddings, Routing
from hotset_tools.synthetic_vocab import Vocab, add_to, make_vocab

ALIGNMENT = 32
_HEADER_RESERVE = 64 * 1024 * 1024


def write_model(
    path: Path,
    shape: Shape,
    seed: int,
    *,
    reuse_layer: bool = False,
    routing: Routing | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write a GGUF of `shape`; the same arguments give the same bytes. `path` appears when it is whole.

    `reuse_layer` gives every layer the data of the first but a router of its own, which saves time on the largest
    shapes and keeps one layer in memory. With `routing` the embeddings make routing local in time; `shape.block_gain`
    should be small then. `progress` is told the bytes of each piece as it is written.

    Raises:
        ValueError: sizes that cannot be.
        OSError: the disk.
    """
    plan = list(tensors(shape))
    vocab = make_vocab(shape.n_vocab)
    data = _Data(vocab, seed, reuse_layer, routing)
    told = progress or (lambda _: None)
    with _appearing(path) as temporary, _Header(temporary, shape, vocab, plan, routing) as file:
        for tensor in plan:
            for piece in data.pieces(tensor):
                file.write(piece.data)
                told(piece.nbytes)
            _pad(file, tensor.size)


def total_size(shape: Shape) -> int:
    """Bytes of all tensors."""
    return sum(_padded(tensor.size) for tensor in tensors(shape))


class _Header:
    """Metadata and tensor table, written on entry; gives the file that wants the data."""

    def __init__(self, path: Path, shape: Shape, vocab: Vocab, plan: list[Tensor], routing: Routing | None) -> None:
        import gguf  # slow, and only this command needs it

        self._writer: Any = gguf.GGUFWriter(path, shape.architecture)
        self._writer.data_alignment = ALIGNMENT
        _add_sizes(self._writer, shape)
        add_to(self._writer, vocab)
        self._writer.add_pad_token_id(vocab.bos)
        if routing is not None:
            _add_routing(self._writer, routing)
        for tensor in plan:
            row = row_bytes(tensor.kind, tensor.dims[-1])
            kind = gguf.GGMLQuantizationType[tensor.kind]
            dims = (*tensor.dims[:-1], row)
            self._writer.add_tensor_info(tensor.name, dims, np.dtype(np.uint8), tensor.size, raw_dtype=kind)

    def __enter__(self) -> IO[bytes]:
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_ti_data_to_file()
        file: IO[bytes] = self._writer.fout[0]
        _pad(file, file.tell())
        return file

    def __exit__(self, *_: object) -> None:
        self._writer.close()


def _add_sizes(writer: Any, shape: Shape) -> None:
    writer.add_name(f"random {shape.name}")
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(shape.n_vocab)
    if shape.n_expert:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(shape.n_expert_used)
        writer.add_expert_feed_forward_length(shape.n_ff)


def _add_routing(writer: Any, routing: Routing) -> None:
    for key, value in routing.as_metadata().items():
        match value:
            case str():
                writer.add_string(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float64(key, value)


class _Data:
    """The bytes of every tensor; each depends on the seed and the tensor's name, not on what was drawn before."""

    def __init__(self, vocab: Vocab, seed: int, reuse_layer: bool, routing: Routing | None) -> None:
        self._vocab, self._seed, self._routing, self._reuse_layer = vocab, seed, routing, reuse_layer
        self._drawn: dict[str, list[Bytes]] = {}

    def pieces(self, tensor: Tensor) -> Iterable[Bytes]:
        """The tensor's bytes in the order of the file."""
        name = self._shared_name(tensor)
        if name == tensor.name:
            return self._draw(tensor, name)
        if name not in self._drawn:
            self._drawn[name] = list(self._draw(tensor, name))
        return self._drawn[name]

    def _shared_name(self, tensor: Tensor) -> str:
        """The name without its layer where all layers have the same bytes; routers differ, as hot sets do."""
        layer = tensor.name.startswith("blk.") and not tensor.name.endswith("ffn_gate_inp.weight")
        return tensor.name.split(".", 2)[2] if self._reuse_layer and layer else tensor.name

    def _draw(self, tensor: Tensor, name: str) -> Iterator[Bytes]:
        random = np.random.default_rng([self._seed, *name.encode()])
        if tensor.spread is None:
            yield np.ones(tensor.dims, dtype=np.float32).view(np.uint8)
        elif name == "output.weight":
            yield _output_head(tensor, self._vocab, random)
        elif name == "token_embd.weight" and self._routing is not None:
            pieces = Embeddings(self._routing, tensor.dims[1]).rows(tensor.dims[0])
            yield from (encode(tensor.kind, values) for values in pieces)
        else:
            yield from chunks(tensor.kind, tensor.n_elements, tensor.spread, random)


def _output_head(tensor: Tensor, vocab: Vocab, random: np.random.Generator) -> Any:
    """The output head with zero rows for tokens that end an answer: about half of all others are always likelier."""
    assert tensor.spread is not None
    head = rows(tensor.kind, tensor.dims[0], tensor.dims[1], tensor.spread, random)
    head[vocab.ends] = 0
    return head


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pad(file: IO[bytes], size: int) -> None:
    file.write(bytes(_padded(size) - size))


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends well, and is removed when not."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def resized(name: str, **sizes: Any) -> Shape:
    """The shape `name` with other sizes; those that are None stay.

    Raises:
        ValueError: there is no such shape, or the sizes contradict each other.
    """
    if name not in SHAPES:
        raise ValueError(f"there is no shape {name!r}; the shapes are {', '.join(SHAPES)}")
    changes: dict[str, Any] = {key: value for key, value in sizes.items() if value is not None}
    shape = replace(SHAPES[name], **changes)
    if shape.n_expert_used > shape.n_expert:
        raise ValueError(f"{shape.n_expert_used} experts per token are more than the {shape.n_expert} there are")
    return shape


def check_target(path: Path, size: int, force: bool) -> None:
    """Whether `path` may and can be written.

    Raises:
        ValueError: says why not.
    """
    if path.exists() and not force:
        raise ValueError(f"{path} exists; --force replaces it")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no directory")
    free = shutil.disk_usage(path.parent).free
    if free < size + _HEADER_RESERVE:
        raise ValueError(f"the model takes {size / 1e9:.2f} GB and {path.parent} has {free / 1e9:.2f} GB free")


def _progress() -> Any:
    from rich.console import Console  # only this command draws; benchmarks do without it
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    bar = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*bar, console=Console(stderr=True))


def command(
    out: Annotated[Path, typer.Argument(help="File to write.")],
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")],
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same file.")] = 1,
    layers: Annotated[int | None, typer.Option(min=1, max=512, help="Instead of the shape's layers.")] = None,
    experts: Annotated[int | None, typer.Option(min=1, max=1024, help="Instead of the shape's experts.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, max=1024, help="Experts per token.")] = None,
    vocab: Annotated[int | None, typer.Option(min=259, help="Instead of the shape's vocabulary.")] = None,
    reuse_layer: Annotated[bool, typer.Option(help="All layers share one layer's data: faster to write.")] = False,
    force: Annotated[bool, typer.Option(help="Replace an existing file.")] = False,
) -> None:
    """Generate a MoE model with random weights, for benchmarks."""
    try:
        wanted = resized(shape, n_layer=layers, n_expert=experts, n_expert_used=top_k, n_vocab=vocab)
        size = total_size(wanted)
        check_target(out, size, force)
        with _progress() as bar:
            task = bar.add_task(out.name, total=size)
            write_model(out, wanted, seed, reuse_layer=reuse_layer, progress=lambda n: bar.update(task, advance=n))
    except (ValueError, OSError) as error:
        raise HotsetError(str(error)) from None
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB, shape {shape}, seed {seed}")
