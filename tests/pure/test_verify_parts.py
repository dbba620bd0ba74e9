"""Comparing two computations: distances, scripts, and what is accepted; a comparison that cannot fail is none."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.verify import script, tolerance
from daemon.verify.compare import Distance, Logits, distance, flipped, kl
from daemon.verify.tolerance import FUSION_OFF, Rule, Standard, Tolerance, fuses

SAME = Distance(
    n_rows=200, identical=True, max_abs=0.0, kl_mean=0.0, kl_max=0.0, kl_unflipped=0.0, greedy=1.0, n_flipped=0
)
APART = replace(SAME, identical=False, max_abs=0.1)
Q4 = frozenset({"Q4_K", "F32"})
F32 = frozenset({"F32"})


def logits(*shape: int, seed: int = 1) -> Logits:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 3


def none(n: int) -> np.ndarray:
    return np.zeros(n, np.bool_)


class TestDistance:
    def test_divergence_is_that_of_its_definition(self) -> None:
        a, b = logits(3, 40), logits(3, 40, seed=2)
        p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(1, keepdims=True) for x in (a, b))
        np.testing.assert_allclose(kl(a, b), (p * np.log(p / q)).sum(1), rtol=1e-9)

    @given(st.integers(0, 1000), st.floats(1e-6, 10))
    def test_divergence_is_zero_only_for_the_same(self, seed: int, size: float) -> None:
        a = logits(2, 50, seed=seed)
        assert kl(a, a).max() == 0
        changed = a.copy()
        changed[:, 0] += np.float32(size)
        assert kl(a, changed).min() >= 0
        assert (kl(a, changed) > 0).all() or size < 1e-3

    def test_a_shift_of_all_logits_is_no_divergence_but_not_identical(self) -> None:
        a = logits(2, 50)
        apart = distance(a, a + 1, none(2))
        assert apart.kl_max < 1e-12
        assert not apart.identical
        assert apart.max_abs == pytest.approx(1, rel=1e-5)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_is_infinitely_far_away(self, value: float) -> None:
        a = logits(3, 20)
        b = a.copy()
        b[1, 4] = value
        apart = distance(a, b, none(3))
        assert (apart.kl_max, apart.max_abs, apart.kl_mean) == (np.inf, np.inf, np.inf)
        for rule in Rule:
            assert Tolerance(rule, 1.0).problem(apart)

    def test_flipped_rows_are_left_out_of_one_number_only(self) -> None:
        a, b = logits(4, 20), logits(4, 20)
        b[2] = -b[2]
        apart = distance(a, b, np.array([False, False, True, False]))
        assert apart.kl_unflipped == 0
        assert apart.kl_max > 0.1
        assert (apart.n_flipped, apart.flips, apart.greedy) == (1, 0.25, 0.75)
        assert distance(a, b, np.ones(4, np.bool_)).kl_unflipped == 0

    def test_a_flip_is_another_set_in_any_layer(self) -> None:
        one = np.array([[1, 2], [3, 4], [5, 6]], np.int32)
        reordered, other = one[:, ::-1], np.array([[1, 2], [3, 7], [5, 6]], np.int32)
        assert flipped([one, one], [one, reordered], 3).tolist() == [False] * 3
        assert flipped([one, one], [reordered, other], 3).tolist() == [False, True, False]
        assert flipped([], [], 3).tolist() == [False] * 3
        with pytest.raises(ValueError, match="zip"):
            flipped([one], [one, one], 3)


class TestScript:
    @pytest.mark.parametrize("bos", [None, 7])
    def test_sequences_have_no_gaps_and_begin_with_bos(self, bos: int | None) -> None:
        steps = script.long_script(range(100, 150), bos)
        cells: defaultdict[int, list[int]] = defaultdict(list)
        for step in steps:
            for token, position, seq_id in step.rows:
                assert position == len(cells[seq_id])
                cells[seq_id].append(token)
        assert set(cells) == set(range(script.N_SEQUENCES))
        assert all((tokens[0] == 7) is (bos is not None) for tokens in cells.values())

    def test_every_kind_of_step_is_there(self) -> None:
        steps = script.long_script([1, 2, 3])
        widths = {phase: {len(step.rows) for step in steps if step.phase == phase} for phase in script.PHASES}
        assert min(widths["prefill"]) >= 32
        assert widths["decode"] == {1}
        assert {4} < widths["sequences"]
        assert {9, 31} < widths["steps"]
        assert min(widths["steps"]) == 9
        assert max(widths["steps"]) == 31
        assert script.n_sequences(steps, "sequences") == 4
        assert script.n_sequences(steps, "decode") == 1
        assert sum(script.n_rows(steps, phase) for phase in script.PHASES) == script.n_rows(steps) < 512

    def test_one_by_one_computes_the_same_rows(self) -> None:
        steps = script.short_script([1, 2, 3], 4)
        alone = script.one_by_one(steps)
        assert [row for step in alone for row in step.rows] == [row for step in steps for row in step.rows]
        assert {len(step.rows) for step in alone} == {1}
        assert {seq_id for step in steps for _, _, seq_id in step.rows} == {4}


class TestTolerance:
    def test_a_device_that_rounds_alike_must_give_every_bit_where_nothing_moves(self) -> None:
        standard = Standard(Q4, True, 0.0, 1e-3)
        for limit in (standard.untouched(), standard.unmoved()):
            assert limit.problem(SAME) is None
            assert "identical" in (limit.problem(replace(APART, max_abs=1e-7)) or "")

    def test_stocks_own_path_must_give_every_bit_on_any_device(self) -> None:
        assert Standard(Q4, False, 0.5).untouched().problem(APART)

    def test_float_experts_stay_at_the_last_bit(self) -> None:
        limit = Standard(F32, True, 0.0).moved()
        assert limit.problem(replace(APART, kl_max=1e-8, kl_unflipped=1e-8)) is None
        assert limit.problem(replace(APART, kl_max=1.1e-8))
        # a flip is no excuse here
        assert limit.problem(replace(APART, kl_max=1e-3, kl_unflipped=0.0, n_flipped=1))

    def test_quantised_experts_may_flip_in_few_rows(self) -> None:
        limit = Standard(Q4, True, 0.0).moved()
        assert limit.problem(replace(APART, kl_max=9.0, kl_unflipped=1e-4, n_flipped=2)) is None
        assert "largest" in (limit.problem(replace(APART, kl_unflipped=1.1e-4)) or "")
        assert "1.5%" in (limit.problem(replace(APART, n_flipped=3)) or "")

    def test_stocks_own_last_bit_is_the_measure_where_it_matters_more(self) -> None:
        limit = Standard(Q4, True, 0.0, 1e-3).moved()
        assert limit.problem(replace(APART, kl_unflipped=1.9e-3)) is None
        assert limit.problem(replace(APART, kl_unflipped=2.1e-3))

    def test_a_card_is_measured_by_stocks_two_placements(self) -> None:
        standard = Standard(Q4, False, 1e-3)
        everything = replace(APART, n_flipped=200, kl_max=0.3, kl_unflipped=0.0)
        assert standard.moved().problem(replace(everything, kl_mean=2e-3)) is None
        assert "mean" in (standard.moved().problem(replace(everything, kl_mean=2.1e-3)) or "")
        assert standard.unmoved().problem(replace(everything, kl_mean=1e-4)) is None
        assert standard.unmoved().problem(replace(everything, kl_mean=2e-4))

    def test_without_stocks_own_difference_a_coarse_limit_is_left(self) -> None:
        for limit in (Standard(Q4, False, None).moved(), Standard(Q4, False, None).unmoved()):
            assert limit.problem(replace(APART, kl_mean=tolerance.KL_COARSE)) is None
            assert limit.problem(replace(APART, kl_mean=1.1 * tolerance.KL_COARSE))

    def test_a_device_that_adds_in_a_fused_kernel_may_differ_by_stocks_own_noise(self) -> None:
        plain, fused = Standard(Q4, False, 1e-3), Standard(Q4, False, 1e-3, fuses=True)
        assert plain.summed() == plain.unmoved()
        assert fused.summed() == fused.moved() != fused.unmoved()
        assert fused.untouched() == plain.untouched()
        assert Standard(Q4, True, 0.0, fuses=True).summed().rule is Rule.IDENTICAL

    @pytest.mark.parametrize(
        ("device", "off", "expected"),
        [("CUDA0", None, True), ("ROCm1", "0", True), ("CUDA0", "1", False), ("CUDA0", "no", True), ("CUDA0", "", True),
         ("Vulkan0", None, False), ("RPC0", None, False)],
    )  # fmt: skip
    def test_who_fuses(self, device: str, off: str | None, expected: bool) -> None:
        assert fuses(device, {} if off is None else {FUSION_OFF: off}) is expected

    def test_only_quantised_experts_on_a_device_that_rounds_alike_need_stocks_own_noise(self) -> None:
        assert Standard(Q4, True, 0.0).needs_own
        assert not Standard(F32, True, 0.0).needs_own
        assert not Standard(Q4, False, 1e-3).needs_own


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    report = pytest.importorskip("hotset_tools.verify.report")
    assert [report._finite(value) for value in (1.5, np.inf, np.nan)] == [1.5, None, None]
    json.dumps(report._finite(np.inf), allow_nan=False)
