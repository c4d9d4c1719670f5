"""Links to Mooncake Store: one store object each, and the memory that its transfers may touch.

A call may fail while its transfers go on. Its wait gives up after 60 s, and cancels nothing. Before
Mooncake 0.3.11, it also gives up when the first of its buffers has failed. Then bytes arrive in the
buffers of the call after it has returned. Only `close` ends all transfers, and then none is left.
So a link is closed after a call that failed, and that call ends when the link is closed:

```
open --- a call is in doubt ---> retired --- its last call returns ---> closed
  |                                 |                                      |
  all calls use it                  others get a new link                  the call in doubt ends
```

If the close fails, the call never ends.

Mooncake holds Python's lock while it sets a store up. So if its master does not answer, all threads
of the process stand still, for minutes. `check_answers` finds out first whether it does.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError, TransferError

DEFAULT_PORT: Final = 50051
# A master that takes longer would hold up the process for as long.
_ANSWER_S: Final = 2.0
# To this a server of HTTP or a RESP server answers. A master closes the connection.
_QUESTION: Final = b"GET / HTTP/1.0\r\nFrom: kvstow, which looks for a Mooncake master\r\n\r\n"
_OTHERS: Final = (b"HTTP/", b"+", b"-")


def parse(url: str) -> str:
    """Return the host and port of the master that a URL names.

    Raises:
        ConfigError: it names none, or contains credentials.
    """
    if "@" in url:
        raise ConfigError(
            "the URL of the shared tier contains credentials before an @, and Mooncake has none: "
            "leave them out, and keep its ports in a private network"
        )
    try:
        found = urlsplit(url)
        port = DEFAULT_PORT if found.port is None else found.port
    except ValueError:  # whose message may show a part of a password
        raise ConfigError(
            "the URL of the shared tier has no valid port: use mooncake://HOST:PORT"
        ) from None
    if found.scheme != "mooncake" or not found.hostname or found.path.strip("/") or found.query:
        raise ConfigError(
            f"{found.scheme}://{found.hostname or ''}{found.path} is no Mooncake master: use "
            "mooncake://HOST:PORT"
        )
    return f"{found.hostname}:{port}"


def check_answers(address: str) -> None:
    """Wait until a master answers, while other threads go on.

    A server closes a connection whose other side sends no more. If the server stands still, its
    system still accepts connections, but nobody closes them.

    Raises:
        TransferError: it does not answer soon, or is another server.
    """
    host, _, port = address.rpartition(":")
    said = b""
    try:
        with socket.create_connection((host, int(port)), timeout=_ANSWER_S) as connection:
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
        with (
            suppress(OSError),  # a master resets the connection
            socket.create_connection((host, int(port)), timeout=_ANSWER_S) as connection,
        ):
            connection.sendall(_QUESTION)
            said = connection.recv(8)
    except (OSError, ValueError) as error:  # the latter for a name that no system can look up
        raise TransferError(f"Mooncake at {address} cannot be reached ({error})") from error
    if said.startswith(_OTHERS):
        raise TransferError(
            f"the server at {address} is no Mooncake master: name the master's port in the URL, "
            "not that of its metrics or of another server"
        )


class Link:
    """A store that is set up. Several threads may call it at once.

    Attributes:
        store: Mooncake's object.
    """

    def __init__(self, store: Any) -> None:
        """Take a store that nothing else closes."""
        self.store: Final = store
        self._memory: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()
        self._num_calls = 0
        self._is_retired = False
        self._is_closed = threading.Event()

    @property
    def is_retired(self) -> bool:
        """Whether no call may begin any more."""
        return self._is_retired

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Let the store read and write memory, which stays allocated until the store is closed.

        Raises:
            TransferError: the store refuses.
        """
        if code := self.store.register_buffer(memory.ctypes.data, memory.nbytes):
            raise TransferError(
                f"Mooncake does not take {memory.nbytes} bytes of host memory ({code}): with rdma, "
                "raise the limit of locked memory (ulimit -l)"
            )
        self._memory.append(memory)

    def begin(self) -> bool:
        """Count a call, unless the link is retired; return whether it counts."""
        with self._lock:
            self._num_calls += not self._is_retired
            return not self._is_retired

    def end(self, *, in_doubt: bool) -> None:
        """End a call. If its transfers may go on, retire the link, and wait until it is closed."""
        with self._lock:
            self._is_retired = self._is_retired or in_doubt
            self._num_calls -= 1
            is_last = self._is_retired and not self._num_calls
        try:
            if is_last:
                self.close()
        finally:
            if in_doubt:
                self._is_closed.wait()

    def close(self) -> None:
        """End all transfers. No call may be under way. Closing again does nothing.

        Raises:
            TransferError: the store does not close, so transfers may go on.
        """
        if self._is_closed.is_set():
            return
        if code := self.store.close():
            raise TransferError(f"Mooncake does not close a store ({code})")
        self._memory.clear()
        self._is_closed.set()


class Links:
    """The link that calls use now, and a new one after each doubt."""

    def __init__(self, connect: Callable[[], Link]) -> None:
        """Take what sets up a link. It may raise `TransferError`."""
        self._connect = connect
        self._connecting = threading.Lock()
        self._link: Link | None = None

    def current(self) -> Link:
        """Return the link that the next call uses.

        Raises:
            TransferError: the store cannot be reached.
        """
        with self._connecting:
            if self._link is None or self._link.is_retired:
                self._link = self._connect()
            return self._link

    @contextmanager
    def borrowed(self) -> Iterator[Link]:
        """Yield the link for one call, which is in doubt if it raises.

        Raises:
            TransferError: the store cannot be reached.
        """
        while not (link := self.current()).begin():
            pass
        try:
            yield link
        except BaseException:
            link.end(in_doubt=True)
            raise
        link.end(in_doubt=False)

    def close(self) -> None:
        """Close the link. No call may be under way.

        Raises:
            TransferError: the store does not close.
        """
        if self._link is not None:
            self._link.close()
