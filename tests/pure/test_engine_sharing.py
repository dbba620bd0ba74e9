"""The engine loop with several people: who makes room, who is parked, who takes whose beginning."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.engine import roster, sharing
from daemon.messages import Adjust, Cancel, Done, Failed, Priority, Scheduling, Submit
from tests.engine_bench import Bench, expected, submit
from tests.engine_fakes import BAD_TOKEN

LONG = [97 + i % 26 for i in range(80)]
"""A beginning that is long enough to be shared."""


def done(bench: Bench, request: str) -> Done:
    end = bench.pipe.end(request)
    assert isinstance(end, Done), end
    return end


def computed(bench: Bench) -> int:
    """Rows of all batches."""
    return sum(map(len, bench.context.batches))


# -- parking


def test_a_background_answer_is_parked_for_an_interactive_one_and_computes_nothing_again() -> None:
    bench = Bench(max_sequences=1)
    bench.turn(submit("slow", [101, 102], 30, priority="background"), times=10)
    bench.turn(submit("now", [103], 4, priority="interactive"))
    assert bench.phases() == {"now": "decode", "slow": "parked"}
    snapshot = bench.loop.snapshot()
    assert (snapshot.n_parked, snapshot.n_preempted) == (1, 1)
    assert snapshot.parked_bytes > 0
    bench.run()
    assert bench.pipe.text("slow") == expected([101, 102], 30)
    assert bench.pipe.text("now") == expected([103], 4)
    assert computed(bench) == 2 + 29 + 1 + 3
    assert len(bench.context.samplers) == 2, "its sampler is kept"
    assert bench.loop.snapshot().parked_bytes == 0


def test_a_prompt_is_parked_where_it_was_read_to() -> None:
    bench = Bench(max_sequences=1, n_ubatch=8)
    prompt = list(range(100, 120))
    bench.turn(submit("slow", prompt, 2, priority="background"), times=2)
    bench.run(submit("now", [103], 1, priority="interactive"))
    assert bench.pipe.text("slow") == expected(prompt, 2)
    assert [len(batch) for batch in bench.context.batches] == [8, 8, 1, 4, 1]


@pytest.mark.parametrize("victim", ["normal", "interactive"])
def test_nothing_but_background_work_makes_room(victim: Priority) -> None:
    bench = Bench(max_sequences=1)
    bench.turn(submit("a", [101], 10, priority=victim), times=3)
    bench.turn(submit("now", [103], 4, priority="interactive"))
    assert bench.phases() == {"a": "decode"}
    bench.run()
    assert bench.loop.snapshot().n_preempted == 0


def test_normal_requests_park_nobody() -> None:
    bench = Bench(max_sequences=1)
    bench.turn(submit("slow", [101], 10, priority="background"), times=3)
    bench.turn(submit("a", [103], 4))
    assert bench.phases() == {"slow": "decode"}


def test_the_youngest_of_the_background_makes_room_and_no_more_than_it_takes() -> None:
    bench = Bench(max_sequences=3)
    bench.turn(*(submit(name, [ord(name)], 30, priority="background") for name in "ab"), submit("c", [99], 30), times=3)
    bench.turn(submit("now", [103], 4, priority="interactive"))
    assert [name for name, phase in bench.phases().items() if phase == "parked"] == ["b"]
    assert set(bench.phases()) == {"a", "b", "c", "now"}


def test_cells_are_a_reason_to_make_room_too() -> None:
    bench = Bench(kv_cells=128, n_ctx=120)
    bench.turn(*(submit(name, [ord(name)] * 40, 10, priority="background") for name in "ab"), times=12)
    bench.turn(submit("now", [103] * 60, 4, priority="interactive"))
    assert bench.phases() == {"a": "decode", "now": "prefill", "b": "parked"}
    bench.run()
    for name in "ab":
        assert bench.pipe.text(name) == expected([ord(name)] * 40, 10)


def test_nobody_is_parked_where_that_would_not_help() -> None:
    bench = Bench(kv_cells=128, n_ctx=120)
    bench.turn(submit("big", [101] * 80, 40), submit("slow", [102], 8, priority="background"), times=14)
    bench.turn(submit("now", [103] * 60, 4, priority="interactive"))
    assert bench.phases()["slow"] != "parked"


@pytest.mark.parametrize("why", ["no room", "cannot be saved", "cannot be restored"])
def test_what_cannot_be_parked_is_computed_once_more(why: str) -> None:
    bench = Bench(max_sequences=1, scheduling=Scheduling(park_mib=0) if why == "no room" else None)
    bench.context.bytes_per_cell = 0 if why == "cannot be saved" else 1
    bench.context.restores = why != "cannot be restored"
    bench.turn(submit("slow", [101, 102], 30, priority="background"), times=10)
    bench.turn(submit("now", [103], 4, priority="interactive"))
    assert bench.phases() == {"now": "decode"} | ({"slow": "parked"} if why == "cannot be restored" else {})
    bench.run()
    assert bench.pipe.text("slow") == expected([101, 102], 30)
    assert computed(bench) > 2 + 29 + 1 + 3


def test_ram_for_what_is_parked_is_live() -> None:
    bench = Bench(max_sequences=1)
    bench.turn(submit("slow", [101, 102], 30, priority="background"), times=3)
    bench.pipe.put(Adjust(scheduling=Scheduling(park_mib=0)))
    bench.turn(submit("now", [103], 4, priority="interactive"))
    assert bench.loop.snapshot().n_parked == 0
    bench.run()


def test_a_parked_answer_can_be_cancelled_and_frees_its_ram() -> None:
    bench = Bench(max_sequences=1)
    bench.turn(submit("slow", [101, 102], 30, priority="background"), times=10)
    bench.turn(submit("now", [103], 40, priority="interactive"))
    bench.turn(Cancel(id="slow"))
    assert done(bench, "slow").finish_reason == "cancelled"
    assert bench.loop.snapshot().parked_bytes == 0
    bench.run()
    assert all(sampler.closed for sampler in bench.context.samplers)


# -- who goes first


def test_better_classes_start_first_and_within_one_who_came_first() -> None:
    bench = Bench(max_sequences=1)
    bench.turn(submit("first", [101], 3))
    kinds: tuple[Priority, ...] = ("background", "normal", "interactive", "normal", "interactive")
    bench.run(*(submit(f"{kind}{i}", [102], 1, priority=kind) for i, kind in enumerate(kinds)))
    ends = [event.id for step in bench.pipe.sent for event in step.events if isinstance(event, Done)]
    assert ends == ["first", "interactive2", "interactive4", "normal1", "normal3", "background0"]


def test_no_class_waits_for_ever() -> None:
    """Background work starts after so many others at the latest, and is not sent away again."""
    bench = Bench(max_sequences=1)
    bench.turn(submit("slow", [101], 20, priority="background"), times=3)
    for i in range(3 * roster.FAVOURED_AFTER):
        bench.turn(submit(str(i), [102], 2, priority="interactive"), times=2)
        if bench.pipe.end("slow"):
            break
    assert i < roster.FAVOURED_AFTER + 30
    assert bench.pipe.text("slow") == expected([101], 20)


def test_more_requests_than_ids_of_any_class_all_end() -> None:
    bench = Bench(max_sequences=2)
    kinds: tuple[Priority, ...] = ("background", "normal", "interactive")
    bench.run(*(submit(str(i), [97 + i], 5, priority=kinds[i % 3]) for i in range(20)))
    for i in range(20):
        assert bench.pipe.text(str(i)) == expected([97 + i], 5)


# -- common beginnings


def test_two_identical_prompts_are_computed_once() -> None:
    bench = Bench(n_ubatch=16)
    bench.run(submit("a", LONG, 5), submit("b", LONG, 5))
    assert bench.pipe.text("a") == bench.pipe.text("b") == expected(LONG, 5)
    assert (done(bench, "a").n_cached, done(bench, "b").n_cached) == (0, 79)
    assert computed(bench) == 80 + 1 + 2 * 4
    snapshot = bench.loop.snapshot()
    assert (snapshot.prompt_tokens, snapshot.shared_tokens) == (81, 79)


def test_followers_compute_what_is_theirs_and_say_that_they_wait() -> None:
    bench = Bench(n_ubatch=16)
    prompts = {"a": [*LONG, 101, 102], "b": [*LONG, 103], "c": [*LONG[:70], 1, 2, 3]}
    bench.turn(*(submit(name, prompt, 6) for name, prompt in prompts.items()))
    assert bench.phases() == {"a": "prefill", "b": "following", "c": "following"}
    bench.run()
    assert {name: done(bench, name).n_cached for name in prompts} == {"a": 0, "b": 80, "c": 70}
    for name, prompt in prompts.items():
        assert bench.pipe.text(name) == expected(prompt, 6)


def test_the_time_of_a_prompt_begins_with_its_own_first_piece() -> None:
    """What it waited for another one's is no time of its prompt: who estimates by that would be far off."""
    bench = Bench(n_ubatch=16)
    bench.run(submit("a", LONG, 5), submit("b", LONG, 5))
    leader, follower = done(bench, "a"), done(bench, "b")
    assert follower.wait_ms >= leader.wait_ms + 0.5 * leader.prompt_ms
    assert follower.prompt_ms < 0.5 * leader.prompt_ms


def test_a_prompt_that_was_read_just_now_is_shared_while_its_answer_runs() -> None:
    bench = Bench(n_ubatch=16)
    bench.turn(submit("a", LONG, 30), times=10)
    bench.run(submit("b", [*LONG, 101], 3))
    assert done(bench, "b").n_cached == 80
    assert bench.pipe.text("b") == expected([*LONG, 101], 3)


def test_short_common_beginnings_are_not_waited_for() -> None:
    bench = Bench(n_ubatch=16)
    prompt = LONG[: sharing.LEAST_SHARED]
    bench.run(submit("a", prompt, 3), submit("b", prompt, 3))
    assert done(bench, "b").n_cached == 0, "the last token has to be computed, and leaves less than is worth it"
    assert bench.context.shared == []


def test_nothing_is_shared_where_the_memory_cannot() -> None:
    bench = Bench(n_ubatch=16)
    bench.loop._roster._can_share = False
    bench.run(submit("a", LONG, 3), submit("b", LONG, 3))
    assert bench.context.shared == []
    assert bench.pipe.text("b") == expected(LONG, 3)


def test_shared_cells_count_once_and_outlive_who_computed_them() -> None:
    bench = Bench(n_ubatch=16)
    bench.turn(submit("a", LONG, 9), submit("b", LONG, 9), times=12)
    assert bench.phases() == {"a": "decode", "b": "decode"}
    assert bench.loop.snapshot().kv_cells_used == bench.context.used
    bench.turn(Cancel(id="a"))
    assert bench.loop.snapshot().kv_cells_used == bench.context.used >= 80
    bench.run()
    assert bench.pipe.text("b") == expected(LONG, 9)


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_followers_go_on_without_a_leader_that_is_gone(how: str) -> None:
    bench = Bench(n_ubatch=16)
    bench.turn(submit("a", [*LONG, BAD_TOKEN], 5), submit("b", [*LONG, 101], 5), submit("c", [*LONG, 101, 102], 5))
    assert bench.phases()["b"] == "following"
    if how == "cancelled":
        bench.turn(Cancel(id="a"))
        assert bench.phases() == {"b": "prefill", "c": "following"}
    bench.run()
    assert bench.pipe.text("b") == expected([*LONG, 101], 5)
    assert bench.pipe.text("c") == expected([*LONG, 101, 102], 5)
    assert isinstance(bench.pipe.end("a"), Done if how == "cancelled" else Failed)


def test_an_interactive_follower_lends_its_leader_its_class() -> None:
    """Else it would wait for a background prompt behind all the others."""
    bench = Bench(n_ubatch=16, max_sequences=3, kv_cells=600)
    bench.turn(submit("slow", LONG, 2, priority="background"))
    other = [98] * 100
    bench.turn(submit("big", other, 2), submit("now", [*LONG, 5], 2, priority="interactive"))
    bench.run()
    ends = [event.id for step in bench.pipe.sent for event in step.events if isinstance(event, Done)]
    assert ends.index("now") < ends.index("big")


# -- everything at once


@dataclass
class Asked:
    prompt: list[int]
    n: int
    cancelled: bool = False


@dataclass
class World:
    """A bench and what was asked of it; counts cells and ids after each turn."""

    bench: Bench
    asked: dict[str, Asked] = field(default_factory=dict)

    def turn(self) -> None:
        self.bench.loop.turn()
        loop = self.bench.loop
        inside = loop._roster
        assert inside.cells.used == self.bench.context.used <= inside.cells.total
        ids = [sequence.seq_id for sequence in inside.running]
        assert sorted([*ids, *inside._free_ids]) == list(range(loop._limits.max_sequences))
        held = {seq_id: len(cells) for seq_id, cells in self.bench.context.cells.items() if cells}
        assert held == {sequence.seq_id: sequence.n_past for sequence in inside.running if sequence.n_past}
        assert {s.number for s in inside.parked} == set(inside.lot._states)
        for place, sequence in enumerate(inside.running):
            assert sequence.leader is None or sequence.leader not in inside.running[place:]

    def cancel(self, request: str) -> None:
        """Its cells are free after the next turn, wherever it was."""
        self.asked[request].cancelled = True
        self.bench.pipe.put(Cancel(id=request))
        self.turn()
        assert self.bench.loop._roster.find(request) is None

    def finish(self) -> None:
        for _ in range(4000):
            if all(self.bench.pipe.end(request) for request in self.asked):
                return
            self.turn()
        raise AssertionError("something never ended")


BEGINNING = [97, 98, 99, 100, 101, 102]
PRIORITIES = st.sampled_from(["interactive", "normal", "background"])


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_whatever_happens_every_request_ends_once_and_as_it_would_alone(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "LEAST_SHARED", 3)
        patch.setattr(roster, "FAVOURED_AFTER", 3)
        world = World(
            Bench(
                n_ubatch=data.draw(st.integers(2, 16)),
                max_sequences=data.draw(st.integers(1, 5)),
                kv_cells=data.draw(st.integers(40, 120)),
                n_ctx=40,
                scheduling=Scheduling(park_mib=data.draw(st.integers(0, 1))),
            )
        )
        world.bench.context.bytes_per_cell = data.draw(st.sampled_from([0, 1, 1 << 14]))
        world.bench.context.restores = data.draw(st.booleans())
        for i in range(data.draw(st.integers(1, 9))):
            common = BEGINNING[: data.draw(st.integers(0, 6))] * data.draw(st.integers(1, 3))
            prompt = common + data.draw(st.lists(st.integers(97, 122), min_size=1, max_size=8))
            world.asked[str(i)] = Asked(prompt, data.draw(st.integers(1, 40 - len(prompt))))
            priority, client = data.draw(PRIORITIES), data.draw(st.sampled_from(["", "a", "b"]))
            world.bench.pipe.put(
                Submit(id=str(i), prompt=prompt, max_tokens=world.asked[str(i)].n, priority=priority, client=client)
            )
            if data.draw(st.integers(0, 9)) == 0:
                world.bench.context.refuse_once = 1
            for _ in range(data.draw(st.integers(0, 5))):
                world.turn()
            if data.draw(st.booleans()):
                world.cancel(str(data.draw(st.integers(0, i))))
        world.finish()
        check_answers(world)


def check_answers(world: World) -> None:
    pipe = world.bench.pipe
    for request, asked in world.asked.items():
        end = pipe.end(request)
        whole = expected(asked.prompt, asked.n)
        if isinstance(end, Failed):  # alone, and refused by the context
            assert world.bench.context.n_refused > 0
            assert whole.startswith(pipe.text(request))
            continue
        assert isinstance(end, Done)
        assert 0 <= end.n_cached < len(asked.prompt)
        if end.finish_reason == "cancelled":
            assert asked.cancelled
            assert whole.startswith(pipe.text(request))
        else:
            assert pipe.text(request) == whole
    assert all(sampler.closed for sampler in world.bench.context.samplers)
    world.turn()
    assert world.bench.context.used == 0
