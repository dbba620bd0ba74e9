"""Traces: what is written is read, and every fault of a file is found."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.hotset import trace
from daemon.hotset.files import ModelId
from daemon.hotset.trace import Header, Segment, Trace, TraceLayer, TraceUnusable

DATA = Path(__file__).resolve().parents[1] / "data"
PROMPTS = Path(__file__).resolve().parents[2] / "models" / "prompts"
MODEL = ModelId(fingerprint="0" * 64)


def made(n_expert: list[int], lengths: list[int], top_k: int = 2, seed: int = 1) -> Trace:
    random = np.random.default_rng(seed)
    shape = sum(lengths), len(n_expert)
    ids = np.zeros((*shape, top_k), np.uint16)
    for token, layer in np.ndindex(shape):
        ids[token, layer] = np.sort(random.choice(n_expert[layer], top_k, replace=False))
    layers = [TraceLayer(layer=number, experts=count) for number, count in enumerate(n_expert)]
    segments = [Segment(name=f"text {number}", tokens=length) for number, length in enumerate(lengths)]
    return Trace(Header(model=MODEL, top_k=top_k, layers=layers, segments=segments), ids)


def rewritten(path: Path, header: dict[str, Any] | None = None, content: bytes | None = None) -> Path:
    """The file with other parts."""
    line, _, packed = path.read_bytes().partition(b"\n")
    changed = json.dumps(json.loads(line) | (header or {})).encode()
    path.write_bytes(changed + b"\n" + (packed if content is None else content))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two layers of 4 and 5 experts, 2 of each for 6 tokens of two texts."""
    file = tmp_path / "a.trace"
    trace.write(file, made([4, 5], [2, 4]))
    return file


def refused(path: Path) -> str:
    with pytest.raises(TraceUnusable) as caught:
        trace.read(path)
    return caught.value.message


@settings(max_examples=25)
@given(
    st.lists(st.integers(3, 300), min_size=1, max_size=4),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, n_expert: list[int], lengths: list[int], top_k: int
) -> None:
    path = tmp_path_factory.mktemp("traces") / "a.trace"
    wanted = made(n_expert, lengths, top_k)
    trace.write(path, wanted)
    found = trace.read(path)
    assert found.header == wanted.header
    assert np.array_equal(found.ids, wanted.ids)
    assert found.n_expert == n_expert
    assert [len(found.ids[tokens]) for _, tokens in found.segments()] == lengths


def test_a_file_that_is_not_there_or_no_trace(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path / "none.trace")
    (tmp_path / "a.trace").write_bytes(b"\x00" * 100)
    assert "does not begin with a line" in refused(tmp_path / "a.trace")
    (tmp_path / "a.trace").write_bytes(b"[]\n")
    assert "a.trace cannot be used" in refused(tmp_path / "a.trace")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"format": "hotset-trace-2"}, "format"),
        ({"colour": 1}, "colour: there is no such field"),
        ({"top_k": 0}, "top_k"),
        ({"segments": []}, "segments"),
        ({"segments": [{"name": "a", "tokens": 0}]}, r"segments.0.tokens"),
        ({"layers": [{"layer": 1, "experts": 4}, {"layer": 0, "experts": 5}]}, "ascending order"),
        ({"layers": [{"layer": 1, "experts": 4}, {"layer": 1, "experts": 5}]}, "ascending order"),
        ({"layers": [{"layer": 0, "experts": 4}, {"layer": 1, "experts": 1}]}, "layer 1 has 1 experts, of which no 2"),
        ({"layers": [{"layer": 0, "experts": 2}, {"layer": 7, "experts": 5}]}, "layer 0 has 2 experts, not those of"),
        ({"segments": [{"name": "a", "tokens": 7}]}, "ends before all"),
        ({"segments": [{"name": "a", "tokens": 5}]}, "holds more than"),
        ({"segments": [{"name": "a", "tokens": 1 << 40}]}, "are allowed"),
    ],
)
def test_a_header_that_is_wrong(path: Path, header: dict[str, Any], message: str) -> None:
    assert message in refused(rewritten(path, header))


def test_a_stream_that_is_wrong(path: Path) -> None:
    packed = path.read_bytes().partition(b"\n")[2]
    damaged = bytearray(packed)
    damaged[len(packed) // 2] ^= 1
    assert "damaged" in refused(rewritten(path, content=bytes(damaged)))
    for length in range(len(packed)):
        assert refused(rewritten(path, content=packed[:length]))
    assert "1 bytes follow" in refused(rewritten(path, content=packed + b"x"))
    assert "ascend at tokens 0, 1, 2, 3, ..." in refused(rewritten(path, content=lzma.compress(bytes(24))))


def test_a_small_file_cannot_fill_memory(path: Path) -> None:
    assert "holds more" in refused(rewritten(path, content=lzma.compress(bytes(50_000_000))))


def test_all_faults_are_listed(path: Path) -> None:
    content = bytes([0, 1, 2, 9] * 5 + [3, 2, 1, 1])
    message = refused(rewritten(path, content=lzma.compress(content)))
    assert "layer 0: ids do not ascend at token 5" in message
    assert "layer 1: ids do not ascend at token 5" in message
    assert "layer 1 has 5 experts, not those of tokens 0, 1, 2, 3, ..." in message


def test_a_faulty_trace_is_not_written_and_the_file_stays(path: Path) -> None:
    before = path.read_bytes()
    good = made([4, 5], [2, 4])
    with pytest.raises(TraceUnusable, match="do not ascend"):
        trace.write(path, Trace(good.header, good.ids[:, :, ::-1]))
    with pytest.raises(TraceUnusable, match="shape"):
        trace.write(path, Trace(good.header, good.ids[1:]))
    with pytest.raises(TraceUnusable, match="cannot be written"):
        trace.write(path / "below.trace", good)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["a.trace"]


def test_more_segments_than_the_first_line_may_describe_are_not_written(path: Path) -> None:
    many = made([4], [1] * 40_000, top_k=1)
    with pytest.raises(TraceUnusable, match="40,000 segments are more"):
        trace.write(path, many)


def test_what_begins_a_trace(path: Path, tmp_path: Path) -> None:
    assert trace.begins_one(path)
    assert trace.begins_one(rewritten(path, content=b"damaged"))
    assert not trace.begins_one(rewritten(path, {"format": "another"}))
    for content in (b"", b"GGUF\x03", b"{}\n", b"\xff" * 3_000_000):
        (tmp_path / "other").write_bytes(content)
        assert not trace.begins_one(tmp_path / "other")
    assert not trace.begins_one(tmp_path / "none")
    assert not trace.begins_one(tmp_path)


def test_the_recorded_traces_are_what_they_should_be() -> None:
    six, every = (trace.read(DATA / f"{name}-domains.trace") for name in ("six", "all"))
    assert [name for name, _ in six.segments()] == ["fiction", "python", "lang_zh", "chat", "c", "scripture"]
    assert [name for name, _ in every.segments()] == sorted(file.stem for file in PROMPTS.glob("*.txt"))
    assert {segment.tokens for segment in six.header.segments} == {600}
    assert {segment.tokens for segment in every.header.segments} == {400}
    for one in (six, every):
        assert (one.ids.shape[1:], set(one.n_expert)) == ((6, 4), {32})
        assert np.array_equal(one.header.model.fingerprint, six.header.model.fingerprint)
