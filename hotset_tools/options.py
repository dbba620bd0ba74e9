"""What options of several tools share."""

from __future__ import annotations

import typer


def device_name(name: str | None) -> str | None:
    """An option's value, unless it is empty, which names no device.

    Raises:
        typer.BadParameter: it is.
    """
    if name is not None and not name.strip():
        raise typer.BadParameter("an empty text is no name of a device")
    return name
