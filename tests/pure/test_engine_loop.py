"""The engine loop over a fake context: joining, leaving, cancelling, failing, cells."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.engine.ports import NO_CELLS
from daemon.messages import Adjust, Cancel, Done, Failed, Residency, ResidencySpec, Sampling, Shutdown, Tokens
from tests.engine_bench import Bench, expected, submit
from tests.engine_fakes import BAD_TOKEN, EOS, FakeCell, next_token


def test_one_request_is_computed_in_chunks_and_ends_once() -> None:
    bench = Bench(n_ubatch=8)
    prompt = list(range(100, 120))
    bench.run(submit("a", prompt, 5))
    assert bench.pipe.text("a") == expected(prompt, 5)
    assert [len(batch) for batch in bench.context.batches] == [8, 8, 4, 1, 1, 1, 1]
    done = bench.pipe.end("a")
    assert isinstance(done, Done)
    assert (done.finish_reason, done.n_prompt, done.n_predicted) == ("length", 20, 5)
    assert done.prompt_ms > 0
    assert done.predicted_ms > 0


def test_only_the_last_row_of_a_prompt_wants_logits() -> None:
    bench = Bench(n_ubatch=8)
    bench.run(submit("a", list(range(100, 112)), 1))
    wanted = [[row[3] for row in batch] for batch in bench.context.batches]
    assert wanted == [[False] * 8, [False, False, False, True]]


def test_sequences_join_between_steps_and_do_not_disturb_each_other() -> None:
    bench = Bench()
    bench.pipe.put(submit("a", [101, 102], 9))
    for _ in range(3):
        bench.loop.turn()
    bench.run(submit("b", [103], 4), submit("c", [104, 105, 106], 7))
    for request, prompt, n in (("a", [101, 102], 9), ("b", [103], 4), ("c", [104, 105, 106], 7)):
        assert bench.pipe.text(request) == expected(prompt, n)


def test_decode_goes_first_and_short_prompts_before_long_ones() -> None:
    bench = Bench(n_ubatch=8)
    bench.pipe.put(submit("a", [101], 30))
    bench.loop.turn()
    bench.pipe.put(submit("b", list(range(100, 130)), 1), submit("c", [105], 1))
    for _ in range(3):
        bench.loop.turn()
        assert [row[2] for row in bench.context.batches[-1]] == [0], "what a step without prompts takes is to be known"
    bench.loop.turn()
    seq_ids = [row[2] for row in bench.context.batches[-1]]
    assert seq_ids[:2] == [0, 2], "the decoding sequence has the first row, then comes the shorter prompt"
    assert set(seq_ids[2:]) == {1}


def test_all_tokens_of_a_step_travel_in_one_message() -> None:
    bench = Bench()
    bench.run(*(submit(name, [ord(name)], 6) for name in "abcd"))
    with_tokens = [step for step in bench.pipe.sent if any(isinstance(e, Tokens) for e in step.events)]
    assert len(with_tokens) == 6
    assert all(len([e for e in step.events if isinstance(e, Tokens)]) == 4 for step in with_tokens)


def test_more_requests_than_sequences_wait_their_turn() -> None:
    bench = Bench(max_sequences=2)
    bench.run(*(submit(str(i), [100 + i], 3) for i in range(7)))
    for i in range(7):
        assert bench.pipe.text(str(i)) == expected([100 + i], 3)
    assert max(len({row[2] for row in batch}) for batch in bench.context.batches) == 2


def test_cancel_frees_the_sequence_before_the_next_batch() -> None:
    bench = Bench()
    bench.pipe.put(submit("a", [101], 100), submit("b", [102], 5))
    bench.loop.turn()
    bench.run(Cancel(id="a"))
    done = bench.pipe.end("a")
    assert isinstance(done, Done)
    assert done.finish_reason == "cancelled"
    assert all(row[2] != 0 for batch in bench.context.batches[1:] for row in batch)
    assert bench.pipe.text("b") == expected([102], 5)


def test_cancel_of_a_waiting_or_unknown_request() -> None:
    bench = Bench(max_sequences=1)
    bench.pipe.put(submit("a", [101], 3), submit("b", [102], 3))
    bench.run(Cancel(id="b"), Cancel(id="nobody"))
    done = bench.pipe.end("b")
    assert isinstance(done, Done)
    assert done.finish_reason == "cancelled"
    assert bench.pipe.text("a") == expected([101], 3)
    assert bench.pipe.events("nobody") == []


@pytest.mark.parametrize(("prompt", "n"), [([], 1), ([101], 0), ([101] * 128, 1), ([101, 512], 1), ([-1], 1)], ids=str)
def test_what_cannot_be_computed_fails_at_once(prompt: list[int], n: int) -> None:
    bench = Bench(n_ctx=128)
    bench.run(submit("bad", prompt, n), submit("good", [101], 2))
    failed = bench.pipe.end("bad")
    assert isinstance(failed, Failed)
    assert failed.code == "invalid_request"
    assert bench.pipe.text("good") == expected([101], 2)


def test_one_bad_request_never_fails_another() -> None:
    bench = Bench(n_ubatch=16)
    bench.run(submit("a", [101], 5), submit("bad", [102, BAD_TOKEN], 5), submit("b", [103], 5))
    failed = bench.pipe.end("bad")
    assert isinstance(failed, Failed)
    assert failed.code == "engine_failed"
    for request, prompt in (("a", [101]), ("b", [103])):
        assert bench.pipe.text(request) == expected(prompt, 5)


def test_an_error_while_sampling_fails_only_its_request() -> None:
    bench = Bench()
    bench.context.sample_fails_at = 102
    bench.run(submit("a", [101], 5), submit("bad", [102], 5))
    failed = bench.pipe.end("bad")
    assert isinstance(failed, Failed)
    assert "no such sampler" in failed.message
    assert bench.pipe.text("a") == expected([101], 5)


def test_when_cells_run_out_the_youngest_waits_and_loses_nothing() -> None:
    bench = Bench(kv_cells=140, n_ctx=120, max_sequences=3)
    prompts = {"a": [101] * 10, "b": [102] * 10, "c": [103] * 10}
    bench.run(*(submit(name, prompt, 80) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert bench.pipe.text(name) == expected(prompt, 80)
    assert bench.loop.snapshot().n_preempted > 0


def test_a_refused_batch_sends_the_youngest_back() -> None:
    bench = Bench()
    bench.context.refuse_once = 1
    bench.run(submit("a", [101], 3), submit("b", [102], 3))
    for name, prompt in (("a", [101]), ("b", [102])):
        assert bench.pipe.text(name) == expected(prompt, 3)


def test_a_context_that_goes_on_refusing_costs_one_request_and_no_endless_loop() -> None:
    bench = Bench()
    decode = bench.context.decode

    def refuse_two(rows: Iterable[tuple[int, int, int, bool]]) -> int:
        batch = list(rows)
        return NO_CELLS if len({row[2] for row in batch}) > 1 else decode(batch)

    bench.context.decode = refuse_two  # type: ignore[method-assign]
    bench.run(submit("a", [101], 3), submit("b", [102], 3))
    assert bench.pipe.text("a") == expected([101], 3)
    assert isinstance(bench.pipe.end("b"), Failed)


def test_a_single_sequence_that_finds_no_cells_fails() -> None:
    bench = Bench()
    bench.context.refuse_once = 1
    bench.run(submit("a", [101], 3))
    assert isinstance(bench.pipe.end("a"), Failed)


def test_eos_ends_the_answer_and_is_not_shown() -> None:
    bench = Bench()
    bench.context.rule = lambda history: EOS if len(history) == 4 else next_token(history)
    bench.run(submit("a", [101, 102], 50))
    done = bench.pipe.end("a")
    assert isinstance(done, Done)
    assert (done.finish_reason, done.n_predicted) == ("stop", 3)
    assert bench.pipe.text("a") == expected([101, 102], 2)


def test_stop_strings_are_never_shown() -> None:
    bench = Bench()
    whole = expected([101], 40)
    stop = whole[9:12]
    bench.run(submit("a", [101], 40, stop=("\0", stop)))
    assert bench.pipe.text("a") == whole[: whole.index(stop)]
    done = bench.pipe.end("a")
    assert isinstance(done, Done)
    assert (done.finish_reason, done.stop_word) == ("stop", stop)


def test_characters_are_shown_whole() -> None:
    euro = list("€".encode())
    bench = Bench()
    bench.context.rule = lambda history: euro[(len(history) - 1) % 3]
    bench.run(submit("a", [101], 5))
    texts = [e.text for e in bench.pipe.events("a") if isinstance(e, Tokens)]
    assert texts == ["", "", "€", "", ""]
    assert bench.pipe.text("a") == "€\ufffd"


def test_logprobs_name_the_chosen_token_and_the_best() -> None:
    bench = Bench()
    bench.run(submit("a", [101], 2, logprobs=3))
    tokens = [e for e in bench.pipe.events("a") if isinstance(e, Tokens)]
    for event in tokens:
        assert event.logprobs is not None
        (entry,) = event.logprobs
        assert [entry.token] == event.tokens
        assert entry.top[0].token == entry.token
        assert len(entry.top) == 3
        assert entry.bytes == [entry.token]
        assert -2 < entry.logprob < 0


def test_samplers_see_the_prompt_and_are_freed() -> None:
    bench = Bench()
    wanted = Sampling(repeat_penalty=1.5, repeat_last_n=3, seed=5, ignore_eos=True)
    bench.run(submit("a", [101, 102, 103, 104], 2, sampling=wanted))
    (sampler,) = bench.context.samplers
    assert sampler.accepted[:3] == [102, 103, 104]
    assert sampler.closed
    assert sampler.stages[0][0] == "logit_bias"
    assert {token for token, _ in sampler.stages[0][1][0]} == {7, EOS}
    assert sampler.stages[-1] == ("dist", (5,))


def test_snapshots_tell_the_slots_and_an_idle_loop_reports() -> None:
    bench = Bench()
    bench.pipe.put(submit("a", [101, 102], 500 - 400))
    bench.loop.turn()
    (slot,) = bench.loop.snapshot().slots
    assert (slot.request, slot.phase, slot.n_prompt, slot.n_past, slot.n_predicted) == ("a", "decode", 2, 2, 1)
    bench.run()
    idle = bench.loop.snapshot()
    assert (idle.slots, idle.kv_cells_used, idle.waiting) == ([], 0, 0)
    assert idle.times is not None
    assert idle.times.n_steps == len(bench.context.batches)


def test_the_message_that_ends_the_last_answer_shows_that_nothing_runs() -> None:
    bench = Bench()
    bench.run(submit("a", [101], 2))
    (last,) = [step for step in bench.pipe.sent if any(isinstance(e, Done) for e in step.events)]
    assert last.snapshot is not None
    assert last.snapshot.slots == []


class Noting:
    """Residency and idle work that note what they are told."""

    pending = underway = True

    def __init__(self) -> None:
        self.log: list[str] = []
        self.state = Residency(moves=1)

    def status(self) -> Residency:
        return self.state.model_copy()

    def synchronize(self) -> None: ...

    def adjust(self, _spec: ResidencySpec) -> None:
        self.log.append("adjust")

    def step(self) -> None:
        self.log.append("step")

    def interrupt(self) -> None:
        self.log.append("interrupt")


def test_idle_work_gives_back_what_it_holds_before_budgets_change() -> None:
    bench, both = Bench(), Noting()
    bench.loop._residency, bench.loop._idle = both, both  # type: ignore[assignment]
    bench.loop.turn()
    bench.pipe.put(Adjust(residency=ResidencySpec()))
    bench.loop.turn()
    assert both.log == ["step", "interrupt", "adjust"]


def test_what_status_says_is_sent_when_it_is_news() -> None:
    bench, both = Bench(), Noting()
    bench.loop._residency = both  # type: ignore[assignment]
    assert bench.loop.snapshot().residency == both.state
    assert bench.loop.snapshot().residency is None
    both.state = Residency(moves=2)
    assert bench.loop.snapshot().residency == both.state


def test_cells_that_leak_end_the_engine_loudly() -> None:
    bench = Bench()
    bench.context.cells[2] = [FakeCell(1)]
    with pytest.raises(RuntimeError, match="still hold cells"):
        bench.loop.snapshot()


def test_shutdown_fails_what_is_left_and_a_closed_pipe_ends_the_loop() -> None:
    bench = Bench()
    bench.pipe.put(submit("a", [101], 100))
    bench.loop.turn()
    bench.pipe.inbox.append(Shutdown().model_dump_json().encode())
    bench.loop.run()
    assert isinstance(bench.pipe.end("a"), Failed)
    other = Bench()
    other.pipe.closed = True
    other.loop.run()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_mixture_gives_every_request_its_own_answer(data: st.DataObject) -> None:
    """Whatever joins, leaves or runs out of cells: each answer is the one it would have had alone."""
    bench = Bench(
        n_ubatch=data.draw(st.integers(4, 16)),
        max_sequences=data.draw(st.integers(1, 4)),
        kv_cells=data.draw(st.integers(40, 120)),
        n_ctx=40,
    )
    requests: dict[str, tuple[list[int], int]] = {}
    cancelled = set()
    for i in range(data.draw(st.integers(1, 8))):
        prompt = data.draw(st.lists(st.integers(97, 122), min_size=1, max_size=20))
        requests[str(i)] = (prompt, data.draw(st.integers(1, 40 - len(prompt))))
        bench.pipe.put(submit(str(i), *requests[str(i)]))
        for _ in range(data.draw(st.integers(0, 5))):
            bench.loop.turn()
        if data.draw(st.booleans()):
            victim = str(data.draw(st.integers(0, i)))
            bench.pipe.put(Cancel(id=victim))
            cancelled.add(victim)
    bench.run()
    for request, (prompt, n) in requests.items():
        done = bench.pipe.end(request)
        assert isinstance(done, Done)
        whole = expected(prompt, n)
        if done.finish_reason == "cancelled":
            assert request in cancelled
            assert whole.startswith(bench.pipe.text(request))
        else:
            assert bench.pipe.text(request) == whole
    assert all(sampler.closed for sampler in bench.context.samplers)
