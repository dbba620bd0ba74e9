"""Checking GGUF files: what is refused, what is accepted, and that no bytes at all can do harm."""

from __future__ import annotations

import os
import re
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daemon.errors import ModelUnusable
from daemon.native import gguf_cursor, gguf_reader
from daemon.native.gguf_check import check
from daemon.native.gguf_fingerprint import SAMPLE
from daemon.native.gguf_types import STRING, UINT16, UINT32
from tests import minigguf
from tests.minigguf import BROKEN, HARMLESS, MiniFile, array, scalar, u32


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return minigguf.write_moe(tmp_path_factory.mktemp("good") / "mini.gguf")


@pytest.fixture(scope="module")
def parts(good: Path) -> MiniFile:
    return minigguf.take_apart(good)


def refusal(path: Path) -> str:
    with pytest.raises(ModelUnusable) as caught:
        check(path)
    return caught.value.message


def test_taking_a_file_apart_and_putting_it_together_changes_nothing(good: Path, parts: MiniFile) -> None:
    assert parts.to_bytes() == good.read_bytes()


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_is_refused_with_one_clear_line(fault: str, parts: MiniFile, tmp_path: Path) -> None:
    path = tmp_path / "mini.gguf"
    path.write_bytes(BROKEN[fault].make(parts))
    message = refusal(path)
    assert re.search(BROKEN[fault].message, message)
    assert message.startswith("mini.gguf")
    assert str(tmp_path) not in message
    assert message.isprintable()


@pytest.mark.parametrize("oddity", HARMLESS)
def test_an_odd_but_sound_file_is_accepted(oddity: str, parts: MiniFile, tmp_path: Path) -> None:
    path = tmp_path / "mini.gguf"
    path.write_bytes(HARMLESS[oddity](parts))
    facts = check(path).facts
    assert facts.n_vocab == minigguf.MOE.n_vocab
    assert facts.name.isprintable()


def test_every_cut_is_refused(parts: MiniFile, tmp_path: Path) -> None:
    whole, path = parts.to_bytes(), tmp_path / "mini.gguf"
    head = len(parts.head())
    for length in [*range(0, 200), *range(200, head, 97), *range(head, len(whole) - 32, 9973)]:
        path.write_bytes(whole[:length])
        refusal(path)


def test_a_message_names_the_tensor_and_both_sizes(parts: MiniFile, tmp_path: Path) -> None:
    path = tmp_path / "tinymoe.gguf"
    whole = parts.to_bytes()
    path.write_bytes(whole[:-100])
    assert refusal(path) == (
        f"tinymoe.gguf is cut off: tensor blk.1.ffn_down_exps.weight needs bytes up to {len(whole)}, "
        f"the file has {len(whole) - 100}"
    )


def test_a_name_from_the_file_cannot_write_to_the_terminal(parts: MiniFile, tmp_path: Path) -> None:
    path = tmp_path / "mini.gguf"
    path.write_bytes(parts.with_key("general.architecture", scalar(STRING, "\x1b[31m\n" * 400)).to_bytes())
    message = refusal(path)
    assert message.isprintable()
    assert len(message) < 600


@pytest.mark.parametrize("what", ["missing", "directory", "fifo", "nul"])
def test_what_is_no_file_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    if what == "directory":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "nul":
        path = tmp_path / "a\0b.gguf"
    assert refusal(path).count("\n") == 0


def test_a_link_to_a_model_is_a_model(good: Path, tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(good)
    assert check(tmp_path / "link.gguf").fingerprint == check(good).fingerprint


def test_counts_over_the_limits_are_refused_before_anything_is_read(
    parts: MiniFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mini.gguf"
    path.write_bytes(parts.to_bytes())
    monkeypatch.setattr(gguf_reader, "MAX_KEYS", 3)
    assert "at most 3 are allowed" in refusal(path)
    monkeypatch.undo()
    monkeypatch.setattr(gguf_reader, "MAX_STRINGS", 450)  # the 400 tokens fit, the merges behind them do not
    assert "tokenizer.ggml.merges claims 141 strings, at most 450 are allowed in one file" in refusal(path)
    monkeypatch.undo()
    monkeypatch.setattr(gguf_cursor, "MAX_HEAD", 5000)
    assert "larger than 5000 bytes" in refusal(path)


def test_a_vocabulary_of_pieces_needs_every_byte(parts: MiniFile, tmp_path: Path) -> None:
    path = tmp_path / "mini.gguf"
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *(f"t{index}" for index in range(144))]
    pieces = parts.with_key("tokenizer.ggml.model", scalar(STRING, "llama"))
    path.write_bytes(pieces.with_key("tokenizer.ggml.tokens", array(STRING, tokens)).to_bytes())
    assert check(path).facts.n_vocab == 400
    tokens[65] = "other"
    path.write_bytes(pieces.with_key("tokenizer.ggml.tokens", array(STRING, tokens)).to_bytes())
    assert "no token for the byte 0x41" in refusal(path)


class TestSplit:
    """Files in parts."""

    @pytest.fixture
    def names(self, good: Path, tmp_path: Path) -> list[Path]:
        return minigguf.split(good, 3, tmp_path)

    def edit(self, path: Path, **keys: bytes) -> None:
        part = minigguf.take_apart(path)
        for key, value in keys.items():
            part = part.with_key(key.replace("_", "."), value)
        path.write_bytes(part.to_bytes())

    def test_parts_are_one_model(self, good: Path, names: list[Path]) -> None:
        whole, split = check(good), check(names[0])
        assert [part.path for part in split.parts] == names
        assert [part.size for part in split.parts] == [name.stat().st_size for name in names]
        assert split.facts == whole.facts
        assert split.fingerprint == whole.fingerprint

    def test_another_part_names_the_first(self, names: list[Path]) -> None:
        assert refusal(names[1]) == f"{names[1].name}: this is part 2 of 3; name the first one, {names[0].name}"

    def test_a_missing_part_is_named(self, names: list[Path]) -> None:
        names[2].unlink()
        assert refusal(names[0]) == f"part 3 of 3 is missing: {names[2].name}"

    def test_a_cut_part_is_named(self, names: list[Path]) -> None:
        names[1].write_bytes(names[1].read_bytes()[:-4000])
        assert refusal(names[0]).startswith(f"{names[1].name} is cut off")

    def test_a_renamed_first_part_is_told_its_name(self, names: list[Path]) -> None:
        other = names[0].rename(names[0].with_name("model.gguf"))
        assert "must be called NAME-00001-of-00003.gguf" in refusal(other)

    def test_exchanged_parts_are_refused(self, names: list[Path]) -> None:
        raw = names[1].read_bytes()
        names[1].write_bytes(names[2].read_bytes())
        names[2].write_bytes(raw)
        assert "says that it is part 3 of 3, not 2 of 3" in refusal(names[0])

    def test_a_part_of_another_split_is_refused(self, names: list[Path]) -> None:
        self.edit(names[1], split_count=scalar(UINT16, 4))
        assert "says that it is part 2 of 4, not 2 of 3" in refusal(names[0])

    def test_a_part_of_another_architecture_is_refused(self, names: list[Path]) -> None:
        self.edit(names[1], general_architecture=scalar(STRING, "llama"))
        assert "the part is of another model: llama" in refusal(names[0])

    def test_a_part_with_other_tensors_is_refused(self, names: list[Path]) -> None:
        part = minigguf.take_apart(names[1])
        names[1].write_bytes(part.without_tensor(part.tensors[-1].name.decode()).to_bytes())
        assert "they do not fit" in refusal(names[0])

    def test_a_part_with_tensors_of_another_part_is_refused(self, names: list[Path]) -> None:
        first, second = minigguf.take_apart(names[0]), minigguf.take_apart(names[1])
        names[1].write_bytes(replace(second, tensors=first.tensors).to_bytes())
        assert f"is in {names[0].name} too" in refusal(names[0])

    def test_a_number_of_another_type_would_abort_the_library(self, names: list[Path]) -> None:
        self.edit(names[1], split_no=u32(1))
        assert "split.no must be u16, not u32" in refusal(names[0])


class TestFingerprint:
    """The same for the same model, another for another."""

    def test_does_not_depend_on_the_name_or_place(self, good: Path, tmp_path: Path) -> None:
        (tmp_path / "other name.gguf").write_bytes(good.read_bytes())
        assert check(tmp_path / "other name.gguf").fingerprint == check(good).fingerprint

    def test_another_seed_is_another_model(self, good: Path, tmp_path: Path) -> None:
        assert check(minigguf.write_moe(tmp_path / "a.gguf", seed=2)).fingerprint != check(good).fingerprint

    def test_metadata_counts(self, good: Path, parts: MiniFile, tmp_path: Path) -> None:
        (tmp_path / "a.gguf").write_bytes(parts.with_key("qwen3moe.context_length", u32(513)).to_bytes())
        assert check(tmp_path / "a.gguf").fingerprint != check(good).fingerprint

    def test_a_vocabulary_is_its_tokens_and_not_the_model_nor_the_template(
        self, good: Path, parts: MiniFile, tmp_path: Path
    ) -> None:
        other = check(minigguf.write_moe(tmp_path / "a.gguf", seed=2))
        assert other.vocabulary == check(good).vocabulary != other.fingerprint
        for key, same in (("tokenizer.chat_template", True), ("tokenizer.ggml.pre", False)):
            (tmp_path / "a.gguf").write_bytes(parts.with_key(key, scalar(STRING, "gpt-2")).to_bytes())
            assert (check(tmp_path / "a.gguf").vocabulary == check(good).vocabulary) == same

    @pytest.mark.parametrize("where", ["first", "middle", "last"])
    def test_samples_of_every_tensor_count(self, where: str, good: Path, parts: MiniFile, tmp_path: Path) -> None:
        name = "blk.0.ffn_up_exps.weight"
        data = bytearray(parts.tensor(name).data)
        assert len(data) > 3 * SAMPLE
        data[{"first": 0, "middle": len(data) // 2, "last": -1}[where]] ^= 1
        (tmp_path / "a.gguf").write_bytes(parts.with_tensor(name, data=bytes(data)).to_bytes())
        assert check(tmp_path / "a.gguf").fingerprint != check(good).fingerprint


class TestHostile:
    """Damage of any kind ends in ModelUnusable or in a sound file, with bounded memory and processor time."""

    MEMORY = 32 << 20
    SECONDS = 1.0

    def examine(self, raw: bytes, path: Path) -> None:
        path.write_bytes(raw)
        tracemalloc.start()
        begin, message = time.process_time(), ""
        try:
            check(path)
        except ModelUnusable as error:
            message = error.message
        finally:
            seconds, peak = time.process_time() - begin, tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert message.isprintable()
        assert peak < self.MEMORY
        assert seconds < self.SECONDS

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_changed_bytes(self, data: st.DataObject, parts: MiniFile, tmp_path: Path) -> None:
        raw = bytearray(parts.to_bytes())
        head = len(parts.head())
        places = st.one_of(st.integers(0, 300), st.integers(0, head - 1), st.integers(head - 2000, head - 1))
        for place in data.draw(st.lists(places, min_size=1, max_size=8)):
            raw[place] = data.draw(st.sampled_from([0, 1, 2, 8, 9, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
        self.examine(bytes(raw), tmp_path / "mini.gguf")

    @settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_numbers_of_any_size_in_any_key(self, data: st.DataObject, parts: MiniFile, tmp_path: Path) -> None:
        extreme = st.sampled_from([0, 1, 2, 3, 255, 256, 65_535, 65_536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])
        key = data.draw(st.sampled_from([name for name, value in parts.keys if value[:4] == u32(0)[:4]]))
        changed = parts.with_key(key.decode(), u32(data.draw(extreme | st.integers(0, (1 << 32) - 1))))
        self.examine(changed.to_bytes(), tmp_path / "mini.gguf")

    @settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(tail=st.binary(max_size=200), n_keys=st.integers(0, 5), n_tensors=st.integers(0, 5))
    def test_noise_behind_a_good_start(self, tail: bytes, n_keys: int, n_tensors: int, tmp_path: Path) -> None:
        start = MiniFile((), (), n_keys=n_keys, n_tensors=n_tensors).head()
        self.examine(start + tail, tmp_path / "mini.gguf")


def test_a_large_vocabulary_is_within_the_limits(tmp_path: Path) -> None:
    path = minigguf.write_moe(tmp_path / "mini.gguf", n_vocab=150_000, n_embd=32, vocab="Q8_0", n_ff=32, head_size=16)
    assert check(path).facts.n_vocab == 150_000


def test_types_of_array_elements_are_kept(parts: MiniFile, tmp_path: Path) -> None:
    path = tmp_path / "mini.gguf"
    path.write_bytes(parts.with_key("some.numbers", array(UINT32, [7, 8])).to_bytes())
    value = gguf_reader.read_head(path).metadata["some.numbers"]
    assert (value.numbers(), value.type_name) == ((7, 8), "array of u32")
