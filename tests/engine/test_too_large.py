"""Requests and steps that are too large for the device, however empty it is."""

import numpy as np
import pytest

from kvstow import (
    AdmissionState,
    Engine,
    FullAttention,
    OutOfBlocks,
    RequestTooLarge,
    SlidingWindow,
    hash_tokens,
)
from kvstow.transfer import READY, BlockLayout

RUNS = AdmissionState.RUNS


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
