"""One look at a running service, over its HTTP API."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, TypeAdapter, ValidationError

from daemon.messages import Residency

ANSWER_SECONDS = 5.0
KEY_VARIABLE = "HOTSET_KEY"
_MOST_BYTES = 16 << 20

State = Literal["ready", "loading", "restarting", "failed", "stopped", "away", "refused", "unknown"]
"""What /health says; or that nobody answers, that the answer is refused, or that it is none of hotsetd's."""

_HEALTH: frozenset[State] = frozenset({"loading", "restarting", "failed", "stopped"})


class Slot(BaseModel):
    """The part of an entry of /slots that is shown; one without a sequence, `id` -1, waits for one."""

    id: int
    is_processing: bool


T = TypeVar("T")
_SLOTS = TypeAdapter(list[Slot])


@dataclass(frozen=True)
class Scrape:
    """Samples of /metrics: name -> [(labels, value)]."""

    samples: Mapping[str, list[tuple[Mapping[str, str], float]]] = field(default_factory=dict)

    def total(self, name: str) -> float | None:
        """Over all labels; None where there is no such sample."""
        found = self.samples.get(name)
        return sum(value for _, value in found) if found else None

    def labels(self, name: str) -> Mapping[str, str]:
        """Of the first such sample; an info metric has one."""
        found = self.samples.get(name)
        return found[0][0] if found else {}


@dataclass(frozen=True)
class Reading:
    """What was seen at one moment. `at` is in seconds of a monotonic clock; what could not be asked is None."""

    at: float
    state: State
    reason: str = ""
    progress: float | None = None
    metrics: Scrape = Scrape()
    residency: Residency | None = None
    slots: tuple[bool, ...] | None = None
    """One for each sequence: whether it is in use."""


class _Trouble(Exception):
    """Why nothing more can be read."""

    def __init__(self, state: State, reason: str) -> None:
        super().__init__(reason)
        self.state, self.reason = state, reason


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """hotsetd sends nobody elsewhere, and a key must not follow."""

    def redirect_request(self, *_: Any) -> None:
        return None


def base_url(text: str) -> str:
    """The service's root from what people have at hand, which may end in / or in /v1.

    Raises:
        ValueError: it is no address of an HTTP service.
    """
    parts = urlsplit(text)
    try:
        usable = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # the port
        usable = False
    if parts.scheme not in ("http", "https") or not usable or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{text!r} is no address such as http://127.0.0.1:8117")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("an address has printable ASCII characters only, and no spaces")
    return text.rstrip("/").removesuffix("/v1")


class Service:
    """The service at `url`, asked with `key` where there is one."""

    def __init__(self, url: str, key: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.url, self._key, self._clock = url, key, clock
        # What the environment says of proxies is not meant for a daemon at home.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)

    def read(self) -> Reading:
        """Ask it everything; whatever goes wrong is a state with a reason."""
        now = self._clock()
        try:
            state, reason, progress = self._health()
            metrics = _scrape(self._fetch("/metrics")[1])
            residency = _read(Residency.model_validate_json, self._fetch_loaded("/v1/residency"))
            slots = _read(_SLOTS.validate_json, self._fetch_loaded("/slots"))
        except _Trouble as trouble:
            return Reading(now, trouble.state, trouble.reason)
        busy = None if slots is None else tuple(slot.is_processing for slot in slots if slot.id >= 0)
        return Reading(now, state, reason, progress, metrics, residency, busy)

    def _health(self) -> tuple[State, str, float | None]:
        status, body = self._fetch("/health")
        said = _object(body)
        if status == 200 and said.get("status") == "ok":
            return "ready", "", None
        for state in _HEALTH:
            if said.get("status") == state:
                progress = said.get("progress")
                return state, str(said.get("reason", "")), progress if isinstance(progress, int | float) else None
        raise _not_ours()

    def _fetch_loaded(self, path: str) -> bytes | None:
        """None where it takes a loaded model to answer, and there is none."""
        status, body = self._fetch(path)
        return None if status == 503 else body

    def _fetch(self, path: str) -> tuple[int, bytes]:
        """Status, 200 or 503, and body.

        Raises:
            _Trouble: there is no such answer.
        """
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            return self._ask(urllib.request.Request(self.url + path, headers=headers))
        except TimeoutError:
            raise _Trouble("away", f"no answer within {ANSWER_SECONDS:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Trouble("away", f"nobody answers: {_why(error)}") from None

    def _ask(self, request: urllib.request.Request) -> tuple[int, bytes]:
        try:
            with self._opener.open(request, timeout=ANSWER_SECONDS) as answer:
                return int(answer.status), self._body(answer)
        except urllib.error.HTTPError as error:
            with error:
                return self._refusal(error)

    def _refusal(self, error: urllib.error.HTTPError) -> tuple[int, bytes]:
        body = self._body(error)
        if error.code == 503:
            return error.code, body
        if error.code == 401:
            wrong = "it does not accept this key" if self._key else f"it asks for a key: --key, or {KEY_VARIABLE}"
            raise _Trouble("refused", wrong)
        said = _object(body).get("error")
        if error.code == 403 and isinstance(said, dict):
            raise _Trouble("refused", str(said.get("message")))
        raise _not_ours()

    @staticmethod
    def _body(answer: Any) -> bytes:
        body: bytes = answer.read(_MOST_BYTES + 1)
        if len(body) > _MOST_BYTES:
            raise _not_ours()
        if answer.length:  # what was announced and did not come
            raise http.client.IncompleteRead(body, answer.length)
        return body


def _not_ours() -> _Trouble:
    return _Trouble("unknown", "what answers there is no hotsetd, or one of another version")


def _object(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except ValueError:
        raise _not_ours() from None
    return said if isinstance(said, dict) else {}


def _read(parse: Callable[[bytes], T], body: bytes | None) -> T | None:
    try:
        return None if body is None else parse(body)
    except ValidationError:
        raise _not_ours() from None


def _scrape(body: bytes) -> Scrape:
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(body.decode()):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError:  # also of bytes that are no UTF-8
        raise _not_ours() from None
    return Scrape(samples)


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return f"no connection within {ANSWER_SECONDS:g} s"
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
