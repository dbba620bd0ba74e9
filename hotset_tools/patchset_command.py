"""`hotset patchset`: the command line of the patch series."""

from __future__ import annotations

import json as jsonlib
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from daemon.errors import EXIT_FAILURE
from daemon.native import pin
from daemon.native.locate import cache_root
from hotset_tools import patchset, source

app = typer.Typer(no_args_is_help=True, add_completion=False)

Directory = Annotated[Path | None, typer.Option("--patches", help="The series; the checkout's own by default.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command()
def check(
    patches: Directory = None,
    fetch: Annotated[bool, typer.Option("--fetch", help="Download the source if it is not in the cache.")] = False,
    json: Json = False,
) -> None:
    """List everything that is wrong with the series; exit code 1 if anything is."""
    directory = patches or pin.patches_dir()
    sdist = source.fetch(cache_root()) if fetch else source.cached_sdist(cache_root())
    problems = _check(directory, sdist)
    if json:
        print(jsonlib.dumps({"problems": problems, "applied": sdist is not None}))
    else:
        for problem in problems:
            print(problem, file=sys.stderr)
        if sdist is None:
            print("not applied: the source is not in the cache (--fetch downloads it)")
        if not problems:
            print(f"the series is good, hash {pin.series_hash(directory)[:12]}")
    if problems:
        raise typer.Exit(EXIT_FAILURE)


@app.command()
def apply(
    target: Annotated[Path, typer.Argument(help="A new directory for the patched source.")],
    until: Annotated[str | None, typer.Option(help="The last patch to apply; all by default.")] = None,
    patches: Directory = None,
    json: Json = False,
) -> None:
    """Unpack the pinned llama.cpp and apply the series, to work on a patch."""
    applied = patchset.apply(patches or pin.patches_dir(), target, source.fetch(cache_root()), until)
    print(jsonlib.dumps({"directory": str(target), "applied": applied}) if json else f"applied {', '.join(applied)}")


@app.command()
def export(
    tree: Annotated[Path, typer.Argument(help="What `apply` made, edited.")],
    name: Annotated[str | None, typer.Option("--patch", help="Patch to write; the last one by default.")] = None,
    patches: Directory = None,
    json: Json = False,
) -> None:
    """Write a patch anew from an edited tree, or a new one at the end of the series."""
    written = patchset.export(patches or pin.patches_dir(), tree, source.fetch(cache_root()), name)
    print(jsonlib.dumps({"written": str(written)}) if json else f"wrote {written}")


def _check(directory: Path, sdist: Path | None) -> list[str]:
    root = directory.resolve().parent
    if sdist is None:
        return patchset.check(directory, root, None)
    with tempfile.TemporaryDirectory(prefix="hotset-patchset-") as temporary:
        tree = Path(temporary, "llama.cpp")
        source.unpack(sdist, tree)
        return patchset.check(directory, root, tree)
