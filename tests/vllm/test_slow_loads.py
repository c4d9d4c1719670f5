"""`skip_slow_loads` without an engine: requests compute while a tier below the host is slower.

The clock moves only when a step computes and when a promote begins, so a test sets both speeds.
`Server.serve` compares the bytes of each block that a request has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.tiers.resp.server import Server as Store
from tests.vllm.halves import FULL, Scheduler
from tests.vllm.halves_below import Server, folder_on_disk
from tests.vllm.sharing import LONG_S, NUM_BLOCKS, NUM_HIT, serve
from vllm.v1.request import Request

from kvstow import ConfigError
from kvstow.vllm.below.slow_loads import LOADS_PER_PROBE, SlowLoads
from kvstow.vllm.options import Options

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

NAMES = "abcdefgh"
NUM_HOST_BLOCKS = 4 * NUM_BLOCKS  # so a prompt is off the host when its turn comes again
STEP_S = 0.01
SLOW_S, FAST_S = 48 * STEP_S, STEP_S / 10
KINDS = ("disk", "shared", "both")


class Timed:
    """A server for which each computing step takes `STEP_S`, and each promote `load_s`."""

    def __init__(self, server: Server, load_s: float) -> None:
        self.server, self.load_s = server, load_s
        compute = server.compute
        below = server.ranks[0].worker.below
        assert below is not None
        begin = below._runner.begin

        def computed(rank: int, request: Request) -> None:
            server.scheduler.now += 0 if rank else STEP_S
            compute(rank, request)

        def begun(direction: Any, *args: Any, **more: Any) -> None:
            if direction == "promote":
                server.scheduler.now += self.load_s
            begin(direction, *args, **more)

        server.compute = computed  # type: ignore[method-assign]
        below._runner.begin = begun  # type: ignore[method-assign]

    @property
    def slow_loads(self) -> SlowLoads:
        below = self.server.half.tier.below
        assert below is not None and below.slow_loads is not None
        return below.slow_loads

    def loaded(self, names: str) -> str:
        """Serve these prompts; return the names of those that were loaded."""
        found = [(name, serve(self.server, name)) for name in names]
        assert {num_tokens for _, num_tokens in found} <= {0, NUM_HIT}
        return "".join(name for name, num_tokens in found if num_tokens)

    @property
    def num_skipped(self) -> int:
        return self.server.stats()["skipped_load_tokens"]


@pytest.fixture
def timed(store: Store) -> Iterator[Callable[..., Timed]]:
    """Starts a server that finds the prompts of `NAMES` below its host."""
    servers: list[Server] = []

    def start(kind: str, load_s: float, **more: Any) -> Timed:
        given: dict[str, Any] = {
            "num_host_blocks": NUM_HOST_BLOCKS,
            "skip_slow_loads": True,
            "min_promote_tokens": NUM_HIT,
            **more,
        }
        if kind != "disk":
            given |= {"shared": store.url, "shared_ask_timeout_s": LONG_S}
            given |= {"shared_timeout_s": LONG_S}
        if kind == "both":
            given |= {"disk_path": str(folder), "disk_bytes_to_use": 1 << 20}
        servers.append(Server(folder, **given))
        started = Timed(servers[-1], load_s)
        assert started.loaded(NAMES) == ""
        return started

    with folder_on_disk() as folder:
        yield start
        for server in servers:
            server.close()


# -- what is skipped -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_compute_while_loads_are_slower(
    timed: Callable[..., Timed], kind: str, num_ranks: int, log: list[str]
) -> None:
    server = timed(kind, SLOW_S, num_ranks=num_ranks)
    assert server.loaded("ab") == "a", "the first takes place, because no load was measured"
    assert server.num_skipped == NUM_HIT
    assert server.loaded("cdef") == ""
    assert server.num_skipped == 5 * NUM_HIT
    (line,) = [line for line in log if "so requests" in line]
    assert "a request gets 200 tokens/s" in line and "computes 10000 tokens/s" in line
    assert line.endswith("so requests compute what it holds")


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_option_requests_load_however_slowly(
    timed: Callable[..., Timed], kind: str
) -> None:
    """The negative control of the test above."""
    server = timed(kind, SLOW_S, skip_slow_loads=False)
    assert server.loaded("abcdef") == "abcdef"
    below = server.server.half.tier.below
    assert below is not None and below.slow_loads is None
    assert "skipped_load_tokens" not in server.server.stats()


@pytest.mark.parametrize("kind", KINDS)
def test_fast_loads_take_place(timed: Callable[..., Timed], kind: str) -> None:
    server = timed(kind, FAST_S)
    assert server.loaded("abcdef") == "abcdef"
    assert server.num_skipped == 0


def test_a_tier_that_becomes_slow_is_skipped_though_only_ends_of_prompts_are_computed(
    timed: Callable[..., Timed],
) -> None:
    server = timed("disk", FAST_S)
    assert server.loaded(4 * NAMES) == 4 * NAMES
    server.load_s = SLOW_S
    assert server.loaded(NAMES) == "a"


@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_that_has_recovered_is_used_again(
    timed: Callable[..., Timed], kind: str, log: list[str]
) -> None:
    server = timed(kind, SLOW_S)
    assert server.loaded("a") == "a"
    server.load_s = FAST_S
    names = (NAMES * 3)[1:]
    skipped, rest = names[: LOADS_PER_PROBE - 1], names[LOADS_PER_PROBE - 1 :]
    assert server.loaded(skipped) == ""
    assert server.loaded(rest) == rest
    assert server.num_skipped == len(skipped) * NUM_HIT
    assert [line.split("so requests ")[1] for line in log if "so requests" in line] == [
        "compute what it holds",
        "load again",
    ]


def test_a_tier_that_stays_slow_is_tried_from_time_to_time(timed: Callable[..., Timed]) -> None:
    server = timed("disk", SLOW_S)
    assert server.loaded("a") == "a"
    num_loaded = [len(server.loaded((NAMES * 2)[1:] + "a")) for _ in range(3)]
    assert num_loaded == [1, 1, 1]
    assert server.num_skipped == 3 * (LOADS_PER_PROBE - 1) * NUM_HIT


def test_a_load_that_fails_counts_as_slow(timed: Callable[..., Timed]) -> None:
    server = timed("shared", FAST_S)
    assert server.loaded("a") == "a"
    worker = server.server.ranks[0].worker.below
    assert worker is not None
    runner, begin = worker._runner, worker._runner.begin
    lost: list[tuple[int, list[bool]]] = []
    poll = runner.poll

    def lose(direction: Any, job_id: int, blocks: Any, *args: Any, **more: Any) -> None:
        if direction == "promote":
            server.server.scheduler.now += SLOW_S
            lost.append((job_id, [False] * len(blocks)))
        else:
            begin(direction, job_id, blocks, *args, **more)

    def polled() -> list[tuple[int, list[bool]]]:
        ends, lost[:] = lost.copy(), []
        return [*poll(), *ends]

    runner.begin, runner.poll = lose, polled  # type: ignore[assignment, method-assign]
    assert server.loaded("b") == "", "it failed"
    assert server.num_skipped == 0
    assert server.loaded("c") == "" and server.num_skipped == NUM_HIT


def test_what_was_skipped_is_not_put_again(timed: Callable[..., Timed]) -> None:
    server = timed("shared", SLOW_S)
    put, asked = (server.server.stats()[f"shared_{x}"] for x in ("demoted_blocks", "asked_blocks"))
    assert server.loaded("xabcd") == "a"
    assert server.num_skipped == 3 * NUM_HIT
    stats = server.server.stats()
    assert stats["shared_demoted_blocks"] == put + NUM_BLOCKS, "x alone is new"
    assert stats["shared_asked_blocks"] == asked + NUM_BLOCKS


def test_a_request_that_is_asked_about_again_counts_once(timed: Callable[..., Timed]) -> None:
    server = timed("disk", SLOW_S)
    assert server.loaded("a") == "a"
    half, request = server.server.half, server.server.begin("b")
    assert [half.lookup(request, 0) for _ in range(5)] == [0] * 5
    assert server.num_skipped == NUM_HIT
    half.finished(request)
    loading = server.server.begin("c")
    server.slow_loads.loading.seconds = 0
    assert [half.lookup(loading, 0) for _ in range(5)] == [None] * 5
    server.slow_loads.loading.seconds = 1e9
    assert half.lookup(loading, 0) is None, "what has begun goes on"
    half.finished(loading)
    again = server.server.begin("d")
    assert half.lookup(again, 0) == 0
    half.requests.start_over("d")
    assert half.lookup(again, 0) == 0
    assert server.num_skipped == 2 * NUM_HIT, "it has not changed"
    half.finished(again)


def test_a_run_that_is_too_short_counts_for_nothing(timed: Callable[..., Timed]) -> None:
    server = timed("disk", SLOW_S, min_promote_tokens=NUM_HIT + 1)
    assert server.loaded("ab") == ""
    assert server.num_skipped == 0 and not server.slow_loads.loading.seconds


def test_a_store_that_has_nothing_is_not_slow(timed: Callable[..., Timed]) -> None:
    server = timed("shared", FAST_S, promote_timeout_s=1e6)
    below = server.server.half.tier.below
    assert below is not None
    is_asking = below._is_asking

    def slowly(*args: Any) -> bool:
        server.server.scheduler.now += SLOW_S
        return is_asking(*args)

    below._is_asking = slowly  # type: ignore[assignment, method-assign]
    assert server.loaded("xyz") == ""
    assert not server.slow_loads.loading.seconds
    assert server.num_skipped == 0


def test_the_option_needs_a_tier_below_the_host() -> None:
    with pytest.raises(ConfigError, match="skip_slow_loads is True, and it has an effect only"):
        Options.parse({"skip_slow_loads": True})


# -- the speeds -----------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Steps:
    """Steps of requests, whose tokens it counts as vLLM does."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.slow_loads = SlowLoads("disk", 64, self.clock)

    def begin(self, at: float, *chunks: tuple[Request, int]) -> None:
        self.clock.now = at
        self.slow_loads.scheduled(chunks)
        for request, num_tokens in chunks:
            request.num_computed_tokens += num_tokens
            request.num_in_flight_tokens += num_tokens

    def end(self, at: float, *chunks: tuple[Request, int]) -> None:
        self.clock.now = at
        for request, num_tokens in chunks:
            request.num_in_flight_tokens -= num_tokens
        self.slow_loads.processed()

    def step(self, begin: float, end: float, *chunks: tuple[Request, int]) -> None:
        self.begin(begin, *chunks)
        self.end(end, *chunks)

    @property
    def measured(self) -> tuple[float, float]:
        speed = self.slow_loads.computing
        return speed.num_tokens, speed.seconds


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def prompt() -> Callable[[str, int], Request]:
    return Scheduler(FULL).request


def test_the_largest_chunk_of_a_step_has_the_seconds_of_the_step(
    steps: Steps, prompt: Callable[[str, int], Request]
) -> None:
    a, b, decode = prompt("a", 1000), prompt("b", 1000), prompt("c", 10)
    decode.num_computed_tokens = 9
    steps.step(1.0, 1.5, (a, 100), (b, 300), (decode, 1))
    assert steps.measured == (300, 0.5)
    steps.step(9.0, 9.25, (decode, 1))
    steps.end(9.5)  # a step without tokens
    assert steps.measured == (300, 0.5), "a decode is no chunk"


def test_the_short_end_of_a_prompt_does_not_count(
    steps: Steps, prompt: Callable[[str, int], Request]
) -> None:
    end, short, whole = prompt("a", 1000), prompt("b", 1000), prompt("c", 64)
    end.num_computed_tokens = 937
    steps.step(1.0, 2.0, (end, 63))
    assert steps.measured == (0, 0)
    steps.step(2.0, 3.0, (short, 63))
    assert steps.measured == (63, 1.0), "the step had no room for more"
    steps.step(3.0, 4.0, (whole, 64))
    assert steps.measured == (63 * 15 / 16 + 64, 15 / 16 + 1)


def test_a_decode_is_no_chunk_of_any_size(
    steps: Steps, prompt: Callable[[str, int], Request]
) -> None:
    steps.slow_loads = SlowLoads("disk", 0, steps.clock)
    request = prompt("a", 1000)
    request.num_computed_tokens = 999
    steps.step(1.0, 2.0, (request, 1))
    assert steps.measured == (0, 0)


def test_drafts_are_not_a_chunk(steps: Steps, prompt: Callable[[str, int], Request]) -> None:
    request = prompt("a", 1000)
    request.num_computed_tokens = 999
    steps.begin(1.0, (request, 5))
    assert not steps.slow_loads._chunks


def test_a_step_under_way_begins_when_the_one_before_it_ends(
    steps: Steps, prompt: Callable[[str, int], Request]
) -> None:
    """vLLM schedules it before, with asynchronous scheduling."""
    a = prompt("a", 1000)
    steps.begin(1.0, (a, 100))
    steps.begin(1.1, (a, 200))
    steps.end(2.0, (a, 100))
    assert steps.measured == (100, 1.0)
    steps.end(2.5, (a, 200))
    assert steps.measured == (100 * 15 / 16 + 200, 15 / 16 + 0.5)


def test_the_chunk_of_a_request_that_lost_its_blocks_does_not_count(
    steps: Steps, prompt: Callable[[str, int], Request]
) -> None:
    a, b = prompt("a", 1000), prompt("b", 1000)
    steps.begin(1.0, (a, 500))
    a.num_computed_tokens = a.num_in_flight_tokens = 0  # preempted
    steps.end(2.0)
    assert steps.measured == (0, 0)
    steps.step(100.0, 102.0, (a, 500))
    assert steps.measured == (500, 2.0)
    assert not steps.slow_loads._chunks
    steps.begin(103.0, (b, 500))
    b.num_computed_tokens = b.num_in_flight_tokens = 0
    steps.step(105.0, 106.0, (a, 200))
    assert steps.measured == (500 * 15 / 16 + 200, 2.0 * 15 / 16 + 1.0)
    assert not steps.slow_loads._chunks


def load(steps: Steps, request: Request, end: int, hits: tuple[int, int], found: int) -> None:
    """Load for a second."""
    assert steps.slow_loads.may_load(request, end, lambda: hits)
    steps.clock.now += 1
    for _ in range(2):  # vLLM may ask again
        steps.slow_loads.found(request, found)
        steps.clock.now += 1


def test_a_load_has_the_tokens_that_the_tier_brought(
    steps: Steps, prompt: Callable[[str, int], Request]
) -> None:
    speed = steps.slow_loads.loading
    load(steps, prompt("a", 1000), 900, (300, 900), 800)
    assert (speed.num_tokens, speed.seconds) == (500, 1)
    load(steps, prompt("b", 1000), 900, (300, 500), 900)  # others computed the rest meanwhile
    assert (speed.num_tokens, speed.seconds) == (500 * 15 / 16 + 200, 15 / 16 + 1)
    load(steps, prompt("c", 1000), 900, (300, 500), 100)  # the host has lost some meanwhile
    assert speed.num_tokens == (500 * 15 / 16 + 200) * 15 / 16


def test_the_wait_begins_with_the_question_that_brings_something(
    steps: Steps, prompt: Callable[[str, int], Request]
) -> None:
    request, speed = prompt("a", 1000), steps.slow_loads.loading
    steps.slow_loads.asks(request, 900)
    steps.clock.now = 10.0
    assert steps.slow_loads.may_load(request, 900, lambda: (0, 0)), "the store has nothing"
    steps.slow_loads.found(request, 0)
    steps.clock.now = 100.0
    steps.slow_loads.asks(request, 900)
    steps.clock.now = 102.0
    load(steps, request, 900, (0, 900), 900)
    assert (speed.num_tokens, speed.seconds) == (900, 3)


def test_a_request_that_has_become_longer_is_decided_anew(
    steps: Steps, prompt: Callable[[str, int], Request]
) -> None:
    request, slow_loads = prompt("a", 1000), steps.slow_loads
    load(steps, request, 500, (0, 500), 500)
    slow_loads.computing.add(500, 0.5)
    assert not slow_loads.may_load(request, 900, lambda: (0, 900))
    assert slow_loads.num_skipped_tokens == 900
    assert not slow_loads.may_load(request, 950, lambda: (0, 950))
    assert slow_loads.num_skipped_tokens == 900 + 950


def test_requests_are_forgotten(steps: Steps, prompt: Callable[[str, int], Request]) -> None:
    """A request that is aborted leaves nothing for good."""
    a = prompt("a", 1000)
    steps.slow_loads.asks(a, 900)
    assert steps.slow_loads.may_load(a, 900, lambda: (0, 900))
    del a
    assert not steps.slow_loads._waits
    for number in range(1000):
        steps.begin(1.0, (prompt(str(number), 1000), 500))
    assert len(steps.slow_loads._chunks) < 100
