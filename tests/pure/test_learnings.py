"""What is learned goes to a file in time and comes back, and no trouble with the file is more than a word in status."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from daemon.engine import learnings, store
from daemon.engine.learnings import SAVE_SECONDS, Keeper, Memory, recall
from daemon.engine.mover import Mover
from daemon.engine.wanted import Wanted, prepare
from daemon.hotset import learned as files
from daemon.hotset.controller import Controller
from daemon.hotset.files import ModelId
from daemon.hotset.learned import Header, Learned, LearnedLayer, decode, encode
from daemon.messages import Device, Load, Remembered, ResidencySpec
from daemon.native.gguf_check import GgufFile, check
from daemon.native.hotset import Residency
from tests.minigguf import write_moe
from tests.pure.test_experts_status import FakeResidency, layer

WISH = ResidencySpec(vram={"": "50%"})
N_EXPERT, N_LAYER = 8, 2
CARD = Device(name="V0", description="", kind="gpu", memory_free=1 << 40, memory_total=1 << 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return check(write_moe(path, n_layer=N_LAYER, n_expert=N_EXPERT, n_expert_used=2))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "some" / "state"


def learned(of: GgufFile, heat: list[float], resident: list[int], **changes: Any) -> Learned:
    """The same of each layer."""
    values = {"layers": [LearnedLayer(layer=index, experts=N_EXPERT) for index in range(N_LAYER)]} | changes
    values.setdefault("model", ModelId(fingerprint=of.fingerprint))
    header = Header(**{"saved": "2026-12-01T12:00:00Z", "tokens": 4200, "ranked": 17} | values)
    numbers = np.array(heat * len(header.layers), np.float32)
    flags = np.isin(np.arange(N_EXPERT), resident)
    return Learned(header, numbers, numbers, np.tile(flags, len(header.layers)))


def path_of(state: Path, model: GgufFile) -> Path:
    return state / f"learned-{model.fingerprint[:32]}.bin"


def kept(state: Path, model: GgufFile, content: Learned | bytes) -> Path:
    path = path_of(state, model)
    store.write(path, content if isinstance(content, bytes) else encode(content))
    return path


class TestFiles:
    def test_only_the_owner_may_read_and_nothing_else_is_left(self, state: Path) -> None:
        path = state / "a.bin"
        for content in (b"one", b"two"):
            store.write(path, content)
            assert store.read(path, 3) == content
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        assert [one.name for one in state.iterdir()] == ["a.bin"]

    def test_what_is_too_large_a_link_or_no_file_is_not_read(self, tmp_path: Path) -> None:
        store.write(tmp_path / "a", b"four")
        (tmp_path / "link").symlink_to(tmp_path / "a")
        (tmp_path / "directory").mkdir()
        os.mkfifo(tmp_path / "pipe")
        n_open = len(os.listdir("/proc/self/fd"))
        for name, number in (("a", errno.EFBIG), ("link", errno.ELOOP), ("directory", errno.EINVAL),
                             ("pipe", errno.EINVAL), ("none", errno.ENOENT)):  # fmt: skip
            with pytest.raises(OSError) as caught:  # noqa: PT011 - the number says which
                store.read(tmp_path / name, 3)
            assert (name, caught.value.errno) == (name, number)
        assert len(os.listdir("/proc/self/fd")) == n_open

    def test_a_link_is_replaced_and_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "precious").write_bytes(b"mine")
        (tmp_path / "a").symlink_to(tmp_path / "precious")
        store.write(tmp_path / "a", b"ours")
        assert (tmp_path / "precious").read_bytes() == b"mine"
        assert store.read(tmp_path / "a", 9) == b"ours"

    def test_a_full_disk_leaves_what_was_there_and_no_rest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.write(tmp_path / "a", b"before")
        full = os.open("/dev/full", os.O_WRONLY)
        make = os.open

        def onto_a_full_disk(path: Any, flags: int, mode: int = 0o777) -> int:
            handle = make(path, flags, mode)
            os.dup2(full, handle)
            return handle

        monkeypatch.setattr(os, "open", onto_a_full_disk)
        with pytest.raises(OSError, match="No space left"):
            store.write(tmp_path / "a", b"after")
        monkeypatch.undo()
        os.close(full)
        assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("a", b"before")]


class TestRecall:
    def test_what_fits_is_known(self, state: Path, model: GgufFile) -> None:
        kept(state, model, learned(model, [3.0, 0, 1, 0, 0, 0, 0, 9], [0, 7]))
        memory = recall(state, WISH, model)
        assert memory.report == Remembered(
            start="warm", reason="experts learned from 4,200 tokens until 2026-12-01T12:00:00Z"
        )
        assert memory.learned is not None
        assert memory.learned.order()[1, 0] == [7, 0, 2]
        frozen = recall(state, WISH.model_copy(update={"frozen": True}), model)
        assert (frozen.report.start, frozen.report.reason[-20:]) == ("cold", "so the hot set rules")
        assert frozen.learned is not None

    def test_nothing_is_there_wanted_or_has_a_place(self, state: Path, model: GgufFile) -> None:
        none = recall(state, WISH, model)
        assert (none.report.start, none.report.reason) == ("cold", "nothing was learned about this model before")
        assert none.path == path_of(state, model)
        assert not state.exists(), "nothing is made before there is something to keep"
        kept(state, model, learned(model, [1.0] * 8, []))
        unwanted = recall(state, WISH.model_copy(update={"remember": False}), model)
        assert (unwanted.path, unwanted.learned, unwanted.report.reason) == (None, None, "residency.remember is false")
        assert recall(None, WISH, model).report.reason == "there is no directory to keep it in"

    @pytest.mark.parametrize(
        ("made", "said"),
        [
            (lambda m: b"not ours", "its checksum is wrong"),
            (lambda m: encode(learned(m, [1.0] * 8, []))[:-1], "its checksum is wrong"),
            (lambda m: encode(learned(m, [float("nan")] * 8, [])), "its heat hold impossible values"),
            (lambda m: encode(learned(m, [1.0] * 8, [], model=ModelId(fingerprint="0" * 64))), "another model"),
            (lambda m: encode(learned(m, [1.0] * 8, [], layers=[LearnedLayer(layer=5, experts=8)])), "layer 5, set 0"),
            (lambda m: bytes(files.MAX_BYTES + 1), "cannot be read: File too large"),
        ],
    )
    def test_what_cannot_be_used_is_told_and_replaced_later(
        self, state: Path, model: GgufFile, made: Callable[[GgufFile], bytes], said: str
    ) -> None:
        path = kept(state, model, made(model))
        memory = recall(state, WISH, model)
        assert (memory.report.start, memory.learned) == ("cold", None)
        assert memory.report.reason == "what was learned before cannot be used"
        assert said in memory.report.fault
        assert str(state) not in memory.report.fault
        keeper, controller = keeping(memory)
        observe(controller)
        keeper.save()
        assert (keeper.report.fault, keeper.report.reason) == ("", memory.report.reason)
        assert decode("f", path.read_bytes()).header.tokens == 1
        assert recall(state, WISH, model).report.start == "warm"

    def test_a_link_or_a_directory_in_its_place(self, state: Path, model: GgufFile, tmp_path: Path) -> None:
        path = kept(state, model, learned(model, [1.0] * 8, []))
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        assert "symbolic links" in recall(state, WISH, model).report.fault
        path.unlink()
        path.mkdir()
        memory = recall(state, WISH, model)
        assert memory.report.fault.endswith("cannot be read: it is no regular file")
        keeper, controller = keeping(memory)
        observe(controller)
        keeper.save()
        assert keeper.report.fault == f"{path.name} cannot be written: Is a directory"


def keeping(memory: Memory, clock: Callable[[], float] = lambda: 0.0) -> tuple[Keeper, Controller]:
    controller = Controller([N_EXPERT] * N_LAYER, [10] * N_LAYER, bytes_per_second=1e9)
    return Keeper(memory, [(index, 0) for index in range(N_LAYER)], controller, clock), controller


def observe(controller: Controller, *experts: int) -> None:
    controller.observe(np.tile(np.array(experts or (1, 2), np.int32), (1, N_LAYER, 1)), 1)


class TestKeeper:
    def test_it_saves_what_is_new_after_its_time(self, state: Path, model: GgufFile) -> None:
        now = [1000.0]
        keeper, controller = keeping(recall(state, WISH, model), lambda: now[0])
        assert keeper.wait() is None
        keeper.save()
        assert not state.exists(), "nothing was learned"
        observe(controller)
        assert keeper.wait() == SAVE_SECONDS
        now[0] += SAVE_SECONDS + 5
        assert keeper.wait() == -5
        keeper.save()
        assert (keeper.wait(), keeper.report.fault) == (None, "")
        first = decode("f", path_of(state, model).read_bytes())
        assert (keeper.report.saved, first.header.tokens) == (first.header.saved, 1)
        observe(controller)
        assert keeper.wait() == SAVE_SECONDS

    def test_tokens_add_up_over_starts_and_heat_goes_on(self, state: Path, model: GgufFile) -> None:
        kept(state, model, learned(model, [3.0, 0, 0, 0, 0, 0, 0, 9], [7]))
        keeper, controller = keeping(recall(state, WISH, model))
        assert controller.heat.values.tolist() == [[3.0, 0, 0, 0, 0, 0, 0, 9]] * 2
        observe(controller, 0, 7)
        keeper.save()
        later = decode("f", path_of(state, model).read_bytes())
        assert (later.header.tokens, later.header.ranked) == (4201, 18)
        assert later.heat[7] == pytest.approx(9 * 0.5 ** (1 / 16) + 1)

    def test_what_cannot_be_written_is_told_once_and_tried_again_later(self, state: Path, model: GgufFile) -> None:
        now = [0.0]
        keeper, controller = keeping(recall(state, WISH, model), lambda: now[0])
        state.parent.mkdir()
        state.write_bytes(b"a file where the directory should be")
        observe(controller)
        keeper.save()
        fault = f"{path_of(state, model).name} cannot be written: "
        assert keeper.report.fault in (fault + "File exists", fault + "Not a directory")
        assert (keeper.report.saved, keeper.wait()) == ("", SAVE_SECONDS)
        state.unlink()
        keeper.save()
        assert (keeper.report.fault, bool(keeper.report.saved)) == ("", True)

    def test_in_the_end_a_fault_that_nobody_knows_yet_goes_to_stderr(
        self, state: Path, model: GgufFile, capsys: pytest.CaptureFixture[str]
    ) -> None:
        keeper, controller = keeping(recall(state, WISH, model))
        keeper.close()
        state.parent.mkdir()
        state.write_bytes(b"a file where the directory should be")
        observe(controller)
        keeper.close()
        keeper.close()
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"what was learned about experts is lost: {keeper.report.fault}"

    def test_nothing_is_kept_where_that_is_not_wanted(self, state: Path, model: GgufFile) -> None:
        keeper, controller = keeping(recall(state, WISH.model_copy(update={"remember": False}), model))
        observe(controller)
        assert keeper.wait() is None
        keeper.save()
        assert not state.exists()


class TestMover:
    """The thread saves; slots are those of a library that fills them at once."""

    def moving(self, memory: Memory, clock: Callable[[], float], seeds: dict[int, list[int]]) -> Mover:
        residency = FakeResidency(layer(0, n_slots=4), layer(1, n_slots=4))
        keeper, controller = keeping(memory, clock)
        return Mover(cast(Residency, residency), controller, seeds, keeper=keeper)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def test_at_the_end_with_what_the_last_steps_chose(self, state: Path, model: GgufFile) -> None:
        mover = self.moving(recall(state, WISH, model), time.monotonic, {0: [3], 1: [4]})
        mover.start()
        self.until(lambda: mover.seeded)
        for _ in range(300):
            mover.observe(np.tile(np.array([1, 2], np.int32), (1, N_LAYER, 1)), 1)
        mover.stop(lambda: None)
        found = decode("f", path_of(state, model).read_bytes())
        assert found.header.tokens == 300
        assert mover.keeper is not None
        assert mover.keeper.report.saved == found.header.saved

    def test_while_it_runs_when_it_is_time_though_nobody_asks_for_anything(
        self, state: Path, model: GgufFile, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(learnings, "SAVE_SECONDS", 0.3)
        mover = self.moving(recall(state, WISH, model), time.monotonic, {})
        mover.start()
        mover.observe(np.tile(np.array([1, 2], np.int32), (1, N_LAYER, 1)), 1)
        self.until(lambda: path_of(state, model).exists())
        assert mover.running
        self.until(lambda: mover.controller.n_moves == 4)
        self.until(lambda: decode("f", path_of(state, model).read_bytes()).order()[0, 0] == [1, 2])
        mover.stop(lambda: None)

    def test_not_before_the_slots_are_filled_for_the_first_time(self, state: Path, model: GgufFile) -> None:
        before = kept(state, model, learned(model, [1.0] * 8, [1, 2, 3, 4])).read_bytes()
        mover = self.moving(recall(state, WISH, model), time.monotonic, {0: [3], 1: [4]})
        mover.observe(np.tile(np.array([1, 2], np.int32), (1, N_LAYER, 1)), 1)
        mover._stopping = True
        mover.start()
        mover.stop(lambda: None)
        assert not mover.seeded
        assert path_of(state, model).read_bytes() == before

    def test_a_device_that_fails_costs_nothing_that_was_learned(self, state: Path, model: GgufFile) -> None:
        mover = self.moving(recall(state, WISH, model), time.monotonic, {})
        residency = cast(FakeResidency, mover.residency)
        residency.refuse_at = 1
        mover.start()
        mover.observe(np.tile(np.array([1, 2], np.int32), (1, N_LAYER, 1)), 1)
        self.until(lambda: not mover.running)
        assert mover.fault == "the device is gone"
        assert decode("f", path_of(state, model).read_bytes()).order()[0, 0] == [1, 2]


class TestWanted:
    """From what is known to the experts that get slots and are uploaded first."""

    def wanted(self, model: GgufFile, known: Learned | None, **residency: Any) -> Wanted:
        spec = Load(
            model="", name="", context=0, load_mode="auto", device="", gpu_layers=-1, cpu_moe_layers=-1, threads=1,
            threads_batch=1, max_sequences=1, kv_cells=512, ubatch=512, cache_type_k="f16", cache_type_v="f16",
            repack=False, residency=WISH.model_copy(update=residency),
        )  # fmt: skip
        found = prepare(spec, model, [CARD], known)
        assert isinstance(found, Wanted)
        return found

    def hot_set(self, tmp_path: Path, model: GgufFile) -> str:
        path = tmp_path / "hot.json"
        layers = ", ".join(f'{{"layer": {index}, "experts": [6, 5]}}' for index in range(N_LAYER))
        path.write_text(
            f'{{"format": 1, "model": {{"fingerprint": "{model.fingerprint}"}},'
            f' "sizes": [{{"name": "two", "layers": [{layers}]}}]}}'
        )
        return str(path)

    def test_learned_experts_come_first_and_the_hot_set_fills(self, model: GgufFile, tmp_path: Path) -> None:
        known = learned(model, [3.0, 0, 1, 0, 0, 0, 0, 9], [0, 7])
        hot = self.hot_set(tmp_path, model)
        alone = self.wanted(model, known)
        assert alone.ranking.largest.by_layer()[0, 0] == [7, 0, 2, 1, 3, 4, 5, 6]
        assert alone.known == {(0, 0): 3, (1, 0): 3}
        both = self.wanted(model, known, hot_set=hot)
        assert both.ranking.largest.by_layer()[1, 0] == [7, 0, 2, 6, 5, 1, 3, 4]
        assert both.known == {(0, 0): 5, (1, 0): 5}
        named = self.wanted(model, known, hot_set=hot, vram={"": "two"})
        size = named.ranking.size("two")
        assert size is not None
        assert size.by_layer() == {(0, 0): [7, 0], (1, 0): [7, 0]}
        frozen = self.wanted(model, known, hot_set=hot, frozen=True)
        assert frozen.ranking.largest.by_layer() == {(0, 0): [6, 5], (1, 0): [6, 5]}
        assert frozen.known == {(0, 0): 2, (1, 0): 2}
        assert self.wanted(model, None, hot_set=hot).known == {(0, 0): 2, (1, 0): 2}
        assert self.wanted(model, None).known == {(0, 0): 0, (1, 0): 0}
