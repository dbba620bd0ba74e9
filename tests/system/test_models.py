"""Models that people point the daemon at: split, dense, broken, foreign."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests import minigguf
from tests.minigguf import BROKEN
from tests.system.daemon_process import running

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = ROOT / "models" / "tinymoe-41m-Q4_K_M.gguf"
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}

SAMPLE = ("empty", "only magic", "wrong magic", "block_count 0", "token twice", "more experts used than there are")


def refusal(path: Path, directory: Path) -> str:
    """What hotsetd says of a model that it cannot serve: one line, exit code 78."""
    with running(directory, wait=False, MODEL_PATH=str(path)) as daemon:
        assert daemon.process.wait(60) == 78
        output = daemon.output()
    assert "Traceback" not in output
    lines = [line for line in output.splitlines() if line.startswith("hotsetd: ")]
    assert len(lines) == 1, output
    return lines[0]


@pytest.mark.parametrize("fault", SAMPLE)
def test_a_broken_file_is_one_clear_message(fault: str, tmp_path: Path, library_path: Path) -> None:
    whole = minigguf.take_apart(minigguf.write_moe(tmp_path / "good.gguf"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(BROKEN[fault].make(whole))
    assert re.search(BROKEN[fault].message, refusal(broken, tmp_path))


def test_a_file_cut_in_the_middle_says_what_is_missing(tmp_path: Path, library_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(EMBEDDED.read_bytes()[:10_000_000])
    message = refusal(cut, tmp_path)
    assert "cut.gguf is cut off" in message
    assert str(tmp_path) not in message


def test_an_unknown_architecture_is_named(tmp_path: Path, library_path: Path) -> None:
    whole = minigguf.take_apart(minigguf.write_moe(tmp_path / "good.gguf"))
    renamed = dict(whole.keys)
    for name in list(renamed):
        if name.startswith(b"qwen3moe."):
            renamed[name.replace(b"qwen3moe.", b"hyperloop.")] = renamed.pop(name)
    renamed[b"general.architecture"] = minigguf.scalar(minigguf.STRING, "hyperloop")
    foreign = tmp_path / "foreign.gguf"
    foreign.write_bytes(type(whole)(tuple(renamed.items()), whole.tensors).to_bytes())
    assert "hyperloop" in refusal(foreign, tmp_path)


def test_something_that_is_no_model(tmp_path: Path, library_path: Path) -> None:
    text = tmp_path / "notes.gguf"
    text.write_text("These are my notes.\n" * 100, "utf-8")
    assert "notes.gguf" in refusal(text, tmp_path)


def test_a_split_model_is_served_by_its_first_part(tmp_path: Path, library_path: Path) -> None:
    first, second, third = minigguf.split(EMBEDDED, 3, tmp_path)
    with running(tmp_path, MODEL_PATH=str(first)) as daemon:
        models = daemon.client.get("/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["tinymoe-41m-Q4_K_M"]
        assert daemon.client.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert first.name in refusal(second, tmp_path)
    shutil.move(third, tmp_path / "elsewhere")
    assert third.name in refusal(first, tmp_path)


def test_a_dense_model_is_served(tmp_path: Path, library_path: Path) -> None:
    path = minigguf.write_dense(tmp_path / "dense.gguf")
    with running(tmp_path, MODEL_PATH=str(path)) as daemon:
        assert daemon.client.post("/v1/chat/completions", json=CHAT).status_code == 200
