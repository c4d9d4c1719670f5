"""How fast is the shared tier on a RESP server, beside a bare socket and beside redis-py?

    .venv/bin/python -m benches.shared_tier [--mib 96] [--rounds 5] [--json]

It starts a server on this machine, so both share the processors. The sides take turns, and the best
turn of each counts.

- kvstow: one job of `RespTier`, with one thread and with two.
- bare socket: one connection. It sends each block from its slot, or receives it into its slot, and
  takes the same CRC-32. It has no header, no deadline, and no errors.
- redis-py: pipelines of 16 blocks, with a copy of each block and without a checksum.

The last row asks for 8,192 keys at once, and shows the median of 20 calls.

The conditions: one thread of kvstow at 0.8 of the bare socket, and 8,192 keys within 80 ms.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benches.host_copy import best_s
from tests.tiers.resp.server import Server

from kvstow._core import row_checksums
from kvstow.bench import machine
from kvstow.tiers import TierBlocks, TierTicket
from kvstow.tiers.resp import RespTier
from kvstow.transfer import HostArena

LEAST_RATIO, MOST_MS, NUM_KEYS = 0.8, 80.0, 8192
NAMESPACE = bytes(16)


class Bare:
    """One connection that speaks just enough RESP."""

    def __init__(self, port: int, arena: HostArena, num_blocks: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.matrix = arena.memory.reshape(arena.num_slots, -1)
        self.rows = [memoryview(self.matrix[at]) for at in range(num_blocks)]
        self.sums: list[np.uint32] = [np.uint32()] * num_blocks

    def put(self) -> None:
        size = len(self.rows[0])
        for first in range(0, len(self.rows), 16):
            rows = self.rows[first : first + 16]
            for at, row in enumerate(rows, first):
                self.sums[at] = row_checksums(self.matrix, [at])[0]
                key = b"bare:%08d" % at
                head = b"*3\r\n$3\r\nSET\r\n$13\r\n%s\r\n$%d\r\n" % (key, size)
                parts: list[Any] = [head, row, b"\r\n"]
                left = self.socket.sendmsg(parts)
                total = len(head) + size + 2
                if left < total:
                    self.socket.sendall(b"".join(parts)[left:])
            self._read(5 * len(rows))

    def get(self) -> None:
        size = len(self.rows[0])
        head = len(b"$%d\r\n" % size)
        for first in range(0, len(self.rows), 16):
            rows = self.rows[first : first + 16]
            keys = [b"bare:%08d" % at for at in range(first, first + len(rows))]
            self.socket.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$13\r\n%s\r\n" % key for key in keys))
            for at, row in enumerate(rows, first):
                self._read(head)
                num = 0
                while num < size:
                    num += self.socket.recv_into(row[num:])
                self._read(2)
                assert row_checksums(self.matrix, [at])[0] == self.sums[at]

    def _read(self, num: int) -> None:
        while num:
            num -= len(self.socket.recv(num))


def check(ticket: TierTicket) -> None:
    """Wait for a job, all of whose blocks must be well."""
    ticket.wait(60)
    assert ticket.ok.all(), ticket.error


def row(server: Server, kib: int, mib: int, num_rounds: int) -> dict[str, Any]:
    """Measure blocks of one size."""
    import redis  # noqa: PLC0415 - an optional dependency

    num = (mib << 20) // (kib << 10)
    with HostArena(num, kib << 10, num_prefault_threads=1) as arena:
        arena.slots[:] = np.random.default_rng(0).integers(0, 256, arena.slots.shape, np.uint8)
        named = TierBlocks([b"%032d" % at for at in range(num)], [0] * num)
        slots = np.arange(num)
        bare, library = Bare(server.port, arena, num), redis.Redis(port=server.port)

        def library_put() -> None:
            for first in range(0, num, 16):
                pipe = library.pipeline(transaction=False)
                for at in range(first, min(first + 16, num)):
                    pipe.set(f"lib:{at}", memoryview(arena.slots[at]))
                pipe.execute()

        def library_get() -> None:
            for first in range(0, num, 16):
                pipe = library.pipeline(transaction=False)
                for at in range(first, min(first + 16, num)):
                    pipe.get(f"lib:{at}")
                for at, value in enumerate(pipe.execute(), first):
                    arena.slots[at] = np.frombuffer(value, np.uint8)

        with (
            RespTier(arena, server.url, NAMESPACE, num_threads=1, timeout_s=60) as one,
            RespTier(arena, server.url, NAMESPACE, timeout_s=60) as two,
        ):
            puts: dict[str, Callable[[], object]] = {
                "kvstow": lambda: check(one.put(named, slots)),
                "bare socket": bare.put,
                "kvstow, 2 threads": lambda: check(two.put(named, slots)),
                "redis-py": library_put,
            }
            gets: dict[str, Callable[[], object]] = {
                "kvstow": lambda: check(one.get(named, slots)),
                "bare socket": bare.get,
                "kvstow, 2 threads": lambda: check(two.get(named, slots)),
                "redis-py": library_get,
            }
            num_bytes = num * (kib << 10)
            found = {"put": best_s(puts, num_rounds), "get": best_s(gets, num_rounds)}
        server.command("FLUSHALL")
    speeds = {
        direction: {side: num_bytes / seconds / 1e9 for side, seconds in sides.items()}
        for direction, sides in found.items()
    }
    return {"kib": kib, "gb_per_s": speeds}


def contains_ms(server: Server) -> float:
    """Return the median time of a question for many keys."""
    wanted = TierBlocks([b"%032d" % at for at in range(NUM_KEYS)], [0] * NUM_KEYS)
    times = []
    with HostArena(1, 4096) as arena, RespTier(arena, server.url, NAMESPACE) as tier:
        for _ in range(20):
            begin_s = time.perf_counter()
            tier.contains(wanted).wait(60)
            times.append(1000 * (time.perf_counter() - begin_s))
    return statistics.median(times)


def main() -> int:
    """Print the table, and return 1 if a condition is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as server:
        rows = [row(server, kib, options.mib, options.rounds) for kib in (128, 2048)]
        asked_ms = contains_ms(server)
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows, "contains_ms": asked_ms}))
    else:
        print(machine())
    is_missed = asked_ms > MOST_MS
    for one in rows:
        for direction, sides in one["gb_per_s"].items():
            ratio = sides["kvstow"] / sides["bare socket"]
            is_missed |= ratio < LEAST_RATIO
            if not options.json:
                listed = ", ".join(f"{side} {speed:.2f}" for side, speed in sides.items())
                print(
                    f"{one['kib']:5} KiB {direction}: {listed} GB/s; {ratio:.2f} of the bare socket"
                )
    if not options.json:
        print(f"{NUM_KEYS:,} keys: {asked_ms:.1f} ms")
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())
