"""Which build of the cache is used: whole, of this series, for this machine; the one selected last first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from daemon.native import locate, pin
from daemon.native.locate import Build, BuildInfo

ALL = frozenset({"SSE42", "AVX", "AVX2", "AVX512"})


def make(root: Path, key: str, selected: int = 1, **changes: object) -> Build:
    """A build directory with one file, selected at the time `selected`."""
    directory = root / "builds" / key
    directory.mkdir(parents=True)
    (directory / "libllama.so").write_bytes(b"elf")
    values: dict[str, object] = {
        "key": key,
        "kind": "hotset",
        "version": pin.upstream().version,
        "series": pin.series(),
        "backends": ["cpu", "rpc"],
        "flags_wanted": ["AVX"],
        "flags": ["AVX"],
        "fallback": [],
        "compiler": "c++ 12",
        "options": {},
        "glslc": None,
        "selftest": {},
        "created": "2026-11-30T00:00:00+00:00",
        "seconds": 1.0,
        "files": {"libllama.so": 3},
    }
    info = BuildInfo.model_validate(values | changes)
    (directory / "build.json").write_text(info.model_dump_json())
    os.utime(directory / "build.json", ns=(selected, selected))
    return Build(directory, info)


def find(root: Path, backend: str | None = None, flags: frozenset[str] = ALL) -> Path | None:
    build = locate.find_build(backend, environ={"HOTSET_CACHE": str(root)}, flags=flags)
    return build.directory if build else None


def test_an_empty_cache_has_no_build(tmp_path: Path) -> None:
    assert find(tmp_path) is None


def test_the_build_selected_last_wins(tmp_path: Path) -> None:
    first, second = make(tmp_path, "a", 2), make(tmp_path, "b", 1)
    assert find(tmp_path) == first.directory
    locate.select(second)
    assert find(tmp_path) == second.directory


def test_a_backend_can_be_asked_for(tmp_path: Path) -> None:
    make(tmp_path, "a", 2)
    vulkan = make(tmp_path, "b", 1, backends=["cpu", "rpc", "vulkan"])
    assert find(tmp_path, "vulkan") == vulkan.directory
    assert find(tmp_path, "hip") is None


@pytest.mark.parametrize(
    "changes", [{"series": "0" * 64}, {"version": "0.3.35"}, {"flags": ["AVX", "AMX_TILE"]}, {"kind": "peer"}]
)
def test_a_build_for_something_else_is_not_used(tmp_path: Path, changes: dict[str, object]) -> None:
    make(tmp_path, "a", **changes)
    assert find(tmp_path) is None


def test_a_build_of_a_richer_machine_is_not_used_on_a_poorer_one(tmp_path: Path) -> None:
    build = make(tmp_path, "a", flags=["AVX", "AVX512"])
    assert find(tmp_path) == build.directory
    assert find(tmp_path, flags=frozenset({"AVX"})) is None


def damage_missing(directory: Path) -> None:
    (directory / "libllama.so").unlink()


def damage_short(directory: Path) -> None:
    (directory / "libllama.so").write_bytes(b"el")


def damage_json(directory: Path) -> None:
    (directory / "build.json").write_text("{")


def damage_key(directory: Path) -> None:
    (directory / "build.json").write_text('{"format": 1, "key": "a"}')


@pytest.mark.parametrize("damage", [damage_missing, damage_short, damage_json, damage_key])
def test_a_damaged_build_is_never_used(tmp_path: Path, damage: object) -> None:
    build = make(tmp_path, "a")
    assert callable(damage)
    damage(build.directory)
    assert find(tmp_path) is None


def test_the_override_wins_and_needs_no_description(tmp_path: Path) -> None:
    make(tmp_path, "a")
    other = tmp_path / "other"
    other.mkdir()
    (other / "libllama.so").write_bytes(b"")
    environ = {"HOTSET_CACHE": str(tmp_path), "LLAMA_CPP_LIB_PATH": str(other)}
    assert locate.find_build(environ=environ) == Build(other, None)


def test_an_override_without_a_library_is_an_error_not_a_fallback(tmp_path: Path) -> None:
    make(tmp_path, "a")
    environ = {"HOTSET_CACHE": str(tmp_path), "LLAMA_CPP_LIB_PATH": str(tmp_path)}
    assert locate.find_build(environ=environ) is None
    with pytest.raises(locate.BuildMissing, match=r"without libllama\.so"):
        locate.require_build(environ)


def test_the_message_says_why_what_is_there_cannot_be_used(tmp_path: Path) -> None:
    make(tmp_path, "a", series="0" * 64)
    with pytest.raises(locate.BuildMissing, match=r"made from another patch series\. Run `make setup`"):
        locate.require_build({"HOTSET_CACHE": str(tmp_path)})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOTSET_CACHE": "/x/y", "XDG_CACHE_HOME": "/z"}, Path("/x/y")),
        ({"XDG_CACHE_HOME": "/z"}, Path("/z/hotset")),
        ({}, Path("~/.cache/hotset").expanduser()),
    ],
)
def test_where_the_cache_is(environ: dict[str, str], expected: Path) -> None:
    assert locate.cache_root(environ) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"STATE_DIRECTORY": "/x/y", "XDG_STATE_HOME": "/z"}, Path("/x/y")),
        ({"STATE_DIRECTORY": "/x/y:/x/z"}, Path("/x/y")),
        ({"STATE_DIRECTORY": "", "XDG_STATE_HOME": "/z"}, Path("/z/hotset")),
        ({}, Path("~/.local/state/hotset").expanduser()),
    ],
)
def test_where_the_state_is(environ: dict[str, str], expected: Path) -> None:
    assert locate.state_root(environ) == expected


def test_a_user_without_a_home_has_no_place_for_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert locate.state_root({}) is None
    assert locate.state_root({"XDG_STATE_HOME": "/z"}) == Path("/z/hotset")
