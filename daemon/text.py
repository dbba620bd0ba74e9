"""Text that arrives as bytes in pieces: a character may be spread over several tokens."""

from __future__ import annotations

import codecs


class Utf8Stream:
    """Turns pieces of UTF-8 into text, holding back the bytes of an unfinished character.

    Bytes that can never become a character give U+FFFD, as in `bytes.decode("utf-8", "replace")`: the parts of any
    input, joined, equal the decoding of the whole.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """The text that is certain after `data`."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The end: U+FFFD for an unfinished character, otherwise nothing; the stream can be used again."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest

    @property
    def pending(self) -> bytes:
        """The bytes that are held back."""
        return self._decoder.getstate()[0]
