"""Frames on the socketpair between service and engine: four bytes of big-endian length, then that much JSON."""

from __future__ import annotations

import select
import socket
import struct

from pydantic import BaseModel

MAX_FRAME = 256 * 1024 * 1024
_HEADER = struct.Struct(">I")


class FrameError(Exception):
    """The peer sent something that is no frame, or ended inside one."""


def encode(message: BaseModel) -> bytes:
    """The frame of one message.

    Raises:
        FrameError: the message is larger than `MAX_FRAME`.
    """
    body = message.model_dump_json(exclude_defaults=False).encode("utf-8", "surrogatepass")
    if len(body) > MAX_FRAME:
        raise FrameError(f"a message of {len(body)} bytes is larger than a frame may be")
    return _HEADER.pack(len(body)) + body


class Decoder:
    """Cuts a byte stream into frame bodies; bytes may arrive in pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add `data`; return the bodies that are complete now, in order.

        Raises:
            FrameError: a length beyond `MAX_FRAME`.
        """
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer, start)
            if length > MAX_FRAME:
                raise FrameError(f"a frame announces {length} bytes")
            end = start + _HEADER.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + _HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return bodies

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._buffer)


class Pipe:
    """The engine's end: blocking sends, receives that wait no longer than asked. One thread only."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = Decoder()
        self._returned: list[bytes] = []
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, message: BaseModel) -> None:
        """Send one message.

        Raises:
            OSError: the peer is gone.
        """
        self._sock.sendall(encode(message))

    def receive(self, timeout: float | None) -> list[bytes]:
        """Bodies that have arrived; waits up to `timeout` seconds for the first byte (None: for ever).

        Raises:
            EOFError: the peer closed its end.
        """
        if self._returned:
            bodies, self._returned = self._returned, []
            return bodies
        milliseconds = None if timeout is None else max(0, round(timeout * 1000))
        if not self._poll.poll(milliseconds):
            return []
        data = self._sock.recv(1 << 20)
        if not data:
            raise EOFError("the service closed its end")
        return self._decoder.feed(data)

    def put_back(self, bodies: list[bytes]) -> None:
        """These are for whoever receives next."""
        self._returned = bodies + self._returned

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
