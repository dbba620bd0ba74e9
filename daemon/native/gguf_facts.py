"""What a model consists of, as numbers: layers, experts, bytes, KV cache. Pure: from heads of files to facts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from daemon.native.gguf_cursor import printable
from daemon.native.gguf_metadata import Metadata
from daemon.native.gguf_reader import TensorEntry
from daemon.native.gguf_rules import Sizes

KV_BYTES = 2  # of an f16, the cache's default type

_BLOCK = re.compile(r"blk\.(\d{1,3})\.(.+)")
_EXPERTS = re.compile(r"ffn_(gate|up|down|gate_up)_(exps|chexps)\.(weight|bias|scale|input_scale)")
_RECURRENT = ("ssm_", "time_mix_", "shortconv.")
_ATTENTION = ("attn_k.", "attn_kv_a_mqa.", "attn_kv_b.", "attn_k_b.")


@dataclass(frozen=True)
class ExpertTensor:
    """One tensor that holds a slice for each of `n_expert` experts; sizes in bytes."""

    name: str
    quant: str
    n_expert: int
    size: int

    @property
    def bytes_per_expert(self) -> int:
        """The size of one slice."""
        return self.size // self.n_expert


@dataclass(frozen=True)
class LayerFacts:
    """One layer; sizes in bytes. `kind`: attention, window (sliding), recurrent, mixed, prediction, or none."""

    index: int
    kind: str
    experts: tuple[ExpertTensor, ...]
    size: int
    n_head: int
    n_head_kv: int
    kv_bytes_per_token: int

    @property
    def n_expert(self) -> int:
        """Routed experts; 0 in a dense layer."""
        return max((tensor.n_expert for tensor in self.experts), default=0)

    @property
    def expert_bytes(self) -> int:
        """All routed experts together."""
        return sum(tensor.size for tensor in self.experts)

    @property
    def bytes_per_expert(self) -> int:
        """What has to be moved to move one expert."""
        return sum(tensor.bytes_per_expert for tensor in self.experts)

    @property
    def expert_quants(self) -> tuple[str, ...]:
        """Types of the expert matrices, in the order of the file."""
        return tuple(dict.fromkeys(tensor.quant for tensor in self.experts if tensor.name.endswith(".weight")))


@dataclass(frozen=True)
class ModelFacts:
    """A model; sizes in bytes, `quants` as (type, bytes) with the largest first, `notes` in words."""

    architecture: str
    name: str
    n_params: int
    size: int
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_expert: int
    n_expert_used: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    key_length: int
    value_length: int
    sliding_window: int
    layers: tuple[LayerFacts, ...]
    quants: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]

    @property
    def is_moe(self) -> bool:
        """Whether there are experts to place."""
        return any(layer.experts for layer in self.layers)

    @property
    def expert_bytes(self) -> int:
        """All routed experts of all layers."""
        return sum(layer.expert_bytes for layer in self.layers)

    def bytes_of_experts(self, layers: Iterable[int]) -> int:
        """The routed experts of these layers."""
        return sum(self.layers[index].expert_bytes for index in layers)

    @property
    def other_bytes(self) -> int:
        """Everything that every token needs."""
        return self.size - self.expert_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache of one token with f16 cells, every layer keeping all of its tokens."""
        return sum(layer.kv_bytes_per_token for layer in self.layers)

    @property
    def active_bytes(self) -> int:
        """What one token reads at most: the rest, and the experts that it is routed to."""
        routed = sum(min(self.n_expert_used, layer.n_expert) * layer.bytes_per_expert for layer in self.layers)
        return self.other_bytes + routed

    @property
    def residency(self) -> str:
        """Whether experts can be placed, in words."""
        return "applicable" if self.is_moe else "not applicable: the model is dense"


def collect(metadata: Metadata, tensors: Iterable[TensorEntry], sizes: Sizes, n_vocab: int) -> ModelFacts:
    """The facts of a model whose sizes have been checked.

    Raises:
        ModelUnusable: a key that describes the cache is of a wrong type or size.
    """
    tensors = tuple(tensors)
    window = metadata.number(".attention.sliding_window")
    cells = _Cells(metadata, sizes)
    layers = tuple(_layer(index, group, cells, sizes) for index, group in enumerate(_by_layer(tensors, sizes.n_layer)))
    quants: defaultdict[str, int] = defaultdict(int)
    for tensor in tensors:
        quants[tensor.quant.name] += tensor.size
    return ModelFacts(
        architecture=metadata.architecture,
        name=printable(metadata.text("general.name"), 200),
        n_params=sum(tensor.n_elements for tensor in tensors),
        size=sum(tensor.size for tensor in tensors),
        n_vocab=n_vocab,
        n_ctx_train=sizes.n_ctx_train,
        n_embd=sizes.n_embd,
        n_layer=sizes.n_layer,
        n_expert=sizes.n_expert,
        n_expert_used=sizes.n_expert_used,
        n_head=sizes.n_head,
        n_head_kv=sizes.n_head_kv,
        key_length=sizes.key_length,
        value_length=sizes.value_length,
        sliding_window=window,
        layers=layers,
        quants=tuple(sorted(quants.items(), key=lambda item: -item[1])),
        notes=tuple(_notes(layers, window, cells)),
    )


class _Cells:
    """How large one token's KV cells are in a layer, for the cache layouts of llama.cpp."""

    def __init__(self, metadata: Metadata, sizes: Sizes) -> None:
        self._sizes = sizes
        # With latent attention the cache holds the compressed keys only; values are a view of them.
        ranks = (metadata.number(f".attention.{key}") for key in ("kv_lora_rank", "key_length_mla"))
        self.latent = all(ranks)
        self._window_keys = metadata.number(".attention.key_length_swa", sizes.key_length)
        self._window_values = metadata.number(".attention.value_length_swa", sizes.value_length)
        self._in_window = self._pattern(metadata)
        self.shared = metadata.number(".attention.shared_kv_layers", most=sizes.n_layer)

    @property
    def knows_windows(self) -> bool:
        """Whether the file says which layers look back over the sliding window."""
        return self._in_window is not None

    def windowed(self, layer: int) -> bool:
        """Whether the layer looks back over the sliding window only, as far as the file says."""
        return self._in_window is not None and bool(self._in_window[layer])

    def bytes(self, layer: int) -> int:
        """Cache of one token."""
        if layer >= self._sizes.n_layer - self.shared:
            return 0  # reads the cache of a layer before it
        windowed = self.windowed(layer)
        keys = self._window_keys if windowed else self._sizes.key_length
        values = self._window_values if windowed else self._sizes.value_length
        return KV_BYTES * self._sizes.n_head_kv[layer] * (keys if self.latent else keys + values)

    def _pattern(self, metadata: Metadata) -> tuple[int, ...] | None:
        """One flag per layer; None where the file has no such array. Prediction layers may have no flag (K-EXAONE)."""
        key = ".attention.sliding_window_pattern"
        value = metadata.value(key)
        if value is None or value.n is None:
            return None
        return metadata.per_layer(key, self._sizes.n_layer, 0, exact=False)


def _by_layer(tensors: Iterable[TensorEntry], n_layer: int) -> list[list[TensorEntry]]:
    groups: list[list[TensorEntry]] = [[] for _ in range(n_layer)]
    for tensor in tensors:
        match = _BLOCK.fullmatch(tensor.name)
        if match and int(match[1]) < n_layer:
            groups[int(match[1])].append(tensor)
    return groups


def _layer(index: int, tensors: list[TensorEntry], cells: _Cells, sizes: Sizes) -> LayerFacts:
    names = [tensor.name.split(".", 2)[2] for tensor in tensors]
    kind = "prediction" if index >= sizes.n_layer - sizes.n_prediction else _kind(names)
    if kind == "attention" and cells.windowed(index):
        kind = "window"
    return LayerFacts(
        index=index,
        kind=kind,
        experts=tuple(_expert_tensor(t) for t, name in zip(tensors, names, strict=True) if _holds_experts(t, name)),
        size=sum(tensor.size for tensor in tensors),
        n_head=sizes.n_head[index],
        n_head_kv=sizes.n_head_kv[index],
        kv_bytes_per_token=cells.bytes(index) if kind in ("attention", "window", "mixed") else 0,
    )


def _kind(names: list[str]) -> str:
    """What the layer does with the past, from its tensors: their names are the same in all architectures."""
    recurrent = any(name.startswith(_RECURRENT) for name in names)
    attention = any(name.startswith(_ATTENTION) for name in names)
    if recurrent and attention:
        return "mixed"
    if recurrent:
        return "recurrent"
    return "attention" if attention or any(name.startswith("attn_qkv.") for name in names) else "none"


def _holds_experts(tensor: TensorEntry, name: str) -> bool:
    n_dims = {"weight": 3, "bias": 2}.get(name.rpartition(".")[2], 1)  # a scale is one number an expert
    return _EXPERTS.fullmatch(name) is not None and len(tensor.dims) == n_dims


def _expert_tensor(tensor: TensorEntry) -> ExpertTensor:
    return ExpertTensor(tensor.name, tensor.quant.name, tensor.dims[-1], tensor.size)


def _notes(layers: tuple[LayerFacts, ...], window: int, cells: _Cells) -> Iterable[str]:
    kinds = [layer.kind for layer in layers]
    if window:
        count = f"{kinds.count('window')} layers" if cells.knows_windows else "some or all layers"
        yield f"{count} look back {window} tokens only: their KV cache does not grow beyond that"
    if cells.latent:
        yield "latent attention: the KV cache holds compressed keys"
    if cells.shared:
        yield f"the last {cells.shared} layers use the KV cache of layers before them"
    recurrent = kinds.count("recurrent") + kinds.count("mixed")
    if recurrent:
        yield f"{recurrent} recurrent layers keep a state of fixed size for each sequence"
    if "prediction" in kinds:
        yield f"{kinds.count('prediction')} layers predict further tokens and are not part of normal decoding"
