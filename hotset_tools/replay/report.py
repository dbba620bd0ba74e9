"""What came of a replay: JSON and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from daemon.hotset.policy import Settings
from daemon.hotset.trace import Header


@dataclass(frozen=True)
class Row:
    """One policy with slots for a share of each layer's experts; all but uploads from 0 to 1.

    `of_clairvoyant` is None where the best possible was not computed.
    """

    share: float
    policy: str
    hit_rate: float
    of_clairvoyant: float | None
    uploads_per_token: float


@dataclass(frozen=True)
class Switch:
    """Tokens until our policy has 90 % of its new steady hit rate: the median, and each change of segment."""

    share: float
    tokens_to_90: float
    each: list[int]


@dataclass(frozen=True)
class Report:
    """All of it. `switches` is None for several streams, whose segments have no common end."""

    trace: Path
    header: Header
    uploads: float
    settings: Settings
    rows: list[Row]
    switches: Sequence[Switch] | None
    widths: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Rates rounded to a hundredth of a percent; `switch.tokens_to_90` is that of the worst share."""
        tokens, layers, top_k = self.header.shape
        result: dict[str, Any] = {
            "trace": {"file": self.trace.name, "model": self.header.model.name, "tokens": tokens, "layers": layers,
                      "top_k": top_k, "segments": [segment.name for segment in self.header.segments]},
            "settings": {"uploads_per_token": self.uploads, **asdict(self.settings), "streams": list(self.widths)},
            "rows": [_rounded(row) for row in self.rows],
        }  # fmt: skip
        if self.switches:
            worst = max(switch.tokens_to_90 for switch in self.switches)
            result["switch"] = {"tokens_to_90": worst, "rows": [asdict(switch) for switch in self.switches]}
        return result

    def text(self) -> str:
        """A table of policies by shares."""
        tokens, layers, top_k = self.header.shape
        shares = list(dict.fromkeys(row.share for row in self.rows))
        cells = {(row.policy, row.share): _cell(row) for row in self.rows}
        lines = [
            f"{self.trace.name}: {tokens:,} tokens, {layers} layers, {top_k} experts each",
            "hit rate, share of the clairvoyant's, uploads per token, with slots for",
            f"{'':26}" + "".join(f"{f'{share:.3%} of experts':>24}" for share in shares),
        ]
        lines += [
            f"{policy:26}" + "".join(f"{cells[policy, share]:>24}" for share in shares)
            for policy in dict.fromkeys(row.policy for row in self.rows)
        ]
        if self.switches:
            medians = ", ".join(f"{switch.tokens_to_90:g}" for switch in self.switches)
            lines.append(f"tokens to 90% of the new hit rate after a change of segment, medians: {medians}")
        return "\n".join(lines)


def _rounded(row: Row) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(row).items()}


def _cell(row: Row) -> str:
    part = "" if row.of_clairvoyant is None else f"{row.of_clairvoyant:.3f}"
    return f"{row.hit_rate:.3f} {part:>6} {row.uploads_per_token:>7.2f}"
