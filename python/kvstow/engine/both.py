"""A disk tier and a shared tier of one engine: what the disk lacks comes from the store.

The scheduler's index has the slots of the slot file. A question to the store claims slots for what
the store has. `BothTier` says how a wrong block could be served there. Here one could come back
after a reset, if only one of the two forgets: each rank's tier renews both in one call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import ClassVar

from kvstow._core import OffloadScheduler
from kvstow.engine.blueprint import Blueprint
from kvstow.engine.disk import Disk
from kvstow.engine.shared import Shared, SharedOptions
from kvstow.engine.state import State
from kvstow.tiers import BothTier, SlotFile, SlotTier
from kvstow.tiers.runner import TierRunner
from kvstow.tiers.shared import SharedStore
from kvstow.tiers.tier import MODES, SharedTier, least_mode
from kvstow.transfer import BlockLayout, HostArena


class Both(Shared):
    """Runs the jobs of an engine's disk and shared tier, and asks the store what it has."""

    _name: ClassVar[str] = "disk"
    # Its events are of this server's disk, because the scheduler reports no claims.
    _is_shared: ClassVar[bool] = False

    def __init__(  # noqa: PLR0913, PLR0917 - what `Shared` takes, and the files
        self,
        files: Sequence[SlotFile],
        store: SharedStore,
        options: SharedOptions,
        blueprint: Blueprint,
        layouts: Sequence[Sequence[BlockLayout]],
        arenas: Sequence[HostArena],
    ) -> None:
        """Open the file of each rank, and a tier of the store; see `Disk` and `Shared`."""
        self._slot_files = files
        # What the tiers of the store had done when they were closed.
        self._shared_sums = Counter(
            shared_put_blocks=0, shared_got_blocks=0, shared_mismatched_blocks=0
        )
        super().__init__(store, options, blueprint, layouts, arenas)

    @property
    def _both_tiers(self) -> list[BothTier]:
        return [tier for tier in self._tiers if isinstance(tier, BothTier)]

    @property
    def _slot_tiers(self) -> list[SlotTier]:
        return [tier.disk for tier in self._both_tiers]

    @property
    def _shared_tiers(self) -> list[SharedTier]:
        return [tier.shared for tier in self._both_tiers]

    def _num_slots(self) -> int:
        return Disk._num_slots(self)

    def _open(self, arenas: Sequence[HostArena]) -> None:
        with ExitStack() as opened:
            runners = []
            for file, fingerprint, arena in zip(
                self._slot_files, self._fingerprints, arenas, strict=True
            ):
                disk = opened.enter_context(file.open(arena, fingerprint))
                shared = opened.enter_context(self._store.open(arena, fingerprint))
                tier = BothTier(
                    disk, shared, may_keep=partial(self._budget.take, block_bytes=disk.slot_bytes)
                )
                runners.append(TierRunner(tier))
            opened.pop_all()
        self._runners, self._must_renew = runners, self._has_reset
        self._rename()

    def _begin_generation(self) -> None:
        self._forget_answers()
        self._salt = self._new_salt()
        prints = self._fingerprints if self._is_named else [None] * len(self._fingerprints)
        for given in zip(self._both_tiers, self._namespaces(), prints, strict=False):
            tier, namespace, fingerprint = given
            self._renewals.append(tier.renew(namespace, fingerprint))

    def _let_go(self) -> None:
        """Keep only the figures of the tiers; see `Disk._let_go`."""
        sums = self._shared_counts()
        super()._let_go()
        if not self._runners:
            self._shared_sums = sums

    # -- figures -------------------------------------------------------------------------------

    def _watch(self, state: State) -> None:
        super()._watch(state)
        if not self._is_renewing:
            self._checked_mode(self._slot_tiers)

    def _tier_sums(self) -> Counter[str]:
        sums, name = super()._tier_sums(), "disk_mismatched_blocks"
        files = [tier.stats() for tier in self._slot_tiers]
        sums[name] = self._sums[name] + sum(own.mismatched_blocks for own in files)
        return sums

    def _shared_counts(self) -> Counter[str]:
        counts = self._shared_sums.copy()
        for own in (tier.stats() for tier in self._shared_tiers):
            counts["shared_put_blocks"] += own.put_blocks
            counts["shared_got_blocks"] += own.got_blocks
            counts["shared_mismatched_blocks"] += own.mismatched_blocks
        return counts

    def stats(self, scheduler: OffloadScheduler) -> dict[str, float]:
        """Return what `Disk.stats` does, and what the store's client and the asker have counted."""
        file_mode = least_mode(tier.mode for tier in self._slot_tiers)
        return {
            **Disk.stats(self, scheduler),
            "disk_mode": MODES.index(least_mode([self._mode, file_mode])),
            "shared_mode": MODES.index(self._mode),
            **self._shared_counts(),
            **self.question_stats(),
        }
