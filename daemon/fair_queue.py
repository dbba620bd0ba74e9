"""The order in which those that wait are served: classes first, then fair shares between clients. Pure.

Inside a class it is deficit round robin (M. Shreedhar, G. Varghese, "Efficient fair queueing using deficit round
robin", SIGCOMM 1995), with costs in tokens in the place of bytes. Between classes it is strict order, but a class that
`SHARE` others went before is served next: it waits, and does not starve.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar, get_args

from daemon.messages import Priority

T = TypeVar("T")
CLASSES: tuple[Priority, ...] = get_args(Priority)
"""The first one goes first."""
QUANTUM = 1024
"""Tokens that a client may have served when it is its turn, beyond what it has left over from its last one."""
SHARE = 8
"""So many of other classes may start before one that waits in a class; then it is the turn of that class."""


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """One that waits. `cost` in tokens, at least 1; `number` is smaller for what came earlier."""

    item: T
    priority: Priority
    client: str
    cost: int
    number: int


class FairQueue(Generic[T]):
    """Items of all classes and clients; those of one client in one class leave in the order of their numbers."""

    def __init__(self) -> None:
        self._lines = {priority: _Line[T]() for priority in CLASSES}
        self._entries: dict[T, Entry[T]] = {}
        self._passed: Counter[Priority] = Counter()
        self._of_client: Counter[str] = Counter()
        self._places: dict[T, int] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def count(self, priority: Priority) -> int:
        """How many wait in a class."""
        return self._lines[priority].size

    def count_of(self, client: str) -> int:
        """How many of a client wait, in all classes."""
        return self._of_client[client]

    def push(self, entry: Entry[T]) -> None:
        """Let it wait behind the others of its client."""
        self._add(entry)
        self._lines[entry.priority].push(entry)

    def give_back(self, entry: Entry[T], credit: int) -> None:
        """One that was served and could not be used waits again, first in its class; `credit` is what it had cost."""
        self._add(entry)
        self._lines[entry.priority].give_back(entry, credit)

    def remove(self, item: T) -> bool:
        """Forget one; False where it does not wait."""
        entry = self._entries.get(item)
        if entry is None:
            return False
        self._drop(entry)
        self._lines[entry.priority].remove(entry)
        return True

    def pop(self, may: Callable[[Entry[T], bool], bool]) -> T | None:
        """Serve the next one for which `may` is true; None where there is none.

        `may` is asked about the first of each client, and is told whether its class has waited long enough to be next.
        """
        for priority in self._turns():
            due = self._is_due(priority)
            entry = self._lines[priority].pop(lambda first, due=due: may(first, due))  # type: ignore[misc]
            if entry is not None:
                self._drop(entry)
                self._count(priority)
                return entry.item
        return None

    def order(self) -> Iterator[T]:
        """All of them, in the order in which they would be served if nothing came and each might start."""
        copy = self._copy()
        while (item := copy.pop(lambda entry, due: True)) is not None:
            yield item

    def position(self, item: T) -> int | None:
        """0-based place in `order`; None where it does not wait."""
        if item not in self._entries:
            return None
        if self._places is None:
            self._places = {each: place for place, each in enumerate(self.order())}
        return self._places[item]

    # -- inside

    def _copy(self) -> FairQueue[T]:
        copy: FairQueue[T] = FairQueue()
        copy._lines = {priority: line.copy() for priority, line in self._lines.items()}
        copy._entries, copy._passed, copy._of_client = self._entries.copy(), self._passed.copy(), self._of_client.copy()
        return copy

    def _add(self, entry: Entry[T]) -> None:
        self._entries[entry.item] = entry
        self._of_client[entry.client] += 1
        self._places = None

    def _drop(self, entry: Entry[T]) -> None:
        del self._entries[entry.item]
        self._of_client[entry.client] -= 1
        if not self._of_client[entry.client]:
            del self._of_client[entry.client]
        self._places = None

    def _is_due(self, priority: Priority) -> bool:
        return self._passed[priority] >= SHARE

    def _turns(self) -> list[Priority]:
        due = [priority for priority in CLASSES[::-1] if self._is_due(priority)]
        return due + [priority for priority in CLASSES if priority not in due]

    def _count(self, served: Priority) -> None:
        for priority, line in self._lines.items():
            if priority == served or not line.size:
                self._passed[priority] = 0
            else:
                self._passed[priority] += 1


class _Line(Generic[T]):
    """One class: deficit round robin between its clients.

    `_ring` holds the clients that have something waiting, the one whose turn it is first. A client keeps what is left
    of its deficit from one turn to the next, as long as something of it waits.
    """

    def __init__(self) -> None:
        self.size = 0
        self._queues: dict[str, deque[Entry[T]]] = {}
        self._ring: deque[str] = deque()
        self._deficits: dict[str, int] = {}
        self._granted: set[str] = set()
        """Clients that have had the quantum of the turn that goes on."""

    def push(self, entry: Entry[T]) -> None:
        if entry.client not in self._queues:
            self._ring.append(entry.client)
        self._queues.setdefault(entry.client, deque()).append(entry)
        self.size += 1

    def give_back(self, entry: Entry[T], credit: int) -> None:
        """It costs now what it costs, and its client gets back what it paid; several keep their order."""
        client = entry.client
        if client in self._queues:
            self._ring.remove(client)
        self._ring.appendleft(client)
        queue = self._queues.setdefault(client, deque())
        queue.insert(sum(other.number < entry.number for other in queue), entry)
        self._deficits[client] = self._deficits.get(client, 0) + credit
        self._granted.add(client)
        self.size += 1

    def remove(self, entry: Entry[T]) -> None:
        self._queues[entry.client].remove(entry)
        self._removed(entry.client)

    def pop(self, may: Callable[[Entry[T]], bool]) -> Entry[T] | None:
        able: dict[str, bool] = {}
        granted = self._granted.copy()
        while any(able.values()) or len(able) < len(self._ring):
            client = self._ring[0]
            if client not in able:
                able[client] = may(self._queues[client][0])
            if able[client] and self._affords(client):
                return self._serve(client)
            self._granted.discard(client)
            self._ring.rotate(-1)
        self._granted = granted  # nobody may: it is the turn of the same one as before
        return None

    def copy(self) -> _Line[T]:
        copy: _Line[T] = _Line()
        copy.size = self.size
        copy._queues = {client: queue.copy() for client, queue in self._queues.items()}
        copy._ring, copy._deficits, copy._granted = self._ring.copy(), self._deficits.copy(), self._granted.copy()
        return copy

    def _serve(self, client: str) -> Entry[T]:
        entry = self._queues[client].popleft()
        self._deficits[client] -= entry.cost
        self._removed(client)
        return entry

    def _affords(self, client: str) -> bool:
        if client not in self._granted:
            self._granted.add(client)
            self._deficits[client] = self._deficits.get(client, 0) + QUANTUM
        return self._queues[client][0].cost <= self._deficits[client]

    def _removed(self, client: str) -> None:
        self.size -= 1
        if not self._queues[client]:
            del self._queues[client]
            self._ring.remove(client)
            self._deficits.pop(client, None)
            self._granted.discard(client)
