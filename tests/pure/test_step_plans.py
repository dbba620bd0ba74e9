"""How much of a prompt a step takes, and when."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.engine.scheduler import SMALLEST_PIECE, TIMED_AGAIN, Kind, Scheduler, StepPlan, Work
from daemon.engine.step_prices import FIRST_TRIED
from daemon.hotset.controller import WIDEST_PARTIAL
from daemon.messages import Scheduling
from tests.scheduling_replay import (
    Arrival,
    FirstComeFirstServed,
    Machine,
    Replayed,
    chats_and_long_prompts,
    cpu,
    linear,
    replay,
    resident,
    spilled,
    steady,
)


def work(*, decoding: int, prompts: tuple[int, ...] = (), rank: int = 1) -> list[Work]:
    rows = [Work(i, i, 1, True) for i in range(decoding)]
    return rows + [Work(decoding + i, decoding + i, n, False, rank) for i, n in enumerate(prompts)]


def taught(machine: Machine = linear, settings: Scheduling | None = None, n_ubatch: int = 512) -> Scheduler:
    """A scheduler that knows a machine."""
    scheduler = Scheduler(n_ubatch, settings)
    for width in range(1, 9):
        for n in (8, 16, 24, 64, 256, 500):
            scheduler.prices.observe(width, n - width if n > width else 1, machine(max(n, width + 1)))
    for width in [*range(1, 9)] * 3:
        scheduler.prices.observe(width, 0, machine(width))
    return scheduler


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.booleans(), st.integers(0, 2)), max_size=80),
    st.integers(32, 512),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 500), st.floats(1e-6, 5)), max_size=30),
    st.floats(1.1, 100), st.floats(0.05, 0.95),
)  # fmt: skip
def test_a_plan_fits_takes_nothing_twice_and_always_computes_something(
    seqs: list[tuple[int, bool, int]],
    n_ubatch: int,
    seen: list[tuple[int, int, float]],
    factor: float,
    share: float,
) -> None:
    scheduler = Scheduler(n_ubatch, Scheduling(target_latency=factor, decode_share=share))
    for n_decode, n_prompt, seconds in seen:
        if n_decode + n_prompt:
            scheduler.prices.observe(n_decode, n_prompt, seconds)
    running = [Work(i, 100 + i, 1 if decoding else n, decoding, rank) for i, (n, decoding, rank) in enumerate(seqs)]
    for _ in range(4):
        plan = scheduler.plan(running)
        assert plan == scheduler.plan(running), "a plan changes nothing"
        parts = dict(plan.parts)
        assert len(parts) == len(plan.parts)
        assert plan.n_tokens == sum(parts.values()) <= n_ubatch
        assert all(1 <= n <= running[i].n_left for i, n in parts.items())
        rows = [i for i in parts if running[i].decoding]
        assert rows == [i for i, _ in plan.parts[: plan.n_decode]]
        kept = 0 if all(one.decoding for one in running) else SMALLEST_PIECE
        assert len(rows) == min(n_ubatch - kept, sum(one.decoding for one in running))
        assert bool(parts) == bool(running)
        if running:
            scheduler.computed(plan, running, 0.01)


def test_more_sequences_than_a_step_has_rows_take_turns() -> None:
    scheduler, running, rows = Scheduler(32), work(decoding=50), [0] * 50
    for _ in range(100):
        plan = scheduler.plan(running)
        for index, _ in plan.parts:
            rows[index] += 1
        scheduler.computed(plan, running, 0.01)
    assert max(rows) - min(rows) <= 2


def test_answers_that_fill_every_step_leave_a_few_rows_to_prompts() -> None:
    """Else a prompt would wait until answers end, however long they are."""
    scheduler, left = Scheduler(32), 100
    for _ in range(300):
        running = work(decoding=50, prompts=(left,))
        plan = scheduler.plan(running)
        scheduler.computed(plan, running, 0.01)
        left -= plan.n_prompt
        if not left:
            break
    assert not left


def test_alone_a_prompt_has_the_whole_step() -> None:
    plan = Scheduler(512).plan(work(decoding=0, prompts=(4000,)))
    assert (plan.kind, plan.n_prompt) == (Kind.FULL, 512)
    plan = Scheduler(512).plan(work(decoding=0, prompts=(300, 100, 400)))
    assert plan.parts == ((1, 100), (0, 300), (2, 112)), "the shortest first, and none of the step is left"


def test_what_follows_a_short_prompt_does_not_delay_its_answer_for_long() -> None:
    prompts = work(decoding=0, prompts=(50, 4000))
    plan = taught().plan(prompts)
    assert plan.parts[0] == (0, 50)
    assert linear(plan.n_tokens) == pytest.approx(2 * linear(50), rel=0.1)
    assert taught(spilled).plan(prompts).n_tokens == 512, "where more tokens cost little, the step is full"
    assert taught().plan(work(decoding=0, prompts=(50, 60))).n_tokens == 110


def test_pieces_fill_a_step_up_to_the_target() -> None:
    for factor in (2.0, 4.0, 8.0):
        plan = taught(settings=Scheduling(target_latency=factor)).plan(work(decoding=8, prompts=(4000,)))
        assert plan.kind is Kind.PIECES
        assert linear(plan.n_tokens) == pytest.approx(factor * linear(8), rel=0.15)


def test_a_target_that_nothing_meets_still_lets_prompts_come_to_their_end() -> None:
    tight = Scheduling(target_latency=1.1, decode_share=0.95)
    scheduler, left = taught(settings=tight), 100
    for _ in range(5000):
        running = work(decoding=1, prompts=(left,))
        plan = scheduler.plan(running)
        scheduler.computed(plan, running, linear(plan.n_tokens))
        left -= plan.n_prompt
        if not left:
            break
    assert not left


def test_a_piece_is_never_smaller_than_a_few_tokens() -> None:
    plan = taught(settings=Scheduling(target_latency=1.8, decode_share=0.95)).plan(work(decoding=4, prompts=(4000,)))
    assert (plan.kind, plan.n_prompt) == (Kind.PIECES, SMALLEST_PIECE)


def test_a_few_tokens_more_are_no_reason_to_leave_the_hot_path() -> None:
    """With 28 answers three tokens still fit; one step beyond costs as much as twenty on it."""

    def machine(n: int) -> float:
        return (0.03 if n <= WIDEST_PARTIAL else 1.0) + 0.0005 * n

    scheduler, running = Scheduler(128), work(decoding=28, prompts=(4000,))
    for n in (29, 31, 64, 128) * 3:
        scheduler.prices.observe(28, n - 28, machine(n))
        scheduler.prices.observe(28, 0, machine(28))
    plan = scheduler.plan(running)
    assert (plan.kind, plan.n_tokens) == (Kind.PIECES, WIDEST_PARTIAL)


def test_pieces_that_read_too_slowly_give_way_to_larger_ones_that_alternate() -> None:
    """On a processor a token costs half as much again in a step that the target allows."""
    scheduler, running, spent = taught(cpu), work(decoding=8, prompts=(100_000,)), {True: 0.0, False: 0.0}
    sizes = set[int]()
    for _ in range(600):
        plan = scheduler.plan(running)
        seconds = cpu(plan.n_tokens)
        spent[plan.kind is Kind.DECODE] += seconds
        sizes |= {plan.n_prompt} if plan.kind is Kind.WHOLE else set()
        scheduler.computed(plan, running, seconds)
    assert spent[True] / sum(spent.values()) == pytest.approx(0.5, abs=0.05)
    assert max(sizes) <= 256, "no larger than it takes to read at nearly full speed"


def test_many_prompts_get_more_of_the_time_than_one() -> None:
    def decode_share(n_prompts: int) -> float:
        scheduler, running = taught(cpu), work(decoding=8, prompts=(100_000,) * n_prompts)
        spent = {True: 0.0, False: 0.0}
        for _ in range(600):
            plan = scheduler.plan(running)
            spent[plan.kind is Kind.DECODE] += cpu(plan.n_tokens)
            scheduler.computed(plan, running, cpu(plan.n_tokens))
        return spent[True] / sum(spent.values())

    assert [decode_share(n) for n in (1, 2, 4)] == pytest.approx([1 / 2, 1 / 3, 1 / 5], abs=0.06)


def test_prompts_of_a_lower_class_take_no_more_for_being_many() -> None:
    scheduler, running = taught(cpu), work(decoding=2)
    running += [Work(i, i, 100_000, False, 2) for i in range(2, 8)]
    spent = {True: 0.0, False: 0.0}
    for _ in range(600):
        plan = scheduler.plan(running)
        spent[plan.kind is Kind.DECODE] += cpu(plan.n_tokens)
        scheduler.computed(plan, running, cpu(plan.n_tokens))
    assert spent[True] / sum(spent.values()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_prompt_does_not_wait_for_what_others_owe_unless_it_is_of_a_lower_class(rank: int) -> None:
    scheduler, chats = taught(cpu), work(decoding=2)
    background, urgent = Work(2, 2, 4000, False, 1), Work(3, 3, 100, False, rank)
    while (plan := scheduler.plan([*chats, background])).kind is not Kind.WHOLE:
        scheduler.computed(plan, [*chats, background], cpu(plan.n_tokens))
    scheduler.computed(plan, [*chats, background], cpu(plan.n_tokens))
    assert scheduler.plan([*chats, background]).kind is Kind.DECODE
    found = scheduler.plan([*chats, background, urgent])
    assert found.parts[2:] == (((3, 100),) if rank < 2 else ())


def test_what_is_owed_does_not_grow_with_every_short_prompt() -> None:
    """Else a stream of them would keep a long one waiting without end."""
    scheduler, chats, n_read, seconds = taught(cpu), work(decoding=2), 0, 0.0
    for i in range(3000):
        running = [*chats, Work(2, 2, 100_000, False), Work(3, 10 + i, 60, False)]
        plan = scheduler.plan(running)
        scheduler.computed(plan, running, cpu(plan.n_tokens))
        seconds += cpu(plan.n_tokens)
        n_read += dict(plan.parts).get(2, 0)
    assert n_read > 0, "it is read"


@pytest.mark.parametrize("machine", [cpu, spilled])
def test_short_prompts_that_are_free_of_debt_pass_a_long_one_by_no_more_than_its_own_length(machine: Machine) -> None:
    """However many come: it owes, they do not, and with each of them more is owed."""
    scheduler, chats, left, passed, number = taught(machine), work(decoding=2), 4000, 0, 10
    while left and passed < 20_000:
        short = [Work(3 + i, number + i, 60, False) for i in range(6)]
        running, number = [*chats, Work(2, 2, left, False), *short], number + 6
        plan = scheduler.plan(running)
        scheduler.computed(plan, running, machine(plan.n_tokens))
        n_read = dict(plan.parts).get(2, 0)
        left, passed = left - n_read, passed + plan.n_prompt - n_read
    assert not left
    assert passed <= 4000 + 512


def test_the_price_without_prompts_is_timed_first_and_again() -> None:
    scheduler = Scheduler(512)
    running = work(decoding=2, prompts=(100_000,))
    kinds = []
    for _ in range(3 * TIMED_AGAIN):
        plan = scheduler.plan(running)
        kinds.append(plan.kind)
        scheduler.computed(plan, running, linear(plan.n_tokens))
    assert kinds[:3] == [Kind.DECODE] * 3
    assert 1 <= kinds[80:].count(Kind.DECODE) <= 3


def test_where_a_step_has_a_high_price_whole_ubatches_alternate_with_decode_steps() -> None:
    scheduler, running, spent = taught(spilled), work(decoding=4, prompts=(100_000,)), {True: 0.0, False: 0.0}
    for _ in range(400):
        plan = scheduler.plan(running)
        assert plan.kind in (Kind.DECODE, Kind.WHOLE)
        assert plan.n_tokens in (4, 512, 4 + FIRST_TRIED)
        seconds = spilled(plan.n_tokens)
        spent[plan.kind is Kind.DECODE] += seconds
        scheduler.computed(plan, running, seconds)
    assert spent[True] / sum(spent.values()) == pytest.approx(0.5, abs=0.05)


def test_a_short_prompt_stays_on_the_hot_path_where_that_costs_less_than_leaving_it() -> None:
    for n_left in (12, 40):
        plan = taught(spilled).plan(work(decoding=4, prompts=(n_left,)))
        assert 4 < plan.n_tokens <= 31


def test_what_wide_steps_cost_is_tried_before_it_is_judged() -> None:
    """A single size says nothing of a fixed price: 100 tokens that took 0.33 s may cost 0.05 s more for each 15."""
    scheduler = Scheduler(512)
    scheduler.prices.observe(0, 100, spilled(100))
    running, kinds = work(decoding=4, prompts=(50_000,)), list[StepPlan]()
    for _ in range(60):
        plan = scheduler.plan(running)
        kinds.append(plan)
        scheduler.computed(plan, running, spilled(plan.n_tokens))
    sizes = [plan.n_tokens for plan in kinds if plan.kind is Kind.WHOLE]
    assert sizes[:4] == [50, 68, 68, 512]
    assert not any(plan.kind is Kind.PIECES for plan in kinds)


def test_steps_that_are_smaller_than_what_is_tried_fit_all_the_same() -> None:
    scheduler, running = Scheduler(32), work(decoding=4, prompts=(5000,))
    for _ in range(100):
        plan = scheduler.plan(running)
        assert plan.n_tokens <= 32
        scheduler.computed(plan, running, 1.0 if plan.n_prompt else 0.01)


def test_a_machine_that_has_become_cheaper_is_noticed() -> None:
    """As when experts have come into VRAM: small steps are tried again now and then."""
    scheduler, running = taught(spilled), work(decoding=4, prompts=(500_000,))
    kinds = list[Kind]()
    for _ in range(3000):
        plan = scheduler.plan(running)
        kinds.append(plan.kind)
        scheduler.computed(plan, running, resident(plan.n_tokens))
    assert Kind.WHOLE in kinds[:50]
    assert Kind.WHOLE not in kinds[-500:]


def test_background_answers_do_not_slow_an_interactive_prompt() -> None:
    def kind(answer: int, prompt: int) -> Kind:
        return taught(resident).plan([Work(0, 0, 1, True, answer), Work(1, 1, 4000, False, prompt)]).kind

    assert {kind(2, prompt) for prompt in (0, 1)} == {Kind.FULL}
    assert {kind(answer, 0) for answer in (0, 1)} == {Kind.PIECES}, "nor does it hold up those of chats"
    assert {kind(answer, 2) for answer in (0, 1, 2)} == {Kind.PIECES}


# -- whole scripts


def p95(values: list[float]) -> float:
    return float(np.percentile(values, 95))


def ours(script: list[Arrival], machine: Machine, **more: object) -> Replayed:
    return replay(script, machine, Scheduler(512), **more)  # type: ignore[arg-type]


def by_time(gaps: list[float]) -> float:
    """The gap that is reached by the longest ones that make up a twentieth of the time."""
    values = np.sort(gaps)
    return float(values[np.searchsorted(np.cumsum(values), 0.95 * values.sum())])


@pytest.mark.parametrize("machine", [cpu, linear])
def test_chats_beside_long_prompts_are_twice_as_even_at_the_same_throughput(machine: Machine) -> None:
    """Prompts that always wait for their turn: most of the chats' time goes by beside one of them."""
    script = chats_and_long_prompts(every=12.0)
    found = ours(script, machine)
    peers = [replay(script, machine, FirstComeFirstServed(n), n_ubatch=min(n, 512)) for n in (2048, 256, 64)]
    best = max(peers, key=lambda one: one.throughput)
    assert by_time(found.gaps("chat")) <= 0.5 * by_time(best.gaps("chat"))
    for peer in peers:
        assert p95(found.first("chat")) <= 0.5 * p95(peer.first("chat"))
    assert found.throughput >= 0.95 * best.throughput


def test_beside_a_stream_of_long_prompts_both_keep_their_half() -> None:
    """Experts that are copied: 4,096-token prompts one after the other, four chats."""
    alone = ours(steady(0, 8), spilled)
    speed_alone = sum(plan.n_prompt for plan in alone.plans) / alone.seconds
    chats = ours(steady(4, 0), spilled, until=20.0)
    both = ours(steady(4, 200), spilled, until=60.0, max_sequences=5)
    read = sum(plan.n_prompt for plan in both.plans)
    assert read / both.seconds >= 0.45 * speed_alone
    assert both.between(10, 60, "chat") / 50 >= 0.45 * chats.between(10, 20, "chat") / 10


@pytest.mark.parametrize("machine", [cpu, linear, spilled, resident])
def test_single_slow_steps_change_little(machine: Machine) -> None:
    """Not even where they come first, and are all that is known at the beginning."""
    script = steady(8, 40, 2000)
    even = ours(script, machine, until=40.0)
    shaken = ours(script, machine, until=40.0, noise=random.Random(3))
    for kind in (Kind.PIECES, Kind.WHOLE):
        sizes = [[plan.n_prompt for plan in one.plans[200:] if plan.kind is kind] for one in (even, shaken)]
        n_even, n_shaken = (np.median(one) if len(one) > 5 else 0 for one in sizes)
        assert n_shaken == pytest.approx(n_even, rel=0.25)


def test_nobody_with_a_short_prompt_waits_behind_a_long_one() -> None:
    short = [Arrival(5.0 + i, 60, 5, "short", client="b") for i in range(5)]
    script = [*steady(2, 0), Arrival(1.0, 30_000, 1, "long", client="a"), *short]
    first = ours(script, cpu, until=15.0).first("short")
    assert len(first) == 5
    assert max(first) < 0.5


def test_background_prompts_leave_the_interactive_their_time() -> None:
    background = [Arrival(0.1 * i, 4000, 1, "slow", 2, "b") for i in range(4)]
    script = [*steady(1, 0), *background, *(Arrival(3.0 + i, 100, 3, "now", 0, "a") for i in range(5))]
    found = ours(script, cpu, until=40.0)
    assert max(found.first("now")) < 0.7, "an ubatch that is underway, and its own"
    assert found.first("slow"), "it makes progress"


@pytest.mark.parametrize("width", [1, 31, 32, 200, 511])
def test_however_many_answers_there_are_a_step_is_planned(width: int) -> None:
    scheduler = Scheduler(512)
    running = [*work(decoding=width), Work(width, width, 5000, False)]
    for _ in range(200):
        plan = scheduler.plan(running)
        assert plan.n_tokens <= 512
        scheduler.computed(plan, running, cpu(plan.n_tokens))
