"""`hotset bench check-model`: how local in time a model's routing is, by the ids of its own routers."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from daemon.native import locate
from daemon.native.gguf_check import check
from hotset_tools.bench.child import Child
from hotset_tools.bench.probing import Prober
from hotset_tools.bench.routing_facts import SHARES, RoutingFacts, describe
from hotset_tools.bench.shelf import Place, Shelf, Sizes
from hotset_tools.bench.walks import Walks
from hotset_tools.bench.worker import LEARN_PROMPT

PUBLISHED = {
    "repeat next": 0.45,
    "repeat within 8": 0.80,
    "recent 40%": 0.90,
    "static 25%": 0.48,
    "static 40%": 0.70,
    "static 50%": 0.75,
    "static 75%": 0.91,
}
"""What measurements of trained models say; models of `local` routing are to show it."""


@dataclass(frozen=True)
class Checked:
    """The facts of a model's stream."""

    model: str
    routing: str
    n_layers: int
    n_tokens: int
    facts: RoutingFacts

    def as_json(self) -> dict[str, Any]:
        """As scripts read it: measured, published and the difference where something is published."""
        measured = _flat(self.facts)
        return {
            "model": self.model, "routing": self.routing, "layers": self.n_layers, "tokens": self.n_tokens,
            "measured": measured, "published": PUBLISHED,
            "difference": {name: measured[name] - value for name, value in PUBLISHED.items()},
        }  # fmt: skip


def run(model: Path, *, device: str, n_tokens: int, n_learn: int, seed: int, load_mode: str = "none") -> Checked:
    """Decode a walk of `n_tokens`, and compare with a static list learned from `n_learn` other ones.

    Raises:
        HotsetError: the model or the device cannot be used.
    """
    facts = check(model).facts
    n_ctx = -(-max(n_tokens, LEARN_PROMPT) // 256) * 256
    sizes = Sizes.of(facts, path=str(model), load_mode=load_mode, n_ctx=n_ctx, max_sequences=1, ubatch=512)
    walks = Walks(model, facts.n_vocab, seed)
    with ExitStack() as stack:
        child = stack.enter_context(Child("ours", locate.require_build().directory))
        child.ask("hello", device=device)
        shelf = Shelf({"ours": child}, {"ours": device}, sizes)
        counting = Place("ours", len(sizes.layer_bytes), ())
        halves = shelf.ask(counting, "learn", tokens=walks.tokens(n_learn, 0, "learn"))["halves"]
        heat = np.array(halves[0]) + np.array(halves[1])
        trace = Prober(shelf, walks, heat).trace(walks.steps(n_tokens, 1, 1))
    picked = (trace > 0).swapaxes(0, 1)
    return Checked(model.name, walks.kind, picked.shape[0], n_tokens, describe(picked, heat))


def table(checked: Checked) -> str:
    """The result for people."""
    found = checked.as_json()
    lines = [f"{checked.model}: routing {checked.routing}, {checked.n_layers} layers, {checked.n_tokens} tokens"]
    for name, value in found["measured"].items():
        known = name in PUBLISHED
        beside = f"   published {PUBLISHED[name]:.2f}   {found['difference'][name]:+.3f}" if known else ""
        lines.append(f"{name:24s} {value:6.3f}{beside}")
    return "\n".join(lines)


def _flat(facts: RoutingFacts) -> dict[str, float]:
    values = asdict(facts)
    by_share = {
        f"{kind} {share:.0%}": rate
        for kind in ("recent", "static")
        for share, rate in zip(SHARES, values[kind], strict=True)
    }
    return {"repeat next": facts.repeat_next, "repeat within 8": facts.repeat_within_8, **by_share}
