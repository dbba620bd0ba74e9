"""Generated, split and broken models in the real library: what the checker promises is what the library does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.native.gguf_check import check
from daemon.native.gguf_types import quant_numbers, quant_of
from hotset_tools.make_model import write_model
from hotset_tools.model_shapes import SHAPES
from tests import minigguf
from tests.minigguf import BROKEN, HARMLESS

PROJECT = Path(__file__).parents[2]
EMBEDDED = PROJECT / "models" / "tinymoe-41m-Q4_K_M.gguf"
TEXT = "Hello wörld, this is  a tést\n\tx=1; 你好 \U0001f600 it's 1234"
REFUSED = 3

# Faults on which the library does not refuse the file but ends its process.
FATAL = (
    "block_count 0",
    "block_count 513",
    "more prediction layers than layers",
    "2000 experts",
    "no expert used",
    "more experts used than there are",
    "as many groups as experts",
    "experts that do not divide into groups",
    "no group used",
    "rotation of other size than heads",
    "unknown rope scaling",
    "token twice",
    "token twice for a C string",
    "a tokenizer without tokens",
    "a norm in F16",
    "weights that are whole numbers",
    "alignment 8",
)

Generate = Callable[[Path], dict[str, Any]]


def run(path: Path) -> subprocess.CompletedProcess[str]:
    """The child's result; the library does not start a debugger when it aborts."""
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    command = [sys.executable, "-m", "tests.native.generate", str(path), TEXT]
    return subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, errors="replace", timeout=90, check=False
    )


@pytest.fixture
def generate(library_path: Path) -> Generate:
    """Loads a model in a child, and returns what it says about it."""

    def call(path: Path) -> dict[str, Any]:
        result = run(path)
        assert result.returncode == 0, result.stderr[-2000:]
        report: dict[str, Any] = json.loads(result.stdout)
        return report

    return call


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> minigguf.MiniFile:
    return minigguf.take_apart(minigguf.write_moe(tmp_path_factory.mktemp("good") / "mini.gguf"))


def assert_generates(report: dict[str, Any], path: Path) -> None:
    facts = check(path).facts
    assert report["round_trip"] == TEXT
    assert not report["ended"]
    assert all(report["pieces"])
    assert report["template"]
    assert (report["n_vocab"], report["n_ctx_train"]) == (facts.n_vocab, facts.n_ctx_train)
    assert (report["n_params"], report["size"]) == (facts.n_params, facts.size)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_K"])
def test_a_mini_model_generates(kind: str, generate: Generate, tmp_path: Path) -> None:
    path = minigguf.write_moe(tmp_path / "mini.gguf", n_embd=256, n_ff=256, head_size=64, experts=kind)
    assert_generates(generate(path), path)


def test_a_dense_mini_model_generates(generate: Generate, tmp_path: Path) -> None:
    path = minigguf.write_dense(tmp_path / "mini.gguf")
    assert_generates(generate(path), path)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_generates_in_reduced_size(name: str, generate: Generate, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, replace(SHAPES[name], n_layer=2, n_expert=8, n_vocab=5000), 1)
    assert_generates(generate(path), path)


def test_a_vocabulary_of_150_thousand_tokens_loads(generate: Generate, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, SHAPES["overhead"], 1)
    assert_generates(generate(path), path)


def test_the_embedded_model_is_what_is_said_of_it(generate: Generate) -> None:
    report, facts = generate(EMBEDDED), check(EMBEDDED).facts
    assert (report["n_params"], report["size"]) == (facts.n_params, facts.size)
    assert (report["n_vocab"], report["n_ctx_train"]) == (facts.n_vocab, facts.n_ctx_train)
    # The state holds the cells, and a few bytes of bookkeeping for each of them.
    assert facts.kv_bytes_per_token <= report["kv_bytes_per_token"] < facts.kv_bytes_per_token + 64


def test_the_embedded_model_in_three_parts_is_the_same_model(generate: Generate, tmp_path: Path) -> None:
    names = minigguf.split(EMBEDDED, 3, tmp_path)
    whole, split = check(EMBEDDED), check(names[0])
    assert len(split.parts) == 3
    assert split.facts == whole.facts
    assert split.fingerprint == whole.fingerprint
    assert generate(names[0]) == generate(EMBEDDED)


@pytest.mark.parametrize("oddity", HARMLESS)
def test_an_odd_but_sound_file_loads(oddity: str, parts: minigguf.MiniFile, tmp_path: Path, library_path: Path) -> None:
    path = tmp_path / "mini.gguf"
    path.write_bytes(HARMLESS[oddity](parts))
    assert run(path).returncode == 0


@pytest.mark.parametrize("fault", FATAL)
def test_a_fault_that_would_end_the_process_is_refused_before(
    fault: str, parts: minigguf.MiniFile, tmp_path: Path, library_path: Path
) -> None:
    """tests/pure shows that the checker refuses these; here the library shows why it must."""
    path = tmp_path / "mini.gguf"
    path.write_bytes(BROKEN[fault].make(parts))
    assert run(path).returncode < 0


@pytest.mark.parametrize("fault", ["cut in the data", "wrong magic", "a gap between tensors", "no context_length"])
def test_a_plainly_broken_file_is_refused_by_the_library_too(
    fault: str, parts: minigguf.MiniFile, tmp_path: Path, library_path: Path
) -> None:
    path = tmp_path / "mini.gguf"
    path.write_bytes(BROKEN[fault].make(parts))
    assert run(path).returncode == REFUSED


def test_sizes_of_blocks_are_the_librarys(library_path: Path) -> None:
    script = (
        "import ctypes, json, sys; lib = ctypes.CDLL(sys.argv[1])\n"
        "lib.ggml_type_size.restype = ctypes.c_size_t; lib.ggml_blck_size.restype = ctypes.c_int64\n"
        "lib.ggml_type_name.restype = ctypes.c_char_p\n"
        "name = lambda n: (lib.ggml_type_name(n) or b'').decode().upper()\n"
        "row = lambda n: [name(n), lib.ggml_blck_size(n), lib.ggml_type_size(n)]\n"
        "print(json.dumps([row(n) for n in json.loads(sys.argv[2])]))"
    )
    library = next(library_path.glob("libggml-base.so*"))
    numbers = quant_numbers()
    command = [sys.executable, "-c", script, str(library), json.dumps(numbers)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    known = [quant_of(number) for number in numbers]
    assert json.loads(result.stdout) == [[q.name.upper(), q.elements, q.bytes] for q in known if q]
