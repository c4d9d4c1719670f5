"""What is asked of one server: to keep blocks, to return them, to say which it has, to drop them.

Answers come in the order of the commands. All commands of a part are sent before the first answer
is read, except those for blocks: see `_BYTES_AHEAD`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import row_digests
from kvstow.tiers.framed import HEADER_BYTES, Namespace
from kvstow.tiers.resp.wire import Buffer, Refusal, Wire, command, set_command
from kvstow.tiers.sums import ArenaSums
from kvstow.tiers.ticket import Bools

# The bytes of blocks that a server is asked for at once. It copies each value before it sends it:
# more copies would leave its processor's caches before that. Fewer would let the network idle.
_BYTES_AHEAD: Final = 512 << 10
_ANSWER: Final = b":0\r\n"  # of EXISTS with one key, or 1 for 0

Rows: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Part:
    """The blocks of a job that one server has.

    Attributes:
        positions: where each is in the job.
        keys: the server's key of each.
        groups: the group of each.
        hashes: the block hash of each.
        slots: the host slot of each; empty for calls without host slots.
    """

    positions: list[int]
    keys: list[bytes]
    groups: list[int]
    hashes: list[bytes]
    slots: list[int]


class Memory(NamedTuple):
    """The host slots, one a row, and the checksums that movers keep of them."""

    rows: Rows
    sums: ArenaSums


def put(
    wire: Wire, part: Part, memory: Memory, namespace: Namespace, options: Sequence[bytes]
) -> tuple[Bools, Refusal | None]:
    """Return which blocks the server has kept, and its first refusal.

    A slot that was damaged on the host is not sent.
    """
    rows, sums = memory
    num_bytes = rows.shape[1]
    ok = np.zeros(len(part.keys), np.bool_)

    def parts() -> Iterable[Buffer]:
        named = zip(part.keys, part.groups, part.hashes, part.slots, strict=True)
        for at, (key, group, digest, slot) in enumerate(named):
            checksum = int(row_digests(rows, [slot])[0])
            ok[at] = sums.are_sound(np.array([slot]))[0]  # after the checksum, see `sums`
            if ok[at]:
                header = namespace.header(group, digest, num_bytes, checksum)
                yield from set_command(key, [header, memoryview(rows[slot])], options)

    wire.send(parts())
    sound = np.flatnonzero(ok)
    ok[sound], refusal = _statuses(wire, len(sound), b"OK")
    return ok, refusal


def get(
    wire: Wire, part: Part, memory: Memory, namespace: Namespace
) -> tuple[Bools, Refusal | None, int]:
    """Return which blocks arrived and were proven, the first refusal, and how many were wrong.

    The server drops those that were wrong.
    """
    rows, sums = memory
    num_bytes = rows.shape[1]
    num_ahead = max(2, _BYTES_AHEAD // num_bytes)
    asks = [command(b"GET", key) for key in part.keys]
    wire.send([b"".join(asks[:num_ahead])])
    refusal, header = None, bytearray(HEADER_BYTES)
    ok = np.zeros(len(part.keys), np.bool_)
    wrong: list[int] = []
    for at, slot in enumerate(part.slots):
        if 0 < at <= len(asks) - num_ahead:
            wire.send([asks[at + num_ahead - 1]])
        size = wire.bulk_size()
        if isinstance(size, Refusal):
            refusal = refusal or size
            continue
        if size is None:
            continue
        if size == HEADER_BYTES + num_bytes:
            wire.into(memoryview(header))
            wire.into(memoryview(rows[slot]))
            given = bytes(header)
            checksum = namespace.checksum(given, part.groups[at], part.hashes[at], num_bytes)
            # Now, while the bytes are in the processor's caches.
            ok[at] = checksum is not None and row_digests(rows, [slot])[0] == checksum
        else:
            wire.skip(size)
        wire.end_bulk()
        if not ok[at]:
            wrong.append(at)
    if wrong:
        wire.send([b"".join(command(b"DEL", part.keys[at]) for at in wrong)])
        _statuses(wire, len(wrong))
    sums.record(np.array(part.slots, np.int64)[ok])
    return ok, refusal, len(wrong)


def memory_policy(wire: Wire) -> tuple[str, int]:
    """Return what the server does when it is full, and its bytes, 0 for no bound.

    An empty policy means that the server does not say.
    """
    wire.send([command(b"INFO", b"memory")])
    size = wire.bulk_size()
    if isinstance(size, Refusal) or size is None:
        return "", 0
    text = bytearray(size)
    wire.into(memoryview(text))
    wire.end_bulk()
    lines = (line.partition(b":") for line in bytes(text).split(b"\r\n"))
    fields = {name: value for name, _, value in lines}
    num_bytes = fields.get(b"maxmemory", b"")
    policy = fields.get(b"maxmemory_policy", b"").decode("ascii", "replace")
    return (policy, int(num_bytes)) if num_bytes.isdigit() else ("", 0)


def contains(wire: Wire, part: Part) -> tuple[Bools, Refusal | None]:
    """Return which blocks the server has."""
    wire.send([b"".join(command(b"EXISTS", key) for key in part.keys)])
    return _numbers(wire, len(part.keys))


def delete(wire: Wire, part: Part) -> tuple[Bools, Refusal | None]:
    """Return which blocks the server has no more."""
    wire.send([b"".join(command(b"DEL", key) for key in part.keys)])
    return _statuses(wire, len(part.keys), b"0", b"1")


def _statuses(wire: Wire, num: int, *expected: bytes) -> tuple[Bools, Refusal | None]:
    """Return which of `num` answers are expected, and the first refusal."""
    ok, refusal = np.zeros(num, np.bool_), None
    for at in range(num):
        answer = wire.status()
        if isinstance(answer, Refusal):
            refusal = refusal or answer
        else:
            ok[at] = answer in expected
    return ok, refusal


def _numbers(wire: Wire, num: int) -> tuple[Bools, Refusal | None]:
    """Return which of `num` answers are 1, and the first refusal.

    Nearly always all are lines of one digit, which numpy reads at once. Other lines are longer.
    """
    num_bytes = num * len(_ANSWER)
    lines = np.frombuffer(wire.peek(num_bytes), np.uint8).reshape(num, len(_ANSWER))
    rest = np.delete(lines, 1, axis=1)
    if (rest == np.frombuffer(_ANSWER.replace(b"0", b""), np.uint8)).all():
        ok = lines[:, 1] == ord("1")
        wire.skip(num_bytes)
        return ok, None
    return _statuses(wire, num, b"1")
