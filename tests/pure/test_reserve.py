"""What stays free of a device, and what is left for experts: small cards, displays, shared memory, wrong counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.engine import spare as spares
from daemon.hotset.budget import MIB, Auto, Bytes, Share
from daemon.hotset.reserve import GIB, Memory, Pool, Ram, free, of_device, parse, parse_all, reserve, spare
from daemon.messages import Card, Device

RAM = Ram(32 * GIB, 20 * GIB)
CARD = Memory(free=20 * GIB, total=24 * GIB, display="none")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("auto", Auto()), (" 1024 ", Bytes(GIB)), ("1024 MiB", Bytes(GIB)), ("0", Bytes(0)), ("1.5MiB", Bytes(3 << 19))],
)
def test_reserves_are_read(text: str, expected: object) -> None:
    assert parse(text) == expected
    assert parse(str(parse(text))) == expected


@pytest.mark.parametrize("text", ["", "-1", "10%", "auto%", "half", "1 GiB", "99999999", "AUTO", "nan", "1e3"])
def test_what_is_no_reserve_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither auto nor a number of MiB|at most 16777216 MiB"):
        parse(text)


def test_reserves_by_device() -> None:
    table = {"Vulkan0": "auto", "Vulkan1": 512}
    assert parse_all(table) == parse_all("Vulkan0=auto, Vulkan1=512 MiB")
    assert of_device(parse_all(table), "Vulkan1") == Bytes(512 * MIB)
    assert of_device(parse_all(table), "Vulkan2") == Auto()
    assert of_device(parse_all(100), "Vulkan2") == Bytes(100 * MIB)
    assert parse_all({}) == {}
    for wrong in ("", " ", "=1", "a=", "a=1,a=2", {"": 5}, {"a": "10%"}, 1.5, True, -1, [], None, {"a": None}):
        with pytest.raises(ValueError, match=r"."):
            parse_all(wrong)


@pytest.mark.parametrize(
    ("total", "display", "kept"),
    [
        (2 * GIB, "none", 256 * MIB), (4 * GIB, "none", 512 * MIB), (8 * GIB, "none", GIB), (140 * GIB, "none", GIB),
        (24 * GIB, "unknown", GIB), (2 * GIB, "connected", 512 * MIB), (4 * GIB, "connected", GIB),
        (6 * GIB, "connected", 1536 * MIB), (12 * GIB, "boot", 1536 * MIB), (16 * GIB, "connected", 2 * GIB),
        (24 * GIB, "boot", 3 * GIB), (80 * GIB, "connected", 3 * GIB),
    ],
)  # fmt: skip
def test_a_display_is_kept_more_and_a_small_card_loses_a_quarter_at_most(total: int, display: Any, kept: int) -> None:
    memory = Memory(free=total, total=total, display=display)
    found = reserve(Auto(), memory)
    assert (found.n_bytes, found.asked) == (kept, "auto")
    assert ("display" in found.why) is (display in ("connected", "boot"))


def test_rpc_devices_keep_little_whatever_their_card_would() -> None:
    remote = replace(CARD, remote=True, display="connected", integrated=True, vram=Pool(GIB, 2 * GIB))
    assert reserve(Auto(), remote).n_bytes == 256 * MIB
    assert reserve(Auto(), replace(remote, total=64 * MIB)).n_bytes == 8 * MIB
    assert not remote.shared
    assert free(remote, RAM) == 20 * GIB


def test_an_explicit_reserve_is_kept_as_it_is() -> None:
    for memory in (CARD, replace(CARD, display="connected"), replace(CARD, total=GIB), replace(CARD, remote=True)):
        found = reserve(Bytes(5 * GIB), memory)
        assert (found.n_bytes, found.asked, found.why) == (5 * GIB, "5120 MiB", "residency.reserve")


def test_the_smallest_count_of_free_memory_is_the_one() -> None:
    busy = replace(CARD, vram=Pool(15 * GIB, 24 * GIB), gtt=Pool(0, 16 * GIB))
    assert free(busy, RAM) == 9 * GIB
    assert free(replace(busy, free=8 * GIB), RAM) == 8 * GIB
    assert free(replace(CARD, free=2**64 - MIB), RAM) == 0, "a budget below what is in use, subtracted without a sign"
    assert free(Memory(free=32 * GIB, total=32 * GIB, remote=True), RAM) == 20 * GIB, "a CPU of this machine"


@pytest.mark.parametrize(
    "changes",
    [
        {"integrated": True, "free": 14 * GIB, "total": 16 * GIB},
        {"vram": Pool(0, 512 * MIB), "gtt": Pool(0, 15 * GIB), "free": 500 * MIB, "total": 512 * MIB},
        {"vram": Pool(0, 4 * GIB), "gtt": Pool(0, 14 * GIB), "free": 14 * GIB, "total": 14 * GIB},
    ],
)
def test_an_apu_is_recognised_and_auto_gives_it_nothing(changes: dict[str, Any]) -> None:
    apu = replace(CARD, **changes)
    found = spare("V0", Auto(), Auto(), apu, RAM)
    assert (found.n_bytes, found.refused, found.shared) == (0, True, True)
    assert "its memory is the CPU's" in found.why
    assert "engine.cpu_moe_layers = 0" in found.why
    explicit = spare("V0", Share(0.5), Auto(), apu, RAM)
    assert explicit.shared
    assert not explicit.refused
    assert explicit.n_bytes is not None
    assert 0 < explicit.n_bytes < apu.total


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vram": Pool(0, 24 * GIB), "gtt": Pool(0, 16 * GIB)},
        {"vram": Pool(0, 2 * GIB), "gtt": Pool(0, 16 * GIB), "free": 2 * GIB, "total": 2 * GIB},
        {"vram": Pool(0, 512 * MIB), "free": 500 * MIB, "total": 512 * MIB},
    ],
)
def test_a_card_with_memory_of_its_own_is_none(changes: dict[str, Any]) -> None:
    found = spare("V0", Auto(), Auto(), replace(CARD, **changes), RAM)
    assert not found.shared
    assert not found.refused


def test_an_explicit_budget_on_shared_memory_ends_at_gtt_and_at_ram() -> None:
    apu = Memory(15 * GIB, 17 * GIB, integrated=True, vram=Pool(GIB // 2, GIB), gtt=Pool(4 * GIB, 16 * GIB))
    assert free(apu, RAM) == 12 * GIB + GIB // 2
    assert free(apu, Ram(32 * GIB, 3 * GIB)) == 3 * GIB + GIB // 2
    assert free(replace(apu, free=GIB), RAM) == GIB
    intel = Memory(15 * GIB, 16 * GIB, integrated=True)
    assert free(intel, Ram(16 * GIB, 6 * GIB)) == 6 * GIB


def test_the_limit_is_explained_with_numbers() -> None:
    found = spare("V0", Bytes(30 * GIB), Auto(), replace(CARD, display="connected"), RAM)
    assert found.n_bytes == 17 * GIB
    assert found.why == ("V0 has 17408 MiB to spare: 20480 MiB are free, 3072 MiB stay so (for the display on it)")
    little = spare("V0", Bytes(30 * GIB), Bytes(21 * GIB), CARD, RAM)
    assert (little.n_bytes, little.refused) == (0, False)
    assert little.why == "V0 has 0 MiB to spare: 20480 MiB are free, 21504 MiB stay so (residency.reserve)"


def test_what_experts_hold_already_is_given_only_as_far_as_the_reserve_leaves_it() -> None:
    found = spare("V0", Bytes(30 * GIB), Bytes(21 * GIB), CARD, RAM, held=4 * GIB)
    assert found.n_bytes == 3 * GIB
    assert found.why == (
        "V0 has 3072 MiB to spare: 24576 MiB are free or hold experts, 21504 MiB stay free (residency.reserve)"
    )
    assert spare("V0", Bytes(30 * GIB), Bytes(25 * GIB), CARD, RAM, held=4 * GIB).n_bytes == 0
    apu = replace(CARD, integrated=True)
    assert spare("V0", Auto(), Auto(), apu, RAM, held=4 * GIB).n_bytes == 0, "refused is refused"


def test_a_device_that_does_not_tell_limits_numbers_by_failing_and_refuses_auto() -> None:
    silent = Memory(0, 0)
    assert spare("V0", Bytes(GIB), Auto(), silent, RAM).n_bytes is None
    found = spare("V0", Auto(), Auto(), silent, RAM)
    assert (found.n_bytes, found.refused) == (0, True)
    assert "give MiB or a percentage" in found.why


POOLS = st.none() | st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)).map(lambda two: Pool(min(two), max(two)))


@given(
    st.builds(
        Memory, free=st.integers(0, 2**64 - 1), total=st.integers(1, 2**40), integrated=st.booleans(),
        remote=st.booleans(), display=st.sampled_from(["connected", "boot", "none", "unknown"]), vram=POOLS, gtt=POOLS,
    ),
    st.one_of(st.just(Auto()), st.integers(0, 2**40).map(Bytes)),
    st.builds(Ram, total=st.integers(1, 2**40), available=st.integers(0, 2**40)),
)  # fmt: skip
def test_what_is_to_spare_leaves_the_reserve(memory: Memory, asked: Auto | Bytes, ram: Ram) -> None:
    found = spare("V0", Share(1.0), asked, memory, ram)
    kept = reserve(asked, memory)
    assert found.n_bytes is not None
    assert 0 <= found.n_bytes <= max(0, free(memory, ram) - kept.n_bytes) <= memory.total
    if isinstance(asked, Auto):
        assert kept.n_bytes <= memory.total // 4


def test_facts_of_a_device() -> None:
    card = Card(display="connected", vram_used=1, vram_total=10, gtt_used=None, gtt_total=None)
    device = Device(name="V0", description="", kind="gpu", memory_free=5, memory_total=10, card=card)
    assert spares.facts(device) == Memory(5, 10, display="connected", vram=Pool(1, 10))
    assert spares.facts(device.model_copy(update={"card": None, "kind": "igpu"})) == Memory(5, 10, integrated=True)
    both = [device, device.model_copy(update={"name": "V1"})]
    found = spares.by_device(both, {"V0": Auto()}, parse_all({"V1": 0}))
    assert {name: one.reserve.asked for name, one in found.items()} == {"V0": "auto", "V1": "0 MiB"}
