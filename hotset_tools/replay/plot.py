"""A replay as a picture; needs matplotlib, which `pip install 'hotset[plots]'` brings."""

from __future__ import annotations

import io
from pathlib import Path

from daemon.errors import HotsetError
from daemon.hotset.files import obstacle
from hotset_tools.output import write
from hotset_tools.replay.report import Report

_EMPHASIS = {"hotset": 2.5, "clairvoyant": 2.5}


def check(path: Path, trace: Path) -> None:
    """See whether a picture can be drawn, before anything is computed.

    Raises:
        HotsetError: matplotlib is not installed, or the file cannot be written, or it is the trace.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise HotsetError("--plot needs matplotlib: pip install 'hotset[plots]'") from None
    if why := obstacle(path):
        raise HotsetError(f"{path} cannot be written: {why}")
    if path.exists() and trace.exists() and path.samefile(trace):
        raise HotsetError(f"{path} cannot be written: it is the trace")


def draw(report: Report, path: Path) -> None:
    """Write hit rates by share of slots, a line for each policy, as PNG.

    Raises:
        HotsetError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for policy in dict.fromkeys(row.policy for row in report.rows):
        points = [(100 * row.share, row.hit_rate) for row in report.rows if row.policy == policy]
        width = _EMPHASIS.get(policy, 1.0)
        axes.plot(*zip(*points, strict=True), marker="o", linewidth=width, label=policy, zorder=2 + width)
    axes.set(xlabel="slots, % of a layer's experts", ylabel="hit rate", title=report.trace.name, ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    write(path, content.getvalue())
