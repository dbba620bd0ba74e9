"""`hotset bench engine`: how much time a step takes outside llama.cpp, with the real engine child."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from daemon.config import Config
from daemon.errors import EngineFailed, ModelUnusable
from daemon.frames import Pipe
from daemon.messages import (
    REPORT,
    Done,
    Failed,
    LoadFailed,
    ModelInfo,
    Ready,
    Sampling,
    Shutdown,
    Snapshot,
    Step,
    Submit,
)
from daemon.model_files import load_command
from daemon.supervisor import engine_command, engine_environment


@dataclass(frozen=True, slots=True)
class EngineRun:
    """What one run measured; times in milliseconds per step, `sampling_ms` per token."""

    model: str
    n_vocab: int
    n_sequences: int
    n_tokens: int
    n_steps: int
    step_ms: float
    decode_ms: float
    overhead_p50: float
    overhead_p99: float
    sampling_ms: float

    def as_json(self) -> dict[str, object]:
        """The result as scripts read it."""
        return {
            "overhead_ms": {"p50": self.overhead_p50, "p99": self.overhead_p99},
            "sampling_ms": self.sampling_ms,
            "step_ms": {"p50": self.step_ms},
            "decode_ms": {"p50": self.decode_ms},
            "n_steps": self.n_steps,
            "settings": {
                "model": self.model,
                "n_vocab": self.n_vocab,
                "sequences": self.n_sequences,
                "tokens_each": self.n_tokens,
                "sampling": Sampling().model_dump(include={"temperature", "top_k", "top_p", "min_p"}),
            },
        }


def run(model: Path, *, n_sequences: int = 8, n_tokens: int = 256) -> EngineRun:
    """Let the engine decode `n_sequences` answers of `n_tokens` together, with llama.cpp's default samplers.

    Raises:
        ModelUnusable: the engine could not load the model.
        EngineFailed: a request failed.
    """
    with engine(model, n_sequences) as (pipe, info):
        prompt = [token % info.n_vocab for token in range(100, 132)]
        for i in range(n_sequences):
            sampling = Sampling(seed=i, ignore_eos=True)
            pipe.send(Submit(id=str(i), prompt=prompt, max_tokens=n_tokens, sampling=sampling))
        snapshot = _until_all_done(pipe, n_sequences)
    times = snapshot.times
    assert times is not None
    return EngineRun(
        model=model.name,
        n_vocab=info.n_vocab,
        n_sequences=n_sequences,
        n_tokens=n_tokens,
        n_steps=times.n_steps,
        step_ms=times.step_p50,
        decode_ms=times.decode_p50,
        overhead_p50=times.outside_p50,
        overhead_p99=times.outside_p99,
        sampling_ms=times.sample_per_token,
    )


@contextmanager
def engine(model: Path, n_sequences: int) -> Iterator[tuple[Pipe, ModelInfo]]:
    """A real engine child that has loaded `model`, on the CPU."""
    config = {"model": {"path": str(model)}, "engine": {"device": "cpu", "max_sequences": n_sequences}}
    with started(Config.model_validate(config)) as made:
        yield made


@contextmanager
def started(config: Config) -> Iterator[tuple[Pipe, ModelInfo]]:
    """A real engine child that has loaded what `config` names; its end of the pipe and what it said of itself.

    Raises:
        ModelUnusable: it could not.
    """
    ours, theirs = socket.socketpair()
    environment = engine_environment(os.environ)
    with theirs:
        child = subprocess.Popen(engine_command(theirs.fileno()), pass_fds=(theirs.fileno(),), env=environment)
    pipe = Pipe(ours)
    try:
        pipe.send(load_command(config))
        yield pipe, _until_ready(pipe)
        pipe.send(Shutdown())
        child.wait(10)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        pipe.close()


def _until_ready(pipe: Pipe) -> ModelInfo:
    while True:
        for body in pipe.receive(None):
            report = REPORT.validate_json(body)
            if isinstance(report, Ready):
                return report.info
            if isinstance(report, LoadFailed):
                raise ModelUnusable(report.message)


def _until_all_done(pipe: Pipe, n_requests: int) -> Snapshot:
    """Read until every answer is over, and then until the engine reports on itself."""
    left = n_requests
    while True:
        for body in pipe.receive(None):
            report = REPORT.validate_json(body)
            if not isinstance(report, Step):
                continue
            for event in report.events:
                if isinstance(event, Failed):
                    raise EngineFailed(event.message)
                left -= isinstance(event, Done)
            if not left and report.snapshot is not None and not report.snapshot.slots:
                return report.snapshot


def table(result: EngineRun) -> str:
    """The result for people."""
    return "\n".join(
        (
            f"model {result.model}, vocabulary {result.n_vocab:,}",
            f"{result.n_sequences} sequences, {result.n_steps} steps",
            f"step            median {result.step_ms:7.3f} ms",
            f"  decode        median {result.decode_ms:7.3f} ms",
            f"  sampling             {result.sampling_ms:7.3f} ms a token",
            f"  outside       median {result.overhead_p50:7.3f} ms, 99th percentile {result.overhead_p99:.3f} ms",
        )
    )
