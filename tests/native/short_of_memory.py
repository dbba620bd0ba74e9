"""Loads a model under a real limit of memory: `short_of_memory.py MODEL DEVICE HOT_SET` prints what happened as JSON.

48 MiB of the model are missing to hold it, and the reserve that is left for other things is made as small.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import daemon.native.gguf_check as gguf_check
from daemon.engine import loading, memory
from daemon.errors import ModelUnusable
from daemon.messages import Load
from daemon.native.model import Model

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.native.test_engine_residency import answer, filled, loaded

MIB = 1 << 20
used: list[Load] = []


class Watched(Model):
    def __init__(self, spec: Load, *arguments: Any, **more: Any) -> None:
        used.append(spec)
        super().__init__(spec, *arguments, **more)


def main(path: str, device: str, hot_set: str) -> None:
    seen: dict[str, Any] = {}
    settings = {"hot_set": hot_set, "vram": "80%"}
    gguf_check._RESERVE = 180 * MIB
    with loaded(Path(path), device, {"vram": ""}):
        pass  # everything that is loaded once
    facts = gguf_check.check(Path(path)).facts
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("utf-8").splitlines())
    data = int(status["VmData"].split()[0]) * 1024
    limit = data + facts.size - 48 * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    assert memory.available() <= facts.size
    loading.Model = Watched  # type: ignore[misc]

    with loaded(Path(path), device, {"vram": ""}, load="none"):
        seen["otherwise"] = used[-1].load_mode
    plain = used[-1].model_copy(update={"load_mode": "none"})
    try:
        Model(plain, lambda _: None).close()
    except ModelUnusable as error:
        seen["without"] = error.message
    with loaded(Path(path), device, settings, load="none") as (made, loop, pipe):
        filled(made.experts, loop, pipe)
        seen["with"] = used[-1].load_mode
        seen["answer"] = answer(loop, pipe)
        seen["status"] = made.experts.status().model_dump()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
