"""The vocabulary of the embedded model, and of a sentencepiece one, through the real library."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daemon.errors import BadRequest, ModelUnusable
from daemon.native import library
from daemon.native.vocab import Attr, Vocab
from daemon.text import Utf8Stream
from tests.minivocab import write_spm, write_without_vocab

MODEL = Path(__file__).parents[2] / "models" / "tinymoe-41m-Q4_K_M.gguf"
NO_EXAMPLE_RESET = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(scope="module")
def vocab(library_path: Path) -> Iterator[Vocab]:
    with Vocab.open(MODEL) as opened:
        yield opened


@pytest.fixture(scope="module")
def spm(library_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocab]:
    with Vocab.open(write_spm(tmp_path_factory.mktemp("spm") / "spm.gguf")) as opened:
        yield opened


def plain(vocab: Vocab, text: str) -> list[int]:
    return vocab.tokenize(text, add_special=False, parse_special=False)


def test_facts_of_the_embedded_model(vocab: Vocab) -> None:
    assert (vocab.type, vocab.n_tokens, vocab.bos, vocab.eos, vocab.eot) == ("bpe", 8192, 8189, 8191, 8191)
    assert (vocab.add_bos, vocab.add_eos) == (False, False)
    assert vocab.eog == {8189, 8191}
    assert [(t.id, t.text, t.attr) for t in vocab.special_tokens] == [
        (8189, "<|endoftext|>", Attr.CONTROL),
        (8190, "<|im_start|>", Attr.CONTROL),
        (8191, "<|im_end|>", Attr.CONTROL),
    ]
    assert vocab.is_eog(8191)
    assert not vocab.is_eog(8190)
    assert vocab.is_control(8190)
    assert not vocab.is_control(0)
    assert vocab.attr(0) == Attr.NORMAL
    assert vocab.text(8190) == "<|im_start|>"


def test_facts_of_a_sentencepiece_vocabulary(spm: Vocab) -> None:
    assert (spm.type, spm.bos, spm.eos, spm.add_bos, spm.add_eos) == ("spm", 1, 2, True, False)
    assert spm.eot is not None
    assert spm.text(spm.eot) == "<|endoftext|>"
    assert spm._id("mask") is None
    assert spm.tokenize("", add_special=True, parse_special=True) == [1]
    assert spm.attr(0) == Attr.UNKNOWN
    assert spm.attr(spm.tokenize("<tool>", add_special=False, parse_special=False)[-1]) == Attr.USER_DEFINED
    assert spm.chat_template() is None


def test_the_chat_template(vocab: Vocab) -> None:
    template = vocab.chat_template()
    assert template is not None
    assert "<|im_start|>" in template
    assert vocab.chat_template("tool_use") is None


def test_control_tokens_are_read_and_shown_on_request_only(vocab: Vocab) -> None:
    assert vocab.tokenize("<|im_end|>", add_special=False, parse_special=True) == [8191]
    assert 8191 not in plain(vocab, "<|im_end|>")
    assert vocab.piece(8191) == b""
    assert vocab.piece(8191, special=True) == b"<|im_end|>"
    assert vocab.detokenize([8190, *plain(vocab, "user"), 8191]) == "<|im_start|>user<|im_end|>"
    assert vocab.detokenize([8190, *plain(vocab, "user"), 8191], special=False) == "user"


@NO_EXAMPLE_RESET
@given(text=st.text())
def test_any_text_round_trips(vocab: Vocab, text: str) -> None:
    assert vocab.detokenize(plain(vocab, text)) == text


@NO_EXAMPLE_RESET
@given(text=st.text())
def test_any_text_round_trips_as_a_stream_of_pieces(vocab: Vocab, text: str) -> None:
    stream = Utf8Stream()
    shown = [stream.feed(piece) for piece in vocab.pieces(plain(vocab, text))]
    assert "".join(shown) + stream.flush() == text
    assert all("\ufffd" not in part for part in shown) or "\ufffd" in text


@NO_EXAMPLE_RESET
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁\n")))
def test_any_text_round_trips_through_byte_tokens(spm: Vocab, text: str) -> None:
    stream = Utf8Stream()
    shown = "".join(stream.feed(piece) for piece in spm.pieces(plain(spm, text))) + stream.flush()
    assert shown == (f" {text}" if text else "")


def test_nul_is_text(vocab: Vocab) -> None:
    ids = plain(vocab, "a\0b\0")
    assert vocab.detokenize(ids) == "a\0b\0"
    assert len(ids) >= 4


def test_the_buffer_grows_for_texts_of_many_tokens(vocab: Vocab) -> None:
    text = "\0\x01\x02\x03" * 100
    ids = plain(vocab, text)
    assert len(ids) > len(text) // 2 + 64
    assert vocab.detokenize(ids) == text


def test_a_text_of_megabytes(vocab: Vocab) -> None:
    text = "The quick brown fox. " * 200_000
    assert vocab.detokenize(plain(vocab, text)) == text


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_lone_surrogates_are_refused(vocab: Vocab, text: str) -> None:
    with pytest.raises(BadRequest, match="surrogate"):
        plain(vocab, text)


@pytest.mark.parametrize("token", [-1, 8192, 2**31, 2**63])
def test_an_id_out_of_range_is_refused_everywhere(vocab: Vocab, token: int) -> None:
    for call in (vocab.piece, vocab.is_eog, vocab.is_control, vocab.attr, vocab.text):
        with pytest.raises(BadRequest, match=r"no token.*8192"):
            call(token)
    with pytest.raises(BadRequest, match="no token"):
        vocab.detokenize([1, token])


def test_a_vocabulary_of_a_model_that_somebody_else_loaded(vocab: Vocab) -> None:
    module = library.lib()
    params = module.llama_model_default_params()
    params.vocab_only = True
    # None: other tests of this process may have registered a server that is gone.
    no_devices = (ctypes.c_void_p * 1)()
    params.devices = ctypes.addressof(no_devices)
    model = module.llama_model_load_from_file(str(MODEL).encode(), params)
    try:
        borrowed = Vocab.of_model(model)
        assert borrowed.n_tokens == vocab.n_tokens
        assert borrowed.piece(100) == vocab.piece(100)
    finally:
        module.llama_model_free(model)


def test_threads_may_share_a_vocabulary(vocab: Vocab) -> None:
    wanted = plain(vocab, "shared text " * 1000)
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(plain(vocab, "shared text " * 1000))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 4


def test_files_that_are_no_model_give_one_message(library_path: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    text = tmp_path / "text.gguf"
    text.write_text("not a model")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(MODEL.read_bytes()[:5000])
    for path, message in ((missing, "no model file"), (text, "magic"), (cut, "cannot be loaded: .+")):
        with pytest.raises(ModelUnusable, match=message), Vocab.open(path):
            pass
    with pytest.raises(ModelUnusable, match="no vocabulary"), Vocab.open(write_without_vocab(tmp_path / "no.gguf")):
        pass


def test_the_log_is_kept_and_not_printed(library_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Vocab.open(MODEL):
        lines = library.capture_log().lines()
    assert any("vocab only" in text for level, text in lines if level == "info")
    assert capfd.readouterr() == ("", "")
