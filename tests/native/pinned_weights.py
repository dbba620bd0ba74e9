"""A hot set on the Vulkan device: `python -m tests.native.pinned_weights MODEL HOT_SET` prints the status as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.native.test_engine_residency import answer, filled, loaded


def main(model: str, hot_set: str) -> None:
    settings = {"hot_set": hot_set, "vram": "half"}
    with loaded(Path(model), "Vulkan0", settings, load="auto") as (made, loop, pipe):
        filled(made.experts, loop, pipe)
        answer(loop, pipe)
        print(made.experts.status().model_dump_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
