"""Diffs are applied exactly or not at all."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotset_tools import unidiff
from hotset_tools.unidiff import PatchFailed

OLD = "one\ntwo\nthree\nfour\nfive\n"
DIFF = "--- a/dir/file\n+++ b/dir/file\n@@ -2,3 +2,3 @@\n two\n-three\n+THREE\n four\n"

texts = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "\n"]), max_size=12).map("".join)


def only(diff: str) -> unidiff.FileDiff:
    (file,) = unidiff.parse(diff)
    return file


def make(old: str, new: str) -> str:
    return "".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), "a/f", "b/f", n=2))


def test_a_hunk_at_its_place_is_applied() -> None:
    assert unidiff.apply(only(DIFF), OLD) == OLD.replace("three", "THREE")


def test_a_hunk_one_line_off_is_refused() -> None:
    with pytest.raises(PatchFailed, match="dir/file: the hunk for line 2 does not match"):
        unidiff.apply(only(DIFF), "zero\n" + OLD)


def test_changed_context_is_refused() -> None:
    with pytest.raises(PatchFailed, match="does not match"):
        unidiff.apply(only(DIFF), OLD.replace("four", "for"))


def test_a_file_is_created_only_where_there_is_none() -> None:
    diff = only("--- /dev/null\n+++ b/new\n@@ -0,0 +1,2 @@\n+x\n+y\n")
    assert unidiff.apply(diff, None) == "x\ny\n"
    with pytest.raises(PatchFailed, match="new: exists already"):
        unidiff.apply(diff, "x\n")


def test_a_file_is_deleted_only_whole() -> None:
    diff = only("--- a/old\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-x\n-y\n")
    assert unidiff.apply(diff, "x\ny\n") is None
    with pytest.raises(PatchFailed, match="lines are left"):
        unidiff.apply(diff, "x\ny\nz\n")
    with pytest.raises(PatchFailed, match="does not exist"):
        unidiff.apply(diff, None)


def test_a_missing_line_end_is_kept() -> None:
    diff = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n\\ No newline at end of file\n+y\n\\ No newline at end of file\n"
    assert unidiff.apply(only(diff), "x") == "y"
    with pytest.raises(PatchFailed, match="does not match"):
        unidiff.apply(only(diff), "x\n")


def test_only_a_line_feed_ends_a_line() -> None:
    diff = "--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\x0cb\r\n-c\u2028d\n+e\n"
    assert unidiff.apply(only(diff), "a\x0cb\r\nc\u2028d\n") == "a\x0cb\r\ne\n"


@pytest.mark.parametrize(
    ("diff", "message"),
    [
        ("garbage\n", "neither a file nor a hunk"),
        ("--- a/f\n", r"no \+\+\+ line"),
        ("--- a/f\n+++ b/g\n@@ -1 +1 @@\n-x\n+y\n", "two different files"),
        ("--- /dev/null\n+++ /dev/null\n", "or none"),
        ("--- a/../f\n+++ b/../f\n@@ -1 +1 @@\n-x\n+y\n", "not a path below"),
        ("--- f\n+++ f\n@@ -1 +1 @@\n-x\n+y\n", "not a path below"),
        ("--- a//f\n+++ b//f\n@@ -1 +1 @@\n-x\n+y\n", "not a path below"),
        ("--- a/f\n+++ b/f\n", "no hunk follows"),
        ("--- a/f\n+++ b/f\n@@ what @@\n", "no hunk header"),
        ("--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n x\n", "ends inside a hunk"),
        ("--- a/f\n+++ b/f\n@@ -1,2 +1,0 @@\n-x\n+y\n-z\n", "more lines than its header says"),
    ],
)
def test_what_is_no_diff_is_refused(diff: str, message: str) -> None:
    with pytest.raises(PatchFailed, match=message):
        unidiff.parse(diff)


@given(texts, texts)
def test_a_diff_leads_from_the_old_text_to_the_new(old: str, new: str) -> None:
    diff = make(old, new)
    if diff:
        assert unidiff.apply(only(diff), old) == new


@given(texts, texts, texts)
def test_another_text_is_never_half_patched(old: str, new: str, other: str) -> None:
    diff = make(old, new)
    if not diff:
        return
    try:
        result = unidiff.apply(only(diff), other)
    except PatchFailed:
        return
    removed = sum(len(hunk.old) for hunk in only(diff).hunks)
    added = sum(len(hunk.new) for hunk in only(diff).hunks)
    assert result is not None
    assert len(unidiff.lines_of(result)) == len(unidiff.lines_of(other)) - removed + added
