"""What is refused, with which error, in which words; that it leaves no trace is in `refused`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.accounting.worlds import (
    BLOCK_SIZE,
    GROUP,
    NUM_BLOCKS,
    WIDTH,
    LedgerWorld,
    PoolWorld,
    TierWorld,
    World,
    names,
    refused,
)

from kvstow import (
    BlockLedger,
    BlockPool,
    ChunkedLocal,
    ConfigError,
    FullAttention,
    InvalidBlock,
    KvstowError,
    OffloadScheduler,
    OutOfBlocks,
    SlidingWindow,
    StateError,
    StateSpace,
    UnknownRequest,
)

PoolCase: TypeAlias = tuple[type[Exception], str, Callable[[PoolWorld], object]]
LedgerCase: TypeAlias = tuple[type[Exception], str, Callable[[LedgerWorld], object]]
TierCase: TypeAlias = tuple[type[Exception], str, Callable[[TierWorld], object]]

BEYOND = f"ids go from 0 to {NUM_BLOCKS - 1}"
DIGEST = b"x" * WIDTH
NUM_FREE = PoolWorld().pool.num_free

BAD_IDS = [
    (ConfigError, "float64.*integer", np.array([1.0])),
    (ConfigError, "float64.*integer", np.array([])),
    (ConfigError, "bool.*integer", np.array([True, False])),
    (ConfigError, "True", list(np.array([True, False]))),
    (ConfigError, "object.*integer", np.array([1], object)),
    (ConfigError, "U1.*integer", np.array(["1"])),
    (ConfigError, "timedelta64.*integer", np.array([1], "timedelta64[s]")),
    (ConfigError, "2 dimensions", np.array([[1, 2]])),
    (ConfigError, "0 dimensions", np.array(1)),
    (ConfigError, r"1\.0", [1.0]),
    (ConfigError, "'1'", ["1"]),
    (ConfigError, "str", "12"),
    (ConfigError, "bytes", b"12"),
    (ConfigError, "None", [None]),
    (ConfigError, "NoneType", None),
    (ConfigError, "int", 1),
    (ConfigError, "set", {1}),
    (ConfigError, r"\[1\]", [[1]]),
    (InvalidBlock, f"-1 .*{BEYOND}", [-1]),
    (InvalidBlock, f"{NUM_BLOCKS} .*{BEYOND}", [NUM_BLOCKS]),
    (InvalidBlock, f"{NUM_BLOCKS} .*{BEYOND}", [1, 3, 4, NUM_BLOCKS]),
    (InvalidBlock, f"{NUM_BLOCKS} .*{BEYOND}", range(1, NUM_BLOCKS + 1)),
    # Each of these would be a good id if it were cut to 32 bits.
    (InvalidBlock, f"{2**32 + 1} .*{BEYOND}", [2**32 + 1]),
    (InvalidBlock, f"{2**32 + 1} .*{BEYOND}", np.array([2**32 + 1])),
    (InvalidBlock, f"{2**64 + 1} .*{BEYOND}", [2**64 + 1]),
    (InvalidBlock, f"{1 - 2**64} .*{BEYOND}", [1 - 2**64]),
    (InvalidBlock, f"{2**31} .*{BEYOND}", [2**31]),
    (InvalidBlock, f"{2**63} .*{BEYOND}", [2**63]),
    (InvalidBlock, f"-1 .*{BEYOND}", np.array([-1], np.int32)),
    (InvalidBlock, f"{2**32 - 1} .*{BEYOND}", np.array([2**32 - 1], np.uint32)),
    (InvalidBlock, f"{2**64 - 1} .*{BEYOND}", np.array([2**64 - 1], np.uint64)),
    (InvalidBlock, f"256 .*{BEYOND}", np.array([256], ">i2")),
]
BAD_HASHES = [
    ("0 bytes.* 1 to 32", [b""]),
    ("33 bytes.* 1 to 32", [b"x" * 33]),
    (f"{WIDTH + 1} bytes.* {WIDTH}", [DIGEST, b"x" * (WIDTH + 1)]),
    (f"{WIDTH - 1} bytes.* {WIDTH}", [b"x" * (WIDTH - 1)]),
    ("str", [DIGEST, "x"]),
    ("NoneType", [None]),
    ("int", [1]),
    ("bytearray", [bytearray(DIGEST)]),
    ("str", "x" * WIDTH),
    ("bytes", DIGEST),
    ("NoneType", None),
    ("set", {DIGEST}),
    ("ndarray", np.array([DIGEST])),
]
BAD_COUNTS = [
    (ConfigError, "-1", -1),
    (ConfigError, str(2**64), 2**64),
    (TypeError, "float", 1.0),
    (TypeError, "str", "1"),
    (TypeError, "None", None),
]
BAD_GROUPS = [
    (ConfigError, "-1", -1),
    (ConfigError, str(2**32 - 1), 2**32 - 1),
    (ConfigError, str(2**32), 2**32),
    (ConfigError, str(2**64), 2**64),
    (TypeError, "float", 1.0),
]
with_bad_ids = pytest.mark.parametrize(("error", "says", "ids"), BAD_IDS)
with_bad_hashes = pytest.mark.parametrize(("says", "hashes"), BAD_HASHES)
with_bad_counts = pytest.mark.parametrize(("error", "says", "count"), BAD_COUNTS)
with_bad_groups = pytest.mark.parametrize(("error", "says", "group"), BAD_GROUPS)


@pytest.mark.parametrize("name", ["touch", "free", "pin", "unpin", "evict", "ref_counts"])
@with_bad_ids
def test_pool_refuses_ids(name: str, error: type[Exception], says: str, ids: object) -> None:
    refused(PoolWorld, lambda w: getattr(w.pool, name)(ids), error, says)


@pytest.mark.parametrize("name", ["pin", "unpin", "evict", "ref_counts"])
@with_bad_ids
def test_a_ledgers_pool_refuses_ids(
    name: str, error: type[Exception], says: str, ids: object
) -> None:
    refused(LedgerWorld, lambda w: getattr(w.ledger.pool, name)(ids), error, says)


@with_bad_hashes
def test_pool_refuses_hashes(says: str, hashes: list[bytes]) -> None:
    refused(PoolWorld, lambda w: w.pool.lookup(hashes), ConfigError, says)
    refused(PoolWorld, lambda w: w.pool.cache([6], hashes), ConfigError, says)


@with_bad_hashes
def test_ledger_refuses_hashes(says: str, hashes: list[bytes]) -> None:
    refused(LedgerWorld, lambda w: w.ledger.add("x", hashes), ConfigError, says)
    refused(LedgerWorld, lambda w: w.ledger.extend("again", hashes), ConfigError, says)


@with_bad_hashes
def test_scheduler_refuses_hashes(says: str, hashes: list[bytes]) -> None:
    refused(TierWorld, lambda w: w.tier.add("x", hashes), ConfigError, says)
    refused(TierWorld, lambda w: w.tier.extend("fresh", hashes), ConfigError, says)


@with_bad_counts
def test_pool_refuses_counts(error: type[Exception], says: str, count: int) -> None:
    refused(PoolWorld, lambda w: w.pool.allocate(count), error, says)


@pytest.mark.parametrize("name", ["lookup", "cache", "rewind", "block_table", "allocate"])
@with_bad_counts
def test_ledger_refuses_counts(name: str, error: type[Exception], says: str, count: int) -> None:
    refused(LedgerWorld, lambda w: getattr(w.ledger, name)("running", count), error, says)


@pytest.mark.parametrize(
    "name",
    [
        "num_external_tokens",
        "num_lookahead_tokens",
        "reserve",
        "num_in_flight_tokens",
        "must_fit_tokens",
    ],
)
@pytest.mark.parametrize(
    ("error", "says", "count"), [*BAD_COUNTS[:-1], (ConfigError, str(2**63), 2**63)]
)
def test_ledger_refuses_optional_counts(
    name: str, error: type[Exception], says: str, count: object
) -> None:
    def call(world: LedgerWorld) -> object:
        return world.ledger.allocate("waiting", 1, **{name: count})  # type: ignore[arg-type]

    refused(LedgerWorld, call, error, says)


@with_bad_counts
def test_scheduler_refuses_counts(error: type[Exception], says: str, count: int) -> None:
    refused(TierWorld, lambda w: w.tier.lookup("fresh", count, 9), error, says)
    refused(TierWorld, lambda w: w.tier.lookup("holding", 0, count), error, says)
    refused(TierWorld, lambda w: w.tier.load("holding", count, [[7]]), error, says)


@with_bad_groups
def test_pool_refuses_groups(error: type[Exception], says: str, group: int) -> None:
    refused(PoolWorld, lambda w: w.pool.cache([6], [DIGEST], group=group), error, says)
    refused(PoolWorld, lambda w: w.pool.lookup([DIGEST], group=group), error, says)


POOL_CASES: list[PoolCase] = [
    (OutOfBlocks, f"{NUM_FREE + 1} .* {NUM_FREE} ", lambda w: w.pool.allocate(NUM_FREE + 1)),
    (OutOfBlocks, f"{2**63} .* {NUM_FREE} ", lambda w: w.pool.allocate(2**63)),
    (InvalidBlock, "block 2 .*free", lambda w: w.pool.free([6, 2])),
    (InvalidBlock, "block 1 .*free", lambda w: w.pool.free([1, 6, 1, 1])),
    (InvalidBlock, "block 9 .*not pinned", lambda w: w.pool.unpin([8, 9])),
    (InvalidBlock, "block 8 .*not pinned", lambda w: w.pool.unpin([8, 2, 8, 8])),
    (InvalidBlock, "block 0 .*null", lambda w: w.pool.cache([6, 0], names(5, 2))),
    (InvalidBlock, "block 9 .*free", lambda w: w.pool.cache([6, 9], names(5, 2))),
    (InvalidBlock, "block 1 .*another key", lambda w: w.pool.cache([6, 1], names(5, 2))),
    (InvalidBlock, "block 1 .*another key", lambda w: w.pool.cache([1], names(1, 1), group=1)),
    (InvalidBlock, "block 6 .*two keys", lambda w: w.pool.cache([6, 7, 6], names(5, 3))),
    (ConfigError, "2 blocks and 1 hashes", lambda w: w.pool.cache([6, 7], names(5, 1))),
    (ConfigError, "1 blocks and 2 hashes", lambda w: w.pool.cache([6], names(5, 2))),
    (InvalidBlock, BEYOND, lambda w: w.pool.cache([6, NUM_BLOCKS], names(5, 2))),
]


@pytest.mark.parametrize(("error", "says", "call"), POOL_CASES)
def test_pool_refuses(
    error: type[Exception], says: str, call: Callable[[PoolWorld], object]
) -> None:
    refused(PoolWorld, call, error, says)


# In LedgerWorld "running" was granted two and a half blocks, two of them are published.
FULL = 2 * BLOCK_SIZE
GRANTED = FULL + BLOCK_SIZE // 2
LEDGER_CASES: list[LedgerCase] = [
    (UnknownRequest, '"nobody".*add', lambda w: w.ledger.extend("nobody", names(1, 1))),
    (UnknownRequest, '"nobody".*add', lambda w: w.ledger.lookup("nobody", 1)),
    (UnknownRequest, '"nobody".*add', lambda w: w.ledger.allocate("nobody", 1)),
    (UnknownRequest, "nobody", lambda w: w.ledger.allocate_step(["running", "nobody"], [1, 1])),
    (UnknownRequest, '"nobody".*add', lambda w: w.ledger.cache("nobody", 0)),
    (UnknownRequest, '"nobody".*add', lambda w: w.ledger.rewind("nobody", 0)),
    (UnknownRequest, '"nobody".*add', lambda w: w.ledger.block_table("nobody")),
    (UnknownRequest, '"nobody".*add', lambda w: w.ledger.num_granted_tokens("nobody")),
    (UnknownRequest, '"nobody".*add', lambda w: w.ledger.free("nobody")),
    (UnknownRequest, '"nobody".*add', lambda w: w.ledger.restart("nobody")),
    (UnknownRequest, '"nobody".*add', lambda w: w.ledger.num_hashes("nobody")),
    (StateError, '"running".*free', lambda w: w.ledger.add("running", names(1, 3))),
    (ConfigError, "group 1 is not in a ledger of 1", lambda w: w.ledger.block_table("running", 1)),
    # Allocation.
    (ConfigError, "nothing", lambda w: w.ledger.allocate("waiting", 0)),
    (ConfigError, "nothing", lambda w: w.ledger.allocate("new", 0, hit=w.hits["new"])),
    (StateError, "look it up", lambda w: w.ledger.allocate("waiting", 1, hit=w.hits["other"])),
    (StateError, "look it up", lambda w: w.ledger.allocate("again", 1, hit=w.hits["again"])),
    (
        StateError,
        "look it up",
        lambda w: w.ledger.allocate("waiting", 1, hit=LedgerWorld().hits["other"]),
    ),
    (StateError, "stale", lambda w: w.ledger.allocate("stale", 1, hit=w.hits["stale"])),
    (StateError, "has slots", lambda w: w.ledger.allocate("running", 1, hit=w.hits["other"])),
    (
        StateError,
        "has slots",
        lambda w: w.ledger.allocate("running", 1, num_external_tokens=BLOCK_SIZE),
    ),
    (
        ConfigError,
        f"{BLOCK_SIZE + 1} external .* {BLOCK_SIZE}",
        lambda w: w.ledger.allocate("waiting", 1, num_external_tokens=BLOCK_SIZE + 1),
    ),
    (
        ConfigError,
        f"{FULL} hit and {FULL} external .* {3 * BLOCK_SIZE}",
        lambda w: w.ledger.allocate("waiting", 1, hit=w.hits["waiting"], num_external_tokens=FULL),
    ),
    (StateError, '"loading".*cache', lambda w: w.ledger.allocate("loading", 1)),
    # Steps.
    (StateError, '"loading"', lambda w: w.ledger.allocate_step(["running", "loading"], [1, 1])),
    (ConfigError, '"new".*nothing', lambda w: w.ledger.allocate_step(["running", "new"], [1, 0])),
    (ConfigError, "2 requests and 1 n", lambda w: w.ledger.allocate_step(["running", "new"], [1])),
    (ConfigError, "str", lambda w: w.ledger.allocate_step("running", [1] * 7)),
    # What was granted bounds what is published and what is taken back.
    (ConfigError, f"{GRANTED + 1} .* {GRANTED}", lambda w: w.ledger.cache("running", GRANTED + 1)),
    (ConfigError, f"{FULL} .* {BLOCK_SIZE}", lambda w: w.ledger.cache("loading", FULL)),
    (ConfigError, f"{GRANTED + 1} .* {GRANTED}", lambda w: w.ledger.rewind("running", GRANTED + 1)),
    (StateError, f"{FULL - 1} .* {FULL} ", lambda w: w.ledger.rewind("running", FULL - 1)),
    # Tokens and extra keys.
    (ConfigError, f"3 .* {BLOCK_SIZE}", lambda w: w.ledger.add("x", names(5, 1), tokens=[1] * 3)),
    (ConfigError, "-1", lambda w: w.ledger.add("x", names(5, 1), tokens=[1, 1, 1, -1])),
    (ConfigError, str(2**64), lambda w: w.ledger.add("x", names(5, 1), tokens=[2**64] * 4)),
    (ConfigError, "from the start", lambda w: w.ledger.extend("new", [DIGEST], tokens=[1] * 4)),
    (ConfigError, "every hashed block", lambda w: w.ledger.extend("running", [DIGEST])),
    (ConfigError, "2 extra .* 1", lambda w: w.ledger.add("x", [DIGEST], extra_keys=[None, None])),
    (ConfigError, "0 extra .* 1", lambda w: w.ledger.add("x", [DIGEST], extra_keys=[])),
    (ConfigError, "surrogate", lambda w: w.ledger.add("x", [DIGEST], extra_keys=[("\ud800",)])),
    (InvalidBlock, "block 2 .*not pinned", lambda w: w.ledger.pool.unpin([1, 2])),
]


@pytest.mark.parametrize(("error", "says", "call"), LEDGER_CASES)
def test_ledger_refuses(
    error: type[Exception], says: str, call: Callable[[LedgerWorld], object]
) -> None:
    refused(LedgerWorld, call, error, says)


@pytest.mark.parametrize(
    ("says", "counts"),
    [
        ("-1", [1, -1]),
        (r"1\.0", [1, 1.0]),
        ("str", "11"),
        ("NoneType", None),
        ("float64", np.ones(2)),
        ("2 dimensions", np.ones((2, 1), int)),
        (str(2**63), [1, 2**63]),
        (str(2**63 - 1), [1, 2**63 - 1]),
    ],
)
def test_a_step_refuses_counts(says: str, counts: list[int]) -> None:
    refused(
        LedgerWorld,
        lambda w: w.ledger.allocate_step(["running", "waiting"], counts),
        ConfigError,
        says,
    )


# In TierWorld "holding" has found the second and third block of its chain.
TIER_CASES: list[TierCase] = [
    (UnknownRequest, '"nobody".*add', lambda w: w.tier.extend("nobody", names(1, 1))),
    (UnknownRequest, '"nobody".*add', lambda w: w.tier.lookup("nobody", 0, 1)),
    (UnknownRequest, '"nobody".*add', lambda w: w.tier.load("nobody", BLOCK_SIZE, [[1]])),
    (UnknownRequest, '"nobody".*add', lambda w: w.tier.release("nobody")),
    (
        UnknownRequest,
        '"nobody"',
        lambda w: w.tier.store(["fresh", "nobody"], [4, 0], [9], [0, 1, 1]),
    ),
    (UnknownRequest, '"nobody".*add', lambda w: w.tier.finish("nobody")),
    (UnknownRequest, '"nobody".*add', lambda w: w.tier.restart("nobody")),
    (StateError, '"fresh".*finish', lambda w: w.tier.add("fresh", names(1, 1))),
    (ConfigError, f"3 local .* {BLOCK_SIZE}", lambda w: w.tier.lookup("holding", 3, 2**40)),
    # Loads.
    (StateError, '"fresh".*lookup', lambda w: w.tier.load("fresh", BLOCK_SIZE, [[7]])),
    (StateError, '"loading".*lookup', lambda w: w.tier.load("loading", BLOCK_SIZE, [[7]])),
    (ConfigError, "0 tokens", lambda w: w.tier.load("holding", 0, [[]])),
    (ConfigError, f"7 .* {BLOCK_SIZE}", lambda w: w.tier.load("holding", 7, [[7, 8]])),
    (ConfigError, f"12 .* {FULL} ", lambda w: w.tier.load("holding", 12, [[7, 8, 9]])),
    (ConfigError, f"{2**63} .* {FULL} ", lambda w: w.tier.load("holding", 2**63, [[7, 8]])),
    (ConfigError, f"{FULL} .* 2 blocks of .* not 1", lambda w: w.tier.load("holding", FULL, [[7]])),
    (
        ConfigError,
        f"{FULL} .* 2 blocks of .* not 3",
        lambda w: w.tier.load("holding", FULL, [[7, 8, 9]]),
    ),
    (ConfigError, "2 groups.* 1", lambda w: w.tier.load("holding", FULL, [[7], [8]])),
    (ConfigError, "0 groups.* 1", lambda w: w.tier.load("holding", FULL, [])),
    (InvalidBlock, "block 7 .*two copies", lambda w: w.tier.load("holding", FULL, [[7, 7]])),
    (InvalidBlock, "block 0 .*null", lambda w: w.tier.load("holding", FULL, [[7, 0]])),
    (InvalidBlock, "block -1 ", lambda w: w.tier.load("holding", FULL, [[7, -1]])),
    (InvalidBlock, f"block {2**31} ", lambda w: w.tier.load("holding", FULL, [[7, 2**31]])),
    (InvalidBlock, f"block {2**32 + 8} ", lambda w: w.tier.load("holding", FULL, [[7, 2**32 + 8]])),
    (ConfigError, "float64", lambda w: w.tier.load("holding", FULL, [np.ones(2)])),  # type: ignore[list-item]
    # Jobs.
    (StateError, "job 9 .*once", lambda w: w.tier.complete(9)),
    (StateError, "job 1 .*once", lambda w: w.tier.complete(1)),
    (StateError, "job 0 .*once", lambda w: w.tier.complete(0)),
    (StateError, "job -1 .*once", lambda w: w.tier.complete(-1)),
    (StateError, f"job {2**64} .*once", lambda w: w.tier.complete(2**64)),
]


@pytest.mark.parametrize(("error", "says", "call"), TIER_CASES)
def test_scheduler_refuses(
    error: type[Exception], says: str, call: Callable[[TierWorld], object]
) -> None:
    refused(TierWorld, call, error, says)


@pytest.mark.parametrize(
    ("error", "says", "computed", "block_ids", "offsets"),
    [
        (ConfigError, "2 requests, 2 .* 2 offsets", [4, 4], [9, 10], [0, 2]),
        (ConfigError, "2 requests, 2 .* 4 offsets", [4, 4], [9, 10], [0, 1, 2, 2]),
        (ConfigError, "2 requests, 1 .* 3 offsets", [4], [9, 10], [0, 1, 2]),
        (ConfigError, "2 requests, 2 .* 0 offsets", [4, 4], [9, 10], []),
        (ConfigError, "offsets .* 2 block", [4, 4], [9, 10], [0, 1, 1]),
        (ConfigError, "offsets .* 2 block", [4, 4], [9, 10], [0, 1, 3]),
        (ConfigError, "offsets .* from 0", [4, 4], [9, 10], [1, 1, 2]),
        (ConfigError, "offsets .* rise", [4, 4], [9, 10], [0, 3, 2]),
        (ConfigError, "-1", [4, 4], [9, 10], [0, -1, 2]),
        (ConfigError, "float64", [4, 4], [9, 10], np.arange(3.0)),
        (ConfigError, "-4", [4, -4], [9, 10], [0, 1, 2]),
        (ConfigError, r"4\.5", [4, 4.5], [9, 10], [0, 1, 2]),
        (ConfigError, "float64", [4, 4], np.ones(2), [0, 1, 2]),
        (ConfigError, "2 dimensions", [4, 4], np.ones((2, 1), int), [0, 1, 2]),
        (InvalidBlock, "block 0 .*null", [4, 4], [9, 0], [0, 1, 2]),
        (InvalidBlock, "block -1 ", [4, 4], [9, -1], [0, 1, 2]),
        (InvalidBlock, f"block {2**31} ", [4, 4], [9, 2**31], [0, 1, 2]),
        (InvalidBlock, f"block {2**32 + 9} ", [4, 4], [9, 2**32 + 9], [0, 1, 2]),
    ],
)
def test_store_refuses(
    error: type[Exception],
    says: str,
    computed: list[int],
    block_ids: list[int],
    offsets: list[int],
) -> None:
    refused(
        TierWorld,
        lambda w: w.tier.store(["fresh", "storing"], computed, block_ids, offsets),
        error,
        says,
    )


@pytest.mark.parametrize(("says", "id"), [("surrogate", "\ud800"), ("int", 3), ("None", None)])
def test_a_request_id_that_is_not_a_str_is_refused(says: str, id: str) -> None:
    error = ConfigError if says == "surrogate" else TypeError
    refused(LedgerWorld, lambda w: w.ledger.add(id, [DIGEST]), error, says)
    refused(TierWorld, lambda w: w.tier.add(id, [DIGEST]), error, says)
    # Inside a list it is the list that is wrong.
    refused(LedgerWorld, lambda w: w.ledger.allocate_step([id], [1]), ConfigError, says)
    refused(TierWorld, lambda w: w.tier.store([id], [4], [9], [0, 1]), ConfigError, says)


def test_the_check_notices_a_refusal_that_changes_state() -> None:
    def pin(world: PoolWorld) -> None:
        world.pool.pin([9])
        raise StateError

    def end_the_delay(world: LedgerWorld) -> None:
        world.ledger.cache("loading", 0)
        raise StateError

    def release(world: TierWorld) -> None:
        world.tier.release("holding")
        raise StateError

    with pytest.raises(AssertionError):
        refused(PoolWorld, pin, StateError, "")
    with pytest.raises(AssertionError):
        refused(LedgerWorld, end_the_delay, StateError, "")
    with pytest.raises(AssertionError):
        refused(TierWorld, release, StateError, "")


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
    with pytest.raises(TypeError, match=type(size).__name__):
        make(size)


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


def test_a_refused_hash_sets_no_width() -> None:
    pool, ledger = BlockPool(4), BlockLedger(4, [GROUP], events=True)
    tier = OffloadScheduler(4, [GROUP])
    pool.allocate(2)
    with pytest.raises(InvalidBlock):
        pool.cache([1, 3], [b"xx", b"yy"])
    with pytest.raises(ConfigError):
        ledger.add("a", [b"xx"], tokens=[1])
    for target in (ledger, tier):
        with pytest.raises(ConfigError):
            target.add("a", [b"xx", b"yyy"])
    pool.cache([1], [DIGEST])
    ledger.add("a", [DIGEST])
    tier.add("a", [DIGEST])


def test_all_errors_have_one_base() -> None:
    for error in (ConfigError, OutOfBlocks, InvalidBlock, UnknownRequest, StateError):
        assert error.__mro__[1:3] == (KvstowError, Exception)


# Numbers at each bound that a conversion could trip over, and what is no number at all.
at_bounds = [
    sign * 2**bits + off for bits in (31, 32, 63, 64) for sign in (1, -1) for off in (-1, 0)
]
ints = st.integers(-2, NUM_BLOCKS + 2) | st.sampled_from(at_bounds)
texts = st.sampled_from(["running", "waiting", "fresh", "holding"]) | st.text(max_size=2)
single = st.one_of(st.none(), st.floats(), st.binary(max_size=2), texts, ints, st.booleans())
arrays = st.builds(
    np.array,
    st.lists(st.integers(-2, NUM_BLOCKS), max_size=3),
    st.sampled_from(["i1", "i4", ">i8", "f4"]),
)
argument = st.one_of(
    single,
    arrays,
    *(st.lists(item, max_size=3) for item in (single, ints, texts, st.lists(ints, max_size=2))),
    st.lists(st.binary(max_size=33) | st.sampled_from(names(1, 4)), max_size=3),
)

PARAMETERS: dict[type[World], dict[str, tuple[int, list[str]]]] = {
    PoolWorld: {
        **{name: (1, []) for name in ("allocate", "touch", "free", "pin", "unpin", "evict")},
        "cache": (2, ["group"]),
        "lookup": (1, ["group"]),
        "ref_counts": (1, []),
    },
    LedgerWorld: {
        "add": (2, ["tokens", "extra_keys"]),
        "extend": (2, ["tokens", "extra_keys"]),
        "lookup": (2, []),
        "allocate": (2, ["hit", "num_external_tokens", "reserve", "must_fit_tokens"]),
        "allocate_step": (2, ["num_lookahead_tokens", "num_in_flight_tokens"]),
        "cache": (2, []),
        "rewind": (2, []),
        "block_table": (1, ["group"]),
        "free": (1, []),
    },
    TierWorld: {
        "add": (2, []),
        "extend": (2, []),
        "lookup": (3, []),
        "load": (3, []),
        "release": (1, []),
        "store": (4, []),
        "complete": (1, ["ok"]),
        "finish": (1, []),
    },
}


@pytest.mark.parametrize("kind", PARAMETERS)
@given(data=st.data())
def test_any_argument_raises_only_kvstow_errors_and_changes_nothing(
    kind: type[World], data: st.DataObject
) -> None:
    world = kind()
    target = next(iter(vars(world).values()))
    for name in data.draw(st.lists(st.sampled_from(list(PARAMETERS[kind])), max_size=6)):
        num, optional = PARAMETERS[kind][name]
        args = [data.draw(argument) for _ in range(num)]
        kwargs = {key: data.draw(single) for key in optional if data.draw(st.booleans())}
        world.look()  # takes the events of what went before
        before = world.look()
        try:
            getattr(target, name)(*args, **kwargs)
        except (KvstowError, TypeError):
            assert world.look() == before
        world.check()


IN_LITTLE_MEMORY = """
import resource
from kvstow import *

resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
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
    ],
)
def test_a_size_beyond_memory_does_not_end_the_process(call: str) -> None:
    code = IN_LITTLE_MEMORY.format(call=call)
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout) == (0, "refused\n"), run.stderr
