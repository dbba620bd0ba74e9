"""What `hotset patchset` does: judge the series, apply it to a tree, and write patches anew from a changed tree."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from daemon.errors import HotsetError
from daemon.native import pin
from hotset_tools import series, source, unidiff
from hotset_tools.series import FIELDS, Patch
from hotset_tools.unidiff import PatchFailed

_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_NAME = re.compile(r"[a-z][a-z-]*\.patch")
_OWN_FILES = {"series", "UPSTREAM", "README.md"}


def check(directory: Path, root: Path, tree: Path | None) -> list[str]:
    """Everything that is wrong with the series of `directory`; empty when nothing is.

    `root` is the checkout that the named tests are looked up in. `tree` is a pristine llama.cpp that the series is
    applied to, and is changed by that; None when the source is not at hand.
    """
    problems = [*_check_upstream(directory, tree), *_check_names(directory)]
    patches = _readable(directory, problems)
    for patch in patches:
        problems += [f"{patch.name}: {problem}" for problem in _check_patch(patch, root)]
    if tree is not None and not problems:
        try:
            series.apply_series(tree, patches)
        except PatchFailed as error:
            problems.append(error.message)
    return problems


def apply(directory: Path, target: Path, sdist: Path, until: str | None = None) -> list[str]:
    """Unpack the pinned source into `target` (which must not exist) and apply the series; returns the names applied.

    Raises:
        HotsetError: the target exists, `until` names no patch, or a patch does not apply.
    """
    if target.exists():
        raise HotsetError(f"{target} exists already; give a new directory")
    patches = _up_to(series.read_series(directory), until)
    source.unpack(sdist, target)
    series.apply_series(target, patches)
    return [patch.name for patch in patches]


def export(directory: Path, tree: Path, sdist: Path, name: str | None = None) -> Path:
    """Write patch `name` (None: the last one) so that it leads from the patches before it to `tree`.

    `tree` is what `apply --until NAME` made, edited. The header is kept; a name that is not in the series becomes a
    new patch at its end, with a header to fill in.

    Raises:
        HotsetError: the tree does not differ, or is no llama.cpp.
    """
    if not (tree / "CMakeLists.txt").is_file():
        raise HotsetError(f"{tree} holds no llama.cpp; make it with `hotset patchset apply`")
    names = pin.series_names(directory)
    name = name or (names[-1] if names else "")
    if not _NAME.fullmatch(name):
        raise HotsetError(f"{name!r} is no name for a patch: lower-case words with hyphens, ending in .patch")
    before = names[: names.index(name)] if name in names else names
    header = series.read_patch(directory, name).header if name in names else new_header()
    diff = _difference(directory, before, tree, sdist)
    if not diff:
        raise HotsetError(f"{tree} does not differ from the source with the patches before {name}")
    (directory / name).write_bytes((header + diff).encode("utf-8", "surrogateescape"))
    if name not in names:
        with (directory / "series").open("a", encoding="utf-8") as file:
            file.write(name + "\n")
    return directory / name


def new_header() -> str:
    """The fields of a new patch, for its author to fill in; `check` refuses empty ones."""
    known = {"Author": "hotset developers", "Origin": "vendor, written for this series", "Forwarded": "not-needed"}
    return "".join(f"{field}: {known.get(field, '')}".rstrip() + "\n" for field in FIELDS)


def diff_trees(old: Path, new: Path) -> str:
    """A unified diff with a/ and b/ prefixes, files in order of their paths, no times: the same trees, the same text.

    Raises:
        HotsetError: a binary file differs.
    """
    paths = sorted({path.relative_to(base).as_posix() for base in (old, new) for path in _files(base)})
    return "".join(_diff_file(old, new, path) for path in paths if _bytes(old / path) != _bytes(new / path))


def _difference(directory: Path, before: list[str], tree: Path, sdist: Path) -> str:
    with tempfile.TemporaryDirectory(prefix="hotset-patchset-") as temporary:
        base = Path(temporary, "base")
        source.unpack(sdist, base)
        series.apply_series(base, [series.read_patch(directory, name) for name in before])
        return diff_trees(base, tree)


def _up_to(patches: list[Patch], until: str | None) -> list[Patch]:
    if until is None:
        return patches
    names = [patch.name for patch in patches]
    if until not in names:
        raise HotsetError(f"{until} is not in the series: {', '.join(names)}")
    return patches[: names.index(until) + 1]


def _check_upstream(directory: Path, tree: Path | None) -> Iterator[str]:
    try:
        upstream = pin.read_upstream(directory)
    except (OSError, tomllib.TOMLDecodeError, ValidationError) as error:
        yield f"UPSTREAM: {error}"
        return
    if tree is not None:
        found = ggml_version(tree)
        if found != upstream.ggml_version:
            yield f"UPSTREAM: ggml_version is {upstream.ggml_version}, the source has {found}"


def ggml_version(tree: Path) -> str:
    """As ggml/CMakeLists.txt of a llama.cpp tree has it."""
    text = (tree / "ggml" / "CMakeLists.txt").read_text("utf-8")
    parts = [re.search(rf"set\(GGML_VERSION_{part} (\d+)\)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part[1] if part else "?" for part in parts)


def _check_names(directory: Path) -> Iterator[str]:
    try:
        names = pin.series_names(directory)
    except OSError as error:
        yield f"series: {error.strerror}"
        return
    files = {path.name for path in directory.iterdir()} - _OWN_FILES
    yield from (f"series: {name} is listed twice" for name in sorted({n for n in names if names.count(n) > 1}))
    yield from (f"series: {name} is listed but does not exist" for name in names if name not in files)
    yield from (f"{name} is not listed in series" for name in sorted(files - set(names)))
    wrong = (name for name in names if not _NAME.fullmatch(name))
    yield from (f"{name}: a name is lower-case words with hyphens, without numbers" for name in wrong)


def _readable(directory: Path, problems: list[str]) -> list[Patch]:
    """The patches that can be read; what cannot be is a problem, unless `_check_names` said so already."""
    try:
        names = [name for name in pin.series_names(directory) if (directory / name).is_file()]
    except OSError:
        return []
    patches: list[Patch] = []
    for name in names:
        try:
            patches.append(series.read_patch(directory, name))
        except UnicodeDecodeError:
            problems.append(f"{name}: it is not UTF-8")
    return patches


def _check_patch(patch: Patch, root: Path) -> Iterator[str]:
    fields = patch.fields
    yield from (f"the header has no {field}" for field in FIELDS if not fields.get(field))
    if (date := fields.get("Last-Update")) and not _DATE.fullmatch(date):
        yield f"Last-Update is {date}, not YYYY-MM-DD"
    if test := fields.get("Test"):
        yield from _check_test(test, root)
    try:
        if not unidiff.parse(patch.diff):
            yield "there is no diff"
    except PatchFailed as error:
        yield error.message
    lines = enumerate(unidiff.lines_of(patch.diff), 1)
    trailing = [number for number, line in lines if line.startswith("+") and line != line.rstrip() + "\n"]
    yield from (f"line {number} of the diff adds white space at the end of a line" for number in trailing)


def _check_test(test: str, root: Path) -> Iterator[str]:
    """A test is named as pytest does, FILE::FUNCTION; several are separated by white space."""
    for name in test.split():
        file, _, function = name.partition("::")
        if not (root / file).is_file():
            yield f"Test names {file}, which does not exist"
        elif function.split("::")[-1] not in _functions(root / file):
            yield f"Test names {name}, but the file has no such function"


def _functions(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text("utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _files(base: Path) -> Iterator[Path]:
    skipped = {".git", "__pycache__"}
    return (path for path in base.rglob("*") if path.is_file() and not skipped & set(path.relative_to(base).parts))


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _diff_file(old: Path, new: Path, path: str) -> str:
    diff = shutil.which("diff")
    if diff is None:
        raise HotsetError("`diff` is missing; install the package diffutils")
    sides = [(old / path, f"a/{path}"), (new / path, f"b/{path}")]
    files = [str(file) if file.is_file() else "/dev/null" for file, _ in sides]
    labels = [label if file.is_file() else "/dev/null" for file, label in sides]
    options = [option for label in labels for option in ("--label", label)]
    result = subprocess.run([diff, "-u", *options, *files], capture_output=True, check=False)
    if result.returncode != 1 or b"\0" in b"".join(Path(file).read_bytes() for file in files):
        raise HotsetError(f"{path} cannot be put into a patch: it is binary, or diff failed")
    return result.stdout.decode("utf-8", "surrogateescape")
