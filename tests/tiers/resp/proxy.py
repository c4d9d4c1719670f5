"""A TCP proxy before a server, which damages, delays and cuts what passes."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from dataclasses import dataclass
from typing import Self

_BYTES = 4096


@dataclass
class Faults:
    """How often what happens to a piece of up to 4 KiB; each a probability.

    Attributes:
        flip: one bit of it changes.
        cut: the connection ends after a part of it.
        lose: it is not passed on, and the connection goes on.
        pause: it is passed on `pause_s` later.
    """

    flip: float = 0.0
    cut: float = 0.0
    lose: float = 0.0
    pause: float = 0.0
    pause_s: float = 0.15


class Proxy:
    """Listens on a port of its own, and passes bytes on in both directions.

    Attributes:
        port: where it listens.
        faults: what happens from now on.
        num_faults: how many pieces were harmed.
    """

    def __init__(self, port: int, seed: int) -> None:
        """Pass on to this port."""
        self._target = port
        self._random = random.Random(seed)
        self.faults = Faults()
        self.num_faults = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    continue
                self._sockets += [client, server]
                for a, b in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(a, b), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_BYTES):
                target.sendall(self._harmed(piece))
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _harmed(self, piece: bytes) -> bytes:
        faults, draw = self.faults, self._random.random
        if draw() < faults.pause:
            self.num_faults += 1
            time.sleep(faults.pause_s)
        if draw() < faults.lose:
            self.num_faults += 1
            return b""
        if draw() < faults.flip:
            self.num_faults += 1
            at = self._random.randrange(len(piece))
            piece = (
                piece[:at] + bytes([piece[at] ^ 1 << self._random.randrange(8)]) + piece[at + 1 :]
            )
        if draw() < faults.cut:
            self.num_faults += 1
            raise OSError("cut")
        return piece

    def say(self, text: bytes) -> None:
        """Send bytes to all clients, which no server has sent."""
        for client in self._sockets[::2]:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # at once
            client.sendall(text)

    def close(self) -> None:
        """Stop, and end all connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()  # which may still add the sockets of a connection
        self._listener.close()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def __enter__(self) -> Self:
        """Return the proxy."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.close()
