"""A disk tier for vLLM's own `OffloadingConnector`: bounded, checked, and warm after a restart.

```
"kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": ...,
    "secondary_tiers": [{"type": "KVStowDisk", "module_path": "kvstow.vllm.secondary_tier",
                         "path": "/mnt/nvme/slots", "max_bytes": "200GiB"}]}
```

vLLM calls all methods from its scheduler's thread. A chunk of its CPU tier is one slot of the file.

```
submit_store   free slots, then those of the oldest keys --> put --> ended: the key is in `_slots`
submit_load    the slots of the keys, which are not taken --> get --> ended: failed keys go
```

How a wrong block could be served, and what prevents it:

- The slot of a key is given to another key while a job reads or writes it: slots of running jobs
  are in no key's place, or in `_busy`, and are never taken.
- vLLM gives a chunk to another block while a thread still fills or reads it: a job is reported only
  when its ticket has ended. So a read that never returns keeps its request waiting.
- vLLM gives a chunk to another block at a reset, while a worker still moves the old one: until the
  workers have carried out the first step after the reset, a load waits.
- Weights change in place: vLLM drains the tiers at each reset, and says no reason. Then every block
  goes, durably, unless the file of `weights_version_path` has not changed. The first lookup of
  all, and after a reset, reads that file again, because vLLM resets before it sleeps, and not when
  it wakes.
- Requests run on across a change of weights: what they store may be of the old ones, so the next
  reset drops it.
- Other weights, sizes or parallel ranks after a restart, or other settings of the model: the
  fingerprint. Where the content of the weights is unknown, or may have changed while vLLM loaded
  it, or where vLLM's configuration is not found, the file begins empty, and a warning says why
  (`chunks_fingerprint`).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstow import TransferError
from kvstow.tiers import SlotTier, TierBlocks
from kvstow.transfer.borrowed import BorrowedArena
from kvstow.vllm.options import path_of_engine
from kvstow.vllm.secondary_file import begin_renewal, secondary_file
from kvstow.vllm.secondary_identity import chunks_fingerprint, warn_of_windows
from kvstow.vllm.secondary_job import Job
from kvstow.vllm.secondary_order import Key, adopted, chunks_before, ends_of
from kvstow.vllm.weights import WeightsVersion

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

logger = logging.getLogger("vllm." + __name__)

# vLLM 0.30 does not count them.
_COUNTS_BYTES: Final = "transfer_bytes" in {it.name for it in dataclasses.fields(JobResult)}
# Without this word, vLLM forgets what a chunk holds when it leaves the CPU tier. The event of its
# removal from the disk would then name its last block only. Some versions do not have the word.
_KEEPS_NAMES: Final[dict[str, Any]] = (
    {"removal_expected": True}
    if "removal_expected" in {it.name for it in dataclasses.fields(OffloadingEvent)}
    else {}
)
# A write that hangs must not hold up the requests that ask for its chunks.
_PATIENCE_S: Final = 1.0


class KVStowDisk(SecondaryTierManager):
    """Keeps the chunks of vLLM's CPU tier in a slot file. See the module for its configuration.

    Attributes:
        tier: the open slot file.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(  # noqa: PLR0913 - the keys of the user's configuration
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        path: str | None = None,
        max_bytes: int | str | None = None,
        on_mismatch: Any = "refuse",
        num_threads: int = 4,
        weights_version_path: str | None = None,
        enable_kv_events: bool = False,
        locality: str | None = None,
        **unknown: object,
    ) -> None:
        """Open the file.

        Args:
            offloading_spec: vLLM's configuration.
            primary_kv_view: vLLM's CPU tier, a row for each chunk.
            tier_type: vLLM's name of this tier.
            backpressure_detector: vLLM's own, from vLLM 0.31 on.
            path: the slot file, on a local disk. Data-parallel engines add their number to it.
            max_bytes: bytes of the file and its index, at most, such as "200GiB".
            on_mismatch: "refuse" a file of another model, or "reset" (empty) it.
            num_threads: threads that read and write.
            weights_version_path: a file that names the weights. A reset keeps the blocks while it
                is unchanged. Without it, every reset drops them.
            enable_kv_events: whether to publish what the disk stores and drops.
            locality: "LOCAL" or "REMOTE", for these events.
            **unknown: what a later vLLM may pass; ignored with a warning.

        Raises:
            ConfigError: a key is missing or wrong, or the place is unsuitable.
            StateError: the file is in use.
        """
        detectors = [] if backpressure_detector is None else [backpressure_detector]
        super().__init__(offloading_spec, primary_kv_view, tier_type, *detectors)
        file = secondary_file(
            tier_type,
            path=path,
            max_bytes=max_bytes,
            on_mismatch=on_mismatch,
            num_threads=num_threads,
            weights_version_path=weights_version_path,
        )
        if unknown:
            logger.warning(
                "kvstow: the secondary tier %s ignores %s", tier_type, ", ".join(sorted(unknown))
            )
        warn_of_windows(offloading_spec, tier_type)
        assert path is not None
        self.locality = None if locality is None else Locality(locality)
        is_published = offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] | None = (
            [] if enable_kv_events and is_published else None
        )
        self._version = WeightsVersion(
            weights_version_path, tier=path, option=f"{tier_type} in secondary_tiers: "
        )
        self._keeps_on_reset = weights_version_path is not None
        place = path_of_engine(path, offloading_spec.config.parallel)
        file = dataclasses.replace(file, path=place)
        fingerprint, why = chunks_fingerprint(offloading_spec, place, weights_version_path)
        if why:
            logger.warning(
                "kvstow: %s begins empty, and its chunks do not outlive this server, because %s",
                place,
                why,
            )
            file = dataclasses.replace(file, on_mismatch="reset")
        self._arena: Final = BorrowedArena(primary_kv_view)
        self.tier: Final[SlotTier] = file.open(self._arena, fingerprint)
        self._mode, self._has_warned = self.tier.mode, False
        self._jobs: list[Job] = []
        self._storing: dict[Key, Job] = {}
        self._slots: OrderedDict[Key, int] = OrderedDict()  # oldest use first
        self._busy: Counter[int] = Counter()  # slots that loads read
        # The requests that may store chunks, and whether there were any at the last reset.
        self._active: set[str] = set()
        self._were_active = False
        # Whether no lookup has come since the last reset or the start.
        self._must_compare = self._keeps_on_reset
        self._renewal = begin_renewal(self.tier) if why else None  # later of the last reset
        # After a reset, loads wait for as many steps as the scheduler may be ahead of the workers.
        self._most_ahead: Final = offloading_spec.config.parallel.pp_size + 1
        self._num_steps_to_wait = 0
        self._sequence = 1
        self._free: list[int] = []
        self._adopt()

    # -- lookups ---------------------------------------------------------------------------------

    def lookup(self, key: Key, req_context: ReqContext) -> LookupResult:
        """Return whether the disk has a chunk."""
        if self._must_compare:
            self._must_compare = False
            self._drop_unless_same()
        if key in self._slots:
            if self.tier.mode == "off":
                return LookupResult.MISS
            return LookupResult.RETRY if self._num_steps_to_wait else LookupResult.HIT
        job = self._storing.get(key)
        if job is None or time.monotonic() - job.since_s > _PATIENCE_S:
            return LookupResult.MISS
        return LookupResult.RETRY

    def touch(self, keys: Collection[Key], req_context: ReqContext) -> None:
        """Keep these chunks longest. The first of a prefix stays longer than the last."""
        for key in reversed(list(keys)):
            if key in self._slots:
                self._slots.move_to_end(key)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Count the steps for which loads still wait."""
        self._num_steps_to_wait = max(0, self._num_steps_to_wait - 1)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Ask for what vLLM does by itself."""
        self._active.add(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Note that this request stores nothing any more, and that it has used its chunks."""
        self._active.discard(req_context.req_id)
        self._use(req_context)

    def _use(self, request: ReqContext) -> None:
        """Keep the chunks of a request longest, as `touch`, which some versions never call."""
        ends = ends_of(request)
        self.touch(sorted(ends, key=ends.__getitem__), request)

    # -- jobs ------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to write those chunks that the disk lacks."""
        chunks = dict(zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True))
        new = [key for key in chunks if key not in self._slots and key not in self._storing]
        ends = ends_of(job_metadata.req_context)
        new.sort(key=lambda key: ends.get(key, 0))  # vLLM has them in a set
        slots = self._taken(new, ends) if self._may_store() else []
        del new[len(slots) :]
        ticket = None
        if new:
            parents = chunks_before(new, ends)
            ticket = self.tier.put(self._blocks(new, slots, parents), [chunks[key] for key in new])
            self._sequence += 1
        job = Job(job_metadata, new, slots, ticket, is_load=False)
        self._storing.update(dict.fromkeys(new, job))
        job.is_whole = all(key in self._slots or key in self._storing for key in chunks)
        self._jobs.append(job)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to fill chunks from the disk."""
        chunks = dict(zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True))
        keys = [key for key in chunks if key in self._slots]
        slots = [self._slots[key] for key in keys]
        ticket = None
        if keys:
            ticket = self.tier.get(self._blocks(keys, slots), [chunks[key] for key in keys])
        self._busy.update(slots)
        job = Job(job_metadata, keys, slots, ticket, is_load=True)
        job.is_whole = len(keys) == len(chunks)
        self._jobs.append(job)
        self._use(job_metadata.req_context)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs whose chunks no thread touches any more, each once."""
        ended: list[Job] = []
        running: list[Job] = []
        for job in self._jobs:
            has_ended = job.ticket is None or job.ticket.has_ended
            (ended if has_ended else running).append(job)
        self._jobs = running
        results = [self._end(job) for job in ended]
        if not all(result.success for result in results):
            self._warn()
        return results

    def drain_jobs(self) -> None:
        """Wait for all jobs, then drop every block unless the weights are known to be the same.

        vLLM calls it at each reset, also for new weights, and before it sleeps. It does not call it
        when it wakes. So the first lookup after a reset compares the weights once more.

        The next step lets the workers end what they copy between the GPU and the CPU tier.
        """
        self._num_steps_to_wait = self._most_ahead
        self._were_active = bool(self._active)
        self._must_compare = self._keeps_on_reset
        self._wait()
        self._drop_unless_same()

    def _wait(self) -> None:
        for job in self._jobs:
            if job.ticket is not None:
                job.ticket.wait_until_ended(None)

    def _drop_unless_same(self) -> None:
        """Drop every block unless the weights are known to be the same.

        Requests that were active at the reset may still hold blocks of the old weights, and store
        them. So the next reset drops every block, too.
        """
        if self._keeps_on_reset and not self._version.changed(remember=not self._were_active):
            return
        self._wait()
        dropped = list(self._slots)
        self._slots.clear()
        # Running jobs, which vLLM has not heard of, end without their slots.
        taken = {slot for job in self._jobs for slot in job.slots if not job.is_load}
        self._free = [slot for slot in range(self.tier.num_slots) if slot not in taken]
        self._publish(dropped, removed=True)
        for job in self._jobs:
            job.ticket = None
        self._renewal = begin_renewal(self.tier)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return what was stored and dropped since the last call."""
        events, self._events = self._events, None if self._events is None else []
        return events or ()

    def shutdown(self) -> None:
        """Carry out every job, and close the file.

        Raises:
            TransferError: a call has not returned. Then vLLM keeps its CPU tier mapped.
        """
        self.tier.close()
        num_bytes = self.tier.stats().in_flight_bytes
        if num_bytes:
            raise TransferError(
                f"{num_bytes} bytes of {self.tier.path} are in calls that do not return, so the "
                "memory of the CPU tier must stay mapped; check the disk"
            )
        self._arena.close()

    # -- parts -----------------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Take over what the file held before this process, unless it is dropped."""
        if self._renewal is not None:
            self._free = list(range(self.tier.num_slots))
            return
        records = self.tier.records()
        self._slots = adopted(records)
        used = set(self._slots.values())
        self._free = [slot for slot in range(self.tier.num_slots) if slot not in used]
        if len(records):
            self._sequence = int(records.sequences[-1]) + 1
            logger.info("kvstow: %d chunks are warm in %s", len(self._slots), self.tier.path)

    def _may_store(self) -> bool:
        """Return whether the disk takes chunks, and has dropped the earlier ones durably."""
        is_durable = self._renewal is None or self._renewal.has_ended
        return is_durable and self.tier.mode == "on"

    def _taken(self, new: list[Key], ends: dict[Key, int]) -> list[int]:
        """Take a slot for each new key while there are any: free ones, then those of old keys.

        Chunks of the same prompt before a new one stay, because nothing finds it without them. The
        slots come in ascending order.
        """
        num, own = len(new), [ends.get(key, 0) for key in new]
        slots = [self._free.pop() for _ in range(min(num, len(self._free)))]
        dropped = []
        for key, slot in self._slots.items():
            if len(slots) == num:
                break
            first = own[len(slots)]  # the new ones come in their order
            if not self._busy[slot] and ends.get(key, first) >= first:
                dropped.append(key)
                slots.append(slot)
        for key in dropped:
            del self._slots[key]
        self._publish(dropped, removed=True)
        return sorted(slots)

    def _blocks(
        self, keys: Sequence[Key], slots: Sequence[int], parents: Sequence[Key | None] | None = None
    ) -> TierBlocks:
        return TierBlocks(
            [get_offload_block_hash(key) for key in keys],
            [get_offload_group_idx(key) for key in keys],
            parents and [None if it is None else get_offload_block_hash(it) for it in parents],
            np.array(slots, np.int64),
            self._sequence,
        )

    def _end(self, job: Job) -> JobResult:
        ok = [False] * len(job.keys) if job.ticket is None else job.ticket.ok.tolist()
        good = [key for key, is_ok in zip(job.keys, ok, strict=True) if is_ok]
        if job.is_load:
            self._busy -= Counter(job.slots)
            for key, slot, is_ok in zip(job.keys, job.slots, ok, strict=True):
                if not is_ok and self._slots.get(key) == slot:
                    del self._slots[key]
                    self._free.append(slot)
                    self._publish([key], removed=True)
        else:
            # The first of a prefix stays longest.
            for key, slot, is_ok in reversed([*zip(job.keys, job.slots, ok, strict=True)]):
                del self._storing[key]
                if is_ok:
                    self._slots[key] = slot
                else:
                    self._free.append(slot)
            self._publish(good, removed=False)
            if job.order.req_context.req_id not in self._active:
                self._use(job.order.req_context)
        return JobResult(
            job.order.job_id,
            success=job.is_whole and len(good) == len(job.keys),
            successful_keys=tuple(good) if job.is_load and good else None,
            transfer_time=time.monotonic() - job.since_s,
            **({"transfer_bytes": len(good) * self.tier.slot_bytes} if _COUNTS_BYTES else {}),
        )

    def _warn(self) -> None:
        """Say it when the disk fails, and when the first chunk is damaged."""
        if self.tier.mode != self._mode:
            self._mode = self.tier.mode
            logger.warning(
                "kvstow: the secondary tier %s is %s, and requests go on: %s",
                self.tier.path,
                self._mode,
                self.tier.error,
            )
        num_damaged = self.tier.stats().mismatched_blocks
        if num_damaged and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "kvstow: %d chunks of %s are not what was written there, and requests recompute "
                "them. Later ones are not logged",
                num_damaged,
                self.tier.path,
            )

    def _publish(self, keys: list[Key], *, removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(
                OffloadingEvent(
                    keys=keys,
                    medium=self.medium,
                    removed=removed,
                    locality=self.locality,
                    **_KEEPS_NAMES,
                )
            )
