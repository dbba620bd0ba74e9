"""A device that loses things, or is far away.

It stands between llama.cpp's RPC backend and its server, and changes uploads of experts.

Messages of the client are | command, 1 byte | size, 8 bytes | payload |; that of RPC_CMD_SET_TENSOR ends with the data,
and begins with the tensor: shape [4] as uint32 at byte 20, strides in bytes behind it (ggml-rpc.cpp).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SET_TENSOR = 6
_COMPUTE = (10, 16)  # RPC_CMD_GRAPH_COMPUTE, RPC_CMD_GRAPH_RECOMPUTE
_SHAPE = 20
_MOST_OVERHEAD = 1024

Change = Callable[[int, bytes, bytes], bytes]
"""Number of the upload from 0 on, its data, and the data of the upload before that had the same size."""


def untouched(_number: int, data: bytes, _before: bytes) -> bytes:
    return data


def other_expert(first: int) -> Change:
    """The upload number `first` gets what the one of this size before it had: another expert's bytes."""
    return lambda number, data, before: before if number == first else data


def broken(number: int, data: bytes, _before: bytes) -> bytes:
    """Every third upload loses the second half of its data."""
    return data[: len(data) // 2] + bytes(len(data) - len(data) // 2) if number % 3 == 0 else data


class Proxy:
    """`n_uploads` counts the matrices of single experts that went through; `change` may be replaced any time.

    `delay` are seconds that each graph takes longer to reach the device, as over a slow network; it may be changed too.
    """

    def __init__(self, listener: socket.socket, target: int, change: Change) -> None:
        self.change, self.n_uploads, self.delay = change, 0, 0.0
        self.port = int(listener.getsockname()[1])
        self._listener, self._target = listener, target
        self._before: dict[int, bytes] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                for source, sink, pump in ((client, server, self._requests), (server, client, self._answers)):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._pump, args=(source, sink, pump), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, pump: Callable[[socket.socket, socket.socket], None]) -> None:
        with contextlib.suppress(OSError, EOFError):
            pump(source, sink)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()  # the other direction closes the other end

    @staticmethod
    def _answers(source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(1 << 16):
            sink.sendall(data)

    def _requests(self, source: socket.socket, sink: socket.socket) -> None:
        while True:
            head = _read(source, 9)
            command, size = struct.unpack("<BQ", head)
            payload = _read(source, size)
            if self.delay and command in _COMPUTE:
                time.sleep(self.delay)
            sink.sendall(head + (self._seen(payload) if command == SET_TENSOR else payload))

    def _seen(self, payload: bytes) -> bytes:
        """The payload, changed if it is one matrix of several of a tensor."""
        shape = struct.unpack_from("<4I", payload, _SHAPE)
        length = struct.unpack_from("<4I", payload, _SHAPE + 16)[2]
        if shape[2] < 2 or not 0 < len(payload) - length < _MOST_OVERHEAD:
            return payload
        data = payload[-length:]
        changed = self.change(self.n_uploads, data, self._before.get(length, data))
        self._before[length] = data
        self.n_uploads += 1
        return payload[:-length] + changed


@contextmanager
def proxy(target: int, change: Change = untouched) -> Iterator[Proxy]:
    """A proxy in front of the RPC server on port `target` of loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Proxy(listener, target, change)


def _read(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = source.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
