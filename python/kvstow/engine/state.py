"""The state of an engine, in one object: ledger, scheduler, ranks and requests.

```
 awake    ledger, scheduler, ranks with movers, requests
   | fall_asleep   `asleep` holds all of it as bytes; the requests go, ledger and scheduler stay
   |               for inspection
 asleep
   | put_in        another ledger, scheduler, ranks and requests, all in one step
 awake
```
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import (
    BlockLedger,
    Job,
    KvstowError,
    LedgerPool,
    OffloadScheduler,
    StateError,
    UnknownRequest,
)
from kvstow.closing import call_all
from kvstow.engine.answers import Ids, Landed
from kvstow.engine.blueprint import Blueprint
from kvstow.engine.change import Change
from kvstow.engine.counts import HostCounts
from kvstow.engine.ranks import Ranks
from kvstow.engine.request import Known, Request
from kvstow.engine.snapshot_file import HOST, Image, To
from kvstow.transfer import Event

Ints: TypeAlias = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Asleep:
    """What is left of an engine while it sleeps.

    Attributes:
        image: its accounting.
        to: where it sleeps.
        sleep_id: id of this sleep, which the image holds too.
        lost: device blocks whose content is in no image.
    """

    image: Image
    to: To
    sleep_id: str
    lost: Ids

    @property
    def is_in_file(self) -> bool:
        """Whether the host memory is released."""
        return self.to is not HOST


class State:
    """What changes when an engine works, sleeps and wakes.

    Attributes:
        blueprint: how its parts are built.
        ledger: the device's accounting. It has the hashes and the block tables of the requests.
        scheduler: the host tier's accounting.
        ranks: the memories and the movers.
        requests: the requests by id. Recovery makes ledger and scheduler agree with it.
        running: the ids of the requests that run.
        unreported: what the next `poll` reports.
        num_query_tokens: tokens that admitted requests looked for on the device, in whole blocks.
        num_hit_tokens: tokens that they found there.
        evicted_before: the ledger, and how many blocks the ledgers before it evicted. A pair,
            because `stats` reads both at once from any thread.
        host_counts: what this scheduler and those before it have counted.
        asleep: what is left while the engine sleeps. None while it is awake.
        change: whether an operation was cut short.
        last_compute: of a lazy engine, the last compute that was reported.
        has_freed: whether requests have given up blocks since.
        weights_version: as the last reset, wake or restart has named the weights. None if none has,
            "" after a reset that was cut short. A tier below the host knows their name itself.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        ledger: BlockLedger,
        scheduler: OffloadScheduler,
        ranks: Ranks,
    ) -> None:
        self.blueprint = blueprint
        self.ledger, self.scheduler, self.ranks = ledger, scheduler, ranks
        self.requests: dict[str, Request] = {}
        self.running: set[str] = set()
        self.unreported = Landed()
        self.num_query_tokens = self.num_hit_tokens = 0
        self.evicted_before = ledger, 0
        self.host_counts = HostCounts(scheduler)
        self.asleep: Asleep | None = None
        self.change = Change()
        self.last_compute: Event | None = None
        self.has_freed = False
        self.weights_version: str | None = None
        self._refused_id = ""
        self._has_hashes = False  # whether ledger and scheduler are known to have one width

    @property
    def pool(self) -> LedgerPool:
        """The device pool."""
        return self.ledger.pool

    @property
    def num_usable(self) -> int:
        """Blocks that the device pool can give out: all but the null block."""
        return self.pool.num_blocks - 1

    @property
    def is_closed(self) -> bool:
        """Whether the host memory is released."""
        return any(arena.closed for arena in self.ranks.arenas)

    @property
    def is_new(self) -> bool:
        """Whether it has served no request yet."""
        is_used = self.requests or self.pool.num_cached or len(self.scheduler.used_slots())
        return not is_used

    # -- requests ------------------------------------------------------------------------------

    def request(self, request_id: str) -> Request:
        """Return a request.

        Raises:
            UnknownRequest: it was never added, or it has finished.
        """
        try:
            return self.requests[request_id]
        except (KeyError, TypeError):
            raise UnknownRequest(
                f"request {request_id!r} is not known: never added, or finished"
            ) from None

    def add(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        tokens: Ints | None,
        extra_keys: Sequence[Sequence[object] | None] | None,
    ) -> None:
        """Add a request to ledger and scheduler, and only then to `requests`.

        Of the first hashes, the scheduler checks the width before the ledger adopts it, because it
        may have a width from a file. Another ledger checks all else before the scheduler adopts it.
        """
        is_first = len(hashes) > 0 and not self._has_hashes
        if is_first:
            other = self.blueprint.ledger(2)  # the fewest blocks
            other.add(request_id, hashes, tokens=tokens, extra_keys=extra_keys)  # type: ignore[arg-type]
            # Recovery forgets only requests that the ledger has.
            self.ledger.add(request_id, [], tokens=None if tokens is None else [])
            try:
                self.scheduler.add(request_id, hashes)
            except KvstowError:
                self.ledger.free(request_id)
                raise
            self.change.commit()
            self.ledger.extend(request_id, hashes, tokens=tokens, extra_keys=extra_keys)  # type: ignore[arg-type]
        else:
            self.ledger.add(request_id, hashes, tokens=tokens, extra_keys=extra_keys)  # type: ignore[arg-type]
            self.change.commit()
            self.scheduler.add(request_id, hashes)
        self.requests[request_id] = Request(len(hashes))
        self._has_hashes |= is_first

    def extend(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        tokens: Ints | None,
        extra_keys: Sequence[Sequence[object] | None] | None,
    ) -> None:
        """Append hashes, as `add` adds them. If this is cut short, recovery drops them."""
        is_first = len(hashes) > 0 and not self._has_hashes
        if is_first:
            other = self.blueprint.ledger(2)
            known = self.ledger.known(request_id)
            other.add(request_id, known[0], tokens=known[1], extra_keys=known[2])  # type: ignore[arg-type]
            other.extend(request_id, hashes, tokens=tokens, extra_keys=extra_keys)  # type: ignore[arg-type]
            self.scheduler.extend(request_id, hashes)
            self.change.commit()
        self.ledger.extend(request_id, hashes, tokens=tokens, extra_keys=extra_keys)  # type: ignore[arg-type]
        self.change.commit()
        if not is_first:
            self.scheduler.extend(request_id, hashes)
        self.requests[request_id].num_hashes += len(hashes)
        self._has_hashes |= is_first

    def requests_that_run(self) -> set[str]:
        """Return the ids of the requests in state "running"."""
        return {name for name, request in self.requests.items() if request.state == "running"}

    def run(self, request_id: str) -> None:
        """Let an admitted request run."""
        request = self.requests[request_id]
        request.state, request.load_id = "running", 0
        self.running.add(request_id)

    def restart(self, request_id: str, *, recompute: bool = False) -> None:
        """Free a request's blocks and keep it added. Its load goes on, but no request waits for it.

        The engine's record changes first. If the rest is cut short, recovery finds an added request
        and frees what it holds.
        """
        self.forget_blocks(request_id, recompute=recompute)
        self.has_freed = True
        self.running.discard(request_id)
        self.scheduler.restart(request_id)
        self.ledger.restart(request_id)

    def forget_blocks(
        self, request_id: str, *, recompute: bool, known: Known | None = None
    ) -> None:
        """Record a request as one that was only added."""
        num_hashes = self.requests[request_id].num_hashes
        self.requests[request_id] = Request(num_hashes, recompute=recompute, known=known)

    def finish(self, request_id: str) -> None:
        """Forget a request. If this is cut short, recovery removes it from ledger and scheduler."""
        del self.requests[request_id]
        self.has_freed = True
        self.running.discard(request_id)
        self.scheduler.finish(request_id)
        self.ledger.free(request_id)

    def tables(self, request_id: str) -> tuple[Ids, ...]:
        """Return a request's block table per group. 0 stands where the group needs no block."""
        groups = range(self.ledger.num_groups)
        return tuple([self.ledger.block_table(request_id, group) for group in groups])

    def keep_host_hit(self, request_id: str) -> None:
        """Release what the last refused request found on the host, and keep this one's.

        So the host holds blocks for the head of a queue only.
        """
        if self._refused_id != request_id and self._refused_id in self.requests:
            self.scheduler.release(self._refused_id)
        self._refused_id = request_id

    def report_computed(
        self,
        counts: Sequence[tuple[str, int]],
        fresh: tuple[list[str], list[int]],
        deadline: float | None = None,
    ) -> Job | None:
        """Report computed tokens, and the blocks that they fill, to the scheduler.

        It learns only of `fresh` requests, because it would store all that stale ones hold. Returns
        the store that it plans, if any.
        """
        job = self.scheduler.store_step(self.ledger, *fresh, deadline=deadline)
        size = self.ledger.hash_block_size
        for name, count in counts:
            request = self.requests[name]
            request.num_computed, request.due_tokens = count, (count // size + 1) * size
        return job

    def fresh(self, counts: Sequence[tuple[str, int]]) -> tuple[list[str], list[int]]:
        """Return the requests that are not stale, and their counts."""
        fresh = [each for each in counts if not self.requests[each[0]].is_stale]
        return [name for name, _ in fresh], [count for _, count in fresh]

    def make_stale(self) -> None:
        """Let the requests that hold blocks cache nothing more, because a reset follows."""
        for request in self.requests.values():
            request.is_stale |= request.state != "added"

    def rewind(self, request_id: str, num_tokens: int) -> None:
        """Take granted tokens back. The blocks that they filled are due again.

        The engine's record changes first. If the rest is cut short, blocks are only reported again.
        """
        request, size = self.requests[request_id], self.ledger.hash_block_size
        num_hashed = self.ledger.num_hashes(request_id) * size
        if num_tokens < num_hashed <= self.ledger.num_granted_tokens(request_id):
            # The hash would be that of the rejected tokens, and the block would hold others.
            raise StateError(
                f"cannot rewind request {request_id!r} to {num_tokens} tokens: it has hashes of "
                f"{num_hashed}. Pass all of its tokens that stay, the prompt included, and call "
                "rewind before you extend it; if it has hashes of tokens that are rejected, finish "
                "it, and add it again"
            )
        before = request.num_computed, request.due_tokens
        request.num_computed = min(request.num_computed, num_tokens)
        request.due_tokens = min(request.due_tokens, (num_tokens // size + 1) * size)
        try:
            self.ledger.rewind(request_id, num_tokens)
        except KvstowError:
            request.num_computed, request.due_tokens = before
            raise

    # -- results for poll ----------------------------------------------------------------------

    def report_store(self, num_blocks: int, num_failed: int) -> None:
        """Add the end of stores to what `poll` reports."""
        found = self.unreported
        self.unreported = replace(
            found,
            num_stored_blocks=found.num_stored_blocks + num_blocks,
            num_failed_stores=found.num_failed_stores + num_failed,
        )

    def withdraw(self, request_id: str) -> None:
        """Report no earlier load of a request, because its user finishes or preempts it now.

        The request may be admitted again, or another one may get its id, before `poll` reports.
        """
        for names in self.unreported.loaded, self.unreported.failed:
            names[:] = [name for name in names if name != request_id]

    def take_unreported(self) -> Landed:
        """Return what no `poll` has reported yet.

        A request may have changed its state since, if a call was cut short: leave it out.
        """
        found, requests = self.unreported, self.requests
        if found.loaded or found.failed:
            states = {name: request.state for name, request in requests.items()}
            found.loaded[:] = [name for name in found.loaded if states.get(name) == "running"]
            found.failed[:] = [name for name in found.failed if states.get(name) == "added"]
        self.unreported = Landed()
        return found

    # -- sleep and recovery --------------------------------------------------------------------

    def fall_asleep(self, asleep: Asleep) -> None:
        """Keep `asleep`, and release the rest. Ledger and scheduler stay for inspection."""
        self.change.commit()
        self.ranks.close()
        self.asleep = asleep
        self.forget_device()

    def forget_device(self) -> None:
        """Release what a sleeping engine must not hold. A second call does nothing."""
        assert self.asleep is not None, "only a sleeping engine forgets its device"
        self.pool.evict(self.asleep.lost)
        self.ranks.let_go()
        self.requests.clear()
        self.running.clear()
        if self.asleep.is_in_file:
            call_all([arena.close for arena in self.ranks.arenas])

    def adopt(self, requests: dict[str, Request], unreported: Landed) -> None:
        """Know these requests, which ledger and scheduler know already."""
        self.requests, self.unreported = requests, unreported
        self.running = self.requests_that_run()

    def put_in(self, state: "State") -> None:
        """Become another state, which is awake, and count on from this one.

        If it lacks a name of the weights, that of this one stays. One call sets all of it, so that
        an interrupt finds the old state or the new one.
        """
        counts = {
            "evicted_before": (state.ledger, self.num_evicted()),
            "host_counts": self.host_counts.go_on(state.scheduler),
            "num_query_tokens": self.num_query_tokens,
            "num_hit_tokens": self.num_hit_tokens,
            "weights_version": state.weights_version or self.weights_version,
        }
        vars(self).update(vars(state) | counts)

    def renew_movers(self) -> None:
        """Replace the movers by new ones, which know nothing of the copies before them."""
        self.ranks = self.blueprint.ranks(self.ranks.layouts, self.ranks.arenas)

    # -- counts -------------------------------------------------------------------------------

    def count_query(self, request_id: str, num_tokens: int, num_hit: int) -> None:
        """Count what an admitted request looked for on the device, and what it found."""
        size = self.ledger.hit_block_size
        num_known = self.requests[request_id].num_hashes * self.ledger.hash_block_size
        self.num_query_tokens += min(num_tokens - 1, num_known) // size * size
        self.num_hit_tokens += num_hit

    def num_evicted(self) -> int:
        """Return the blocks that this ledger and those before it have evicted."""
        ledger, evicted_before = self.evicted_before
        return evicted_before + ledger.pool.num_evicted

    def capacity_tokens(self) -> int:
        """Return the prompt tokens that the device holds if every group keeps all its blocks."""
        size = self.ledger.hit_block_size
        num_each = sum(size // group.block_size for group in self.blueprint.groups)
        return self.num_usable // num_each * size

    def stats(self) -> dict[str, int]:
        """Return those of the host tier, and what the ledger and the requests count."""
        ledger, evicted_before = self.evicted_before
        pool = ledger.pool
        return self.host_counts.stats() | {
            "requests": ledger.num_requests,
            "device_blocks_free": pool.num_free,
            "device_blocks_cached": pool.num_cached,
            "device_evicted_blocks": evicted_before + pool.num_evicted,
            "device_capacity_blocks": pool.num_blocks - 1,
            "device_capacity_tokens": self.capacity_tokens(),
            "capacity_blocks": self.scheduler.num_host_blocks,
            "device_query_tokens": self.num_query_tokens,
            "device_hit_tokens": self.num_hit_tokens,
        }

    def check(self) -> None:
        """Verify every invariant. Raises `StateError` if one is broken."""
        self.ledger.check()
        self.scheduler.check()
        if self.asleep is None and len(self.requests) != self.ledger.num_requests:
            raise StateError(
                f"{len(self.requests)} requests, {self.ledger.num_requests} in the ledger"
            )
        running = self.requests_that_run()
        if running != self.running:
            raise StateError(f"{sorted(running)} run, the running set is {sorted(self.running)}")
