"""The scheduler half of a disk before a shared store.

```
lookup -- the file's records are adopted, and new: ask the store --> claim slots of the file
            pending ................................................ then as for a disk
```

The index has the slots of the files. A *claim* is a slot whose block only the store is known to
have: a rank reads it from the store, and its file may keep it there. After a restart, a claim that
every rank has kept is a block of the disk like any other.

How a wrong block could be served, and what prevents it:

- Only one of the two forgets at a reset: the new salt and the number of the new generation go out
  together. Nothing moves, and nothing is asked, until every rank has confirmed.
- A claim is of another block than the file has in the slot: each rank compares keys
  (`tiers.both`).
- A file fails: the index stays open, because the rank reads from the store then. A block counts in
  the index only if every rank has it in its file.
- What either tier could do wrong alone: `disk`, `shared`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from kvstow import OffloadScheduler
from kvstow.tiers import TierStats
from kvstow.tiers.shared import of_shared
from kvstow.tiers.tier import MODES, least_mode
from kvstow.vllm.below.disk import DiskTier
from kvstow.vllm.below.shared import StoreTier
from kvstow.vllm.messages import LowerOrders, LowerReport


@dataclass
class BothTier(StoreTier, DiskTier):
    """Opens the disk, and asks the store for what the disk lacks."""

    name: ClassVar[str] = "disk or shared"

    # By rank, what its file and its store have done so far.
    _halves: dict[int, tuple[TierStats, TierStats]] = field(default_factory=dict)

    def begin(self, offload: OffloadScheduler) -> None:
        """Open the disk of a new scheduler, with names for the store."""
        self.questions.begin(self._ranks)
        super().begin(offload)

    def reset(self) -> None:
        """Draw a new generation, and take new names; see `LowerTier.reset`."""
        super().reset()
        self.questions.reset(self._ranks)

    def _orders(self, offload: OffloadScheduler, now: float) -> LowerOrders | None:
        orders = super()._orders(offload, now)
        if orders is not None:
            orders.salt = self.questions.salt
        return orders

    def _follow(self, offload: OffloadScheduler) -> None:
        """Keep the index open, whatever the files still do."""
        if offload.disk_mode != "on":
            offload.set_disk("on")

    # -- figures ------------------------------------------------------------------------------

    def processed(self, reports: Mapping[int, LowerReport]) -> None:
        """Take the reports of a step; see `LowerTier.processed`."""
        self._halves |= {
            rank: report.halves for rank, report in reports.items() if report.halves is not None
        }
        super().processed(reports)

    def stats(self) -> dict[str, int]:
        """Return the counters and gauges of both. The workers know which of them moved a block."""
        own = super().stats()
        if not own:
            return {}
        is_on = self.phase == "on"
        file_mode = least_mode(self._modes.values())
        of_files, of_stores = (
            _moved([halves[half] for halves in self._halves.values()]) for half in (0, 1)
        )
        own |= of_files | of_shared(of_stores) | self.questions.stats()
        own["disk_mode"] = MODES.index(file_mode) if is_on else 0
        own["shared_mode"] = MODES.index("on") if is_on else 0
        return own


def _moved(ranks: list[TierStats]) -> dict[str, int]:
    """Return counters of blocks: those that all ranks have moved, and those that one has not."""
    return {
        "demoted_blocks": min((rank.put_blocks for rank in ranks), default=0),
        "promoted_blocks": min((rank.got_blocks for rank in ranks), default=0),
        "failed_demotes": max((rank.failed_puts for rank in ranks), default=0),
        "failed_promotes": max((rank.failed_gets for rank in ranks), default=0),
    }
