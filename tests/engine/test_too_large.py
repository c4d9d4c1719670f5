"""Requests and steps that are too large for the device, however empty it is."""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.forks import LONG_S

from kvstow import (
    AdmissionState,
    ChunkedLocal,
    Engine,
    FullAttention,
    OutOfBlocks,
    RequestTooLarge,
    SlidingWindow,
    StateSpace,
    hash_tokens,
)
from kvstow.engine.admission import peak_blocks
from kvstow.engine.arguments import Group
from kvstow.transfer import READY, BlockLayout

RUNS, LOADS = AdmissionState.RUNS, AdmissionState.LOADS
CHUNKED: list[Group] = [FullAttention(4), ChunkedLocal(4, 16)]

sizes = st.sampled_from([1, 2, 3, 4, 6])
groups = st.one_of(
    st.builds(FullAttention, sizes),
    st.builds(SlidingWindow, sizes, st.integers(1, 14), extra_retained_tokens=st.integers(0, 5)),
    st.builds(lambda size, num: ChunkedLocal(size, size * num), sizes, st.integers(1, 4)),
    st.builds(StateSpace, sizes),
)


def engine_of(num_blocks: int, groups: Sequence[Group]) -> Engine:
    arrays = [np.zeros((num_blocks, 1), np.int64) for _ in groups]
    layouts = [BlockLayout.from_arrays([array]) for array in arrays]
    return Engine(num_blocks, 64, groups, layouts)


def least_device_blocks(groups: Sequence[Group], num_tokens: int) -> int:
    """Return what the error of the smallest engine names."""
    with engine_of(2, groups) as engine:
        engine.add("a", [])
        try:
            engine.admit("a", num_tokens, 1, after=READY)
        except RequestTooLarge as error:
            [named] = re.findall(r"num_device_blocks=(\d+) or more", str(error))
            return int(named)
    return 2


def serve(engine: Engine, num_tokens: int) -> int:
    """Compute a request token by token, and return the tokens that it loaded or found."""
    engine.add("a", hash_tokens(range(num_tokens), engine.ledger.hash_block_size))
    admission = engine.admit("a", num_tokens, 1, after=READY)
    num_hit = admission.num_hit_tokens + admission.num_external_tokens
    if admission.state is LOADS:
        engine.end(engine.transfers[0])
    for num_computed in range(num_hit, num_tokens):
        if admission.state is LOADS or num_computed > num_hit:
            until_s = time.monotonic() + LONG_S
            while not engine.step(["a"], [1]).num_granted:
                assert engine.transfers and time.monotonic() < until_s, f"stuck at {num_computed}"
                engine.poll()  # a store pins blocks that the request has left
        engine.computed(["a"], [num_computed + 1], after=READY)
    while engine.transfers:
        engine.poll()
    engine.finish("a")
    return num_hit


@settings(max_examples=200, deadline=None)
@given(st.lists(groups, min_size=1, max_size=3), st.data())
def test_peak_is_that_of_each_token(groups: list[Group], data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 150))
    num_computed = data.draw(st.integers(0, num_tokens - 1))
    with engine_of(2, groups) as engine:
        each = [engine.ledger.min_blocks(t + 1, t) for t in range(num_computed, num_tokens)]
        for at_least in 0, data.draw(st.integers(0, 40)):
            found = peak_blocks(engine._state, num_computed, num_tokens, at_least)
            assert found == max(at_least, *each)


@settings(max_examples=60, deadline=None)
@given(st.lists(groups, min_size=1, max_size=3), st.integers(1, 60))
def test_named_number_of_blocks_is_the_least(groups: list[Group], num_tokens: int) -> None:
    num_blocks = least_device_blocks(groups, num_tokens)
    with engine_of(num_blocks, groups) as engine:
        serve(engine, num_tokens)
        serve(engine, num_tokens)  # now with a hit
    if num_blocks > 2:
        with engine_of(num_blocks - 1, groups) as engine:
            engine.add("a", [])
            with pytest.raises(RequestTooLarge):
                engine.admit("a", num_tokens, 1, after=READY)


@pytest.mark.parametrize(
    ("groups", "num_tokens", "least"),
    [
        (CHUNKED, 18, 9),  # its first chunk ends before its last block
        ([FullAttention(2), SlidingWindow(2, 4), FullAttention(3)], 8, 11),  # a hit ends at 6
    ],
)
def test_request_that_needs_most_before_its_end_is_refused(
    groups: list[Group], num_tokens: int, least: int
) -> None:
    for num_blocks in range(2, least):
        with engine_of(num_blocks, groups) as engine:
            engine.add("a", [])
            with pytest.raises(RequestTooLarge, match=f"num_device_blocks={least} or more"):
                engine.admit("a", num_tokens, 1, after=READY)
            engine.check()
    with engine_of(least, groups) as engine:
        assert serve(engine, num_tokens) == 0


def test_hit_behind_the_peak_lets_a_request_run(tmp_path: Path) -> None:
    path = tmp_path / "image"
    who: dict[str, Any] = {"identity": "m", "weights_version": "1"}
    with engine_of(9, CHUNKED) as engine:
        serve(engine, 18)
        engine.sleep(after=READY, to=path, **who)
    with engine_of(7, CHUNKED) as engine:
        engine.restart(path, after=READY, **who)
        assert serve(engine, 18) == 16
        engine.reset()
        engine.add("a", [])
        with pytest.raises(RequestTooLarge):
            engine.admit("a", 18, 1, after=READY)


def test_lone_request_whose_step_does_not_fit_goes_on_with_fewer_tokens() -> None:
    layouts = [BlockLayout.from_arrays([np.zeros((15, 16), np.uint8)]) for _ in range(2)]
    with Engine(15, 64, [FullAttention(16), SlidingWindow(16, 40)], layouts) as engine:
        engine.add("one", hash_tokens(range(157), 16))
        assert engine.admit("one", 157, 96, after=READY).state is RUNS
        engine.computed(["one"], [96], after=READY)
        engine.end(engine.transfers[0])
        with pytest.raises(
            OutOfBlocks, match=r"needs 15 blocks for this step, .* has 14: pass fewer"
        ):
            engine.step(["one"], [48])
        engine.preempt("one")
        with pytest.raises(OutOfBlocks, match="to step no more new tokens") as refused:
            engine.admit("one", 157, 48, after=READY)
        assert not isinstance(refused.value, RequestTooLarge), "it can run"
        assert engine.admit("one", 157, 12, after=READY).num_hit_tokens == 96
        with pytest.raises(OutOfBlocks, match="for this step"):
            engine.step(["one"], [157 - 108])
        for num_computed in range(108, 157, 12):
            engine.computed(["one"], [num_computed], after=READY)
            assert engine.step(["one"], [min(12, 157 - num_computed)]).num_granted == 1


def test_request_that_a_window_keeps_from_its_last_block_is_refused() -> None:
    """With 144 computed tokens the window needs 4 blocks, with 156 it needs 3."""
    layouts = [BlockLayout.from_arrays([np.zeros((14, 16), np.uint8)]) for _ in range(2)]
    with Engine(14, 64, [FullAttention(16), SlidingWindow(16, 40)], layouts) as engine:
        for num_tokens in 145, 157:
            engine.add("long", [])
            with pytest.raises(RequestTooLarge, match=rf"14 blocks for {num_tokens} .* never run"):
                engine.admit("long", num_tokens, 16, after=READY)
            engine.finish("long")
        engine.add("fits", [])
        assert engine.admit("fits", 144, 16, after=READY).state is RUNS
        for num_computed in range(16, 144, 16):
            engine.computed(["fits"], [num_computed], after=READY)
            assert engine.step(["fits"], [16]).num_granted == 1
        engine.computed(["fits"], [144], after=READY)
        assert engine.step(["fits"], [1]).num_granted == 0


@pytest.mark.parametrize("num_lookahead_tokens", [0, 3])
def test_step_that_an_empty_pool_would_not_grant_is_refused(num_lookahead_tokens: int) -> None:
    layouts = [BlockLayout.from_arrays([np.zeros((5, 16), np.uint8)])]
    with Engine(5, 64, [FullAttention(16)], layouts) as engine:
        for name in "ab":
            engine.add(name, [])
        assert engine.admit("a", 40, 40, after=READY).state is RUNS
        assert engine.admit("b", 10, 10, after=READY).state is RUNS
        ahead = {"num_lookahead_tokens": num_lookahead_tokens}
        most = 24 - num_lookahead_tokens  # of a's 64 slots, without b
        before = engine.tables("a")
        assert engine.step(["a"], [most], **ahead).num_granted == 0  # it fits once b has gone
        for num_others in 0, 1:
            names = ["a", "b"][: num_others + 1]
            with pytest.raises(
                OutOfBlocks, match=r"'a' needs 5 blocks for this step, and .* has 4"
            ):
                engine.step(names, [most + 1] * len(names), **ahead)
        assert (engine.tables("a")[0] == before[0]).all()
        engine.finish("b")
        assert engine.step(["a"], [most], **ahead).num_granted == 1


def test_step_beyond_the_pool_grants_nothing_so_that_admission_says_so() -> None:
    layouts = [BlockLayout.from_arrays([np.zeros((5, 16), np.uint8)])]
    with Engine(5, 64, [FullAttention(16)], layouts) as engine:
        engine.add("a", [])
        assert engine.admit("a", 64, 64, after=READY).state is RUNS
        for num_new in 1, 4:
            assert engine.step(["a"], [num_new]).num_granted == 0
        engine.preempt("a")
        with pytest.raises(RequestTooLarge, match="never run"):
            engine.admit("a", 65, 65, after=READY)
