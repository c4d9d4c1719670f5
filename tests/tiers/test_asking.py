"""`Asker`: what it answers, that it never waits, and what a reset, a dead store and time do."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from tests.interrupts import is_interrupted
from tests.tiers.setup import LONG_S

from kvstow import ConfigError, KvstowError, StateError, TransferError
from kvstow.tiers import asking
from kvstow.tiers.asking import (
    DEFAULT_CALL_S,
    DEFAULT_WAIT_S,
    MAX_KEYS,
    Answer,
    Asker,
    Key,
    Question,
)
from kvstow.tiers.breaker import Breaker


class Clock:
    """A clock that the test moves."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Simulated:
    """A store whose answers the test lets through one by one.

    Attributes:
        held: the keys that it has.
        is_open: whether answers go through at once.
        calls: the keys of each call.
        limits_s: the seconds that each call may take.
        fails: whether calls raise.
        error: why answers lack keys.
    """

    held: set[Key] = field(default_factory=set)
    is_open: bool = True
    fails: bool = False
    error: KvstowError | None = None
    calls: list[list[Key]] = field(default_factory=list)
    limits_s: list[float] = field(default_factory=list)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    allowed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_closed: bool = False

    def found(self, keys: Sequence[Key], limit_s: float) -> Answer:
        self.limits_s.append(limit_s)
        self.calls.append(list(keys))
        answer = [key in self.held for key in keys]
        self.begun.release()
        if not self.is_open:
            assert self.allowed.acquire(timeout=LONG_S)
        if self.fails:
            raise TransferError("the store is dead")
        return Answer(answer, self.error)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def store() -> Simulated:
    return Simulated()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def asker(store: Simulated, clock: Clock) -> Iterator[Asker]:
    with Asker(lambda: store, clock=clock, max_cached_keys=64) as asker:
        yield asker
        store.is_open = True
        store.allowed.release(100)
    assert store.is_closed == bool(store.calls)


def key(number: int, group: int = 0) -> Key:
    return b"%032d" % number, group


def answer(question: Question) -> list[bool]:
    """Return the answer, which comes without the clock."""
    until_s = time.monotonic() + LONG_S
    while not question.poll():
        assert time.monotonic() < until_s, "no answer"
        time.sleep(0.0005)
    return question.found


def idle(asker: Asker) -> None:
    """Wait until the thread has done all that it was asked."""
    until_s = time.monotonic() + LONG_S
    while asker._under_way:
        assert time.monotonic() < until_s, "the thread does not end its calls"
        time.sleep(0.0005)


def test_a_question_finds_what_the_store_has(asker: Asker, store: Simulated) -> None:
    store.held = {key(1), key(3, group=1)}
    assert answer(asker.ask([key(1), key(2), key(3), key(3, group=1)])) == [
        True,
        False,
        False,
        True,
    ]
    assert len(store.calls) == 1


def test_a_question_is_pending_until_its_deadline(
    asker: Asker, store: Simulated, clock: Clock
) -> None:
    store.held, store.is_open = {key(1)}, False
    question = asker.ask([key(1)])
    assert not question.poll()
    with pytest.raises(StateError, match="has not answered yet"):
        _ = question.found
    clock.now_s += 0.049
    assert not question.poll()
    clock.now_s += 0.001
    assert question.poll()
    assert question.found == [False]
    assert asker.stats.late_questions == 1
    # Its answer comes too late for it, and serves the next.
    store.allowed.release()
    idle(asker)
    assert question.found == [False]
    assert answer(asker.ask([key(1)])) == [True]
    assert len(store.calls) == 1


def test_the_store_may_take_as_long_as_a_request_waits(store: Simulated, clock: Clock) -> None:
    for seconds in (DEFAULT_WAIT_S, 5.0):
        with Asker(lambda: store, wait_s=seconds, clock=clock) as asker:
            answer(asker.ask([key(1)]))
    assert store.limits_s == [DEFAULT_CALL_S, 5.0]


def test_a_question_that_waits_too_long_for_its_turn_is_late_and_not_failed(
    asker: Asker, store: Simulated, clock: Clock
) -> None:
    """On a busy machine a healthy store must not look as if it failed."""
    store.is_open = False
    first = asker.ask([key(1)])
    assert store.begun.acquire(timeout=LONG_S)
    second = asker.ask([key(2)])
    clock.now_s += 1  # before the thread comes to the second question
    store.allowed.release()
    idle(asker)
    assert first.poll() and second.poll()
    assert second.found == [False] and len(store.calls) == 1
    assert asker.stats.failed_questions == 0
    assert asker.stats.late_questions == 1
    assert asker.stats.questions == 1 and asker.stats.asked_keys == 1
    store.is_open, store.held = True, {key(2)}
    assert answer(asker.ask([key(2)])) == [True], "it can be asked anew"


def test_an_answer_that_lacks_keys_counts_as_failed(asker: Asker, store: Simulated) -> None:
    store.held, store.error = {key(1)}, TransferError("one of two servers is gone")
    assert answer(asker.ask([key(1), key(2)])) == [True, False]
    assert asker.stats.failed_questions == 1
    assert not asker.breaker._num_failed, "the other server is asked again"


def test_an_answer_is_cached_for_a_while(asker: Asker, store: Simulated, clock: Clock) -> None:
    store.held = {key(1)}
    assert answer(asker.ask([key(1), key(2)])) == [True, False]
    store.held = {key(2)}
    clock.now_s += 0.999
    assert asker.ask([key(1), key(2)]).poll(), "a cached answer needs no call"
    assert asker.ask([key(1), key(2)]).found == [True, False]
    clock.now_s += 0.001
    assert answer(asker.ask([key(1), key(2)])) == [False, True]
    assert len(store.calls) == 2


def test_questions_for_the_same_keys_share_a_call(
    asker: Asker, store: Simulated, clock: Clock
) -> None:
    store.held, store.is_open = {key(1), key(3)}, False
    first = asker.ask([key(1), key(2)])
    assert store.begun.acquire(timeout=LONG_S)
    clock.now_s += 0.04
    second, third = asker.ask([key(2), key(1)]), asker.ask([key(2), key(3)])
    assert not second.poll()
    store.allowed.release(2)
    assert answer(second) == [False, True]
    assert answer(third) == [False, True]
    assert answer(first) == [True, False]
    assert store.calls == [[key(1), key(2)], [key(3)]]


def test_a_shared_call_keeps_its_deadline(asker: Asker, store: Simulated, clock: Clock) -> None:
    store.is_open = False
    asker.ask([key(1)])
    clock.now_s += 0.04
    second = asker.ask([key(1)])
    clock.now_s += 0.01
    assert second.poll()


def test_a_reset_forgets_answers(asker: Asker, store: Simulated) -> None:
    store.held = {key(1)}
    before = asker.ask([key(1)])
    assert answer(before) == [True]
    unread = asker.ask([key(1)])
    asker.reset()
    assert unread.poll()
    assert unread.found == [False], "a question of before the reset finds nothing"
    assert before.found == [True], "an answer does not change once it is read"
    store.held = set()
    assert answer(asker.ask([key(1)])) == [False]


def test_a_reset_fences_answers_under_way(asker: Asker, store: Simulated) -> None:
    store.held, store.is_open = {key(1)}, False
    question = asker.ask([key(1)])
    assert store.begun.acquire(timeout=LONG_S)
    asker.reset()
    store.held = set()
    after = asker.ask([key(1)])
    store.allowed.release()
    assert store.begun.acquire(timeout=LONG_S)
    assert not after.poll(), "the answer to a call of before the reset was cached"
    assert not asker.ask([key(1)]).poll()
    store.allowed.release()
    assert answer(after) == [False]
    assert answer(question) == [False]
    assert len(store.calls) == 2


def test_a_call_without_a_waiting_request_is_left_out(
    asker: Asker, store: Simulated, clock: Clock
) -> None:
    store.is_open = False
    asker.ask([key(1)])
    assert store.begun.acquire(timeout=LONG_S)
    late = asker.ask([key(2)])
    clock.now_s += 0.05
    assert late.poll()
    store.allowed.release()
    idle(asker)
    assert store.calls == [[key(1)]]
    store.is_open = True
    assert answer(asker.ask([key(2)])) == [False]


def test_a_call_of_before_a_reset_is_left_out(asker: Asker, store: Simulated) -> None:
    store.is_open = False
    asker.ask([key(1)])
    assert store.begun.acquire(timeout=LONG_S)
    asker.ask([key(2)])
    asker.reset()
    after = asker.ask([key(3)])
    store.allowed.release(2)
    assert answer(after) == [False]
    assert store.calls == [[key(1)], [key(3)]], "requests wait for a call that finds nothing"


def test_a_failed_store_is_left_alone(
    asker: Asker, store: Simulated, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    store.held, store.fails = {key(number) for number in range(9)}, True
    for number in range(3):
        assert answer(asker.ask([key(number)])) == [False]
        idle(asker)
    until_s = time.monotonic() + LONG_S
    while not (asker.breaker.is_open and caplog.records):  # the line comes after
        assert time.monotonic() < until_s
    question = asker.ask([key(3)])
    assert question.poll(), "nobody waits for a store that has failed"
    assert question.found == [False]
    assert len(store.calls) == 3
    assert asker.stats.refused_questions == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the store is dead" in caplog.text
    store.fails = False
    clock.now_s += 1.0
    assert answer(asker.ask([key(4)])) == [True]
    while asker.breaker._num_failed:
        assert time.monotonic() < until_s
    assert answer(asker.ask([key(5)])) == [True]
    assert "says again" in caplog.text
    assert len(caplog.records) == 2


def test_calls_that_fail_together_make_one_pause(clock: Clock) -> None:
    breaker = Breaker(clock=clock)
    for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        assert breaker.may_try()
        for _ in range(8):
            breaker.failed()
        clock.now_s += pause_s - 0.1
        assert not breaker.may_try()
        clock.now_s += 0.1
    assert breaker.may_try()
    assert breaker.succeeded()
    for _ in range(8):  # nobody tries: of these failures only the third makes a pause
        breaker.failed()
    clock.now_s += 1.0
    assert breaker.may_try(), "the first pause after a success is a short one"


def open_and_close(breaker: Breaker, num_times: int) -> list[tuple[int, bool]]:
    """Let a store fail and answer in turn, and return what the log says of each."""
    said = []
    for _ in range(num_times):
        said.append((sum(breaker.failed() for _ in range(3)), breaker.succeeded()))
    return said


def test_a_store_that_fails_and_answers_in_turn_is_logged_once_a_minute(clock: Clock) -> None:
    breaker = Breaker(clock=clock)
    assert open_and_close(breaker, 10) == [(1, True)] + 9 * [(0, False)]
    clock.now_s += 60.0
    assert open_and_close(breaker, 10) == [(10, True)] + 9 * [(0, False)]


def test_a_store_that_goes_on_failing_is_logged_after_a_minute(clock: Clock) -> None:
    """Otherwise the last line of the log says that it answers again."""
    breaker = Breaker(clock=clock)
    assert open_and_close(breaker, 2) == [(1, True), (0, False)]
    for _ in range(3):
        assert not breaker.failed()
    clock.now_s += 59.0
    assert breaker.may_try() and not breaker.failed()
    clock.now_s += 30.0
    assert breaker.may_try() and breaker.failed() == 2
    clock.now_s += 60.0
    assert breaker.may_try() and not breaker.failed(), "the log has said so"
    assert breaker.succeeded()


def test_an_error_without_a_hit_is_no_answer(
    asker: Asker, store: Simulated, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store.fails = True
    for number in range(3):
        assert answer(asker.ask([key(number)])) == [False]
        idle(asker)
    until_s = time.monotonic() + LONG_S
    while not asker.breaker.is_open:
        assert time.monotonic() < until_s
    store.fails, store.error = False, TransferError("the server is left alone for a while")
    for number in range(3, 6):
        clock.now_s += 30.0
        assert answer(asker.ask([key(number)])) == [False]
        assert asker.ask([key(number + 10)]).poll(), "one question after each pause"
    assert asker.stats.refused_questions == 3
    assert "says again" not in caplog.text
    store.held = {key(6)}  # of another server
    clock.now_s += 30.0
    assert answer(asker.ask([key(6)])) == [True]
    while "says again" not in caplog.text:
        assert time.monotonic() < until_s
    assert answer(asker.ask([key(7)])) == [False]
    assert asker.stats.refused_questions == 3


def test_the_asker_connects_before_the_first_question(asker: Asker, store: Simulated) -> None:
    asker.connect()
    assert store.begun.acquire(timeout=LONG_S)
    [[asked]] = store.calls
    store.held.add(key(1))
    assert answer(asker.ask([key(1), asked])) == [True, False]
    assert asker.stats.questions == 1 and asker.stats.asked_keys == 2


def test_a_connection_that_fails_is_no_question(
    store: Simulated, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store.held, store.fails = {key(1)}, True
    with Asker(lambda: store, clock=clock) as asker:
        asker.connect()
        until_s = time.monotonic() + LONG_S
        while not asker.breaker._num_failed:
            assert time.monotonic() < until_s
        store.fails = False
        assert answer(asker.ask([key(1)])) == [True]
        assert asker.stats.failed_questions == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "does not answer at the start (" in caplog.text


def test_a_store_that_cannot_be_opened_is_tried_again(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store, tries = Simulated({key(1)}), []

    def connect() -> Simulated:
        tries.append(threading.current_thread())
        if len(tries) == 1:
            raise ConfigError("redis-py is not installed")
        return store

    with Asker(connect, clock=clock) as asker:
        assert not tries, "it connects at the first question"
        assert answer(asker.ask([key(1)])) == [False]
        idle(asker)
        assert answer(asker.ask([key(1)])) == [True]
    assert threading.current_thread() not in tries
    assert not caplog.records


def test_a_question_whose_thread_does_not_start_finds_nothing(
    store: Simulated, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store.held = {key(1)}
    with pytest.MonkeyPatch.context() as patch, Asker(lambda: store, clock=clock) as asker:
        patch.setattr(threading.Thread, "start", refuse_to_start)
        asker.connect()
        question = asker.ask([key(1)])
        assert question.poll() and question.found == [False]
        assert asker.stats.refused_questions == 1
        assert not caplog.records
        asker.ask([key(1)])
        assert "does not start the thread" in caplog.text and "ulimit -u" in caplog.text
        patch.undo()
        clock.now_s += 1.0
        assert answer(asker.ask([key(1)])) == [True], "the next question does not try again"
    assert store.is_closed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_to_start)
        asker = Asker(Simulated, clock=clock)
        asker.ask([key(1)])
        asker.close()


def refuse_to_start(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_an_interrupted_question_leaves_its_keys_to_the_next_one() -> None:
    before, line, is_cut_short = threading.active_count(), 0, True
    askers = []  # kept, because the collection of an asker ends a thread, too
    while is_cut_short:
        line += 1
        store, clock = Simulated({key(1)}), Clock()
        with Asker(lambda store=store: store, clock=clock) as asker:  # type: ignore[misc]
            askers.append(asker)
            is_cut_short = is_interrupted(
                lambda asker=asker: asker.ask([key(1)]),  # type: ignore[misc]
                line,
                str(asking.__file__),
                skipped=("with ", "try:"),
            )
            assert answer(asker.ask([key(1)])) == [True], f"line {line}"
    assert line > 20, "some lines were interrupted"
    until_s = time.monotonic() + LONG_S
    while threading.active_count() > before:
        assert time.monotonic() < until_s, "a thread is left"
        time.sleep(0.001)


def test_memory_is_bounded(
    asker: Asker, store: Simulated, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(0, 1000, 10):
        answer(asker.ask([key(at) for at in range(number, number + 10)]))
        assert len(asker._cache) <= 64
    assert not asker._under_way
    # The newest answers are kept.
    num_calls = len(store.calls)
    assert asker.ask([key(at) for at in range(940, 1000)]).poll()
    assert len(store.calls) == num_calls
    # An answer that is asked for anew is one of the newest.
    clock.now_s += 1.0
    answer(asker.ask([key(940)]))
    answer(asker.ask([key(at) for at in range(1000, 1063)]))
    num_calls = len(store.calls)
    assert asker.ask([key(940), key(1062)]).poll()
    assert len(store.calls) == num_calls

    long = [key(at) for at in range(2000, 2000 + MAX_KEYS + 10)]
    store.held = set(long)
    assert answer(asker.ask(long)) == [True] * MAX_KEYS + [False] * 10
    assert len(store.calls[-1]) == MAX_KEYS
    assert len(asker._cache) <= 64

    monkeypatch.setattr("kvstow.tiers.asking._MAX_QUEUED_KEYS", 20)
    store.is_open = False
    asker.ask([key(at) for at in range(3000, 3015)])
    refused = asker.ask([key(at) for at in range(3015, 3025)])
    assert refused.poll(), "a question beyond the bound of the queue is not asked"
    assert refused.found == [False] * 10
    assert asker.stats.refused_questions == 1
    clock.now_s += 1


@pytest.mark.parametrize("seed", range(20))
def test_random_questions_agree_with_the_store(seed: int) -> None:
    """An answer was true since the last reset, and at most `keep_s` ago."""
    draw, clock, store = random.Random(seed), Clock(), Simulated()
    names = [key(number, group) for number in range(12) for group in range(2)]
    # What is true from when on, the oldest first.
    truth: dict[Key, list[tuple[float, bool]]] = {name: [(0.0, False)] for name in names}
    with Asker(lambda: store, clock=clock, max_cached_keys=8) as asker:
        for _ in range(300):
            action = draw.random()
            if action < 0.3:
                name, is_there = draw.choice(names), draw.random() < 0.6
                (store.held.add if is_there else store.held.discard)(name)
                truth[name].append((clock.now_s, is_there))
            elif action < 0.4:
                clock.now_s += draw.choice([0.01, 0.3, 1.0])
            elif action < 0.45:
                asker.reset()
                truth = {name: [(0.0, seen[-1][1])] for name, seen in truth.items()}
            else:
                keys = draw.sample(names, draw.randrange(6))
                for name, is_found in zip(keys, answer(asker.ask(keys)), strict=True):
                    ends = [*(since_s for since_s, _ in truth[name][1:]), clock.now_s]
                    recent = {
                        is_there
                        for (_, is_there), end_s in zip(truth[name], ends, strict=True)
                        if clock.now_s - end_s < 1.0
                    }
                    assert is_found in recent, (seed, name)
            idle(asker)
            assert len(asker._cache) <= 8


def test_a_closed_asker_takes_no_question(clock: Clock) -> None:
    store = Simulated(is_open=False)
    asker = Asker(lambda: store, clock=clock)
    question = asker.ask([key(1)])
    assert store.begun.acquire(timeout=LONG_S)
    store.allowed.release()
    asker.close()
    asker.close()
    assert question.poll()
    assert store.is_closed
    with pytest.raises(StateError, match="closed"):
        asker.ask([key(1)])


def test_asker_whose_close_is_interrupted_is_closed_by_the_next_one() -> None:
    before, line, is_cut_short = threading.active_count(), 0, True
    while is_cut_short:
        line += 1
        store = Simulated({key(1)})
        asker = Asker(lambda store=store: store, clock=Clock())  # type: ignore[misc]
        assert answer(asker.ask([key(1)])) == [True]
        is_cut_short = is_interrupted(asker.close, line, str(asking.__file__), skipped=("with ",))
        asker.close()
        assert store.is_closed, f"line {line}: the store stays open"
        assert threading.active_count() == before, f"line {line}: a thread is left"
    assert line > 5, "some lines were interrupted"


@pytest.mark.parametrize("name", ["wait_s", "call_s", "keep_s", "max_cached_keys"])
def test_a_wrong_option_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        Asker(Simulated, **{name: 0})  # type: ignore[arg-type]
