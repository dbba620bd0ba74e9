"""How far a replay is."""

from __future__ import annotations

from collections.abc import Callable

from hotset_tools.reporter import Reporter

Tell = Callable[[float], None]
"""Hears that a further share of a player's work is done; the shares of one player add up to 1."""


def unheard(_share: float) -> None:
    """Nobody wants to know."""


class Meter:
    """Adds up the work of several players, and reports whole percent of all of it."""

    def __init__(self, reporter: Reporter, n_players: int) -> None:
        self._reporter, self._n_players = reporter, n_players
        self._played = 0
        self._current = 0.0
        self._told = 0

    def worked(self, share: float) -> None:
        """As `Tell`, of the player whose turn it is."""
        self._current += share
        self._report()

    def ended(self) -> None:
        """Its turn is over."""
        self._played, self._current = self._played + 1, 0.0
        self._report()

    def _report(self) -> None:
        percent = int(100 * (self._played + min(self._current, 1)) / self._n_players)
        if percent > self._told:
            self._told = percent
            self._reporter.progress(percent, 100)
