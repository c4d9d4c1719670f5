"""The login of redis-py: it ends in time, in bounded memory, and no error repeats the password."""

from __future__ import annotations

import math
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from kvstow.tiers.namespace import KEY_PREFIX

# A login, which old servers want in another form, the database, and a question.
_STEPS: Final = 4
# No answer to these is longer than a line.
_MAX_BYTES: Final = 64 << 10
# What a server in protected mode says to a connection of another machine, before it closes it.
_DENIED: Final = b"-DENIED"


class _Bounded:
    """A socket for redis-py that waits up to a time, however many single bytes arrive meanwhile."""

    def __init__(self, own: socket.socket, limit_s: float) -> None:
        self._own, self._limit_s = own, limit_s
        self._until_s = time.monotonic() + _STEPS * limit_s
        self._num_left: float = _MAX_BYTES
        self.is_denied = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def recv(self, num_bytes: int) -> bytes:
        self._let_wait()
        received = self._own.recv(num_bytes)
        self._count(received)
        return received

    def recv_into(self, buffer: bytearray) -> int:  # if hiredis is installed
        self._let_wait()
        num_bytes = self._own.recv_into(buffer)
        self._count(memoryview(buffer)[:num_bytes])
        return num_bytes

    def end_login(self) -> None:
        """Become like the socket, because redis-py's parser keeps this object."""
        self._until_s = self._num_left = math.inf
        self._own.settimeout(self._limit_s)

    def _let_wait(self) -> None:
        if self._until_s == math.inf:
            return
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the server did not answer in time")
        self._own.settimeout(min(left_s, self._limit_s))

    def _count(self, received: bytes | memoryview) -> None:
        self.is_denied |= bytes(received[: len(_DENIED)]) == _DENIED
        self._num_left -= len(received)
        if self._num_left < 0:
            raise ValueError("the server answers a login with more than 64 KiB")


def log_in_within(
    limit_s: float, context: ssl.SSLContext | None, refusals: tuple[type[Exception], ...]
) -> Callable[[Any], None]:
    """Return how a connection of redis-py logs in, for its option `redis_connect_func`.

    By itself redis-py waits that long for each piece of an answer. If single bytes drip in, it
    waits for ever. It also keeps all of an answer that has no end. It sends CLIENT SETINFO, at
    which some proxies close the connection. And its TLS always trusts the system's authorities.

    Args:
        limit_s: the most seconds for each step.
        context: for TLS; None for a connection without it.
        refusals: what redis-py raises if a server answers with an error, and is there.
    """

    def log_in(connection: Any) -> None:
        own = connection._sock
        try:
            if context is not None:
                own = context.wrap_socket(own, server_hostname=connection.host)
            connection._sock = bounded = _Bounded(own, limit_s)
            _log_in(connection, bounded, refusals)
        except OSError:  # after which redis-py does not close
            connection.disconnect()
            raise
        finally:
            if connection._sock is not None:  # it is None after an error that closed it
                connection._sock = own

    return log_in


def _log_in(connection: Any, bounded: _Bounded, refusals: tuple[type[Exception], ...]) -> None:
    # The versions of redis-py have different names for what they send with CLIENT SETINFO.
    connection.driver_info = connection.lib_name = connection.lib_version = None
    try:
        connection.on_connect()
        # A server that hangs is noticed now. Each access list allows this, and any answer will do.
        connection.send_command("EXISTS", KEY_PREFIX, check_health=False)
        with suppress(*refusals):
            connection.read_response(disconnect_on_error=False)
        if bounded.is_denied:
            raise ConnectionError
    except Exception as error:
        if bounded.is_denied:
            error.args = ("DENIED by the protected mode of the server",)
        hide_password(error, connection.credential_provider)
        raise
    bounded.end_login()


def causes(error: BaseException) -> list[BaseException]:
    """Return an error and what led to it, each once."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and all(cause is not one for one in found):
        found.append(cause)
        cause = cause.__cause__ or cause.__context__
    return found


def password_of(credentials: Any) -> str:
    """Return the password that a connection logs in with now; empty for none."""
    sent = credentials.get_credentials() if credentials is not None else ()
    return sent[-1] if sent else ""


def hide_password(error: BaseException, credentials: Any) -> None:
    """Remove the password from an error of redis-py, and from what led to it.

    A server that does not know AUTH says what it was given: "unknown command `AUTH`, with args
    beginning with: ...".
    """
    password = password_of(credentials)
    for cause in causes(error):
        text = str(cause).partition(", with args beginning with")[0]
        if password:
            text = text.replace(password, "***")
        if text != str(cause):
            cause.args = (text,)
