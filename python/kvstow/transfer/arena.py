"""The host arena: block-major memory in which one slot holds one block of all regions.

```
base (4 KiB aligned)
|slot 0: slot_bytes|pad to 4 KiB|slot 1: slot_bytes|pad to 4 KiB| ...
```

One address per block, one copy per run of slots, one I/O per block for the tiers below.

Where a tier keeps k blocks under one key, k slots make a run that begins at 4 KiB, and lie in it as
tight as even spacing allows: slot i is at base + i * stride all the same.

```
|slot 0|pad|slot 1|pad| ... |slot k - 1|pad|slot k|pad| ...      k * stride is a multiple of 4 KiB
```
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
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

SLOT_ALIGNMENT_BYTES = 4096
# Of a slot within a run: a cache line, and what a device's widest access asks for.
_MIN_ALIGNMENT_BYTES = 64
_MAX_PREFAULT_THREADS = 1024
_PREFAULT_CHUNK_BYTES = 64 << 20
_MADV_WIPEONFORK = 18  # Linux's; `mmap` has no name for it
_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class HostArena(Closing):
    """Memory for `num_slots` blocks; a page costs nothing until it is first written, or read.

    Attributes:
        unproven: of an arena that a file has filled, which slots hold what nobody has compared with
            its checksum yet; None where there are none, as in memory of its own.

    Slots are 0 to `num_slots - 1`, all usable. Use it as a context manager, or call `close`.

    The memory is this process's own. In a forked child the arena is closed, and what the child may
    still hold of it (a view taken before) reads as zeros; of an arena that lies in a file there is
    nothing at all there, and a view must not be touched.
    """

    def __init__(  # noqa: PLR0913 - sizes, and where the memory comes from
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        slots_per_run: int = 1,
        num_prefault_threads: int = 0,
        prefault_cpus: Collection[int] = (),
        file: tuple[int, int] | None = None,
    ) -> None:
        """Map the memory.

        Args:
            num_slots: blocks the arena holds.
            slot_bytes: bytes of one block over all regions: `BlockLayout.slot_bytes`.
            slots_per_run: slots that belong together, `OffloadScheduler`'s `blocks_per_slot`; it
                divides `num_slots`.
            num_prefault_threads: have this many threads touch every page now, so that no copy
                meets a page fault; 0 leaves it to the first writes.
            prefault_cpus: have those threads run on these processors, near which the system then
                takes the memory; empty for any.
            file: the descriptor of a file and where in it slot 0 begins, at a multiple of 4 KiB:
                the slots hold at once what is there. Copy-on-write: the file never changes, and as
                it must not be overwritten or cut either, a new one takes its name. None: memory
                that holds zeros.

        Raises:
            ConfigError: a number outside its bounds, or more memory than the system gives.
        """
        self._num_slots = checked_int(
            "num_slots", num_slots, 1, MAX_BLOCKS, "pass the host blocks wanted"
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
            "slots_per_run", slots_per_run, 1, self._num_slots, "pass the blocks of a tier's slot"
        )
        if self._num_slots % self._slots_per_run:
            raise ConfigError(
                f"num_slots is {self._num_slots}, no multiple of slots_per_run "
                f"{self._slots_per_run}; pass the slots of whole runs"
            )
        self._slot_stride_bytes = slot_stride_bytes(self._slot_bytes, self._slots_per_run)
        self.unproven: npt.NDArray[np.bool_] | None = None
        self._checksums: npt.NDArray[np.int64] | None = None
        self._device_sums: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]] | None = None
        self._is_forked = False
        self._map = self._map_memory(file)
        _keep_private(self._map)
        memory = np.frombuffer(self._map, dtype=np.uint8)[-self.num_bytes :]
        self._base_address = memory.ctypes.data
        self._memory: npt.NDArray[np.uint8] | None = memory
        rows = memory.reshape(self._num_slots, self._slot_stride_bytes)
        self._slots: npt.NDArray[np.uint8] | None = rows[:, : self._slot_bytes]
        if num_threads:
            _touch_pages(memory, num_threads, prefault_cpus)
        self._on_close: list[Callable[[], None]] = []
        close_in_children(self)

    def _map_memory(self, file: tuple[int, int] | None) -> mmap.mmap:
        """Ask the system for all slots at once."""
        num_bytes = self._num_slots * self._slot_stride_bytes
        try:
            if file is not None:
                descriptor, offset = file
                # From where a page of this machine begins, which may be larger than 4 KiB.
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
                f"the system refused {num_bytes} bytes ({num_bytes / 2**30:.1f} GiB) for "
                f"{self._num_slots} slots of {self._slot_stride_bytes} bytes ({error}); lower "
                "num_slots or slot_bytes, or raise the memory limit"
            ) from error

    @property
    def slots(self) -> npt.NDArray[np.uint8]:
        """A view of shape [num_slots, slot_bytes], strided where slots are padded to 4 KiB.

        Raises:
            StateError: the arena is closed.
        """
        self.check_open()
        assert self._slots is not None, "an open arena has slots"
        return self._slots

    @property
    def checksums(self) -> npt.NDArray[np.int64]:
        """Per slot CRC-32 of all its bytes, -1 where it is not known: what its movers write down.

        It stays with the memory when movers go and others come.
        """
        if self._checksums is None:
            self._checksums = np.full(self._num_slots, -1, dtype=np.int64)
        return self._checksums

    @property
    def device_sums(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Per slot the sum that a device's kernels make of it, and 1 where it is known, else 0.

        It stays with the memory, as `checksums` do.
        """
        if self._device_sums is None:
            sums = np.zeros((2, self._num_slots), dtype=np.uint64)
            self._device_sums = (sums[0], sums[1])
        return self._device_sums

    @property
    def has_device_sums(self) -> bool:
        """Whether a mover keeps `device_sums`."""
        return self._device_sums is not None

    def compute_checksums(self, slots: npt.NDArray[np.integer]) -> npt.NDArray[np.uint32]:
        """Return the CRC-32 of what each of these slots holds now.

        The work runs without the interpreter lock.
        """
        return row_checksums(self.slots, slots)

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """All of it, padding included: slot i begins at i * `slot_stride_bytes`.

        Raises:
            StateError: the arena is closed.
        """
        _ = self.slots
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
        """From the start of one slot to the next: `slot_bytes` rounded up to 4 KiB.

        In runs of several slots to less, such that each run begins at a multiple of 4 KiB.
        """
        return self._slot_stride_bytes

    @property
    def slots_per_run(self) -> int:
        """Slots that belong together, the first of them at a multiple of 4 KiB."""
        return self._slots_per_run

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole mapping, padding included."""
        return self._num_slots * self._slot_stride_bytes

    @property
    def base_address(self) -> int:
        """Where slot 0 begins; a multiple of 4 KiB.

        Raises:
            StateError: the arena is closed.
        """
        _ = self.slots
        return self._base_address

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this process was forked from the arena's."""
        return self._slots is None

    def check_open(self) -> None:
        """Raise `StateError` if the arena is closed."""
        if self._is_forked:
            raise StateError(f"this HostArena {FORKED}; build a new one here")
        if self._slots is None:
            raise StateError("this HostArena is closed; build a new one")

    def on_close(self, callback: Callable[[], None]) -> None:
        """Have this called before the memory goes, to unpin it, say."""
        self._on_close.append(callback)

    def close(self) -> None:
        """Give the memory back; calling it again does nothing.

        Views that others still hold (a mover's, say) stay valid: the memory goes with the last.
        """
        with contextlib.ExitStack() as closing:
            closing.callback(self._unmap)
            while self._on_close:  # all of them, and then the memory goes, whatever one raises
                closing.callback(self._on_close.pop(0))

    def _unmap(self) -> None:
        self._slots = self._memory = None
        if self._is_forked:
            return  # see `close_in_child`
        # Refused while a view is alive, because unmapping under it would crash whoever uses it; the
        # mapping goes when its last view does.
        with contextlib.suppress(BufferError):
            self._map.close()

    def close_in_child(self) -> None:
        """Close it in a forked child, where what to do at the end is the parent's to do."""
        self._is_forked = True
        self._on_close.clear()
        self._slots = self._memory = None
        # Never unmapped here: of a mapping that no child has, its place may be another's by then.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._map))


def slot_stride_bytes(slot_bytes: int, slots_per_run: int = 1) -> int:
    """From one slot to the next, such that a run of them ends at a multiple of 4 KiB."""
    shared = math.gcd(slots_per_run, SLOT_ALIGNMENT_BYTES)
    alignment = max(SLOT_ALIGNMENT_BYTES // shared, _MIN_ALIGNMENT_BYTES)
    return -(-slot_bytes // alignment) * alignment


def _keep_private(memory: mmap.mmap) -> None:
    """Keep the memory out of forked children and core dumps.

    A fork that shared it would let a child write into it. One that copied it on the next write
    would double it, and take from a device the pages that it has pinned.
    """
    with contextlib.suppress(OSError):  # a system that does not know it, works without
        memory.madvise(mmap.MADV_DONTDUMP)
    try:
        memory.madvise(_MADV_WIPEONFORK)  # the child has zeros
    except OSError:  # the memory is a file's
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_DONTFORK)


def _touch_pages(memory: npt.NDArray[np.uint8], num_threads: int, cpus: Collection[int]) -> None:
    """Write a byte to each page, chunk by chunk; numpy's fill does so without the lock."""
    starts = range(0, len(memory), _PREFAULT_CHUNK_BYTES)

    def touch(start: int) -> None:
        memory[start : start + _PREFAULT_CHUNK_BYTES : SLOT_ALIGNMENT_BYTES].fill(0)

    def settle() -> None:
        if cpus:
            with contextlib.suppress(OSError):  # elsewhere the memory is only slower
                os.sched_setaffinity(0, cpus)  # of this thread

    try:
        map_on_threads(touch, starts, num_threads, "kvstow-prefault", begin=settle)
    except RuntimeError as error:
        raise ConfigError(
            f"the threads that touch the memory cannot be started ({error}); lower "
            "num_prefault_threads, or raise the limit of threads (ulimit -u)"
        ) from error
