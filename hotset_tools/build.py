"""The native build as an outline: plan, lock, source, compile, self-test, install."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from daemon.native import pin
from daemon.native.locate import Build, BuildInfo
from hotset_tools import cache, cpuflags, selftest, series, source, toolchain
from hotset_tools.compiling import Compilation, compiler_environment
from hotset_tools.plan import Plan, Request, machine, make_plan
from hotset_tools.reporter import Reporter, Silent
from hotset_tools.selftest import Check, Settled
from hotset_tools.toolchain import Toolchain

WRAPPER = Path(__file__).parent / "native"
PROGRAMS = {"hotset": ("ggml-rpc-server",), "peer": ("llama-server", "llama-bench")}
# The standalone tree configures its tools only when all of this is on; ninja still builds no more than the targets.
_PEER_OPTIONS = {
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_COMMON": "ON",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_TOOLS": "ON",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
    "CMAKE_INSTALL_RPATH": "$ORIGIN",
}


@dataclass
class Builder:
    """Builds into one cache. `check` tests a library, `fetch` gets the sdist, the rest looks at the machine."""

    root: Path
    reporter: Reporter = field(default_factory=Silent)
    check: Check = selftest.check
    fetch: Callable[[Path], Path] = source.fetch
    survey: Callable[..., Toolchain] = toolchain.survey
    machine: Callable[[], tuple[frozenset[str], bool]] = machine

    def build(self, request: Request) -> list[Build]:
        """Everything asked for: the library, and with `peer` the peer; what is there already is only selected.

        Raises:
            ToolsMissing, SourceUnavailable, PatchFailed, BuildFailed, SelftestFailed: with what to do.
        """
        tools = self.survey(glslc=request.glslc, vulkan_include=request.vulkan_include)
        kinds = (False, True) if request.peer else (False,)
        announced, x86 = self.machine()
        plans = [make_plan(request, tools, announced, x86=x86, peer=peer) for peer in kinds]
        for note in dict.fromkeys(note for plan in plans for note in plan.notes):
            self.reporter.note(note)
        return [self._one(plan, request) for plan in plans]

    def _one(self, plan: Plan, request: Request) -> Build:
        found = self._existing(plan, request)
        if found is not None:
            return found
        with cache.build_lock(self.root, lambda: self.reporter.note("Waiting for another build to end.")):
            # The other process may have built exactly this.
            return self._existing(plan, request) or self._make(plan, request)

    def _existing(self, plan: Plan, request: Request) -> Build | None:
        found = None if request.force else cache.find_key(self.root, plan.key)
        if found is not None:
            cache.select(found)
        return found

    def _make(self, plan: Plan, request: Request) -> Build:
        cache.sweep(self.root, plan.key)
        started = time.monotonic()
        with self._work(plan, request) as work, cache.staging(self.root) as staged:
            self._prepare(plan, work / "src")
            self.reporter.stage(f"Configuring {', '.join(plan.backends)}")
            compilation = self._compilation(plan, work, request.jobs)
            settled = selftest.settle(plan.flags, self._step(plan, compilation, staged), self._tested, self._say)
            info = describe(plan, settled, time.monotonic() - started, sizes(staged))
            return cache.publish(self.root, staged, info)

    @contextmanager
    def _work(self, plan: Plan, request: Request) -> Iterator[Path]:
        """The directory to compile in. It is named by the key, so that an interrupted build goes on where it was."""
        work = self.root / "work" / plan.key
        work.mkdir(parents=True, exist_ok=True)
        if request.keep_work:
            (work / cache.KEPT).touch()
        yield work
        if not request.keep_work:
            shutil.rmtree(work, ignore_errors=True)

    def _prepare(self, plan: Plan, tree: Path) -> None:
        """The patched (peer: unpatched) source in `tree`."""
        if tree.is_dir():
            return
        self.reporter.stage("Fetching the source")
        sdist = self.fetch(self.root)
        self.reporter.stage("Unpacking and patching")
        fresh = tree.with_name("src.new")
        shutil.rmtree(fresh, ignore_errors=True)
        source.unpack(sdist, fresh)
        if plan.kind == "hotset":
            series.apply_series(fresh, series.read_series(pin.patches_dir()))
        fresh.rename(tree)

    def _compilation(self, plan: Plan, work: Path, jobs: int) -> Compilation:
        log = self.root / "logs" / f"{plan.key}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        top = WRAPPER if plan.kind == "hotset" else work / "src"
        tools = plan.tools.tools
        environ = compiler_environment(work)
        return Compilation(
            top, work / "build", log, tools["cmake"], tools["ninja"], environ, jobs or os.cpu_count() or 1
        )

    def _step(self, plan: Plan, compilation: Compilation, staged: Path) -> Callable[[frozenset[str]], Path]:
        def compile_for(flags: frozenset[str]) -> Path:
            compilation.configure(all_options(plan, flags, compilation.build.parent / "src"))
            self.reporter.stage(f"Compiling for {cpuflags.describe(flags)}")
            compilation.compile(targets(plan), self.reporter)
            cache.copy_products(compilation.build / "bin", staged, PROGRAMS[plan.kind])
            return staged

        return compile_for

    def _tested(self, directory: Path) -> selftest.Verdict:
        self.reporter.stage("Self-test: every quant type on the CPU")
        return self.check(directory)

    def _say(self, text: str) -> None:
        self.reporter.note(text)


def targets(plan: Plan) -> list[str]:
    """What ninja is asked for: libllama, every backend, the programs; nothing else is compiled."""
    return ["llama", *(f"ggml-{name}" for name in plan.backends), *PROGRAMS[plan.kind]]


def all_options(plan: Plan, flags: frozenset[str], tree: Path) -> dict[str, str]:
    """The cmake options of one step of the ladder."""
    options = {**plan.options, **cpuflags.cmake_options(flags)}
    if plan.kind == "peer":
        return options | _PEER_OPTIONS
    words = f"series={plan.series[:12]} backends={','.join(plan.backends)}"
    return options | {"HOTSET_LLAMA_CPP": str(tree), "LLAMA_HOTSET_BUILD_INFO": words}


def sizes(directory: Path) -> dict[str, int]:
    """Name -> bytes of every file."""
    return {path.name: path.stat().st_size for path in sorted(directory.iterdir())}


def describe(plan: Plan, settled: Settled, seconds: float, files: dict[str, int]) -> BuildInfo:
    """The build.json of what was built."""
    return BuildInfo(
        key=plan.key,
        kind="peer" if plan.kind == "peer" else "hotset",
        version=pin.upstream().version,
        series=plan.series,
        backends=list(plan.backends),
        flags_wanted=sorted(plan.flags),
        flags=sorted(settled.flags),
        fallback=settled.fallback,
        compiler=plan.tools.compiler,
        options=dict(plan.options),
        glslc=plan.glslc,
        selftest=settled.errors,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 1),
        files=files,
    )
