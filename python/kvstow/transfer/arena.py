"""The host arena: block-major memory in which one slot holds one block of all regions.

```
base (4 KiB aligned)
|slot 0: slot_bytes|pad to 4 KiB|slot 1: slot_bytes|pad to 4 KiB| ...
```

A block has one address, so a run of slots is one copy, and a lower tier writes a block in one I/O.

A tier may keep k blocks under one key. Then k slots form a run that begins at a multiple of 4 KiB.
The slots of a run are padded less, but evenly: slot i is still at base + i * stride.

```
|slot 0|pad|slot 1|pad| ... |slot k - 1|pad|slot k|pad| ...      k * stride is a multiple of 4 KiB
```

Processes that share an arena also share the checksums of its slots, which lie behind the slots.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import operator
import os
from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError, StateError, row_checksums
from kvstow.arguments import checked_int
from kvstow.closing import Closing
from kvstow.threads import map_on_threads
from kvstow.transfer.fork import FORKED, close_in_children
from kvstow.transfer.layout import MAX_ADDRESS, MAX_BLOCKS
from kvstow.transfer.shared import SharedMemory

SLOT_ALIGNMENT_BYTES = 4096
# Alignment of a slot within a run: a cache line, which also suits a device's widest access.
_MIN_ALIGNMENT_BYTES = 64
_MAX_PREFAULT_THREADS = 1024
_PREFAULT_CHUNK_BYTES = 64 << 20
_MADV_WIPEONFORK = 18  # of Linux; the module mmap has no name for it
_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
# Of shared memory: `checksums`, and both arrays of `device_sums`.
_SUM_BYTES_PER_SLOT = 3 * 8


class HostArena(Closing):
    """Memory for `num_slots` blocks. A page takes no memory until it is first written or read.

    A page has 2 MiB where the system has such pages to give, else 4 KiB.

    Slots are 0 to `num_slots - 1`, all usable. Use the arena as a context manager, or call `close`.

    A forked child does not have the memory. Its arena is closed, and a view from before the fork
    reads as zeros. If the arena lies in a file, the child must not touch such a view, because
    nothing is mapped there.

    Attributes:
        unproven: shape [num_slots], True for a slot that a file filled and that was not compared
            with its checksum yet. None if no file filled the arena.
        keeps_checksums: whether a mover compares what it loads with `checksums`.
    """

    unproven: npt.NDArray[np.bool_] | None = None
    keeps_checksums: bool = False
    _checksums: npt.NDArray[np.int64] | None = None
    _device_sums: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]] | None = None
    _is_forked: bool = False

    def __init__(  # noqa: PLR0913 - sizes, and where the memory comes from
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        slots_per_run: int = 1,
        num_prefault_threads: int = 0,
        prefault_cpus: Collection[int] = (),
        file: tuple[int, int] | None = None,
        shared: SharedMemory | None = None,
    ) -> None:
        """Map the memory.

        Args:
            num_slots: blocks the arena holds.
            slot_bytes: bytes of one block over all regions: `BlockLayout.slot_bytes`.
            slots_per_run: slots that belong together, `blocks_per_slot` of `OffloadScheduler`. It
                divides `num_slots`.
            num_prefault_threads: threads that touch every page now, so that no copy meets a page
                fault. 0 leaves that to the first writes.
            prefault_cpus: processors for those threads. The system takes the memory near them.
                Empty for any.
            file: (descriptor, offset) of a file that holds the slots; the offset is a multiple of
                4 KiB. The mapping is copy-on-write, so the file never changes. Nobody may overwrite
                or cut it: write a new file and rename it. None for memory that holds zeros.
            shared: memory of `shared_bytes(num_slots, slot_bytes, slots_per_run)` bytes that other
                processes map, too. Only its creator touches pages now, because the others may find
                stored blocks there. None for memory of this process.

        Raises:
            ConfigError: a number is outside its bounds, or the system has too little memory.
        """
        self._num_slots = checked_int(
            "num_slots", num_slots, 1, MAX_BLOCKS, "pass the number of host blocks"
        )
        self._slot_bytes = checked_int(
            "slot_bytes", slot_bytes, 1, MAX_ADDRESS, "pass BlockLayout.slot_bytes"
        )
        num_threads = checked_int(
            "num_prefault_threads",
            num_prefault_threads,
            0,
            _MAX_PREFAULT_THREADS,
            "pass about the number of cores, or 0 for no prefault",
        )
        self._slots_per_run = checked_int(
            "slots_per_run", slots_per_run, 1, self._num_slots, "pass the blocks per tier slot"
        )
        if self._num_slots % self._slots_per_run:
            raise ConfigError(
                f"num_slots is {self._num_slots}, not a multiple of slots_per_run "
                f"({self._slots_per_run}); pass the slots of whole runs"
            )
        _check_source(file, shared)
        self._slot_stride_bytes = slot_stride_bytes(self._slot_bytes, self._slots_per_run)
        self._map = self._map_memory(file, shared)
        _keep_private(self._map)
        _prefer_large_pages(self._map)
        memory = np.frombuffer(self._map, dtype=np.uint8)
        if shared is None:
            memory = memory[-self.num_bytes :]
        else:
            memory = self._split(memory, is_creator=shared.is_creator)
        self._base_address = memory.ctypes.data
        self._memory: npt.NDArray[np.uint8] | None = memory
        rows = memory.reshape(self._num_slots, self._slot_stride_bytes)
        self._slots: npt.NDArray[np.uint8] | None = rows[:, : self._slot_bytes]
        if num_threads and (shared is None or shared.is_creator):
            _touch_pages(memory, num_threads, prefault_cpus)
        self._on_close: list[Callable[[], None]] = []
        close_in_children(self)

    def _split(self, memory: npt.NDArray[np.uint8], *, is_creator: bool) -> npt.NDArray[np.uint8]:
        """Take the sums from the end of shared memory, and return the memory of the slots."""
        sums = memory[self.num_bytes :].view(np.uint64).reshape(3, self._num_slots)
        self._checksums, self._device_sums = sums[0].view(np.int64), (sums[1], sums[2])
        if is_creator:
            self._checksums.fill(-1)
        return memory[: self.num_bytes]

    def _map_memory(self, file: tuple[int, int] | None, shared: SharedMemory | None) -> mmap.mmap:
        """Map all slots at once."""
        num_bytes = self._num_slots * self._slot_stride_bytes
        try:
            if shared is not None:
                num_bytes += self._num_slots * _SUM_BYTES_PER_SLOT
                return mmap.mmap(shared.descriptor, num_bytes, mmap.MAP_SHARED, _READ_AND_WRITE)
            if file is not None:
                descriptor, offset = file
                # A mapping begins at a page, and pages may be larger than 4 KiB.
                before = offset % mmap.ALLOCATIONGRANULARITY
                return mmap.mmap(
                    descriptor,
                    before + num_bytes,
                    mmap.MAP_PRIVATE,
                    _READ_AND_WRITE,
                    offset=offset - before,
                )
            return mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, _READ_AND_WRITE)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"{self._num_slots} slots of {self._slot_stride_bytes} bytes are {num_bytes} bytes "
                f"({num_bytes / 2**30:.1f} GiB), and the system refused them ({error}); lower "
                "num_slots or slot_bytes (behind vLLM: lower cpu_bytes_to_use or num_cpu_blocks), "
                "or raise the memory limit (ulimit -v, ulimit -d)"
            ) from error

    @property
    def slots(self) -> npt.NDArray[np.uint8]:
        """View of all slots, shape [num_slots, slot_bytes], without their padding.

        Raises:
            StateError: the arena is closed.
        """
        self.check_open()
        assert self._slots is not None, "an open arena has slots"
        return self._slots

    @property
    def checksums(self) -> npt.NDArray[np.int64]:
        """CRC-32 of each slot's bytes as the movers recorded it, -1 if unknown; shape [num_slots].

        The arena keeps it for later movers.
        """
        if self._checksums is None:
            self._checksums = np.full(self._num_slots, -1, dtype=np.int64)
        return self._checksums

    @property
    def device_sums(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Each slot's sum as a device's kernels recorded it, and 1 if it is known, else 0.

        The arena keeps both arrays for later movers.
        """
        if self._device_sums is None:
            sums = np.zeros((2, self._num_slots), dtype=np.uint64)
            self._device_sums = (sums[0], sums[1])
        return self._device_sums

    @property
    def has_device_sums(self) -> bool:
        """Whether a mover records `device_sums`."""
        return self._device_sums is not None

    def compute_checksums(self, slots: npt.NDArray[np.integer]) -> npt.NDArray[np.uint32]:
        """Return the CRC-32 of what each of these slots holds now.

        The work runs without the interpreter lock.
        """
        return row_checksums(self.slots, slots)

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """All bytes, padding included: slot i begins at i * `slot_stride_bytes`.

        Raises:
            StateError: the arena is closed.
        """
        self.check_open()
        assert self._memory is not None, "an open arena has memory"
        return self._memory

    @property
    def num_slots(self) -> int:
        """Blocks the arena holds."""
        return self._num_slots

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot that a block uses."""
        return self._slot_bytes

    @property
    def slot_stride_bytes(self) -> int:
        """Bytes from the start of one slot to the next: `slot_bytes` rounded up to 4 KiB.

        With several slots per run it is rounded up to less, so that each run begins at a multiple
        of 4 KiB.
        """
        return self._slot_stride_bytes

    @property
    def slots_per_run(self) -> int:
        """Slots that belong together; the first of them begins at a multiple of 4 KiB."""
        return self._slots_per_run

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole mapping, padding included."""
        return self._num_slots * self._slot_stride_bytes

    @property
    def base_address(self) -> int:
        """Address of slot 0; a multiple of 4 KiB.

        Raises:
            StateError: the arena is closed.
        """
        self.check_open()
        return self._base_address

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this process was forked from that of the arena."""
        return self._slots is None

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from that of the arena, and so lacks its memory."""
        return self._is_forked

    def check_open(self) -> None:
        """Raise `StateError` if the arena is closed."""
        if self._is_forked:
            raise StateError(f"this HostArena {FORKED}; build a new one here")
        if self._slots is None:
            raise StateError("this HostArena is closed; build a new one")

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` before the memory is released, for example to unpin it."""
        self._on_close.append(callback)

    def close(self) -> None:
        """Release the memory; calling it again does nothing.

        Views that others hold (a mover, for example) stay valid. The memory goes with the last.
        """
        with contextlib.ExitStack() as closing:
            closing.callback(self._unmap)
            while self._on_close:  # an ExitStack calls all, then unmaps, even if one raises
                closing.callback(self._on_close.pop(0))

    def _unmap(self) -> None:
        self._drop_views()
        if self._is_forked:
            return  # see `close_in_child`
        # Python refuses while a view is alive, because its user would crash. The mapping goes with
        # its last view.
        with contextlib.suppress(BufferError):
            self._map.close()

    def _drop_views(self) -> None:
        self._slots = self._memory = self._checksums = self._device_sums = None

    def close_in_child(self) -> None:
        """Close the arena in a forked child; the parent calls what `on_close` registered."""
        self._is_forked = True
        self._on_close.clear()
        self._drop_views()
        # Never unmap here: the child lacks the mapping, and another may have its addresses.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._map))


def slot_stride_bytes(slot_bytes: int, slots_per_run: int = 1) -> int:
    """Return the bytes from one slot to the next, so that a run ends at a multiple of 4 KiB."""
    shared = math.gcd(slots_per_run, SLOT_ALIGNMENT_BYTES)
    alignment = max(SLOT_ALIGNMENT_BYTES // shared, _MIN_ALIGNMENT_BYTES)
    return -(-slot_bytes // alignment) * alignment


def slots_of_runs(runs: npt.NDArray[np.integer], slots_per_run: int) -> npt.NDArray[np.int64]:
    """Return the slots of an arena that these runs have, run by run."""
    first = runs.astype(np.int64)[:, None] * slots_per_run
    slots: npt.NDArray[np.int64] = (first + np.arange(slots_per_run)).reshape(-1)
    return slots


def shared_bytes(num_slots: int, slot_bytes: int, slots_per_run: int = 1) -> int:
    """Return the bytes of shared memory for an arena: its slots and their checksums."""
    return num_slots * (slot_stride_bytes(slot_bytes, slots_per_run) + _SUM_BYTES_PER_SLOT)


def _check_source(file: object, shared: object) -> None:
    """Refuse what names no file, and what is no memory of several processes."""
    if file is not None:
        try:
            _, _ = map(operator.index, file)  # type: ignore[call-overload]
        except (TypeError, ValueError):
            raise ConfigError(
                f"file is {file!r}; pass a descriptor and an offset, such as (3, 4096)"
            ) from None
    if shared is not None and not isinstance(shared, SharedMemory):
        raise ConfigError(f"shared is {shared!r}; pass what SharedMemory.create or open returns")


def _keep_private(memory: mmap.mmap) -> None:
    """Keep the memory out of forked children and core dumps.

    If a fork shared the memory, the child could write into it. If each side got a copy at its next
    write, the memory would double. The device would then keep pages that the parent no longer uses.
    """
    with contextlib.suppress(OSError):  # not every system knows this advice
        memory.madvise(mmap.MADV_DONTDUMP)
    try:
        memory.madvise(_MADV_WIPEONFORK)  # the child has zeros
    except OSError:  # the memory is that of a file
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_DONTFORK)


def _prefer_large_pages(memory: mmap.mmap) -> None:
    """Ask for pages of 2 MiB. Direct I/O pins each page, and a copy looks up its address."""
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)


def _touch_pages(memory: npt.NDArray[np.uint8], num_threads: int, cpus: Collection[int]) -> None:
    """Write a byte to each page. numpy's fill does so without the interpreter lock."""
    starts = range(0, len(memory), _PREFAULT_CHUNK_BYTES)

    def touch(start: int) -> None:
        memory[start : start + _PREFAULT_CHUNK_BYTES : SLOT_ALIGNMENT_BYTES].fill(0)

    def settle() -> None:
        if cpus:
            with contextlib.suppress(OSError):  # far memory is slower, but works
                os.sched_setaffinity(0, cpus)  # 0: this thread

    try:
        map_on_threads(touch, starts, num_threads, "kvstow-prefault", begin=settle)
    except RuntimeError as error:
        raise ConfigError(
            f"num_prefault_threads is {num_threads}, but the system starts no more threads "
            f"({error}); lower it, or raise the limit of threads (ulimit -u)"
        ) from error
