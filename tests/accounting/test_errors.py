"""A call that does not fit the state raises the right error and text, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
from tests.accounting.worlds import (
    BLOCK_SIZE,
    DIGEST,
    GROUP,
    NUM_BLOCKS,
    LedgerWorld,
    PoolWorld,
    TierWorld,
    names,
    refused,
)

from kvstow import (
    BlockLedger,
    BlockPool,
    ConfigError,
    InvalidBlock,
    KvstowError,
    OffloadScheduler,
    OutOfBlocks,
    StateError,
    UnknownRequest,
)

PoolCase: TypeAlias = tuple[type[Exception], str, Callable[[PoolWorld], object]]
LedgerCase: TypeAlias = tuple[type[Exception], str, Callable[[LedgerWorld], object]]
TierCase: TypeAlias = tuple[type[Exception], str, Callable[[TierWorld], object]]

NUM_FREE = PoolWorld().pool.num_free

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
    (
        InvalidBlock,
        f"ids go from 0 to {NUM_BLOCKS - 1}",
        lambda w: w.pool.cache([6, NUM_BLOCKS], names(5, 2)),
    ),
]


@pytest.mark.parametrize(("error", "says", "call"), POOL_CASES)
def test_pool_refuses_wrong_calls(
    error: type[Exception], says: str, call: Callable[[PoolWorld], object]
) -> None:
    refused(PoolWorld, call, error, says)


# In LedgerWorld, the request "running" was granted 2.5 blocks. Two of them are published.
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
    (ConfigError, "0 new tokens", lambda w: w.ledger.allocate("waiting", 0)),
    (ConfigError, "0 new tokens", lambda w: w.ledger.allocate("new", 0, hit=w.hits["new"])),
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
    (
        ConfigError,
        '"new".*0 new tokens',
        lambda w: w.ledger.allocate_step(["running", "new"], [1, 0]),
    ),
    (ConfigError, "2 request_ids and", lambda w: w.ledger.allocate_step(["running", "new"], [1])),
    (ConfigError, "str", lambda w: w.ledger.allocate_step("running", [1] * 7)),
    # The granted tokens bound `cache` and `rewind`.
    (ConfigError, f"{GRANTED + 1} .* {GRANTED}", lambda w: w.ledger.cache("running", GRANTED + 1)),
    (ConfigError, f"{FULL} .* {BLOCK_SIZE}", lambda w: w.ledger.cache("loading", FULL)),
    (ConfigError, f"{GRANTED + 1} .* {GRANTED}", lambda w: w.ledger.rewind("running", GRANTED + 1)),
    (StateError, f"{FULL - 1} .* {FULL} ", lambda w: w.ledger.rewind("running", FULL - 1)),
    # Tokens and extra keys.
    (ConfigError, f"3 .* {BLOCK_SIZE}", lambda w: w.ledger.add("x", names(5, 1), tokens=[1] * 3)),
    (ConfigError, "-1", lambda w: w.ledger.add("x", names(5, 1), tokens=[1, 1, 1, -1])),
    (ConfigError, str(2**64), lambda w: w.ledger.add("x", names(5, 1), tokens=[2**64] * 4)),
    (ConfigError, "from the start", lambda w: w.ledger.extend("new", [DIGEST], tokens=[1] * 4)),
    (ConfigError, "^0 tokens for 1 hashes of", lambda w: w.ledger.extend("running", [DIGEST])),
    (ConfigError, "2 extra .* 1", lambda w: w.ledger.add("x", [DIGEST], extra_keys=[None, None])),
    (ConfigError, "0 extra .* 1", lambda w: w.ledger.add("x", [DIGEST], extra_keys=[])),
    (ConfigError, "surrogate", lambda w: w.ledger.add("x", [DIGEST], extra_keys=[("\ud800",)])),
    (InvalidBlock, "block 2 .*not pinned", lambda w: w.ledger.pool.unpin([1, 2])),
]


@pytest.mark.parametrize(("error", "says", "call"), LEDGER_CASES)
def test_ledger_refuses_wrong_calls(
    error: type[Exception], says: str, call: Callable[[LedgerWorld], object]
) -> None:
    refused(LedgerWorld, call, error, says)


# In TierWorld, the request "holding" has found the second and third block of its chain.
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
def test_scheduler_refuses_wrong_calls(
    error: type[Exception], says: str, call: Callable[[TierWorld], object]
) -> None:
    refused(TierWorld, call, error, says)


def test_refused_detects_a_change_of_state() -> None:
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


def test_a_refused_hash_does_not_fix_the_hash_width() -> None:
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


def test_all_errors_derive_from_kvstow_error() -> None:
    for error in (ConfigError, OutOfBlocks, InvalidBlock, UnknownRequest, StateError):
        assert error.__mro__[1:3] == (KvstowError, Exception)
