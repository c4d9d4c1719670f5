"""The file calls of an open slot file, in runs of consecutive slots."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow.tiers.files import Buffers, Files
from kvstow.tiers.frame import FRAME_BYTES, Bools, Frames
from kvstow.tiers.slot_index import HEADER_BYTES, Header, write_header
from kvstow.transfer.mover import Index

Rows: TypeAlias = npt.NDArray[np.uint8]
_Call: TypeAlias = Callable[[int, Buffers, int], int]
# Slots of one call: the system's limit of buffers in it.
_MAX_RUN = 1024


class SlotCalls:
    """Both files and the host slots. Each method raises `OSError` if a call fails."""

    def __init__(self, files: Files, data: int, index: int, rows: Rows, slot_bytes: int) -> None:
        """Take over the descriptors `data` and `index`."""
        self._files = files
        self._data, self._index = data, index
        self._rows = rows
        self._slot_bytes = slot_bytes

    @property
    def is_open(self) -> bool:
        """Whether the files are open."""
        return self._data >= 0

    def write_header(self, header: Header) -> None:
        """Write and sync the header."""
        write_header(self._files, self._index, header)

    def write_data(self, slots: Index, host: Index) -> None:
        """Write host slots to slots, which ascend."""
        for begin, end in _runs(slots):
            self._move(self._files.write, int(slots[begin]), host[begin:end])

    def write_frames(self, slots: Index, frames: Frames) -> None:
        """Write the frames of slots, which ascend."""
        data = frames.view(np.uint8)
        for begin, end in _runs(slots):
            part = data[begin * FRAME_BYTES : end * FRAME_BYTES]
            offset = HEADER_BYTES + int(slots[begin]) * FRAME_BYTES
            _fully(self._files.write, self._index, [part], len(part), offset)

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
            slots: shape [n].
            host: shape [n].
            report: called with the error of each call, None for success.
            may_go_on: whether to make another call.

        Returns:
            Which slots arrived, and the last error.
        """
        arrived: Bools = np.zeros(len(slots), np.bool_)
        left = list(_runs(slots))
        last: OSError | None = None
        while left and may_go_on():
            begin, end = left.pop(0)
            try:
                self._move(self._files.read, int(slots[begin]), host[begin:end])
            except OSError as error:
                last = error
                report(error)
                if end - begin > 1:
                    left[:0] = [(one, one + 1) for one in range(begin, end)]
            else:
                arrived[begin:end] = True
                report(None)
        return arrived, last

    def close(self) -> None:
        """Close the files, which releases the lock; a second call does nothing."""
        for file in (self._data, self._index):
            if file >= 0:
                self._files.close(file)
        self._data = self._index = -1

    def _move(self, call: _Call, slot: int, host: Index) -> None:
        """Move a run of slots, which begins at `slot`, in one call."""
        num = len(host)
        if num > 1 and host[-1] - host[0] == num - 1 and (host[1:] - host[:-1] == 1).all():
            buffers = [self._rows[host[0] : host[-1] + 1].reshape(-1)]
        else:
            buffers = [self._rows[one] for one in host.tolist()]
        _fully(call, self._data, buffers, num * self._slot_bytes, slot * self._slot_bytes)


def _runs(slots: Index) -> Iterator[tuple[int, int]]:
    """Yield where each run of consecutive slots, which ascend, begins and ends."""
    ends = [len(slots)]
    if len(slots) > 1 and slots[-1] - slots[0] >= len(slots):
        ends[:0] = (np.flatnonzero(slots[1:] - slots[:-1] != 1) + 1).tolist()
    begin = 0
    for end in ends:
        for at in range(begin, end, _MAX_RUN):
            yield at, min(at + _MAX_RUN, end)
        begin = end


def _fully(call: _Call, file: int, buffers: Buffers, left: int, offset: int) -> None:
    """Repeat a call that moves less than the `left` bytes; raise if it moves nothing."""
    while (num_bytes := call(file, buffers, offset)) != left:
        if num_bytes <= 0:
            raise OSError(errno.EIO, "the file ends before the slot does")
        left, offset = left - num_bytes, offset + num_bytes
        while num_bytes >= len(buffers[0]):
            num_bytes -= len(buffers.pop(0))
        buffers[0] = buffers[0][num_bytes:]
