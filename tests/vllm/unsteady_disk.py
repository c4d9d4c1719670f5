"""A slot file whose jobs are late, fail, or find damage, as the dice of `Unsteady` say.

A job ends after a number of polls and at no other moment, so that a seed repeats its run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tests.vllm.engine import Engine
from tests.vllm.movers import Unsteady

from kvstow.tiers import Fingerprint, TierTicket
from kvstow.tiers.runner import TierRunner
from kvstow.vllm.below.disk_worker import DiskWorker


@dataclass
class _Waiting:
    num_blocks: int
    num_polls: int
    go: Callable[[], None]


class UnsteadyRunner(TierRunner):
    """Begins jobs after a number of polls, and waits for their end; or fails them."""

    def __init__(self, runner: TierRunner) -> None:
        super().__init__(runner.tier)
        self._waiting: dict[int, _Waiting] = {}

    def begin(  # type: ignore[override]
        self, direction: Any, job_id: int, blocks: Any, slots: Any, **_: Any
    ) -> None:
        def go() -> None:
            # The caller's clock counts steps, so there is no deadline here.
            begin(direction, job_id, blocks, slots)

        begin, dice = super().begin, Unsteady.dice
        slow = dice.choice([1, 4, 12]) if dice.random() < Unsteady.slow else 0
        if dice.random() < Unsteady.failing:
            go = lambda: None  # noqa: E731
        self._waiting[job_id] = _Waiting(len(blocks), slow, go)

    def poll(self) -> Any:
        failed = []
        for job_id, job in list(self._waiting.items()):
            job.num_polls -= 1
            if job.num_polls <= 0:
                job.go()
                if job_id not in self.running:
                    failed.append((job_id, [False] * job.num_blocks))
                del self._waiting[job_id]
        self.wait()
        return super().poll() + failed


@contextmanager
def below(engine: Engine, num_slots: int | None) -> Iterator[None]:
    """Let an engine that has a disk use so many of its slots in this run; None: no disk.

    The engine starts over after that, because the tiers are built again then.
    """
    tier, worker = engine.half.tier, engine.worker.below
    disk = tier.below
    assert isinstance(worker, DiskWorker) and disk is not None
    runner, renew = worker._runner, worker.file.renew
    before, options, clock = dict(disk._ranks), disk.options, disk.clock

    def renew_at_once(fingerprint: Fingerprint | None = None) -> TierTicket:
        ticket = renew(fingerprint)
        ticket.wait()
        return ticket

    patch = pytest.MonkeyPatch()
    patch.setattr(worker.file, "renew", renew_at_once)
    patch.setattr(worker, "_runner", UnsteadyRunner(runner))
    if num_slots is None:
        tier.below = None
    else:
        disk._ranks = {rank: replace(each, num_slots=num_slots) for rank, each in before.items()}
        disk.clock = tier.clock
        disk.options = replace(tier.options, promote_timeout_s=50)
    try:
        yield
    finally:
        tier.below = disk
        disk._ranks, disk.options, disk.clock = before, options, clock
        patch.undo()


def damage_file(engine: Engine, num_slots: int, share: float = 0.1) -> None:
    """Flip a bit in a share of the file's slots, past its checks."""
    worker = engine.worker.below
    assert isinstance(worker, DiskWorker)
    size = worker.file.slot_bytes
    with open(worker.file.path, "r+b") as file:
        for slot in Unsteady.dice.sample(range(num_slots), int(num_slots * share)):
            file.seek(slot * size)
            content = np.frombuffer(file.read(size), np.uint8).copy()
            content[Unsteady.dice.randrange(size)] ^= 0x10
            file.seek(slot * size)
            file.write(content.tobytes())
