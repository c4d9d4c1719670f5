"""Small traces, and replays of them that check every invariant after every step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from hypothesis import strategies as st

from kvstow import FullAttention, SlidingWindow, StateSpace
from kvstow.replay import Observer, ReplayConfig, ReplayEngine, ReplayState, Trace, TraceRequest
from kvstow.replay.batch import Request
from kvstow.replay.content import Geometry
from kvstow.replay.model import ModelGroup, ReplayModel

BLOCK = 16  # tokens; small blocks make short replays

FULL_GROUP = ModelGroup(FullAttention(BLOCK), Geometry(BLOCK, 2, 8))
WINDOW_GROUP = ModelGroup(SlidingWindow(BLOCK, 40), Geometry(BLOCK, 1, 8))  # 2 and a half blocks
NARROW_GROUP = ModelGroup(SlidingWindow(BLOCK, 5), Geometry(BLOCK, 2, 8))
STATE_GROUP = ModelGroup(StateSpace(BLOCK), Geometry(BLOCK, 3, 12))

# Small models with every kind of attention, and with blocks of unequal size.
FULL = ReplayModel("full", (FULL_GROUP,))
SLIDING = ReplayModel("sliding", (FULL_GROUP, WINDOW_GROUP))
STATEFUL = ReplayModel("stateful", (STATE_GROUP, FULL_GROUP))
MIXED = ReplayModel("mixed", (NARROW_GROUP, FULL_GROUP, WINDOW_GROUP, STATE_GROUP))
WINDOWS = ReplayModel("windows", (WINDOW_GROUP, NARROW_GROUP))  # no full attention at all
SMALL_MODELS = (FULL, SLIDING, STATEFUL, MIXED, WINDOWS)


class Checked(Observer):
    """Checks ledger and scheduler after each step, and that the replay ends."""

    max_steps = 100_000
    every = 1  # steps between two checks, which take long in large tiers

    def stepped(self, replay: ReplayState) -> None:
        if replay.figures.steps % self.every == 0:
            replay.kv.check()
        assert replay.figures.steps < self.max_steps, "the replay does not end"


def request(
    line: int, ids: Sequence[int], *, output: int = 1, tail: int = 0, at_s: float = 0.0
) -> TraceRequest:
    """Return a request with a whole block per id; `tail` tokens in the last block if given."""
    prompt = len(ids) * BLOCK - (BLOCK - tail if tail else 0)
    return TraceRequest(line, at_s, prompt, output, tuple(ids))


def trace(*requests: TraceRequest) -> Trace:
    return Trace("scenario.jsonl", BLOCK, list(requests))


@contextmanager
def prepared(
    of: Trace,
    *,
    device_blocks: int,
    host_blocks: int = 1000,
    observer: Observer | None = None,
    bandwidth_bytes_per_s: float = float("inf"),
    max_step_tokens: int = 8192,
    max_requests: int = 256,
    model: ReplayModel | None = None,
    faults: int | None = None,
    world_size: int = 1,
    blocks_per_slot: int = 1,
    lookahead_tokens: int = 0,
    mode: Literal["eager", "lazy"] = "eager",
    sleep_at: Sequence[int] = (),
) -> Iterator[ReplayEngine]:
    """Yield an engine for the trace. Its copies are instant unless a bandwidth is given."""
    config = ReplayConfig(
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        max_step_tokens=max_step_tokens,
        max_requests=max_requests,
        faults=faults,
        world_size=world_size,
        blocks_per_slot=blocks_per_slot,
        lookahead_tokens=lookahead_tokens,
        mode=mode,
        sleep_at=tuple(sleep_at),
    )
    engine = ReplayEngine(of, config, observer=observer or Checked(), model=model)
    try:
        yield engine
    finally:
        engine.close()


def least_device_blocks(of: Trace, model: ReplayModel, *, max_step_tokens: int = 8192) -> int:
    """Return the size of the smallest device pool that holds each request of the trace."""
    return 1 + max(
        sum(group.most_blocks(request.total_tokens, max_step_tokens) for group in model.groups)
        for request in of.requests
    )


def assert_ended_well(engine: ReplayEngine) -> None:
    """Assert that every request finished, no block is corrupt, and nothing is still held."""
    figures, stats = engine.figures, engine.kv.scheduler.stats()
    assert figures.finished_requests == len(engine.trace.requests)
    assert engine.verifier.num_corrupt == 0
    num_asked = figures.device_hits + figures.host_hits + figures.recomputed_blocks
    assert num_asked == engine.trace.num_blocks
    assert engine.kv.ledger.num_requests == 0
    assert engine.kv.ledger.pool.num_free == engine.config.device_blocks - 1
    assert stats["jobs_in_flight"] == 0
    # The scheduler drops a stored block if the store of a block before it has failed.
    assert stats["stored_blocks"] == figures.stored_blocks or figures.failed_stores
    assert stats["stored_blocks"] <= figures.stored_blocks
    assert stats["loaded_blocks"] == figures.loaded_blocks
    engine.kv.check()


class Watched(Checked):
    """Records the (device, host) tokens of the lookups of each request."""

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[int, int]]] = {}
        self.order: list[str] = []
        self.most_running = 0
        self.most_tokens = 0
        self._num_computed = 0

    def looked_up(
        self, replay: ReplayState, request: Request, device_tokens: int, host_tokens: int
    ) -> None:
        self.found.setdefault(request.name, []).append((device_tokens, host_tokens))
        self.order.append(request.name)

    def stepped(self, replay: ReplayState) -> None:
        super().stepped(replay)
        self.most_running = max(self.most_running, len(replay.batch.running))
        num_computed = replay.figures.prefill_tokens + replay.figures.decode_tokens
        self.most_tokens = max(self.most_tokens, num_computed - self._num_computed)
        self._num_computed = num_computed


FIRST = [1, 2, 3, 4]


def comes_back(line: int, at_s: float) -> TraceRequest:
    """Return a request for the prefix of the first one and one block more."""
    return request(line, [*FIRST, 90 + line], at_s=at_s)


def pushed_out(num_usable: int, *more: TraceRequest) -> Trace:
    """Return a trace whose second request, 100 s later, needs all usable device blocks."""
    return trace(request(1, FIRST), request(2, range(11, 10 + num_usable), at_s=100), *more)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw a trace with shared prefixes, bursts and outputs of any length."""
    paths: list[Sequence[int]] = [()]
    requests, at_s = [], 0.0
    for line in range(1, draw(st.integers(1, 15)) + 1):
        known = draw(st.sampled_from(paths))
        kept = known[: draw(st.integers(0, len(known)))]
        fresh = range(100 * line, 100 * line + draw(st.integers(1, 5)))
        paths.append([*kept, *fresh])
        at_s += draw(st.sampled_from([0.0, 0.0, 0.01, 0.3]))
        output = draw(st.one_of(st.sampled_from([0, 1, BLOCK]), st.integers(0, 6 * BLOCK)))
        tail = draw(st.one_of(st.just(0), st.integers(0, BLOCK - 1)))
        requests.append(request(line, paths[-1], output=output, tail=tail, at_s=at_s))
    return trace(*requests)
