"""From what a processor announces to compiler options, and down the ladder when it lied."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.native.cpuinfo import GGML_FLAGS, announced
from hotset_tools import cpuflags

SAPPHIRE_RAPIDS = (
    "flags\t\t: fpu sse4_2 avx f16c fma bmi2 avx2 avx_vnni avx512f avx512cd avx512vl avx512dq avx512bw avx512_vbmi2 "
    "avx512vbmi avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16\n"
)
HASWELL = "flags\t\t: fpu sse4_2 avx f16c fma bmi2 avx2\n"
ARM = "Features\t: fp asimd evtstrm aes\n"


def test_everything_announced_is_found() -> None:
    assert announced(SAPPHIRE_RAPIDS) == frozenset(GGML_FLAGS)


def test_the_kernel_spells_vbmi_without_an_underscore_and_vbmi2_is_not_vbmi() -> None:
    assert "AVX512_VBMI" in announced("flags : avx512vbmi\n")
    assert "AVX512_VBMI" not in announced("flags : avx512_vbmi2\n")


def test_avx512_needs_all_five_subsets_that_ggml_turns_on() -> None:
    assert "AVX512" not in announced(SAPPHIRE_RAPIDS.replace("avx512dq ", ""))


def test_only_what_every_core_has_counts() -> None:
    assert announced(SAPPHIRE_RAPIDS + HASWELL) == {"SSE42", "AVX", "F16C", "FMA", "BMI2", "AVX2"}


def test_a_text_without_x86_flags_announces_nothing() -> None:
    assert announced(ARM) == frozenset()


def test_a_set_whose_needs_are_hidden_is_not_believed() -> None:
    chosen = cpuflags.choose(announced(SAPPHIRE_RAPIDS) - {"AVX512"})
    assert not {flag for flag in chosen if flag.startswith(("AVX512", "AMX"))}
    assert "AVX_VNNI" in chosen


def test_off_x86_ggml_chooses() -> None:
    assert cpuflags.choose([], x86=False) == {"NATIVE"}
    assert cpuflags.cmake_options(frozenset({"NATIVE"})) == {"GGML_NATIVE": "ON"}
    assert cpuflags.ladder(frozenset({"NATIVE"})) == [{"NATIVE"}, frozenset()]


def test_the_ladder_leaves_out_amx_then_avx512_then_the_rest() -> None:
    steps = cpuflags.ladder(frozenset(GGML_FLAGS))
    gone = [before - after for before, after in itertools.pairwise(steps)]
    assert gone == [
        {"AMX_TILE", "AMX_INT8", "AMX_BF16"},
        {"AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16"},
        {"AVX_VNNI"},
        {"AVX2", "FMA", "BMI2", "F16C"},
        {"AVX"},
    ]


def test_steps_that_change_nothing_are_skipped() -> None:
    assert len(cpuflags.ladder(cpuflags.choose(announced(HASWELL)))) == 3


@given(st.frozensets(st.sampled_from(sorted(GGML_FLAGS))))
def test_every_step_is_smaller_and_consistent(flags: frozenset[str]) -> None:
    steps = cpuflags.ladder(cpuflags.choose(flags))
    assert all(after < before for before, after in itertools.pairwise(steps))
    assert all(cpuflags.choose(step) == step for step in steps)


@given(st.frozensets(st.sampled_from(sorted(GGML_FLAGS))))
def test_every_option_is_spelled_out_and_never_native(flags: frozenset[str]) -> None:
    options = cpuflags.cmake_options(flags)
    assert options.pop("GGML_NATIVE") == "OFF"
    assert options == {f"GGML_{flag}": "ON" if flag in flags else "OFF" for flag in GGML_FLAGS}


@pytest.mark.parametrize(("flags", "text"), [(["AVX2", "AVX"], "AVX AVX2"), (["NATIVE"], "NATIVE"), ([], "baseline")])
def test_description_keeps_the_order_of_the_table(flags: list[str], text: str) -> None:
    assert cpuflags.describe(flags) == text
