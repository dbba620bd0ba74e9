"""The load generator without a network: arrivals, bodies, figures, comparison, report."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotset_tools.bench.heard import Heard
from hotset_tools.bench.load import comparison, figures, report
from hotset_tools.bench.load.arms import Workload
from hotset_tools.bench.load.bodies import WORDS, Scale, Writer, scale, words
from hotset_tools.bench.load.figures import Outcome, by_time, percentiles
from hotset_tools.bench.load.plan import CHAT, LONG, MIXES, TITLE, Arrival, Source, arrivals, at_once, offered, sources

CHATS = (Source(CHAT, 8),)
WRITER = Writer(3, Scale(2.0, 10.0))


class TestPlan:
    @given(st.integers(0, 100), st.floats(1, 60), st.floats(0.1, 10))
    def test_in_order_within_the_time_and_the_same_again(self, seed: int, seconds: float, speed: float) -> None:
        wanted = sources("office", 8)
        plan = arrivals(wanted, seconds, seed, speed)
        assert plan == arrivals(wanted, seconds, seed, speed)
        assert [item.number for item in plan] == list(range(len(plan)))
        assert all(0 < a.at <= b.at < seconds for a, b in pairwise(plan))
        for client in {item.client for item in plan}:
            assert [item.turn for item in plan if item.client == client] == list(
                range(sum(item.client == client for item in plan))
            )

    def test_times_between_arrivals_are_exponential(self) -> None:
        plan = arrivals((Source(CHAT, 1),), 80_000, 5)
        between = [b.at - a.at for a, b in pairwise(plan)]
        mean = sum(between) / len(between)
        assert mean == pytest.approx(1 / CHAT.rate, rel=0.05)
        assert sum(x > mean for x in between) / len(between) == pytest.approx(math.exp(-1), abs=0.02)

    def test_even_arrivals_are_equally_far_apart(self) -> None:
        plan = arrivals((Source(LONG, 1),), 100, 1, 2.0)
        assert [item.at for item in plan] == pytest.approx([0.75 + 7.5 * n for n in range(14)])

    def test_another_seed_and_another_speed(self) -> None:
        assert arrivals(CHATS, 100, 1) != arrivals(CHATS, 100, 2)
        assert len(arrivals(CHATS, 1000, 1, 4.0)) == pytest.approx(4 * len(arrivals(CHATS, 1000, 1)), rel=0.1)

    def test_who_is_there_besides_changes_no_client(self) -> None:
        alone = [(item.at, item.turn) for item in arrivals((Source(CHAT, 1),), 100, 1)]
        plan = arrivals((Source(CHAT, 8), Source(LONG, 1)), 100, 1)
        assert [(item.at, item.turn) for item in plan if item.client == "chat-0"] == alone

    @pytest.mark.parametrize("mix", MIXES)
    @pytest.mark.parametrize("n", [3, 4, 5, 8, 17, 32])
    def test_every_mix_has_as_many_clients_as_asked_for(self, mix: str, n: int) -> None:
        found = sources(mix, n)
        assert sum(source.n_clients for source in found if source.kind.name != "long") == n
        assert all(source.n_clients >= 1 for source in found)

    def test_too_few_clients(self) -> None:
        with pytest.raises(ValueError, match="at least 3"):
            sources("office", 2)
        assert sources("chats", 1) == (Source(CHAT, 1),)

    def test_all_at_once(self) -> None:
        plan = arrivals(CHATS, 20, 1)
        together = at_once(plan)
        assert {item.at for item in together} == {0.0}
        assert [(item.client, item.number) for item in together] == [(item.client, item.number) for item in plan]

    def test_what_is_offered(self) -> None:
        plan = (Arrival(0, "a", CHAT, 0, 0), Arrival(1, "b", LONG, 1, 0))
        assert offered(plan, 10) == (CHAT.n_prompt + CHAT.n_output + LONG.n_prompt + LONG.n_output) / 10


class TestBodies:
    def arrival(self, number: int = 0, turn: int = 0) -> Arrival:
        return Arrival(0.0, "chat-1", CHAT, number, turn)

    def body(self, arrival: Arrival, writer: Writer = WRITER) -> dict[str, object]:
        found = json.loads(writer.body(arrival))
        assert isinstance(found, dict)
        return found

    def test_words_and_tokens(self) -> None:
        found = scale((10, 30), (110, 230))
        assert found == Scale(2.0, 10.0)
        assert found.n_words(4000) == 1995
        assert found.n_words(1) == 1
        with pytest.raises(ValueError, match="counted"):
            scale((10, 30), (110, 30))

    @given(st.integers(1, 300), st.text(max_size=5))
    def test_words_come_equally_often(self, n: int, seed: str) -> None:
        found = words(n, seed)
        assert len(found) == n
        counts = [found.count(word) for word in WORDS]
        assert max(counts) - min(counts) <= 1

    def test_the_same_bytes_again(self) -> None:
        assert WRITER.body(self.arrival()) == Writer(3, Scale(2.0, 10.0)).body(self.arrival())

    def test_fields(self) -> None:
        body = self.body(self.arrival(), replace(WRITER, model="m"))
        expected = {"model": "m", "stream": True, "max_tokens": CHAT.n_output, "ignore_eos": True, "user": "chat-1",
                    "cache_prompt": False, "stream_options": {"include_usage": True}}  # fmt: skip
        assert expected.items() <= body.items()
        assert "model" not in self.body(self.arrival())

    @pytest.mark.parametrize("turn", range(6))
    def test_history(self, turn: int) -> None:
        messages = self.body(self.arrival(turn=turn))["messages"]
        assert isinstance(messages, list)
        history = turn % CHAT.n_turns
        assert [m["role"] for m in messages] == ["user", "assistant"] * history + ["user"]
        assert sum(len(m["content"].split()) for m in messages) == WRITER.scale.n_words(CHAT.n_prompt)

    def test_prompts_begin_like_no_other(self) -> None:
        opening = [self.body(self.arrival(n, turn))["messages"][0]["content"].split()[0]  # type: ignore[index]
                   for n, turn in ((0, 0), (1, 1), (2, 2))]  # fmt: skip
        other = self.body(self.arrival(), Writer(4, WRITER.scale))["messages"][0]["content"].split()[0]  # type: ignore[index]
        assert len({*opening, other}) == 4

    def test_a_conversation_that_may_be_cached_goes_on(self) -> None:
        """Its first message is the same in every turn up to its length, and another one in the next conversation."""
        writer = replace(WRITER, cached=True)
        bodies = [self.body(self.arrival(turn, turn), writer) for turn in range(CHAT.n_turns + 1)]
        first = [body["messages"][0]["content"] for body in bodies]  # type: ignore[index]
        assert bodies[1]["cache_prompt"] is True
        for turn in range(1, CHAT.n_turns):
            assert first[turn].startswith(first[CHAT.n_turns - 1])
        assert first[CHAT.n_turns].split()[0] != first[0].split()[0]

    def test_rounds_share_no_prompt(self) -> None:
        workload = Workload(CHATS, 200, n_rounds=4, burst_seconds=20)
        rounds = [*workload.rounds(), workload.burst()]
        bodies = [Writer(one.seed, WRITER.scale).body(item) for one in rounds for item in one.plan]
        openings = {json.loads(body)["messages"][0]["content"].split()[0] for body in bodies}
        assert len(openings) == len(bodies)

    def test_autocomplete_is_a_completion(self) -> None:
        kind = next(kind for kind, _ in MIXES["office"] if kind.name == "autocomplete")
        body = self.body(Arrival(0, "a", kind, 0, 0))
        assert len(str(body["prompt"]).split()) == WRITER.scale.n_words(kind.n_prompt)


def outcome(
    *texts: float,
    at: float = 0.0,
    kind: object = CHAT,
    n_prompt: int = 10,
    n_output: int = 0,
    fault: str = "",
    status: int = 200,
) -> Outcome:
    heard = Heard(status, texts, texts, n_prompt, n_output or len(texts), "length", fault)
    return Outcome(Arrival(at, "c", kind, 0, 0), at + 0.001, texts[-1] if texts else at, heard)  # type: ignore[arg-type]


class TestFigures:
    def test_percentiles(self) -> None:
        found = percentiles(range(101))
        assert (found.n, found.p50, found.p95, found.p99) == (101, 50, 95, 99)
        assert percentiles([1.0, 2.0]).p50 == 1.5
        assert percentiles([]) == figures.Percentiles(0, None, None, None)
        assert percentiles([4.0]).p99 == 4.0

    @given(st.lists(st.floats(0, 1e6), min_size=1))
    def test_percentiles_are_ordered_and_within(self, values: list[float]) -> None:
        for found in (percentiles(values), by_time(values)):
            assert found.p50 is not None
            assert found.p95 is not None
            assert found.p99 is not None
            assert min(values) <= found.p50 <= found.p95 <= found.p99 <= max(values)

    def test_one_stall_is_rare_by_count_and_most_of_the_time(self) -> None:
        gaps = [0.01] * 99 + [3.0]
        assert percentiles(gaps).p95 == 0.01
        assert by_time(gaps).p50 == 3.0
        assert by_time([]).p95 is None

    def test_latencies_count_from_the_planned_arrival(self) -> None:
        found = figures.figures("a", {}, [[outcome(2.5, 2.75, 3.5, at=2.0)]])
        chat = found.kinds[0]
        assert (chat.ttft.p50, chat.itl.n, chat.itl.p50, chat.tpot.p50) == (0.5, 2, 0.5, 0.5)
        assert found.ttft_short.p50 == 0.5
        assert found.late.p50 == pytest.approx(0.001)

    def test_merged_tokens_gain_nothing(self) -> None:
        """Ten tokens in two pieces, a second apart: one gap of a second, not ten of a tenth."""
        chat = figures.figures("a", {}, [[outcome(1.0, 2.0, n_output=10)]]).kinds[0]
        assert (chat.itl.n, chat.itl.p50, chat.tokens_per_piece) == (1, 1.0, 5.0)

    def test_throughput_is_of_whole_answers_over_all_rounds(self) -> None:
        first = [outcome(1.0, 2.0), outcome(1.0, 5.0, fault="broke off")]
        second = [outcome(1.5, 5.0, at=1.0, kind=LONG, n_prompt=4000)]
        found = figures.figures("a", {}, [first, second, []])
        assert (found.n_prompt, found.n_output, found.seconds) == (4010, 4, 9.0)
        assert found.throughput == 4014 / 9
        assert found.output_rate == 4 / 9
        assert found.ttft_short.n == 1, "a long prompt is none that is short, and a broken answer none at all"

    def test_what_was_refused_or_failed_is_counted(self) -> None:
        bad = [outcome(fault="HTTP 429: full", status=429), outcome(fault="HTTP 429: full", status=429),
               outcome(fault="HTTP 503: loading", status=503), outcome(1.0, fault="broke off")]  # fmt: skip
        found = figures.figures("a", {}, [[*bad, outcome(1.0, 2.0)]], burst=[outcome(fault="gone", status=0)])
        assert (found.n_refused, found.n_failed) == (3, 2)
        assert found.faults == {"HTTP 429: full": 2, "HTTP 503: loading": 1, "broke off": 1, "gone": 1}
        assert (found.kinds[0].n_sent, found.kinds[0].n_whole) == (5, 1)

    def test_capacity_is_of_the_burst_alone(self) -> None:
        found = figures.figures("a", {}, [[outcome(1.0, 2.0)]], burst=[outcome(1.0, 4.0), outcome(2.0, 3.0)])
        assert found.capacity == 24 / 4
        assert found.throughput == 12 / 2

    def test_nothing_at_all(self) -> None:
        found = figures.figures("a", {}, [[]])
        assert (found.throughput, found.capacity, found.chats, found.ttft_short.p95) == (0.0, None, None, None)
        dead = figures.figures("a", {}, [[outcome(fault="refused", status=0)]])
        assert (dead.throughput, dead.n_failed) == (0.0, 1)


def server(
    name: str, itl: float, ttft: float, throughput: float, capacity: float | None = None
) -> figures.ServerFigures:
    """One whose chats have these figures."""
    made = figures.figures(name, {"b": 1}, [[outcome(ttft, ttft + itl, ttft + 2 * itl)]])
    return replace(made, throughput=throughput, capacity=capacity)


class TestComparison:
    OURS = server("ours", 0.1, 1.0, 95.0, 90.0)

    def test_against_the_highest_throughput(self) -> None:
        peers = [server("a", 0.05, 0.5, 90.0), server("b", 0.2, 4.0, 100.0, 60.0)]
        best = comparison.best_peer(peers)
        assert best is peers[1]
        found = comparison.ratios(self.OURS, best)
        assert found.peer == "b"
        assert found.p95_itl == pytest.approx(0.5)
        assert found.p95_itl_by_time == pytest.approx(0.5)
        assert found.p95_tpot == pytest.approx(0.5)
        assert found.p95_ttft_short == pytest.approx(0.25)
        assert found.throughput == pytest.approx(0.95)
        assert found.capacity == pytest.approx(1.5)

    def test_what_is_missing_gives_no_ratio(self) -> None:
        empty = figures.figures("a", {}, [[]])
        assert set(comparison.ratios(self.OURS, empty).as_json().values()) == {"a", None}
        assert comparison.best_peer([]) is None

    def test_dominated_by_time_looks_at_stalls(self) -> None:
        """A peer with one long stall among many short gaps is better by count, not by time."""
        steady = figures.figures("ours", {}, [[outcome(2.0, *(2.0 + 0.1 * n for n in range(1, 100)))]])
        stalls = figures.figures("b", {}, [[outcome(1.0, *(1.0 + 0.01 * n for n in range(1, 99)), 9.0)]])
        assert comparison.dominated_by(steady, [stalls]) == ["b"]
        assert comparison.dominated_by(steady, [stalls], by_time=True) == []

    def test_dominated_only_by_who_is_better_in_all_three(self) -> None:
        peers = [server("all", 0.05, 0.5, 96.0), server("slow", 0.05, 0.5, 94.0), server("late", 0.05, 2.0, 99.0),
                 server("jerky", 0.2, 0.5, 99.0), replace(self.OURS, name="same")]  # fmt: skip
        assert comparison.dominated_by(self.OURS, peers) == ["all"]
        assert comparison.dominated_by(figures.figures("none", {}, [[]]), peers[:1]) == ["all"]
        assert comparison.dominated_by(self.OURS, [figures.figures("none", {}, [[]])]) == []


class TestReport:
    WORKLOAD = Workload(sources("chats+long", 8), 44, 2, burst_seconds=12)

    def run(self, *peers: figures.ServerFigures, ours: figures.ServerFigures | None = None) -> report.LoadRun:
        return report.LoadRun(ours or TestComparison.OURS, peers, self.WORKLOAD.as_json(), "m.gguf", {"cores": 2}, 9.0)

    def test_json(self) -> None:
        run = self.run(server("a", 0.05, 0.5, 96.0), server("b", 0.2, 4.0, 100.0))
        found = json.loads(json.dumps(run.as_json()))
        assert found["ours"]["name"] == "ours"
        assert [peer["settings"] for peer in found["peers"]] == [{"b": 1}, {"b": 1}]
        assert found["ratios"]["peer"] == "b"
        assert {"p95_itl", "p95_ttft_short", "throughput"} <= found["ratios"].keys()
        assert found["peers"][0]["ratios"]["p95_itl"] == pytest.approx(2.0)
        assert found["dominated_by"] == ["a"]
        assert found["workload"]["clients"] == {"chat": 8, "long": 1}
        assert len(found["workload"]["requests"]) == 2

    def test_one_server_alone(self) -> None:
        found = self.run().as_json()
        assert (found["ratios"], found["peers"], found["dominated_by"]) == (None, [], [])
        assert "Ratios" not in report.table(self.run().as_json())

    def test_table(self) -> None:
        text = report.table(self.run(server("a", 0.05, 0.5, 96.0), server("b", 0.2, 4.0, 100.0)).as_json())
        assert "| ours | 95.0 | 90.0 | 100 / 100 / 100 ms |" in text
        assert "Ratios to b (highest throughput): p95_itl 0.50" in text
        assert "Better than ours in all three: a and with gaps by time a." in text
        alone = report.table(self.run(server("b", 0.2, 4.0, 100.0)).as_json())
        assert "Better than ours in all three: none and with gaps by time none." in alone

    def test_other_kinds_get_a_table_of_their_own(self) -> None:
        made = figures.figures("t", {}, [[outcome(1.0, 2.0, kind=TITLE)]])
        assert "| t | title | 1 of 1 |" in report.table(self.run(ours=made).as_json())

    def test_what_makes_figures_doubtful_is_said(self) -> None:
        bad = replace(TestComparison.OURS, n_refused=2, n_failed=1, faults={"HTTP 429: full": 2}, others_cpu=0.5,
                      late=percentiles([0.3]))  # fmt: skip
        text = report.table(self.run(ours=bad).as_json())
        for words_ in (
            "2 requests were refused",
            "1 requests failed",
            "2 x HTTP 429: full",
            "others used 50%",
            "0.30 s late",
        ):
            assert words_ in text
