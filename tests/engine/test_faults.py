"""An `Engine` whose k-th call fails, for every k, stays usable or closes, and leaks nothing.

The calls are those that it makes of its ledger, scheduler, movers, tickets, events, clock, event
file and arenas. A call fails before it does anything, or after it has done all of it.
"""

import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.sampled import IS_FULL, sampled

from kvstow import (
    AdmissionState,
    BlockLedger,
    Engine,
    FullAttention,
    OffloadScheduler,
    TransferError,
    hash_tokens,
)
from kvstow.observability.events import EventFile
from kvstow.transfer import BlockLayout, HostArena, HostMover
from kvstow.transfer.ticket import Ticket

BLOCK = 4
NUM_BLOCKS = 13
DOCUMENT = list(range(16))
WHO: dict[str, Any] = {"identity": "a model", "weights_version": "1"}


class Injected(Exception):
    """An error that no part of kvstow raises."""


class Faults:
    """Counts calls, and fails one of them."""

    def __init__(self, at: int, error: type[BaseException], *, after: bool) -> None:
        self.num_calls, self.at, self.error, self.after = 0, at, error, after
        self.is_on = False

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not self.is_on:
            return function(*args, **options)
        self.num_calls += 1
        fails = self.num_calls == self.at
        if fails and not self.after:
            raise self.error
        result = function(*args, **options)
        if fails:
            raise self.error
        return result


class Watched:
    """An object of the core, each of whose calls may fail."""

    def __init__(self, real: Any, faults: Faults) -> None:
        self._real, self._faults = real, faults

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name == "pool":
            return Watched(found, self._faults)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            plain = [one._real if isinstance(one, Watched) else one for one in args]
            return self._faults.call(found, *plain, **options)

        return call


class WatchedTicket(Ticket):
    def __init__(self, real: Ticket, faults: Faults) -> None:
        self._real, self._faults = real, faults

    def poll(self) -> bool:
        return bool(self._faults.call(self._real.poll))

    def source_released(self) -> bool:
        return bool(self._faults.call(self._real.source_released))

    @property
    def error(self) -> Any:
        return self._real.error

    @property
    def damaged_slots(self) -> tuple[int, ...]:
        return self._real.damaged_slots

    def wait(self, timeout_s: float | None = None) -> None:
        self._faults.call(self._real.wait, timeout_s)


class Life:
    """An engine, its device memory, and the faults."""

    def __init__(self, faults: Faults, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.faults, self.folder = faults, folder
        self.kv = np.full((NUM_BLOCKS, BLOCK), -1)

        class WatchedMover(HostMover):
            def store(self, *args: Any, **options: Any) -> Ticket:
                return WatchedTicket(faults.call(super().store, *args, **options), faults)

            def load(self, *args: Any, **options: Any) -> Ticket:
                return WatchedTicket(faults.call(super().load, *args, **options), faults)

            def close(self) -> None:
                faults.call(super().close)

        for kind, names in {EventFile: ("write", "close"), HostArena: ("close",)}.items():
            for name in names:
                self.watch(patch, kind, name)
        for real in BlockLedger, OffloadScheduler:
            build: Any = lambda *a, real=real, **o: Watched(real(*a, **o), faults)  # noqa: E731
            patch.setattr(f"kvstow.engine.blueprint.{real.__name__}", build)
        self.engine = Engine(
            NUM_BLOCKS, 40, [FullAttention(BLOCK)], [BlockLayout.from_arrays([self.kv])],
            mover=WatchedMover, events_path=folder / "events", load_timeout_s=60.0,
            clock=lambda: float(faults.call(time.monotonic)),
        )  # fmt: skip

    def watch(self, patch: pytest.MonkeyPatch, kind: type, name: str) -> None:
        real = getattr(kind, name)
        patch.setattr(kind, name, lambda own, *args: self.faults.call(real, own, *args))

    def wait(self) -> None:
        pass

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call back at once, as an event that has happened."""
        self.faults.call(callback)

    def serve(self, name: str, tokens: list[int]) -> None:
        """Admit a request, and compute and compare its tokens."""
        self.engine.add(name, hash_tokens(tokens, BLOCK))
        found = self.engine.admit(name, len(tokens), 100, after=self)
        if found.state is AdmissionState.LOADS:
            landed = self.settle()
            if name in landed:
                found = self.engine.admit(name, len(tokens), 100, after=self)
        assert found.state in {AdmissionState.RUNS, AdmissionState.LOADS}
        self.compare(name, tokens, found.num_hit_tokens + found.num_external_tokens)
        granted = self.engine.ledger.num_granted_tokens(name)
        if granted < len(tokens):
            self.engine.step([name], [len(tokens) - granted])
        at = np.arange(len(tokens))
        self.kv[self.engine.tables(name)[0][at // BLOCK], at % BLOCK] = tokens
        self.engine.computed([name], [len(tokens)], after=self)
        self.settle()

    def settle(self) -> list[str]:
        """Poll until nothing is in flight. Return the requests whose load has failed."""
        failed: list[str] = []
        for _ in range(2000):
            failed += self.engine.poll().failed
            if not self.engine.transfers:
                return failed
            time.sleep(0.001)
        raise AssertionError("copies never end")

    def compare(self, name: str, tokens: list[int], num_tokens: int) -> None:
        at = np.arange(num_tokens)
        held = self.kv[self.engine.tables(name)[0][at // BLOCK], at % BLOCK]
        assert held.tolist() == tokens[:num_tokens], "KV that is not its own"

    def wake(self) -> None:
        self.kv = np.full((NUM_BLOCKS, BLOCK), -2)
        layouts = [BlockLayout.from_arrays([self.kv])]
        self.engine.wake(layouts, after=self, block_ids="packed", **WHO)

    def run(self) -> None:
        self.serve("first", [*DOCUMENT, 50])
        self.engine.finish("first")
        self.engine.ledger.pool.reset()
        self.kv[:] = -1
        self.serve("second", [*DOCUMENT, 60])
        self.engine.step(["second"], [3])
        self.engine.extend("second", hash_tokens([*DOCUMENT, 60, 61, 62, 63], BLOCK)[4:])
        at = np.arange(17, 20)
        self.kv[self.engine.tables("second")[0][at // BLOCK], at % BLOCK] = [61, 62, 63]
        self.engine.computed(["second"], [20], after=self)
        self.engine.add("third", hash_tokens([7] * 9, BLOCK))
        self.engine.admit("third", 9, 100, after=self)
        self.engine.preempt("third")
        self.engine.sleep(after=self, **WHO)
        self.wake()
        self.compare("second", [*DOCUMENT, 60, 61, 62, 63], 20)
        self.engine.sleep(after=self, to=self.folder / "image", **WHO)
        self.wake()
        self.compare("second", [*DOCUMENT, 60, 61, 62, 63], 20)
        self.engine.reset()
        self.engine.finish("third")
        self.engine.finish("second")
        self.engine.close()

    def recover(self) -> None:
        """Check that the engine is usable or closed, and that its requests can be finished."""
        self.faults.is_on = False
        engine = self.engine
        engine.check()
        if engine._state.asleep is not None:
            self.wake()
            engine.check()
        for name in list(engine._state.requests):
            if name == "second" and engine._state.requests[name].state == "running":
                self.compare(
                    name, [*DOCUMENT, 60], min(17, engine._state.requests[name].num_computed)
                )
            engine.finish(name)
        if not engine._state.is_closed:
            self.settle()
            for number in range(2):
                self.serve(f"after {number}", [*DOCUMENT, 70 + number, 5])
                engine.finish(f"after {number}")
                engine.ledger.pool.reset()
                self.kv[:] = -3
            engine.check()
        engine.close()
        pool = engine.ledger.pool
        assert pool.pin_counts(range(NUM_BLOCKS)).sum() == 0
        assert pool.num_free == NUM_BLOCKS - 1


def held() -> tuple[int, int, int]:
    """Return the threads, descriptors and KiB of host memory that this process has."""
    gc.collect()
    mapped_kib = size_kib = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            size_kib = int(line.split()[1])
        # Only arenas have these flags, which keep their content from a forked child.
        elif line.startswith("VmFlags:") and {"wf", "dc"} & set(line.split()):
            mapped_kib += size_kib
    return threading.active_count(), len(os.listdir("/proc/self/fd")), mapped_kib


def lived(
    at: int, error: type[BaseException], *, after: bool, folder: Path, patch: pytest.MonkeyPatch
) -> int:
    """Return the number of calls in a life whose call `at` fails."""
    faults = Faults(at, error, after=after)
    with patch.context() as own:
        life = Life(faults, folder, own)
        faults.is_on = True
        # An error on a mover's thread becomes a TransferError.
        with suppress(error, TransferError):
            life.run()
        life.recover()
    return faults.num_calls


CASES = [(Injected, False), (KeyboardInterrupt, True)]
if IS_FULL:
    CASES += [(Injected, True), (KeyboardInterrupt, False)]


@pytest.mark.parametrize(("error", "after"), CASES)
def test_every_call_may_fail(
    error: type[BaseException], after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_calls = lived(0, error, after=after, folder=tmp_path, patch=monkeypatch)
    assert num_calls > 100
    before = held()
    with HostArena(1, 1 << 20) as arena:
        assert held()[2] >= before[2] + (arena.num_bytes >> 10), "held() sees an arena"
    for at in sampled(range(1, num_calls + 1), 1 / 2):
        try:
            lived(at, error, after=after, folder=tmp_path, patch=monkeypatch)
        except BaseException as failure:
            failure.add_note(f"call {at} of {num_calls} failed")
            raise
        now = held()
        assert all(map(int.__le__, now, before)), f"call {at}: {before} -> {now}"
