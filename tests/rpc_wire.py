"""What crosses between llama.cpp and an RPC server: a proxy that notes every command.

A request is a byte with the command, eight bytes with the length, and that many bytes; see ggml-rpc.cpp.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum


class Command(IntEnum):
    """The commands of `enum rpc_cmd` that tests look for."""

    SET_TENSOR = 6
    GET_TENSOR = 8
    GRAPH_COMPUTE = 10
    GRAPH_RECOMPUTE = 16


@dataclass(frozen=True)
class Request:
    """`command` is a number of `enum rpc_cmd`; `size` are the bytes that a read asks for, else those of the payload."""

    command: int
    size: int


class Wire:
    """A proxy before one server; `requests` is what has been sent so far, by all connections."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.device = f"rpc:127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[Request] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def count(self, command: Command, size: int | None = None) -> int:
        """Requests so far of one kind, or of one kind and size."""
        return sum(r.command == command and size in (None, r.size) for r in self.requests)

    def close(self) -> None:
        """Take no more connections; those that are open end with their sockets."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._server_port))
            for side in (client, server):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
            threading.Thread(target=_copy, args=(server, client), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with client.makefile("rb") as stream, suppress(OSError):  # the server may go first
            while len(head := stream.read(9)) == 9:
                command, size = struct.unpack("<BQ", head)
                payload = stream.read(size)
                wanted = struct.unpack("<Q", payload[-8:])[0] if command == Command.GET_TENSOR else size
                self.requests.append(Request(command, wanted))
                server.sendall(head + payload)
            server.shutdown(socket.SHUT_RDWR)  # closing does not end a connection that another thread reads from


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)


@contextmanager
def wire(server_port: int) -> Iterator[Wire]:
    """A proxy before the server at this port of this machine."""
    proxy = Wire(server_port)
    try:
        yield proxy
    finally:
        proxy.close()
