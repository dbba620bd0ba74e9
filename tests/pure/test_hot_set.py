"""hot_set.json, budgets, and the choice of experts: every fault is listed, every budget is kept."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daemon.hotset import hot_set, placement, trace, whole_layers
from daemon.hotset.budget import MIB, Auto, Bytes, Share, SizeOf, of_device, parse, parse_all
from daemon.hotset.hot_set import HotSet, HotSetUnusable
from daemon.hotset.placement import ExpertLayer
from daemon.hotset.reserve import Reserve, Spare
from daemon.hotset.trace import TraceUnusable

PRINT = "0123456789abcdef" * 4
N_EXPERT = 8
KEYS = ("format", "model", "learned_from", "sizes", "name", "coverage", "layers", "layer", "set", "experts", "x")


def document(**changes: Any) -> dict[str, Any]:
    layers = [{"layer": layer, "experts": [5, 3, 0, 7]} for layer in (1, 2)]
    whole = [{"layer": layer, "experts": [5, 3, 0, 7, 1, 2, 4, 6]} for layer in (1, 2)]
    sizes = [{"name": "half", "coverage": 0.7, "layers": layers}, {"name": "all", "layers": whole}]
    return {"format": 1, "model": {"fingerprint": PRINT}, "sizes": sizes} | changes


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "hot.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return path


def faults_of(tmp_path: Path, content: object) -> list[str]:
    with pytest.raises(HotSetUnusable) as caught:
        hot_set.read(written(tmp_path, content))
    assert "hot.json" in caught.value.message
    assert str(tmp_path) not in caught.value.message
    return caught.value.faults


def test_a_good_file_is_read(tmp_path: Path) -> None:
    read = hot_set.read(written(tmp_path, document()))
    assert [size.n_experts for size in read.sizes] == [8, 16]
    assert (read.largest.name, read.size("none")) == ("all", None)
    assert hot_set.faults(read, PRINT, {(1, 0): 8, (2, 0): 8}) == []


def test_what_is_no_json_or_no_file(tmp_path: Path) -> None:
    assert "JSON" in faults_of(tmp_path, "{")[0]
    assert faults_of(tmp_path, "[]")
    with pytest.raises(HotSetUnusable, match="cannot be read"):
        hot_set.read(tmp_path / "none.json")
    with pytest.raises(HotSetUnusable, match="cannot be read"):
        hot_set.read(tmp_path)


def test_what_might_never_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(HotSetUnusable, match="no regular file"):
            hot_set.read(path)
        with pytest.raises(TraceUnusable, match="no regular file"):
            trace.read(path)


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "hot.json"
    with path.open("wb") as file:
        file.truncate(hot_set.MAX_BYTES + 1)
    with pytest.raises(HotSetUnusable, match="more than"):
        hot_set.read(path)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"format": 2}, "format: "),
        ({"sizes": []}, "sizes: "),
        ({"model": {"fingerprint": "short"}}, "model.fingerprint: "),
        ({"extra": 1}, "extra: there is no such field"),
        ({"sizes": [{"name": "a", "layers": [{"layer": 0, "experts": [-1]}]}]}, "sizes.0.layers.0.experts.0: "),
        ({"sizes": [{"name": "a", "layers": [{"layer": 0, "experts": [1.5]}]}]}, "sizes.0.layers.0.experts.0: "),
        ({"sizes": [{"name": "50", "layers": []}]}, "'50' is no name"),
        ({"sizes": [{"name": "auto", "layers": []}]}, "'auto' is no name"),
    ],
)
def test_a_fault_names_its_place(changes: dict[str, Any], fault: str, tmp_path: Path) -> None:
    assert any(found.startswith(fault) for found in faults_of(tmp_path, document(**changes)))


def test_all_faults_of_the_file_are_listed(tmp_path: Path) -> None:
    layer = {"layer": 4, "experts": [1, 2, 1, 2]}
    size = {"name": "a", "layers": [layer, layer]}
    found = faults_of(tmp_path, document(sizes=[size, size]))
    assert found[0] == "size a is there twice"
    assert "size a: layer 4 is there twice" in found
    assert "size a: layer 4 names experts 1, 2 twice" in found


def test_all_faults_beside_the_model_are_listed() -> None:
    read = HotSet.model_validate(document())
    assert hot_set.faults(read, PRINT, {(1, 0): 4}) == [
        "size half: layer 1 has 4 experts, not experts 5, 7",
        "size half: layer 2 has no routed experts in this model",
        "size all: layer 1 has 4 experts, not experts 5, 7, 4, 6",
        "size all: layer 2 has no routed experts in this model",
    ]
    (other,) = hot_set.faults(read, "f" * 64, {})
    assert "another model" in other


def test_a_message_stays_short_however_much_is_wrong() -> None:
    assert len(HotSetUnusable("hot.json", ["something is wrong"] * 10_000).message) < 1000
    (fault,) = HotSetUnusable("hot.json", ["x" * 100_000]).faults
    assert len(fault) < 300


def test_names_in_a_file_do_not_reach_the_terminal_as_they_are(tmp_path: Path) -> None:
    found = faults_of(tmp_path, document(**{"\x1b[31mred\nnext": 1}))
    assert found == ["?[31mred?next: there is no such field"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=20,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine draws slowly
@given(st.dictionaries(st.sampled_from(KEYS), JSON))
def test_whatever_the_file_holds_it_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    path = tmp_path_factory.mktemp("any") / "hot.json"
    for whole in (content, document() | content):
        path.write_text(json.dumps(whole), "utf-8")
        with contextlib.suppress(HotSetUnusable):
            hot_set.faults(hot_set.read(path), PRINT, {(1, 0): 8})


@given(st.binary(max_size=40), st.integers(0, 400), st.integers(0, 40))
def test_a_damaged_file_is_refused_or_still_good(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, at: int, n: int
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "hot.json"
    whole = json.dumps(document()).encode()
    path.write_bytes(whole[:at] + junk + whole[at + n :])
    with contextlib.suppress(HotSetUnusable):
        hot_set.read(path)


def test_a_deep_or_endless_file_is_refused(tmp_path: Path) -> None:
    for text in ("[" * 100_000, '{"format":' * 100_000, "9" * 100_000):
        assert faults_of(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("50%", Share(0.5)),
        ("12.5 %", Share(0.125)),
        ("4096", Bytes(4096 * MIB)),
        (" 1.5 MiB ", Bytes(3 * MIB // 2)),
        ("half", SizeOf("half")),
        ("p25", SizeOf("p25")),
        (" auto ", Auto()),
        ("0", Bytes(0)),
        ("16777216", Bytes(16_777_216 * MIB)),
        ("123456.789", Bytes(round(123456.789 * MIB))),
    ],
)
def test_budgets_are_read(text: str, budget: object) -> None:
    assert parse(text) == budget
    assert parse(str(parse(text))) == budget


@pytest.mark.parametrize(
    "text", ["", "101%", "-1", "1e3", "50 %%", "4 GiB", "99999999", "\u0665%", "a b", "auto%", "auto 5"]
)
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(text)


def test_budgets_by_device() -> None:
    table = {"Vulkan0": "50%", "Vulkan1": 100}
    expected = {"Vulkan0": Share(0.5), "Vulkan1": Bytes(100 * MIB)}
    assert parse_all(table) == parse_all("Vulkan0=50%, Vulkan1=100") == expected
    assert parse_all("Vulkan0=auto,Vulkan1=1") == {"Vulkan0": Auto(), "Vulkan1": Bytes(MIB)}
    assert parse_all("auto") == {"": Auto()}
    assert of_device(parse_all(table), "Vulkan2") is None
    assert of_device(parse_all("half"), "Vulkan2") == SizeOf("half")
    assert parse_all("") == {}
    assert parse_all(0) == {"": Bytes(0)}
    tables = ({"a": 1, " a ": 2}, {"": 5}, {"a": True}, {"a": {}})
    for wrong in ("=50%", "a=", "a=1,a=2", "a=1,", *tables, 1.5, True, float("nan"), ["50%"]):
        with pytest.raises(ValueError, match=r"."):
            parse_all(wrong)


def layers_of(devices: Sequence[str], expert_bytes: Sequence[int] = ()) -> list[ExpertLayer]:
    sizes = expert_bytes or [MIB] * len(devices)
    return [
        ExpertLayer(i, (i + 1, 0), N_EXPERT, size, device)
        for i, (device, size) in enumerate(zip(devices, sizes, strict=True))
    ]


def spare(device: str, n_bytes: int) -> Spare:
    return Spare(n_bytes, Reserve(0, "0 MiB", "a test"), f"{device} has {n_bytes // MIB} MiB to spare")


def made(hot: HotSet, layers: list[ExpertLayer], vram: Any, **free: int) -> placement.Plan:
    return placement.plan(hot, layers, parse_all(vram), {name: spare(name, n) for name, n in free.items()})


def test_a_size_gives_its_experts_and_a_percentage_the_first_of_the_largest() -> None:
    hot, layers = HotSet.model_validate(document()), layers_of("AA")
    assert made(hot, layers, "half").experts == {0: [5, 3, 0, 7], 1: [5, 3, 0, 7]}
    assert made(hot, layers, "25%").experts == {0: [5, 3], 1: [5, 3]}
    assert made(hot, layers, "100%").slots(3) == [8, 8, 0]
    (account,) = made(hot, layers, "half").devices
    assert account == placement.DevicePlan("A", "half", asked_bytes=10 * MIB, effective_bytes=10 * MIB, why="")


def test_mib_are_shared_by_the_layers_and_the_zero_slot_counts() -> None:
    hot, layers = HotSet.model_validate(document()), layers_of("AA")
    assert made(hot, layers, 3).slots(2) == [1, 0]
    assert made(hot, layers, 7).slots(2) == [3, 2]
    assert made(hot, layers, 17).slots(2) == [8, 7]
    assert made(hot, layers, 18).slots(2) == [8, 8]
    assert made(hot, layers, 1).experts == {}


def test_what_is_free_and_what_is_listed_limit_the_rest_and_it_is_said() -> None:
    hot, layers = HotSet.model_validate(document()), layers_of("AA")
    (short,) = made(hot, layers, "half", A=6 * MIB).devices
    assert (short.effective_bytes, short.why) == (6 * MIB, "A has 6 MiB to spare")
    few = HotSet.model_validate(document(sizes=document()["sizes"][:1]))
    for vram in ("75%", 100):
        (account,) = made(few, layers, vram).devices
        assert (account.effective_bytes, account.why) == (10 * MIB, "the hot set's size half lists no more experts")
    assert made(few, layers, "50%").devices[0].why == ""
    empty = HotSet.model_validate(document(sizes=[{"name": "none", "layers": []}]))
    said = placement.no_room(made(empty, layers, "none"))
    assert said.endswith("A was asked for none, but the hot set's size none lists no expert of its layers")
    assert placement.TOO_LITTLE in placement.no_room(made(hot, layers, 1))


def test_auto_takes_what_a_device_has_to_spare_up_to_all_experts() -> None:
    hot, layers = HotSet.model_validate(document()), layers_of("AB")
    plan = made(hot, layers, "auto", A=4 * MIB)
    first, second = plan.devices
    assert plan.slots(2) == [3, 8]
    assert (first.asked, first.asked_bytes, first.effective_bytes) == ("auto", 9 * MIB, 4 * MIB)
    assert first.why == "A has 4 MiB to spare"
    assert second == placement.DevicePlan("B", "auto", asked_bytes=9 * MIB, effective_bytes=9 * MIB, why="")
    mixed = made(hot, layers, {"A": "auto", "B": "25%"}, A=9 * MIB)
    assert (mixed.slots(2), [one.why for one in mixed.devices]) == ([8, 2], ["", ""])
    assert mixed.devices[0].spare == spare("A", 9 * MIB)


def test_auto_with_room_for_more_than_the_hot_set_lists_says_that() -> None:
    layers = layers_of("AA")
    few = HotSet.model_validate(document(sizes=document()["sizes"][:1]))
    for free in (10, 17, 18):
        (account,) = made(few, layers, "auto", A=free * MIB).devices
        assert (account.effective_bytes, account.why) == (10 * MIB, "the hot set's size half lists no more experts")
    (short,) = made(few, layers, "auto", A=9 * MIB).devices
    assert (short.effective_bytes, short.why) == (9 * MIB, "A has 9 MiB to spare")


def test_auto_where_nothing_is_to_spare_gives_the_reason_of_the_device() -> None:
    hot, layers = HotSet.model_validate(document()), layers_of("AA")
    plan = made(hot, layers, "auto", A=0)
    assert plan.n_experts == 0
    assert placement.no_room(plan).endswith("A was asked for auto, but A has 0 MiB to spare")


def test_every_device_has_its_own_budget() -> None:
    hot, layers = HotSet.model_validate(document()), layers_of("AB")
    plan = made(hot, layers, {"A": "half", "C": 10})
    assert plan.slots(2) == [4, 0]
    assert [one.device for one in plan.devices] == ["A", "B"]
    assert "no budget" in plan.devices[1].why
    assert made(hot, layers, 3).slots(2) == [2, 2]


def test_layers_that_are_wholly_on_the_device_are_paid_from_its_budget() -> None:
    hot, (first, second) = HotSet.model_validate(document()), layers_of("AA")
    wholly = ExpertLayer(1, second.key, N_EXPERT, MIB, "A", wholly=True)
    plan = made(hot, [first, wholly], 12)
    assert plan.slots(2) == [3, 0]
    assert plan.devices[0].effective_bytes == 12 * MIB


def test_sizes_that_are_not_there_are_named() -> None:
    hot = HotSet.model_validate(document())
    assert placement.unknown_sizes(hot, parse_all({"A": "half", "B": "50%"})) == []
    assert placement.unknown_sizes(hot, parse_all("tiny")) == ["there is no size tiny; its sizes are half, all"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[HotSet, list[ExpertLayer]]:
    n_layer = draw(st.integers(1, 6))
    lists = [draw(st.lists(st.integers(0, N_EXPERT - 1), unique=True, max_size=N_EXPERT)) for _ in range(n_layer)]
    entries = [{"layer": i + 1, "experts": experts} for i, experts in enumerate(lists)]
    devices = draw(st.lists(st.sampled_from("AB"), min_size=n_layer, max_size=n_layer))
    sizes = draw(st.lists(st.integers(1, 5 * MIB), min_size=n_layer, max_size=n_layer))
    return HotSet.model_validate(document(sizes=[{"name": "x", "layers": entries}])), layers_of(devices, sizes)


@given(cases(), st.integers(0, 100 * MIB))
def test_auto_stays_within_what_is_to_spare_and_takes_what_a_number_would(
    case: tuple[HotSet, list[ExpertLayer]], free: int
) -> None:
    hot, layers = case
    plan = made(hot, layers, "auto", A=free, B=free)
    assert plan.experts == made(hot, layers, 1000, A=free, B=free).experts
    assert all(account.effective_bytes <= min(free, account.asked_bytes) for account in plan.devices)


@given(cases(), st.integers(0, 100), st.integers(0, 100 * MIB))
def test_no_budget_is_exceeded_and_every_layer_gets_the_first_of_its_list(
    case: tuple[HotSet, list[ExpertLayer]], mib: int, free: int
) -> None:
    hot, layers = case
    plan = made(hot, layers, mib, A=free)
    ranking = hot.sizes[0].by_layer()
    for account in plan.devices:
        own = [layer for layer in layers if layer.device == account.device]
        used = sum(layer.slot_bytes(len(plan.experts.get(layer.index, ()))) for layer in own)
        assert used == account.effective_bytes <= min(mib * MIB, free if account.device == "A" else mib * MIB)
        assert account.asked_bytes == mib * MIB
    for layer in layers:
        chosen = list(plan.experts.get(layer.index, ()))
        assert chosen == ranking[layer.key][: len(chosen)]


@given(cases(), st.integers(0, 60), st.integers(0, 60))
def test_more_memory_never_takes_an_expert_away(case: tuple[HotSet, list[ExpertLayer]], a: int, b: int) -> None:
    hot, layers = case
    less, more = (made(hot, layers, mib).slots(len(layers)) for mib in sorted((a, b)))
    assert all(x <= y for x, y in zip(less, more, strict=True))


@given(cases(), st.integers(0, 60))
def test_a_layer_is_ahead_of_another_by_one_expert_at_most(case: tuple[HotSet, list[ExpertLayer]], mib: int) -> None:
    hot, layers = case
    plan, ranking = made(hot, layers, mib), hot.sizes[0].by_layer()
    for device in "AB":
        own = [(len(plan.experts.get(one.index, ())), len(ranking[one.key])) for one in layers if one.device == device]
        for n, size in own:
            for m, other in own:
                if n and other:
                    assert (n - 1) / size <= (m + 1) / other


def test_layers_belong_to_devices_as_llama_cpp_splits_them() -> None:
    def split(*arguments: Any) -> list[int | None]:
        return [whole_layers.device_of_layer(layer, 4, *arguments) for layer in range(4)]

    assert split(-1, [1, 1]) == [0, 0, 0, 1]
    assert split(2, [5]) == [None, None, None, 0]
    assert split(0, [5]) == [None] * 4
    assert split(99, [3, 1]) == [0, 0, 0, 0]
    assert split(-1, []) == [None] * 4


def test_as_many_last_layers_as_memory_lacks_go_to_their_device_alone() -> None:
    layers = layers_of("AABB")
    assert whole_layers.choose(layers, 0, {"A": 100 * MIB, "B": 100 * MIB}) == []
    assert whole_layers.choose(layers, 9 * MIB, {"A": 100 * MIB, "B": 100 * MIB}) == [4, 3]
    assert whole_layers.choose(layers, 9 * MIB, {"A": 8 * MIB, "B": 8 * MIB}) == [4, 2]
    assert whole_layers.choose(layers, 1, {"A": 7 * MIB}) == []


def test_two_sets_of_a_layer_go_together() -> None:
    layers = [ExpertLayer(i, (0, i), N_EXPERT, MIB, "A") for i in (0, 1)]
    assert whole_layers.choose(layers, 1, {"A": 15 * MIB}) == []
    assert whole_layers.choose(layers, 1, {"A": 16 * MIB}) == [0]
