"""The patch series on the real source: judged, applied, exported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from daemon.errors import HotsetError
from daemon.native import pin
from hotset_tools import patchset, series
from hotset_tools.unidiff import PatchFailed

ROOT = Path(__file__).resolve().parents[2]
FIRST = "abi-and-build-info.patch"


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    """A copy of the series that a test may change."""
    return Path(shutil.copytree(pin.patches_dir(), tmp_path / "patches"))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_the_series_is_good_and_applies_to_the_pinned_source(small_tree: Path, patched_tree: Path) -> None:
    assert patchset.check(pin.patches_dir(), ROOT, small_tree) == []
    assert (patched_tree / "include" / "llama-hotset.h").is_file()


def test_everything_wrong_is_listed_at_once(patches: Path) -> None:
    edit(patches / FIRST, "Reason: ", "Reasons: ")
    edit(patches / FIRST, "Last-Update: 2026-11-30", "Last-Update: yesterday")
    edit(patches / FIRST, "test_library_has_the_expected_abi", "test_that_is_not_there")
    edit(patches / FIRST, "+#pragma once", "+#pragma once ")
    edit(patches / "UPSTREAM", "llama_cpp_commit", "commit")
    (patches / "series").write_text(f"{FIRST}\n{FIRST}\nlost.patch\n0001-numbered.patch\n")
    (patches / "forgotten.patch").write_text("")
    problems = "\n".join(patchset.check(patches, ROOT, None))
    for expected in (
        "UPSTREAM: ",
        f"series: {FIRST} is listed twice",
        "series: lost.patch is listed but does not exist",
        "forgotten.patch is not listed in series",
        "0001-numbered.patch: a name is lower-case words",
        f"{FIRST}: the header has no Reason",
        f"{FIRST}: Last-Update is yesterday",
        "but the file has no such function",
        "adds white space at the end of a line",
    ):
        assert expected in problems


def test_a_test_file_that_is_gone_is_told(patches: Path) -> None:
    edit(patches / FIRST, "Test: tests/native/test_abi.py", "Test: tests/native/test_nothing.py")
    problem = f"{FIRST}: Test names tests/native/test_nothing.py, which does not exist"
    assert patchset.check(patches, ROOT, None) == [problem]


def test_a_missing_series_file_is_told(patches: Path) -> None:
    (patches / "series").unlink()
    assert patchset.check(patches, ROOT, None) == ["series: No such file or directory"]


def test_fuzz_is_refused(patches: Path, small_tree: Path) -> None:
    edit(patches / FIRST, "     llama-graph.cpp\n", "     llama-graff.cpp\n")
    (problem,) = patchset.check(patches, ROOT, small_tree)
    assert problem == f"{FIRST}: src/CMakeLists.txt: the hunk for line 18 does not match"


def test_an_offset_is_refused(patches: Path, small_tree: Path) -> None:
    edit(patches / FIRST, "@@ -18,6 +18,7 @@", "@@ -17,6 +17,7 @@")
    (problem,) = patchset.check(patches, ROOT, small_tree)
    assert "the hunk for line 17 does not match" in problem


def test_another_ggml_than_upstream_says_is_told(patches: Path, small_tree: Path) -> None:
    edit(patches / "UPSTREAM", 'ggml_version = "0.25.3"', 'ggml_version = "0.25.4"')
    assert patchset.check(patches, ROOT, small_tree) == ["UPSTREAM: ggml_version is 0.25.4, the source has 0.25.3"]


@pytest.mark.parametrize("name", pin.series_names(pin.patches_dir()))
def test_exporting_an_untouched_tree_changes_no_byte(
    name: str, patches: Path, small_sdist: Path, tmp_path: Path
) -> None:
    before = (patches / name).read_bytes()
    patchset.apply(patches, tmp_path / "tree", small_sdist, until=name)
    patchset.export(patches, tmp_path / "tree", small_sdist, name)
    assert (patches / name).read_bytes() == before


def test_an_edit_lands_in_the_patch_and_the_header_stays(patches: Path, small_sdist: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    assert patchset.apply(patches, tree, small_sdist, until=FIRST) == [FIRST]
    header = series.read_patch(patches, FIRST).header
    edit(tree / "src" / "CMakeLists.txt", "series, backends and flags of a hotset build", "what was built")
    patchset.export(patches, tree, small_sdist, FIRST)
    written = series.read_patch(patches, FIRST)
    assert written.header == header
    assert 'STRING "llama: what was built")\n' in written.diff
    again = tmp_path / "again"
    patchset.apply(patches, again, small_sdist)
    assert "llama: what was built" in (again / "src" / "CMakeLists.txt").read_text()


def test_a_new_patch_is_added_with_a_header_to_fill_in(patches: Path, small_sdist: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    patchset.apply(patches, tree, small_sdist)
    (tree / "src" / "extra.h").write_text("#pragma once\n")
    patchset.export(patches, tree, small_sdist, "one-more-thing.patch")
    assert pin.series_names(patches)[-1] == "one-more-thing.patch"
    problems = patchset.check(patches, ROOT, None)
    missing = ("Description", "Last-Update", "Reason", "Test")
    assert problems == [f"one-more-thing.patch: the header has no {field}" for field in missing]


def test_what_cannot_be_exported_is_told(patches: Path, small_sdist: Path, tmp_path: Path) -> None:
    with pytest.raises(HotsetError, match=r"holds no llama\.cpp"):
        patchset.export(patches, tmp_path, small_sdist)
    tree = tmp_path / "tree"
    patchset.apply(patches, tree, small_sdist)
    with pytest.raises(HotsetError, match="is no name for a patch"):
        patchset.export(patches, tree, small_sdist, "0002-Thing.patch")
    with pytest.raises(HotsetError, match="does not differ"):
        patchset.export(patches, tree, small_sdist, "empty.patch")
    (tree / "src" / "blob").write_bytes(b"\0\1\2")
    with pytest.raises(HotsetError, match="src/blob cannot be put into a patch"):
        patchset.export(patches, tree, small_sdist, "blob.patch")


def test_apply_wants_a_new_directory_and_a_known_patch(patches: Path, small_sdist: Path, tmp_path: Path) -> None:
    with pytest.raises(HotsetError, match="exists already"):
        patchset.apply(patches, tmp_path, small_sdist)
    with pytest.raises(HotsetError, match="is not in the series"):
        patchset.apply(patches, tmp_path / "tree", small_sdist, until="unknown.patch")


def test_a_patch_that_fails_is_named(patches: Path, small_sdist: Path, tmp_path: Path) -> None:
    edit(patches / FIRST, "     llama-graph.cpp\n", "     llama-graff.cpp\n")
    with pytest.raises(PatchFailed, match=f"^{FIRST}: src/CMakeLists.txt"):
        patchset.apply(patches, tmp_path / "tree", small_sdist)
