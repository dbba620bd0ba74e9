"""What came of a plan: JSON and a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from daemon.hotset.allotment import LEAST_GAIN
from daemon.hotset.budget import MIB
from daemon.hotset.hot_set import HotSet, Size
from hotset_tools.planning.held_out import Measured, Rates, Topic


@dataclass(frozen=True)
class Planned:
    """The file that was written, from so many traces, and how well its sizes should serve.

    `n_parts` of each segment were held out, one at a time. `bytes_of` is what the slots of each size take, None where
    no model was named.
    """

    path: Path
    n_traces: int
    hot_set: HotSet
    n_parts: int
    topics: Sequence[Topic]
    measured: Measured
    bytes_of: Sequence[int] | None

    def as_json(self) -> dict[str, Any]:
        """All of it but the experts; rates rounded to a hundredth of a percent."""
        content = self.hot_set.model_dump(exclude={"sizes"})
        each = zip(self.topics, self.measured.by_topic, strict=True)
        return {
            "file": str(self.path),
            **content,
            "hold_out": self.n_parts,
            "sizes": [self._size(index, size) for index, size in enumerate(self.hot_set.sizes)],
            "topics": [
                {
                    "name": topic.name,
                    "tokens": topic.tokens,
                    "sizes": [
                        {"name": size.name, **_at(rates, index)} for index, size in enumerate(self.hot_set.sizes)
                    ],
                }
                for topic, rates in each
            ],
        }

    def _size(self, index: int, size: Size) -> dict[str, Any]:
        shared = self.measured.shared[index]
        return {
            "name": size.name,
            "experts": size.n_experts,
            "experts_per_layer": [len(layer.experts) for layer in size.layers],
            "bytes": self.bytes_of[index] if self.bytes_of else None,
            "coverage": size.coverage,
            **_at(self.measured.together, index),
            "shared_out": {
                "experts_per_layer": shared.slots,
                "coverage": _rounded(shared.coverage),
                "held_out": _rounded(shared.held_out),
                "gain": _rounded(shared.gain),
            },
        }

    def text(self) -> str:
        """A table of sizes for people, and what its columns mean."""
        source, width = self.hot_set.learned_from, max(6, *(len(size.name) for size in self.hot_set.sizes))
        traces = "1 trace" if self.n_traces == 1 else f"{self.n_traces} traces"
        topics = "1 topic" if len(self.topics) == 1 else f"{len(self.topics)} topics"
        columns = f"{'experts':>9}{'a layer':>9}{'MiB':>10}{'coverage':>10}{'held out':>10}{'new topic':>11}"
        lines = [
            f"{self.path}: learned from {source.tokens:,} tokens of {topics} in {traces}",
            f"{'':{width}}{columns}",
        ]
        lines += [self._row(index, size, width) for index, size in enumerate(self.hot_set.sizes)]
        return "\n".join([*lines, *self._notes()])

    def _row(self, index: int, size: Size, width: int) -> str:
        numbers = {len(layer.experts) for layer in size.layers}
        a_layer = f"{min(numbers)}-{max(numbers)}" if len(numbers) > 1 else str(*numbers)
        mib = f"{self.bytes_of[index] / MIB:,.1f}" if self.bytes_of else "-"
        rates = _at(self.measured.together, index)
        shares = f"{_percent(size.coverage):>10}{_percent(rates['held_out']):>10}{_percent(rates['new_topic']):>11}"
        return f"{size.name:{width}}{size.n_experts:>9,}{a_layer:>9}{mib:>10}{shares}"

    def _notes(self) -> Iterator[str]:
        yield "coverage: selections served of those that it was learned from"
        if self.measured.together.held_out:
            yield f"held out: of each of {self.n_parts} parts of every segment, by a list learned from the others"
        else:
            yield "held out: nothing can be, no segment has two tokens"
        if self.measured.together.new_topic:
            yield "new topic: of each topic, by a list learned from the others; expect no more where yours are others"
        else:
            yield "new topic: cannot be told from one topic"
        yield self._sharing()

    def _sharing(self) -> str:
        shared = zip(self.hot_set.sizes, self.measured.shared, strict=True)
        clear = [(size.name, one.gain) for size, one in shared if one.gain >= LEAST_GAIN]
        if not clear:
            return f"Layers have equal shares: slots shared out by use would serve less than {LEAST_GAIN:.0%} more."
        gains = ", ".join(f"{_percent(gain) if isfinite(gain) else 'far'} more with {name}" for name, gain in clear)
        return f"Layers have equal shares: as many slots, shared out by use, would serve {gains}."


def _at(rates: Rates, index: int) -> dict[str, float | None]:
    return {
        "held_out": _rounded(rates.held_out[index]) if rates.held_out else None,
        "new_topic": _rounded(rates.new_topic[index]) if rates.new_topic else None,
    }


def _rounded(rate: float | None) -> float | None:
    return None if rate is None or not isfinite(rate) else round(rate, 4)


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"
