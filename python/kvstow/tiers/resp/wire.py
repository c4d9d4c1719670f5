"""One connection to one RESP server. One thread uses it.

redis-py connects: TLS, login, database. Afterwards this file alone reads and writes the socket,
because a block then goes between the socket and its host slot without a copy.

Each call has a limit in time. After an error the connection is of no use, because answers may still
be on the way: close it. So nothing arrives in a host slot after a call has raised.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol, TypeAlias

from kvstow.texts import MOST_OF_AN_ERROR, on_one_line

Buffer: TypeAlias = bytes | memoryview
Answer: TypeAlias = "bytes | int | list[Answer] | Refusal | None"

_AHEAD_BYTES: Final = 64 << 10
# The line of a value, and the header of a block. More of a value would have to be copied.
_VALUE_AHEAD_BYTES: Final = 128
_MAX_LINE_BYTES: Final = 4 << 10
_MAX_SIZE_DIGITS: Final = 19
# No list of servers is longer, or has more lists in one another.
_MAX_ANSWER_BYTES: Final = 8 << 20
_MAX_DEPTH: Final = 6
# Linux takes 1,024 parts in one call.
_MAX_PARTS: Final = 1024
# Parts that are made while others are sent are still in the processor's caches when they are sent.
_BYTES_PER_CALL: Final = 256 << 10
# The system refuses a wait of centuries. A wait of 0 would be one without an end.
_MAX_TIMEOUT_S: Final = 86400.0
_MIN_TIMEOUT_S: Final = 0.001
_TIMEVAL: Final = struct.Struct("@ll")


class WireError(Exception):
    """The connection failed, or the server does not speak RESP."""


class Refusal(Exception):
    """The server answered with an error. The connection goes on.

    Attributes:
        code: the first word of the answer.
    """

    def __init__(self, line: bytes, password: bytes = b"") -> None:
        """Take the answer. If it repeats the password, its text does not."""
        text = _hidden(line, password).decode("ascii", "replace")
        super().__init__(on_one_line(text, MOST_OF_AN_ERROR))
        self.code = line.partition(b" ")[0].decode("ascii", "replace")


class Connects(Protocol):
    """What this file needs of redis-py's connections."""

    def connect(self) -> None:
        """Connect and log in."""

    def disconnect(self) -> None:
        """Close the socket."""


class Wire:
    """Commands to one server, and its answers."""

    def __init__(
        self,
        connection: Connects,
        password: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect.

        Args:
            connection: what connects, and logs in.
            password: of the login. No error of this connection contains it.
            clock: seconds, as `time.monotonic` gives them.

        Raises:
            redis.RedisError: no connection.
        """
        self._connection = connection
        self._password = password.encode()
        self._clock = clock
        connection.connect()
        # redis-py has no public name for it.
        self._socket: socket.socket = connection._sock  # type: ignore[attr-defined]
        self._is_plain = not isinstance(self._socket, ssl.SSLSocket)
        self._socket.setblocking(self._is_plain)
        # By option of the socket: how long the system waits in a call.
        self._waits_s: dict[int, float] = {}
        self._buffer = bytearray(_AHEAD_BYTES)
        self._ahead = memoryview(self._buffer)
        self._begin = self._end = 0
        self._until_s = 0.0
        self._answer_bytes = 0

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()

    def fileno(self) -> int:
        """Return the number of the socket, by which the system says that an answer has come."""
        return self._socket.fileno()

    @property
    def is_idle(self) -> bool:
        """Whether the connection is open, and no bytes wait.

        A server that has restarted has closed it. Bytes that nobody asked for would be taken for
        the answer to the next command.
        """
        if self._begin < self._end:
            return False
        try:
            self._receive_now(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            pass
        return False

    def limit(self, until_s: float) -> None:
        """Let all calls from now on raise `WireError` after this time on the clock."""
        self._until_s = until_s
        self._waits_s.clear()

    def send(self, parts: Iterable[Buffer]) -> None:
        """Send all parts, the first ones before the last ones are made."""
        batch: list[memoryview] = []
        num_bytes = 0
        for part in parts:
            batch.append(memoryview(part))
            num_bytes += len(part)
            if num_bytes >= _BYTES_PER_CALL or len(batch) == _MAX_PARTS:
                self._send_batch(batch)
                num_bytes = 0
        self._send_batch(batch)

    def _send_batch(self, batch: list[memoryview]) -> None:
        """Send all parts, and take them out of the list."""
        while batch:
            try:
                num_sent = self._when_ready(socket.SO_SNDTIMEO, self._send_some, batch)
            except OSError as error:
                raise WireError(f"sending failed: {error}{self._last_words()}") from error
            at = 0
            while at < len(batch) and num_sent >= len(batch[at]):
                num_sent -= len(batch[at])
                at += 1
            del batch[:at]
            if num_sent:
                batch[0] = batch[0][num_sent:]

    def _last_words(self) -> str:
        """Return the error that the server sent before it closed the connection, or nothing.

        A server that wants a login refuses a block by its length, and closes before all is sent.
        """
        try:
            said = self._receive_now(_MAX_LINE_BYTES)
        except OSError:
            return ""
        # Answers to puts, and nothing of a block's bytes.
        first = next((line for line in said.split(b"\r\n") if line != b"+OK"), b"")
        return f" ({self._refusal(first)})" if first.startswith(b"-") else ""

    def _receive_now(self, num_bytes: int) -> bytes:
        """Return bytes that have arrived. Raises instead of waiting for the first one."""
        return self._socket.recv(num_bytes, socket.MSG_DONTWAIT if self._is_plain else 0)

    def _line(self, ahead_bytes: int = _AHEAD_BYTES) -> bytes:
        """Return the next line of an answer, without its end."""
        while True:
            begin, end = self._begin, self._buffer.find(b"\r\n", self._begin, self._end)
            if end >= 0:
                self._begin = end + 2
                return bytes(self._ahead[begin:end])
            if self._end - begin > _MAX_LINE_BYTES:
                raise WireError("the server sent a line without an end")
            self._receive_ahead(ahead_bytes)

    def peek(self, num_bytes: int, ahead_bytes: int = _AHEAD_BYTES) -> memoryview:
        """Return the next bytes of an answer, up to 64 KiB, and leave them to the next call."""
        while self._end - self._begin < num_bytes:
            self._receive_ahead(ahead_bytes)
        return self._ahead[self._begin : self._begin + num_bytes]

    def _receive_ahead(self, num_bytes: int) -> None:
        """Receive up to `num_bytes` more than those that wait, as far as they fit."""
        waiting = bytes(self._ahead[self._begin : self._end])
        self._ahead[: len(waiting)] = waiting
        self._begin, self._end = 0, len(waiting)
        self._end += self._receive(self._ahead[self._end :][:num_bytes])

    def into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes of an answer."""
        num = min(len(target), self._end - self._begin)
        target[:num] = self._ahead[self._begin : self._begin + num]
        self._begin += num
        # The system fills the rest in one call. TLS has no such flag.
        flags = socket.MSG_WAITALL if self._is_plain else 0
        while num < len(target):
            num += self._receive(target[num:], flags)

    def skip(self, num_bytes: int) -> None:
        """Read bytes that nobody wants."""
        waste = memoryview(bytearray(min(num_bytes, 1 << 20)))
        while num_bytes:
            part = waste[: min(num_bytes, len(waste))]
            self.into(part)
            num_bytes -= len(part)

    def _receive(self, target: memoryview, flags: int = 0) -> int:
        receive = self._socket.recv_into
        try:
            num = self._when_ready(socket.SO_RCVTIMEO, receive, target, len(target), flags)
        except OSError as error:
            raise WireError(f"receiving failed: {error}") from error
        if not num:
            raise WireError("the server closed the connection")
        return num

    def _send_some(self, batch: list[memoryview]) -> int:
        return self._socket.sendmsg(batch) if self._is_plain else self._socket.send(batch[0])

    def _when_ready(self, option: int, call: Callable[..., int], *arguments: object) -> int:
        """Return what `call` returns once the socket is ready for it.

        A plain socket waits in the call itself, for a time that `option` sets. A TLS socket may
        have to read before it sends, and the other way round, so this method waits for it.
        """
        while True:
            left_s = self._until_s - self._clock()
            if left_s <= 0:
                raise WireError("the server did not answer in time")
            if self._is_plain:
                self._let_wait(option, left_s)
            try:
                return call(*arguments)
            except BlockingIOError:
                continue  # a plain socket has waited
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            ready = select.poll()
            ready.register(self._socket, event)
            ready.poll(1000 * min(left_s, _MAX_TIMEOUT_S))

    def _let_wait(self, option: int, left_s: float) -> None:
        """Let the system wait for half of the time that is left, so that most calls set nothing."""
        if self._waits_s.get(option, math.inf) <= left_s:
            return
        wait_s = min(max(left_s / 2, _MIN_TIMEOUT_S), _MAX_TIMEOUT_S)
        seconds, micros = divmod(int(1e6 * wait_s), 1_000_000)
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, micros))
        self._waits_s[option] = wait_s

    # -- answers -------------------------------------------------------------------------------

    def status(self) -> bytes | Refusal:
        """Return a status or a number as the server wrote it, or the error that it answered."""
        line = self._line()
        if line[:1] == b"-":
            return self._refusal(line)
        if line[:1] not in (b"+", b":"):
            raise WireError(f"expected a status, got {self.shown(line)}")
        return line[1:]

    def bulk_size(self) -> int | Refusal | None:
        """Return the bytes of a value that follows; None for no value."""
        line = self._line(_VALUE_AHEAD_BYTES)
        if line[:1] == b"-":
            return self._refusal(line)
        if line == b"$-1":
            return None
        if line[:1] != b"$" or not line[1:].isdigit() or len(line) > _MAX_SIZE_DIGITS:
            raise WireError(f"expected a value, got {self.shown(line)}")
        return int(line[1:])

    def end_bulk(self) -> None:
        """Read what follows a value."""
        if bytes(self.peek(2, _VALUE_AHEAD_BYTES)) != b"\r\n":
            raise WireError("a value is longer than the server said")
        self._begin += 2

    def answer(self, depth: int = 0) -> Answer:
        """Return an answer of any kind that is no block, such as a list of servers."""
        line = self._line()
        self._bound_answer(len(line), is_first=not depth)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return self._refusal(line)
        is_number = rest.removeprefix(b"-").isdigit() and len(rest) <= _MAX_SIZE_DIGITS
        num = int(rest) if is_number else 0
        if not is_number or kind not in (b":", b"$", b"*") or depth > _MAX_DEPTH:
            raise WireError(f"expected an answer, got {self.shown(line)}")
        if kind == b":":
            return num
        if num > _MAX_ANSWER_BYTES:
            raise WireError(f"an answer has {num} parts, expected {_MAX_ANSWER_BYTES} at most")
        if num < 0:
            return None
        if kind == b"*":
            return [self.answer(depth + 1) for _ in range(num)]
        self._bound_answer(num)
        text = bytearray(num)
        self.into(memoryview(text))
        self.end_bulk()
        return bytes(text)

    def _refusal(self, line: bytes) -> Refusal:
        return Refusal(line[1:], self._password)

    def shown(self, line: bytes) -> str:
        """Return what a message shows of an answer: nothing of the bytes of a block."""
        text = _hidden(line, self._password)[:40].decode("latin-1")
        return repr(text) if text.isascii() and text.isprintable() else "bytes that are no text"

    def _bound_answer(self, num_bytes: int, *, is_first: bool = False) -> None:
        """Count the bytes of an answer with all of its parts, before they take memory."""
        self._answer_bytes = num_bytes if is_first else self._answer_bytes + num_bytes
        if self._answer_bytes > _MAX_ANSWER_BYTES:
            raise WireError(f"an answer has more than {_MAX_ANSWER_BYTES} bytes")


def _hidden(line: bytes, password: bytes) -> bytes:
    """Return a line of a server without the password."""
    return line.replace(password, b"***") if password else line


def command(*words: bytes) -> bytes:
    """Return a command as the server reads it."""
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%s\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


def set_command(key: bytes, value: Sequence[Buffer], options: Sequence[bytes] = ()) -> list[Buffer]:
    """Return the parts of SET, whose value is sent from where its parts are."""
    num_bytes = sum(map(len, value))
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (
        3 + len(options),
        len(key),
        key,
        num_bytes,
    )
    tail = b"".join([b"\r\n", *(b"$%d\r\n%s\r\n" % (len(word), word) for word in options)])
    return [head, *value, tail]
