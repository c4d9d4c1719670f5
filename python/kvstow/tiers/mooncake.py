"""`MooncakeTier`: a shared tier on Mooncake Store, over TCP or RDMA.

Any wheel of Mooncake will do: all bring the same module `mooncake`. Its calls block for seconds
when the other side has died, so they run on threads, and a ticket answers at its deadline. A host
slot counts as in use until the call has returned.

How it could serve a wrong block, and what prevents it:

- A block of another model, schema, group or key lies under the key, or a part of it: the header
  must equal the one of this block, byte for byte, and the bytes their checksum.
- The store gives the memory of a block to another one while a get reads it, because its lease ended
  (-707, or torn bytes): the checksum.
- The store keeps what is there when a put comes: a get that finds a bad block drops it first.
- Bytes arrive in a host slot, or in the memory of a thread, after their call has failed: the job
  ends when the link of the call is closed, which ends all transfers (see `mooncake_link`). A thread
  takes new memory for each link.
- A put reads its slot or its header after its call has failed, and they have changed: the same. If
  it did read them, it would write into memory that the master may have given to another block. A
  get of that block compares its header and its checksum.
- A small block changes while it is copied out of the memory of its thread: a get checks it in its
  host slot, after the copy.
- The memory of a thread passes to the one that goes on, and a call still uses it: it passes only
  after the call has returned and its part has ended. A call in doubt leaves its memory unused.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np

from kvstow._core import ConfigError, TransferError, row_digests
from kvstow.arguments import checked_int
from kvstow.tiers.breaker import (
    ANSWERS_AGAIN,
    FAILS,
    FAIR_S,
    Breaker,
    left_alone,
    with_times,
)
from kvstow.tiers.mooncake_link import Link, Links, check_answers, parse
from kvstow.tiers.mooncake_watch import CallWatch
from kvstow.tiers.namespace import HEADER_BYTES
from kvstow.tiers.queued import (
    DEFAULT_QUEUED_BYTES,
    DEFAULT_TIMEOUT_S,
    Job,
    QueuedTier,
    Worker,
)
from kvstow.transfer import HostArena

logger = logging.getLogger(__name__)

_LOCAL_BUFFER_BYTES: Final = 16 << 20

# Blocks of at most so many bytes are copied beside their headers. A larger block takes longer to
# copy than its header takes to travel alone.
MAX_COPIED_BYTES: Final = 256 << 10
# A header ends where its block begins, at a multiple of 16 bytes.
_HEADER_ROOM: Final = -(-HEADER_BYTES // 16) * 16
# Bytes of one call. Each call asks the master, too, so blocks of 128 KiB go a sixth faster than in
# calls of 4 MiB.
_PART_BYTES: Final = 16 << 20
_LEAST_BLOCKS, _MOST_BLOCKS = 8, 128

# What the store answers; others are failures of the store.
_OK, _NO_SPACE, _WRONG_SIZE = 0, -200, -600
_NOT_READY, _NOT_FOUND, _EXISTS, _LEASED, _LEASE_OVER = range(-703, -708, -1)
_ANSWERS: Final = frozenset(
    {_NO_SPACE, _WRONG_SIZE, _NOT_READY, _NOT_FOUND, _EXISTS, _LEASED, _LEASE_OVER}
)
# The master does not answer, or not in time. Then no transfer has begun, or all have ended. After
# each other failure, transfers may go on.
_NO_MASTER: Final = frozenset({-900, -901})


_NO_ROOM: Final = (
    "kvstow: the shared tier at %s has no room for a block. If it never has any, no server gives "
    "it memory: set shared_segment_bytes (segment_bytes of SharedStore)"
)


class MooncakeTier(QueuedTier):
    """Blocks in Mooncake Store. This process may also give memory to the store.

    Attributes:
        address: host and port of the master.
        base_address: where host slot 0 is in memory.
        links: what calls the store.
        watch: the calls that are under way.
        copies_blocks: whether a block is copied beside its header, so that both are one buffer.
    """

    def __init__(  # noqa: PLR0913 - options, each with a default
        self,
        arena: HostArena,
        url: str,
        namespace: bytes,
        *,
        host: str = "127.0.0.1",
        segment_bytes: int = 0,
        protocol: str = "tcp",
        devices: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        num_threads: int = 2,
        max_queued_bytes: int = DEFAULT_QUEUED_BYTES,
    ) -> None:
        """Start the threads, which connect when the first job comes.

        Args:
            arena: the host side. The store reads and writes its slots in place, unless they are
                small: see `copies_blocks`.
            url: mooncake://HOST:PORT of the master.
            namespace: 16 bytes, a digest of all that decides what a block's bytes mean.
            host: the name by which other machines reach this one.
            segment_bytes: memory of this process that the store may fill with anyone's blocks.
            protocol: "tcp" or "rdma".
            devices: the RDMA devices, separated by commas.
            timeout_s: the most seconds for a job without a deadline.
            num_threads: threads for puts, and as many for all other calls.
            max_queued_bytes: bytes of puts that may wait. More puts fail at once.

        Raises:
            ConfigError: a wrong argument, or Mooncake is not installed.
            StateError: the arena is closed, or the system starts no more threads.
        """
        super().__init__(
            arena,
            namespace,
            timeout_s=timeout_s,
            num_threads=num_threads,
            max_queued_bytes=max_queued_bytes,
        )
        self.address: Final = parse(url)
        if protocol not in ("tcp", "rdma"):
            raise ConfigError(f"protocol is {protocol!r}, and it must be tcp or rdma")
        checked_int("segment_bytes", segment_bytes, 0, 2**63 - 1, "pass bytes, 0 for no memory")
        self.base_address: Final = self._rows.ctypes.data
        self.copies_blocks: Final = self.slot_bytes <= MAX_COPIED_BYTES
        num_blocks = _PART_BYTES // self.slot_bytes
        self.blocks_per_part = min(max(num_blocks, _LEAST_BLOCKS), _MOST_BLOCKS)
        self._segment_bytes = segment_bytes
        self._new_store = partial(
            _set_up, _store_class(), self.address, host=host, protocol=protocol, devices=devices
        )
        # Gives memory to the store, and calls nothing. So no doubt closes it.
        self._giver: Any = None
        self.links: Final = Links(self._connect)
        self.breaker: Final = Breaker()
        self._has_warned_of_room = False
        self.watch: Final = CallWatch()
        self._drop_watch = weakref.finalize(self, self.watch.let_end)
        self._drop_watch.atexit = False
        self.start()

    def _start_threads(self) -> None:
        self.watch.start()
        super()._start_threads()

    def close(self) -> None:
        """Carry out every job, each up to its deadline, and stop."""
        if self._is_forked:
            return
        self.watch.close()
        super().close()
        self._drop_watch.detach()
        if not any(thread.is_alive() for thread in self._threads):
            self.links.close()
        if self._giver is not None:
            self._giver.close()

    def _worker(self) -> Worker:
        return _Calls(self)

    def without_room(self) -> TransferError:
        """Warn once that the store takes no block, and return why it does not."""
        if not self._has_warned_of_room:
            self._has_warned_of_room = True
            logger.warning(_NO_ROOM, self.address)
        return TransferError(f"Mooncake at {self.address} has no room for a block")

    def _connect(self) -> Link:
        if self._segment_bytes and self._giver is None:
            self._giver = self._new_store(segment_bytes=self._segment_bytes)
        link = Link(self._new_store())
        try:
            link.register(self._rows)
        except BaseException:
            link.close()
            raise
        return link


class _Calls:
    """One thread's calls, and its memory for values.

    ```
    | room: ... header | block |    a block that is copied: the value is one buffer
    | room: ... header |            any other: the value is the header and the host slot
    ```

    The store makes a transfer of each buffer. Over TCP, one of a header takes 17 us, and a copy of
    128 KiB about 8 us. So a small block is copied.
    """

    def __init__(self, tier: MooncakeTier) -> None:
        # Until its first job, a thread keeps no tier that its user drops.
        self._tier: MooncakeTier = weakref.proxy(tier)
        self._kept: QueuedTier | None = None
        self._link: Link | None = None
        self._is_spent = False

    def _use(self, link: Link) -> None:
        """Take new memory for each link, because bytes may arrive in that of the last one."""
        if link is self._link:
            return
        tier = self._tier
        num_bytes = _HEADER_ROOM + (tier.slot_bytes if tier.copies_blocks else 0)
        self._memory = np.zeros((tier.blocks_per_part, num_bytes), np.uint8)
        self._headers = self._memory[:, _HEADER_ROOM - HEADER_BYTES : _HEADER_ROOM]
        self._copies = self._memory[:, _HEADER_ROOM:]
        link.register(self._memory)
        self._link = link

    def hand_over(self, start: Callable[[], None]) -> bool:
        """Return whether another thread goes on, because this one has the lowest priority."""
        if self._is_spent and self._tier.watch.soon(start):
            self._is_spent = False
            return True
        return False

    def close(self) -> None:
        """Do nothing: the threads share one store."""

    def carry_out(self, job: Job, part: range) -> None:
        """Ask the store for a part of a job."""
        tier, begin_s = self._tier, time.monotonic()
        self._kept = job.tier  # Mooncake has its memory from now on
        breaker = tier.breaker
        if job.operation in ("get", "put"):
            tier.watch.refuse_beside_late()
        if not breaker.may_try():
            raise left_alone(f"Mooncake at {tier.address}")
        try:
            with tier.links.borrowed() as link:
                with tier.watch.watched(job.until_s, self._spend):
                    codes = self._ask(link, job, part)
                failures = codes - _ANSWERS
                if failures - _NO_MASTER:
                    raise self._answered(failures)
            if failures:
                raise self._answered(failures)
        except TransferError as error:
            had_time = max(time.monotonic(), job.until_s) - begin_s >= FAIR_S
            if had_time and (num_times := breaker.failed()):
                logger.warning(FAILS, tier.address, with_times(error, num_times))
            raise
        if breaker.succeeded():
            logger.warning(ANSWERS_AGAIN, tier.address)
        if _NO_SPACE in codes:
            raise tier.without_room()

    def _spend(self) -> None:
        self._is_spent = True

    def _answered(self, failures: set[int]) -> TransferError:
        return TransferError(
            f"Mooncake at {self._tier.address} answers {sorted(failures)}: the log has its reasons."
            " Check the network, and that each server reaches the others by their shared_host"
        )

    def _ask(self, link: Link, job: Job, part: range) -> set[int]:
        """Write `job.ok` for a part, and return the codes that are no success."""
        store = link.store
        blocks, namespace = job.blocks, job.namespace
        named = [(int(blocks.groups[at]), blocks.hashes[at]) for at in part]
        prefixes = {group: namespace.key_prefix(group).decode() for group, _ in named}
        keys = [prefixes[group] + digest.hex() for group, digest in named]
        codes: Sequence[int]
        if job.operation == "contains":
            codes = store.batch_is_exist(keys)
            job.ok[part.start : part.stop] = np.array(codes) == 1
        elif job.operation == "delete":
            codes = store.batch_remove(keys, True)
            job.ok[part.start : part.stop] = [code in (_OK, _NOT_FOUND) for code in codes]
        else:
            self._use(link)
            move = self._put if job.operation == "put" else self._get
            codes = move(store, job, part, named, keys)
        return {code for code in codes if code < 0}

    def _buffers(self, slots: list[int]) -> tuple[list[list[int]], list[list[int]]]:
        """Return the addresses and the sizes of each value's buffers."""
        num_bytes, base = self._tier.slot_bytes, self._tier.base_address
        first, step = self._headers.ctypes.data, self._memory.shape[1]
        headers = range(first, first + step * len(slots), step)
        if self._tier.copies_blocks:
            return [[header] for header in headers], [[HEADER_BYTES + num_bytes]] * len(slots)
        pairs = zip(headers, slots, strict=True)
        pointers = [[header, base + slot * num_bytes] for header, slot in pairs]
        return pointers, [[HEADER_BYTES, num_bytes]] * len(slots)

    def _put(
        self, store: Any, job: Job, part: range, named: list[tuple[int, bytes]], keys: list[str]
    ) -> Sequence[int]:
        tier, rows = self._tier, self._tier._rows
        slots = job.host_slots[part.start : part.stop].tolist()
        if tier.copies_blocks:
            digests = []
            # Block by block, because one block stays in the processor's caches.
            for at, slot in enumerate(slots):
                digests += row_digests(rows, [slot]).tolist()
                self._copies[at] = rows[slot]
        else:
            digests = row_digests(rows, slots).tolist()
        headers = [
            job.namespace.header(*block, tier.slot_bytes, digest)
            for block, digest in zip(named, digests, strict=True)
        ]
        joined = np.frombuffer(b"".join(headers), np.uint8)
        self._headers[: len(slots)] = joined.reshape(-1, HEADER_BYTES)
        # A slot that was damaged on the host is not sent: see `sums`.
        sound = np.flatnonzero(tier.sums.are_sound(np.array(slots, np.int64))).tolist()
        if not sound:
            return []
        pointers, sizes = self._buffers(slots)
        codes: Sequence[int] = store.batch_put_from_multi_buffers(
            *([each[at] for at in sound] for each in (keys, pointers, sizes))
        )
        job.ok[[part[at] for at in sound]] = [code in (_OK, _EXISTS) for code in codes]
        return codes

    def _get(
        self, store: Any, job: Job, part: range, named: list[tuple[int, bytes]], keys: list[str]
    ) -> Sequence[int]:
        tier, rows = self._tier, self._tier._rows
        num_bytes, whole = tier.slot_bytes, HEADER_BYTES + tier.slot_bytes
        slots = job.host_slots[part.start : part.stop].tolist()
        codes: Sequence[int] = store.batch_get_into_multi_buffers(keys, *self._buffers(slots))
        expected = {}  # the checksums that the sound headers name, by index
        for at, block in enumerate(named):
            header = self._headers[at].tobytes()
            checksum = job.namespace.checksum(header, *block, num_bytes)
            if codes[at] == whole and checksum is not None:
                expected[at] = checksum
        # In the host slots, because nothing else may write there.
        if tier.copies_blocks:
            digests = []
            for at in expected:
                rows[slots[at]] = self._copies[at]
                digests += row_digests(rows, [slots[at]]).tolist()
        else:
            digests = row_digests(rows, [slots[at] for at in expected]).tolist()
        for (at, checksum), digest in zip(expected.items(), digests, strict=True):
            job.ok[part[at]] = digest == checksum
        wrong, has_master = [], True
        for at, key in enumerate(keys):
            is_wrong = codes[at] == _WRONG_SIZE
            # A master that is down takes seconds to show it, for each block.
            if has_master and codes[at] < 0 and codes[at] not in _ANSWERS | _NO_MASTER:
                # The transfer of an object that is too short fails as any other.
                size = store.get_size(key)
                is_wrong, has_master = 0 <= size != whole, size not in _NO_MASTER
            if is_wrong or (codes[at] >= 0 and not job.ok[part[at]]):
                wrong.append(key)
        if wrong:
            store.batch_remove(wrong, True)
            tier.count_wrong(len(wrong))
        tier.sums.record(np.array(slots, np.int64)[job.ok[part.start : part.stop]])
        return codes


def _store_class() -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ConfigError(
            f"the shared tier on Mooncake needs its module, which cannot be loaded ({error}): run "
            " pip install mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda, and "
            "install the system's libibverbs1, libnuma1 and libcurl4"
        ) from error
    return MooncakeDistributedStore


@contextmanager
def connect(url: str) -> Iterator[Any]:
    """Yield a store that has no memory of its own, and close it.

    Raises:
        ConfigError: `url` names no master, or Mooncake is not installed.
        TransferError: the master does not answer.
    """
    store = _set_up(_store_class(), parse(url), host="127.0.0.1", protocol="tcp")
    try:
        yield store
    finally:
        store.close()


def _set_up(  # noqa: PLR0913 - what Mooncake asks
    store_class: Callable[[], Any],
    address: str,
    *,
    host: str,
    protocol: str,
    devices: str = "",
    segment_bytes: int = 0,
) -> Any:
    """Return a store that is connected to its master.

    Raises:
        TransferError: the master does not answer.
    """
    check_answers(address)
    # The master may hang after it has answered. Then no other thread runs for 30 s in each try.
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    store = store_class()
    sizes = (segment_bytes, _LOCAL_BUFFER_BYTES)
    if code := store.setup(host, "P2PHANDSHAKE", *sizes, protocol, devices, address):
        raise TransferError(
            f"Mooncake at {address} cannot be reached ({code}): check its port, and that this "
            "machine has the memory and the devices that it is to use"
        )
    return store
