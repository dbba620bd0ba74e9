"""What a benchmark says while it runs, and its report on disk."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from hotset_tools.bench.rows import Report
from hotset_tools.output import write


class Reporter:
    """Lines on stderr, and `out` written anew whenever something is ready. `began` is monotonic, in seconds."""

    def __init__(self, report: Report, out: Path | None, began: float) -> None:
        self.report = report
        self._out, self._began = out, began

    def note(self, text: str) -> None:
        """Something that belongs into the report."""
        self.report.notes.append(text)
        self.say(f"NOTE: {text}")
        self.write()

    def say(self, text: str) -> None:
        """Something for people."""
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def write(self) -> None:
        """The report as it is."""
        if self._out is not None:
            write(self._out, self.report.model_dump_json(indent=1))
