"""The events of an engine: kept for the caller, written to a file, or both."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from operator import call
from os import PathLike
from typing import Final, TypeVar

from kvstow.closing import Closing
from kvstow.engine.state import State
from kvstow.observability.events import BlockEvent, EventFile, TransferEvent

logger = logging.getLogger(__name__)

MAX_KEPT: Final = 1 << 20
"""Block events that are kept for a caller who does not take them, and as many events of jobs."""
_Event = TypeVar("_Event")


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
        """Open the file at `path`, if any. With `keeps`, keep the newest events for the caller."""
        self.file = None if path is None else EventFile(path, clock=clock)
        self._keeps = keeps
        self._block_events: deque[BlockEvent] = deque(maxlen=MAX_KEPT)
        self._transfer_events: deque[TransferEvent] = deque(maxlen=MAX_KEPT)
        self._has_warned = False
        self._unwritten: list[BlockEvent | TransferEvent] = []

    @property
    def num_lost(self) -> int:
        """Events that the file lacks."""
        return 0 if self.file is None else self.file.num_lost

    def flush(self, state: State) -> None:
        """Take what has happened, and write it to the file."""
        if self.file is None and not self._keeps:
            return
        scheduler = state.scheduler
        takes: list[Callable[[], Sequence[BlockEvent | TransferEvent]]]
        takes = [state.pool.take_events, scheduler.take_events]
        if state.blueprint.is_shared:
            scheduler.take_disk_events()  # of blocks that are not this engine's
        else:
            takes.append(scheduler.take_disk_events)
        takes.append(scheduler.take_transfer_events)
        # They are taken before the clock is read, so an error of the clock cannot lose them. One
        # call in C takes and keeps them: an interrupt comes only between steps of Python.
        self._unwritten.extend(chain.from_iterable(map(call, takes)))
        if self.file is not None:
            self.file.write(self._unwritten)
        if self._keeps:
            blocks = [it for it in self._unwritten if isinstance(it, BlockEvent)]
            jobs = [it for it in self._unwritten if isinstance(it, TransferEvent)]
            self._keep(self._block_events, blocks)
            self._keep(self._transfer_events, jobs)
        # This comes last. An interrupt may repeat events, but it must not lose any: a reader that
        # misses a removal takes the block for cached from then on.
        self._unwritten = []

    def _keep(self, kept: deque[_Event], events: list[_Event]) -> None:
        """Keep events, and the newest ones only of too many."""
        if len(kept) + len(events) > MAX_KEPT and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "kvstow: nobody takes the events of an engine, so those before the last %d are "
                "dropped. Call take_events and take_transfer_events more often, or build the "
                "engine without events",
                MAX_KEPT,
            )
        kept.extend(events)

    def take_block_events(self) -> list[BlockEvent]:
        """Return the kept block events, and keep them no longer."""
        events, self._block_events = self._block_events, deque(maxlen=MAX_KEPT)
        return list(events)

    def take_transfer_events(self) -> list[TransferEvent]:
        """Return the kept events of jobs, and keep them no longer."""
        events, self._transfer_events = self._transfer_events, deque(maxlen=MAX_KEPT)
        return list(events)

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()
