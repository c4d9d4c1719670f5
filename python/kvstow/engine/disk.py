"""The disk tier of an engine: a slot file per rank, and the jobs between it and the host memory.

```
closed -- attach: open the files, adopt what all ranks hold --> open -- reset --> renewing
                                                                 ^                   |
                                                                 +-- all are durable +
```

How a wrong block could be served, and what prevents it:

- A host slot changes while a demote reads it, or is found before its promote has ended on all
  ranks: the scheduler pins it or withholds its key until each rank's runner reports.
- Recovery ends a job whose thread still uses host slots: it names the jobs that run, and their pins
  stay.
- A block from before a reset comes back: the disk is off until each rank has a new generation,
  also if the reset or the renewal is cut short.
- A file that is opened again knows nothing of a reset that could not be written, and takes the
  blocks after another one for those of the first weights: it draws a new generation then.
- After a reset without a name, a snapshot file would bring blocks of unknown weights under the name
  of the first ones: the engine neither writes nor reads such a file before a reset names them.
- A file holds blocks of another model, or ranks hold different ones: the fingerprint, and only what
  all ranks have counts.
- An engine wakes while a read from before its sleep still writes into host memory: it does not
  fall asleep before every job has ended.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import ClassVar, Final, Literal

from kvstow._core import (
    ConfigError,
    KvstowError,
    OffloadScheduler,
    StateError,
    TierJob,
    TransferError,
)
from kvstow.closing import Closing, call_all
from kvstow.engine.blueprint import Blueprint
from kvstow.engine.counts import DiskCounts
from kvstow.engine.disk_options import DiskOptions
from kvstow.engine.kernel_sums import KernelSums
from kvstow.engine.state import State
from kvstow.tiers import Fingerprint, SlotFile, SlotTier, TierTicket
from kvstow.tiers.budget import ALL, Budget
from kvstow.tiers.runner import TierRunner, blocks_of
from kvstow.tiers.tier import MODES, Mode, Tier, least_mode
from kvstow.tiers.warm import adopt, agreed, disagreed
from kvstow.transfer import HostArena, TransferTimeout
from kvstow.transfer.ticket import Deadline

logger = logging.getLogger(__name__)

_GOES_ON: Final = "kvstow: the %s tier %s, and the engine goes on: %s"


class Disk(Closing):
    """Runs the jobs of an engine's disk tier, and keeps its files and the scheduler in agreement.

    Attributes:
        options: how the engine uses it.
        num_blocks: slots of the tier.
    """

    _name: ClassVar[str] = "disk"
    # Whether other engines share its blocks, so that events report none of them as this engine's.
    _is_shared: ClassVar[bool] = False

    def __init__(
        self,
        files: Sequence[SlotFile],
        fingerprints: Sequence[Fingerprint],
        options: DiskOptions,
        arenas: Sequence[HostArena],
    ) -> None:
        """Open the file of each rank.

        Raises:
            ConfigError: a file is unsuitable, or of something else.
            StateError: a file is open already.
        """
        self.options = options
        self._files, self._fingerprints = files, fingerprints
        self._runners: list[TierRunner] = []
        self._kernel_sums = KernelSums()
        self._has_reset = self._must_renew = False
        # Whether the caller has named the weights since the last reset, and all names so far.
        self._is_named = True
        self._names = {options.weights_version}
        self._budget = Budget(options.write_bytes_per_s())
        self._open(arenas)
        self.num_blocks: Final = self._num_slots()
        self._slot_bytes = sum(tier.slot_bytes for tier in self._tiers)
        self._counts = DiskCounts()
        self._sequence = 0
        self._renewals: list[TierTicket] = []
        self._mode: Mode = "off"
        self._warned: set[Mode] = set()
        # What the tiers had done when they were closed.
        self._sums = Counter(demoted_bytes=0, promoted_bytes=0, disk_mismatched_blocks=0)

    def below(self, blueprint: Blueprint) -> Blueprint:
        """Return a blueprint whose scheduler has this tier below the host."""
        options = self.options
        scheduler = partial(
            blueprint.scheduler,
            num_disk_blocks=self.num_blocks,
            disk_policy=options.policy,
            disk_admit=options.admit,
            max_disk_blocks_in_flight=self._max_in_flight(),
            min_promote_tokens=options.min_promote_tokens,
        )
        return replace(blueprint, scheduler=scheduler, is_shared=self._is_shared)

    # -- the files -----------------------------------------------------------------------------

    @property
    def _tiers(self) -> list[Tier]:
        return [runner.tier for runner in self._runners]

    @property
    def _slot_tiers(self) -> list[SlotTier]:
        return [tier for tier in self._tiers if isinstance(tier, SlotTier)]

    def _num_slots(self) -> int:
        """Return the slots of the tier, once its files are open."""
        return min(tier.num_slots for tier in self._slot_tiers)

    def _max_in_flight(self) -> int:
        return self.options.max_blocks_in_flight

    def _open(self, arenas: Sequence[HostArena]) -> None:
        with ExitStack() as opened:
            runners = [
                TierRunner(opened.enter_context(file.open(arena, fingerprint)))
                for file, fingerprint, arena in zip(
                    self._files, self._fingerprints, arenas, strict=True
                )
            ]
            opened.pop_all()
        self._runners, self._must_renew = runners, self._has_reset

    def attach(self, state: State) -> None:
        """Let the scheduler know what the files hold, and open the tier.

        Call it for a new scheduler. If the files cannot be opened, the tier stays off.
        """
        self._mode = "off"
        try:
            if [tier.arena for tier in self._tiers] != state.ranks.arenas:
                self.close()
            if not self._runners:
                self._open(state.ranks.arenas)
            # A tier that begins a new generation holds nothing, and writes nothing before it ends.
            ranks = [] if self._is_renewing else [tier.records() for tier in self._slot_tiers]
        except KvstowError as error:
            self._warn("off", error)
            ranks = []
        newest = [int(own.sequences.max(initial=0)) for own in ranks]
        self._sequence = max([self._sequence, *newest])
        common = agreed(ranks, self.num_blocks) if ranks else None
        if common is not None:
            try:
                adopt(state.scheduler, common)
            except ConfigError as error:  # such as a width of hashes that is not a snapshot's
                logger.warning(_GOES_ON, self._name, "begins empty", error)
                common = agreed(ranks, 0)  # none, also at the next start
        self._counts = self._counts.go_on(state.scheduler)
        for tier, own in zip(self._slot_tiers, ranks, strict=False):
            if common is not None and len(dropped := disagreed(own, common)):
                ticket = tier.delete(dropped)
                # A file that drops all of its blocks writes nothing before it has done so.
                self._renewals += [] if len(common) else [ticket]
        self._watch(state)

    def attach_if_new(self, state: State) -> None:
        """Attach the tier if a sleep, a wake or a restart has replaced the scheduler."""
        if self._counts.scheduler is not state.scheduler:
            with state.change:
                state.change.commit()
                self.attach(state)

    def close(self) -> None:
        """Carry out every job, and close the files. After an interrupt, call it again."""
        call_all([runner.close for runner in self._runners])
        if not self.running:
            self._let_go()

    def forget_all(self) -> None:
        """Forget the jobs that have not ended, because the engine is closed."""
        for runner in self._runners:
            runner.forget_all()
        self._let_go()

    def _let_go(self) -> None:
        """Keep only the figures of the tiers. After an interrupt, `close` needs the tiers again."""
        if all(runner.is_closed for runner in self._runners):
            self._sums, self._runners = self._tier_sums(), []

    # -- jobs ----------------------------------------------------------------------------------

    @property
    def running(self) -> set[int]:
        """The jobs that a tier carries out, or whose end is not accounted for, on any rank."""
        return {job_id for runner in self._runners for job_id in runner.running}

    def has_asked(
        self, state: State, request_id: str, num_local_tokens: int, max_tokens: int
    ) -> bool:
        """Return whether the index has what the tier holds of a request. A disk's always has."""
        return True

    def poll(self, state: State, now_s: float) -> None:
        """End jobs, and begin those that are due. Never blocks."""
        self.attach_if_new(state)
        self.end_ended(state)
        self._renew()
        self._watch(state)
        if self._mode != "off":
            self._begin(state, "promote", now_s, ALL)
        if self._mode == "on":
            self._begin(state, "demote", now_s, self._budget.num_blocks(self._slot_bytes, now_s))

    def settle(self, state: State, now_s: float) -> None:
        """Poll until no job is due and none is left, as far as `max_write_bytes_per_s` allows.

        Raises:
            TransferError: a job has not ended within `timeout_s`.
        """
        self.poll(state, now_s)
        while self.running or self._renewals:
            try:
                for ticket in self._renewals:
                    ticket.wait_until_ended(self.options.timeout_s)
            except TransferTimeout as error:
                raise TransferError(f"the disk tier's reset is not durable: {error}") from error
            self.drain(state, self.options.timeout_s)
            self.poll(state, now_s)

    def end_ended(self, state: State) -> None:
        """Account for the jobs that have ended."""
        if not any(runner.running for runner in self._runners):
            return
        with state.change:
            state.change.commit()
            for rank, runner in enumerate(self._runners):
                for job_id, ok in runner.poll():
                    layouts = state.ranks.layouts[rank]
                    are_ok = self._kernel_sums.outcome(job_id, ok, runner.tier, layouts)
                    state.scheduler.complete(job_id, ok=are_ok, rank=rank)
            self._kernel_sums.keep(self.running)

    def agree(self, scheduler: OffloadScheduler) -> None:
        """After an interrupt: fail what a rank has not begun, or has ended without a report.

        Call it when the scheduler has ended all jobs but those that run.
        """
        for job_id in self.running:
            for rank, runner in enumerate(self._runners):
                if job_id not in runner.running:
                    with suppress(KvstowError):  # it has reported the job
                        scheduler.complete(job_id, ok=False, rank=rank)

    def drain(self, state: State, timeout_s: float | None) -> None:
        """Wait for every job, for `timeout_s` at most.

        Raises:
            TransferError: a job has not ended.
        """
        deadline = Deadline(timeout_s)
        for runner in self._runners:
            runner.wait(deadline.left_s)
        self.end_ended(state)
        if running := self.running:
            raise TransferError(
                f"{len(running)} jobs of the {self._name} tier have not ended, and may still use "
                "the host memory; try again later, or close this engine"
            )

    def flush(self, state: State) -> None:
        """Write blocks that are due, for `flush_s` at most. Then close the files.

        Call it when no store is in flight.
        """
        end_s = time.monotonic() + self.options.flush_s
        while self._mode == "on" and (left_s := end_s - time.monotonic()) > 0:
            num_begun = self._begin(state, "demote", None, ALL)
            if not num_begun and not self.running:
                break
            for runner in self._runners:
                runner.wait(min(left_s, 0.1))
            self.end_ended(state)
            self._watch(state)

    def _begin(
        self,
        state: State,
        direction: Literal["demote", "promote"],
        now_s: float | None,
        max_blocks: int,
    ) -> int:
        """Plan and begin jobs of one direction. Return their number."""
        is_demote, num_begun = direction == "demote", 0
        timeout_s = self.options.timeout_s
        plan = state.scheduler.demote if is_demote else state.scheduler.promote
        limit_s = None if now_s is None or timeout_s is None else now_s + timeout_s
        with state.change:
            state.change.commit()
            while max_blocks > 0 and (job := plan(max_blocks=max_blocks, deadline=limit_s)):
                max_blocks -= len(job)
                num_begun += 1
                self._sequence += 1
                if is_demote:
                    self._budget.spend(len(job) * self._slot_bytes)
                self._submit(job, state)
        return num_begun

    def _submit(self, job: TierJob, state: State) -> None:
        blocks = blocks_of(job, self._sequence)
        blocks, host_slots = self._kernel_sums.sound_part(job, blocks, state.ranks)
        timeout_s = self.options.timeout_s
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for runner in self._runners:
            runner.begin(job.direction, job.job_id, blocks, host_slots, deadline=deadline)

    def check_is_of(self, identity: str, weights_version: str, *, in_file: bool) -> None:
        """Refuse to mix the blocks of a snapshot with those of another model on the disk.

        Raises:
            ConfigError: the names are not those of this tier.
            StateError: the snapshot is a file, and nobody has named the weights since a reset.
        """
        if in_file and not self._is_named:
            raise StateError(
                "the weights have no name since a reset without weights_version, and a snapshot "
                "file needs their name: call reset(weights_version=...) first, or sleep in HOST"
            )
        own = self.options.identity, self.options.weights_version
        if (identity, weights_version) not in (own, ("", "")):
            raise ConfigError(
                f"identity is {identity!r} and weights_version {weights_version!r}, but the "
                f"{self._name} tier keeps blocks of {own[0]!r} and {own[1]!r}; pass the same names"
            )

    # -- resets and faults ---------------------------------------------------------------------

    def check_is_new(self, weights_version: str | None) -> None:
        """Refuse a name of weights that is none, or that the engine has had.

        Raises:
            ConfigError: it is one of these.
        """
        if weights_version is not None:
            replace(self.options, weights_version=weights_version)
        if weights_version in self._names:
            raise ConfigError(
                f"weights_version is {weights_version!r}, which this engine has had, so blocks "
                "from before the reset would come back; pass a new name, or none"
            )

    def reset(self, state: State, weights_version: str | None) -> None:
        """Empty the tier with the host. It is off until the new generation is durable.

        Args:
            state: what else to empty.
            weights_version: the weights from now on, a new name; None if they are not known.
        """
        # If an interrupt cuts this short, nobody knows the weights.
        self._is_named = False
        self._has_reset = self._must_renew = True
        self._mode = "off"
        state.scheduler.reset()
        if weights_version is not None:
            self.options = replace(self.options, weights_version=weights_version)
            self._fingerprints = [
                Fingerprint({**print.fields, "weights_version": weights_version})
                for print in self._fingerprints
            ]
            self._is_named = True
            self._names.add(weights_version)
        self._renew()

    @property
    def _is_renewing(self) -> bool:
        """Whether blocks of before a reset could still come back."""
        return self._must_renew or bool(self._renewals)

    def _renew(self) -> None:
        if self._must_renew:
            self._begin_generation()
            self._must_renew = False
        if all(ticket.has_ended for ticket in self._renewals):
            self._renewals = []

    def _begin_generation(self) -> None:
        """Let each tier begin to forget the blocks of before the reset."""
        for tier, fingerprint in zip(self._slot_tiers, self._fingerprints, strict=False):
            self._renewals.append(tier.renew(fingerprint if self._is_named else None))

    def _watch(self, state: State) -> None:
        """Let the scheduler use the tier as far as all files allow, and warn once of a fault."""
        mode: Mode = "off" if self._is_renewing else self._checked_mode(self._tiers)
        if mode != self._mode:
            state.scheduler.set_disk(mode)
            self._mode = mode

    def _checked_mode(self, tiers: Sequence[Tier]) -> Mode:
        """Return what all of these tiers still do, and warn once of what keeps them from more."""
        mode = least_mode(tier.mode for tier in tiers)
        for error in (tier.error for tier in tiers if tier.mode == mode != "on"):
            self._warn(mode, error)
        return mode

    def _warn(self, mode: Mode, error: KvstowError | None) -> None:
        if mode not in self._warned:
            self._warned.add(mode)
            logger.warning(_GOES_ON, self._name, f"is {mode}", error)

    # -- figures -------------------------------------------------------------------------------

    def stats(self, scheduler: OffloadScheduler) -> dict[str, float]:
        """Return what `OffloadScheduler.disk_stats` counts, and what the files do, on all ranks."""
        tiers = [tier.stats() for tier in self._tiers]
        return {
            **scheduler.disk_stats(),
            **self._counts.stats(),
            **self._tier_sums(),
            "disk_capacity_blocks": self.num_blocks,
            "disk_quarantined_bytes": sum(own.quarantined_bytes for own in tiers),
            "disk_mode": MODES.index(self._mode),
        }

    def _tier_sums(self) -> Counter[str]:
        sums = self._sums.copy()
        for own in (tier.stats() for tier in self._tiers):
            sums["demoted_bytes"] += own.put_bytes
            sums["promoted_bytes"] += own.got_bytes
            sums["disk_mismatched_blocks"] += own.mismatched_blocks
        return sums
