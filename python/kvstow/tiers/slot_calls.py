"""The file calls of an open slot file, in runs of consecutive slots."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol, TypeAlias

import numpy as np

from kvstow.tiers.files import Buffers, Files, close_last
from kvstow.tiers.frame import FRAME_BYTES, Frames
from kvstow.tiers.slot_index import HEADER_BYTES, Header, write_header
from kvstow.tiers.ticket import Bools
from kvstow.tiers.tier import Rows
from kvstow.transfer.mover import Index

_Call: TypeAlias = Callable[[int, Buffers, int], int]
# Slots of one call: the system's limit of buffers in it.
_MAX_RUN = 1024


class Pacer(Protocol):
    """Who bounds the bytes of a call."""

    def most_bytes(self) -> int:
        """Return how many bytes the next call may move."""

    def note_return(self, num_bytes: int) -> None:
        """Note that a call has returned, and has moved so many bytes."""


class Unbounded:
    """The pacer of a caller that waits for each call as long as it takes."""

    def most_bytes(self) -> int:
        """Return more than any caller moves."""
        return 1 << 40

    def note_return(self, num_bytes: int) -> None:
        """Do nothing."""


class SlotCalls:
    """Both files and the host slots. Each method raises `OSError` if a call fails."""

    def __init__(self, files: Files, data: int, index: int, rows: Rows, pacer: Pacer) -> None:
        """Take over the descriptors `data` and `index`. A slot has the bytes of a row."""
        self._files = files
        self._data, self._index = data, index
        self._opened = [index, data]
        self._rows, self._pacer = rows, pacer
        self._slot_bytes: int = rows.shape[1]

    def write_header(self, header: Header) -> None:
        """Write and sync the header."""
        write_header(self._files, self._index, header)

    def write_data(self, slots: Index, host: Index, *, may_go_on: Callable[[], bool]) -> int:
        """Write host slots to slots, which ascend.

        Args:
            slots: shape [n].
            host: shape [n].
            may_go_on: whether to make another call.

        Returns:
            How many were written, the first ones.
        """
        for begin, end in _runs(slots, self._slots_per_call):
            if not may_go_on():
                return begin
            self._move(self._files.write, int(slots[begin]), host[begin:end])
        return len(slots)

    def write_frames(self, slots: Index, frames: Frames) -> None:
        """Write the frames of slots, which ascend."""
        data = frames.view(np.uint8)
        for begin, end in _runs(slots, lambda: _MAX_RUN):
            part = data[begin * FRAME_BYTES : end * FRAME_BYTES]
            offset = HEADER_BYTES + int(slots[begin]) * FRAME_BYTES
            self._fully(self._files.write, self._index, [part], len(part), offset)

    def read_data(
        self,
        slots: Index,
        host: Index,
        *,
        report: Callable[[OSError | None], None],
        may_go_on: Callable[[], bool],
    ) -> tuple[Bools, OSError | None]:
        """Read slots, which ascend, into host slots. A slot that fails ends no other.

        Args:
            slots: shape [n]. One may be named twice.
            host: shape [n].
            report: called with the error of each call, None for success.
            may_go_on: whether to make another call.

        Returns:
            Which slots arrived, and the last error.
        """
        arrived: Bools = np.zeros(len(slots), np.bool_)
        runs, again = _runs(slots, self._slots_per_call), list[tuple[int, int]]()
        last: OSError | None = None
        while may_go_on() and (run := again.pop() if again else next(runs, None)) is not None:
            begin, end = run
            try:
                self._move(self._files.read, int(slots[begin]), host[begin:end])
            except OSError as error:
                last = error
                report(error)
                if end - begin > 1:
                    again = [(one, one + 1) for one in reversed(range(begin, end))]
            else:
                arrived[begin:end] = True
                report(None)
        return arrived, last

    def close(self) -> None:
        """Close the files, which releases the lock; a second call does nothing."""
        self._data = self._index = -1
        while self._opened:
            # A close that fails has closed the descriptor, too. A write that is lost is a miss.
            with suppress(OSError):
                close_last(self._files, self._opened)

    def _slots_per_call(self) -> int:
        """Return how many slots the next call may move."""
        return min(_MAX_RUN, max(1, self._pacer.most_bytes() // self._slot_bytes))

    def _move(self, call: _Call, slot: int, host: Index) -> None:
        """Move a run of slots, which begins at `slot`."""
        num = len(host)
        if num > 1 and host[-1] - host[0] == num - 1 and (host[1:] - host[:-1] == 1).all():
            buffers = [self._rows[host[0] : host[-1] + 1].reshape(-1)]
        else:
            buffers = [self._rows[one] for one in host.tolist()]
        self._fully(call, self._data, buffers, num * self._slot_bytes, slot * self._slot_bytes)

    def _fully(self, call: _Call, file: int, buffers: Buffers, left: int, offset: int) -> None:
        """Repeat a call until it has moved the `left` bytes; raise if it moves nothing."""
        while True:
            most_bytes, num_bytes = self._pacer.most_bytes(), 0
            # A large slot is more than a call may move.
            now = buffers if left <= most_bytes else [buffers[0][:most_bytes]]
            try:
                num_bytes = call(file, now, offset)
            finally:
                self._pacer.note_return(num_bytes)
            if num_bytes == left:
                return
            if num_bytes <= 0:
                raise OSError(errno.EIO, "the file ends before the slot does")
            left, offset = left - num_bytes, offset + num_bytes
            while num_bytes >= len(buffers[0]):
                num_bytes -= len(buffers.pop(0))
            buffers[0] = buffers[0][num_bytes:]


def _runs(slots: Index, most: Callable[[], int]) -> Iterator[tuple[int, int]]:
    """Yield where each run of consecutive slots, which ascend, begins and ends.

    A run has at most `most()` slots, which is asked anew for each.
    """
    ends = [*(np.flatnonzero(slots[1:] - slots[:-1] != 1) + 1).tolist(), len(slots)]
    begin = 0
    for end in ends:
        while begin < end:
            at, begin = begin, min(begin + most(), end)
            yield at, begin
