"""What is kept of experts between starts: it comes back as it was, and nothing else is believed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.hotset import hot_set as hot_sets
from daemon.hotset.controller import EMPTY, Controller
from daemon.hotset.files import ModelId
from daemon.hotset.hot_set import HotSet
from daemon.hotset.learned import (
    Header,
    Learned,
    LearnedLayer,
    LearnedUnusable,
    decode,
    encode,
    faults,
    learned_by,
    teach,
)
from daemon.hotset.policy import Settings

PRINT = "ab" * 32
MODEL = ModelId(fingerprint=PRINT, architecture="qwen3moe")
SAVED = "2026-12-01T12:00:00Z"
KEYS = [(1, 0), (1, 1), (4, 0)]
COUNTS = [4, 2, 4]


def made(heat: list[float], resident: list[int], *, keys: list[tuple[int, int]] | None = None) -> Learned:
    """One layer, or as many equal ones as there are keys."""
    keys = keys or [(0, 0)]
    n = len(heat) // len(keys)
    layers = [LearnedLayer(layer=layer, set=number, experts=n) for layer, number in keys]
    header = Header(model=MODEL, saved=SAVED, tokens=9, ranked=7, layers=layers)
    values = np.array(heat, np.float32)
    return Learned(header, values, values[::-1].copy(), np.isin(np.arange(len(heat)), resident))


def controller(slots: int = 2, padded: bool = False) -> Controller:
    found = Controller(COUNTS, [10] * 3, bytes_per_second=1e9, padded=padded)
    for layer, count in enumerate(COUNTS):
        found.adopt(layer, [EMPTY] * min(slots, count))
    return found


def follow(found: Controller, ids: list[list[int]]) -> list[tuple[int, int]]:
    """A step of one token that chooses these, then a turn; what was brought in."""
    found.observe(np.array([ids], np.int32), 1)
    batch = found.batch(1.0)
    found.published(batch.uploads)
    return [(one.layer, one.expert) for one in batch.uploads]


def sealed(line: bytes | dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(line).encode() if isinstance(line, dict) else line
    content = text + b"\n" + body
    return content + hashlib.sha256(content).digest()


def refusal(data: bytes) -> list[str]:
    with pytest.raises(LearnedUnusable) as caught:
        decode("learned-x.bin", data)
    assert caught.value.message.startswith("learned-x.bin cannot be used: ")
    return caught.value.faults


counts = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@st.composite
def learnings(draw: st.DrawFn) -> Learned:
    sizes = draw(counts)
    n = sum(sizes)
    layers = [LearnedLayer(layer=index * 3, set=index % 2, experts=size) for index, size in enumerate(sizes)]
    tokens = st.integers(0, 1 << 53)
    header = Header(model=MODEL, saved=SAVED, tokens=draw(tokens), ranked=draw(tokens), layers=layers)
    numbers = st.lists(st.floats(0, 1e9, width=32), min_size=n, max_size=n)
    flags = st.lists(st.booleans(), min_size=n, max_size=n)
    return Learned(header, *(np.array(draw(numbers), np.float32) for _ in range(2)), np.array(draw(flags), bool))


@given(learnings())
def test_it_comes_back_as_it_was(learned: Learned) -> None:
    back = decode("f", encode(learned))
    assert back.header == learned.header
    for name in ("heat", "ranks", "resident"):
        assert (getattr(back, name) == getattr(learned, name)).all()
        assert getattr(back, name).dtype == getattr(learned, name).dtype


@given(learnings(), st.data())
def test_no_damage_is_overlooked(learned: Learned, data: st.DataObject) -> None:
    whole = encode(learned)
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(flipped), whole[:at], whole + b"\0", whole[at:] + whole[:at] if at else b""):
        assert "checksum" in refusal(damaged)[0]


@given(st.binary(max_size=300), st.binary(max_size=60))
def test_bytes_of_any_kind_are_refused_even_with_their_checksum(line: bytes, body: bytes) -> None:
    assert refusal(sealed(line, body))


def test_numbers_that_no_engine_writes_are_refused() -> None:
    good = made([1.0, 2.0], [0])
    assert decode("f", encode(good)).header == good.header
    for bad in (float("nan"), float("inf"), -1.0, -0.5, 2e9):
        values = np.array([1.0, bad], np.float32)
        assert refusal(encode(replace(good, heat=values))) == ["its heat hold impossible values"]
        assert refusal(encode(replace(good, ranks=values))) == ["its ranks hold impossible values"]
        both = replace(good, heat=values, ranks=values)
        assert len(refusal(encode(both))) == 2
    whole = encode(good)
    line, _, rest = whole[:-32].partition(b"\n")
    assert refusal(sealed(line, rest[:-1] + b"\2")) == ["its slots hold impossible values"]
    assert refusal(sealed(line, rest + b"\0")) == ["2 experts take 18 bytes, and there are 19"]
    assert refusal(sealed(line, b"")) == ["2 experts take 18 bytes, and there are 0"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "hotset-learned-2"}, "format"),
        ({"model": {"fingerprint": "AB" * 32}}, "model.fingerprint"),
        ({"model": {"fingerprint": PRINT, "path": "/x"}}, "model.path: there is no such field"),
        ({"saved": "yesterday"}, "saved"),
        ({"saved": "٢٠٢٦-12-01T12:00:00Z"}, "saved"),
        ({"tokens": -1}, "tokens"),
        ({"tokens": 1.5}, "tokens"),
        ({"tokens": 1 << 60}, "tokens"),
        ({"ranked": "7"}, "ranked"),
        ({"layers": []}, "layers"),
        ({"layers": [{"layer": 0, "experts": 0}]}, "layers.0.experts"),
        ({"layers": [{"layer": -1, "experts": 2}]}, "layers.0.layer"),
        ({"layers": [{"layer": 0, "experts": 1}] * 2}, "set 0 of layer 0 is there twice"),
        ({"layers": [{"layer": n, "experts": 65536} for n in range(17)]}, "1,048,576 are allowed"),
        ({"layers": [{"layer": n, "experts": 1} for n in range(5000)]}, "layers"),
        ({"who": "me"}, "who: there is no such field"),
    ],
)
def test_a_header_that_no_engine_writes_is_refused(change: dict[str, Any], said: str) -> None:
    good = json.loads(encode(made([1.0, 2.0], [0])).partition(b"\n")[0])
    assert any(said in fault for fault in refusal(sealed(good | change, bytes(18))))


@pytest.mark.parametrize("line", [b"", b"{}", b"[" * 100_000, b"\xff\xfe", b"{" + b" " * (2 << 20) + b"}", b"null"])
def test_a_line_that_is_no_header_is_refused(line: bytes) -> None:
    assert refusal(sealed(line, b""))


@pytest.mark.parametrize("data", [b"", b"\n", bytes(31), bytes(32), hashlib.sha256(b"").digest()])
def test_hardly_anything_is_refused(data: bytes) -> None:
    assert refusal(data)


def test_the_order_is_that_in_which_the_policy_keeps_experts() -> None:
    learned = made([5.0, 0.5, 1.4, 0.0, 0.0, 3.0], resident=[1, 3, 5])
    assert learned.order()[0, 0] == [0, 5, 1, 2, 3], "1 has 1.5 with the margin, 2 has 1.4, 4 was never of use"
    assert learned.order(Settings(margin=0))[0, 0] == [0, 5, 2, 1, 3]
    two = made([5.0, 0.0, 1.0, 2.0], resident=[], keys=[(0, 0), (7, 1)])
    assert two.order() == {(0, 0): [0], (7, 1): [1, 0]}


def test_what_does_not_fit_the_model_is_named() -> None:
    learned = made([1.0] * 4, [], keys=[(0, 0), (3, 1)])
    assert faults(learned, PRINT, {(0, 0): 2, (3, 1): 2, (4, 0): 9}) == []
    assert "another model" in faults(learned, "cd" * 32, {(0, 0): 2, (3, 1): 2})[0]
    assert faults(learned, PRINT, {(0, 0): 3}) == [
        "it knows 2 experts in layer 0, set 0; this model has 3 there",
        "it knows 2 experts in layer 3, set 1; this model has 0 there",
    ]


@pytest.mark.parametrize("padded", [False, True])
def test_a_controller_goes_on_where_another_one_stopped(padded: bool) -> None:
    rng = np.random.default_rng(3)
    steps = [[list(rng.choice(count, 2, replace=False)) for count in COUNTS] for _ in range(60)]
    first = controller(padded=padded)
    for step in steps[:40]:
        follow(first, step)
    data = encode(learned_by(first, MODEL, KEYS, SAVED, n_before=5))
    learned = decode("f", data)
    assert (learned.header.tokens, learned.header.ranked) == (45, 40)
    second = controller(padded=padded)
    teach(second, KEYS, learned)
    for layer, key in enumerate(KEYS):
        batch = second.seed(layer, learned.order()[key])
        second.published(batch.uploads)
    assert (second.serving == first.serving).all()
    assert (second.n_ranked, second.n_tokens) == (40, 0)
    assert [follow(second, step) for step in steps[40:]] == [follow(first, step) for step in steps[40:]]
    np.testing.assert_allclose(second.heat.values, first.heat.values, rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(second.curves()[0, :5], first.curves()[0, :5], rtol=1e-5)


def test_layers_in_another_order_and_layers_that_are_not_known() -> None:
    learned = made([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [], keys=[(9, 0), (4, 0)])
    found = controller()
    teach(found, KEYS, learned)
    assert found.heat.values.tolist() == [[0, 0, 0, 0], [0, 0, -1, -1], [5, 6, 7, 8]]


def ranked(*experts: int, name: str = "all") -> dict[str, Any]:
    return {"name": name, "layers": [{"layer": 0, "experts": list(experts)}]}


@pytest.mark.parametrize(
    ("first", "small", "all_of_it"),
    [
        ([], [3, 1], [3, 1, 0, 2]),
        ([2], [2, 3], [2, 3, 1, 0]),
        ([1, 2, 0], [1, 2], [1, 2, 0, 3]),
    ],
)
def test_what_is_learned_leads_and_the_hot_set_fills(first: list[int], small: list[int], all_of_it: list[int]) -> None:
    content = {"format": 1, "model": {"fingerprint": PRINT}, "sizes": [ranked(3, 1, name="small")]}
    whole = hot_sets.completed(HotSet.model_validate(content), {(0, 0): 4})
    led = hot_sets.led(whole, {(0, 0): first, (5, 0): [1]})
    assert [size.by_layer() for size in led.sizes] == [{(0, 0): small}, {(0, 0): all_of_it}]


def test_an_early_file_is_what_a_later_one_must_read() -> None:
    """The bytes of docs/learned.md, put together by hand."""
    line = (
        b'{"format":"hotset-learned-1","model":{"fingerprint":"' + PRINT.encode() + b'","name":"","architecture":"a"},'
        b'"saved":"2026-12-01T12:00:00Z","tokens":3,"ranked":2,"layers":[{"layer":1,"set":0,"experts":2}]}'
    )
    body = bytes.fromhex("0000803f0000004000004040000000000001")
    learned = decode("f", sealed(line, body))
    assert learned.heat.tolist() == [1.0, 2.0]
    assert learned.ranks.tolist() == [3.0, 0.0]
    assert learned.resident.tolist() == [False, True]
    assert encode(learned) == sealed(line, body)
