"""RESP servers in this process, which fail on command: stores, nodes of a cluster, Sentinels."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Self, TypeAlias

Words: TypeAlias = list[bytes]
# Returns what to send for a command; None for the usual answer, and b"" to close the connection.
Override: TypeAlias = Callable[[Words, socket.socket], bytes | None]

# The last command of each login. Its name here is another, so that no test takes it for a call.
_QUESTION = [b"EXISTS", b"kvstow:"]
_POLICY = b"maxmemory:100\r\nmaxmemory_policy:allkeys-lru\r\n"


class Simulated:
    """A server that keeps values.

    Attributes:
        port: where it listens.
        values: what it has.
        override: answers in place of the server.
        asked: how often each command came.
        num_connections: how many connections it has accepted.
        open: the connections that are open.
    """

    def __init__(self, override: Override = lambda _, __: None) -> None:
        """Listen."""
        self.override = override
        self.values: dict[bytes, bytes] = {}
        self.asked: Counter[bytes] = Counter()
        self.num_connections = 0
        self.open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """The URL of a tier."""
        return f"redis://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.num_connections += 1
                self.open.add(connection)
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as said:
            while line := said.readline():
                words = []
                for _ in range(int(line[1:])):
                    words.append(said.read(int(said.readline()[1:])))
                    said.read(2)
                words = [b"QUESTION"] if words == _QUESTION else words
                self.asked[words[0].upper()] += 1
                answer = self.override(words, connection)
                answer = self._answer(words) if answer is None else answer
                if not answer:
                    break
                connection.sendall(answer)
            connection.shutdown(socket.SHUT_RDWR)
        self.open.discard(connection)

    def _answer(self, words: Words) -> bytes:
        name = words[0].upper()
        if name == b"GET":
            return bulk(self.values[words[1]]) if words[1] in self.values else b"$-1\r\n"
        if name == b"EXISTS":
            return b":%d\r\n" % (words[1] in self.values)
        if name == b"DEL":
            return b":%d\r\n" % (self.values.pop(words[1], None) is not None)
        if name == b"INFO":
            return bulk(_POLICY)
        if name == b"SET":
            self.values[words[1]] = words[2]
        return b"+OK\r\n"

    def hang_up(self) -> None:
        """Close all connections, and go on listening."""
        for connection in list(self.open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def __enter__(self) -> Self:
        """Return the server."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.close()


def bulk(text: bytes) -> bytes:
    """Return a value as a server sends it."""
    return b"$%d\r\n%s\r\n" % (len(text), text)


def array(*parts: bytes) -> bytes:
    """Return a list of answers as a server sends it."""
    return b"*%d\r\n" % len(parts) + b"".join(parts)


def refuses(names: Sequence[bytes], line: bytes) -> Override:
    """Return an override that refuses some commands."""

    def override(words: Words, _: socket.socket) -> bytes | None:
        return b"-%s\r\n" % line if words[0].upper() in names else None

    return override


def sentinel_of(master: Callable[[], Simulated], flags: bytes = b"master") -> Simulated:
    """Return a Sentinel that names a master of the service kv, and says how it is."""

    def override(words: Words, _: socket.socket) -> bytes | None:
        if words[0].upper() != b"SENTINEL":
            return None
        port = b"%d" % master().port
        fields = [b"name", b"kv", b"ip", b"127.0.0.1", b"port", port, b"flags", flags]
        return array(array(*map(bulk, fields)))

    return Simulated(override)


def slots_of(*owned: tuple[range, Simulated]) -> bytes:
    """Return an answer to CLUSTER SLOTS: which server has which range of slots."""
    return array(
        *(
            array(
                b":%d\r\n" % slots[0],
                b":%d\r\n" % slots[-1],
                array(bulk(b"127.0.0.1"), b":%d\r\n" % server.port, bulk(b"id"), array()),
            )
            for slots, server in owned
        )
    )
