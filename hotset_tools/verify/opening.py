"""What has to be there before anything can be compared: a model with experts, a device, memory, prompts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from daemon.config import Config
from daemon.engine import sizes
from daemon.errors import HotsetError, ModelUnusable
from daemon.messages import Device, Load
from daemon.model_files import load_command
from daemon.native import devices, gguf_check, library, locate
from daemon.native.context import Context
from daemon.native.gguf_check import GgufFile
from daemon.native.model import Model
from daemon.native.vocab import Vocab
from daemon.verify.script import N_SEQUENCES, Step, long_script
from daemon.verify.text import TEXT
from hotset_tools.stand_in import rpc_server

RESERVE = 1 << 30
"""Bytes for the KV cache, compute buffers and everything else."""

_CELLS, _UBATCH = 512, 64


class CannotVerify(HotsetError):
    """Nothing could be compared; the message says what is missing."""

    code = "cannot_verify"


@dataclass(frozen=True)
class Request:
    """What is to be verified. `device` None: the first card, else a stand-in; `threads` 0: one for each core."""

    model: Path
    device: str | None = None
    threads: int = 0
    seed: int = 1
    prompts: Path | None = None


@dataclass(frozen=True)
class Target:
    """A model, and the devices as llama.cpp describes them before anything is loaded."""

    request: Request
    file: GgufFile
    text: str
    spec: Load
    devices: tuple[Device, ...]
    stand_in: bool
    threads: int


@contextmanager
def opened(request: Request, note: Callable[[str], None]) -> Iterator[Target]:
    """Check the model and find the device, which a CPU plays where there is none.

    Raises:
        CannotVerify: the model is dense, memory cannot hold it, or the prompts cannot be read.
        HotsetError: no such file, no such device.
    """
    file = gguf_check.check(request.model)
    if not file.facts.is_moe:
        raise CannotVerify(f"{file.path.name} is dense: it has no experts to place")
    text = TEXT if request.prompts is None else _read(request.prompts)
    threads = sizes.threads(request.threads, psutil.cpu_count(logical=False), len(os.sched_getaffinity(0)))
    library.capture_log()
    devices.load_backends("auto")
    name = _first_card() if request.device in (None, "auto") else request.device
    if name in (None, "cpu"):
        _check_memory(file, copies=2)
        note("the device is a CPU behind llama.cpp's RPC backend" + ("" if name else ", as there is no card"))
        with rpc_server(Path(os.environ[locate.OVERRIDE]), threads) as server:
            yield _target(request, file, text, server.device, True, threads)
    else:
        _check_memory(file, copies=1)
        yield _target(request, file, text, name, False, threads)


def prompt_steps(target: Target, model: Model) -> list[Step]:
    """The script over the text of the prompts, or over random tokens where the model has no vocabulary."""
    try:
        vocab = Vocab.of_model(model.pointer)
    except ModelUnusable:
        random = np.random.default_rng(target.request.seed)
        return long_script([int(token) for token in random.integers(0, model.n_vocab, 256)])
    tokens = vocab.tokenize(target.text, add_special=False, parse_special=False)
    return long_script(tokens, vocab.bos if vocab.add_bos else None)


def context_of(model: Model, target: Target) -> Context:
    """A context without anything that enlarges differences of the last bit.

    Flash attention and an F16 cache make them so much larger that stock's own logits differ between a step of 31 tokens
    and 31 steps.
    """
    threads = target.threads
    return Context(model, target.spec, n_ctx=_CELLS, n_threads=threads, n_threads_batch=threads, flash_attention=False)


def without_room(target: Target) -> str | None:
    """Why the whole model cannot lie on the devices; None when it can be tried."""
    needed, free = target.file.facts.size + RESERVE, sum(device.memory_free for device in target.devices)
    unknown = any(not device.memory_total for device in target.devices)
    if target.stand_in or unknown or needed <= free:
        return None
    return f"the model needs {_gib(needed)} on the device, which has {_gib(free)} free"


def _target(request: Request, file: GgufFile, text: str, name: str, stand_in: bool, threads: int) -> Target:
    spec = _load_spec(file.path, name, threads)
    devices.load_backends(name)
    try:
        chosen = devices.choose(name)
    except HotsetError as error:
        raise CannotVerify(error.message.replace("engine.device", "--device")) from None
    return Target(request, file, text, spec, tuple(map(devices.describe, chosen)), stand_in, threads)


def _load_spec(path: Path, device: str, threads: int) -> Load:
    engine = {
        "device": device,
        "threads": threads,
        "max_sequences": N_SEQUENCES,
        "kv_cells": _CELLS,
        "ubatch": _UBATCH,
        "cache_type_k": "f32",
        "cache_type_v": "f32",
        "repack": False,
    }
    return load_command(Config.model_validate({"model": {"path": str(path.absolute())}, "engine": engine}))


def _first_card() -> str | None:
    return next((device.name for device in devices.list_devices() if device.kind in ("gpu", "igpu")), None)


def _check_memory(file: GgufFile, copies: int) -> None:
    needed, available = copies * file.facts.size + RESERVE, psutil.virtual_memory().available
    if needed > available:
        what = "the model, and once more for the device" if copies > 1 else "the model"
        raise CannotVerify(f"memory has {_gib(available)} available, {_gib(needed)} are needed for {what}")


def _read(path: Path) -> str:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise CannotVerify(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CannotVerify(f"{path} is not UTF-8") from None
    if not text.strip():
        raise CannotVerify("the prompts are empty")
    return text


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
