"""Compare the hits of a replay with an oracle that keeps the published keys in a set.

The host tier never fills and copies take no time, so every published block is on the device or on
the host. So the first admission of a request hits exactly the longest prefix of published keys.
"""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.replay.scenario import (
    BLOCK,
    SMALL_MODELS,
    Checked,
    assert_ended_well,
    least_device_blocks,
    prepared,
    traces,
)

from kvstow.replay import BUNDLED_TRACE, ReplayState, Trace, read_trace
from kvstow.replay.batch import Request
from kvstow.replay.model import ReplayModel, build_model


class SetOracle(Checked):
    """Keeps every published key, and checks each lookup against them."""

    max_steps = 10**9

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.first_hits: dict[str, int] = {}
        self.num_resumed = 0

    def published(
        self, replay: ReplayState, seats: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
    ) -> None:
        for seat, num_tokens in zip(seats.tolist(), tokens.tolist(), strict=True):
            digests = replay.batch.request(seat).digests[: num_tokens // replay.trace.block_size]
            for digest in reversed(digests):
                if digest in self.known:  # all blocks before it are published too
                    break
                self.known.add(digest)

    def looked_up(
        self, replay: ReplayState, request: Request, device_tokens: int, host_tokens: int
    ) -> None:
        block_size = replay.trace.block_size
        longest = (request.known_tokens - 1) // block_size
        expected = 0
        while expected < longest and request.digests[expected] in self.known:
            expected += 1
        assert device_tokens + host_tokens == expected * block_size
        if request.admitted:
            self.num_resumed += 1
        else:
            self.first_hits[request.name] = expected

    def stepped(self, replay: ReplayState) -> None:
        if replay.trace.block_size == BLOCK:  # the checks take too long on long traces
            super().stepped(replay)


def replay_against_oracle(
    of: Trace, model: ReplayModel, *, device_blocks: int, host_blocks: int
) -> SetOracle:
    oracle = SetOracle()
    with prepared(
        of, model=model, device_blocks=device_blocks, host_blocks=host_blocks, observer=oracle
    ) as engine:
        engine.run()

        assert_ended_well(engine)
        figures = engine.figures
        assert figures.device_hits + figures.host_hits == sum(oracle.first_hits.values())
        assert len(oracle.first_hits) == len(of.requests)
        stats = engine.kv.scheduler.stats()
        assert (stats["evicted_blocks"], stats["dropped_blocks"]) == (0, 0)
    return oracle


@settings(max_examples=50)
@given(of=traces(), model=st.sampled_from(SMALL_MODELS))
def test_any_trace_hits_every_published_block(of: Trace, model: ReplayModel) -> None:
    """Blocks that left a window are on the host, so windows do not shorten a hit."""
    needed = least_device_blocks(of, model)
    replay_against_oracle(of, model, device_blocks=needed, host_blocks=2000)


@pytest.mark.parametrize("device_blocks", [400, 4096])
def test_the_bundled_slice_hits_every_published_block(device_blocks: int) -> None:
    of = read_trace(BUNDLED_TRACE)
    model = build_model("full", of.block_size)
    oracle = replay_against_oracle(of, model, device_blocks=device_blocks, host_blocks=50_000)

    prompts = [request.trace_ids[: request.prompt_tokens // 512] for request in of.requests]
    num_repeated = sum(map(len, prompts)) - len(set().union(*prompts))
    assert sum(oracle.first_hits.values()) == pytest.approx(num_repeated, rel=0.01)
    assert oracle.num_resumed > 100 or device_blocks == 4096
