"""Admission's rules for classes, clients and newer requests, and what a 429 says."""

from __future__ import annotations

import pytest

from daemon.config import QueueSection
from daemon.errors import ClientQueueFull, QueueFull
from daemon.messages import Done
from daemon.ticket import Ticket
from tests.pure.test_admission import Again, Scene, read, settle, submit_with


async def test_classes_start_in_their_order_and_clients_of_one_take_turns() -> None:
    scene = Scene(capacity=1, max_waiting=9)
    scene.submit("first", prompt=[1] * 2000)
    for name in ("a1", "a2", "a3"):
        scene.submit(name, client="a", prompt=[1] * 1000)
    scene.submit("b1", client="b", prompt=[1] * 1000)
    scene.submit("late", priority="background")
    scene.submit("quick", priority="interactive", client="a")
    order = ["quick", "a1", "b1", "a2", "a3", "late"]
    assert [one.id for one in scene.admission.waiting()] == order
    for name in ["first", *order]:
        scene.finish(name)
    assert scene.started == ["first", *order]


async def test_the_queue_shows_who_waits_how_long_and_in_which_class() -> None:
    scene = Scene(capacity=1)
    scene.submit("a")
    scene.submit("b", client="bob", priority="background")
    scene.clock.now += 2.5
    waits = scene.submit("c", client="carol", priority="interactive")
    quick, slow = scene.admission.waiting()
    assert (quick.id, quick.position, quick.priority, quick.client, quick.seconds) == (
        "c",
        0,
        "interactive",
        "carol",
        0,
    )
    assert (slow.id, slow.position, slow.priority, slow.client, slow.seconds) == ("b", 1, "background", "bob", 2.5)
    assert waits.position == 0
    assert scene.admission.statistics().waiting_in == {"interactive": 1, "normal": 0, "background": 1}


async def test_an_interactive_one_runs_beside_background_ones_that_take_all_places() -> None:
    scene = Scene(capacity=2, max_waiting=9)
    for name in ("b1", "b2", "b3"):
        scene.submit(name, priority="background")
    scene.submit("n1")
    assert scene.started == ["b1", "b2"]
    for name in ("i1", "i2", "i3"):
        scene.submit(name, priority="interactive")
    assert scene.started == ["b1", "b2", "i1", "i2"], "as many as run together, not counting background"
    assert scene.admission.statistics().running == 4, "what is parked runs"
    scene.finish("b1")
    assert scene.started[4:] == [], "i1 and i2 are as many as run together"
    scene.finish("i1")
    assert scene.started[4:] == ["i3"]
    scene.finish("i2", "i3", "b2")
    assert scene.started[5:] == ["n1", "b3"]


async def test_normal_ones_that_all_places_are_taken_by_are_not_parked() -> None:
    scene = Scene(capacity=2)
    scene.submit("n1")
    scene.submit("n2")
    scene.submit("i", priority="interactive")
    assert scene.started == ["n1", "n2"]
    scene.finish("n2")
    assert scene.started == ["n1", "n2", "i"]


async def test_normal_ones_do_not_wait_for_ever_behind_parked_ones() -> None:
    """Interactive ones keep coming, and so the background one never gets on."""
    scene = Scene(capacity=1, max_waiting=40)
    scene.submit("parked", priority="background")
    scene.submit("normal")
    for number in range(20):
        scene.submit(f"i{number}", priority="interactive")
    for number in range(20):
        scene.finish(f"i{number}")
        if "normal" in scene.started:
            break
    assert scene.started == ["parked", *(f"i{number}" for number in range(8)), "normal"]
    scene.finish("normal")
    assert scene.started[-1] == "i8"


async def test_a_client_runs_no_more_than_it_may_and_others_go_on() -> None:
    scene = Scene(capacity=3, max_waiting=9)
    scene.limit(client_running=1)
    for name in ("a1", "a2"):
        scene.submit(name, client="a")
    scene.submit("b1", client="b")
    assert scene.started == ["a1", "b1"]
    scene.finish("b1")
    assert scene.started == ["a1", "b1"]
    scene.limit(client_running=2)
    assert scene.started == ["a1", "b1", "a2"], "a limit that is higher now lets it start at once"


async def test_a_client_has_no_more_tokens_on_their_way_than_it_may_but_always_one_answer() -> None:
    scene = Scene(capacity=9, max_waiting=9)
    scene.limit(client_tokens=100)
    scene.submit("huge", client="a", prompt=[1] * 500)
    scene.submit("a1", client="a", prompt=[1] * 45, max_tokens=5)
    assert scene.started == ["huge"], "the only one of a client may have any number"
    scene.finish("huge")
    scene.submit("a2", client="a", prompt=[1] * 45, max_tokens=5)
    scene.submit("a3", client="a", prompt=[1], max_tokens=1)
    scene.submit("b1", client="b", prompt=[1] * 90)
    assert scene.started == ["huge", "a1", "a2", "b1"]
    scene.finish("a1")
    assert scene.started[-1] == "a3"


async def test_a_client_that_waits_too_often_is_refused_where_others_are_not() -> None:
    scene = Scene(capacity=1, max_waiting=9)
    scene.limit(client_waiting=1)
    scene.submit("a1", client="a")
    scene.submit("a2", client="a")
    with pytest.raises(ClientQueueFull, match=r"1 requests of this client .*queue\.client_waiting"):
        scene.submit("a3", client="a")
    scene.submit("b1", client="b")
    assert [one.id for one in scene.admission.waiting()] == ["a2", "b1"]


async def test_background_ones_leave_a_quarter_of_the_queue_to_others() -> None:
    scene = Scene(capacity=1, max_waiting=4)
    scene.submit("runs")
    for number in range(3):
        scene.submit(f"b{number}", priority="background")
    with pytest.raises(QueueFull, match="3 background requests"):
        scene.submit("b3", priority="background")
    scene.submit("n", priority="normal")
    with pytest.raises(QueueFull, match="4 requests are waiting"):
        scene.submit("i", priority="interactive")


async def test_lower_limits_drop_nobody_and_hold_for_what_comes() -> None:
    scene = Scene(capacity=1, max_waiting=4)
    for name in "abcde":
        scene.submit(name)
    scene.limit(max_waiting=1, client_waiting=1, client_running=1, client_tokens=1)
    assert scene.admission.statistics().waiting == 4
    with pytest.raises(QueueFull):
        scene.submit("f")
    scene.finish(*"abcd")
    assert scene.started == list("abcde")


# -- Retry-After


def refused(scene: Scene, name: str = "refused", **fields: object) -> int:
    """The seconds that a request is told that finds no room."""
    with pytest.raises(QueueFull) as caught:
        scene.submit(name, **fields)
    assert isinstance(caught.value.retry_after, int)
    return caught.value.retry_after


async def test_retry_after_is_the_time_until_the_next_of_the_queue_starts() -> None:
    scene = Scene(capacity=2, max_waiting=1)
    scene.submit("learn")
    scene.finish("learn")  # five tokens, two seconds each
    scene.submit("a")
    scene.clock.now += 4
    scene.submit("b", max_tokens=2)
    scene.submit("c")
    assert refused(scene) == 4, "b has two tokens to go, a three"
    scene.clock.now += 2.5
    assert refused(scene) == 2, "1.5 s of b are left"
    scene.clock.now += 100
    assert refused(scene) == 1, "overdue: any moment"


async def test_retry_after_counts_all_that_has_to_start_before_there_is_room() -> None:
    scene = Scene(capacity=1, max_waiting=4)
    scene.submit("learn")
    scene.finish("learn")
    for name in "abcde":
        scene.submit(name)
    assert refused(scene) == 10
    scene.limit(max_waiting=2)
    assert refused(scene) == 30, "three have to start first"


async def test_retry_after_grows_with_what_prompts_cost() -> None:
    scene = Scene(capacity=1, max_waiting=1)
    scene.submit("learn")
    scene.finish("learn", n_prompt=100, n_cached=50, prompt_ms=5000, predicted_ms=500)
    scene.submit("a", prompt=[1] * 300)
    scene.submit("b")
    assert refused(scene) == 31, "a tenth of a second for each token of the prompt or of the answer"


async def test_retry_after_of_one_client_is_the_time_until_its_own_turn() -> None:
    scene = Scene(capacity=1, max_waiting=9)
    scene.submit("learn")
    scene.finish("learn")
    scene.submit("a", client="a")
    scene.submit("quick", client="c", priority="interactive")
    scene.submit("b1", client="b")
    scene.limit(client_waiting=1)
    assert refused(scene, client="b") == 20, "a and quick come before b1"


async def test_retry_after_of_the_background_class_is_the_time_until_its_own_turn() -> None:
    scene = Scene(capacity=1, max_waiting=4)
    scene.submit("learn")
    scene.finish("learn")
    for number in range(4):
        scene.submit(f"b{number}", priority="background")
    assert refused(scene, priority="background") == 10
    scene.limit(max_waiting=5)
    scene.submit("b4", priority="background")
    scene.limit(max_waiting=6)
    scene.submit("n")
    scene.limit(max_waiting=9)
    scene.submit("b5", priority="background")
    scene.submit("b6", priority="background")
    scene.submit("b7", priority="background")
    assert refused(scene, priority="background") == 20, "n starts before the first of them"


async def test_retry_after_before_anything_is_known_is_a_guess_from_what_runs() -> None:
    scene = Scene(capacity=1, max_waiting=1)
    scene.submit("a")
    scene.submit("b")
    assert refused(scene) == 1
    scene.clock.now += 30
    assert refused(scene) == 30, "it is taken to be half done"


async def test_retry_after_while_another_engine_loads_counts_its_load_too() -> None:
    scene = Scene(capacity=1, max_waiting=1)
    scene.submit("learn")
    scene.finish("learn")
    scene.admission.hold()
    scene.engine.capacity = 0
    scene.submit("a")
    assert refused(scene) == scene.engine.retry_after


# -- newest wins


async def test_a_newer_one_takes_the_place_of_one_that_waits_even_in_a_full_queue() -> None:
    scene = Scene(capacity=1, max_waiting=1)
    scene.submit("runs")
    old = scene.submit("old", client="a", replaces="file.py")
    new = scene.submit("new", client="a", replaces="file.py")
    [end] = [event async for event in old]
    assert isinstance(end, Done)
    assert (end.finish_reason, old.begun) == ("cancelled", False)
    assert new.position == 0
    scene.finish("runs")
    assert scene.started == ["runs", "new"]


async def test_a_newer_background_one_takes_the_place_of_the_older_in_a_full_part_of_the_queue() -> None:
    """A key with the class background asks for autocompletion."""
    scene = Scene(capacity=1, max_waiting=4)
    scene.submit("runs")
    for number in range(2):
        scene.submit(f"b{number}", priority="background")
    scene.submit("old", client="a", priority="background", replaces="file.py")
    scene.submit("new", client="a", priority="background", replaces="file.py")
    assert [one.id for one in scene.admission.waiting()] == ["b0", "b1", "new"]


async def test_a_newer_one_cancels_one_that_runs_and_starts_when_that_has_ended() -> None:
    scene = Scene(capacity=1)
    old = scene.submit("old", replaces="key")
    scene.submit("new", replaces="key")
    assert (scene.cancelled, scene.started) == (["old"], ["old"])
    scene.finish("old", finish_reason="cancelled")
    assert await read(old) == ["done"]
    assert scene.started == ["old", "new"]


async def test_only_the_same_client_and_the_same_key_are_replaced() -> None:
    scene = Scene(capacity=1, max_waiting=9)
    scene.submit("runs")
    scene.submit("a", client="a", replaces="x")
    scene.submit("b", client="b", replaces="x")
    scene.submit("c", client="a", replaces="y")
    scene.submit("plain", client="a")
    scene.submit("plain too", client="a")
    scene.finish("runs")
    assert scene.admission.statistics().waiting == 4
    assert scene.cancelled == []


async def test_one_that_is_refused_takes_nobodys_place() -> None:
    scene = Scene(capacity=1, max_waiting=0)
    scene.submit("old", replaces="key")
    with pytest.raises(QueueFull):
        scene.submit("new", replaces="key")
    assert scene.cancelled == []


async def test_the_third_replaces_the_second_also_once_the_first_has_ended() -> None:
    scene = Scene(capacity=1)
    scene.submit("first", replaces="key")
    second = scene.submit("second", replaces="key")
    scene.finish("first", finish_reason="cancelled")
    scene.submit("third", replaces="key")
    assert scene.cancelled == ["first", "second"]
    scene.finish("second", finish_reason="cancelled")
    assert await read(second) == ["done"]
    assert scene.started == ["first", "second", "third"]


async def test_what_is_over_is_not_replaced() -> None:
    scene = Scene(capacity=1)
    scene.submit("old", replaces="key")
    scene.finish("old")
    scene.submit("new", replaces="key")
    assert scene.cancelled == []
    scene.engine.capacity = 0
    scene.admission.engine_lost("it died")
    scene.engine.capacity = 1
    scene.submit("newer", replaces="key")
    assert (scene.cancelled, scene.started) == ([], ["old", "new", "newer"])


async def test_one_that_is_made_anew_can_be_replaced() -> None:
    scene = Scene(capacity=1)
    scene.admission.hold()
    again = Again("old")
    old: Ticket = scene.admission.submit(scene.made("old"), again=again, replaces="key")
    scene.admission.renew()
    scene.admission.release()
    await settle()
    scene.submit("new", replaces="key")
    assert await read(old) == ["done"]
    await settle()
    assert scene.started == ["new"]


async def test_one_that_is_made_anew_has_not_used_up_its_turn() -> None:
    scene = Scene(capacity=1)
    scene.admission.hold()
    agains = {name: Again(name) for name in ("a", "b")}
    for client, again in agains.items():
        submit = scene.made(client, client=client, prompt=[1] * 1000)
        scene.admission.submit(submit, again=again)
    scene.admission.renew()
    scene.admission.release()
    await settle()
    agains["a"].submit_as = scene.made("a", client="a", prompt=[2] * 1000)
    agains["a"].may.set()
    await settle()
    assert (scene.started, agains["b"].n_asked) == (["a"], 0)


async def test_limits_of_a_client_hold_while_requests_are_made_anew() -> None:
    scene = Scene(capacity=3, max_waiting=9)
    scene.limits = QueueSection(max_waiting=9, client_running=1)
    scene.admission.hold()
    agains = [Again(name) for name in "ab"]
    for again in agains:
        submit_with(scene, again)
    scene.admission.renew()
    scene.admission.release()
    await settle()
    assert [again.n_asked for again in agains] == [1, 0]
    agains[0].may.set()
    await settle()
    assert scene.started == ["a"]
    agains[1].may.set()
    scene.finish("a")
    await settle()
    assert scene.started == ["a", "b"]


async def test_leaving_twice_after_being_replaced_ends_nothing_else() -> None:
    scene = Scene(capacity=1)
    old = scene.submit("old", replaces="key")
    scene.submit("new", replaces="key")
    old.cancel()
    scene.finish("old", finish_reason="cancelled")
    old.cancel()
    assert await read(old) == []
    assert (scene.cancelled, scene.started) == (["old", "old"], ["old", "new"])
