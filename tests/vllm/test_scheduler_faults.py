"""Any call of the scheduler half may raise: vLLM goes on, and every answer is right.

The calls are those of the tier's accounting, of the lazy queue, and of vLLM's manager and pool. A
first run counts them. Then one run for each call makes that call raise before it does anything. A
call of the tier's accounting also raises in another run after it has done its work. CI takes a
third of the calls, and `KVSTOW_FAULTS=full` takes all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.sampled import sampled
from tests.vllm.halves import FULL, WINDOW
from tests.vllm.simulated import Simulated, tokens
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from kvstow.vllm import loads, scheduler
from kvstow.vllm.messages import StepReports

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

PROMPTS = {name: tokens(num, seed) for name, num, seed in (("a", 90, 1), ("b", 50, 2))}
OPTIONS = {"num_cpu_blocks": 60}
# Every step makes these calls, and they change nothing, so the first calls stand for all.
READS = {"offload.stats", "offload.take_events", "offload.expire", "lazy.evictable"}
NUM_READS = 4


class Injected(RuntimeError):
    """An error that no part of kvstow raises."""


class Faults:
    """Counts calls, and makes call number `at` raise."""

    def __init__(self, at: int | None, error: type[BaseException], *, after: bool) -> None:
        self.at, self.error, self.after = at, error, after
        self.calls: list[str] = []

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name in READS and self.calls.count(name) == NUM_READS:
            return function(*args, **kwargs)
        self.calls.append(name)
        fails = len(self.calls) - 1 == self.at
        # A call of vLLM that has done its work cannot be undone.
        if fails and not (self.after and name.startswith("offload.")):
            raise self.error(name)
        result = function(*args, **kwargs)
        if fails:
            raise self.error(name)
        return result


class Watched:
    """An object whose calls are counted and may raise. It gives out the `inner` objects."""

    def __init__(self, name: str, real: Any, faults: Faults, **inner: Any) -> None:
        self.__dict__.update(inner, _name=name, _real=real, _faults=faults)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if not callable(found):
            return found
        return lambda *args, **kwargs: self._faults.call(
            f"{self._name}.{name}", found, *args, **kwargs
        )

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)


def watch(engine: Simulated, faults: Faults) -> None:
    """Put the faults between the half and all that it calls, not between the parts of vLLM."""
    tier = engine.half.tier
    manager: Any = tier.manager
    pool = manager.block_pool
    queue = Watched("queue", pool.free_block_queue, faults)
    watched = Watched("pool", pool, faults, free_block_queue=queue)
    tier.manager = Watched("manager", manager, faults, block_pool=watched)
    tier.pool = watched
    tier.offload = Watched("offload", tier.offload, faults)  # type: ignore[assignment]
    if tier.lazy is not None:
        tier.lazy = Watched("lazy", tier.lazy, faults)  # type: ignore[assignment]


class Run:
    """An engine that stores, loads, preempts and aborts."""

    def __init__(self, folder: Path, faults: Faults, *, lazy: bool, hybrid: bool) -> None:
        self.faults = faults
        self.engine = engine = Simulated(
            folder,
            OPTIONS | {"lazy_offload": lazy, "preserve_on_sleep": lazy},
            specs=(FULL, WINDOW) if hybrid else (FULL,),
            num_blocks=22 if hybrid else 11,
            settings={"scheduling_policy": "priority"},
        )
        engine.add("first", tokens(40, 9))
        engine.settle()
        watch(engine, faults)
        self.names = iter(range(1000))
        self.asked: dict[str, str] = {}

    def __call__(self) -> None:
        engine = self.engine
        for resets_tier in (False, True):
            self.add("a")
            self.add("b", max_tokens=24, priority=1)
            self.settle(3)
            engine.abort(self.add("b"))
            self.add("a", max_tokens=20)
            self.settle()
            engine.connector.get_kv_connector_stats()
            engine.scheduler.reset_prefix_cache(reset_connector=resets_tier)
        # A request whose copies are late, and then vLLM pauses.
        self.add("a")
        self.settle(4, copies=False)
        engine.connector.has_pending_push_work()
        self.settle()
        self.calls = list(self.faults.calls)

    def add(self, prompt: str, *, max_tokens: int = 4, priority: int = 0) -> str:
        name = f"{prompt}{next(self.names)}"
        self.engine.add(name, PROMPTS[prompt], max_tokens=max_tokens, priority=priority)
        self.asked[name] = prompt
        return name

    def settle(self, num_steps: int = 300, *, copies: bool = True) -> None:
        for _ in range(num_steps):
            if copies:
                self.engine.copy()
            if not self.engine.step():
                return
        assert num_steps < 300, f"vLLM does not come to rest: {list(self.engine.requests)}"

    def check_ended(self) -> None:
        """After an interrupt in the middle of a step, no block stays held."""
        manager, half = self.engine.scheduler.kv_cache_manager, self.engine.half
        for request in self.engine.scheduler.requests.values():
            half.finished(request)
            manager.free(request)
        self.engine.copy()
        reports = [(job_id, 0, True) for job_id in half.transfers.in_flight]
        half.processed(KVConnectorOutput(kv_connector_worker_meta=StepReports(reports)))
        assert not half.requests.tracked and not half.requests.due and not half.transfers.in_flight
        pool = manager.block_pool
        assert not [block for block in pool.blocks[1:] if block.ref_cnt]
        assert pool.get_num_free_blocks() == self.engine.num_blocks - 1
        half.build(SchedulerOutput.make_empty())
        assert half.may_rest()

    def check(self) -> None:
        """Check that nothing is held or tracked, and that all answers are right, also new ones."""
        engine = self.engine
        self.settle()
        engine.check_at_rest(is_off=engine.half.tier.is_off)
        self.asked = {name: self.asked[name] for name in self.asked if name in engine.answers}
        for name, prompt in self.asked.items():
            answer = engine.answers[name]
            assert answer == engine.right_answer(PROMPTS[prompt], len(answer), None), name
        assert engine.scheduler.reset_prefix_cache()
        for name in ("new a", "new b"):
            engine.add(name, PROMPTS[name[-1]])
            self.settle()
            assert engine.answers[name] == engine.right_answer(PROMPTS[name[-1]], 4, None)
        half = engine.half
        assert not half.requests.tracked and not half.requests.due and not half.transfers.in_flight
        assert half.may_rest()


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The errors that were logged."""
    found: list[str] = []
    for logger in (scheduler.logger, loads.logger):
        monkeypatch.setattr(logger, "exception", lambda text, *args: found.append(text % args))
    yield found


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [Injected, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("lazy", "hybrid"), [(False, False), (True, True)], ids=["eager", "lazy-hybrid"]
)
def test_an_error_in_any_call_turns_off_only_the_tier(
    folder: Path,
    errors: list[str],
    lazy: bool,
    hybrid: bool,
    error: type[BaseException],
    after: bool,
) -> None:
    def run(at: int | None) -> Run:
        made = Run(folder, Faults(at, error, after=after), lazy=lazy, hybrid=hybrid)
        try:
            made()
        except error:
            assert error is KeyboardInterrupt, "vLLM must go on"
            made.check_ended()
        else:
            assert at is None or error is Injected, "an interrupt must reach vLLM"
            made.check()
        made.engine.close()
        return made

    clean = run(None)
    calls = clean.calls
    assert not errors
    names = ["add", "extend", "lookup", "load", "store", "complete", "finish", "stats", "release"]
    assert {f"offload.{name}" for name in names} <= set(calls)
    modes = ["lazy.hold", "lazy.put_back", "offload.store_candidates"] if lazy else []
    assert set(modes or ["pool.free_blocks", "offload.restart"]) <= set(calls)
    tried = [at for at, name in enumerate(calls) if not after or name.startswith("offload.")]
    for at in sampled(tried, 1 / 3):
        name = calls[at]
        errors.clear()
        made = run(at)
        where = f"call {at}, {name}"
        assert made.faults.calls[at] == name
        assert made.engine.half.tier.is_off, where
        assert len(errors) == 1 and "the host tier is off" in errors[0], where


def test_the_gauges_of_a_tier_that_an_error_turns_off_fall(
    folder: Path, errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Simulated(folder, OPTIONS, num_blocks=11)
    engine.add("first", PROMPTS["b"])
    engine.settle()
    engine.add("a", PROMPTS["a"])
    for _ in range(4):  # its blocks are not copied yet
        engine.step()
    num_held = sum(len(store.blocks) for store in engine.half.transfers.in_flight.values())
    watch(engine, Faults(0, Injected, after=False))
    reported: dict[str, Any] = {}
    ask = engine.connector.get_kv_connector_stats

    def asked() -> Any:
        stats = ask()
        reported.update(stats.data if stats else {})
        return stats

    monkeypatch.setattr(engine.connector, "get_kv_connector_stats", asked)
    asked()
    assert len(errors) == 1
    assert num_held > 0
    assert (reported["resident_blocks"], reported["quarantined_blocks"]) == (0, num_held)
    engine.settle()
    assert reported["quarantined_blocks"] == 0
    engine.check_at_rest(is_off=True)
    engine.close()
