"""`store_step` plans what `store` plans when the caller repeats what the ledger knows."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.accounting.offload_rig import BLOCK_SIZE, GROUP

from kvstow import (
    BlockLedger,
    ConfigError,
    FullAttention,
    Job,
    KvstowError,
    OffloadScheduler,
    SlidingWindow,
    StateError,
    UnknownRequest,
)

WINDOW = SlidingWindow(2 * BLOCK_SIZE, 3 * BLOCK_SIZE)


def content(job: Job | None) -> list[tuple[int, int]]:
    return [] if job is None else list(zip(job.block_ids, job.host_slots, strict=True))


def new_hashes(rng: random.Random, num: int) -> list[bytes]:
    return [rng.randbytes(8) for _ in range(num)]


class Pair:
    """A ledger, a scheduler that reads it, and a scheduler that gets all from the caller."""

    def __init__(self, seed: int, mode: str) -> None:
        self.rng = random.Random(seed)
        groups: list[FullAttention | SlidingWindow] = [GROUP]
        if seed % 2 == 0:
            groups.append(WINDOW)
        self.block_sizes = [group.block_size for group in groups]
        self.ledger = BlockLedger(400, groups, publish="computed")
        num_host_blocks = self.rng.choice([10, 500])
        self.reads, self.gets = (
            OffloadScheduler(num_host_blocks, groups, mode=mode)  # type: ignore[arg-type]
            for _ in range(2)
        )
        self.num_reported: dict[str, list[int]] = {}
        self.num_computed: dict[str, int] = {}
        self.due_tokens: dict[str, int] = {}
        self.num_names = 0

    def add(self) -> None:
        name = f"r{self.num_names}"
        self.num_names += 1
        hashes = new_hashes(self.rng, self.rng.randrange(6))
        if self.rng.random() < 0.2:
            # The later requests have other places in the ledger than in the scheduler.
            self.ledger.add(f"{name}, only in the ledger", [])
        for each in self.ledger, self.reads, self.gets:
            each.add(name, hashes)
        self.num_reported[name] = [0] * len(self.block_sizes)
        self.num_computed[name] = self.due_tokens[name] = 0

    def finish(self, name: str) -> None:
        self.reads.finish(name)
        self.gets.finish(name)
        self.ledger.free(name)
        del self.num_computed[name]

    def step(self) -> None:
        """Let all requests compute some tokens, and compare what both schedulers store."""
        computed = {}
        for name in list(self.num_computed):
            num_tokens = self.rng.choice([1, 1, BLOCK_SIZE, 5 * BLOCK_SIZE])
            if self.ledger.allocate(name, num_tokens) is None:
                self.finish(name)
                continue
            self.num_computed[name] += num_tokens
            computed[name] = self.num_computed[name]
            num_missing = computed[name] // BLOCK_SIZE + 1 - self.ledger.num_hashes(name)
            hashes = new_hashes(self.rng, max(0, num_missing))
            self.ledger.extend(name, hashes)  # `store_step` finds them here
            self.gets.extend(name, hashes)
        # A request in which no block became full since is not named.
        names = [name for name in computed if computed[name] >= self.due_tokens[name]]
        self.due_tokens |= {name: (computed[name] // BLOCK_SIZE + 1) * BLOCK_SIZE for name in names}
        tables, counts = [], []
        for name in names:
            for group, size in enumerate(self.block_sizes):
                reported = self.num_reported[name][group]
                table = self.ledger.block_table(name, group)[reported : computed[name] // size]
                self.num_reported[name][group] += len(table)
                tables.append(table)
                counts.append(len(table))
        expected = self.gets.store(
            names,
            [computed[name] for name in names],
            np.concatenate([[0][:0], *tables]).astype(np.int32),
            np.cumsum([0, *counts]),
        )
        job = self.reads.store_step(self.ledger, list(computed), list(computed.values()))
        assert content(job) == content(expected)
        self.ledger.cache_step(list(computed), list(computed.values()))
        for scheduler, each in ((self.reads, job), (self.gets, expected)):
            if each is not None:
                scheduler.complete(each.job_id, ok=self.num_names % 3 > 0)
            scheduler.check()
        if self.rng.random() < 0.1:
            self.reads.reset()
            self.gets.reset()


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("seed", range(20))
def test_a_step_read_from_the_ledger_equals_a_step_that_is_given(seed: int, mode: str) -> None:
    pair = Pair(seed, mode)
    for _ in range(60):
        if pair.rng.random() < 0.3:
            pair.add()
        if pair.num_computed and pair.rng.random() < 0.1:
            pair.finish(pair.rng.choice(list(pair.num_computed)))
        pair.step()
        if mode == "lazy":
            jobs = [each.store_evictable(pair.ledger.pool, 400) for each in (pair.reads, pair.gets)]
            assert content(jobs[0]) == content(jobs[1])
            for scheduler, job in zip((pair.reads, pair.gets), jobs, strict=True):
                if job is not None:
                    scheduler.complete(job.job_id)


def refused(
    error: type[KvstowError],
    match: str,
    names: list[str],
    computed: list[int],
    hashes: list[bytes] | None = None,
) -> None:
    """Check that a step is refused, and that the next one finds everything as it was."""
    known = [bytes([at]) * 8 for at in range(4)]
    ledger, scheduler = BlockLedger(20, [GROUP]), OffloadScheduler(8, [GROUP])
    for name in "ab":
        ledger.add(name, known)
        ledger.allocate(name, 3 * BLOCK_SIZE)
        scheduler.add(name, known[:2] if hashes is None else hashes)
    with pytest.raises(error, match=match):
        scheduler.store_step(ledger, names, computed)
    scheduler.check()
    if hashes is None:
        job = scheduler.store_step(ledger, ["a"], [3 * BLOCK_SIZE])
        assert job is not None
        assert job.block_ids.tolist() == ledger.block_table("a").tolist()[:3]
    assert scheduler.store_step(ledger, [], []) is None


def test_a_request_that_is_named_twice_is_refused() -> None:
    refused(ConfigError, "'a' is named twice|\"a\" is named twice", ["a", "b", "a"], [12, 12, 12])


def test_tokens_that_were_not_granted_are_refused() -> None:
    refused(ConfigError, "it was granted 12", ["b", "a"], [12, 13])


def test_hashes_that_differ_from_the_ledgers_are_refused() -> None:
    refused(StateError, "other hashes in the ledger", ["a"], [12], hashes=[b"x" * 8])
    longer = [bytes([at]) * 8 for at in range(5)]
    refused(StateError, "other hashes in the ledger", ["a"], [12], hashes=longer)


def test_a_request_that_started_over_in_the_ledger_alone_is_refused() -> None:
    hashes = [bytes([at]) * 8 for at in range(4)]
    ledger, scheduler = BlockLedger(20, [GROUP], publish="computed"), OffloadScheduler(8, [GROUP])
    for name in "ab":
        ledger.add(name, [name.encode() + each for each in hashes])
        scheduler.add(name, [])
    ledger.allocate("a", 3 * BLOCK_SIZE)
    job = scheduler.store_step(ledger, ["a"], [2 * BLOCK_SIZE], max_blocks=1)
    assert job is not None
    scheduler.complete(job.job_id, ok=True)  # the second block waits for room in a job
    ledger.restart("a")
    ledger.allocate("b", 3 * BLOCK_SIZE)  # takes these blocks
    ledger.allocate("a", 3 * BLOCK_SIZE)
    with pytest.raises(StateError, match='"a" has started over in the ledger'):
        scheduler.store_step(ledger, ["a"], [3 * BLOCK_SIZE])
    scheduler.check()
    scheduler.restart("a")
    job = scheduler.store_step(ledger, ["a"], [3 * BLOCK_SIZE])
    assert job is not None
    assert job.block_ids.tolist() == ledger.block_table("a").tolist()[1:3]


def test_unknown_requests_and_uneven_lists_are_refused() -> None:
    refused(UnknownRequest, "nobody", ["a", "nobody"], [12, 12])
    refused(ConfigError, "2 requests and 1 numbers", ["a", "b"], [12])


def test_a_ledger_of_other_groups_is_refused() -> None:
    scheduler = OffloadScheduler(8, [GROUP])
    with pytest.raises(ConfigError, match="other groups"):
        scheduler.store_step(BlockLedger(20, [GROUP, WINDOW]), [], [])


def test_new_hashes_come_before_the_store() -> None:
    scheduler = OffloadScheduler(8, [GROUP])
    scheduler.add("a", [b"1" * 8])
    job = scheduler.store(["a"], [8], [1, 2], [0, 2], new_hashes=[[b"2" * 8]])
    assert job is not None
    assert job.block_ids.tolist() == [1, 2]
    for wrong, error in [([], ConfigError), ([[b"3"]], KvstowError), ([[b"3" * 8]], None)]:
        if error is None:
            job = scheduler.store(["a"], [12], [3], [0, 1], new_hashes=wrong)
            assert job is not None
            assert job.block_ids.tolist() == [3]
            continue
        with pytest.raises(error):
            scheduler.store(["a"], [12], [3], [0, 1], new_hashes=wrong)
    with pytest.raises(KvstowError):
        scheduler.store(["a", "nobody"], [16, 4], [4], [0, 1, 1], new_hashes=[[b"4" * 8], []])
    assert scheduler.store(["a"], [16], [4], [0, 1]) is None, "the refused call added no hash"
