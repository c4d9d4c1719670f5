"""Impossible sizes, groups and options are refused when an object is built."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
from tests.accounting.worlds import (
    BLOCK_SIZE,
    DIGEST,
    GROUP,
)

from kvstow import (
    BlockLedger,
    BlockPool,
    ChunkedLocal,
    ConfigError,
    FullAttention,
    HitCurve,
    OffloadScheduler,
    SlidingWindow,
    StateSpace,
)

makers = pytest.mark.parametrize(
    "make",
    [
        BlockPool,
        lambda size: BlockLedger(size, [GROUP]),
        lambda size: OffloadScheduler(size, [GROUP]),
        FullAttention,
        StateSpace,
        lambda size: SlidingWindow(4, size),
        lambda size: SlidingWindow(size, 4),
        lambda size: ChunkedLocal(1, size),
        lambda size: ChunkedLocal(size, 4),
    ],
    ids=[
        "BlockPool",
        "BlockLedger",
        "OffloadScheduler",
        "FullAttention",
        "StateSpace",
        "window",
        "SlidingWindow",
        "chunk",
        "ChunkedLocal",
    ],
)


@makers
@pytest.mark.parametrize("size", [0, -1, 2**31, 2**32, 2**32 + 8, 2**63, 2**64, -(2**64)])
def test_absurd_sizes_are_refused(make: Callable[[int], object], size: int) -> None:
    with pytest.raises(ConfigError, match=rf"(?<!\d){size}\b"):
        make(size)


@makers
@pytest.mark.parametrize("size", [4.0, "4", None, b"4", [4]])
def test_a_size_that_is_not_an_int_is_a_type_error(
    make: Callable[[object], object], size: object
) -> None:
    with pytest.raises(TypeError, match=rf"^[a-z_]+: .*{type(size).__name__}"):
        make(size)


@pytest.mark.parametrize(
    ("make", "name", "bounds"),
    [
        (BlockPool, "num_blocks", (2, 2**31 - 1)),
        (partial(BlockLedger, groups=[GROUP]), "num_blocks", (2, 2**31 - 1)),
        (partial(BlockLedger, 8, [GROUP]), "max_in_flight_tokens", (0, 2**40)),
        (partial(OffloadScheduler, groups=[GROUP]), "num_host_blocks", (1, 2**31 - 2)),
        (partial(OffloadScheduler, 8, [GROUP]), "store_threshold", (1, 255)),
        (partial(OffloadScheduler, 8, [GROUP]), "blocks_per_slot", (1, 1024)),
        (partial(OffloadScheduler, 8, [GROUP]), "world_size", (1, 2**16)),
        (FullAttention, "block_size", (1, 2**30)),
        (partial(SlidingWindow, 4), "window", (1, 2**30)),
        (partial(ChunkedLocal, 1), "chunk", (1, 2**30)),
        (HitCurve, "max_keys", (64, 2**64 - 1)),
        (HitCurve, "seed", (0, 2**64 - 1)),
    ],
)
def test_error_for_a_number_of_no_count_names_argument_and_bounds(
    make: Callable[..., object], name: str, bounds: tuple[int, int]
) -> None:
    least, most = bounds
    for wrong in -1, 2**64:
        with pytest.raises(
            ConfigError, match=rf"^{name} is {wrong}: it must be {least} to {most}\b"
        ):
            make(**{name: wrong})
    make(**{name: max(least, 4)})
    if least:
        with pytest.raises(ConfigError):
            make(**{name: least - 1})
    if 2**16 <= most < 2**64 - 1:
        with pytest.raises(ConfigError):
            make(**{name: most + 1})


def test_a_pool_of_the_null_block_alone_is_refused() -> None:
    for make in (BlockPool, lambda size: BlockLedger(size, [GROUP])):
        with pytest.raises(ConfigError, match="num_blocks is 1"):
            make(1)
    assert BlockPool(2).allocate(1).tolist() == [1]
    assert OffloadScheduler(1, [GROUP]).num_host_blocks == 1


def test_impossible_groups_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="groups is empty"):
        BlockLedger(8, [])
    with pytest.raises(ConfigError, match="a group is of type <class 'int'>: pass FullAttention"):
        BlockLedger(8, [4])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"FullAttention.*not a sequence of groups: pass a list"):
        BlockLedger(8, FullAttention(4))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="common multiple"):
        BlockLedger(8, [FullAttention(2**29 - 1), FullAttention(2**29)])
    with pytest.raises(ConfigError, match=r"chunk is 6: .* multiple of the block size 4"):
        ChunkedLocal(4, 6)
    with pytest.raises(ConfigError, match="groups is empty"):
        OffloadScheduler(8, [])
    with pytest.raises(ConfigError, match=r'"lazi".*"eager" or "lazy"'):
        OffloadScheduler(8, [GROUP], mode="lazi")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="surrogate"):
        OffloadScheduler(8, [GROUP], mode="\ud800")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="groups"):
        BlockLedger(8, [GROUP] * (2**16 + 1))
    nearest = r'"hit_density": the nearest known is "hit-density"; .* "lru", "hit-density"'
    with pytest.raises(ConfigError, match=nearest):
        OffloadScheduler(8, [GROUP], policy="hit_density")  # type: ignore[arg-type]


def test_tokens_and_extra_keys_need_events() -> None:
    ledger = BlockLedger(8, [GROUP])
    with pytest.raises(ConfigError, match="events"):
        ledger.add("a", [DIGEST], tokens=range(BLOCK_SIZE))
    with pytest.raises(ConfigError, match="events"):
        ledger.add("a", [DIGEST], extra_keys=[None])
    assert ledger.num_requests == 0


IN_LITTLE_MEMORY = """
import resource
from kvstow import *

resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
pool, group = BlockPool(8), FullAttention(4)
try:
    {call}
except (KvstowError, MemoryError) as error:
    print("refused")
"""


@pytest.mark.parametrize(
    "call",
    [
        "pool.touch(range(2**60))",
        "pool.touch(range(2**40))",
        "pool.lookup(range(2**60))",
        "pool.lookup(range(2**40))",
        "BlockPool(2**31 - 1)",
        "BlockLedger(2**31 - 1, [group])",
        "OffloadScheduler(2**31 - 2, [group])",
        "HitCurve().add(range(2**40))",
        "hash_tokens(range(2**40), 16)",
    ],
)
def test_a_size_beyond_memory_does_not_end_the_process(call: str) -> None:
    code = IN_LITTLE_MEMORY.format(call=call)
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout) == (0, "refused\n"), run.stderr
