"""Prometheus metrics: counters and histograms that are fed as things happen, gauges read at each scrape.

No label ever holds a user, a prompt or a request id.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from daemon import expert_metrics
from daemon.config import Config
from daemon.fair_queue import CLASSES
from daemon.messages import Card, Done, ModelInfo, Priority, Residency, Snapshot

# A gauge beside every counter, for a format that is not served here.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144)
_STEP_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.025, 0.04, 0.06, 0.1, 0.2, 0.4, 0.8, 1.6, 5)


class Metrics:
    """One registry for one application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.experts = expert_metrics.ExpertCounters(self.registry)
        self._request_metrics()
        self._token_metrics()

    def _request_metrics(self) -> None:
        registry = self.registry
        self._requests = Counter(
            "hotset_requests", "Requests that were answered.", ["endpoint", "outcome"], registry=registry
        )
        self._rejected = Counter("hotset_rejected", "Requests refused before work.", ["reason"], registry=registry)
        self._cancelled = Counter("hotset_cancelled", "Answers given up.", ["stage"], registry=registry)
        self._given_up = Counter(
            "hotset_connections_given_up", "Connections closed because of their clients.", ["reason"], registry=registry
        )
        for reason in ("write_timeout", "lag", "pipelining"):
            self._given_up.labels(reason)
        self._restarts = Counter("hotset_engine_restarts", "Engines replaced.", ["reason"], registry=registry)
        self._reloads = Counter(
            "hotset_config_reloads", "Readings of the configuration while running.", ["result"], registry=registry
        )
        for result in ("applied", "unchanged", "rejected"):
            self._reloads.labels(result)
        self._loads = Counter("hotset_config_loads", "Orders to load anew.", ["result"], registry=registry)
        for result in ("loaded", "nothing", "refused", "failed"):
            self._loads.labels(result)
        self._reload_good = Gauge(
            "hotset_config_last_reload_successful",
            "0 when the file was rejected and the last good configuration stays in force.",
            registry=registry,
        )
        self._reload_good.set(1)
        self._request_seconds = Histogram(
            "hotset_request_seconds", "Request to last byte.", ["endpoint"], buckets=_SECONDS, registry=registry
        )

    def _token_metrics(self) -> None:
        registry = self.registry
        self._prompt_tokens = Counter(
            "hotset_prompt_tokens", "Prompt tokens by where they came from.", ["source"], registry=registry
        )
        self._generated = Counter("hotset_generated_tokens", "Tokens generated.", registry=registry)
        self._first = _histogram(registry, "time_to_first_token_seconds", "From queueing to the first token.", _SECONDS)
        self._between = _histogram(
            registry, "inter_token_latency_seconds", "Between two tokens of one answer.", _STEP_SECONDS
        )
        self._queue = Histogram(
            "hotset_queue_seconds",
            "From queueing to the first prompt chunk.",
            ["class"],
            buckets=_SECONDS,
            registry=registry,
        )
        for priority in CLASSES:
            self._queue.labels(priority)
        self._prefill = _histogram(registry, "prefill_seconds", "Reading the prompt.", _SECONDS)
        self._decode = _histogram(registry, "decode_seconds", "Generating.", _SECONDS)
        self._prompt = _histogram(registry, "request_prompt_tokens", "Tokens of one answer's prompt.", _TOKENS)
        self._completion = _histogram(registry, "request_completion_tokens", "Tokens of one answer.", _TOKENS)

    def first_tokens(self, seconds: float, count: int) -> None:
        """The first tokens of an answer, `count` at once, came this long after it was queued."""
        self._first.observe(seconds)
        self._generated.inc(count)

    def next_tokens(self, seconds: float, count: int) -> None:
        """`count` more tokens came this long after the last ones."""
        if count:
            self._between.observe(seconds / count)
            self._generated.inc(count)

    def answered(self, done: Done, priority: Priority, queue_seconds: float, n_seen: int) -> None:
        """An answer is complete (or was cancelled), of which `n_seen` tokens have been told."""
        self._prompt_tokens.labels("computed").inc(done.n_prompt - done.n_cached)
        self._prompt_tokens.labels("live").inc(done.n_cached)
        self._generated.inc(max(0, done.n_predicted - n_seen))
        self._queue.labels(priority).observe(queue_seconds)
        self._prefill.observe(done.prompt_ms / 1000)
        self._decode.observe(done.predicted_ms / 1000)
        self._prompt.observe(done.n_prompt)
        self._completion.observe(done.n_predicted)

    def cancelled(self, stage: str) -> None:
        """An answer was given up while queued, in prefill or in decode."""
        self._cancelled.labels(stage).inc()

    def rejected(self, reason: str) -> None:
        """A request was refused before work; `reason` is an error code."""
        self._rejected.labels(reason).inc()

    def given_up(self, reason: str) -> None:
        """A connection was closed because its client does not read, or sends what it should not; one word."""
        self._given_up.labels(reason).inc()

    def request(self, endpoint: str, outcome: str, seconds: float) -> None:
        """A request is over. `endpoint` is a route of the table, never a path from a client."""
        self._requests.labels(endpoint, outcome).inc()
        self._request_seconds.labels(endpoint).observe(seconds)

    def engine_restarted(self, reason: str) -> None:
        """The supervisor replaces an engine; `reason` is one word from a fixed set."""
        self._restarts.labels(reason).inc()

    def config_reloaded(self, result: Literal["applied", "unchanged", "rejected"]) -> None:
        """The configuration was read again."""
        self._reloads.labels(result).inc()
        self._reload_good.set(result != "rejected")

    def config_loaded(self, result: Literal["loaded", "nothing", "refused", "failed"]) -> None:
        """An order to load anew is over."""
        self._loads.labels(result).inc()

    def watch(self, view: Callable[[], View]) -> None:
        """Read gauges from `view` at every scrape."""
        self.registry.register(_Gauges(view))

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


@dataclass(frozen=True)
class View:
    """What the gauges are made of, at one moment."""

    version: str
    running: int
    waiting: Mapping[Priority, int]
    ready: bool
    snapshot: Snapshot
    info: ModelInfo | None
    residency: Residency
    config: Config
    cards: Mapping[str, Card] = field(default_factory=dict)
    """What the kernel says of the devices now, by their names; those that it does not know are not there."""


class _Gauges(Collector):
    """Reads one `View` per scrape; nothing is kept."""

    def __init__(self, view: Callable[[], View]) -> None:
        self._view = view

    def describe(self) -> list[Metric]:
        """No names in advance: nothing else registers them."""
        return []

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        yield GaugeMetricFamily("hotset_running", "Answers that the engine works on.", value=view.running)
        waiting = GaugeMetricFamily("hotset_waiting", "Answers in the queue.", labels=["class"])
        for priority in CLASSES:
            waiting.add_metric([priority], view.waiting.get(priority, 0))
        yield waiting
        yield GaugeMetricFamily("hotset_ready", "1 when the engine takes requests.", value=int(view.ready))
        cells = GaugeMetricFamily("hotset_kv_cells", "KV cells, one a token.", labels=["state"])
        cells.add_metric(["used"], view.snapshot.kv_cells_used)
        cells.add_metric(["free"], view.snapshot.kv_cells - view.snapshot.kv_cells_used)
        yield cells
        parked = view.snapshot.parked_bytes
        yield GaugeMetricFamily("hotset_parked_bytes", "RAM of answers that made room for others.", value=parked)
        yield from expert_metrics.gauges(view.residency)
        yield from _card_memory(view.cards)
        yield _info("hotset_build", "What is running.", {"version": view.version, "python": platform.python_version()})
        yield _info("hotset_config", "The configuration that applies.", _config_labels(view.config))
        if view.info is not None:
            yield _info("hotset_model", "The loaded model.", _model_labels(view.info))


_CARD_MEMORY: tuple[tuple[str, str, Callable[[Card], int | None]], ...] = (
    ("vram_used", "VRAM that programs use, as amdgpu counts it.", lambda card: card.vram_used),
    ("vram_total", "VRAM of the card, as amdgpu counts it.", lambda card: card.vram_total),
    ("gtt_used", "The system's memory that programs use through the card.", lambda card: card.gtt_used),
    ("gtt_total", "The system's memory that the card may take.", lambda card: card.gtt_total),
)


def _card_memory(cards: Mapping[str, Card]) -> Iterator[Metric]:
    """One series a device whose driver tells."""
    for name, documentation, value in _CARD_MEMORY:
        family = GaugeMetricFamily(f"hotset_{name}_bytes", documentation, labels=["device"])
        for device, card in cards.items():
            if (found := value(card)) is not None:
                family.add_metric([device], found)
        yield family


def _info(name: str, documentation: str, labels: dict[str, str]) -> Metric:
    family = InfoMetricFamily(name, documentation, labels=list(labels))
    family.add_metric([], labels)
    return family


def _config_labels(config: Config) -> dict[str, str]:
    engine = config.engine
    values = {
        "device": engine.device,
        "context": config.model.context,
        "max_sequences": engine.max_sequences,
        "ubatch": engine.ubatch,
        "max_waiting": config.queue.max_waiting,
    }
    return {name: str(value) for name, value in values.items()}


def _model_labels(info: ModelInfo) -> dict[str, str]:
    return {"name": info.name, "architecture": info.architecture, "build": info.build}


def _histogram(registry: CollectorRegistry, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(f"hotset_{name}", documentation, buckets=buckets, registry=registry)
