"""States of sequences in RAM, within a bound: what is parked goes on later without computing anything again."""

from __future__ import annotations

from daemon.engine.ports import ContextPort

_MIB = 1 << 20


class Lot:
    """States by sequence number. What does not fit, or cannot be saved, is the caller's to compute once more."""

    def __init__(self, context: ContextPort, mib: int) -> None:
        self._context = context
        self._states: dict[int, bytearray] = {}
        self.mib = mib
        self.n_parked = 0

    @property
    def bytes(self) -> int:
        """RAM that is taken now."""
        return sum(map(len, self._states.values()))

    def park(self, number: int, seq_id: int) -> bool:
        """Keep the state of a sequence id, which stays as it is; False where there is no room or it cannot be read."""
        size = self._context.state_size(seq_id)
        if size <= 0 or self.bytes + size > self.mib * _MIB:
            return False
        try:
            state = self._context.save(seq_id)
        except MemoryError:
            return False
        if state is None:
            return False
        self._states[number] = state
        self.n_parked += 1
        return True

    def resume(self, number: int, seq_id: int) -> bool:
        """Put a state back into an empty sequence id; False where llama.cpp does not take it, which leaves that empty.

        It is gone from here either way.
        """
        state = self._states.pop(number)
        if self._context.restore(seq_id, state):
            return True
        self._context.remove(seq_id)
        return False

    def forget(self, number: int) -> None:
        """Free a state, if there is one."""
        self._states.pop(number, None)

    def __contains__(self, number: int) -> bool:
        return number in self._states
