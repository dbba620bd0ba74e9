"""Runs texts through a model in a child process, and writes what its router chose as a hot set."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from daemon.errors import HotsetError
from daemon.hotset import files
from daemon.hotset.files import ModelId
from daemon.hotset.hot_set import HotSet, Size, Source
from daemon.native import gguf_check, locate
from daemon.native.process import die_with_parent
from hotset_tools.bench.models import use_native_build
from hotset_tools.hot_set import counting, ranking
from hotset_tools.reporter import Reporter, make_reporter
from hotset_tools.stand_in import rpc_server

_LEAST_PERCENT = 0.1
_MOST_SIZES = 64
METHOD = "forced decoding, one token of each text a step"


class CannotLearn(HotsetError):
    """There is nothing to learn from, or the model cannot be run; the message says which."""

    code = "cannot_learn"


@dataclass(frozen=True)
class Run:
    """Texts to decode; the fields are options of the commands that do so."""

    model: Path
    out: Path
    prompts: Sequence[Path]
    tokens: int
    device: str
    threads: int

    def job(self, texts: Sequence[tuple[str, str]], ids: str = "") -> counting.Job:
        """What the child is to do; see `counting.Job` for `ids`."""
        return counting.Job(
            model=str(self.model.absolute()),
            texts=[text for _, text in texts],
            tokens=self.tokens,
            device=self.device,
            threads=self.threads,
            ids=ids,
        )


@dataclass(frozen=True)
class Request(Run):
    """What `hotset hot-set` learns from what."""

    percentages: Sequence[float]


@dataclass(frozen=True)
class Written:
    """The file that was written."""

    path: Path
    hot_set: HotSet
    stand_in: bool

    def as_json(self) -> dict[str, Any]:
        """All of it but the experts."""
        content = self.hot_set.model_dump(exclude={"sizes"})
        sizes = [{"name": one.name, "experts": one.n_experts, "coverage": one.coverage} for one in self.hot_set.sizes]
        return {"file": str(self.path), "stand_in": self.stand_in, **content, "sizes": sizes}

    def text(self) -> str:
        """The same for people."""
        source = self.hot_set.learned_from
        lines = (
            f"{self.path}: learned from {source.tokens:,} tokens of {len(source.texts)} texts",
            *(_line(size) for size in self.hot_set.sizes),
            "Other texts use other experts: expect less than this of them.",
        )
        return "\n".join(lines)


def _line(size: Size) -> str:
    return f"  {size.name:6} {size.n_experts:6,} experts, {size.coverage or 0:.1%} of the selections that were counted"


def percentages(text: str, option: str = "--sizes") -> list[float]:
    """The percentages that an option asks for, ascending.

    Raises:
        CannotLearn: one is no percentage, or there are more than a hot set may have sizes.
    """
    try:
        values = sorted({float(f"{float(part):g}") for part in text.split(",")})  # as names of sizes tell them apart
    except ValueError:
        raise CannotLearn(f"{option}: {text!r} is no list of percentages such as 25,50") from None
    if not all(_LEAST_PERCENT <= value <= 100 for value in values):
        raise CannotLearn(f"{option}: {text!r} holds something that is not from {_LEAST_PERCENT} to 100")
    if len(values) > _MOST_SIZES:
        raise CannotLearn(f"{option}: {len(values)} percentages are too many, {_MOST_SIZES} are allowed")
    return values


def learn(request: Request, *, json: bool = False) -> Written:
    """Count and write.

    Raises:
        CannotLearn: a text cannot be read, nothing is to be counted, or the file cannot be written.
        ModelUnusable: the model cannot be read.
    """
    file = check(request.model, request.out)
    texts = read_texts(request.prompts)
    result, stand_in = count(request.job(texts), make_reporter(json=json))
    if not result.tokens:
        raise CannotLearn("the texts have no token")
    counts = {(layer.layer, layer.set): layer.counts for layer in result.layers}
    names, created = [name for name, _ in texts], datetime.now(UTC).isoformat(timespec="seconds")
    source = Source(texts=names, tokens=result.tokens, method=METHOD, created=created)
    hot_set = ranking.make(counts, request.percentages, model_id(file), source)
    _write(request.out, hot_set)
    return Written(request.out, hot_set, stand_in)


def check(model: Path, out: Path) -> gguf_check.GgufFile:
    """The model's file, once it is clear that it has experts and that `out` has a directory and is not the model.

    Raises:
        CannotLearn: one of them is not so.
        ModelUnusable: the model cannot be read.
    """
    if obstacle := files.obstacle(out):
        raise CannotLearn(f"{out} cannot be written: {obstacle}")
    file = gguf_check.check(model)
    if out.exists() and any(out.samefile(part.path) for part in file.parts):
        raise CannotLearn(f"{out} cannot be written: it is the model")
    if not file.facts.is_moe:
        raise CannotLearn(f"{file.path.name} is dense: it has no experts to rank")
    return file


def model_id(file: gguf_check.GgufFile) -> ModelId:
    """What files of ours say about the model they were made from."""
    return ModelId(fingerprint=file.fingerprint, name=file.path.stem, architecture=file.architecture)


def read_texts(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Names and contents of text files in the order given; of a directory its .txt files in the order of their names.

    Raises:
        CannotLearn: there are none, or one cannot be read.
    """
    return list(_texts(paths))


def _texts(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    files = [file for path in paths for file in (sorted(path.glob("*.txt")) if path.is_dir() else [path])]
    if not files:
        raise CannotLearn(f"there is no .txt file in {', '.join(map(str, paths))}")
    for file in files:
        try:
            yield file.name, file.read_bytes().decode("utf-8", "replace")
        except OSError as error:
            raise CannotLearn(f"{file} cannot be read: {error.strerror}") from None


def count(job: counting.Job, reporter: Reporter) -> tuple[counting.Counted, bool]:
    """Count in a child on the device; where there is none, on a CPU that stands in for one, which is the second value.

    Raises:
        CannotLearn: the child failed, or nothing is to be counted.
    """
    use_native_build()
    try:
        reporter.stage(f"reading {Path(job.model).name}")
        result = _child(job, reporter)
        if not isinstance(result, counting.NoDevice):
            return result, False
        reporter.note("no device is there: a CPU behind llama.cpp's RPC backend stands in for one")
        with rpc_server(Path(os.environ[locate.OVERRIDE])) as server:
            result = _child(job.model_copy(update={"device": server.device}), reporter)
        if isinstance(result, counting.NoDevice):
            raise CannotLearn("the CPU that should stand in for a device cannot be used")
        return result, True
    finally:
        reporter.close()


def _child(job: counting.Job, reporter: Reporter) -> counting.Counted | counting.NoDevice:
    command = [sys.executable, "-m", "hotset_tools.hot_set.counting"]
    dying = functools.partial(die_with_parent, os.getpid())
    with ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile())
        child = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, preexec_fn=dying)
        )
        stack.callback(child.kill)
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(job.model_dump_json().encode())
        child.stdin.close()
        for line in child.stdout:
            report = counting.REPORT.validate_json(line)
            if isinstance(report, counting.Progress):
                reporter.progress(report.done, report.total)
            elif isinstance(report, counting.Refused):
                raise CannotLearn(report.message)
            else:
                return report
        child.wait()
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise CannotLearn(f"the process that counts ended with code {child.returncode}: {last[0]}")


def _write(path: Path, hot_set: HotSet) -> None:
    try:
        files.replace(path, hot_set.model_dump_json(exclude_defaults=True).encode() + b"\n")
    except OSError as error:
        raise CannotLearn(f"{path} cannot be written: {error.strerror}") from None
