"""The host tier's accounting: vLLM's `SimpleCPUOffloadScheduler` beside `OffloadScheduler`.

Both plan copies, and nothing is copied. vLLM's scheduler is called as its connector calls it in a
step of the engine, bound to the device pool of a `KVCacheManager`. What counts, and what does not:

- vLLM's scheduler takes and drops references on device blocks itself. With kvstow, the caller pins
  and unpins them, which counts. Reading both ends of the copies from the `Job` counts too.
- The device's own work (allocate, free, publish) does not count. Neither do the objects in which
  vLLM's scheduler and worker describe a step (`SchedulerOutput`, `KVConnectorOutput`).
- vLLM learns of a request in `update_state_after_alloc`, and of its block ids in the step that
  schedules it first. kvstow takes the hashes in `add`. Rows exist with and without these calls.
- vLLM plans a load in two calls, `update_state_after_alloc` and `build_connector_meta`.
"""

import functools
import gc
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

import kvstow

from . import vllm_side
from .measure import Clock, Row, require_same, take_turns

Ids: TypeAlias = npt.NDArray[np.int32]
Record: TypeAlias = Callable[[list[int]], None]
Hashes: TypeAlias = tuple[str, list[bytes]]

BLOCK_SIZE = 16
NUM_BLOCKS = 8_192
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE
NUM_SPARE_BLOCKS = 8
MIN_PROMPTS_PER_TURN = 5
NUM_REQUESTS = 256
GROUPS = (kvstow.FullAttention(block_size=BLOCK_SIZE),)


class OffloadPrompts:
    """All prompts, one after the other, in each turn of a side.

    A prompt is computed as one chunk, stored and finished. Then the device forgets it, and it is
    loaded for a second request. The host has room for `capacity` prompts, and there is one more, so
    a store evicts as many blocks as it stores.
    """

    def __init__(self, num_turns: int, *, capacity: int) -> None:
        self.num_turns = num_turns
        self.clock = Clock()
        num_prompts = capacity + 1
        self.num_host_blocks = capacity * NUM_BLOCKS
        # One token more than the blocks hold: vLLM leaves the last one to compute.
        self.requests = [
            vllm_side.request(f"prompt-{at}", NUM_TOKENS + 1, BLOCK_SIZE)
            for at in range(num_prompts)
        ] * -(-MIN_PROMPTS_PER_TURN // num_prompts)
        num_device_blocks = NUM_BLOCKS + NUM_SPARE_BLOCKS + 1
        self.manager = vllm_side.manager(num_device_blocks, GROUPS)
        self.ledger = kvstow.BlockLedger(num_device_blocks, GROUPS)
        # vLLM's host pool, too, has a null block.
        self.theirs = vllm_side.offload(self.manager, self.num_host_blocks + 1, GROUPS)
        self.ours = kvstow.OffloadScheduler(self.num_host_blocks, GROUPS)

    def run(self) -> list[Row]:
        gc.collect()
        gc.freeze()
        self._turn(0, "")  # fills the host
        self.clock.samples.clear()
        for kind in ("", "clean "):
            for turn in range(self.num_turns):
                self._turn(turn, kind)
        self.ledger.check()
        self.ours.check()
        gc.unfreeze()
        evicting = f"evicting as many of {self.num_host_blocks:,}"
        return self._rows("clean ", f"host of {self.num_host_blocks:,}") + self._rows("", evicting)

    def _turn(self, turn: int, kind: str) -> None:
        """Run a turn of each side. With kind "clean ", empty the host before each prompt."""
        theirs: list[list[int]] = []
        ours: list[list[int]] = []
        take_turns(
            turn,
            functools.partial(self._vllm_turn, kind, theirs.append),
            functools.partial(self._kvstow_turn, kind, ours.append),
        )
        for at, (vllm, kvstow_) in enumerate(zip(theirs, ours, strict=True)):
            require_same(f"blocks stored and loaded, list {at},", vllm, kvstow_)

    def _vllm_turn(self, kind: str, record: Record) -> None:
        for request in self.requests:
            if kind:
                self.theirs.reset()
            stored = self._vllm_store(request, f"vllm {kind}", record)
            self.manager.reset_prefix_cache()
            self._vllm_load(request, stored, f"vllm {kind}", record)
            self.manager.reset_prefix_cache()

    def _vllm_store(self, request: vllm_side.Request, side: str, record: Record) -> list[int]:
        """Store a prompt, and return its host blocks."""
        manager, offload, time = self.manager, self.theirs, self.clock.time
        request.num_computed_tokens = 0
        table = manager.allocate_slots(request, NUM_TOKENS).get_block_ids()
        time(side + "add", self._vllm_add, request, vllm_side.step(new=[(request, table)]))
        request.num_computed_tokens = NUM_TOKENS
        step = vllm_side.step(running=[(request, None)])
        meta = time(side + "plan stores", offload.build_connector_meta, step)
        time(side + "stored", offload.update_connector_output, vllm_side.stored(meta))
        time(side + "finish", offload.request_finished_all_groups, request, table)
        manager.free(request)
        record(meta.store_gpu_blocks)
        record([vllm_side.num_resident(offload)])
        host_blocks: list[int] = meta.store_cpu_blocks
        return host_blocks

    def _vllm_add(self, request: vllm_side.Request, step: vllm_side.SchedulerOutput) -> None:
        self._vllm_allocated(request, 0)
        self.theirs.build_connector_meta(step)  # nothing of it is computed yet

    def _vllm_allocated(self, request: vllm_side.Request, num_external_tokens: int) -> None:
        blocks = self.manager.get_blocks(request.request_id)
        self.theirs.update_state_after_alloc(request, blocks, num_external_tokens)

    def _vllm_load(
        self, request: vllm_side.Request, stored: list[int], side: str, record: Record
    ) -> None:
        manager, offload, time = self.manager, self.theirs, self.clock.time
        request.num_computed_tokens = 0
        found, _ = time(side + "lookup", offload.get_num_new_matched_tokens, request, 0)
        manager.allocate_slots(
            request, 0, num_external_computed_tokens=found, delay_cache_blocks=True
        )
        # While a request waits for its load no step schedules it.
        meta = time(side + "plan load", self._vllm_plan_load, request, found, vllm_side.step())
        time(side + "loaded", offload.update_connector_output, vllm_side.loaded(request))
        manager.cache_blocks(request, found)
        request.num_computed_tokens = found
        table = manager.get_block_ids(request.request_id)
        step = vllm_side.step(new=[(request, table)])
        again = time(side + "skip", offload.build_connector_meta, step)
        time(side + "finish again", offload.request_finished_all_groups, request, table)
        manager.free(request)
        record([found])
        record(meta.load_gpu_blocks)
        record(places(stored, meta.load_cpu_blocks))
        record(again.store_gpu_blocks)

    def _vllm_plan_load(
        self, request: vllm_side.Request, num_tokens: int, step: vllm_side.SchedulerOutput
    ) -> vllm_side.SimpleCPUOffloadMetadata:
        self._vllm_allocated(request, num_tokens)
        return self.theirs.build_connector_meta(step)

    def _kvstow_turn(self, kind: str, record: Record) -> None:
        for request in self.requests:
            if kind:
                self.ours.reset()
            stored = self._kvstow_store(request, kind, record)
            self.ledger.pool.reset()
            self._kvstow_load(request, stored, kind, record)
            self.ledger.pool.reset()

    def _kvstow_store(self, request: vllm_side.Request, side: str, record: Record) -> list[int]:
        """Store a prompt, and return its host slots."""
        ledger, offload, time = self.ledger, self.ours, self.clock.time
        name, hashes = request.request_id, request.block_hashes
        ledger.add(name, hashes)
        ledger.allocate(name, NUM_TOKENS)
        table = ledger.block_table(name)
        time(side + "add", offload.add, name, hashes)
        job_id, ids, slots = time(side + "plan stores", self._kvstow_plan_stores, name, table)
        time(side + "stored", complete, offload, ledger, job_id)
        time(side + "finish", offload.finish, name)
        ledger.free(name)
        record(ids.tolist())
        record([offload.num_resident])
        host_slots: list[int] = slots.tolist()
        return host_slots

    def _kvstow_plan_stores(self, name: str, table: Ids) -> tuple[int, Ids, Ids]:
        return begin(self.ledger, self.ours.store([name], [NUM_TOKENS], table, [0, len(table)]))

    def _kvstow_load(
        self, request: vllm_side.Request, stored: list[int], side: str, record: Record
    ) -> None:
        ledger, offload, time = self.ledger, self.ours, self.clock.time
        name, hashes = request.request_id, request.block_hashes
        ledger.add(name, hashes)
        time(side + "add again", offload.add, name, hashes)
        found = time(side + "lookup", offload.lookup, name, 0, NUM_TOKENS) or 0
        allocated = ledger.allocate(name, 0, num_external_tokens=found, delay_caching=True) or ()
        job_id, ids, slots = time(
            side + "plan load", self._kvstow_plan_load, name, found, allocated
        )
        time(side + "loaded", complete, offload, ledger, job_id)
        ledger.cache(name, found)
        table = ledger.block_table(name)
        again = time(side + "skip", offload.store, [name], [found], table, [0, len(table)])
        time(side + "finish again", offload.finish, name)
        ledger.free(name)
        record([found])
        record(ids.tolist())
        record(places(stored, slots.tolist()))
        record([] if again is None else again.block_ids.tolist())

    def _kvstow_plan_load(
        self, name: str, num_tokens: int, block_ids: Sequence[Ids]
    ) -> tuple[int, Ids, Ids]:
        return begin(self.ledger, self.ours.load(name, num_tokens, block_ids))

    def _rows(self, kind: str, host: str) -> list[Row]:
        together = self.clock.together

        def row(work: str, *whats: str, ours: Sequence[str] = (), target: int | None = None) -> Row:
            return Row(
                work,
                together(*[f"vllm {kind}{what}" for what in whats]),
                together(*[kind + what for what in (*whats, *ours)]),
                num_per_turn=len(self.requests),
                target_ratio=target,
            )

        life = ("plan stores", "stored", "lookup", "plan load", "loaded")
        ends = ("add", "skip", "finish", "finish again")
        # The target is for a host with room. A full host has a row without a target.
        target = 30 if kind and self.num_host_blocks == NUM_BLOCKS else None
        return [
            row(f"store and load {NUM_BLOCKS:,} blocks, {host}", *life, target=target),
            row("  with add, the step after the load, finish", *life, *ends, ours=["add again"]),
            row("  plan the stores", "plan stores"),
            row("  stores completed", "stored"),
            row("  look it up", "lookup"),
            row("  plan the load", "plan load"),
            row("  load completed", "loaded"),
        ]


class OffloadDecode:
    """Steps of many decoding requests, 16 in each turn of a side.

    In the first steps, a sixteenth of the requests fills a block. Later steps are idle.
    """

    def __init__(self, num_turns: int) -> None:
        self.num_turns = num_turns
        self.clock = Clock()
        self.lengths = [512 + at for at in range(NUM_REQUESTS)]
        num_tokens = sum(self.lengths) + NUM_REQUESTS * (num_turns + 2) * BLOCK_SIZE
        num_blocks = num_tokens // BLOCK_SIZE + NUM_REQUESTS
        self.manager = vllm_side.manager(num_blocks, GROUPS)
        self.ledger = kvstow.BlockLedger(num_blocks, GROUPS)
        self.theirs = vllm_side.offload(self.manager, num_blocks + 1, GROUPS)
        self.ours = kvstow.OffloadScheduler(num_blocks, GROUPS)
        self.requests = [
            vllm_side.request(f"request-{at}", length, BLOCK_SIZE)
            for at, length in enumerate(self.lengths)
        ]
        # For each step of a turn: the step, the new hashes, the device blocks that vLLM stored.
        self.steps: list[tuple[vllm_side.SchedulerOutput, list[Hashes], list[int]]] = []

    def run(self) -> list[Row]:
        self._admit()
        gc.collect()
        gc.freeze()
        self._vllm_turn()
        self._kvstow_turn()
        self.clock.samples.clear()
        for _ in range(self.num_turns):
            # vLLM first, because its requests make the hashes for the other side.
            take_turns(0, self._vllm_turn, self._kvstow_turn)
        num_due = NUM_REQUESTS // BLOCK_SIZE
        due = self._row(
            f"offload: a step in which {num_due} of {NUM_REQUESTS} fill a block",
            ("vllm plan", "vllm stored"),
            ("plan", "stored"),
        )
        plan = self._row("  plan the stores", ("vllm plan",), ("plan",), most_ms=0.015)
        idle = self._run_idle()
        resident = [vllm_side.num_resident(self.theirs)]
        require_same("host blocks", resident, [self.ours.num_resident])
        self.ledger.check()
        self.ours.check()
        gc.unfreeze()
        return [*idle, due, plan]

    def _run_idle(self) -> list[Row]:
        # The blocks of the last step are stored. Then the step is idle, and is repeated.
        step = vllm_side.step(running=[(request, None) for request in self.requests])
        require_same("blocks stored", self._vllm_step(step), self._kvstow_step(step, []))
        self._vllm_idle(step)
        self._kvstow_idle(step)
        self.clock.samples.clear()
        for turn in range(self.num_turns):
            take_turns(
                turn,
                functools.partial(self._vllm_idle, step),
                functools.partial(self._kvstow_idle, step),
            )
        row = functools.partial(self._row, vllm=("vllm idle",))
        return [
            row(f"offload: an idle step of {NUM_REQUESTS}", ours=["idle"], target=100),
            row(f"  all {NUM_REQUESTS} named", ours=["idle, all named"]),
        ]

    def _admit(self) -> None:
        """Compute and store the prompts, all but the last token of each."""
        new = []
        for request, length in zip(self.requests, self.lengths, strict=True):
            name = request.request_id
            table = self.manager.allocate_slots(request, length).get_block_ids()
            self.theirs.update_state_after_alloc(request, self.manager.get_blocks(name), 0)
            new.append((request, table))
            self.ledger.add(name, request.block_hashes)
            self.ledger.allocate(name, length)
            self.ours.add(name, request.block_hashes)
        self.theirs.build_connector_meta(vllm_side.step(new=new))
        for request, length in zip(self.requests, self.lengths, strict=True):
            request.num_computed_tokens = length - 1
        step = vllm_side.step(running=[(request, None) for request in self.requests])
        require_same("blocks stored", self._vllm_step(step), self._kvstow_step(step, []))
        for request in self.requests:
            request.num_computed_tokens += 1

    def _vllm_turn(self) -> None:
        self.steps.clear()
        for _ in range(BLOCK_SIZE):
            hashes, running = [], []
            for request in self.requests:
                num_hashes = len(request.block_hashes)
                request.append_output_token_ids(request.num_tokens)  # what the last step sampled
                if len(request.block_hashes) > num_hashes:
                    hashes.append((request.request_id, request.block_hashes[-1:]))
                allocated = self.manager.allocate_slots(request, 1)
                running.append((request, allocated.get_block_ids(allow_none=True)))
            step = vllm_side.step(running=running)
            self.steps.append((step, hashes, self._vllm_step(step)))
            for request in self.requests:
                request.num_computed_tokens += 1

    def _vllm_step(self, step: vllm_side.SchedulerOutput) -> list[int]:
        meta = self.clock.time("vllm plan", self.theirs.build_connector_meta, step)
        report = vllm_side.stored(meta)
        self.clock.time("vllm stored", self.theirs.update_connector_output, report)
        stored: list[int] = meta.store_gpu_blocks
        return stored

    def _vllm_idle(self, step: vllm_side.SchedulerOutput) -> None:
        for _ in range(BLOCK_SIZE):
            self.clock.time("vllm idle", self.theirs.build_connector_meta, step)

    def _kvstow_turn(self) -> None:
        for step, hashes, stored in self.steps:
            require_same("blocks stored", stored, self._kvstow_step(step, hashes))
            names = step.scheduled_cached_reqs.req_ids
            self.ledger.allocate_step(names, [1] * len(names))

    def _kvstow_step(self, step: vllm_side.SchedulerOutput, hashes: list[Hashes]) -> list[int]:
        running, time = step.scheduled_cached_reqs, self.clock.time
        for name, each in hashes:
            self.ledger.extend(name, each)  # the device's own work
        job_id, ids, _ = time("plan", self._plan, running.req_ids, running.num_computed_tokens)
        time("stored", complete, self.ours, self.ledger, job_id)
        stored: list[int] = ids.tolist()
        return stored

    def _plan(self, names: list[str], computed: list[int]) -> tuple[int, Ids, Ids]:
        return begin(self.ledger, self._store(names, computed))

    def _store(self, names: list[str], computed: list[int]) -> kvstow.Job | None:
        return self.ours.store_step(self.ledger, names, computed)

    def _kvstow_idle(self, step: vllm_side.SchedulerOutput) -> None:
        running, time = step.scheduled_cached_reqs, self.clock.time
        names, computed = running.req_ids, running.num_computed_tokens
        for _ in range(BLOCK_SIZE):
            jobs = (
                time("idle", self.ours.store, [], [], [], [0]),
                time("idle, all named", self._store, names, computed),
            )
            if any(job is not None for job in jobs):
                sys.exit("kvstow found something to store in a step in which vLLM did not")

    def _row(
        self,
        work: str,
        vllm: Sequence[str],
        ours: Sequence[str],
        target: int | None = None,
        most_ms: float | None = None,
    ) -> Row:
        return Row(
            work,
            self.clock.together(*vllm),
            self.clock.together(*ours),
            num_per_turn=BLOCK_SIZE,
            target_ratio=target,
            target_most=most_ms,
        )


def begin(ledger: kvstow.BlockLedger, job: kvstow.Job | None) -> tuple[int, Ids, Ids]:
    """Read both ends of a job's copies, and pin its device blocks."""
    if job is None:
        sys.exit("kvstow found nothing to copy where vLLM did")
    ids = job.block_ids
    ledger.pool.pin(ids)
    return job.job_id, ids, job.host_slots


def complete(offload: kvstow.OffloadScheduler, ledger: kvstow.BlockLedger, job_id: int) -> None:
    """End a job, and unpin its device blocks."""
    end = offload.complete(job_id)
    if end is None or not end.ok:
        sys.exit(f"kvstow's job {job_id} has failed")
    ledger.pool.unpin(end.block_ids)


def places(stored: list[int], loaded: list[int]) -> list[int]:
    """Return the index of each loaded host block among the stored ones."""
    at = {block: place for place, block in enumerate(stored)}
    return [at[block] for block in loaded]
