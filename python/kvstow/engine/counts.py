"""What the tiers of an engine have counted, over all schedulers that it has had.

A restored scheduler goes on from the host's counts of its snapshot. After a wake these are the
engine's own. After a restart they are another engine's, perhaps of another process, which has
exported them. The counts of a tier below the host begin at 0 in each scheduler.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvstow._core import OffloadScheduler

_GAUGES: Final = {
    "resident_blocks",
    "storing_blocks",
    "jobs_in_flight",
    "quarantined_jobs",
    "quarantined_blocks",
    "capacity_tokens",
}
_DISK_GAUGES: Final = {"disk_resident_blocks", "demoting_blocks", "promoting_blocks"}


@dataclass(frozen=True, slots=True)
class HostCounts:
    """A scheduler, and what makes its counts those of the engine.

    One object has both, because `stats` reads them from any thread.
    """

    scheduler: OffloadScheduler
    added: Mapping[str, int] = field(default_factory=dict)

    def stats(self) -> dict[str, int]:
        """Return `OffloadScheduler.stats`, with counters that count what this engine did."""
        return {name: n + self.added.get(name, 0) for name, n in self.scheduler.stats().items()}

    def go_on(self, scheduler: OffloadScheduler) -> "HostCounts":
        """Return the same counts, which go on with those of another scheduler from now on."""
        now = scheduler.stats()
        counters = {name: n for name, n in self.stats().items() if name not in _GAUGES}
        return HostCounts(scheduler, {name: n - now[name] for name, n in counters.items()})


@dataclass(frozen=True, slots=True)
class DiskCounts:
    """The scheduler whose index is that of the tier below the host, and what those before counted.

    One object has both, as in `HostCounts`.
    """

    scheduler: OffloadScheduler | None = None
    before: Mapping[str, int] = field(default_factory=dict)

    def stats(self) -> dict[str, int]:
        """Return the counters of `OffloadScheduler.disk_stats`, over all schedulers."""
        if self.scheduler is None:
            return {}
        counters = self.scheduler.disk_stats().items()
        return {n: count + self.before.get(n, 0) for n, count in counters if n not in _DISK_GAUGES}

    def go_on(self, scheduler: OffloadScheduler) -> "DiskCounts":
        """Return the same counts, which go on with those of another scheduler from now on."""
        return DiskCounts(scheduler, self.stats())
