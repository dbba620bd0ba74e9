"""Files that tools write."""

from __future__ import annotations

from pathlib import Path

from daemon.errors import HotsetError
from daemon.hotset import files


def write(path: Path, content: str | bytes) -> None:
    """All of it or nothing; one that is there is replaced.

    Raises:
        HotsetError: it cannot be written; what was there is there still.
    """
    try:
        files.replace(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise HotsetError(f"{path} cannot be written: {error.strerror}") from None
