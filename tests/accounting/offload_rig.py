"""A scheduler and the two memories whose blocks its jobs copy, which hold names instead of bytes.

A prompt is a string with one letter per block, so prompts with a common start share blocks. The
content of a block is the prompt up to its letter, so a lost, stale or swapped block is visible.
"""

from __future__ import annotations

from typing import TypeVar

from kvstow import (
    FullAttention,
    Hashes,
    Job,
    JobEnd,
    OffloadScheduler,
    hash_tokens,
)

BLOCK_SIZE = 4
GROUP = FullAttention(BLOCK_SIZE)
ALL = 2**40


def hashes(prompt: str) -> Hashes:
    return hash_tokens([ord(letter) for letter in prompt for _ in range(BLOCK_SIZE)], BLOCK_SIZE)


def prefixes(prompt: str) -> list[str]:
    return [prompt[: end + 1] for end in range(len(prompt))]


class Rig:
    """A scheduler, and the two memories whose blocks its jobs copy when they end."""

    def __init__(self, num_host_blocks: int, *, events: bool = False) -> None:
        self.scheduler = OffloadScheduler(num_host_blocks, [GROUP], events=events)
        self.host: dict[int, str] = {}
        self.device: dict[int, str] = {}
        self.prompts: dict[str, str] = {}
        self.tables: dict[str, list[int]] = {}
        self.num_reported: dict[str, int] = {}
        self.stores: dict[int, Job] = {}
        self.loads: dict[int, tuple[Job, list[str]]] = {}

    def add(self, id: str, prompt: str) -> None:
        self.scheduler.add(id, hashes(prompt))
        self.prompts[id], self.tables[id], self.num_reported[id] = prompt, [], 0

    def compute(self, id: str, num_blocks: int) -> Job | None:
        """Store what steps of this request computed: its table up to `num_blocks`."""
        table = self.tables[id]
        table += [len(self.device) + 1 + at for at in range(num_blocks - len(table))]
        new = table[self.num_reported[id] :]
        self.num_reported[id] = len(table)
        self.device |= dict(zip(table, prefixes(self.prompts[id]), strict=False))
        # The next block is half full by then.
        num_tokens = num_blocks * BLOCK_SIZE + BLOCK_SIZE // 2
        job = self.scheduler.store([id], [num_tokens], new, [0, len(new)])
        if job is not None:
            assert len(job) == len(job.block_ids) == len(job.host_slots) > 0
            self.stores[job.job_id] = job
        self.scheduler.check()
        return job

    def load(self, id: str, num_blocks: int, num_local: int = 0) -> Job:
        """Load that many blocks of what the lookup of this request found."""
        new = [len(self.device) + 1 + at for at in range(num_blocks)]
        job = self.scheduler.load(id, num_blocks * BLOCK_SIZE, [new])
        assert job.block_ids.tolist() == new
        self.device |= dict.fromkeys(new, "being loaded")
        self.tables[id] += new
        wanted = prefixes(self.prompts[id])[num_local : num_local + num_blocks]
        assert [self.host[slot] for slot in job.host_slots] == wanted
        self.loads[job.job_id] = job, wanted
        self.scheduler.check()
        return job

    def end(self, job: Job, *, ok: bool = True) -> JobEnd:
        store = self.stores.pop(job.job_id, None)
        for id, slot in zip(job.block_ids.tolist(), job.host_slots.tolist(), strict=True):
            if store is None:
                self.device[id] = self.host[slot] if ok else "torn"
            else:
                self.host[slot] = self.device[id] if ok else "torn"
        if store is None:
            _, wanted = self.loads.pop(job.job_id)
            assert not ok or [self.device[id] for id in job.block_ids] == wanted
        end = some(self.scheduler.complete(job.job_id, ok=ok))
        assert end.block_ids.tolist() == job.block_ids.tolist()
        self.scheduler.check()
        return end

    def keep(self, prompt: str, id: str = "kept") -> None:
        """Let a request with this prompt run and finish, its stores included."""
        self.add(id, prompt)
        job = self.compute(id, len(prompt))
        if job is not None:
            assert self.end(job).ok
        self.scheduler.finish(id)

    def found(self, prompt: str, num_local: int = 0) -> int | None:
        """Return how many blocks the host can serve; changes neither pins nor recency."""
        probe = f"probe {len(self.prompts)}"
        self.add(probe, prompt)
        num_tokens = self.scheduler.lookup(probe, num_local * BLOCK_SIZE, ALL)
        self.scheduler.release(probe)
        return None if num_tokens is None else num_tokens // BLOCK_SIZE

    def stat(self, name: str) -> int:
        return self.scheduler.stats()[name]


T = TypeVar("T", Job, JobEnd)


def some(made: T | None) -> T:
    assert made is not None
    return made
