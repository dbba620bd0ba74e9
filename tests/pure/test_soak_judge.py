"""The soak's judgement: every way in which an answer or a service can be wrong is seen."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from hotset_tools.bench.soak import make_jobs, total
from hotset_tools.bench.soak_judge import Ended, Growth, Said, Sample, Tally, faults, growth, judge

PIECES = ["a", "é", "c"]
ALONE = Said((1, 2, 3), ({1: -0.5, 7: -0.9, 6: -3.0}, {2: -0.5, 8: -4.0}, {3: -2.0, 4: -2.1}))


def entry(token: int, text: str) -> dict[str, Any]:
    return {"id": token, "bytes": list(text.encode()), "top_logprobs": [{"id": token, "logprob": -0.5}]}


def response(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode() + body


def whole(tokens: tuple[int, ...] = (1, 2, 3), text: str = "aéc", told: int = 3, reason: str = "length") -> bytes:
    entries = [entry(token, piece) for token, piece in zip(tokens, PIECES, strict=False)]
    choice = {"message": {"content": text}, "logprobs": {"content": entries}, "finish_reason": reason}
    return response(json.dumps({"choices": [choice], "timings": {"predicted_n": told}}).encode())


def events(tokens: tuple[int, ...] = (1, 2, 3)) -> list[dict[str, Any]]:
    def chunk(delta: dict[str, str], entries: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
        logprobs = None if entries is None else {"content": entries}
        return {
            "id": "x",
            "choices": [{"delta": delta, "logprobs": logprobs, "finish_reason": more.pop("end", None)}],
        } | more

    pairs = list(zip(tokens, PIECES, strict=True))
    return [
        chunk({"role": "assistant", "content": ""}),
        *(chunk({"content": piece}, [entry(token, piece)]) for token, piece in pairs),
        chunk({}, end="length", timings={"predicted_n": 3}),
    ]


def stream(chunks: list[dict[str, Any]], end: str = "data: [DONE]\n\n") -> bytes:
    body = ": ping\n\n" + "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end
    return response(body.encode())


def wrong(data: bytes, *, streamed: bool = True, n_tokens: int = 3) -> str:
    ended = judge(data, streamed=streamed, n_tokens=n_tokens, alone=ALONE)
    assert ended.outcome == "wrong"
    return ended.fault


def test_whole_answers_and_streams_that_are_right() -> None:
    right = Ended("answered", n_tokens=3, same=True)
    assert judge(whole(), streamed=False, n_tokens=3, alone=ALONE) == right
    assert judge(stream(events()), streamed=True, n_tokens=3, alone=ALONE) == right


def test_a_token_may_be_another_where_it_was_as_likely_and_everything_behind_it() -> None:
    ended = judge(stream(events((7, 9, 9))), streamed=True, n_tokens=3, alone=ALONE)
    assert ended == Ended("answered", n_tokens=3, same=False)


def test_where_many_are_as_likely_it_may_be_one_that_is_not_told() -> None:
    assert judge(stream(events((1, 2, 9))), streamed=True, n_tokens=3, alone=ALONE).outcome == "answered"


@pytest.mark.parametrize("tokens", [(1, 8, 3), (1, 9, 3), (5, 2, 3), (6, 2, 3)])
def test_a_token_that_was_not_likely_is_of_another_answer(tokens: tuple[int, ...]) -> None:
    assert "alone it is" in wrong(stream(events(tokens)))


def test_what_is_lost_or_comes_twice_is_seen() -> None:
    good = events()
    assert "2 tokens came of 3" in wrong(stream(good[:1] + good[2:]))
    assert "4 tokens came of 3" in wrong(stream(good[:2] + good[1:]))
    assert "not begin once" in wrong(stream(good[:1] + good))
    assert "finish reasons" in wrong(stream([*good, good[-1]]))
    assert "does not end" in wrong(stream(good, end=""))
    assert "does not end" in wrong(stream(good, end="data: [DONE]\n\ndata: {}\n\n"))
    assert "after the end" in wrong(stream([*good[:-2], good[-1], good[-2]]))
    assert "different answers" in wrong(stream([*good[:-1], good[-1] | {"id": "y"}]))
    assert "an error in the stream" in wrong(stream([*good, {"error": {"code": "engine_failed"}}]))
    assert "not that of its tokens" in wrong(whole(text="aéd"), streamed=False)
    assert "instead of 4" in wrong(whole(), streamed=False, n_tokens=4)
    assert "finish reasons" in wrong(whole(reason="stop"), streamed=False)


@pytest.mark.parametrize(
    "data", [b"", b"HTTP/1.1 200", b"nonsense\r\n\r\n", whole()[:-5], response(b"{}"), response(b"no JSON")]
)
def test_what_is_cut_off_or_cannot_be_read_is_wrong(data: bytes) -> None:
    assert "not readable" in wrong(data, streamed=False)


def test_other_statuses_are_wrong() -> None:
    assert "status 500" in wrong(response(b"oh", "500 Internal Server Error"))


def refusal(code: str = "queue_full", message: str = "Too many.") -> bytes:
    return json.dumps({"error": {"code": code, "message": message}}).encode()


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
def test_a_rejection_has_a_reason_and_a_time(status: str) -> None:
    data = response(refusal(), status, Retry_After="3")
    assert judge(data, streamed=True, n_tokens=3, alone=None) == Ended("rejected", code="queue_full", retry_after=3)
    for bad in ("0", "-1", "soon", "1.5"):
        assert "without a reason or a time" in wrong(response(refusal(), status, Retry_After=bad))
    assert "without a reason or a time" in wrong(response(refusal(), status))
    assert "without a reason or a time" in wrong(response(refusal(message=""), status, Retry_After="3"))
    assert "not readable" in wrong(response(b"<html>", status, Retry_After="3"))


# -- the run


def sample(memory: int = 100, descriptors: int = 9, running: int = 0, waiting: int = 0, cells: int = 0) -> Sample:
    return Sample(0.0, {"service": memory}, {"service": descriptors}, running, waiting, cells)


def tally(*ended: Ended, sent: int | None = None) -> Tally:
    made = Tally(sent=len(ended) if sent is None else sent)
    for one in ended:
        made.add("stream", one)
    return made


GOOD = tally(Ended("answered", n_tokens=3, same=True), Ended("left"), Ended("rejected", code="queue_full"))
FLAT = Growth("service", 100, 110, 120, 10)


def test_a_good_run_has_no_faults() -> None:
    assert faults(GOOD, [sample(running=8, waiting=32)], [FLAT], sample(), sample(), 32) == []
    assert (GOOD.n_tokens, GOOD.n_same, GOOD.rejected) == (3, 1, {"queue_full": 1})


def test_every_fault_of_a_run_is_told() -> None:
    bad = tally(Ended("wrong", fault="odd"), Ended("wrong", fault="odd"), sent=3)
    grown = Growth("service", 100, 111, 120, 10)
    found = faults(bad, [sample(waiting=33)], [grown], sample(), sample(descriptors=10, cells=1), 32)
    assert found == [
        "stream: odd",
        "3 requests were sent, 2 ended",
        "no request was answered",
        "33 requests waited, more than the 32 that may",
        "service grew from 100 to 111 bytes",
        "service had 9 descriptors and has 10",
        "at the end 0 run, 0 wait, 1 cells are used",
    ]


def test_growth_is_from_the_second_tenth_to_the_last() -> None:
    series = [sample(memory=size) for size in [0] * 10 + [1000] * 10 + [5000] * 70 + [1200] * 10]
    assert growth(series, "service", 30) == Growth("service", 1000, 1200, 5000, 50)
    assert growth(series, "service", 300).flat
    assert growth([sample(memory=7)], "service", 1) == Growth("service", 7, 7, 7, 1)


def test_a_metrics_page_is_added_up() -> None:
    page = 'hotset_waiting{class="a"} 2.0\nhotset_waiting{class="b"} 3.0\nhotset_running 8.0\n'
    assert (total(page, "hotset_waiting"), total(page, "hotset_running"), total(page, "hotset_none")) == (5, 8, 0)


def test_prompts_differ() -> None:

    jobs = make_jobs(random.Random(1))
    assert len({job.prompt for job in jobs}) == len(jobs) == 24
    assert sum(len(job.prompt.split()) > 400 for job in jobs) == 4
