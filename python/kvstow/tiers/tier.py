"""The interface of a tier below the host: jobs of whole host slots, each with a ticket.

A host slot of a tier is a run of the arena: `slots_per_run` slots that hold one key. So tier jobs
name the slots that the scheduler names.

A tier may lose anything and must never be wrong. Each block is framed with its own key, so a valid
block under another key is a miss. What every tier does:

- It never blocks its caller, and the bytes that it moves at a time are bounded.
- A block is True in the answer only if it was written whole, or read and proven. What another host
  slot receives in the same job does not matter to it.
- An answer after the deadline is False for every block. Even then the tier may touch the host slots
  until the ticket `has_ended`.
- After a failed `get` the content of its host slot is undefined.

The caller reserves a job's host slots, and its places in the tier, until the ticket has ended. A
`put` whose slot changes meanwhile may keep the wrong block under the key.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError, StateError, TransferError
from kvstow.arguments import checked_int
from kvstow.closing import Closing
from kvstow.tiers.ticket import TierTicket
from kvstow.transfer import HostArena
from kvstow.transfer.mover import Index, Ints, checked_ids, refuse_repeated

MAX_HASH_BYTES: Final = 32
_MAX_GROUP: Final = 2**32 - 1
_MAX_SEQUENCE: Final = 2**63 - 1

Rows: TypeAlias = npt.NDArray[np.uint8]
"""Host slots of a tier, one a row."""
Mode: TypeAlias = Literal["on", "read_only", "off"]
"""What a tier still does: all; gets only; nothing, so that each job fails at once."""
MODES: Final[tuple[Mode, ...]] = ("off", "read_only", "on")
"""The modes, from the one that does nothing to the one that does all."""


def least_mode(modes: Iterable[Mode]) -> Mode:
    """Return what all parts still do, each of which has one of these modes; "off" without any."""
    return min(modes, key=MODES.index, default="off")


@dataclass(frozen=True, slots=True, eq=False)
class TierBlocks:
    """The blocks of one job, as columns of equal length.

    Attributes:
        hashes: the block hashes, 1 to 32 bytes, all of one width.
        groups: shape [n], the group of each.
        parents: the hash of the block before each in its prefix, None where there is none or it is
            not known. A tier only keeps it. None for no parents at all.
        slots: shape [n], the place of each in the tier. None for a shared store, which finds blocks
            by their key.
        sequence: number of the write, the same on all ranks, and larger than that of any write
            before. A slot that several ranks hold is whole only if they hold the same write.
    """

    hashes: Sequence[bytes]
    groups: Ints
    parents: Sequence[bytes | None] | None = None
    slots: Ints | None = None
    sequence: int = 0

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.hashes)

    def some(self, at: npt.NDArray[np.intp]) -> TierBlocks:
        """Return the blocks at these places."""
        parents, slots = self.parents, self.slots
        return TierBlocks(
            [self.hashes[index] for index in at],
            np.asarray(self.groups)[at],
            None if parents is None else [parents[index] for index in at],
            None if slots is None else np.asarray(slots)[at],
            self.sequence,
        )


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier has done since it was opened, and what it does now.

    Attributes:
        put_blocks: blocks that were written.
        put_bytes: their bytes.
        failed_puts: blocks that were not written, late ones included.
        got_blocks: blocks that were read and proven.
        got_bytes: their bytes.
        failed_gets: blocks that were not returned, late ones included.
        mismatched_blocks: of the failed gets, those whose frame or bytes were not what the caller
            asked for.
        in_flight_bytes: bytes that the tier reads or writes now.
        quarantined_bytes: of these, bytes of calls that have not returned for too long.
    """

    put_blocks: int = 0
    put_bytes: int = 0
    failed_puts: int = 0
    got_blocks: int = 0
    got_bytes: int = 0
    failed_gets: int = 0
    mismatched_blocks: int = 0
    in_flight_bytes: int = 0
    quarantined_bytes: int = 0


def count_end(
    counts: Counter[str], kind: str, num_ok: int, num_failed: int, slot_bytes: int
) -> None:
    """Add the end of a job to the counts of a `TierStats`, which has puts and gets only."""
    if kind == "put":
        counts["put_blocks"] += num_ok
        counts["put_bytes"] += num_ok * slot_bytes
        counts["failed_puts"] += num_failed
    elif kind == "get":
        counts["got_blocks"] += num_ok
        counts["got_bytes"] += num_ok * slot_bytes
        counts["failed_gets"] += num_failed


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """The blocks of a job after their check. The arrays are the tier's own.

    Attributes:
        hashes: the hashes, as given.
        width: bytes of a hash.
        groups: shape [n].
        parents: the parents, as given.
        slots: shape [n], places in the tier; None for a shared store.
        sequence: number of the write.
    """

    hashes: Sequence[bytes]
    width: int
    groups: npt.NDArray[np.uint32]
    parents: Sequence[bytes | None] | None
    slots: Index | None
    sequence: int

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.hashes)

    def some(self, at: npt.NDArray[np.intp]) -> Checked:
        """Return the blocks at these places."""
        parents, slots = self.parents, self.slots
        return Checked(
            [self.hashes[index] for index in at],
            self.width,
            self.groups[at],
            None if parents is None else [parents[index] for index in at],
            None if slots is None else slots[at],
            self.sequence,
        )


class Tier(Closing):
    """Keeps blocks of one host arena.

    This class checks the arguments before anything begins, so a call that raises changes nothing.
    Its subclasses move the bytes.

    Attributes:
        arena: the host side.
        slot_bytes: bytes of a host slot of the tier: a run of the arena, padding included.
        num_host_slots: host slots of the tier: runs of the arena.
    """

    def __init__(self, arena: HostArena, num_slots: int | None) -> None:
        """Tie a tier to an arena.

        Args:
            arena: the host side.
            num_slots: places in the tier; None for a shared store.

        Raises:
            StateError: the arena is closed.
        """
        arena.check_open()
        self.arena: Final = arena
        self.slot_bytes: Final = arena.slot_stride_bytes * arena.slots_per_run
        self.num_host_slots: Final = arena.num_slots // arena.slots_per_run
        self._num_slots = num_slots
        # A view keeps the memory mapped, even if a call never returns.
        self._rows = arena.memory.reshape(self.num_host_slots, self.slot_bytes)

    def put(
        self, blocks: TierBlocks, host_slots: Ints, *, deadline: float | None = None
    ) -> TierTicket:
        """Write host slot `host_slots[i]` as block i, for every i.

        Args:
            blocks: the blocks. The tier keeps the sequences, so do not change them.
            host_slots: shape [n], each at most once; copied.
            deadline: time of `time.monotonic` after which an answer counts as late; None for none.

        Returns:
            A ticket. Its `ok` is True for each block that a `get` may now find.

        Raises:
            ConfigError: columns of unequal length, a hash that is none, a deadline that is none.
            InvalidBlock: a slot out of range, or given twice.
            StateError: the tier or its arena is closed, or belongs to the parent process.
        """
        checked = self._checked(blocks)
        return self._put(checked, self._checked_host(host_slots, len(checked)), deadline)

    def get(
        self, blocks: TierBlocks, host_slots: Ints, *, deadline: float | None = None
    ) -> TierTicket:
        """Read block i into host slot `host_slots[i]`, for every i.

        Arguments and errors are those of `put`.

        Returns:
            A ticket. Its `ok` is True for each block that arrived and was proven. The content of
            the other host slots is undefined.
        """
        checked = self._checked(blocks)
        return self._get(checked, self._checked_host(host_slots, len(checked)), deadline)

    def delete(self, blocks: TierBlocks) -> TierTicket:
        """Drop blocks, so that no later `get` finds them.

        Returns:
            A ticket. Its `ok` is True for each block that the tier holds no more.

        Raises:
            ConfigError: as `put`.
            InvalidBlock: as `put`.
            StateError: as `put`.
        """
        return self._delete(self._checked(blocks))

    @property
    @abstractmethod
    def mode(self) -> Mode:
        """What the tier still does. It only ever falls: from on to read_only to off."""

    @property
    @abstractmethod
    def error(self) -> TransferError | None:
        """Why the tier is not on; None while it is."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Return what the tier has done, and what it does now."""

    @abstractmethod
    def close(self) -> None:
        """Carry out every job and stop; calling it again does nothing.

        A job whose call does not return is given up after a while. Its ticket does not end then,
        and the memory stays mapped. After an interrupt the tier accepts no job; call `close` again.
        """

    @abstractmethod
    def _check_open(self) -> None:
        """Raise `StateError` after `close`."""

    @abstractmethod
    def _put(self, blocks: Checked, host_slots: Index, deadline: float | None) -> TierTicket:
        """Begin to write checked blocks."""

    @abstractmethod
    def _get(self, blocks: Checked, host_slots: Index, deadline: float | None) -> TierTicket:
        """Begin to read checked blocks."""

    @abstractmethod
    def _delete(self, blocks: Checked) -> TierTicket:
        """Drop checked blocks."""

    def _checked(self, blocks: TierBlocks) -> Checked:
        """Return the blocks of a job, or raise; see `put` for the rules."""
        self._check_open()
        self.arena.check_open()
        groups = checked_ids("blocks.groups", blocks.groups, _MAX_GROUP + 1).astype(np.uint32)
        slots = None
        if self._num_slots is not None:
            if blocks.slots is None:
                raise ConfigError("blocks.slots is None, but this tier has slots; pass one a block")
            slots = checked_ids("blocks.slots", blocks.slots, self._num_slots)
            refuse_repeated("blocks.slots", slots)
        columns = {"groups": groups, "parents": blocks.parents, "slots": slots}
        for name, column in columns.items():
            _check_length(name, column, len(blocks.hashes))
        sequence = checked_int(
            "blocks.sequence", blocks.sequence, 0, _MAX_SEQUENCE, "pass the number of the write"
        )
        width = _width(blocks.hashes, blocks.parents)
        return Checked(blocks.hashes, width, groups, blocks.parents, slots, sequence)

    def _checked_host(self, host_slots: Ints, num_blocks: int) -> Index:
        """Return the host slots of a job, or raise; see `put` for the rules."""
        host = checked_ids("host_slots", host_slots, self.num_host_slots)
        refuse_repeated("host_slots", host)
        _check_length("host_slots", host, num_blocks)
        return host


class SharedTier(Tier):
    """A tier that other servers share, which finds blocks by their key."""

    def __init__(self, arena: HostArena) -> None:
        """Tie a tier to an arena; see `Tier`."""
        super().__init__(arena, None)

    def contains(self, blocks: TierBlocks, *, deadline: float | None = None) -> TierTicket:
        """Ask which blocks a `get` may find.

        Returns:
            A ticket. Its `ok` is True for each block that the store has now. It may lose the block
            before a `get`.

        Raises:
            ConfigError: as `put`.
            StateError: as `put`.
        """
        return self._contains(self._checked(blocks), deadline)

    @abstractmethod
    def rename(self, namespace: bytes) -> None:
        """Use another namespace for jobs from now on. Those under way keep theirs.

        A reset of the cache calls it, because the weights may have changed.

        Raises:
            ConfigError: it is not 16 bytes.
        """

    @abstractmethod
    def _contains(self, blocks: Checked, deadline: float | None) -> TierTicket:
        """Begin to ask for checked blocks."""


def _check_length(name: str, column: Sized | None, num_blocks: int) -> None:
    if column is not None and len(column) != num_blocks:
        raise ConfigError(f"{len(column)} {name} but {num_blocks} hashes; pass one for each block")


def _width(hashes: Sequence[bytes], parents: Sequence[bytes | None] | None) -> int:
    """Return the bytes of a hash, or raise unless all have that many."""
    known = hashes if parents is None else [*hashes, *[it for it in parents if it is not None]]
    # Most jobs pass here, without a call for each block.
    if set(map(type, known)) == {bytes}:
        widths = set(map(len, known))
        if len(widths) == 1 and 1 <= max(widths) <= MAX_HASH_BYTES:
            return widths.pop()
    widths = set(map(_width_of, known))
    if len(widths) > 1:
        raise ConfigError(
            f"the hashes have {', '.join(map(str, sorted(widths)))} bytes, expected one width: "
            "pass the digests of one hash function"
        )
    return widths.pop() if widths else 0


def _width_of(digest: object) -> int:
    if not isinstance(digest, bytes) or not 1 <= len(digest) <= MAX_HASH_BYTES:
        raise ConfigError(
            f"a block hash is {digest!r}, expected 1 to {MAX_HASH_BYTES} bytes: pass digests"
        )
    return len(digest)


def without_thread(error: BaseException) -> StateError:
    """Return the error of a tier for which the system starts no thread."""
    return StateError(
        f"the system does not start a thread of the tier ({error}); raise the limit of threads "
        "(ulimit -u, pids.max of the container)"
    )
