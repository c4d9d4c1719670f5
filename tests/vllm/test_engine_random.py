"""vLLM's real engine under whatever can happen to it, at random moments, one seed a run.

Requests that share prefixes, in a pool that is too small for them, are aborted, put to sleep and
woken, reset, paused and resumed at once, while copies are made late, fail, or end in time. Late
copies are really made late, over whatever lies there by then. Every answer is that of an engine
that nothing happened to; after each step the blocks of a load are still their request's own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.vllm import models
from tests.vllm.engine import TOLERANCE, Answer, ChangedMover, Engine, answer, poison, prompts
from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState

from kvstow import TransferError
from kvstow.transfer import READY, Event, Ticket

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and those of what it imports

MODELS = {"llama": (models.LLAMA, 36), "gemma": (models.GEMMA, 150)}
NUM_TOKENS = 24
_numbers = itertools.count()


def _prompts() -> list[list[int]]:
    """Four trunks, each continued in two ways, and cut off in two more."""
    trunks, tails = prompts(4, 260, seed=11), prompts(8, 90, seed=12)
    long = [trunks[at // 2][: 140 + 60 * (at % 3)] + tail for at, tail in enumerate(tails)]
    return long + [trunk[:length] for trunk in trunks for length in (96, 193)]


PROMPTS = _prompts()


class Slow(Ticket):
    """A copy that is made when it was asked for often enough, and is over then."""

    def __init__(self, begin: Any, num_polls: int) -> None:
        self._begin = begin
        self._num_polls = num_polls
        self._ticket: Ticket | None = None

    def poll(self) -> bool:
        self._num_polls -= 1
        if self._ticket is None and self._num_polls < 0:
            self._ticket = self._begin()
        return self._ticket is not None and self._ticket.poll()

    def source_released(self) -> bool:
        return self._ticket is not None and self._ticket.source_released()

    @property
    def error(self) -> TransferError | None:
        return None if self._ticket is None else self._ticket.error

    def wait(self, timeout_s: float | None = None) -> None:
        if self.error is not None:
            raise self.error


class Unsteady(ChangedMover):
    """Is slow, or fails, as the dice fall."""

    dice = random.Random()
    failing = 0.0
    slow = 0.0

    def store(self, block_ids: Any, host_slots: Any, *, after: Event) -> Ticket:
        return self._begin(lambda: self.mover.store(block_ids, host_slots, after=READY))

    def load(self, host_slots: Any, block_ids: Any, *, after: Event) -> Ticket:
        return self._begin(lambda: self.mover.load(host_slots, block_ids, after=READY))

    def _begin(self, begin: Any) -> Ticket:
        if self.dice.random() < self.failing:
            raise TransferError("injected")
        if self.dice.random() >= self.slow:
            ticket: Ticket = begin()
            return ticket
        return Slow(begin, self.dice.choice([1, 4, 12, 24]))


class Run:
    """One engine's random life."""

    def __init__(self, engine: Engine, expected: list[Answer], seed: int) -> None:
        self.engine = engine
        self.expected = expected
        self.dice = random.Random(seed)
        self.seed = seed
        # By vLLM's name of the request: which prompt it is.
        self.asked: dict[str, int] = {}
        self.num_answers = 0
        self.num_steps = 0
        self.num_asleep = 0
        self.counts: dict[str, int] = {}
        self.happenings: list[str] = []

    def go(self, num_happenings: int) -> None:
        kinds = ["add"] * 6 + ["step"] * 9 + ["abort", "sleep", "reset", "again"] + ["shake"] * 2
        half = self.engine.half
        for _ in range(num_happenings):
            kind = self.dice.choice(kinds)
            self.happenings.append(kind)
            self.counts[kind] = self.counts.get(kind, 0) + 1
            getattr(self, kind)()
        Unsteady.slow = Unsteady.failing = 0.0
        for _ in range(10_000):
            if not self.asked:
                break
            self.step_once()
        assert not self.asked, f"they never end: {self.asked}"
        self.engine.settle()
        # Copies that are late end in the steps of other requests.
        for _ in range(200):
            if not half._transfers:
                break
            self.add()
            while self.asked:
                self.step_once()
            self.engine.settle()
        self.engine.check_idle()
        scheduler = self.engine.core.scheduler
        assert not scheduler.finished_recving_kv_req_ids
        assert not scheduler.failed_recving_kv_req_ids

    def shake(self) -> None:
        Unsteady.slow = self.dice.choice([0.0, 0.5, 1.0])
        Unsteady.failing = self.dice.choice([0.0, 0.0, 0.15])
        half = self.engine.half
        half._options = replace(half._options, load_timeout_s=self.dice.choice([2.5, 1e4]))

    def add(self) -> None:
        if len(self.asked) >= 7:
            return
        at = self.dice.randrange(len(PROMPTS))
        num_tokens = self.dice.choice([1, 4, NUM_TOKENS])
        sampling = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, logprobs=1
        )
        name = f"{self.seed}-{next(_numbers)}"
        prompt = {"prompt_token_ids": PROMPTS[at]}
        self.asked[self.engine.llm.llm_engine.add_request(name, prompt, sampling)] = at

    def step(self) -> None:
        for _ in range(self.dice.choice([1, 1, 2, 5, 12])):
            self.step_once()
            if self.engine.core.scheduler.finished_recving_kv_req_ids:
                # Loads that have landed wait for no more than a step: seldom hit by chance.
                self.dice.choice([self.step_once, self.abort, self.again, self.sleep])()

    def step_once(self) -> None:
        self.num_steps += 1
        for output in self.engine.llm.llm_engine.step():
            if output.finished:
                self.compare(output)
        self.check()

    def compare(self, output: Any) -> None:
        names = [name for name in self.asked if name.startswith(f"{output.request_id}-")]
        assert len(names) == 1
        expected, found = self.expected[self.asked.pop(names[0])], answer(output)
        num_tokens = len(found.tokens)
        assert found.tokens == expected.tokens[:num_tokens], (self.seed, names, self.happenings)
        pairs = zip(found.logprobs, expected.logprobs, strict=False)
        assert max(abs(a - b) for a, b in pairs) < TOLERANCE, (self.seed, names, self.happenings)
        self.num_answers += 1

    def check(self) -> None:
        """The blocks of a load that is under way are held: by its request, or, late, by kvstow."""
        half, scheduler = self.engine.half, self.engine.core.scheduler
        for transfer in half._transfers.values():
            if transfer.direction != "load":
                continue
            assert all(block.ref_cnt > 0 for block in transfer.blocks)
            if not transfer.held:
                tables = scheduler.kv_cache_manager.get_blocks(transfer.request_id).blocks
                own = {block.block_id for table in tables for block in table}
                assert {block.block_id for block in transfer.blocks} <= own

    def abort(self) -> None:
        scheduler = self.engine.core.scheduler
        names = list(self.asked)
        loading = [
            name
            for name in names
            if name in scheduler.requests
            and scheduler.requests[name].status.name == "WAITING_FOR_REMOTE_KVS"
        ]
        self.dice.shuffle(names)
        gone = (loading or names)[:1] if self.dice.random() < 0.6 else names[:3]
        self.engine.llm.llm_engine.abort_request(gone, internal=True)
        for name in gone:
            del self.asked[name]

    def again(self) -> None:
        """Paused and resumed before the pause was over."""
        core = self.engine.core
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        for _ in range(self.dice.choice([0, 0, 1, 2, 5])):
            core.scheduler.has_requests()
            self.step_once()
        core.scheduler.has_requests()
        if self.dice.random() < 0.5:
            self.abort()
        core.resume_scheduler()

    def sleep(self) -> None:
        core, half = self.engine.core, self.engine.half
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        for num_steps in range(10_000):
            if not core.scheduler.has_requests() and not core.batch_queue:
                break
            self.step_once()
            if num_steps == 2 and self.dice.random() < 0.2:
                self.abort()
        else:
            raise AssertionError("it does not come to rest")
        if any(one.held for one in half._transfers.values()):
            # A late store holds blocks, and vLLM does not sleep: it says so.
            with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
                core.pause_scheduler("keep", clear_cache=True)
            self.counts["refused"] = self.counts.get("refused", 0) + 1
        else:
            core.pause_scheduler("keep", clear_cache=True)
            poison(self.engine.worker)
            self.num_asleep += 1
        for _ in range(self.dice.choice([0, 0, 1, 3])):
            self.dice.choice([self.add, self.abort, self.step_once])()
        core.resume_scheduler()

    def reset(self) -> None:
        engine = self.engine.llm.llm_engine
        running, connector = self.dice.random() < 0.5, self.dice.random() < 0.5
        try:
            engine.reset_prefix_cache(running, connector)
        except RuntimeError as error:
            assert "Failed to reset KV cache" in str(error)


@pytest.fixture(scope="module", params=MODELS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, list[Answer]]]:
    """And what it answers to all prompts when nothing happens to it."""
    config, num_blocks = MODELS[request.param]
    engine = Engine(
        models.make_model(config, tmp_path_factory.mktemp(request.param)),
        num_blocks=num_blocks,
        options={"num_cpu_blocks": 300, "preserve_on_sleep": True, "verify": "checksum"},
    )
    yield engine, engine.generate(PROMPTS, NUM_TOKENS)
    engine.close()


def play(
    engine: Engine, expected: list[Answer], seed: int, num_happenings: int, **options: Any
) -> Run:
    before, clock = engine.half._options, engine.half._clock
    run = Run(engine, expected, seed)
    Unsteady.dice = run.dice
    Unsteady.slow = Unsteady.failing = 0.0
    try:
        engine.half._options = replace(before, load_timeout_s=1e4, **options)
        engine.half._clock = lambda: float(run.num_steps)
        engine.start_over(run.dice.choice([12, 100, 300]))
        with engine.movers(Unsteady):  # type: ignore[arg-type]
            run.go(num_happenings)
    finally:
        engine.half._options, engine.half._clock = before, clock
    return run


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_whatever_happens_the_answers_stay(engine: tuple[Engine, list[Answer]], lazy: bool) -> None:
    run = play(*engine, seed=1, num_happenings=100, lazy_offload=lazy)
    assert run.num_answers and run.num_asleep
