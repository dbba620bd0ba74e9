"""`hotset build`: the command line of the native build."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer

from daemon.native.locate import Build, cache_root
from hotset_tools.build import Builder
from hotset_tools.cpuflags import describe
from hotset_tools.plan import Request
from hotset_tools.reporter import make_reporter
from hotset_tools.shaders import verdict


def command(
    backend: Annotated[str, typer.Option(help="auto, cpu, vulkan, hip or cuda; CPU and RPC are always in.")] = "auto",
    peer: Annotated[bool, typer.Option("--peer", help="Also llama-server and llama-bench, unpatched.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print build.json and where it is.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Build again even if it is in the cache.")] = False,
    jobs: Annotated[int, typer.Option(min=0, help="Compilers at once; 0: one for each processor.")] = 0,
    glslc: Annotated[str | None, typer.Option(help="Another glslc, newer than the distribution's.")] = None,
    vulkan_include: Annotated[str | None, typer.Option(help="Directory with vulkan/vulkan.hpp.")] = None,
    keep_work: Annotated[bool, typer.Option("--keep-work", help="Keep source and objects of the build.")] = False,
) -> None:
    """Build the native library into the cache, or select it if it is there."""
    reporter = make_reporter(json=json)
    request = Request(backend, peer, force, jobs, glslc, vulkan_include, keep_work)
    try:
        built = Builder(cache_root(), reporter).build(request)
    finally:
        reporter.close()
    if json:
        print(jsonlib.dumps([to_json(build) for build in built], indent=2))
    else:
        for build in built:
            print(summary(build))


def to_json(build: Build) -> dict[str, object]:
    """build.json with the directory it lies in."""
    return {"directory": str(build.directory), **(build.info.model_dump() if build.info else {})}


def summary(build: Build) -> str:
    """A few lines about a build, for people."""
    info = build.info
    assert info is not None
    lines = [f"{info.kind}: {', '.join(info.backends)}; CPU: {describe(info.flags)}", f"  in {build.directory}"]
    if info.glslc:
        lines.append(f"  glslc {info.glslc.version}: {verdict(info.glslc)}")
    lines += [f"  smaller instruction set than the processor announces: {line}" for line in info.fallback]
    return "\n".join(lines)
