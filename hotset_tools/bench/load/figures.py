"""From answers to figures: percentiles by kind of request, throughput, and the comparison of servers; pure.

TTFT is the time from the planned arrival of a request to its first text, so that neither a server's queue nor a client
that could not send in time is left out. Inter-token latency is the time between two pieces of text that reach the
client, and each counts once, whole, however many tokens came together: merging tokens hides no wait and gains nothing.
`tokens_per_piece` says how many came together. A stall of seconds is one gap among hundreds of short ones, and may be
beyond the 95th percentile however often it comes; so the same gaps are also weighted by their own length (the gap that
a reader is in at a random moment), and each answer's mean time per token is there (`tpot`). Latencies are those of
whole answers; what was refused, broke off or was not over at the end is counted beside them, and its tokens are no
throughput.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hotset_tools.bench.heard import Heard
from hotset_tools.bench.load.plan import Arrival

QUANTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request and what came of it. Times are seconds since the start of the run; `sent` is when it really went."""

    arrival: Arrival
    sent: float
    ended: float
    heard: Heard

    @property
    def refused(self) -> bool:
        """Told to come back later."""
        return self.heard.status in (429, 503)

    @property
    def whole(self) -> bool:
        """Answered to its end."""
        return not self.heard.fault


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of `n` values; in the values' unit. None where there are none."""

    n: int
    p50: float | None
    p95: float | None
    p99: float | None

    def as_json(self) -> dict[str, object]:
        """As scripts read it."""
        return {"n": self.n, "p50": self.p50, "p95": self.p95, "p99": self.p99}


def by_time(gaps_: Iterable[float]) -> Percentiles:
    """Percentiles of gaps weighted by their length: gaps up to p95 hold 95 % of the time that readers waited."""
    ordered = sorted(gaps_)
    ends = list(accumulate(ordered))
    found = [
        ordered[min(bisect_left(ends, ends[-1] * q / 100), len(ordered) - 1)] if ordered else None for q in QUANTILES
    ]
    return Percentiles(len(ordered), *found)


def percentiles(values: Iterable[float]) -> Percentiles:
    """By linear interpolation between ranks (Hyndman and Fan's type 7)."""
    ordered = sorted(values)
    return Percentiles(len(ordered), *(_quantile(ordered, q / 100) if ordered else None for q in QUANTILES))


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class KindFigures:
    """One kind of request; seconds."""

    kind: str
    short: bool
    n_sent: int
    n_whole: int
    ttft: Percentiles
    itl: Percentiles
    itl_by_time: Percentiles
    tpot: Percentiles
    whole_answer: Percentiles
    tokens_per_piece: float | None

    def as_json(self) -> dict[str, object]:
        """As scripts read it."""
        return {
            "sent": self.n_sent,
            "whole": self.n_whole,
            "short": self.short,
            "ttft_s": self.ttft.as_json(),
            "itl_s": self.itl.as_json(),
            "itl_by_time_s": self.itl_by_time.as_json(),
            "tpot_s": self.tpot.as_json(),
            "answer_s": self.whole_answer.as_json(),
            "tokens_per_piece": self.tokens_per_piece,
        }


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """One server. Throughput is tokens per second of whole answers, prompt and output, from the first arrival to the
    end of the last answer, all rounds together.

    `ttft_short` is over all short requests. `capacity` is the throughput when everything arrives at once, None where
    that was not measured. `others_cpu` is the share of the machine that neither the server nor the clients used while
    others did, None where that is not known.
    """

    name: str
    settings: dict[str, object]
    kinds: tuple[KindFigures, ...]
    throughput: float
    output_rate: float
    ttft_short: Percentiles
    late: Percentiles
    n_prompt: int
    n_output: int
    n_refused: int
    n_failed: int
    faults: dict[str, int]
    seconds: float
    capacity: float | None = None
    others_cpu: float | None = None

    @property
    def chats(self) -> KindFigures | None:
        """The figures of the chats, None where there were none."""
        return next((figures for figures in self.kinds if figures.kind == "chat"), None)

    def as_json(self) -> dict[str, object]:
        """As scripts read it."""
        return {
            "name": self.name,
            "settings": self.settings,
            "throughput": self.throughput,
            "capacity": self.capacity,
            "output_tokens_per_second": self.output_rate,
            "ttft_short_s": self.ttft_short.as_json(),
            "kinds": {figures.kind: figures.as_json() for figures in self.kinds},
            "prompt_tokens": self.n_prompt,
            "output_tokens": self.n_output,
            "refused": self.n_refused,
            "failed": self.n_failed,
            "faults": self.faults,
            "sent_late_s": self.late.as_json(),
            "seconds": self.seconds,
            "others_cpu": self.others_cpu,
        }


def figures(
    name: str,
    settings: dict[str, object],
    rounds: Sequence[Sequence[Outcome]],
    *,
    burst: Sequence[Outcome] = (),
    others_cpu: float | None = None,
) -> ServerFigures:
    """Of all rounds of one server; `burst` is what came of everything at once, and counts for capacity and faults."""
    outcomes = [outcome for one in rounds for outcome in one]
    whole = [outcome for outcome in outcomes if outcome.whole]
    seconds = sum(_duration(one) for one in rounds if one)
    kinds = sorted({outcome.arrival.kind.name for outcome in outcomes})
    everything = [*outcomes, *burst]
    return ServerFigures(
        name=name,
        settings=settings,
        kinds=tuple(_of_kind([o for o in outcomes if o.arrival.kind.name == kind]) for kind in kinds),
        throughput=_rate(_n_tokens(whole), seconds),
        output_rate=_rate(sum(o.heard.n_output for o in whole), seconds),
        ttft_short=percentiles(_ttft(o) for o in whole if o.arrival.kind.short and o.heard.texts),
        late=percentiles(o.sent - o.arrival.at for o in outcomes),
        n_prompt=sum(o.heard.n_prompt for o in whole),
        n_output=sum(o.heard.n_output for o in whole),
        n_refused=sum(o.refused for o in everything),
        n_failed=sum(not (o.whole or o.refused) for o in everything),
        faults=dict(Counter(o.heard.fault for o in everything if o.heard.fault).most_common(10)),
        seconds=seconds,
        capacity=_rate(_n_tokens([o for o in burst if o.whole]), _duration(burst)) if burst else None,
        others_cpu=others_cpu,
    )


def _rate(n_tokens: int, seconds: float) -> float:
    return n_tokens / seconds if seconds else 0.0


def _n_tokens(outcomes: Sequence[Outcome]) -> int:
    return sum(o.heard.n_prompt + o.heard.n_output for o in outcomes)


def gaps(outcome: Outcome) -> list[float]:
    """Seconds between the pieces of text of one answer."""
    return [later - earlier for earlier, later in pairwise(outcome.heard.texts)]


def _duration(outcomes: Sequence[Outcome]) -> float:
    return max(o.ended for o in outcomes) - min(o.arrival.at for o in outcomes)


def _ttft(outcome: Outcome) -> float:
    return outcome.heard.texts[0] - outcome.arrival.at


def _tpot(outcome: Outcome) -> float | None:
    """Seconds per token after the first one; None for an answer of one."""
    times, n = outcome.heard.texts, outcome.heard.n_output
    return (times[-1] - times[0]) / (n - 1) if times and n > 1 else None


def _of_kind(outcomes: Sequence[Outcome]) -> KindFigures:
    kind = outcomes[0].arrival.kind
    whole = [o for o in outcomes if o.whole]
    n_pieces = sum(len(o.heard.texts) for o in whole)
    return KindFigures(
        kind=kind.name,
        short=kind.short,
        n_sent=len(outcomes),
        n_whole=len(whole),
        ttft=percentiles(_ttft(o) for o in whole if o.heard.texts),
        itl=percentiles(gap for o in whole for gap in gaps(o)),
        itl_by_time=by_time(gap for o in whole for gap in gaps(o)),
        tpot=percentiles(tpot for o in whole if (tpot := _tpot(o)) is not None),
        whole_answer=percentiles(o.ended - o.arrival.at for o in whole),
        tokens_per_piece=sum(o.heard.n_output for o in whole) / n_pieces if n_pieces else None,
    )
