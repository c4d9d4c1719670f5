"""Calls of an `Engine` with wrong arguments, at the wrong time, or at its begin and its end."""

import copy
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.world import (
    BLOCK,
    DOCUMENT,
    LOADS,
    NOTHING,
    RUNS,
    World,
    polled,
    state,
    world,
)
from tests.forks import in_child

from kvstow import (
    AllBlocksCleared,
    ChunkedLocal,
    ConfigError,
    Engine,
    FullAttention,
    OutOfBlocks,
    RequestTooLarge,
    SlidingWindow,
    StateError,
    StateSpace,
    StepAllocation,
    TransferError,
    UnknownRequest,
    hash_tokens,
)
from kvstow.closing import call_all
from kvstow.engine.arguments import Group
from kvstow.transfer import (
    READY,
    BlockLayout,
    Event,
    HostArena,
    HostEvent,
    HostMover,
    Mover,
    VerifiedMover,
)

# -- the end -----------------------------------------------------------------------------------


def test_close_ends_all_copies_in_flight() -> None:
    never = HostEvent()
    with world(mover=HostMover, load_timeout_s=1.0) as it:
        it.admit("first", DOCUMENT)
        it.compute("first", DOCUMENT)
        assert polled(it.engine).num_stored_blocks == 4
        it.engine.finish("first")
        assert it.engine.ledger.pool.reset()
        it.admit("loads", [*DOCUMENT, 91], after=never)
        it.admit("stores", list(range(50, 58)))
        it.compute("stores", list(range(50, 58)), after=never)
        it.now_s = 2.0
        assert it.engine.poll().failed == ["loads"]
        it.admit("loads too", list(range(50, 58)))
        assert len(it.engine.transfers) == 2
        assert it.engine.ledger.pool.num_free == 16 - 4 - 3
        it.engine.close()

        assert not it.engine.transfers
        it.engine.check()
        for name in "loads", "stores", "loads too":
            it.engine.finish(name)
        assert it.engine.ledger.pool.num_free == 16
        it.engine.close()
        with pytest.raises(StateError, match="this HostMover is closed"):
            it.engine.movers[0].store([1], [0], after=READY)


def test_closed_engine_refuses_calls() -> None:
    with world() as it:
        it.put_on_the_host(DOCUMENT)
        it.admit("loads", [*DOCUMENT, 91])
        it.admit("runs", list(range(50, 58)))
        it.engine.add("waits", [])
        it.engine.close()
        for use in (
            lambda: it.engine.add("new", []),
            lambda: it.engine.admit("waits", 1, 1, after=READY),
            lambda: it.engine.computed([], [], after=READY),
            it.engine.reset,
            lambda: it.engine.step(["loads"], [1]),
            lambda: it.engine.step(["runs"], [1]),
            lambda: it.engine.extend("runs", []),
            it.engine.poll,
        ):
            with pytest.raises(StateError, match="is closed"):
                use()


def test_engine_refuses_calls_of_a_forked_child() -> None:
    with world() as it:
        it.put_on_the_host(DOCUMENT)
        it.engine.add("waits", [])

        def check() -> None:
            for use in (
                lambda: it.engine.add("new", []),
                lambda: it.engine.admit("waits", 1, 1, after=READY),
                lambda: it.engine.computed([], [], after=READY),
                it.engine.reset,
                it.engine.poll,
                lambda: it.engine.sleep(after=READY),
            ):
                with pytest.raises(StateError, match="this Engine belongs to the process that"):
                    use()
            it.engine.close()

        in_child(check)
        assert it.admit("again", [*DOCUMENT, 91]).state is LOADS


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_must_be_closed_cannot_be_copied(duplicate: Callable[[object], object]) -> None:
    with world(mover=HostMover) as it:
        for part in it.engine, it.engine.arenas[0], it.engine.movers[0]:
            name = type(part).__name__
            with pytest.raises(TypeError, match=f"{name} objects cannot be copied or pickled"):
                duplicate(part)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda group: pickle.loads(pickle.dumps(group))]
)
def test_groups_reach_a_process_that_is_spawned(duplicate: Callable[[object], object]) -> None:
    groups = [
        FullAttention(4, drops_last_block=True),
        SlidingWindow(4, 9, extra_retained_tokens=3, drops_last_block=True),
        ChunkedLocal(4, 16),
        StateSpace(8),
    ]
    assert [duplicate(group) for group in groups] == groups


def test_close_raises_the_first_error_with_the_others_as_notes() -> None:
    class Broken(RuntimeError):
        def __repr__(self) -> str:
            raise ValueError("this error has no text")

        __str__ = __repr__

    def fail(error: Exception) -> None:
        raise error

    errors = [KeyError("first"), Broken(), OSError(5, "third")]
    with pytest.raises(KeyError, match="first") as caught:
        call_all([partial(fail, error) for error in errors])
    notes = "".join(caught.value.__notes__)
    assert "Broken" in notes
    assert "OSError: [Errno 5] third" in notes


def test_reset_forgets_every_prefix_at_any_moment() -> None:
    with world() as it:
        it.put_on_the_host(DOCUMENT)
        it.admit("loads", [*DOCUMENT, 91])
        it.admit("runs", list(range(50, 66)))
        it.compute("runs", list(range(50, 66)))
        it.engine.reset()
        assert it.engine.stats()["device_blocks_cached"] == 0
        it.mover.loads[0].land()
        it.mover.stores[-1].land()
        assert it.engine.poll().failed == ["loads"]
        for name, tokens in ("loads", DOCUMENT), ("new", list(range(50, 66))):
            found = it.admit(name, [*tokens, 91])
            assert (found.state, found.num_hit_tokens) == (RUNS, 0)
        assert it.engine.step(["runs"], [1]).num_granted == 1


def go_on(it: World, name: str, text: list[int]) -> None:
    """Compute one more block of a request."""
    num_before = len(text) - BLOCK
    assert it.engine.step([name], [BLOCK]).num_granted == 1
    it.engine.extend(name, list(hash_tokens(text, BLOCK))[num_before // BLOCK :])
    it.compute(name, text)


def cut_short(it: World) -> None:
    """Interrupt an operation, which ends all copies as failed. Requests that run go on."""
    it.engine._state.change.is_torn = True
    it.engine.poll()


def sleep_and_wake(it: World) -> None:
    it.engine.sleep(after=READY)
    it.engine.wake([BlockLayout.from_arrays([it.kv])], after=READY)


@pytest.mark.parametrize("then", [lambda _: None, cut_short, sleep_and_wake])
@pytest.mark.parametrize("way", [{}, {"mode": "lazy", "horizon_blocks": 30}])
@pytest.mark.parametrize("is_reset", [True, False])
def test_no_request_finds_what_a_running_one_computed_before_a_reset(
    then: Callable[[World], object], way: dict[str, Any], is_reset: bool
) -> None:
    with world(33, mover=HostMover, **way) as it:
        assert it.admit("runs", DOCUMENT).state is RUNS
        it.compute("runs", DOCUMENT)
        if is_reset:
            it.engine.reset()
        then(it)
        go_on(it, "runs", longer := [*DOCUMENT, 91, 92, 93, 94])
        it.engine.finish("runs")
        while it.engine.transfers:
            it.engine.poll()
        found = it.admit("new", [*longer, 95])
        num_found = found.num_hit_tokens + found.num_external_tokens
        assert num_found == (0 if is_reset else len(longer))


def test_a_request_that_starts_over_after_a_reset_is_cached_again() -> None:
    with world(33, mover=HostMover) as it:
        it.admit("runs", DOCUMENT)
        it.compute("runs", DOCUMENT)
        it.engine.reset()
        it.engine.preempt("runs")
        assert it.admit("runs", DOCUMENT).state is RUNS
        it.compute("runs", DOCUMENT)
        assert it.admit("new", [*DOCUMENT, 91]).num_hit_tokens == len(DOCUMENT)


# -- misuse ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "error", "problem"),
    [
        (lambda e: e.add("runs", []), StateError, "'runs' was added before: finish it, or"),
        (lambda e: e.admit("runs", 9, 9, after=READY), StateError, "is running; admit a req"),
        (lambda e: e.admit("loads", 17, 9, after=READY), StateError, "is loading; admit a req"),
        (lambda e: e.admit("nobody", 9, 9, after=READY), UnknownRequest, "'nobody' is not known"),
        (lambda e: e.admit("waits", 9, 9, after=None), ConfigError, "expected an Event"),
        (lambda e: e.admit("waits", 0, 9, after=READY), ConfigError, "num_tokens is 0"),
        (lambda e: e.admit("waits", 9, 0, after=READY), ConfigError, "max_new_tokens is 0"),
        (lambda e: e.admit("waits", 9, 9, after=READY, reserve=-1), ConfigError, "-1"),
        (lambda e: e.step(["runs", "loads"], [1, 1]), StateError, "'loads' is loading and does"),
        (lambda e: e.step(["waits"], [1]), StateError, "'waits' is added and does not run"),
        (lambda e: e.step(["nobody"], [1]), UnknownRequest, "nobody"),
        (lambda e: e.computed(["runs", "loads"], [16, 16], after=READY), StateError, "loading"),
        (lambda e: e.computed(["runs"], [17], after=READY), ConfigError, "16. Leave out the token"),
        (lambda e: e.computed(["runs"] * 2, [16, 16], after=READY), ConfigError, "'runs' 2 times"),
        (lambda e: e.step(["runs"] * 2, [1, 1]), ConfigError, "'runs' 2 times"),
        (lambda e: e.step([[]], [1]), UnknownRequest, r"\[\] is not known"),
        (lambda e: e.tables(7), UnknownRequest, "7 is not known"),
        (lambda e: e.computed(["runs"], [8, 8], after=READY), ConfigError, "1 .* but 2"),
        (lambda e: e.computed(["runs"], [15.7], after=READY), ConfigError, "sequence of integers"),
        (lambda e: e.computed(["runs"], ["16"], after=READY), ConfigError, "sequence of integers"),
        (lambda e: e.computed(["runs"], np.ones(1), after=READY), ConfigError, "of integers"),
        (lambda e: e.computed(["runs"], {16}, after=READY), ConfigError, "is of type set, exp"),
        (lambda e: e.computed(["runs"], {16: 1}, after=READY), ConfigError, "is of type dict"),
        (lambda e: e.computed(["runs"], [16], after=None), ConfigError, "expected an Event"),
        (lambda e: e.computed(["runs"], [16], after=HostEvent), ConfigError, "not its class"),
        (lambda e: e.end(None), ConfigError, "transfer is None.*if there is one"),
        (lambda e: e.step(["runs"], [0]), ConfigError, "0 new tokens.*leave the request out"),
        (lambda e: e.step(["runs"], np.ones(1)), ConfigError, "num_new_tokens is an array of"),
        (lambda e: e.rewind("loads", 0), StateError, "loading"),
        (lambda e: e.finish("nobody"), UnknownRequest, "nobody"),
        (lambda e: e.preempt("nobody"), UnknownRequest, "nobody"),
        (lambda e: e.extend("nobody", []), UnknownRequest, "nobody"),
        (lambda e: e.tables("nobody"), UnknownRequest, "'nobody' is not known: never added, or"),
    ],
)  # fmt: skip
def test_misuse_raises_and_changes_nothing(
    use: Callable[[Engine], object], error: type[Exception], problem: str
) -> None:
    with world() as it:
        it.put_on_the_host(DOCUMENT)
        it.admit("loads", [*DOCUMENT, 91])
        it.admit("runs", list(range(50, 66)))
        it.engine.add("waits", hash_tokens(range(80, 89), BLOCK))
        before = state(it.engine)
        with pytest.raises(error, match=problem):
            use(it.engine)
        assert state(it.engine) == before
        it.engine.check()
        transfer = it.engine.computed(["runs"], [16], after=READY)
        assert transfer is not None
        assert len(transfer.job) == 4
        assert it.engine.admit("waits", 9, 9, after=READY).state is RUNS


def test_wrong_time_leaves_no_pin_and_no_job_behind() -> None:
    with world(load_timeout_s=1.0) as it:
        it.put_on_the_host(DOCUMENT)
        it.engine.add("again", hash_tokens(DOCUMENT, BLOCK))
        before = state(it.engine)
        it.now_s = float("nan")
        with pytest.raises(ConfigError, match="clock"):
            it.admit("again", [*DOCUMENT, 91])
        assert state(it.engine) == before
        it.now_s = 1.0
        assert it.admit("again", [*DOCUMENT, 91]).state is LOADS


def test_wrong_time_neither_begins_nor_ends_a_transfer() -> None:
    with world() as it:
        it.admit("one", DOCUMENT)
        it.compute("one", DOCUMENT[:8])
        it.mover.stores[0].land()
        before = state(it.engine)
        it.now_s = float("inf")
        for use in it.engine.poll, lambda: it.engine.computed(["one"], [16], after=READY):
            with pytest.raises(ConfigError, match="clock says inf"):
                use()
        assert state(it.engine) == before
        it.now_s = 1.0
        assert it.engine.poll().num_stored_blocks == 2
        transfer = it.engine.computed(["one"], [16], after=READY)
        assert transfer is not None
        assert len(transfer.job) == 2


def test_refused_admission_pins_no_host_slot() -> None:
    with world(num_host_blocks=4) as it:
        it.put_on_the_host(DOCUMENT)
        it.engine.add("again", hash_tokens(DOCUMENT, BLOCK))
        with pytest.raises(ConfigError):
            it.engine.admit("again", 17, 100, after=READY, reserve=-1)
        it.admit("other", list(range(50, 54)))
        assert it.engine.computed(["other"], [4], after=READY) is not None


def test_a_transfer_ends_once() -> None:
    with world(mover=HostMover) as it:
        it.admit("writer", DOCUMENT)
        it.compute("writer", DOCUMENT)
        [transfer] = it.engine.transfers
        assert it.engine.end(transfer).ok, "end waits for the copies"
        with pytest.raises(StateError, match="a transfer ends once"):
            it.engine.end(transfer)


def test_end_refuses_a_transfer_that_poll_has_ended() -> None:
    with world() as it:
        it.admit("writer", DOCUMENT)
        it.compute("writer", DOCUMENT)
        [transfer] = it.engine.transfers
        it.mover.stores[0].land()
        assert it.engine.poll().num_stored_blocks == 4
        with pytest.raises(StateError, match="with end or with a poll that finds it done"):
            it.engine.end(transfer)


def test_rewind_takes_granted_tokens_back() -> None:
    with world() as it:
        it.admit("one", [*DOCUMENT, 91])
        it.engine.step(["one"], [3])
        it.engine.rewind("one", 18)
        assert it.engine.ledger.num_granted_tokens("one") == 18


def test_a_rewind_behind_hashed_drafts_is_refused() -> None:
    """Else the block would be found under the hash of the drafts, and hold other tokens."""
    with world() as it:
        prompt, drafted = DOCUMENT[:6], [*DOCUMENT[:6], 90, 91]
        it.admit("one", prompt)
        it.engine.step(["one"], [2])
        it.engine.extend("one", hash_tokens(drafted, BLOCK)[1:])
        before = state(it.engine)
        with pytest.raises(StateError, match=r"hashes of 8\. Pass all of its tokens that stay"):
            it.engine.rewind("one", 7)
        assert state(it.engine) == before
        it.engine.rewind("one", 8)


def test_tokens_behind_a_rewind_are_reported_again() -> None:
    """A block without a hash is not published, so a rewind may go back behind it."""
    with world() as it:
        it.admit("one", [*DOCUMENT, 91])
        it.engine.step(["one"], [3])
        it.engine.computed(["one"], [20], after=READY)
        it.engine.rewind("one", 18)
        it.engine.step(["one"], [6])
        it.engine.computed(["one"], [19], after=READY)
        it.engine.extend("one", hash_tokens([*DOCUMENT, *range(91, 99)], BLOCK)[4:])
        transfer = it.engine.computed(["one"], [24], after=READY)
        assert transfer is not None
        assert transfer.job.block_ids.tolist() == it.engine.tables("one")[0][4:].tolist()


def test_computed_refuses_the_tokens_of_one_step_in_place_of_all() -> None:
    with world() as it:
        it.admit("one", DOCUMENT)
        it.admit("two", list(range(50, 66)))
        it.engine.computed(["one"], [10], after=READY)
        before = state(it.engine)
        with pytest.raises(ConfigError, match="'one' has computed 6 tokens, and 8 were reported"):
            it.engine.computed(["two", "one"], [16, 6], after=READY)
        assert state(it.engine) == before
        assert it.engine.computed(["two", "one"], [16, 16], after=READY) is not None


def test_events_cover_both_pools_and_survive_a_restart() -> None:
    with world(events=True) as it:
        it.engine.add("one", hash_tokens(DOCUMENT, BLOCK)[:2], tokens=DOCUMENT[:8])
        it.engine.extend("one", hash_tokens(DOCUMENT, BLOCK)[2:], tokens=np.array(DOCUMENT[8:]))
        it.engine.admit("one", 16, 100, after=READY)
        it.engine.preempt("one")
        assert it.engine.ledger.pool.reset()
        assert it.engine.take_events()
        it.engine.admit("one", 16, 100, after=READY)
        it.engine.computed(["one"], [16], after=READY)
        it.mover.stores[0].land()
        it.engine.poll()
        device, host = it.engine.take_events()
        assert (device.medium, host.medium) == ("GPU", "CPU")
        assert device.token_ids == DOCUMENT  # type: ignore[union-attr]
        assert it.engine.take_events() == []


def test_events_that_nobody_takes_do_not_grow_without_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvstow.engine.event_log.MAX_KEPT", 4)
    with world(events=True) as it:
        for number in range(6):
            it.put_on_the_host([number] * BLOCK)
        taken = it.engine.take_events()
        assert len(taken) == 4
        *_, stored, cleared = taken
        assert (stored.medium, type(cleared)) == ("CPU", AllBlocksCleared), "the newest stay"
        assert len(it.engine.take_transfer_events()) == 4
        assert caplog.text.count("nobody takes the events") == 1
        it.put_on_the_host(DOCUMENT)
        assert it.engine.take_events(), "it goes on"


# -- building ----------------------------------------------------------------------------------


def layout(num_blocks: int) -> BlockLayout:
    return BlockLayout.from_arrays([np.zeros((num_blocks, 8), np.uint8)])


@pytest.mark.parametrize(
    ("layouts", "options", "problem"),
    [
        ([], {}, "groups has length 1 but layouts has length 0"),
        ([layout(8), layout(8)], {}, "groups has length 1 but layouts has length 2"),
        ([layout(7)], {}, r"layouts\[0\] has memory for 7 blocks, the pool has 8"),
        ([layout(8)], {"load_timeout_s": 0.0}, "load_timeout_s is 0.0"),
        ([layout(8)], {"load_timeout_s": float("nan")}, "load_timeout_s is nan"),
        ([layout(8)], {"load_timeout_s": 10**400}, "load_timeout_s is 1000"),
        ([layout(8)], {"load_timeout_s": np.float32("inf")}, "load_timeout_s is .*inf"),
        ([layout(8)], {"policy": "arc"}, "arc"),
        ([layout(8)], {"mode": "lazy"}, "a lazy engine needs a horizon"),
        ([layout(8)], {"horizon_blocks": 4}, "an eager one has none"),
        ([layout(8)], {"mode": "lazy", "horizon_blocks": 0}, "horizon_blocks is 0"),
    ],
)
def test_constructor_names_the_argument_that_is_wrong(
    layouts: list[BlockLayout], options: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        Engine(8, 8, [FullAttention(4)], layouts, **options)  # type: ignore[arg-type]


def test_a_layout_whose_blocks_are_layers_is_refused_with_the_way_out() -> None:
    """With num_device_blocks=4 the engine would copy a layer for each block, and serve wrong KV."""
    kv = np.zeros((4, 8, 4, 2))  # layers, blocks, tokens, K and V
    problem = (
        r"memory for 4 blocks, the pool has 8; .* counts layers, or K and V, pass list\(array\)"
        r".* If it counts blocks, pass num_device_blocks=4"
    )
    with pytest.raises(ConfigError, match=problem):
        Engine(8, 8, [FullAttention(4)], [BlockLayout.from_arrays([kv])])
    Engine(8, 8, [FullAttention(4)], [BlockLayout.from_arrays(list(kv))]).close()


def test_a_layout_whose_blocks_are_tokens_is_refused() -> None:
    tokens = BlockLayout.from_arrays([np.zeros((8 * 4, 2), np.uint8)])
    with pytest.raises(ConfigError, match=r"32 blocks, .* to \[blocks, 4, ...\]"):
        Engine(8, 8, [FullAttention(4)], [tokens])
    with pytest.raises(ConfigError, match="the layout of group 1"):
        Engine(8, 8, [FullAttention(4), SlidingWindow(4, 8)], [layout(8), tokens])


@pytest.mark.parametrize(
    ("group", "num_blocks"), [(FullAttention(4), 31), (FullAttention(1), 8), (StateSpace(4), 32)]
)
def test_a_layout_with_more_blocks_than_the_pool_is_accepted(group: Group, num_blocks: int) -> None:
    Engine(8, 8, [group], [layout(num_blocks)]).close()


def test_failed_constructor_closes_the_movers_it_made() -> None:
    built: list[HostMover] = []

    def make(layout: BlockLayout, arena: HostArena) -> Mover:
        if built:
            raise ConfigError("no second one")
        built.append(HostMover(layout, arena))
        return built[0]

    with pytest.raises(ConfigError, match="no second one"):
        Engine(8, 8, [FullAttention(4)] * 2, [layout(8)] * 2, mover=make)
    with pytest.raises(StateError, match="this HostMover is closed"):
        built[0].store([1], [0], after=READY)
    assert built[0].arena.closed


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *command],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_runs() -> None:
    printed = run(str(Path(__file__).parents[2] / "examples" / "engine.py"))

    assert printed.splitlines() == [
        "asks: 0 tokens on the device, 0 on the host",
        "other: 0 tokens on the device, 0 on the host",
        "again: 16 tokens on the device, 80 on the host",
    ]


@pytest.mark.parametrize("num_blocks", [8, 9, 10, 13, 17])
@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_the_example_serves_every_request_on_a_device_that_is_too_small(
    num_blocks: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (Path(__file__).parents[2] / "examples" / "engine.py").read_text()
    for old, new in {
        "zeros((9,": f"zeros(({num_blocks},",
        "Engine(9,": f"Engine({num_blocks},",
        "CHUNK = 64": f"CHUNK = {chunk}",
        ", must_fit_tokens=size": "",  # so that requests begin that do not fit together
    }.items():
        assert old in code
        code = code.replace(old, new)
    num_steps = 0
    refused, finished = list[int](), list[str]()
    step, finish = Engine.step, Engine.finish

    def counted(engine: Engine, names: list[str], counts: list[int]) -> StepAllocation:
        nonlocal num_steps
        num_steps += 1
        assert num_steps < 20_000, f"{names} run in a loop that does not end"
        granted = step(engine, names, counts)
        refused.append(len(names) - granted.num_granted)
        return granted

    def noted(engine: Engine, name: str) -> None:
        finished.append(name)
        finish(engine, name)

    monkeypatch.setattr(Engine, "step", counted)
    monkeypatch.setattr(Engine, "finish", noted)
    exec(compile(code, "engine.py", "exec"), {"__name__": "example"})

    assert sorted(finished) == ["again", "asks", "other"]
    assert num_blocks in {8, 17} or max(refused) > 1


def test_engine_is_imported_at_its_first_use() -> None:
    code = "import sys, kvstow; before = 'kvstow.transfer' in sys.modules; kvstow.Engine; "
    assert run("-c", code + "print(before, 'kvstow.transfer' in sys.modules)") == "False True\n"


def test_block_that_left_the_window_before_it_was_computed_is_not_stored() -> None:
    """The device may have given its memory to another block by then."""
    arrays = [np.zeros((16, BLOCK), np.int64) for _ in range(2)]
    groups: list[FullAttention | SlidingWindow] = [FullAttention(BLOCK), SlidingWindow(BLOCK, 6)]
    layouts = [BlockLayout.from_arrays([array]) for array in arrays]
    with Engine(16, 16, groups, layouts) as engine:
        engine.add("a", hash_tokens(range(24), BLOCK))
        assert engine.admit("a", 24, 6, after=READY).state is RUNS
        engine.computed(["a"], [6], after=READY)
        engine.step(["a"], [14])
        engine.step(["a"], [4])  # granted before the step above is computed
        held = engine.ledger.block_table("a", 1).tolist()
        assert not held[1], "the block that was half full is still in the window"
        transfer = engine.computed(["a"], [24], after=READY)
        assert transfer is not None
        begin, end = transfer.job.offsets[1:3].tolist()
        stored = transfer.job.block_ids[begin:end].tolist()
        assert stored == [block_id for block_id in held if block_id]


# -- wrong types -------------------------------------------------------------------------------

LAYOUT = BlockLayout.from_arrays([np.zeros((8, 8), np.uint8)])


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        (lambda e: e.add(7, []), "request_id is 7, expected a str"),
        (lambda e: e.add("new", ["x"]), "a block hash is of type"),
        (lambda e: e.add("new", [], tokens=["x"]), "token 0 is of type str"),
        (lambda e: e.admit("added", "x", 1, after=READY), "num_tokens must be an integer, got 'x'"),
        (
            lambda e: e.admit("added", [*range(99)], 1, after=READY),
            r"got \[0, 1, 2, 3, 4, 5, ...\];",
        ),
        (lambda e: e.admit("added", 5.0, 1, after=READY), "num_tokens must be an integer"),
        (lambda e: e.admit("added", 9, "3", after=READY), "max_new_tokens must be an integer"),
        (
            lambda e: e.admit("added", 9, 9, after=READY, must_fit_tokens="9"),
            "must_fit_tokens must be",
        ),
        (lambda e: e.admit("added", 9, 9, after=READY, reserve="9"), "reserve must be an integer"),
        (lambda e: e.computed("ab", [1, 1], after=READY), r"pass \['ab'\]"),
        (lambda e: e.computed(["runs"], ["x"], after=READY), "expected a sequence of integers"),
        (lambda e: e.computed(["runs"], 3, after=READY), "expected a sequence of integers"),
        (lambda e: e.step("ab", [1, 1]), r"pass \['ab'\]"),
        (lambda e: e.step(None, [1]), "request_ids is of type NoneType, expected a list"),
        (lambda e: e.computed({"runs"}, [16], after=READY), "request_ids is of type set"),
        (lambda e: e.step(np.array("runs"), [1]), "request_ids is of type ndarray, expected a li"),
        (lambda e: e.computed(np.array("runs"), [16], after=READY), "request_ids is of type ndarr"),
        (lambda e: e.computed(iter(["runs"]), [16], after=READY), "request_ids is of type list_it"),
        (
            lambda e: e.step(["runs"], [1], num_lookahead_tokens=-1),
            f"num_lookahead_tokens is -1, outside 0 to {2**40}",
        ),
        (
            lambda e: e.step(["runs"], [1], num_lookahead_tokens=1.0),
            "num_lookahead_tokens must be an integer, got 1.0",
        ),
        (
            lambda e: e.step(["runs"], [1], num_in_flight_tokens="1"),
            "num_in_flight_tokens must be an integer, got '1'",
        ),
        (lambda e: e.reset(weights_version=5), "weights_version is 5, expected a str"),
        (lambda e: e.restart(5, after=READY, identity="", weights_version=""), "path is 5"),
        (lambda e: e.restart(b"f", after=READY, identity="", weights_version=""), "path is b'f'"),
        (lambda e: e.restart("\0", after=READY, identity="", weights_version=""), "path is "),
        (lambda e: e.restart("\ud800", after=READY, identity="", weights_version=""), "path is "),
        (lambda e: e.step(["runs"], 1), "not a sequence of integers for num_new_tokens"),
        (lambda e: e.step(["runs"], ["5"]), "num_new_tokens has '5', which is not an integer"),
        (lambda e: e.step(["runs"], [-1]), f"num_new_tokens has -1: each must be 1 to {2**40}"),
        (lambda e: e.computed(["runs"], [-1], after=READY), "computed -1 tokens, and 0 were"),
        (lambda e: e.sleep(after=READY, timeout_s="1"), "timeout_s is '1'"),
        (lambda e: e.sleep(after=READY, weights_version=np.ones(2)), "array.*; pass strings"),
        (lambda e: e.sleep(after=READY, preserve="no"), "preserve is 'no', expected True or False"),
    ],
)
def test_wrong_type_raises_config_error(use: Callable[[Engine], object], problem: str) -> None:
    with world() as it:
        it.admit("runs", DOCUMENT)
        it.engine.add("added", hash_tokens(DOCUMENT, BLOCK))
        with pytest.raises(ConfigError, match=problem):
            use(it.engine)
        assert not it.engine._state.change.is_torn
        it.engine.check()
        assert it.engine.admit("added", 16, 100, after=READY).state is RUNS


@pytest.mark.parametrize("wrong", [0.0, "", [], False])
def test_false_must_fit_tokens_raises_config_error(wrong: Any) -> None:
    with world() as it:
        it.engine.add("added", hash_tokens(DOCUMENT, BLOCK))
        with pytest.raises(ConfigError, match=f"integer, got {re.escape(repr(wrong))};"):
            it.engine.admit("added", 16, 100, after=READY, must_fit_tokens=wrong)
        assert not it.engine._state.change.is_torn


def test_numbers_of_a_narrow_type_do_not_overflow() -> None:
    most: Any = np.uint8(255)
    with world(65) as it:
        it.engine.add("one", [])
        assert it.engine.admit("one", most, most, after=READY).num_new_tokens == 255
        with pytest.raises(OutOfBlocks, match="needs 192 blocks for this step"):
            it.engine.step(["one"], np.array([255], np.uint8), num_lookahead_tokens=most)
        it.engine.preempt("one")
        with pytest.raises(OutOfBlocks, match="needs 128 blocks now"):
            it.engine.admit("one", most, most, after=READY, num_lookahead_tokens=most)
    with world(9) as it:
        it.engine.add("one", [])
        with pytest.raises(RequestTooLarge, match="needs 64 blocks for 255 tokens"):
            it.engine.admit("one", most, 1, after=READY)


def test_host_blocks_of_a_narrow_type_do_not_overflow() -> None:
    num_slots: Any = np.int8(64)
    with world(num_host_blocks=num_slots, blocks_per_slot=2) as it:
        assert it.engine.arenas[0].num_slots == 128


@pytest.mark.parametrize(
    "use",
    [
        lambda e, number: e.computed(["runs"], [number], after=READY),
        lambda e, number: e.rewind("runs", number),
        lambda e, number: e.admit("runs", number, 9, after=READY),
        lambda e, number: e.step(["runs"], [1], num_lookahead_tokens=number),
    ],
)
def test_request_that_ends_while_a_number_is_read_is_unknown(
    use: Callable[[Engine, Any], object],
) -> None:
    class Ending:
        def __index__(self) -> int:
            it.engine.finish("runs")
            return 16

    with world() as it:
        it.admit("runs", DOCUMENT)
        with pytest.raises(UnknownRequest, match="'runs' is not known"):
            use(it.engine, Ending())
        assert not it.engine._state.change.is_torn


def test_request_id_of_a_wrong_type_is_unknown() -> None:
    with world() as it:
        wrongs: list[Any] = [7, None, [], {}]
        for wrong in wrongs:
            with pytest.raises(UnknownRequest):
                it.engine.finish(wrong)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"groups": FullAttention(4)}, r"groups is FullAttention.*pass one for each block table"),
        ({"groups": [4]}, r"groups is \[4\]"),
        ({"load_timeout_s": "3"}, "load_timeout_s is '3'"),
        ({"store_timeout_s": 0}, "store_timeout_s is 0"),
        ({"store_timeout_s": float("inf")}, "store_timeout_s is inf"),
        ({"mode": "lazy", "horizon_blocks": "x"}, "horizon_blocks must be an integer, got 'x'"),
        ({"mode": "foo"}, 'mode is "foo"'),
        ({"mode": None}, "mode is None, expected a str"),
        ({"mode": "lazy"}, "pass the most blocks that a step may take"),
        ({"policy": None}, "policy is None, expected a str"),
        ({"events": "e.jsonl"}, "events is 'e.jsonl', .* with events_path"),
        ({"events_path": 5}, "the path of the events file is 5"),
        ({"events_path": b"none/e"}, "the path of the events file is b'none/e'"),
        ({"events_path": "e\0"}, "the path of the events file is .*: pass the name of a file"),
        ({"clock": 3}, "clock is 3, expected a callable"),
        ({"mover": HostMover.__name__}, "mover is 'HostMover', expected a callable"),
        ({"max_in_flight_tokens": 0}, "max_in_flight_tokens is 0, outside 1 to"),
        ({"max_in_flight_tokens": 1.5}, r"max_in_flight_tokens must be an integer, got 1\.5"),
        ({"world_size": "2"}, "world_size"),
        ({"world_size": 0}, "world_size is 0, outside 1 to"),
        ({"num_host_blocks": 0}, "num_host_blocks is 0, outside 1 to 2147483646"),
        ({"num_host_blocks": "1GiB"}, "got '1GiB'; pass how many slots .*, not its bytes"),
        ({"num_device_blocks": "8"}, "num_device_blocks must be an integer, got '8'"),
        ({"blocks_per_slot": None}, "blocks_per_slot must be an integer"),
        ({"layouts": 3}, "layouts"),
        ({"layouts": [LAYOUT, LAYOUT]}, "has length 2; .* the arrays of all layers"),
        ({"mover": VerifiedMover}, "cannot call with a layout and an arena.*verify=True"),
        ({"num_host_blocks": 10**9}, "num_host_blocks is 1000000000, whose accounting takes"),
    ],
)
def test_option_of_a_wrong_type_raises_config_error(options: dict[str, Any], problem: str) -> None:
    num_threads = threading.active_count()
    given: dict[str, Any] = {
        "num_device_blocks": 8,
        "num_host_blocks": 8,
        "groups": [FullAttention(4)],
        "layouts": [LAYOUT],
    }
    with pytest.raises(ConfigError, match=problem):
        Engine(**(given | options))
    assert threading.active_count() <= num_threads


def test_ticket_refuses_a_timeout_that_is_no_number() -> None:
    with world(mover=HostMover) as it:
        it.admit("one", DOCUMENT)
        it.compute("one", DOCUMENT)
        [transfer] = it.engine.transfers
        for ticket in transfer.tickets:
            wrongs: list[Any] = ["1", [], float("nan")]
            for wrong in wrongs:
                with pytest.raises(ConfigError, match=r"timeout_s is .*: pass seconds, or None"):
                    ticket.wait(wrong)


# -- futures -----------------------------------------------------------------------------------


def test_error_for_a_future_names_host_event_of() -> None:
    future: Future[None] = Future()
    with world(mover=HostMover) as it:
        it.admit("one", DOCUMENT)
        with pytest.raises(ConfigError, match=r"pass HostEvent.of\(future\)"):
            it.compute("one", DOCUMENT, after=future)  # type: ignore[arg-type]
        it.compute("one", DOCUMENT, after=HostEvent.of(future))
        assert it.engine.poll() == NOTHING
        future.set_result(None)
        assert polled(it.engine).num_stored_blocks == 4


@pytest.mark.parametrize("end", ["fails", "is cancelled"])
def test_event_of_a_future_fails_as_the_future_does(end: str) -> None:
    future: Future[None] = Future()
    event: Event = HostEvent.of(future)
    if end == "fails":
        future.set_exception(ValueError("no compute"))
    else:
        assert future.cancel()
    with pytest.raises(TransferError, match=r"no compute|Cancelled"):
        event.wait()
