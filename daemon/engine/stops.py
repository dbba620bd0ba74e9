"""From token pieces to text that may be shown: whole characters, and never any part of a stop string."""

from __future__ import annotations

from daemon.text import Utf8Stream


class StopMatcher:
    """Finds the first of several stop strings in a stream of text; holds back what may still become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add `text`; return what may be shown now, and the stop string if one is complete (then all else is cut)."""
        if not self._stops:
            return text, None
        self._held += text
        found = min(((at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0), default=None)
        if found is not None:
            shown, self._held = self._held[: found[0]], ""
            return shown, found[1]
        keep = self._open_suffix()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, None

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _open_suffix(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        for n in range(longest, 0, -1):
            tail = self._held[-n:]
            if any(stop.startswith(tail) for stop in self._stops):
                return n
        return 0


class TextOut:
    """One sequence's output: pieces in, text out."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._utf8 = Utf8Stream()
        self._matcher = StopMatcher(stops)
        self.stop_word: str | None = None

    def feed(self, piece: bytes) -> str:
        """The text that may be shown after `piece`; sets `stop_word` when a stop string is complete."""
        shown, self.stop_word = self._matcher.feed(self._utf8.feed(piece))
        return shown

    def finish(self) -> str:
        """The rest, when the sequence ends without a stop string; an unfinished character becomes U+FFFD."""
        if self.stop_word is not None:
            return ""
        shown, self.stop_word = self._matcher.feed(self._utf8.flush())
        return shown if self.stop_word is not None else shown + self._matcher.flush()
