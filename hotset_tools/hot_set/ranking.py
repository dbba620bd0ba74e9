"""From counts to a hot set; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from daemon.hotset.files import ModelId
from daemon.hotset.hot_set import HotSet, LayerExperts, LayerKey, Size, Source

Counts = Mapping[LayerKey, Sequence[int]]
"""How often each expert of a layer was selected."""


def make(counts: Counts, percentages: Sequence[float], model: ModelId, source: Source) -> HotSet:
    """A size "p25" with the most used 25 % of each layer's experts, one at least, for every percentage."""
    ranked = {key: rank(layer) for key, layer in counts.items()}
    sizes = [_size(counts, ranked, percent) for percent in percentages]
    return HotSet(format=1, model=model, learned_from=source, sizes=sizes)


def rank(counts: Sequence[int]) -> list[int]:
    """Expert ids, the most selected first; among equals the lower id."""
    return sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert))


def slots(percent: float, n_expert: Sequence[int]) -> list[int]:
    """How many experts of each layer a size has, one at least."""
    return [max(1, round(percent / 100 * count)) for count in n_expert]


def _size(counts: Counts, ranked: Mapping[LayerKey, list[int]], percent: float) -> Size:
    most = slots(percent, [len(experts) for experts in ranked.values()])
    chosen = {key: experts[:n] for (key, experts), n in zip(ranked.items(), most, strict=True)}
    served = sum(counts[key][expert] for key, experts in chosen.items() for expert in experts)
    total = sum(map(sum, counts.values()))
    return Size(
        name=f"p{percent:g}",
        coverage=round(served / total, 4) if total else None,
        layers=[LayerExperts(layer=layer, set=number, experts=experts) for (layer, number), experts in chosen.items()],
    )
