"""The hash of a patch series: what changes it, and what must not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from daemon.native import pin
from hotset_tools import series


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(pin.patches_dir(), tmp_path / "patches"))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_the_same_files_have_the_same_hash(copy: Path) -> None:
    assert pin.series_hash(copy) == pin.series()


def test_words_in_a_header_and_comments_do_not_change_it(copy: Path) -> None:
    edit(copy / "abi-and-build-info.patch", "Reason: ", "Reason: really, ")
    edit(copy / "series", "# ", "# note: ")
    assert pin.series_hash(copy) == pin.series()


def test_one_character_of_a_diff_changes_it(copy: Path) -> None:
    edit(copy / "abi-and-build-info.patch", "ABI_VERSION 1", "ABI_VERSION 2")
    assert pin.series_hash(copy) != pin.series()


def test_order_and_base_change_it(copy: Path) -> None:
    names = pin.series_names(copy)
    (copy / "series").write_text("\n".join(reversed(names)) + "\n")
    assert pin.series_hash(copy) != pin.series()
    (copy / "series").write_text("\n".join(names) + "\n")
    edit(copy / "UPSTREAM", pin.upstream().sdist_sha256, "0" * 64)
    assert pin.series_hash(copy) != pin.series()


def test_upstream_with_an_unknown_or_missing_key_is_refused(copy: Path) -> None:
    edit(copy / "UPSTREAM", "ggml_version", "ggml_versoin")
    with pytest.raises(ValidationError, match="ggml_versoin"):
        pin.read_upstream(copy)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("A: b\n--- a/f\n+++ b/f\n", ("A: b\n", "--- a/f\n+++ b/f\n")),
        ("--- a/f\n", ("", "--- a/f\n")),
        ("A: b\n", ("A: b\n", "")),
        ("", ("", "")),
    ],
)
def test_a_patch_splits_at_its_first_file(text: str, parts: tuple[str, str]) -> None:
    assert pin.split_patch(text) == parts


def test_header_fields_continue_on_indented_lines() -> None:
    patch = series.Patch("x.patch", "Description: short\n long\n  longer\nTest: a::b\n", "")
    assert patch.fields == {"Description": "short\nlong\n longer", "Test": "a::b"}
