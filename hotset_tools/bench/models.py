"""What benchmarks share: generated models, kept in the cache, and the native build."""

from __future__ import annotations

import os
from pathlib import Path

from daemon.native import locate
from hotset_tools.make_model import write_model
from hotset_tools.model_shapes import SHAPES

SEED = 1


def generated(shape: str) -> Path:
    """The model of `shape`, made on first use (seed `SEED`)."""
    path = locate.cache_root() / "models" / f"{shape}-seed{SEED}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_model(path, SHAPES[shape], seed=SEED)
    return path


def use_native_build() -> None:
    """Point this process and its children at the native build.

    Raises:
        BuildMissing: there is none that fits.
    """
    os.environ[locate.OVERRIDE] = str(locate.require_build().directory)
