"""`hotset inspect`: the table for people, JSON for scripts, one line for a bad file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hotset_tools.cli import main
from tests import minigguf
from tests.minigguf import u32


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and error output of `hotset inspect ...`."""
    with pytest.raises(SystemExit) as stop:
        main(["inspect", *arguments])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return minigguf.write_moe(tmp_path_factory.mktemp("good") / "mini.gguf")


def test_the_table_has_what_one_asks_for(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, str(good))
    assert (code, err) == (0, "")
    words = {line.split("  ")[0]: line for line in out.splitlines() if line}
    assert words["architecture"].endswith("qwen3moe".ljust(len(words["architecture"]) - 14))
    assert "4 in a layer, top 2" in words["experts"]
    assert "24.00 KiB" in words["one expert"]
    assert "192.00 KiB (5" in words["expert bytes"]
    assert "256 bytes per token" in words["KV cache"]
    assert "512 tokens in training" in words["context"]
    assert "F16" in words["size"]
    assert "version 3, 1 part" in words["GGUF"]
    assert "0-1" in words  # two layers that are alike are one row


def test_layers_that_differ_have_their_own_rows(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = minigguf.take_apart(good)
    up = file.tensor("blk.1.ffn_up_exps.weight")
    file = file.with_tensor("blk.1.ffn_up_exps.weight", kind=0, data=bytes(2 * len(up.data)))
    (tmp_path / "a.gguf").write_bytes(file.to_bytes())
    _, out, _ = run(capsys, str(tmp_path / "a.gguf"))
    rows = [line for line in out.splitlines() if line[:2] in ("0 ", "1 ")]
    assert len(rows) == 2
    assert "F16, F32" in rows[1]


def test_json_is_for_scripts(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(good), "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["architecture"], report["n_expert"], report["n_expert_used"]) == ("qwen3moe", 4, 2)
    assert report["bytes_per_expert"] == [24_576]
    assert report["expert_bytes"] + report["other_bytes"] == report["size"]
    assert report["parts"] == [{"file": "mini.gguf", "size": good.stat().st_size}]
    assert len(report["fingerprint"]) == 64
    assert [layer["index"] for layer in report["layers"]] == [0, 1]
    assert report["layers"][0]["experts"][0]["bytes_per_expert"] == 8192


def test_a_split_model_lists_its_parts(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = minigguf.split(good, 2, tmp_path)
    _, out, _ = run(capsys, str(names[0]))
    assert "2 parts" in out
    assert all(name.name in out for name in names)


def test_a_dense_model_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(minigguf.write_dense(tmp_path / "dense.gguf")))
    assert code == 0
    assert "not applicable: the model is dense" in out


def test_notes_are_printed(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = minigguf.take_apart(good).with_key("qwen3moe.nextn_predict_layers", u32(1))
    (tmp_path / "a.gguf").write_bytes(file.to_bytes())
    _, out, _ = run(capsys, str(tmp_path / "a.gguf"))
    assert "Note: 1 layers predict further tokens" in out


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_bad_file_is_one_line_on_stderr(
    options: tuple[str, ...], good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.gguf").write_bytes(replace(minigguf.take_apart(good), version=1).to_bytes())
    code, out, err = run(capsys, str(tmp_path / "bad.gguf"), *options)
    assert (code, out) == (1, "")
    assert err == "hotset: bad.gguf: GGUF version 1 is not supported, only 2 and 3\n"
