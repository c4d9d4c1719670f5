"""How fast is a shared tier, beside what its engine does alone?

    .venv/bin/python -m benches.shared_tier [--mib 96] [--rounds 15] [--json]

It starts a RESP server and a Mooncake master on this machine, so all share the processors. The
sides take turns, each time another one first. The median turn counts: the best one is luck, when
both processes happen to run at once. Without Mooncake's module it says so.

On a RESP server:

- kvstow: one job of `RespTier`, with one thread and with two.
- bare socket: one connection that sends each block from its slot, or receives it there, and takes
  the same checksum. It has no header, no deadline, and no errors.
- redis-py: pipelines of 16 blocks, with a copy of each block and without a checksum.

On Mooncake Store, over TCP, in the memory of another process:

- kvstow: one job of `MooncakeTier`, with one thread and with two.
- batch calls: the store's own `batch_put_from` and `batch_get_into`, from the same slots, for as
  many blocks at a time. Nothing is checked, and a value has no header.
- batch calls, header: the same, from other memory, which has room for a header at each block.
- batch calls, 2 buffers: the store's own calls for values in two buffers, the header of each block
  apart from its slot. Nothing is checked.
- batch calls, checksum: the same, with the checksum of each block before a put and after a get.

The conditions, with one thread: kvstow at 0.8 of the bare socket, and 8,192 keys at once within 80
ms (the median of 20 calls); and at 0.9 of Mooncake's batch calls with 2 buffers, and within 20 ms.
Its calls with one buffer are no condition, because a host slot has no room for a header.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.tiers.mooncake_master import Master, missing
from tests.tiers.resp.server import Server

from kvstow._core import row_digests
from kvstow.bench import machine
from kvstow.tiers import TierBlocks, TierTicket
from kvstow.tiers.mooncake import MooncakeTier
from kvstow.tiers.namespace import HEADER_BYTES
from kvstow.tiers.resp import RespTier
from kvstow.tiers.tier import SharedTier
from kvstow.transfer import HostArena

# Of each engine: the least ratio of kvstow to its rival, the rival, and the most time for the keys.
CONDITIONS = {"RESP": (0.8, "bare socket", 80.0), "Mooncake": (0.9, "batch calls, 2 buffers", 20.0)}
NUM_KEYS = 8192
BLOCKS_PER_CALL = 16
NAMESPACE = bytes(16)
Speeds = dict[str, dict[str, float]]


class Bare:
    """One connection that speaks just enough RESP."""

    def __init__(self, port: int, arena: HostArena, num_blocks: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.matrix = arena.memory.reshape(arena.num_slots, -1)
        self.rows = [memoryview(self.matrix[at]) for at in range(num_blocks)]
        self.sums: list[np.uint64] = [np.uint64()] * num_blocks

    def put(self) -> None:
        size = len(self.rows[0])
        for first in range(0, len(self.rows), BLOCKS_PER_CALL):
            rows = self.rows[first : first + BLOCKS_PER_CALL]
            for at, row in enumerate(rows, first):
                self.sums[at] = row_digests(self.matrix, [at])[0]
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
        for first in range(0, len(self.rows), BLOCKS_PER_CALL):
            rows = self.rows[first : first + BLOCKS_PER_CALL]
            keys = [b"bare:%08d" % at for at in range(first, first + len(rows))]
            self.socket.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$13\r\n%s\r\n" % key for key in keys))
            for at, row in enumerate(rows, first):
                self._read(head)
                num = 0
                while num < size:
                    num += self.socket.recv_into(row[num:])
                self._read(2)
                assert row_digests(self.matrix, [at])[0] == self.sums[at]

    def _read(self, num: int) -> None:
        while num:
            num -= len(self.socket.recv(num))


def check(ticket: TierTicket) -> None:
    """Wait for a job, all of whose blocks must be well."""
    ticket.wait(60)
    assert ticket.ok.all(), ticket.error


def resp_speeds(server: Server, kib: int, mib: int, num_rounds: int) -> Speeds:
    """Measure blocks of one size on a RESP server, in GB/s."""
    import redis  # noqa: PLC0415 - an optional dependency

    num = (mib << 20) // (kib << 10)
    with HostArena(num, kib << 10, num_prefault_threads=1) as arena:
        arena.slots[:] = np.random.default_rng(0).integers(0, 256, arena.slots.shape, np.uint8)
        named = TierBlocks([b"%032d" % at for at in range(num)], [0] * num)
        slots = np.arange(num)
        bare, library = Bare(server.port, arena, num), redis.Redis(port=server.port)

        def library_put() -> None:
            for first in range(0, num, BLOCKS_PER_CALL):
                pipe = library.pipeline(transaction=False)
                for at in range(first, min(first + BLOCKS_PER_CALL, num)):
                    pipe.set(f"lib:{at}", memoryview(arena.slots[at]))
                pipe.execute()

        def library_get() -> None:
            for first in range(0, num, BLOCKS_PER_CALL):
                pipe = library.pipeline(transaction=False)
                for at in range(first, min(first + BLOCKS_PER_CALL, num)):
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
            found = {"put": median_s(puts, num_rounds), "get": median_s(gets, num_rounds)}
        server.command("FLUSHALL")
    return speeds(num * (kib << 10), found)


def median_s(sides: Mapping[str, Callable[[], object]], num_rounds: int) -> dict[str, float]:
    """Let the sides take turns, and return the seconds of the median turn of each."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    order = deque(sides.items())
    for _ in range(num_rounds):
        for name, call in order:
            begin_s = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin_s)
        order.rotate()
    return {name: statistics.median(each) for name, each in times.items()}


def speeds(num_bytes: int, seconds: Speeds) -> Speeds:
    """Return GB/s."""
    return {
        direction: {side: num_bytes / took_s / 1e9 for side, took_s in sides.items()}
        for direction, sides in seconds.items()
    }


def own_memory(url: str, num_bytes: int, ready: Connection) -> None:
    """Give memory of this process to a store, until the other end of `ready` closes."""
    with (
        HostArena(1, 4096) as arena,
        MooncakeTier(arena, url, NAMESPACE, segment_bytes=num_bytes) as tier,
    ):
        tier.links.current()
        ready.send(None)
        with contextlib.suppress(EOFError):
            ready.recv()


@contextlib.contextmanager
def mooncake(folder: Path, num_bytes: int) -> Iterator[Master]:
    """Yield a master whose memory is that of another process."""
    master = Master(folder, lease_ms=10_000)
    here, there = multiprocessing.Pipe()
    # A fork would have the threads of the libraries without their locks' owners.
    owner = multiprocessing.get_context("spawn").Process(
        target=own_memory, args=(master.url, num_bytes, there)
    )
    try:
        owner.start()
        there.close()
        here.recv()
        yield master
    finally:
        here.close()
        owner.join(30)
        master.kill()


class BatchCalls:
    """Mooncake's own calls on the slots of an arena, which a tier has registered."""

    name = "own"

    def __init__(self, tier: MooncakeTier, arena: HostArena, num_blocks: int) -> None:
        self.link, self.num_per_call = tier.links.current(), tier.blocks_per_part
        self.store = self.link.store
        self.parts, self.calls = [], []
        for first in range(0, num_blocks, self.num_per_call):
            slots = range(first, min(first + self.num_per_call, num_blocks))
            self.parts.append(slots)
            keys = [f"{self.name}:{slot}" for slot in slots]
            pointers = [arena.slots[slot].ctypes.data for slot in slots]
            self.calls.append((keys, pointers, [arena.slot_bytes] * len(keys)))

    def put(self) -> None:
        for keys, pointers, sizes in self.calls:
            assert not any(self.store.batch_put_from(keys, pointers, sizes))

    def get(self) -> None:
        for keys, pointers, sizes in self.calls:
            assert self.store.batch_get_into(keys, pointers, sizes) == sizes

    def forget(self) -> None:
        for keys, _, _ in self.calls:
            self.store.batch_remove(keys, True)


class BatchCallsWithRoom(BatchCalls):
    """Mooncake's own calls on an arena whose slots have room for a header."""

    name = "room"

    def __init__(self, tier: MooncakeTier, arena: HostArena, num_blocks: int) -> None:
        tier.links.current().register(arena.memory)
        super().__init__(tier, arena, num_blocks)


class BatchCallsWithHeader(BatchCalls):
    """Mooncake's own calls for values in two buffers."""

    name = "apart"

    def __init__(self, tier: MooncakeTier, arena: HostArena, num_blocks: int) -> None:
        super().__init__(tier, arena, num_blocks)
        self.headers = np.zeros((self.num_per_call, HEADER_BYTES), np.uint8)
        self.link.register(self.headers)
        apart = [header.ctypes.data for header in self.headers]
        self.values = [
            (
                keys,
                [[header, slot] for header, slot in zip(apart, pointers, strict=False)],
                [[HEADER_BYTES, size] for size in sizes],
            )
            for keys, pointers, sizes in self.calls
        ]

    def put(self) -> None:
        for part in range(len(self.values)):
            self.put_part(part)

    def get(self) -> None:
        for part in range(len(self.values)):
            self.get_part(part)

    def put_part(self, part: int) -> None:
        """Put the blocks of one call."""
        assert not any(self.store.batch_put_from_multi_buffers(*self.values[part]))

    def get_part(self, part: int) -> None:
        """Get the blocks of one call."""
        keys, pointers, sizes = self.values[part]
        got = self.store.batch_get_into_multi_buffers(keys, pointers, sizes)
        assert got == [sum(each) for each in sizes]


class BatchCallsWithChecksum(BatchCallsWithHeader):
    """The same, with the checksum that a tier of kvstow takes of each block."""

    name = "sum"

    def __init__(self, tier: MooncakeTier, arena: HostArena, num_blocks: int) -> None:
        super().__init__(tier, arena, num_blocks)
        self.matrix = arena.memory.reshape(arena.num_slots, -1)
        self.sums: dict[int, npt.NDArray[np.uint64]] = {}

    def put_part(self, part: int) -> None:
        self.sums[part] = row_digests(self.matrix, self.parts[part])
        super().put_part(part)

    def get_part(self, part: int) -> None:
        super().get_part(part)
        assert (row_digests(self.matrix, self.parts[part]) == self.sums[part]).all()


class OnMooncake:
    """A tier of kvstow."""

    def __init__(self, tier: MooncakeTier, num_blocks: int) -> None:
        self.tier, self.slots = tier, np.arange(num_blocks)
        self.blocks = TierBlocks([b"%032d" % at for at in range(num_blocks)], [0] * num_blocks)

    def put(self) -> None:
        check(self.tier.put(self.blocks, self.slots))

    def get(self) -> None:
        check(self.tier.get(self.blocks, self.slots))

    def forget(self) -> None:
        check(self.tier.delete(self.blocks))


def mooncake_speeds(master: Master, kib: int, mib: int, num_rounds: int) -> Speeds:
    """Measure blocks of one size on Mooncake Store, in GB/s."""
    num = mib * 1024 // kib
    with (
        HostArena(num, kib << 10, num_prefault_threads=1) as arena,
        HostArena(num, HEADER_BYTES + (kib << 10), num_prefault_threads=1) as roomy,
    ):
        for each in (arena, roomy):
            each.slots[:] = np.random.default_rng(0).integers(0, 256, each.slots.shape, np.uint8)
        with (
            MooncakeTier(arena, master.url, NAMESPACE, num_threads=1, timeout_s=60) as one,
            MooncakeTier(arena, master.url, bytes([1] * 16), timeout_s=60) as two,
        ):
            sides: dict[str, OnMooncake | BatchCalls] = {
                "kvstow": OnMooncake(one, num),
                "batch calls": BatchCalls(one, arena, num),
                "batch calls, header": BatchCallsWithRoom(one, roomy, num),
                "batch calls, 2 buffers": BatchCallsWithHeader(one, arena, num),
                "batch calls, checksum": BatchCallsWithChecksum(one, arena, num),
                "kvstow, 2 threads": OnMooncake(two, num),
            }
            times: dict[str, dict[str, list[float]]] = {
                what: {name: [] for name in sides} for what in ("put", "get")
            }
            order = deque(sides.items())
            for _ in range(num_rounds):
                for name, side in order:
                    for what, taken in times.items():
                        begin_s = time.perf_counter()
                        getattr(side, what)()
                        taken[name].append(time.perf_counter() - begin_s)
                    # The store keeps what it has, so a put must find nothing there.
                    side.forget()
                order.rotate()
    medians = {
        what: {name: statistics.median(turns) for name, turns in each.items()}
        for what, each in times.items()
    }
    return speeds(num * (kib << 10), medians)


def contains_ms(tier: SharedTier) -> float:
    """Return the median time of a question for many keys."""
    wanted = TierBlocks([b"%032d" % at for at in range(NUM_KEYS)], [0] * NUM_KEYS)
    times = []
    for _ in range(20):
        begin_s = time.perf_counter()
        tier.contains(wanted).wait(60)
        times.append(1000 * (time.perf_counter() - begin_s))
    return statistics.median(times)


def measure(mib: int, num_rounds: int) -> dict[str, Any]:
    """Return, for each engine, the speeds for each size and the time for many keys."""
    sizes = (128, 2048)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, HostArena(1, 4096) as arena:
        with Server(Path(folder)) as server:
            rows = [
                {"kib": kib, "gb_per_s": resp_speeds(server, kib, mib, num_rounds)} for kib in sizes
            ]
            with RespTier(arena, server.url, NAMESPACE) as tier:
                found["RESP"] = {"rows": rows, "contains_ms": contains_ms(tier)}
        if missing():
            return found
        # Each side has its blocks there for a moment; the rest is what the store keeps free.
        with mooncake(Path(folder), 4 * mib << 20) as master:
            rows = [
                {"kib": kib, "gb_per_s": mooncake_speeds(master, kib, mib, num_rounds)}
                for kib in sizes
            ]
            with MooncakeTier(arena, master.url, NAMESPACE) as other:
                found["Mooncake"] = {"rows": rows, "contains_ms": contains_ms(other)}
    return found


def report(found: dict[str, Any]) -> list[str]:
    """Print the table, and return the conditions that do not hold."""
    missed = []
    for engine, (least, rival, most_ms) in CONDITIONS.items():
        if engine not in found:
            print(f"{engine}: not measured, because {missing()}")
            continue
        for row in found[engine]["rows"]:
            for direction, sides in row["gb_per_s"].items():
                ratio = sides["kvstow"] / sides[rival]
                listed = ", ".join(f"{side} {speed:.2f}" for side, speed in sides.items())
                name = f"{engine} {row['kib']} KiB {direction}"
                print(f"{name:21}: {listed} GB/s; {ratio:.2f} of {rival}")
                if ratio < least:
                    missed.append(f"{name} at {least} of {rival}")
        asked_ms = found[engine]["contains_ms"]
        print(f"{engine} {NUM_KEYS:,} keys: {asked_ms:.1f} ms")
        if asked_ms > most_ms:
            missed.append(f"{engine} {NUM_KEYS:,} keys within {most_ms} ms")
    return missed


def main() -> int:
    """Print the table, and return 1 if a condition is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.mib, options.rounds)
    with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
        print(machine())
        missed = report(found)
        for name in missed:
            print("MISSED:", name)
    if options.json:
        print(json.dumps({"machine": machine(), **found, "missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
