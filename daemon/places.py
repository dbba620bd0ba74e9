"""What runs, counted by class and by client, and whether one more may. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

from daemon.fair_queue import Entry
from daemon.messages import Priority, Submit
from daemon.queue_limits import Limits


class Places:
    """Places in the engine. One more answer gets one while fewer run than the engine runs together.

    An interactive one also gets one while fewer than that run that are not background: the engine parks a background
    one for it. So does a normal one whose turn is overdue: it has to wait in the engine only until one of those ends,
    where it might else wait for ever for a parked one.
    """

    def __init__(self) -> None:
        self._answers: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._classes: Counter[Priority] = Counter()

    def may_start(self, entry: Entry[Any], due: bool, capacity: int, limits: Limits) -> bool:
        """Whether there is a place, and the limits of its client allow it."""
        return self._has_place(entry.priority, due, capacity) and self._is_allowed(entry, limits)

    def all_taken(self, capacity: int) -> bool:
        """Whether there is a place for nobody."""
        return not self._has_place("interactive", False, capacity)

    def take(self, asked: Submit, cost: int) -> None:
        """It runs, or is being made ready for that; `cost` in tokens."""
        self._classes[asked.priority] += 1
        self._answers[asked.client] += 1
        self._tokens[asked.client] += cost

    def leave(self, asked: Submit, cost: int) -> None:
        """It does not any more; class, client and cost are those with which it took its place."""
        self._classes[asked.priority] -= 1
        self._answers[asked.client] -= 1
        self._tokens[asked.client] -= cost
        if not self._answers[asked.client]:
            del self._answers[asked.client], self._tokens[asked.client]

    def _has_place(self, priority: Priority, due: bool, capacity: int) -> bool:
        n = self._classes.total()
        if n < capacity:
            return True
        beside_background = priority == "interactive" or (due and priority == "normal")
        return beside_background and n - self._classes["background"] < capacity

    def _is_allowed(self, entry: Entry[Any], limits: Limits) -> bool:
        """The only one of a client may have any number of tokens: it would never start else."""
        n, tokens = self._answers[entry.client], self._tokens[entry.client]
        if limits.client_running and n >= limits.client_running:
            return False
        return not limits.client_tokens or not n or tokens + entry.cost <= limits.client_tokens
