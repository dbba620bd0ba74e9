"""Text that arrives in pieces which may end inside a character."""

from __future__ import annotations

import codecs


class Utf8Stream:
    """Bytes in, whole characters out; what can never become UTF-8 comes out as U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """The characters that `data` completes."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """U+FFFD if the last character is incomplete, else nothing; the stream can be used again."""
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text
