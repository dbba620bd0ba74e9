"""One load in the place of another: what is served when, what waits, and what a load that fails leaves as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from daemon import settings
from daemon.admission import Admission, Ticket
from daemon.config import Config, QueueSection
from daemon.errors import ModelLoading, ModelUnusable
from daemon.exchange import Exchange
from daemon.messages import Cancel, Done, LoadResult, LoadStep, Reload, Submit
from daemon.reload import Reloader
from daemon.replacement import Replacement
from daemon.settings import Settings

LARGER = Config.model_validate({"model": {"context": 512}})


async def until(condition: Callable[[], bool]) -> None:
    """Let the others go on until this holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0)


class FakePool:
    """Starts when it may, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.info = "read"
        self.closed = 0
        self._error = error

    async def start(self) -> None:
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        self.closed += 1


class FakePools:
    def __init__(self) -> None:
        self.current: Any = FakePool()
        self.next: Any = FakePool()
        self.made: list[Config] = []

    def make(self, config: Config) -> Any:
        self.made.append(config)
        return self.next

    def serve(self, pool: Any) -> None:
        self.current = pool


class FakeSupervisor:
    """An engine that takes `capacity` answers; the test tells how a replacement goes."""

    def __init__(self) -> None:
        self.capacity, self.retry_after, self.progress = 2, 1, 1.0
        self.info: object = "loaded"
        self.reason = ""
        self.sent: list[Submit | Cancel] = []
        self.order: Replacement | None = None
        self.ordered = asyncio.Event()

    def send(self, command: Submit | Cancel) -> None:
        self.sent.append(command)

    def expect(self, why: str) -> None:
        self.reason, self.progress = why, 0.0

    async def replace(self, replacement: Replacement) -> None:
        self.order, self.capacity = replacement, 0
        self.ordered.set()

    async def begun(self) -> Replacement:
        """The order, whose new engine has started."""
        await self.ordered.wait()
        assert self.order is not None
        self.order.begin(self.order._load)
        return self.order


class Scene:
    def __init__(self, seconds: float = 60.0) -> None:
        self.supervisor, self.pools = FakeSupervisor(), FakePools()
        self.admission = Admission(self.supervisor, lambda: QueueSection(max_waiting=3))
        self.exchange = Exchange(cast(Any, self.supervisor), self.admission, self.pools, lambda: seconds)
        self.before, self.new = self.pools.current, self.pools.next
        self.steps: list[LoadStep] = []
        self.adopted: list[tuple[object, ...]] = []

    def submit(self, name: str) -> Ticket:
        async def again() -> Submit:
            return Submit(id=name, prompt=[2], max_tokens=1)

        return self.admission.submit(Submit(id=name, prompt=[1], max_tokens=1), again=again)

    def finish(self, name: str) -> None:
        values: dict[str, Any] = dict.fromkeys(("n_prompt", "n_cached", "n_predicted"), 0)
        values |= dict.fromkeys(("wait_ms", "prompt_ms", "predicted_ms"), 0.0)
        self.admission.deliver(Done(id=name, finish_reason="stop", **values))

    def adopt(self) -> None:
        self.adopted.append((self.pools.current, len(self.started)))

    def load(self) -> asyncio.Task[LoadResult]:
        return asyncio.create_task(self.exchange.load(LARGER, self.adopt, self.steps.append))

    @property
    def started(self) -> list[tuple[str, int]]:
        """(id, first token) of what the engine got."""
        return [(command.id, command.prompt[0]) for command in self.supervisor.sent if isinstance(command, Submit)]


async def test_everything_changes_in_one_moment_and_the_queue_goes_on() -> None:
    scene = Scene()
    for name in "abc":
        scene.submit(name)
    load = scene.load()
    await until(lambda: bool(scene.supervisor.reason))
    assert "finished first" in scene.supervisor.reason
    scene.submit("d")
    scene.finish("a")
    await asyncio.sleep(0)
    assert scene.supervisor.order is None, "b still runs"
    scene.finish("b")
    order = await scene.supervisor.begun()
    assert order._load.context == 512
    scene.submit("e")
    assert (scene.pools.current, scene.adopted) == (scene.before, [])
    scene.supervisor.capacity = 2
    order.ready()
    scene.submit("f")
    result = await load
    assert (result.result, result.cut_off) == ("loaded", 0)
    assert scene.adopted == [(scene.before, 2)]
    assert scene.pools.current is scene.new
    assert (scene.before.closed, scene.new.closed) == (1, 0)
    for name in "cdef":
        await until(lambda name=name: name in [started for started, _ in scene.started])  # type: ignore[misc]
        scene.finish(name)
    assert sorted(scene.started) == [("a", 1), ("b", 1), ("c", 2), ("d", 2), ("e", 2), ("f", 1)]


async def test_answers_that_take_too_long_are_ended_and_counted() -> None:
    scene = Scene(seconds=0)
    late = scene.submit("a")
    load = scene.load()
    order = await scene.supervisor.begun()
    order.ready()
    assert (await load).cut_off == 1
    assert [event.kind async for event in late] == ["failed"]


async def test_a_vocabulary_that_cannot_be_read_disturbs_nobody() -> None:
    scene = Scene()
    scene.pools.next = scene.new = FakePool(ModelUnusable("x.gguf is cut off"))
    scene.submit("a")
    result = await scene.load()
    assert (result.result, result.reason) == ("failed", "x.gguf is cut off")
    assert (scene.supervisor.order, scene.supervisor.reason) == (None, "")
    scene.submit("b")
    assert scene.started == [("a", 1), ("b", 1)]
    assert (scene.before.closed, scene.new.closed) == (0, 1)


async def test_no_process_for_the_new_pool() -> None:
    scene = Scene()
    scene.pools.next = FakePool(OSError(12, "Cannot allocate memory"))
    assert "Cannot allocate memory" in (await scene.load()).reason


async def test_an_engine_that_does_not_come_leaves_the_queue_to_the_one_of_before() -> None:
    scene = Scene()
    load = scene.load()
    order = await scene.supervisor.begun()
    scene.submit("a")
    assert order.ended("no room", refused=True) == "return"
    order.begin(order._load)
    scene.supervisor.capacity = 2
    order.ready()
    result = await load
    assert (result.result, result.reason) == ("failed", "no room")
    assert (scene.started, scene.adopted) == ([("a", 1)], [])
    assert scene.pools.current is scene.before
    assert (scene.before.closed, scene.new.closed) == (0, 1)
    scene.finish("a")
    scene.supervisor.ordered.clear()
    again = scene.load()
    (await scene.supervisor.begun()).ready()
    assert (await again).result == "loaded"


async def test_nothing_is_taken_any_more_when_neither_engine_comes() -> None:
    scene = Scene()
    load = scene.load()
    order = await scene.supervisor.begun()
    waits = scene.submit("a")
    order.ended("no room", refused=True)
    order.hopeless("gone")
    scene.admission.engine_unlikely("gone")
    assert "no room; and" in (await load).reason
    assert [event.kind async for event in waits] == ["failed"]
    with pytest.raises(ModelLoading):
        scene.submit("b")


async def test_a_second_order_is_refused_while_one_is_under_way() -> None:
    scene = Scene()
    first = scene.load()
    order = await scene.supervisor.begun()
    second = await scene.load()
    assert (second.result, second.reason) == ("refused", "another load is under way (loading)")
    order.ready()
    assert (await first).result == "loaded"


@pytest.mark.parametrize("lacks", ["engine", "vocabulary", "time"])
async def test_an_order_comes_too_early_or_too_late(lacks: str) -> None:
    scene = Scene()
    if lacks == "engine":
        scene.supervisor.info = None
    elif lacks == "vocabulary":
        del scene.before.info
    else:
        await scene.admission.drain(0)
    assert (await scene.load()).result == "refused"
    assert scene.pools.made == []


async def test_stopping_in_the_middle_leaves_no_pool_behind_and_adopts_nothing() -> None:
    scene = Scene()
    load = scene.load()
    order = await scene.supervisor.begun()
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    order.ready()
    assert (scene.new.closed, scene.before.closed, scene.adopted) == (1, 0, [])


async def test_the_steps_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemon.exchange.LOOK_SECONDS", 0.0)
    scene = Scene()
    scene.submit("a")
    load = scene.load()
    await until(lambda: "draining" in [step.stage for step in scene.steps])
    assert scene.steps[-1].running == 1
    scene.finish("a")
    order = await scene.supervisor.begun()
    scene.supervisor.progress = 0.5
    await until(lambda: scene.steps[-1].progress == 0.5)
    assert scene.steps[-1].stage == "loading"
    order.ended("no room", refused=True)
    await until(lambda: scene.steps[-1].stage == "returning")
    order.ready()
    await load
    told = len(scene.steps)
    await asyncio.sleep(0)
    assert len(scene.steps) == told
    assert all(one != other for one, other in zip(scene.steps, scene.steps[1:], strict=False))


class Service:
    """A reloader over a real file, and an exchange that ends as the test says."""

    def __init__(self, directory: Path, text: str = "[queue]\nmax_waiting = 5\n") -> None:
        self.file = directory / "config.toml"
        self.file.write_text(text, "utf-8")
        self.running = settings.read(self.file, {})
        self.reports: list[Reload] = []
        self.loaded: list[Config] = []
        self.result = LoadResult(result="loaded", seconds=1.5)
        self.meanwhile: str | None = None
        self.reloader = Reloader(self.file, self.running, apply=self.apply, report=self.reports.append, environ={})

    def apply(self, new: Settings) -> None:
        self.running = new

    async def exchange(self, config: Config, adopt: Any, say: Any) -> LoadResult:
        self.loaded.append(config)
        if self.meanwhile is not None:
            self.file.write_text(self.meanwhile, "utf-8")
            await self.reloader.reload_if_changed()
        if self.result.result == "loaded":
            adopt()
        return self.result

    async def load(self, text: str | None = None, *, force: bool = False) -> Reload:
        if text is not None:
            self.file.write_text(text, "utf-8")
        return await self.reloader.load(self.exchange, force=force, say=lambda _: None)


EDITED = "[queue]\nmax_waiting = 6\n[http]\nport = 1\n[model]\nname = 'x'\n"


def keys(found: list[Any]) -> list[str]:
    return [change.key for change in found]


async def test_what_waited_for_a_load_is_in_force_after_it_and_the_rest_waits_on(tmp_path: Path) -> None:
    service = Service(tmp_path)
    outcome = await service.load(EDITED)
    assert outcome.load is not None
    assert (keys(outcome.applied), keys(outcome.load.loaded)) == (["queue.max_waiting"], ["model.name"])
    assert keys(outcome.pending) == ["http.port"]
    assert (service.loaded[0].model.name, service.loaded[0].http.port) == ("x", 8117)
    assert (service.running.config.model.name, service.running.config.http.port) == ("x", 8117)
    assert service.reports[-1] == outcome
    assert keys((await service.reloader.reload("signal")).pending) == ["http.port"]


async def test_a_load_that_failed_leaves_its_keys_pending(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.result = LoadResult(result="failed", reason="no room")
    outcome = await service.load(EDITED)
    assert outcome.load == service.result
    assert keys(outcome.pending) == ["model.name", "http.port"]
    running = service.running.config
    assert (running.model.name, running.queue.max_waiting) == ("", 6)
    service.result = LoadResult(result="loaded")
    again = await service.load()
    assert again.load is not None
    assert (again.result, keys(again.load.loaded)) == ("unchanged", ["model.name"])


async def test_nothing_is_loaded_where_no_key_waits_unless_it_is_forced(tmp_path: Path) -> None:
    service = Service(tmp_path)
    outcome = await service.load("[queue]\nmax_waiting = 6\n[http]\nport = 1\n")
    assert outcome.load == LoadResult(result="nothing")
    assert service.running.config.queue.max_waiting == 6
    assert service.loaded == []
    forced = await service.load(force=True)
    assert forced.load == LoadResult(result="loaded", seconds=1.5)
    assert len(service.loaded) == 1


async def test_a_rejected_file_loads_nothing(tmp_path: Path) -> None:
    service = Service(tmp_path)
    outcome = await service.load("[model]\nname = 'x'\nload = 'y'\n", force=True)
    assert (outcome.result, outcome.load, service.loaded) == ("rejected", None, [])


async def test_what_is_edited_during_a_load_is_not_undone_by_its_end(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.meanwhile = EDITED.replace("6", "7") + "context = 9\n"
    outcome = await service.load(EDITED)
    assert (service.running.config.queue.max_waiting, service.running.config.model.name) == (7, "x")
    assert keys(outcome.pending) == ["model.context", "http.port"]
    assert service.reports[-1].load is not None
    assert keys(service.reports[-1].pending) == keys(outcome.pending)


async def test_a_file_that_is_broken_during_a_load_is_still_told_as_broken(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.meanwhile = "[queue]\nmax_waiting = 'x'\n"
    outcome = await service.load(EDITED)
    assert outcome.load is not None
    assert outcome.load.result == "loaded"
    assert service.reports[-1].result == "rejected"
    assert service.reports[-1].load is not None


async def test_live_keys_that_go_only_with_what_is_loaded_come_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two keys that exclude each other, one of them live, the other not."""

    def checks(config: Config) -> list[tuple[str, str]]:
        fits = (config.queue.max_waiting > 5) == bool(config.model.name)
        return [] if fits else [("queue.max_waiting", "goes with model.name")]

    monkeypatch.setattr("daemon.config.cross_checks", checks)
    service = Service(tmp_path)
    service.file.write_text(EDITED, "utf-8")
    assert "until `hotset reload --load`" in (await service.reloader.reload("signal")).faults[0][1]
    service.result = LoadResult(result="failed", reason="no room")
    outcome = await service.load()
    assert (outcome.applied, service.running.config.queue.max_waiting) == ([], 5)
    assert keys(outcome.pending) == ["model.name", "http.port", "queue.max_waiting"]
    service.result = LoadResult(result="loaded")
    outcome = await service.load()
    assert outcome.load is not None
    assert keys(outcome.load.loaded) == ["model.name", "queue.max_waiting"]
    assert (service.running.config.queue.max_waiting, service.running.config.model.name) == (6, "x")
    assert (await service.load("[queue]\nmax_waiting = 9\n")).result == "rejected"
