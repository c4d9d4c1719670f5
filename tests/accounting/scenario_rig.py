"""A rig of `BlockLedger` and `OffloadScheduler` over two memories that hold names, not bytes.

A prompt is a string with one letter per block. Each token of a block is that letter, too. The
content of a block is its group and the text up to the last token written. So a test sees a block
that is lost, stale, swapped, or copied before it was computed. The rig derives what it expects
from the configuration.

    step:  grant -------> compute ------> report ----------> end
           the ledger     writes names    the scheduler      copies the names and
           gives blocks   to the device   plans a job, and   unpins the blocks
                                          pins its blocks
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
import pytest

from kvstow import (
    BlockLedger,
    BlockRemoved,
    BlockStored,
    FullAttention,
    Hashes,
    Job,
    OffloadScheduler,
    SlidingWindow,
    StateSpace,
    hash_tokens,
)

Group: TypeAlias = FullAttention | SlidingWindow | StateSpace
Name: TypeAlias = tuple[int, str]
"""A group, and the text up to the last token of a block that is written."""

UNWRITTEN: Name = (-1, "unwritten")
TORN: Name = (-1, "torn")
ALL = 2**40


def full(block_size: int) -> list[Group]:
    return [FullAttention(block_size)]


def window(block_size: int) -> list[Group]:
    """Return a model whose window reaches into the second block back."""
    return [FullAttention(block_size), SlidingWindow(block_size, block_size + 2)]


def state(block_size: int) -> list[Group]:
    return [FullAttention(block_size), StateSpace(block_size)]


BLOCK_SIZES = (1, 4, 16)
MODELS = [
    pytest.param(make(size), id=f"{make.__name__}-{size}")
    for make in (full, window, state)
    for size in BLOCK_SIZES
]
every_model = pytest.mark.parametrize("groups", MODELS)
HYBRIDS = [param for param in MODELS if not str(param.id).startswith("full")]


def num_skipped(group: Group, num_tokens: int) -> int:
    """Return the number of leading blocks that a hit of this many tokens does not need."""
    tokens = 0
    if isinstance(group, SlidingWindow):
        tokens = max(0, num_tokens - group.window + 1)
    elif isinstance(group, StateSpace):
        tokens = max(0, num_tokens - 1)
    return tokens // group.block_size


@dataclass
class Request:
    """A request: its final text, and the numbers of known, granted and computed tokens."""

    text: str
    num_known: int
    num_granted: int = 0
    num_computed: int = 0
    num_reported: list[int] = field(default_factory=list)
    """By group: how many blocks of the block table the scheduler knows."""


class Rig:
    """A ledger, a scheduler, the two memories, and the jobs in flight."""

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        num_device: int = 300,
        num_host: int = 300,
        mode: Literal["eager", "lazy"] = "eager",
        blocks_per_slot: int = 1,
    ) -> None:
        self.groups, self.size = groups, groups[0].block_size
        self.num_device, self.mode, self.blocks_per_slot = num_device, mode, blocks_per_slot
        self.ledger = BlockLedger(num_device + 1, groups)
        self.scheduler = OffloadScheduler(
            num_host,
            groups,
            mode=mode,
            blocks_per_slot=blocks_per_slot,
            num_device_blocks=num_device + 1,
            events=True,
        )
        self.device: dict[int, Name] = dict.fromkeys(range(1, num_device + 1), UNWRITTEN)
        self.host: dict[int, Name] = {}
        self.requests: dict[str, Request] = {}
        self.text_of: dict[bytes, str] = {}
        self.on_host: set[Name] = set()
        """The names of the last blocks of slots that a lookup can find, according to the events."""
        self.jobs: dict[int, Job] = {}
        self.storing: dict[int, list[Name]] = {}
        self.loading: dict[int, tuple[str, Request, list[Name]]] = {}
        self.num_probes = 0

    # -- names -------------------------------------------------------------------------------

    def text(self, prompt: str) -> str:
        return "".join(letter * self.size for letter in prompt)

    def name(self, group: int, text: str, index: int) -> Name:
        return group, text[: (index + 1) * self.size]

    def names(self, prompt: str, start: int = 0, *, hit: bool = False) -> set[Name]:
        """Return all full blocks from `start` on. With `hit`, only those that a hit reads."""
        text, end = self.text(prompt), len(prompt)
        return {
            self.name(at, text, index)
            for at, group in enumerate(self.groups)
            for index in range(max(start, num_skipped(group, len(text)) if hit else 0), end)
        }

    def hashes(self, text: str) -> Hashes:
        hashes = hash_tokens([ord(token) for token in text], self.size)
        for index, hash in enumerate(hashes):
            self.text_of[hash] = self.name(0, text, index)[1]
        return hashes

    # -- requests ----------------------------------------------------------------------------

    def add(self, id: str, prompt: str, num_known: int | None = None) -> None:
        """Add a request. With `num_known`, only so many tokens are its prompt, the rest output."""
        self._add(id, Request(self.text(prompt), num_known or len(self.text(prompt))))

    def _add(self, id: str, request: Request) -> None:
        hashes = self.hashes(request.text[: request.num_known])
        self.ledger.add(id, hashes)
        self.scheduler.add(id, hashes)
        request.num_reported = [0 for _ in self.groups]
        self.requests[id] = request
        self.check()

    def generate(self, id: str) -> None:
        """Add a known token. If it ends a block, add the hash of the block."""
        request = self.requests[id]
        request.num_known += 1
        if request.num_known % self.size == 0:
            hashes = self.hashes(request.text[: request.num_known])[-1:]
            self.ledger.extend(id, hashes)
            self.scheduler.extend(id, hashes)
        self.check()

    def admit(self, id: str, *, host: bool = True, num_accepted: int | None = None) -> Job | None:
        """Allocate a request with its local hit, and load what the host has.

        The load has at most `num_accepted` blocks. Return its job, if there is one.
        """
        request = self.requests[id]
        hit = self.ledger.lookup(id, request.num_known - 1)
        num_external = 0
        if host:
            found = self.scheduler.lookup(id, hit.num_tokens, request.num_known - 1)
            assert found is not None, "the lookup is pending"
            num_external = found if num_accepted is None else num_accepted * self.size
            assert num_external <= found
        if not hit.num_tokens + num_external:
            return None
        allocated = self.ledger.allocate(
            id, 0, hit=hit, num_external_tokens=num_external, delay_caching=num_external > 0
        )
        assert allocated is not None
        self._forget(np.concatenate(allocated).tolist())
        request.num_granted = request.num_computed = hit.num_tokens + num_external
        job = None
        if num_external:
            job = self.scheduler.load(id, num_external, allocated)
            assert job.block_ids.tolist() == np.concatenate(allocated).tolist()
            start, end = hit.num_tokens // self.size, request.num_computed // self.size
            wanted = [
                self.name(at, request.text, index)
                for at, group in enumerate(self.groups)
                for index in range(max(start, num_skipped(group, request.num_computed)), end)
            ]
            self.loading[job.job_id] = id, request, wanted
            self._start(job)
        self.check()
        return job

    def grant(self, tokens: dict[str, int]) -> None:
        """Allocate blocks for so many more tokens of each request. They hold nothing yet."""
        step = self.ledger.allocate_step(list(tokens), list(tokens.values()))
        assert step.num_granted == len(tokens)
        self._forget(step.ids.tolist())
        for id, num_tokens in tokens.items():
            self.requests[id].num_granted += num_tokens
        self.check()

    def compute(self, ids: Iterable[str]) -> None:
        """Check the blocks that the granted tokens attend to, and write the tokens."""
        for id in ids:
            request = self.requests[id]
            start, stop = request.num_computed, request.num_granted
            assert stop <= request.num_known
            for at, group in enumerate(self.groups):
                table = self.ledger.block_table(id, at).tolist()
                for index in range(num_skipped(group, start), start // self.size):
                    assert self.device[table[index]] == self.name(at, request.text, index)
                for index in range(start // self.size, -(-stop // self.size)):
                    end = min(stop, (index + 1) * self.size)
                    self.device[table[index]] = at, request.text[:end]
            request.num_computed = stop
        self.check()

    def report(self, *ids: str) -> Job | None:
        """Report the new blocks and computed tokens of requests to the scheduler.

        Return its job, after the check that the job stores only computed blocks with known hashes.
        """
        new: list[int] = []
        offsets = [0]
        for id in ids:
            request = self.requests[id]
            for at, num_reported in enumerate(request.num_reported):
                new += self.ledger.block_table(id, at).tolist()[num_reported:]
                request.num_reported[at] += len(new) - offsets[-1]
                offsets.append(len(new))
        computed = [self.requests[id].num_computed for id in ids]
        return self._store(self.scheduler.store(ids, computed, new, offsets))

    def step(self, tokens: dict[str, int]) -> Job | None:
        self.grant(tokens)
        self.compute(tokens)
        return self.report(*tokens)

    def store_evictable(self, num_blocks: int) -> Job | None:
        order = self.ledger.pool.free_order().tolist()
        job = self._store(self.scheduler.store_evictable(self.ledger.pool, num_blocks))
        assert self.ledger.pool.free_order().tolist() == order
        return job

    def finish(self, id: str) -> None:
        del self.requests[id]
        self.scheduler.finish(id)
        self.ledger.free(id)
        self.check()

    def preempt(self, id: str) -> None:
        """Free all blocks of a request, and add it again with its known tokens."""
        request = self.requests[id]
        self.finish(id)
        self._add(id, Request(request.text, request.num_known))

    # -- copies ------------------------------------------------------------------------------

    def _forget(self, ids: list[int]) -> None:
        self.device |= dict.fromkeys(ids, UNWRITTEN)

    def _start(self, job: Job) -> None:
        assert len(job) == len(job.block_ids) == len(job.host_slots) > 0
        assert 0 not in job.block_ids
        self.jobs[job.job_id] = job
        self.ledger.pool.pin(job.block_ids)

    def _store(self, job: Job | None) -> Job | None:
        self.check()  # first, because a job may store a block again that it has just evicted
        if job is not None:
            self._start(job)
            names = [self.device[id] for id in job.block_ids.tolist()]
            for at, (begin, end) in enumerate(pairwise(job.offsets.tolist())):
                for group, text in names[begin:end]:
                    assert group == at
                    assert text in self.text_of.values()
            assert len(set(names)) == len(names)
            assert self.on_host.isdisjoint(names)
            assert not set(names) & {name for job in self.storing.values() for name in job}
            self.storing[job.job_id] = names
        return job

    def end(self, job: Job, *, ok: bool = True) -> None:
        """Copy all blocks of a job, or tear them if not `ok`. Then complete it, and unpin them."""
        del self.jobs[job.job_id]
        is_store = job.job_id in self.storing
        for id, place in zip(job.block_ids.tolist(), job.host_slots.tolist(), strict=True):
            if is_store:
                self.host[place] = self.device[id] if ok else TORN
            else:
                self.device[id] = self.host[place] if ok else TORN
        if is_store:
            names = self.storing.pop(job.job_id)
            assert [self.host[place] for place in job.host_slots.tolist()] == names or not ok
        else:
            id, request, names = self.loading.pop(job.job_id)
            assert [self.device[block] for block in job.block_ids.tolist()] == names or not ok
            if ok and self.requests.get(id) is request:
                self.ledger.cache(id, request.num_computed)
        end = self.scheduler.complete(job.job_id, ok=ok)
        assert end is not None
        assert end.ok == ok
        assert end.block_ids.tolist() == job.block_ids.tolist()
        self.ledger.pool.unpin(end.block_ids)
        self.check()

    def copied(self, job: Job | None) -> set[Name]:
        """Return the names that a job in flight copies."""
        if job is None:
            return set()
        stored = self.storing.get(job.job_id)
        return set(self.loading[job.job_id][2] if stored is None else stored)

    def land(self) -> None:
        for job in list(self.jobs.values()):
            self.end(job)

    # -- shorthands -----------------------------------------------------------------------------

    def prefill(self, id: str, num_chunks: int = 1) -> None:
        """Compute the rest of the known tokens, in chunks that differ by at most one token."""
        request = self.requests[id]
        ends = np.linspace(request.num_computed, request.num_known, num_chunks + 1).astype(int)
        for begin, end in pairwise(ends.tolist()):
            if begin < end:
                self.step({id: end - begin})

    def serve(self, id: str, prompt: str, *, host: bool = True) -> None:
        """Run a request from its admission to its end, and land all its copies."""
        self.add(id, prompt)
        self.admit(id, host=host)
        self.land()
        self.prefill(id)
        self.land()
        self.finish(id)

    def forget_device(self) -> None:
        self.ledger.pool.evict(range(1, self.num_device + 1))
        self.check()

    def found(self, prompt: str, num_local: int = 0) -> int:
        """Return how many blocks the host could serve after a local hit."""
        # The probe never finishes, because that would change the recency of its blocks.
        self.num_probes += 1
        probe = f"probe {self.num_probes}"
        self.scheduler.add(probe, self.hashes(self.text(prompt)))
        num_tokens = self.scheduler.lookup(probe, num_local * self.size, ALL)
        self.scheduler.release(probe)
        assert num_tokens is not None
        return num_tokens // self.size

    def reload(self, prompt: str) -> int:
        """Load a prompt, check the content of its blocks, and return how many there were."""
        self.forget_device()
        num_found = self.found(prompt)
        self.add("reload", prompt + "!")
        wanted = self.names(prompt[:num_found], hit=True)
        assert self.copied(self.admit("reload")) == wanted
        self.land()
        self.finish("reload")
        return num_found

    def check(self) -> None:
        self.scheduler.check()
        self.ledger.check()
        for event in self.scheduler.take_events():
            assert isinstance(event, BlockStored | BlockRemoved)
            names = {(event.group, self.text_of[hash]) for hash in event.block_hashes}
            if isinstance(event, BlockStored):
                assert self.on_host.isdisjoint(names)
                self.on_host |= names
            else:
                assert self.on_host >= names
                self.on_host -= names
        assert len(self.on_host) == self.scheduler.num_resident

    def stat(self, name: str) -> int:
        return self.scheduler.stats()[name]

    def assert_nothing_is_held(self) -> None:
        assert self.ledger.pool.num_free == self.num_device
        assert self.stat("jobs_in_flight") == self.stat("storing_blocks") == 0
