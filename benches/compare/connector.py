"""What does kvstow's scheduler half cost vLLM's scheduler, compared with vLLM's own connector?

The bench compares `SimpleCPUOffloadScheduler` with `kvstow.vllm.scheduler.SchedulerHalf`. Neither
needs an engine. Each has a `KVCacheManager` and is called as vLLM's scheduler calls a connector,
with the same requests and the same schedule. Both must find, store and load the same blocks, and
load them in the same steps.

- The times include only the calls of the connector: lookup, allocation, the end of scheduling, the
  workers' reports, and the end of a request. The references that each side takes and drops in
  vLLM's pool, so that blocks outlive a copy, are part of them.
- The times exclude block hashes, the manager's work, and vLLM's objects that describe a step
  (`SchedulerOutput`, `KVConnectorOutput`).
- A copy takes no time: the workers report it in the step that begins it.
- Both sides keep no events.

Run it from the project's folder: `python -m benches.compare.connector [--json]`.
"""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from kvstow import FullAttention
from kvstow.vllm.connector import GATHERED_TOKENS
from kvstow.vllm.messages import StepJobs, StepReports
from kvstow.vllm.model import Model
from kvstow.vllm.options import Options
from kvstow.vllm.scheduler import SchedulerHalf
from kvstow.vllm.tier import HostTier

from . import report, vllm_side
from .measure import Clock, Row, require_same, take_turns
from .vllm_side import KVCacheManager, KVConnectorOutput, Request, SchedulerOutput

BLOCK_SIZE = 16
NUM_BLOCKS = 8_192
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE
NUM_REQUESTS = 256
NUM_GATHERED_STEPS = GATHERED_TOKENS // NUM_REQUESTS
# The prompt at once, in vLLM's chunks on a large GPU, and in chunks among many other requests.
CHUNKS_TOKENS = (NUM_TOKENS, 8_192, 512)
TARGET_RATIO = 10  # the target: at most a tenth of vLLM's time
GROUPS = (FullAttention(block_size=BLOCK_SIZE),)

# The copies of a step: device blocks stored, device blocks loaded.
Copied: TypeAlias = tuple[list[int], list[int]]


class Half(Protocol):
    """The calls of both sides, under vLLM's names."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]: ...

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any: ...

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None: ...

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> Any: ...

    def reset(self) -> Any: ...


class Ours:
    """kvstow's half under vLLM's names, as `KVStowConnector` calls it."""

    def __init__(self, manager: KVCacheManager, num_host_blocks: int, *, is_tight: bool) -> None:
        # vLLM's half does not limit what its stores hold.
        num_device_blocks = manager.block_pool.num_gpu_blocks
        options = Options(
            num_cpu_blocks=num_host_blocks, max_store_blocks_in_flight=num_device_blocks
        )
        model = Model(num_device_blocks, GROUPS, ((),), BLOCK_SIZE)
        tier = HostTier(
            model,
            options,
            world_size=1,
            horizon_blocks=0,
            gathered_tokens=0 if is_tight else GATHERED_TOKENS,
        )
        self.half = SchedulerHalf(tier)
        self.half.bind(manager)
        self.half.create_tier(num_host_blocks)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found = self.half.lookup(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        self.half.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepJobs:
        return self.half.build(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.half.processed(connector_output)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        self.half.finished(request)
        return False, None

    def reset(self) -> None:
        self.half.reset()


def our_report(jobs: StepJobs, loading: Request | None) -> KVConnectorOutput:
    """Return the worker's report of a step in which all copies have ended."""
    reports = [(copies.job_id, 0, True) for copies in (*jobs.loads, *jobs.stores)]
    return KVConnectorOutput(kv_connector_worker_meta=StepReports(reports) if reports else None)


def our_copies(jobs: StepJobs) -> Copied:
    stored, loaded = (
        [block for copies in each for block in copies.block_ids.tolist()]
        for each in (jobs.stores, jobs.loads)
    )
    return stored, loaded


def their_report(meta: Any, loading: Request | None) -> KVConnectorOutput:
    if meta.load_event >= 0:
        assert loading is not None
        return vllm_side.loaded(loading)
    return vllm_side.stored(meta) if meta.store_event >= 0 else KVConnectorOutput()


def their_copies(meta: Any) -> Copied:
    return meta.store_gpu_blocks, meta.load_gpu_blocks


@dataclass(frozen=True)
class Side:
    """A connector's scheduler half over its own manager."""

    name: str
    manager: KVCacheManager
    half: Half
    clock: Clock
    report: Callable[[Any, Request | None], KVConnectorOutput]
    copies: Callable[[Any], Copied]

    def admit(self, request: Request, num_tokens: int, what: str) -> int:
        """Look a request up and give it blocks; return the tokens of its load."""
        time = self.clock.time
        request.num_computed_tokens = 0
        found, _ = time(what, self.half.get_num_new_matched_tokens, request, 0)
        assert found is not None
        if found:
            num_tokens = 0
        self.manager.allocate_slots(
            request,
            num_tokens,
            num_external_computed_tokens=found,
            delay_cache_blocks=found > 0,
        )
        blocks = self.manager.get_blocks(request.request_id)
        time(what, self.half.update_state_after_alloc, request, blocks, found)
        return found

    def begin(self, what: str, output: SchedulerOutput) -> Any:
        """End the scheduling of a step, and return the message to the workers."""
        return self.clock.time(what, self.half.build_connector_meta, output)

    def end(self, what: str, message: Any, loading: Request | None = None) -> Copied:
        """Do what follows the compute of a step, and return what its workers have copied."""
        self.clock.time(what, self.half.update_connector_output, self.report(message, loading))
        return self.copies(message)

    def finish(self, request: Request, what: str) -> None:
        table = self.manager.get_block_ids(request.request_id)
        self.clock.time(what, self.half.request_finished_all_groups, request, table)
        self.manager.free(request)


def sides(
    num_device_blocks: int, num_host_blocks: int, clock: Clock, *, is_tight: bool
) -> tuple[Side, Side]:
    """Return vLLM's side and kvstow's, which gathers no stores if the device is tight."""
    theirs, ours = (vllm_side.manager(num_device_blocks, GROUPS) for _ in range(2))
    offload = vllm_side.offload(theirs, num_host_blocks + 1, GROUPS)  # it has a null block
    return (
        Side("vllm", theirs, offload, clock, their_report, their_copies),
        Side(
            "kvstow",
            ours,
            Ours(ours, num_host_blocks, is_tight=is_tight),
            clock,
            our_report,
            our_copies,
        ),
    )


class Prompts:
    """A turn is one prompt on one side: computed, stored, dropped from the device, and loaded.

    The host is empty before each turn, or it is full. A full host holds one prompt, and two prompts
    take turns, so that a store evicts as many blocks as it takes.
    """

    def __init__(
        self, num_turns: int, *, chunk_tokens: int, is_full: bool, is_tight: bool = False
    ) -> None:
        self.num_turns = num_turns
        self.chunk_tokens = chunk_tokens
        self.is_full = is_full
        self.is_tight = is_tight
        self.clock = Clock()
        # One token more than the blocks hold, because vLLM computes the last one.
        self.requests = [
            vllm_side.request(f"prompt-{at}", NUM_TOKENS + 1, BLOCK_SIZE) for at in range(2)
        ]
        self.sides = sides(2 * NUM_BLOCKS, NUM_BLOCKS, self.clock, is_tight=is_tight)
        self.totals: dict[str, list[float]] = {}

    def run(self) -> list[Row]:
        gc.collect()
        gc.freeze()
        for turn in range(-2, self.num_turns):
            if turn == 0:
                self.totals.clear()  # the first two fill the host
            self._turn(turn)
        gc.unfreeze()
        num_chunks = NUM_TOKENS // self.chunk_tokens
        chunks = "one chunk" if num_chunks == 1 else f"{num_chunks} chunks"
        host = ", evicting as many" if self.is_full else ""
        host += ", tight device" if self.is_tight else ""
        return [
            self._row(
                f"a prompt of {NUM_BLOCKS:,} blocks in {chunks}{host}",
                "store",
                "load",
                target=not self.is_tight,
            ),
            self._row("  missed, computed, stored, finished", "store", target=False),
            self._row("  found, loaded, finished", "load", target=False),
        ]

    def _turn(self, turn: int) -> None:
        request = self.requests[turn % 2]
        did: dict[str, list[Copied]] = {}

        def prompt(side: Side) -> None:
            did[side.name] = list(self._prompt(side, request))

        vllm, kvstow = self.sides
        take_turns(turn, functools.partial(prompt, vllm), functools.partial(prompt, kvstow))
        for at, (theirs, ours) in enumerate(zip(did["vllm"], did["kvstow"], strict=True)):
            require_same(f"blocks loaded in step {at}", theirs[1], ours[1])
        stored = [[block for step in did[side] for block in step[0]] for side in ("vllm", "kvstow")]
        require_same("blocks stored", *stored)
        for what, samples in self.clock.samples.items():
            self.totals.setdefault(what, []).append(sum(samples))
        self.clock.samples.clear()

    def _prompt(self, side: Side, request: Request) -> Iterator[Copied]:
        """Yield the copies of each step."""
        manager, name, chunk = side.manager, request.request_id, self.chunk_tokens
        what = f"{side.name} store"
        if not self.is_full:
            side.half.reset()

        def step(
            output: SchedulerOutput, num_tokens: int = 0, loading: Request | None = None
        ) -> Copied:
            message = side.begin(what, output)
            request.num_computed_tokens += num_tokens
            return side.end(what, message, loading)

        require_same("tokens found", [0], [side.admit(request, chunk, what)])
        table = manager.get_block_ids(name)
        yield step(vllm_side.step([(request, table)], num_tokens=chunk), chunk)
        # Then come the other chunks, and the last token, in whose step the last stores begin.
        for num_tokens in [chunk] * (NUM_TOKENS // chunk - 1) + [1]:
            allocated = manager.allocate_slots(request, num_tokens).get_block_ids(allow_none=True)
            output = vllm_side.step(running=[(request, allocated)], num_tokens=num_tokens)
            yield step(output, num_tokens)
        side.finish(request, what)
        manager.reset_prefix_cache()

        what = f"{side.name} load"
        found = side.admit(request, 0, what)
        require_same("tokens found", [NUM_TOKENS], [found])
        # While a request waits for its load no step schedules it.
        yield step(vllm_side.step(), loading=request)
        manager.cache_blocks(request, found)
        request.num_computed_tokens = found
        manager.allocate_slots(request, 1)
        blocks = manager.get_blocks(name)
        side.clock.time(what, side.half.update_state_after_alloc, request, blocks, 0)
        yield step(vllm_side.step([(request, blocks.get_block_ids())]), 1)
        side.finish(request, what)
        manager.reset_prefix_cache()

    def _row(self, work: str, *whats: str, target: bool = True) -> Row:
        vllm, kvstow = (
            [sum(each) for each in zip(*(self.totals[f"{side} {w}"] for w in whats), strict=True)]
            for side in ("vllm", "kvstow")
        )
        return Row(work, vllm, kvstow, target_ratio=TARGET_RATIO if target else None)


class Decode:
    """Steps of decoding requests, each on one side after the other.

    Either all requests fill a block in the same step (`together`), and 14 of 16 steps are idle. Or
    a sixteenth of the requests fills a block in each step.
    """

    def __init__(self, num_turns: int, *, together: bool, is_tight: bool = False) -> None:
        self.num_steps = num_turns * (BLOCK_SIZE if together else NUM_GATHERED_STEPS)
        self.together = together
        self.is_tight = is_tight
        self.clock = Clock()
        lengths = [512 if together else 512 + at for at in range(NUM_REQUESTS)]
        num_tokens = sum(lengths) + NUM_REQUESTS * (self.num_steps + 2 * BLOCK_SIZE)
        num_blocks = num_tokens // BLOCK_SIZE + NUM_REQUESTS
        self.sides = sides(2 * num_blocks, num_blocks, self.clock, is_tight=is_tight)
        self.requests = [
            vllm_side.request(f"request-{at}", length, BLOCK_SIZE)
            for at, length in enumerate(lengths)
        ]
        self.stored: dict[str, list[int]] = {side.name: [] for side in self.sides}

    def run(self) -> list[Row]:
        for side in self.sides:
            for request in self.requests:
                side.admit(request, request.num_tokens, "prefill")
        self._step(0, is_first=True)
        for step in range(BLOCK_SIZE):
            self._step(step)
        self.clock.samples.clear()
        gc.collect()
        gc.freeze()
        for step in range(self.num_steps):
            self._step(step)
        gc.unfreeze()
        rows = self._rows()
        self._require_same()
        return rows

    def _rows(self) -> list[Row]:
        if self.together:
            return [self._row(f"a step of {NUM_REQUESTS} requests, none of which fills a block")]
        num_full = NUM_REQUESTS // BLOCK_SIZE
        device = ", tight device" if self.is_tight else ""
        return [self._row(f"a step in which {num_full} of {NUM_REQUESTS} fill a block{device}")]

    def _step(self, step: int, *, is_first: bool = False) -> None:
        order = self.sides if step % 2 else self.sides[::-1]
        begun = {}
        for side in order:
            tables = [self._allocate(side, request, is_first) for request in self.requests]
            given = list(zip(self.requests, tables, strict=True))
            output = vllm_side.step(new=given) if is_first else vllm_side.step(running=given)
            if is_first:
                output.num_scheduled_tokens = {r.request_id: r.num_tokens for r in self.requests}
                output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
            begun[side.name] = side.begin(side.name, output)
        for request in self.requests:
            request.num_computed_tokens += request.num_tokens if is_first else 1
            request.append_output_token_ids(request.num_tokens)
        for side in order:
            self.stored[side.name] += side.end(side.name, begun[side.name])[0]

    def _require_same(self) -> None:
        """Compare what both sides have stored, once kvstow has stored what it gathered."""
        for side in self.sides:
            if isinstance(side.half, Ours):
                side.half.half.stores.store_gathered()
        self._step(0)
        require_same("blocks stored", *map(sorted, self.stored.values()))

    def _allocate(self, side: Side, request: Request, is_first: bool) -> Any:
        if is_first:
            return side.manager.get_block_ids(request.request_id)
        return side.manager.allocate_slots(request, 1).get_block_ids(allow_none=True)

    def _row(self, work: str) -> Row:
        vllm, kvstow = (self._per_step(side.name) for side in self.sides)
        return Row(work, vllm, kvstow, target_ratio=None if self.is_tight else TARGET_RATIO)

    def _per_step(self, name: str) -> list[float]:
        """Return the times of the steps in which neither side stores, or means of all steps."""
        samples = self.clock.samples[name]
        steps = [begin + end for begin, end in zip(samples[::2], samples[1::2], strict=True)]
        if self.together:
            return [each for at, each in enumerate(steps) if 0 < at % BLOCK_SIZE < BLOCK_SIZE - 1]
        return [
            statistics.fmean(steps[at : at + NUM_GATHERED_STEPS])
            for at in range(0, len(steps), NUM_GATHERED_STEPS)
        ]


if __name__ == "__main__":
    report.main(
        __doc__,
        [
            *(
                functools.partial(Prompts, chunk_tokens=chunk_tokens, is_full=is_full)
                for chunk_tokens in CHUNKS_TOKENS
                for is_full in (False, True)
            ),
            functools.partial(Prompts, chunk_tokens=512, is_full=False, is_tight=True),
            functools.partial(Decode, together=True),
            functools.partial(Decode, together=False),
            functools.partial(Decode, together=False, is_tight=True),
        ],
    )
