"""Logging: one structlog configuration, for people on a terminal or as JSON lines for the journal.

Nothing logged holds a prompt, an answer or a key.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO

import structlog
from structlog.types import EventDict, Processor, WrappedLogger

from daemon.config import LogSection

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "exception": 3, "critical": 2}


class _Threshold:
    """The level below which lines are dropped; changed while the service runs."""

    level = _LEVELS["info"]


_THRESHOLD = _Threshold()


def setup(section: LogSection, stream: TextIO | None = None, environ: Mapping[str, str] = os.environ) -> None:
    """Set up structlog, and send what libraries log through `logging` the same way."""
    out = sys.stderr if stream is None else stream
    set_level(section.level)
    json_lines = _wants_json(section.format, out, environ)
    structlog.configure(
        processors=[_drop_quiet, *_shared(json_lines), *_final(json_lines, out)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    _take_over_logging()


def set_level(level: Literal["debug", "info", "warning", "error"]) -> None:
    """Change the level at once, for structlog and for `logging`."""
    _THRESHOLD.level = _LEVELS[level]
    logging.getLogger().setLevel(_LEVELS[level])


def _wants_json(form: str, stream: TextIO, environ: Mapping[str, str]) -> bool:
    if form != "auto":
        return form == "json"
    under_systemd = "JOURNAL_STREAM" in environ or "INVOCATION_ID" in environ
    return under_systemd and not stream.isatty()


def _drop_quiet(_logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if _LEVELS.get(method, _LEVELS["error"]) < _THRESHOLD.level:
        raise structlog.DropEvent
    return event


def _shared(json_lines: bool) -> list[Processor]:
    stamp = structlog.processors.TimeStamper(fmt="iso" if json_lines else "%H:%M:%S", utc=json_lines)
    return [structlog.contextvars.merge_contextvars, structlog.processors.add_log_level, stamp]


def _final(json_lines: bool, stream: TextIO) -> list[Processor]:
    if not json_lines:
        # Plain tracebacks: the pretty ones print local variables, and with them prompts.
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=False), _prefix]


def _prefix(_logger: WrappedLogger, method: str, line: Any) -> str:
    """The priority that journald reads from the start of a line."""
    return f"<{_PRIORITIES.get(method, 6)}>{line}"


class _ToStructlog(logging.Handler):
    """Hands records of the standard library's logging to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        method = record.levelname.lower()
        logger = structlog.get_logger(record.name)
        write = getattr(logger, method if method in _LEVELS else "info")
        write(record.getMessage(), logger=record.name, exc_info=record.exc_info or None)


def _take_over_logging() -> None:
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _ToStructlog)]:
        root.removeHandler(handler)
    root.addHandler(_ToStructlog())
