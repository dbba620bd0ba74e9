"""The pipeline from request to installed directory, with real source files and tools that pretend."""

from __future__ import annotations

import fcntl
import signal
import threading
from pathlib import Path

import pytest

from daemon.native import cpuinfo, locate, pin
from hotset_tools.build import Builder
from hotset_tools.compiling import BuildFailed
from hotset_tools.plan import Request
from hotset_tools.selftest import SelftestFailed, Verdict, read_verdict
from tests.build.fake_tools import Recorder, make_tools

ALL = frozenset(cpuinfo.GGML_FLAGS)
CPU = Request("cpu")


def passes(directory: Path) -> Verdict:
    return Verdict(None, {"mul_mat": 0.005})


def traps_on_amx(directory: Path) -> Verdict:
    """A machine that announces AMX and raises SIGILL on it."""
    if "AMX" in (directory / "libggml-cpu.so").read_text():
        return read_verdict(-signal.SIGILL, '{"running": "q4_K mul_mat of 32 in AMX"}\n', "")
    return passes(directory)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def builder(tmp_path: Path, small_sdist: Path, recorder: Recorder) -> Builder:
    tools = make_tools(tmp_path / "tools")
    return Builder(
        tmp_path / "cache",
        recorder,
        check=passes,
        fetch=lambda cache: small_sdist,
        survey=lambda **named: tools,
        machine=lambda: (ALL, True),
    )


def test_a_build_is_installed_described_and_found(builder: Builder, recorder: Recorder) -> None:
    (build,) = builder.build(CPU)
    info = locate.read_build(build.directory)
    assert info is not None
    assert sorted(path.name for path in build.directory.iterdir()) == [
        "build.json", "ggml-rpc-server", "libggml-cpu.so", "libllama.so", "libllama.so.0.5.0",
    ]  # fmt: skip
    assert (info.backends, info.series, info.compiler) == (["cpu", "rpc"], pin.series(), "pretend 1.0")
    assert set(info.flags) == ALL
    assert info.selftest == {"mul_mat": 0.005}
    assert recorder.steps == [(1, 2), (2, 2)]
    found = locate.find_build(environ={"HOTSET_CACHE": str(builder.root)}, flags=ALL)
    assert found == build


def test_the_compiled_source_has_the_series(builder: Builder) -> None:
    (build,) = builder.build(Request("cpu", keep_work=True))
    tree = builder.root / "work" / build.directory.name / "src"
    assert "llama_hotset_abi_version" in (tree / "src" / "llama-hotset.cpp").read_text()


def test_nothing_is_left_beside_the_build(builder: Builder) -> None:
    (build,) = builder.build(CPU)
    assert list((builder.root / "builds").iterdir()) == [build.directory]
    assert list((builder.root / "work").iterdir()) == []


def test_a_second_build_only_selects(builder: Builder, recorder: Recorder) -> None:
    (first,) = builder.build(CPU)
    stages = list(recorder.stages)
    assert builder.build(CPU) == [first]
    assert recorder.stages == stages


def test_force_builds_again_in_the_same_place(builder: Builder) -> None:
    (first,) = builder.build(CPU)
    inode = first.directory.stat().st_ino
    (second,) = builder.build(Request("cpu", force=True))
    assert second.directory == first.directory
    assert second.directory.stat().st_ino != inode
    assert len(list((builder.root / "builds").iterdir())) == 1


def test_a_processor_that_lies_about_amx_gets_a_build_without_it(builder: Builder, recorder: Recorder) -> None:
    builder.check = traps_on_amx
    (build,) = builder.build(CPU)
    assert build.info is not None
    assert set(build.info.flags) == {flag for flag in ALL if not flag.startswith("AMX")}
    assert set(build.info.flags_wanted) == ALL
    assert build.info.fallback[0].startswith("SIGILL in the self-test, at q4_K mul_mat of 32 in AMX")
    assert "AMX" not in (build.directory / "libggml-cpu.so").read_text()
    assert any("SIGILL" in note for note in recorder.notes)
    assert builder.build(CPU) == [build]


def test_a_library_that_never_passes_is_not_installed(builder: Builder) -> None:
    builder.check = lambda directory: Verdict("wrong")
    with pytest.raises(SelftestFailed):
        builder.build(CPU)
    assert list((builder.root / "builds").iterdir()) == []


def test_a_compiler_error_shows_the_end_of_the_log_and_where_it_is(builder: Builder, tmp_path: Path) -> None:
    (tmp_path / "tools" / "broken").touch()
    with pytest.raises(BuildFailed, match="error: it is broken") as error:
        builder.build(CPU)
    log = Path(error.value.message.rsplit(" ", 1)[1])
    assert "configured with: " in log.read_text()
    assert list((builder.root / "builds").iterdir()) == []


def test_an_interrupted_build_goes_on_where_it_was(builder: Builder, recorder: Recorder, tmp_path: Path) -> None:
    (tmp_path / "tools" / "broken").touch()
    with pytest.raises(BuildFailed):
        builder.build(CPU)
    (tmp_path / "tools" / "broken").unlink()
    recorder.stages.clear()
    builder.build(CPU)
    assert "Fetching the source" not in recorder.stages


def test_what_a_killed_build_left_is_swept(builder: Builder) -> None:
    (builder.root / "builds" / ".staging-dead").mkdir(parents=True)
    (builder.root / "work" / "hotset-of-another-series").mkdir(parents=True)
    (build,) = builder.build(CPU)
    assert list((builder.root / "builds").iterdir()) == [build.directory]
    assert list((builder.root / "work").iterdir()) == []


def test_a_peer_is_built_beside_it_from_unpatched_source(builder: Builder) -> None:
    build, peer = builder.build(Request("cpu", peer=True, keep_work=True))
    assert peer.info is not None
    assert (peer.info.kind, peer.info.series) == ("peer", "")
    assert {"llama-server", "llama-bench"} <= {path.name for path in peer.directory.iterdir()}
    assert not (builder.root / "work" / peer.directory.name / "src" / "include" / "llama-hotset.h").exists()
    environ = {"HOTSET_CACHE": str(builder.root)}
    assert locate.find_peer(environ=environ, flags=ALL) == peer
    assert locate.find_build(environ=environ, flags=ALL) == build


def test_two_builds_at_once_wait_for_each_other(builder: Builder, recorder: Recorder) -> None:
    builder.root.mkdir()
    waiting = threading.Event()
    recorder.note = lambda text: waiting.set()  # type: ignore[method-assign]
    with (builder.root / "build.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        thread = threading.Thread(target=builder.build, args=[CPU])
        thread.start()
        assert waiting.wait(30)
        assert not recorder.stages
        fcntl.flock(other, fcntl.LOCK_UN)
        thread.join(30)
    assert len(list((builder.root / "builds").iterdir())) == 1
