"""Movers that a test drives by hand."""

from collections.abc import Callable

from kvstow import TransferError
from kvstow.transfer import BlockLayout, Event, HostArena, HostMover, Ticket
from kvstow.transfer.mover import Ints


class ManualTicket(Ticket):
    """A copy that the test lets land or fail."""

    def __init__(self, copy: Callable[[], Ticket]) -> None:
        self._copy = copy
        self._ended = False
        self._read = False
        self._error: TransferError | None = None

    def land(self) -> None:
        self._copy().wait()
        self._ended = True

    def release(self) -> None:
        """Release the source, while the bytes are still on the way."""
        self._read = True

    def fail(self) -> None:
        self._error = TransferError("the test made it fail")
        self._ended = True

    def poll(self) -> bool:
        return self._ended

    def source_released(self) -> bool:
        return self._ended or self._read

    @property
    def error(self) -> TransferError | None:
        return self._error

    def wait(self, timeout_s: float | None = None) -> None:
        assert self._ended, "an engine that polls does not wait"
        if self._error is not None:
            raise self._error


class ManualMover(HostMover):
    """Makes no copy before the test asks for it on the ticket."""

    def __init__(self, layout: BlockLayout, arena: HostArena) -> None:
        super().__init__(layout, arena)
        self.stores: list[ManualTicket] = []
        self.store_events: list[Event] = []
        self.loads: list[ManualTicket] = []

    def store(self, block_ids: Ints, host_slots: Ints, *, after: Event) -> Ticket:
        submit = super().store
        self.store_events.append(after)
        self.stores.append(ManualTicket(lambda: submit(block_ids, host_slots, after=after)))
        return self.stores[-1]

    def load(self, host_slots: Ints, block_ids: Ints, *, after: Event) -> Ticket:
        submit = super().load
        self.loads.append(ManualTicket(lambda: submit(host_slots, block_ids, after=after)))
        return self.loads[-1]
