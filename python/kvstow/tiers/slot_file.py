"""The slot file: a disk tier in one preallocated file, checked, bounded, and warm after a restart.

```
PATH         slot 0 | slot 1 | ...          each as large as a host slot, at a multiple of 4 KiB
PATH.index   header | frame 0 | frame 1 ..  128 bytes a frame; also holds the lock
```

Neither file ever grows: both have their whole size from the start. In memory the frames take 128
bytes a slot. The accounting decides which slot holds which block; see `slot_store` for how the
bytes move, and `opening` for what happens to an existing file.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from dataclasses import dataclass
from numbers import Real
from typing import Final, Literal

import numpy as np

from kvstow._core import ConfigError, TransferError
from kvstow.arguments import checked_int, is_path
from kvstow.sizes import parse_bytes
from kvstow.tiers.files import Files
from kvstow.tiers.frame import MAX_LENGTH, Fingerprint
from kvstow.tiers.lanes import Lanes
from kvstow.tiers.opening import Wanted, index_bytes, open_slot_file
from kvstow.tiers.slot_index import SlotRecords, records_of
from kvstow.tiers.slot_store import SlotStore
from kvstow.tiers.sums import ArenaSums
from kvstow.tiers.ticket import Bools, TierTicket
from kvstow.tiers.tier import Checked, Mode, Tier, TierStats
from kvstow.transfer import HostArena
from kvstow.transfer.mover import Index

_MAX_THREADS = 256
_MAX_PATIENCE_S = 86400.0
_MAX_SLOTS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SlotFile:
    """Where the disk tier of one rank lies, and its bounds. `open` opens it.

    Attributes:
        path: the data file. The index is beside it, with `.index` at the end of its name. Give each
            rank a path of its own.
        max_bytes: bytes of both files together, at most, such as "200GiB".
        on_mismatch: what to do with a file of another fingerprint or slot size, or with a damaged
            header: "refuse" it, or "reset" (empty) it.
        num_threads: threads for puts, and as many for all other calls.
        max_in_flight_bytes: bytes that puts write at a time, and as many that gets read.
        max_quarantined_bytes: bytes in calls that do not return. With more, the tier goes off.
        stuck_after_s: seconds after which a call counts as one that does not return. A slow disk
            gets calls of 2 MiB or less.
    """

    path: str | os.PathLike[str]
    max_bytes: int | str
    on_mismatch: Literal["refuse", "reset"] = "refuse"
    num_threads: int = 4
    max_in_flight_bytes: int | str = 256 << 20
    max_quarantined_bytes: int | str = 256 << 20
    stuck_after_s: float = 30.0

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a value can never be right."""
        if not is_path(self.path):
            raise ConfigError(f"path is {self.path!r}; pass the name of a file")
        for name in ("max_bytes", "max_in_flight_bytes", "max_quarantined_bytes"):
            parse_bytes(getattr(self, name), name=name)
        on_mismatch: object = self.on_mismatch
        if not isinstance(on_mismatch, str) or on_mismatch not in {"refuse", "reset"}:
            raise ConfigError(
                f"on_mismatch is {self.on_mismatch!r}; pass 'refuse', or 'reset' to empty the file"
            )
        checked_int(
            "num_threads", self.num_threads, 1, _MAX_THREADS, "pass the calls that may wait at once"
        )
        stuck_after_s = self.stuck_after_s
        if not isinstance(stuck_after_s, Real) or not 0.0 < stuck_after_s <= _MAX_PATIENCE_S:
            raise ConfigError(
                f"stuck_after_s is {self.stuck_after_s!r}, outside 0 to {_MAX_PATIENCE_S}; pass "
                "the seconds after which a read of a few MiB has surely failed"
            )

    @staticmethod
    def bytes_for(num_slots: int, slot_bytes: int) -> int:
        """Return the least `max_bytes` for a number of slots."""
        return num_slots * slot_bytes + index_bytes(num_slots)

    def open(
        self, arena: HostArena, fingerprint: Fingerprint, *, files: Files | None = None
    ) -> SlotTier:
        """Open or create the file, for the slots of an arena.

        Args:
            arena: the host side. A slot of the file holds one run of its slots.
            fingerprint: whose KV it is.
            files: the file calls, for tests.

        Raises:
            ConfigError: the place is unsuitable, too small, or holds something else.
            SlotFileMismatch: it holds blocks of something else, or its header is damaged.
            StateError: it is open already, here or in another process; the arena is closed; or the
                system starts no more threads.
        """
        return SlotTier(self, arena, fingerprint, Files() if files is None else files)


class SlotTier(Tier):
    """An open slot file. Use it as a context manager, or call `close`.

    Attributes:
        path: the data file.
        num_slots: its slots.
        is_direct: whether reads and writes bypass the page cache.
        not_direct: why they do not; None if they do.
        num_dropped_records: frames in the index that did not count at the opening, because they
            were damaged, foreign, or of an earlier generation.
    """

    def __init__(
        self, config: SlotFile, arena: HostArena, fingerprint: Fingerprint, files: Files
    ) -> None:
        """Open the file; see `SlotFile.open`."""
        arena.check_open()
        in_flight = parse_bytes(config.max_in_flight_bytes, name="max_in_flight_bytes")
        wanted = _wanted(config, arena, fingerprint, in_flight)
        num_threads = min(int(config.num_threads), in_flight // wanted.slot_bytes)
        lanes = Lanes(
            num_threads,
            stuck_after_s=float(config.stuck_after_s),
            max_quarantined_bytes=parse_bytes(config.max_quarantined_bytes),
            now=files.now,
        )
        store: SlotStore | None = None
        undo = contextlib.ExitStack()
        try:
            opened = open_slot_file(files, wanted, undo)
            super().__init__(arena, opened.header.num_slots)
            undo.callback(lanes.abort)
            lanes.start()
            self._store = store = SlotStore(
                files,
                opened,
                self._rows,
                ArenaSums(arena),
                lanes,
                most_bytes=in_flight // num_threads,
            )
            # At interpreter exit too: a thread must not write while memory is taken down around it.
            self._stop = weakref.finalize(self, store.close)
        except BaseException:  # an interrupt, at any line: let go of the lock
            if store is None:
                undo.close()
            else:
                store.close()
            raise
        self.path: Final = wanted.path
        self.num_slots: Final = opened.header.num_slots
        self.not_direct: Final = opened.not_direct
        self.is_direct: Final = opened.not_direct is None
        self.num_dropped_records: Final = opened.num_dropped

    def records(self) -> SlotRecords:
        """Return what the file holds, for the accounting.

        Raises:
            StateError: a job has not ended, which may change that; or the tier is closed.
        """
        self._check_open()
        return records_of(self._store.held())

    def holds(self, blocks: Checked) -> Bools:
        """Return which blocks the file has in their slots now, as far as the frames say."""
        return self._store.holds(blocks)

    def renew(self, fingerprint: Fingerprint | None = None) -> TierTicket:
        """Drop every block, durably: draw a new generation, and sync it.

        Call it when weights change in place. Blocks of such a generation are never warm after a
        restart, because the same weights may not come back.

        Args:
            fingerprint: what the blocks are from now on, if that is known. Then they are warm
                under this fingerprint after a restart.

        Returns:
            A ticket of one block: True once no loss of power can bring back the old blocks. Until
            then write and read nothing. If it fails, the tier is off.

        Raises:
            StateError: the tier is closed, or belongs to the parent process.
        """
        self._check_open()
        return self._store.renew(fingerprint)

    @property
    def mode(self) -> Mode:
        """What the tier still does."""
        return self._store.mode

    @property
    def error(self) -> TransferError | None:
        """Why the tier is not on; None while it is."""
        return self._store.error

    def stats(self) -> TierStats:
        """Return what the tier has done, and what it does now."""
        return self._store.stats

    def close(self) -> None:
        """Carry out every job, and close the file; see `Tier.close`."""
        self._store.close()
        # Only now: if an interrupt cuts the close short, the finalizer goes on with it.
        self._stop.detach()

    def _check_open(self) -> None:
        self._store.check_open()

    def _put(self, blocks: Checked, host_slots: Index, deadline: float | None) -> TierTicket:
        return self._store.submit("put", blocks, host_slots, deadline)

    def _get(self, blocks: Checked, host_slots: Index, deadline: float | None) -> TierTicket:
        return self._store.submit("get", blocks, host_slots, deadline)

    def _delete(self, blocks: Checked) -> TierTicket:
        return self._store.submit("delete", blocks, np.empty(0, np.int64), None)


def _wanted(
    config: SlotFile, arena: HostArena, fingerprint: Fingerprint, in_flight_bytes: int
) -> Wanted:
    """Return what the tier expects of its file, with as many slots as fit.

    Raises:
        ConfigError: the slots of the arena are too large, or too small for so many bytes.
    """
    slot_bytes = arena.slot_stride_bytes * arena.slots_per_run
    if not slot_bytes <= min(in_flight_bytes, MAX_LENGTH):
        raise ConfigError(
            f"a slot of the arena has {slot_bytes} bytes, but max_in_flight_bytes is "
            f"{in_flight_bytes} and a slot may have {MAX_LENGTH}; raise the bound, or use fewer "
            "blocks per slot"
        )
    wanted = Wanted(
        os.fspath(config.path),
        parse_bytes(config.max_bytes, name="max_bytes"),
        slot_bytes,
        fingerprint,
        may_reset=config.on_mismatch == "reset",
    )
    if wanted.num_slots > _MAX_SLOTS:
        raise ConfigError(
            f"max_bytes is {wanted.max_bytes}, which makes {wanted.num_slots} slots, more than "
            f"{_MAX_SLOTS}; lower it, or use more blocks per slot"
        )
    return wanted
