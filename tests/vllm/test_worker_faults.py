"""Any call of the worker half to movers, arenas and tickets may raise.

A first run counts the calls. Then one run for each call makes that call raise. In every run each
job is reported once, and after `close` no mapping, thread or descriptor is left.
"""

from __future__ import annotations

import gc
import mmap
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.vllm.halves import FULL, NUM_BLOCKS, PAGE_BYTES, WINDOW, copies, stage

import kvstow.vllm.replicas as replicas_module
import kvstow.vllm.worker as module
from kvstow.transfer import arena_for, mover_for
from kvstow.transfer.shared import SharedMemory
from kvstow.vllm.messages import StepJobs
from kvstow.vllm.model import Model
from kvstow.vllm.options import Options
from kvstow.vllm.replicas import Replicas
from kvstow.vllm.worker import WorkerHalf

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

assert FULL.block_size == WINDOW.block_size
NUM_HOST_BLOCKS = 8


class Injected(Exception):
    """An error that no part of kvstow raises."""


class Faults:
    """Counts calls, and makes call number `at` raise."""

    def __init__(self, at: int | None, error: type[BaseException] = Injected) -> None:
        self.at = at
        self.error = error
        self.calls: list[str] = []
        self.maps: list[weakref.ref[mmap.mmap]] = []

    def call(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) - 1 == self.at:
            raise self.error(name)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.call(name)
            return function(*args, **kwargs)

        return wrapped

    def arena(self, *args: Any, **kwargs: Any) -> Any:
        self.call("arena_for")
        arena = arena_for(*args, **kwargs)
        self.maps.append(weakref.ref(arena._map))
        vars(arena)["close"] = self.wrap("arena.close", arena.close)
        return arena

    def mover(self, *args: Any, **kwargs: Any) -> Any:
        self.call("mover_for")
        return FaultyMover(mover_for(*args, **kwargs), self)


class FaultyMover:
    def __init__(self, mover: Any, faults: Faults) -> None:
        self.mover, self.faults = mover, faults

    def store(self, *args: Any, **kwargs: Any) -> Any:
        self.faults.call("mover.store")
        return FaultyTicket(self.mover.store(*args, **kwargs), self.faults)

    def load(self, *args: Any, **kwargs: Any) -> Any:
        self.faults.call("mover.load")
        return FaultyTicket(self.mover.load(*args, **kwargs), self.faults)

    def close(self) -> None:
        self.faults.call("mover.close")
        self.mover.close()


class FaultyTicket:
    def __init__(self, ticket: Any, faults: Faults) -> None:
        self.ticket, self.faults = ticket, faults

    def poll(self) -> bool:
        self.faults.call("ticket.poll")
        return bool(self.ticket.wait(10) is None)

    def source_released(self) -> bool:
        self.faults.call("ticket.source_released")
        return bool(self.ticket.source_released())

    def __getattr__(self, name: str) -> Any:
        self.faults.call(f"ticket.{name}")
        return getattr(self.ticket, name)


class Run:
    """A worker's life: stores, loads, a sleep, stores, and the end. It repeats calls that raise."""

    def __init__(self, faults: Faults, replicas: Replicas | None = None) -> None:
        self.faults = faults
        self.raised = 0
        self.reports: Counter[tuple[int, bool]] = Counter()
        self.released: Counter[int] = Counter()
        config, self.caches = stage("f0", "w0")
        self.worker = WorkerHalf(
            Model.of(config),
            Options(num_cpu_blocks=NUM_HOST_BLOCKS),
            rank=0,
            world_size=1,
            num_local_ranks=1,
            replicas=replicas,
        )

    def __call__(self) -> None:
        worker = self.worker
        self.attempt(worker.register, self.caches)
        self.held = left(self.faults)
        self.fill(1)
        self.step(StepJobs(stores=[copies(1, [1, 2], [1, 2], [0, 1, 2])]))
        self.step(StepJobs(loads=[copies(2, [3, 4], [1, 2], [0, 1, 2])]))
        self.attempt(worker.unregister)
        self.attempt(worker.restore)
        self.step(
            StepJobs(
                loads=[copies(3, [5], [1], [0, 1, 1]), copies(4, [6], [2], [0, 0, 1])],
                stores=[copies(5, [1], [3], [0, 1, 1])],
            )
        )
        self.step(StepJobs())
        self.attempt(worker.unregister)
        self.collect()
        self.attempt(worker.close)

    def fill(self, value: int) -> None:
        for tensor in self.caches.values():
            tensor[PAGE_BYTES : 3 * PAGE_BYTES] = value

    def attempt(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except self.faults.error:
            self.raised += 1
            return call(*args)

    def step(self, jobs: StepJobs) -> None:
        """Run a step like vLLM's worker: an error ends the step, and the next step goes on."""
        try:
            self.worker.bind(jobs)
            self.worker.begin("load")
            self.worker.begin("store")
        except self.faults.error:
            self.raised += 1
        self.collect()

    def collect(self) -> None:
        self.attempt(self.worker.stats)
        meta = self.attempt(self.worker.reports)
        if meta is not None:
            self.reports.update((job_id, bool(ok)) for job_id, _, ok in meta.reports)
            self.released.update(meta.released)


def left(faults: Faults) -> tuple[int, int, int]:
    """Return the numbers of descriptors, threads and host mappings."""
    gc.collect()
    maps = (ref() for ref in faults.maps)
    mapped = [memory for memory in maps if memory is not None and not memory.closed]
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(mapped)


@pytest.fixture(params=["own", "shared"])
def faulty(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Faults], Run]]:
    # pytest keeps the log, and with it the frames of errors.
    monkeypatch.setattr(module.logger, "disabled", True)
    monkeypatch.setattr(replicas_module.logger, "disabled", True)

    def run(faults: Faults) -> Run:
        replicas = None
        if request.param == "shared":
            # A set of one rank takes the same way as one of several.
            exchange = faults.wrap("exchange", lambda own: [own])
            replicas = Replicas(1, 0, exchange)
            create = faults.wrap("SharedMemory.create", SharedMemory.create)
            monkeypatch.setattr(replicas_module, "SharedMemory", SimpleNamespace(create=create))
        monkeypatch.setattr(module, "check_memory", faults.wrap("check_memory", lambda *_, **__: 0))
        monkeypatch.setattr(module, "arena_for", faults.arena)
        monkeypatch.setattr(module, "mover_for", faults.mover)
        made = Run(faults, replicas)
        made()
        return made

    yield run


@pytest.mark.parametrize("error", [Injected, KeyboardInterrupt])
def test_an_error_in_any_call_loses_no_job_and_leaks_nothing(
    faulty: Callable[[Faults], Run], error: type[BaseException]
) -> None:
    run = faulty(Faults(None, error))
    calls = run.faults.calls
    if "exchange" in calls:
        assert calls[:2] == ["SharedMemory.create", "check_memory"]
    wanted = "check_memory arena_for mover_for mover.load mover.store mover.close arena.close"
    assert {*wanted.split(), "ticket.poll", "ticket.error"} <= set(calls)
    assert run.reports == Counter((job_id, True) for job_id in range(1, 6))
    held, faults = run.held, run.faults
    del run
    gc.collect()
    gc.freeze()  # otherwise each collection walks all objects of vLLM and torch
    before = left(faults)
    assert before[2] == 0 < held[2]
    assert held[1] > before[1], "a leak would show"
    for at, name in enumerate(calls):
        run = faulty(Faults(at, error))
        assert run.faults.calls[at] == name
        reported = Counter(job_id for job_id, _ in run.reports.elements())
        assert reported == Counter(range(1, 6)), f"call {at}, {name}: {run.reports}"
        assert max(run.released.values(), default=0) <= 1
        num_failed = sum(not ok for _, ok in run.reports)
        begins = name in ("mover.load", "mover.store")
        assert num_failed >= 1 if begins else num_failed <= 1, f"call {at}, {name}"
        # Ranks that cannot share the memory keep copies of their own.
        shares = "exchange" in calls and at < calls.index("mover_for")
        assert run.raised or begins or shares
        for tensor in run.caches.values():
            check_loaded(run, tensor)
        assert run.worker.arena is None and run.worker.movers == []
        faults = run.faults
        del run
        assert all(map(int.__le__, left(faults), before)), f"call {at}, {name}"


def check_loaded(run: Run, tensor: torch.Tensor) -> None:
    """Check that the bytes of reported loads are in their blocks."""
    full = tensor is run.caches["f0"]
    for job_id, target in ((2, 3 if full else 4), (3, 5), (4, 6)):
        if job_id in (3, 4) and full != (job_id == 3):
            continue
        if (job_id, True) in run.reports and (1, True) in run.reports:
            assert tensor[target * PAGE_BYTES : (target + 1) * PAGE_BYTES].eq(1).all()
    assert tensor.numel() == NUM_BLOCKS * PAGE_BYTES
