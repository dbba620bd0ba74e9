"""What a client of the soak got, and whether the whole run was good: pure."""

from __future__ import annotations

import http.client
import io
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["answered", "rejected", "left", "wrong"]

NEAR = 1.0
"""Natural logarithms that two tokens may lie apart where another batch chooses the other one: it sums, and rounds to
eight bits, in another order, in all layers and at all places before this one."""
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Said:
    """A whole answer: its tokens, and for each the likeliest ones at its place with their log probabilities."""

    tokens: tuple[int, ...]
    likeliest: tuple[dict[int, float], ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """How one request ended. `code` is the error's for a rejected one; `fault` what is wrong with a wrong one.

    `same`: every token is the one that the same prompt gave alone.
    """

    outcome: Outcome
    code: str = ""
    retry_after: int = 0
    fault: str = ""
    n_tokens: int = 0
    same: bool = False


class Wrong(Exception):
    """A response that must not be; its message says why."""


class _Received:
    """What came over a socket, for `http.client`."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def judge(data: bytes, *, streamed: bool, n_tokens: int, alone: Said | None) -> Ended:
    """How a request ended whose response is `data`, to the end of the connection.

    `n_tokens` is how long its answer must be, `alone` what the same prompt gave when nobody else was there.
    """
    try:
        response = http.client.HTTPResponse(_Received(data))  # type: ignore[arg-type]
        response.begin()
        body = response.read()
        if response.status in (429, 503):
            return _rejected(response, body)
        if response.status != 200:
            raise Wrong(f"status {response.status}: {body[:200]!r}")
        said = read_stream(body) if streamed else read_whole(body)
        _check_length(said, n_tokens)
        same = alone is None or _follows(said, alone)
        return Ended("answered", n_tokens=n_tokens, same=same)
    except (http.client.HTTPException, ValueError, KeyError, TypeError, IndexError) as error:
        return Ended("wrong", fault=f"not readable: {type(error).__name__}: {error}")
    except Wrong as error:
        return Ended("wrong", fault=str(error))


def read_whole(body: bytes) -> Said:
    """A chat answer in one piece, asked for with logprobs.

    Raises:
        Wrong: it is not one answer of the length that it says.
    """
    answer = json.loads(body)
    (choice,) = answer["choices"]
    return _said(choice["logprobs"]["content"], choice["message"]["content"], [choice["finish_reason"]], answer)


def read_stream(body: bytes) -> Said:
    """A chat answer as events, asked for with logprobs.

    Raises:
        Wrong: something is missing, comes twice, or after the end.
    """
    blocks = [block for block in body.decode().split("\n\n") if block and not block.startswith(":")]
    if not blocks or blocks[-1] != "data: [DONE]" or not all(block.startswith("data: ") for block in blocks):
        raise Wrong(f"the stream does not end as it should: {body[-200:]!r}")
    events = [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]
    if failed := [event["error"] for event in events if "error" in event]:
        raise Wrong(f"an error in the stream: {failed[0]}")
    if len({event["id"] for event in events}) != 1:
        raise Wrong("events of different answers in one stream")
    choices = [event["choices"][0] for event in events]
    if [choice["delta"].get("role") for choice in choices if "role" in choice["delta"]] != ["assistant"]:
        raise Wrong("the stream does not begin once")
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    if choices[-1]["finish_reason"] is None:
        raise Wrong("something comes after the end of the answer")
    return _said(entries, text, reasons, events[-1])


def _said(entries: list[dict[str, Any]], text: str, reasons: list[str], last: dict[str, Any]) -> Said:
    if reasons != ["length"]:
        raise Wrong(f"finish reasons {reasons}")
    told = last["timings"]["predicted_n"]
    if told != len(entries):
        raise Wrong(f"{len(entries)} tokens came of {told}")
    if b"".join(bytes(entry["bytes"]) for entry in entries).decode("utf-8", "replace") != text:
        raise Wrong("the text is not that of its tokens")
    likeliest = tuple({top["id"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries)
    return Said(tuple(entry["id"] for entry in entries), likeliest)


def _check_length(said: Said, n_tokens: int) -> None:
    if len(said.tokens) != n_tokens:
        raise Wrong(f"{len(said.tokens)} tokens instead of {n_tokens}")


def _follows(said: Said, alone: Said) -> bool:
    """Whether both are the same. From a place on where two tokens were as likely they may differ; one that is not among
    the likeliest was at most as likely as the last of those.

    Raises:
        Wrong: they differ where there was no choice, so this is the answer to something else.
    """
    for place, (ours, theirs) in enumerate(zip(said.tokens, alone.tokens, strict=True)):
        if ours != theirs:
            likeliest = alone.likeliest[place]
            if likeliest.get(ours, min(likeliest.values())) < likeliest[theirs] - NEAR:
                raise Wrong(f"token {place} is {ours}, alone it is {theirs}; likely were {likeliest}")
            return False
    return True


def _rejected(response: http.client.HTTPResponse, body: bytes) -> Ended:
    error = json.loads(body)["error"]
    wait = response.getheader("Retry-After", "")
    if not (error["code"] and error["message"] and wait.isdecimal() and int(wait) >= 1):
        raise Wrong(f"rejected without a reason or a time: {body[:200]!r}, Retry-After {wait!r}")
    return Ended("rejected", code=error["code"], retry_after=int(wait))


@dataclass
class Tally:
    """What came of all requests so far."""

    sent: int = 0
    by_outcome: Counter[str] = field(default_factory=Counter)
    by_manner: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    n_tokens: int = 0
    n_same: int = 0

    def add(self, manner: str, ended: Ended) -> None:
        """One more has ended."""
        self.by_outcome[ended.outcome] += 1
        self.by_manner[f"{manner}: {ended.outcome}"] += 1
        self.n_tokens += ended.n_tokens
        self.n_same += ended.same
        if ended.outcome == "rejected":
            self.rejected[ended.code] += 1
        elif ended.outcome == "wrong":
            self.faults.append(f"{manner}: {ended.fault}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the service: seconds since the clients began, bytes of memory and open descriptors by process."""

    at: float
    memory: dict[str, int]
    descriptors: dict[str, int]
    running: int
    waiting: int
    cells: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one process: bytes, as medians after the warm-up and at the end, and what is allowed between them."""

    process: str
    warm: int
    end: int
    most: int
    allowed: int

    @property
    def flat(self) -> bool:
        """Whether it has not grown by more."""
        return self.end - self.warm <= self.allowed


def growth(samples: Sequence[Sample], process: str, margin: int) -> Growth:
    """Of the second tenth of the run against its last one; `margin` bytes, or a twentieth, are no growth."""
    series = [sample.memory[process] for sample in samples]
    tenth = max(1, len(series) // 10)
    warm = int(statistics.median(series[tenth : 2 * tenth] or series))
    end = int(statistics.median(series[-tenth:]))
    return Growth(process, warm, end, max(series), max(margin, warm // 20))


def faults(
    tally: Tally, samples: Sequence[Sample], growths: Sequence[Growth], before: Sample, after: Sample, max_waiting: int
) -> list[str]:
    """Everything that is not as it must be; empty: the run was good. `after` was taken when all clients were gone."""
    found = list(dict.fromkeys(tally.faults))[:20]
    ended = sum(tally.by_outcome.values())
    if ended != tally.sent:
        found.append(f"{tally.sent} requests were sent, {ended} ended")
    if not tally.by_outcome["answered"]:
        found.append("no request was answered")
    if (most := max(sample.waiting for sample in samples)) > max_waiting:
        found.append(f"{most} requests waited, more than the {max_waiting} that may")
    found += [f"{one.process} grew from {one.warm} to {one.end} bytes" for one in growths if not one.flat]
    for process, count in after.descriptors.items():
        if count > before.descriptors[process]:
            found.append(f"{process} had {before.descriptors[process]} descriptors and has {count}")
    if (after.running, after.waiting, after.cells) != (0, 0, 0):
        found.append(f"at the end {after.running} run, {after.waiting} wait, {after.cells} cells are used")
    return found
