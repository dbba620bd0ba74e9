"""Routing of generated models that is local in time, as published measurements show it for trained ones.

Weights are random, so what a router chooses follows from the token alone. Token ids lie on a ring; the latent position
of a token, a few numbers, changes slowly from id to id (an Ornstein-Uhlenbeck process). An embedding is the sum of a
part that all tokens share (it makes some experts more popular than others), the latent position and noise. A stream
of tokens is a walk over neighbouring ids: the router meets nearly the same position again at the next token, another
one some dozens of tokens later. The parameters are in the model's metadata, so that every tool walks the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

Kind = Literal["local", "uniform", "topics"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Part = Literal["learn", "measure"]
Floats = npt.NDArray[np.float32]

PREFIX = "hotset.routing."
_COMMON, _PLANE, _LATENT, _NOISE, _TOPIC, _WALK = range(6)  # what random numbers are drawn for


@dataclass(frozen=True)
class Routing:
    """How embeddings are composed and how a stream walks.

    `common`, `topic`, `latent` are shares of an embedding's variance, noise is the rest. `n_ids` ids from 0 on form the
    ring. The latent position has `n_latent` dimensions and a correlation length of `correlation` tokens. A topic is
    one of `n_topics` equal pieces of the ring; a stream stays in it for `dwell` tokens and half as many more or less.
    A step goes 1 to `max_step` ids onwards.
    """

    kind: Kind
    n_ids: int
    seed: int
    common: float = 0.0
    topic: float = 0.0
    latent: float = 0.0
    n_latent: int = 16
    correlation: float = 28.0
    n_topics: int = 1
    dwell: int = 300
    max_step: int = 3

    @property
    def noise(self) -> float:
        """The share of the variance that tells nothing."""
        return 1 - self.common - self.topic - self.latent

    def as_metadata(self) -> dict[str, str | int | float]:
        """GGUF key -> value."""
        return {PREFIX + field.name: getattr(self, field.name) for field in fields(self)}


def make_routing(kind: str, n_ids: int, seed: int) -> Routing:
    """The parameters of a kind.

    The shares of `local` were fitted to: 45 % of the picks repeat at the next token, 80 % within 8; the experts that
    were used last, 40 % of all, take 90 % of the picks; the most popular 25 / 50 / 75 % take 48 / 75 / 91 %.

    Raises:
        ValueError: there is no such kind.
    """
    match kind:
        case "local":
            return Routing("local", n_ids, seed, common=0.09, latent=0.66)
        case "topics":
            return Routing("topics", n_ids, seed, common=0.03, topic=0.14, latent=0.58, n_topics=6)
        case "uniform":
            return Routing("uniform", n_ids, seed)
        case _:
            raise ValueError(f"there is no routing {kind!r}; there are {', '.join(KINDS)}")


def from_metadata(values: Mapping[str, Any]) -> Routing | None:
    """The parameters that a model's metadata hold; None for a model of another origin.

    Raises:
        ValueError: they are there but incomplete.
    """
    if PREFIX + "kind" not in values:
        return None
    try:
        found = {field.name: values[PREFIX + field.name] for field in fields(Routing)}
    except KeyError as error:
        raise ValueError(f"the model's metadata lack {error.args[0]}") from None
    return Routing(**found)


class Embeddings:
    """Embeddings of a whole vocabulary, row by row; entries have variance 1. A function of the routing's seed."""

    def __init__(self, routing: Routing, width: int) -> None:
        self._routing, self._width = routing, width
        self._common = _random(routing, _COMMON).standard_normal(width, dtype=np.float32)
        # Rows of length sqrt(width / n_latent), at right angles: a position of variance 1 gives entries of variance 1.
        plane = _random(routing, _PLANE).standard_normal((width, routing.n_latent))
        basis = np.linalg.qr(plane)[0].T * math.sqrt(width / routing.n_latent)
        self._positions = positions(routing)
        self._basis: Floats = basis.astype(np.float32)

    def rows(self, n_rows: int, step: int = 4096) -> Iterator[Floats]:
        """Rows 0 to `n_rows`, in pieces [<= step, width]; ids beyond the ring have noise only."""
        random = _random(self._routing, _NOISE)
        for start in range(0, n_rows, step):
            count = min(step, n_rows - start)
            noise = random.standard_normal((count, self._width), dtype=np.float32)
            yield self._compose(start, noise)

    def _compose(self, start: int, noise: Floats) -> Floats:
        routing = self._routing
        values: Floats = noise * np.float32(math.sqrt(routing.noise)) + self._common * np.float32(routing.common**0.5)
        known = self._positions[start : start + len(noise)]
        values[: len(known)] += known @ self._basis
        return values


def positions(routing: Routing) -> Floats:
    """The latent position of every id of the ring, [n_ids, n_latent], with the variance that an embedding has of it."""
    n, shape = routing.n_ids, (routing.n_ids, routing.n_latent)
    mean_step = (1 + routing.max_step) / 2
    keep = math.exp(-1 / (routing.correlation * mean_step))
    white = _random(routing, _LATENT).standard_normal(shape)
    # The process around a ring is white noise through a filter with one pole, which is a product of spectra.
    pole = math.sqrt(1 - keep * keep) / (1 - keep * np.exp(-2j * np.pi * np.fft.rfftfreq(n)))
    path = np.fft.irfft(np.fft.rfft(white, axis=0) * pole[:, None], n, axis=0)
    centres = _random(routing, _TOPIC).standard_normal((routing.n_topics, routing.n_latent))
    topics = centres[np.arange(n) * routing.n_topics // n]
    result: Floats = (path * math.sqrt(routing.latent) + topics * math.sqrt(routing.topic)).astype(np.float32)
    return result


def stream(
    routing: Routing, n_tokens: int, seed: int, part: Part = "measure", among: Sequence[int] | None = None
) -> list[int]:
    """`n_tokens` token ids of one walk; it visits only the topics `among`, by default all.

    The parts have no token in common: `learn` walks the first half of every topic, `measure` the second.
    """
    random = np.random.default_rng([routing.seed, _WALK, seed, part == "measure"])
    half = routing.n_ids // routing.n_topics // 2
    if routing.kind == "uniform":
        return [int(token) for token in random.integers(half, size=n_tokens) + (half if part == "measure" else 0)]
    tokens: list[int] = []
    topics = range(routing.n_topics) if among is None else among
    at = int(random.integers(len(topics)))
    while len(tokens) < n_tokens:
        length = n_tokens if routing.n_topics == 1 else int(random.integers(routing.dwell // 2, routing.dwell * 3 // 2))
        first = routing.n_ids * topics[at] // routing.n_topics + (half if part == "measure" else 0)
        walk = random.integers(half) + np.cumsum(random.integers(1, routing.max_step + 1, size=length))
        tokens.extend(int(first + offset) for offset in walk % half)
        at = (at + 1 + int(random.integers(max(1, len(topics) - 1)))) % len(topics)
    return tokens[:n_tokens]


def _random(routing: Routing, purpose: int) -> np.random.Generator:
    return np.random.default_rng([routing.seed, purpose])
