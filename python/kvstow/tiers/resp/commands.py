"""What is asked of one server: to keep blocks, to return them, to say which it has, to drop them.

Each of these functions sends its commands, pauses, and then reads the part. So a caller can send
to several servers before it waits for one. Answers come in the order of the commands. All commands
of a part are sent before the pause, except those for blocks: see `_BYTES_AHEAD`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from kvstow._core import row_digests
from kvstow.texts import MOST_OF_AN_ERROR, on_one_line
from kvstow.tiers.namespace import HEADER_BYTES, Namespace
from kvstow.tiers.resp.wire import Buffer, Refusal, Wire, command, set_command
from kvstow.tiers.sums import ArenaSums
from kvstow.tiers.ticket import Bools
from kvstow.tiers.tier import Rows

# The bytes of blocks that a server is asked for at once. It copies each value before it sends it:
# more copies would leave its processor's caches before that. Fewer would let the network idle.
_BYTES_AHEAD: Final = 512 << 10
_MAX_DIGITS: Final = 20  # of the bytes of a server
_ANSWER: Final = b":0\r\n"  # of EXISTS with one key, or 1 for 0


@dataclass(slots=True, eq=False)
class Part:
    """The blocks of a job that one server has, and what it has said of them so far.

    Attributes:
        positions: where each is in the job.
        keys: the server's key of each.
        groups: the group of each.
        hashes: the block hash of each.
        slots: the host slot of each; empty for calls without host slots.
        ok: for each whether the server has done what it was asked.
        refusal: the first refusal.
        num_wrong: blocks that were not what they should be.
    """

    positions: list[int]
    keys: list[bytes]
    groups: list[int]
    hashes: list[bytes]
    slots: list[int]
    ok: Bools = field(init=False)
    refusal: Refusal | None = None
    num_wrong: int = 0

    def __post_init__(self) -> None:
        """Begin without an answer."""
        self.ok = np.zeros(len(self.keys), np.bool_)


class Memory(NamedTuple):
    """The host slots, one a row, and the checksums that movers keep of them."""

    rows: Rows
    sums: ArenaSums


def put(
    wire: Wire, part: Part, memory: Memory, namespace: Namespace, options: Sequence[bytes]
) -> Generator[None]:
    """Note which blocks the server has kept. A slot that was damaged on the host is not sent."""
    rows, sums = memory
    num_bytes = rows.shape[1]
    sent: list[int] = []

    def parts() -> Iterable[Buffer]:
        named = zip(part.keys, part.groups, part.hashes, part.slots, strict=True)
        for at, (key, group, digest, slot) in enumerate(named):
            checksum = int(row_digests(rows, [slot])[0])
            if sums.are_sound(np.array([slot]))[0]:  # after the checksum, see `sums`
                sent.append(at)
                header = namespace.header(group, digest, num_bytes, checksum)
                yield from set_command(key, [header, memoryview(rows[slot])], options)

    wire.send(parts())
    yield
    _statuses(wire, sent, part, b"OK")


def get(wire: Wire, part: Part, memory: Memory, namespace: Namespace) -> Generator[None]:
    """Note which blocks arrived and were proven. The server drops those that were wrong."""
    rows, sums = memory
    num_bytes = rows.shape[1]
    num_ahead = max(2, _BYTES_AHEAD // num_bytes)
    asks = [command(b"GET", key) for key in part.keys]
    wire.send([b"".join(asks[:num_ahead])])
    yield
    header = bytearray(HEADER_BYTES)
    wrong: list[int] = []
    for at, slot in enumerate(part.slots):
        if 0 < at <= len(asks) - num_ahead:
            wire.send([asks[at + num_ahead - 1]])
        size = wire.bulk_size()
        if isinstance(size, Refusal):
            part.refusal = part.refusal or size
            continue
        if size is None:
            continue
        is_proven = False
        if size == HEADER_BYTES + num_bytes:
            wire.into(memoryview(header))
            wire.into(memoryview(rows[slot]))
            given = bytes(header)
            checksum = namespace.checksum(given, part.groups[at], part.hashes[at], num_bytes)
            # Now, while the bytes are in the processor's caches.
            is_proven = checksum is not None and bool(row_digests(rows, [slot])[0] == checksum)
        else:
            wire.skip(size)
        wire.end_bulk()
        if is_proven:
            sums.record(np.array([slot]))
            part.ok[at] = True
        else:
            wrong.append(at)
            part.num_wrong += 1
    if wrong:
        wire.send([b"".join(command(b"DEL", part.keys[at]) for at in wrong)])
        for _ in wrong:
            wire.status()


def memory_policy(wire: Wire) -> tuple[str, int]:
    """Return what the server does when it is full, and its bytes, 0 for no bound.

    An empty policy means that the server does not say.
    """
    wire.send([command(b"INFO", b"memory")])
    text = wire.answer()
    if not isinstance(text, bytes):
        return "", 0
    lines = (line.partition(b":") for line in text.split(b"\r\n"))
    fields = {name: value for name, _, value in lines}
    num_bytes = fields.get(b"maxmemory", b"")
    policy = fields.get(b"maxmemory_policy", b"").decode("ascii", "replace")
    is_number = num_bytes.isdigit() and len(num_bytes) <= _MAX_DIGITS
    return (on_one_line(policy, MOST_OF_AN_ERROR), int(num_bytes)) if is_number else ("", 0)


def contains(wire: Wire, part: Part) -> Generator[None]:
    """Note which blocks the server has."""
    wire.send([b"".join(command(b"EXISTS", key) for key in part.keys)])
    yield
    _numbers(wire, part)


def delete(wire: Wire, part: Part) -> Generator[None]:
    """Note which blocks the server has no more."""
    wire.send([b"".join(command(b"DEL", key) for key in part.keys)])
    yield
    _statuses(wire, range(len(part.keys)), part, b"0", b"1")


def _statuses(wire: Wire, places: Sequence[int], part: Part, *expected: bytes) -> None:
    """Note which blocks have an expected answer, and the first refusal."""
    for at in places:
        answer = wire.status()
        if isinstance(answer, Refusal):
            part.refusal = part.refusal or answer
        else:
            part.ok[at] = answer in expected


def _numbers(wire: Wire, part: Part) -> None:
    """Note which answers are 1, and the first refusal.

    Nearly always all are lines of one digit, which numpy reads at once. Other lines are longer.
    """
    num = len(part.keys)
    num_bytes = num * len(_ANSWER)
    lines = np.frombuffer(wire.peek(num_bytes), np.uint8).reshape(num, len(_ANSWER))
    rest = np.delete(lines, 1, axis=1)
    if (rest == np.frombuffer(_ANSWER.replace(b"0", b""), np.uint8)).all():
        part.ok[:] = lines[:, 1] == ord("1")
        wire.skip(num_bytes)
    else:
        _statuses(wire, range(num), part, b"1")
