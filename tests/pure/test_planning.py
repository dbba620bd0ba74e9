"""`hotset plan`: what is held out is not learned from, and what is written, printed and refused."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.errors import EXIT_FAILURE
from daemon.hotset import hot_set
from daemon.hotset.files import ModelId
from daemon.hotset.trace import Header, Segment, Trace, TraceLayer, read, write
from daemon.native.gguf_check import check
from hotset_tools.cli import main
from hotset_tools.hot_set.learning import CannotLearn
from hotset_tools.planning import held_out, planning
from hotset_tools.planning.planning import CannotPlan, Request
from hotset_tools.replay import comparing

ROOT = Path(__file__).resolve().parents[2]
SIX = ROOT / "tests" / "data" / "six-domains.trace"
ALL = ROOT / "tests" / "data" / "all-domains.trace"
MODEL = ROOT / "models" / "tinymoe-41m-Q4_K_M.gguf"


def ids(*experts: int) -> np.ndarray:
    """One layer, one expert a token."""
    return np.array(experts, np.uint16)[:, None, None]


def told(_done: int, _total: int) -> None:
    """Nobody listens."""


def measure(segments: Mapping[str, np.ndarray], n_slots: Sequence[int], n_parts: int = 2) -> held_out.Measured:
    slots = np.array([[n] for n in n_slots])
    return held_out.measure(held_out.gather(segments.items()), [4], slots, n_parts, told)


def save(
    path: Path, segments: Iterable[tuple[str, np.ndarray]], experts: Sequence[int] = (4,), fingerprint: str = "0" * 64
) -> Path:
    """A trace of layers 1, 2, ... with so many experts."""
    named = list(segments)
    header = Header(
        model=ModelId(fingerprint=fingerprint, name="small"),
        top_k=named[0][1].shape[2],
        layers=[TraceLayer(layer=number, experts=count) for number, count in enumerate(experts, 1)],
        segments=[Segment(name=name, tokens=len(tokens)) for name, tokens in named],
    )
    write(path, Trace(header, np.concatenate([tokens for _, tokens in named])))
    return path


class TestHeldOut:
    """What lists serve of what they do not know."""

    def test_parts_are_served_by_a_list_of_the_others(self) -> None:
        found = measure({"a": ids(0, 0, 2, 1, 1, 1)}, [1, 2, 3])
        assert found.together.held_out == [0, pytest.approx(2 / 6), 1]  # lists 1, 0, 2 and 0, 2, 1
        assert found.counts.tolist() == [[2, 3, 1, 0]]

    def test_topics_are_served_by_a_list_of_the_others(self) -> None:
        found = measure({"a": ids(0, 0, 0, 1), "b": ids(1, 1, 2)}, [1])
        assert [rates.new_topic for rates in found.by_topic] == [[0.25], [0]]
        assert found.together.new_topic == [pytest.approx(1 / 7)]

    def test_segments_of_one_name_are_one_topic(self) -> None:
        topics = held_out.gather([("a", ids(0)), ("b", ids(1)), ("a", ids(0, 2))])
        assert [(topic.name, topic.tokens) for topic in topics] == [("a", 3), ("b", 1)]
        found = held_out.measure(topics, [4], np.array([[1]]), 2, told)
        assert found.by_topic[0].new_topic == [0]

    def test_where_nothing_can_be_held_out_there_is_no_figure(self) -> None:
        found = measure({"a": ids(3)}, [1])
        assert found.together == held_out.Rates(None, None) == found.by_topic[0]
        assert found.shared[0].held_out is None
        both = measure({"a": ids(3), "b": ids(3)}, [1])
        assert both.together == held_out.Rates(None, [1.0])
        assert measure({"a": ids(3, 3)}, [1], n_parts=100).together.held_out == [1.0]

    @settings(max_examples=60)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from("abc"),
                st.lists(st.tuples(st.permutations(range(5)), st.permutations(range(3))), min_size=1, max_size=9),
            ),
            min_size=1,
            max_size=5,
        ),
        st.integers(2, 4),
    )
    def test_figures_agree_with_plain_counting(
        self, drawn: list[tuple[str, list[tuple[list[int], list[int]]]]], n_parts: int
    ) -> None:
        texts = [(name, [(five[:2], three[:2]) for five, three in tokens]) for name, tokens in drawn]
        topics = held_out.gather((name, np.array(tokens, np.uint16)) for name, tokens in texts)
        slots = [(1, 1), (3, 2)]
        found = held_out.measure(topics, [5, 3], np.array(slots), n_parts, told)

        def serve(known: list[tuple[list[int], ...]], new: list[tuple[list[int], ...]], n: Sequence[int]) -> int:
            hits = 0
            for layer, count in enumerate((5, 3)):
                used = Counter(expert for token in known for expert in token[layer])
                best = sorted(range(count), key=lambda expert: (-used[expert], expert))[: n[layer]]
                hits += sum(expert in best for token in new for expert in token[layer])
            return hits

        def part_of(tokens: list[tuple[list[int], ...]], index: int) -> int:
            return next(part for part in range(n_parts) if index < len(tokens) * (part + 1) // n_parts)

        placed = [(name, part_of(tokens, i), token) for name, tokens in texts for i, token in enumerate(tokens)]
        total = 4 * len(placed)
        for case, n in enumerate(slots):
            by_part = by_name = 0
            for part in range(n_parts):
                known, new = ([t for _, p, t in placed if (p == part) is wanted] for wanted in (False, True))
                by_part += serve(known, new, n)
            for name in {name for name, _ in texts}:
                known, new = ([t for other, _, t in placed if (other == name) is wanted] for wanted in (False, True))
                by_name += serve(known, new, n)
            if found.together.held_out is not None:
                assert found.together.held_out[case] == pytest.approx(by_part / total)
            if found.together.new_topic is not None:
                assert found.together.new_topic[case] == pytest.approx(by_name / total)
        assert (found.together.held_out is None) is (len({part for _, part, _ in placed}) == 1)
        assert (found.together.new_topic is None) is (len({name for name, _ in texts}) == 1)

    def test_progress_ends_where_it_said(self) -> None:
        heard: list[tuple[int, int]] = []
        topics = held_out.gather([("a", ids(0, 1)), ("b", ids(1))])
        held_out.measure(topics, [4], np.array([[1]]), 2, lambda done, total: heard.append((done, total)))
        assert heard == [(1, 4), (2, 4), (3, 4), (4, 4)]

    def test_a_segment_longer_than_a_chunk_is_counted_whole(self) -> None:
        n = 3 * held_out._CHUNK + 1
        assert measure({"a": ids(*[1, 2, 2] * (n // 3))}, [1]).counts.tolist() == [[0, n // 3, n // 3 * 2, 0]]

    def test_layers_that_need_more_slots_get_them(self) -> None:
        random = np.random.default_rng(1)
        busy = random.integers(0, 8, 400)
        tokens = np.stack([busy, np.zeros_like(busy)], axis=1).astype(np.uint16)[..., None]
        found = held_out.measure(held_out.gather([("a", tokens)]), [8, 8], np.array([[4, 4]]), 5, told)
        shared = found.shared[0]
        assert shared.slots == [7, 1]
        assert shared.gain == pytest.approx((7 / 8 + 1) / (4 / 8 + 1) - 1, abs=0.05)
        assert shared.held_out == pytest.approx((7 / 8 + 1) / 2, abs=0.03)


def small(tmp_path: Path) -> list[Path]:
    """Two traces of one model, whose layers have four and two experts."""

    def both(*tokens: tuple[int, int]) -> np.ndarray:
        return np.array(tokens, np.uint16)[..., None]

    one = save(tmp_path / "one.trace", [("chat", both((3, 1), (3, 1), (2, 0))), ("code", both((1, 1)))], (4, 2))
    two = save(tmp_path / "two.trace", [("chat", both((3, 1)))], (4, 2))
    return [one, two]


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *map(str, words)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_file_is_learned_from_everything(tmp_path: Path) -> None:
    out = tmp_path / "hot.json"
    planning.plan(Request(small(tmp_path), out, [25, 50, 100], 5), json=True)
    found = hot_set.read(out)
    assert [size.name for size in found.sizes] == ["p25", "p50", "p100"]
    assert [size.by_layer() for size in found.sizes] == [
        {(1, 0): [3], (2, 0): [1]},
        {(1, 0): [3, 1], (2, 0): [1]},
        {(1, 0): [3, 1, 2, 0], (2, 0): [1, 0]},
    ]
    assert [size.coverage for size in found.sizes] == [0.7, 0.8, 1.0]
    assert (found.learned_from.texts, found.learned_from.tokens) == (["chat", "code"], 5)
    assert found.model == ModelId(fingerprint="0" * 64, name="small")
    assert hot_set.faults(found, "0" * 64, {(1, 0): 4, (2, 0): 2}) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hot.json", "one.trace", "two.trace"]


def test_figures_of_real_routing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "hot.json"
    assert run(SIX, "--out", out, "--sizes", "12.5,25,50", "--json") == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert not captured.err
    best = comparing.compare(comparing.Request(SIX, [0.125, 0.25, 0.5]), json=True).rows
    static = [row.hit_rate for row in best if row.policy == "static"]
    assert [size["coverage"] for size in report["sizes"]] == pytest.approx(static, abs=1e-4)
    for size in report["sizes"]:
        assert size["new_topic"] < size["held_out"] - 0.05 < size["coverage"] - 0.05
        assert len(set(size["experts_per_layer"])) == 1
        assert sum(size["shared_out"]["experts_per_layer"]) == size["experts"]
        assert size["bytes"] is None
    assert [topic["name"] for topic in report["topics"]] == [name for name, _ in read(SIX).segments()]
    means = np.mean([[size["held_out"] for size in topic["sizes"]] for topic in report["topics"]], axis=0)
    assert means == pytest.approx([size["held_out"] for size in report["sizes"]], abs=1e-3)  # all are equally long
    assert report["hold_out"] == 5
    assert hot_set.read(out).model.fingerprint == check(MODEL).fingerprint


def test_the_table_shows_the_same_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "hot.json"
    assert run(SIX, ALL, "--out", out, "--sizes", "25", "--model", MODEL, "--json") == 0
    size = json.loads(capsys.readouterr().out)["sizes"][0]
    assert run(SIX, ALL, "--out", out, "--sizes", "25", "--model", MODEL) == 0
    captured = capsys.readouterr()
    header, row = captured.out.splitlines()[1:3]
    assert header.split() == ["experts", "a", "layer", "MiB", "coverage", "held", "out", "new", "topic"]
    shown = [f"{size[name]:.1%}" for name in ("coverage", "held_out", "new_topic")]
    weight = sum(9 * layer.bytes_per_expert for layer in check(MODEL).facts.layers)  # 8 and one for zeros
    assert size["bytes"] == weight
    assert row.split() == ["p25", "48", "8", f"{weight / (1 << 20):.1f}", *shown]
    assert "less than 3% more" in captured.out
    assert "reading all-domains.trace" in captured.err
    assert "counting\n  4/34" in captured.err


def test_the_table_of_the_docs_is_what_comes_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SIX, "--out", tmp_path / "hot.json", "--sizes", "25,50", "--model", MODEL) == 0
    table = capsys.readouterr().out.splitlines()[1:4]
    assert "\n".join(f"    {line}" for line in table) in (ROOT / "docs" / "hot-set.md").read_text("utf-8")


def test_what_cannot_be_told_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = save(tmp_path / "a.trace", [("one", np.array([[[2], [1]]], np.uint16))], (4, 2))
    assert run(trace, "--out", tmp_path / "hot.json", "--sizes", "50") == 0
    text = capsys.readouterr().out
    assert text.splitlines()[2].split() == ["p50", "3", "1-2", "-", "100.0%", "-", "-"]
    assert "no segment has two tokens" in text
    assert "cannot be told from one topic" in text


def test_layers_that_should_share_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    busy = np.random.default_rng(1).integers(0, 8, 400)
    tokens = np.stack([busy, np.zeros_like(busy)], axis=1).astype(np.uint16)[..., None]
    trace = save(tmp_path / "a.trace", [("one", tokens)], (8, 8))
    assert run(trace, "--out", tmp_path / "hot.json", "--sizes", "50,100") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "more with p50" in last
    assert "p100" not in last


def test_a_gain_over_nothing_is_still_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal shares serve nothing of what is held out, shared slots something."""
    tokens = np.array([[0, 0, 0, 1, 1, 2, 3, 3, 3, 4, 4, 2], [5] * 6 + [6] * 6], np.uint16).T[..., None]
    trace = save(tmp_path / "a.trace", [("one", tokens)], (8, 8))
    words = (trace, "--out", tmp_path / "hot.json", "--sizes", "25", "--hold-out", "2")
    assert run(*words, "--json") == 0
    size = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))["sizes"][0]
    assert (size["held_out"], size["shared_out"]["held_out"]) == (0, pytest.approx(2 / 24, abs=1e-4))
    assert size["shared_out"]["gain"] is None
    assert run(*words) == 0
    assert "far more with p25" in capsys.readouterr().out


def broken(tmp_path: Path, kind: str) -> Path:
    good = save(tmp_path / "good.trace", [("one", ids(0, 1, 2))])
    path = tmp_path / f"{kind}.trace"
    content = good.read_bytes()
    if kind == "truncated":
        path.write_bytes(content[:-9])
    elif kind == "foreign":
        save(path, [("one", ids(0, 1, 2))], fingerprint="1" * 64)
    elif kind == "other-layers":
        save(path, [("one", ids(0, 1, 2))], experts=(5,))
    elif kind == "other-top-k":
        save(path, [("one", np.array([[[0, 1]]], np.uint16))])
    elif kind == "text":
        path.write_text("no trace\n", "utf-8")
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "ends before all"),
        ("text", "Invalid JSON"),
        ("missing", "cannot be read"),
        ("foreign", "two models: their fingerprints begin with 000000000000 and 111111111111"),
        ("other-layers", "same layers"),
        ("other-top-k", "same layers"),
    ],
)
def test_traces_that_cannot_be_used(
    kind: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = broken(tmp_path, kind)
    before = sorted(tmp_path.iterdir())
    assert run(tmp_path / "good.trace", path, "--out", tmp_path / "hot.json") == EXIT_FAILURE
    captured = capsys.readouterr()
    assert message in captured.err
    assert path.name in captured.err
    assert "Traceback" not in captured.err
    assert sorted(tmp_path.iterdir()) == before


def test_a_trace_that_is_given_twice_would_count_twice(tmp_path: Path) -> None:
    trace = save(tmp_path / "a.trace", [("one", ids(0, 1))])
    link = tmp_path / "b.trace"
    os.link(trace, link)
    for other in (trace, link):
        with pytest.raises(CannotPlan, match="given twice"):
            planning.plan(Request([trace, other], tmp_path / "hot.json", [25], 5), json=True)


def test_more_traces_than_memory_should_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MAX_SELECTIONS", 9)
    with pytest.raises(CannotPlan, match="more than 9 selections together"):
        planning.plan(Request(small(tmp_path), tmp_path / "hot.json", [25], 5), json=True)


class TestTarget:
    """Where the file goes."""

    @pytest.mark.parametrize("name", ["none/hot.json", "folder", "a.trace", "notes.txt", "/dev/null"])
    def test_what_cannot_be_written_is_said_before_any_work(self, name: str, tmp_path: Path) -> None:
        trace = save(tmp_path / "a.trace", [("one", ids(0, 1))])
        (tmp_path / "folder").mkdir()
        (tmp_path / "notes.txt").write_text("mine", "utf-8")
        before = trace.read_bytes()
        with pytest.raises(CannotPlan, match=r"cannot be written|is no hot set"):
            planning.plan(Request([trace, tmp_path / "missing.trace"], tmp_path / name, [25], 5), json=True)
        assert (trace.read_bytes(), (tmp_path / "notes.txt").read_text("utf-8")) == (before, "mine")

    def test_a_hot_set_is_replaced(self, tmp_path: Path) -> None:
        out = tmp_path / "hot.json"
        traces = small(tmp_path)
        for sizes in ([25.0], [50.0]):
            planning.plan(Request(traces, out, sizes, 5), json=True)
        assert [size.name for size in hot_set.read(out).sizes] == ["p50"]

    def test_a_hot_set_survives_what_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        out = tmp_path / "hot.json"
        traces = small(tmp_path)
        planning.plan(Request(traces, out, [25], 5), json=True)
        before = out.read_bytes()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "replace", full)
        assert run(*traces, "--out", out) == EXIT_FAILURE
        assert out.read_bytes() == before
        assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("25,25", CannotPlan, "names a size twice"),
        ("25,50,25.00000001", CannotPlan, "names a size twice"),
        ("0", CannotLearn, "not from 0.1 to 100"),
        ("50,101", CannotLearn, "not from 0.1 to 100"),
        ("nan", CannotLearn, "not from 0.1 to 100"),
        ("", CannotLearn, "no list of percentages"),
        ("p25", CannotLearn, "no list of percentages"),
        (",".join(map(str, range(1, 66))), CannotLearn, "65 percentages are too many"),
    ],
)
def test_sizes_that_make_no_sense(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        planning.percentages(text)


def test_sizes_are_sorted() -> None:
    assert planning.percentages("50, 12.5") == [12.5, 50]


@pytest.mark.parametrize("words", [["--hold-out", "1"], ["--hold-out", "101"], ["--hold-out", "a"]])
def test_parts_out_of_range_are_a_usage_error(words: list[str], tmp_path: Path) -> None:
    assert run(SIX, "--out", tmp_path / "hot.json", *words) == 2
    assert not list(tmp_path.iterdir())


def test_a_model_that_does_not_fit_the_traces(tmp_path: Path) -> None:
    request = Request(small(tmp_path), tmp_path / "hot.json", [25], 5, MODEL)
    with pytest.raises(CannotPlan, match="is not the model of the traces"):
        planning.plan(request, json=True)
    strange = save(tmp_path / "c.trace", [("one", ids(0, 1))], (4,), check(MODEL).fingerprint)
    with pytest.raises(CannotPlan, match="no set of 4 experts"):
        planning.plan(Request([strange], tmp_path / "hot.json", [25], 5, MODEL), json=True)
    assert not (tmp_path / "hot.json").exists()


def test_ctrl_c_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(held_out, "_count", interrupted)
    with pytest.raises(KeyboardInterrupt):
        planning.plan(Request([SIX], tmp_path / "hot.json", [25], 5), json=True)
    assert not list(tmp_path.iterdir())
