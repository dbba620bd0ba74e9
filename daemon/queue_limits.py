"""How many may wait, and who is refused for what. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from daemon.errors import ClientQueueFull, QueueFull
from daemon.messages import Submit

BACKGROUND_SHARE = 0.75
"""The part of the places in the queue that background requests may fill, so that they do not lock out the others."""


class Limits(Protocol):
    """[queue] of the configuration. All but the first are limits of one client, and 0 is none."""

    @property
    def max_waiting(self) -> int: ...

    @property
    def client_waiting(self) -> int: ...

    @property
    def client_running(self) -> int: ...

    @property
    def client_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """There is room again once `n_starts` of those have started for which `counts` is true."""

    error: type[QueueFull]
    message: str
    n_starts: int
    counts: Callable[[Submit], bool]


def refusal(asked: Submit, limits: Limits, *, waiting: int, background: int, of_client: int) -> Refusal | None:
    """Why one more may not wait beside so many: in all, of the background class, and of its client."""
    if limits.client_waiting and of_client >= limits.client_waiting:
        return Refusal(
            ClientQueueFull,
            f"{of_client} requests of this client are waiting, as many as may (queue.client_waiting).",
            of_client - limits.client_waiting + 1,
            lambda other: other.client == asked.client,
        )
    if waiting >= limits.max_waiting:
        message = f"{waiting} requests are waiting, as many as may (queue.max_waiting)."
        return Refusal(QueueFull, message, waiting - limits.max_waiting + 1, lambda other: True)
    most = math.ceil(BACKGROUND_SHARE * limits.max_waiting)
    if asked.priority == "background" and background >= most:
        return Refusal(
            QueueFull,
            f"{background} background requests are waiting, as many as may: a quarter of queue.max_waiting is kept "
            "for others.",
            background - most + 1,
            lambda other: other.priority == "background",
        )
    return None
