"""The events of an engine: kept for the caller, written to a file, or both."""

from collections.abc import Callable
from os import PathLike

from kvstow.closing import Closing
from kvstow.engine.state import State
from kvstow.observability.events import BlockEvent, EventFile, TransferEvent


class EventLog(Closing):
    """Moves events from ledger and scheduler to the caller's lists and to a file.

    Attributes:
        file: the file that events are appended to, if any.
        num_lost: events that the file lacks.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None,
        clock: Callable[[], float],
        *,
        keeps: bool,
    ) -> None:
        """Open the file at `path`, if any. With `keeps`, keep events for the caller."""
        self.file = None if path is None else EventFile(path, clock=clock)
        self._keeps = keeps
        self._block_events: list[BlockEvent] = []
        self._transfer_events: list[TransferEvent] = []
        self._unwritten: list[BlockEvent | TransferEvent] = []

    @property
    def num_lost(self) -> int:
        """Events that the file lacks."""
        return 0 if self.file is None else self.file.num_lost

    def flush(self, state: State) -> None:
        """Take what has happened, and write it to the file."""
        if self.file is None and not self._keeps:
            return
        # They are taken before the clock is read, so an error of the clock cannot lose them.
        self._unwritten += state.pool.take_events()
        self._unwritten += state.scheduler.take_events()
        below = state.scheduler.take_disk_events()
        self._unwritten += [] if state.blueprint.is_shared else below
        self._unwritten += state.scheduler.take_transfer_events()
        if self.file is not None:
            self.file.write(self._unwritten)
        events, self._unwritten = self._unwritten, []
        if self._keeps:
            self._block_events += [event for event in events if isinstance(event, BlockEvent)]
            self._transfer_events += [event for event in events if isinstance(event, TransferEvent)]

    def take_block_events(self) -> list[BlockEvent]:
        """Return the kept block events, and keep them no longer."""
        events, self._block_events = self._block_events, []
        return events

    def take_transfer_events(self) -> list[TransferEvent]:
        """Return the kept events of jobs, and keep them no longer."""
        events, self._transfer_events = self._transfer_events, []
        return events

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()
