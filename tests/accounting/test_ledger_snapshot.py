"""Snapshots of a ledger that no ledger wrote, and ledgers that are not new."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from tests.accounting.forging import opened, sealed

from kvstow import (
    BlockLedger,
    BlockStored,
    ChunkedLocal,
    FullAttention,
    OffloadScheduler,
    SlidingWindow,
    SnapshotError,
    StateError,
    StateSpace,
)

NUM_BLOCKS = 32
NAMES = [bytes([at + 1] * 8) for at in range(8)]


def new_ledger() -> BlockLedger:
    return BlockLedger(NUM_BLOCKS, [FullAttention(4), SlidingWindow(4, 6)])


def snapshot() -> bytes:
    """One request runs, one shares its first two blocks, one loads, one has no full block."""
    ledger = new_ledger()
    ledger.add("a", NAMES[:5])
    ledger.allocate("a", 22)
    ledger.add("b", NAMES[:3])
    ledger.allocate("b", 3, hit=ledger.lookup("b", 8))
    ledger.add("c", NAMES[5:])
    ledger.allocate("c", 0, num_external_tokens=8, delay_caching=True)
    ledger.add("d", [])
    ledger.allocate("d", 3)
    return ledger.snapshot()


# The fields of a snapshot: groups, width, num_added, requests (name, request), keys, publish.
# Of a request: serial, hashes, tables, granted, is_running, is_delayed, tokens, extra_keys.
# Of a table: blocks, num_skipped, num_published, num_hits.
Forge = Callable[[Any], None]


def request(fields: Any, at: int) -> Any:
    return fields[3][at][1]


def table(fields: Any, at: int, group: int = 0) -> Any:
    return request(fields, at)[2][group]


def forge(what: Callable[[Any], Any], key: int, value: object) -> Forge:
    def change(fields: Any) -> None:
        what(fields)[key] = value

    return change


def wider_hash(at: int) -> Forge:
    def change(fields: Any) -> None:
        request(fields, at)[1] = (
            request(fields, at)[1][:8] + b"x" * 24 + request(fields, at)[1][32:]
        )

    return change


FORGERIES: dict[str, Forge] = {
    "as many requests as wrap": forge(lambda f: f, 2, 2**64 - 1),
    "a request that was never added": forge(lambda f: request(f, 0), 0, 4),
    "two requests of one number": forge(lambda f: request(f, 0), 0, 1),
    "two requests of one name": forge(lambda f: f[3][1], 0, "a"),
    "no width, but hashes": forge(lambda f: f, 1, 0),
    "a width that no hash has": forge(lambda f: f, 1, 33),
    "a hash beyond its width": wider_hash(0),
    "a hash beyond its width of no published block": wider_hash(2),
    "a hash that is cut off": forge(lambda f: request(f, 0), 1, b"x" * 31),
    "more tokens granted than slots": forge(lambda f: request(f, 0), 3, 25),
    "tokens beyond counting": forge(lambda f: request(f, 0), 3, 2**64 - 1),
    "granted tokens that never ran": forge(lambda f: request(f, 0), 4, False),
    "a table too few": lambda f: request(f, 0)[2].pop(),
    "an id beyond int32": forge(lambda f: table(f, 0)[0], 5, 2**31),
    "an id beyond all pools": forge(lambda f: table(f, 0)[0], 5, 2**32 - 1),
    "a null block that is read": forge(lambda f: table(f, 0)[0], 5, 0),
    "a block twice in a table": lambda f: table(f, 0)[0].__setitem__(5, table(f, 0)[0][4]),
    "a block at two positions": lambda f: table(f, 1)[0].__setitem__(2, table(f, 0)[0][5]),
    "a block in two groups": lambda f: table(f, 0)[0].__setitem__(5, table(f, 0, 1)[0][5]),
    "a block that two requests write": lambda f: table(f, 3)[0].__setitem__(0, table(f, 2)[0][0]),
    "blocks skipped that are read": forge(lambda f: table(f, 0, 1), 1, 5),
    "more published than there are": forge(lambda f: table(f, 0), 2, 7),
    "more published than hashed": forge(lambda f: table(f, 0), 2, 6),
    "more hits than published": forge(lambda f: table(f, 1), 3, 4),
    "published while it loads": forge(lambda f: table(f, 2), 2, 1),
    "a key of a block in no table": lambda f: f[4][0].__setitem__(0, 31),
    "a key of another group": lambda f: f[4][0][1].__setitem__(1, 1),
    "a key of no group": lambda f: f[4][0][1].__setitem__(1, 60_000),
    "a key beyond its width": lambda f: f[4][0][1].__setitem__(0, b"y" * 32),
    "a key that its position does not have": lambda f: f[4][0][1].__setitem__(
        0, NAMES[7].ljust(32, b"\0")
    ),
    "two keys of one block": lambda f: f[4].append(copy.deepcopy(f[4][0])),
    "another order of publication": forge(lambda f: f, 5, 1),
}


def test_an_unchanged_snapshot_is_restored() -> None:
    bytes = snapshot()
    for block_ids in ("same", "packed"):
        ledger = new_ledger()
        ledger.restore(sealed(bytes, opened(bytes)), block_ids=block_ids)
        ledger.check()
        assert ledger.num_granted_tokens("a") == 22


def test_a_snapshot_leaves_out_cached_blocks_that_no_request_holds() -> None:
    slept = new_ledger()
    for id in ("gone", "stays"):
        slept.add(id, NAMES[:2] if id == "gone" else NAMES[4:6])
        assert slept.allocate(id, 8) is not None
    slept.free("gone")
    assert slept.pool.num_cached == 8
    ledger = new_ledger()
    ledger.restore(slept.snapshot())
    ledger.check()
    assert ledger.pool.num_cached == 4
    for id, num_tokens in (("again", 0), ("shares", 8)):
        ledger.add(id, NAMES[:2] if id == "again" else NAMES[4:6])
        assert ledger.lookup(id, 2**40).num_tokens == num_tokens


def test_a_request_whose_snapshot_has_more_tokens_than_hashes_extends_from_its_hashes() -> None:
    made = BlockLedger(NUM_BLOCKS, [FullAttention(4)], events=True)
    made.add("a", NAMES[:1], tokens=list(range(4)))
    fields = opened(made.snapshot())
    request(fields, 0)[6].extend([100, 101, 102])
    ledger = BlockLedger(NUM_BLOCKS, [FullAttention(4)], events=True)
    ledger.restore(sealed(made.snapshot(), fields))
    ledger.extend("a", NAMES[1:2], tokens=list(range(4, 8)))
    ledger.allocate("a", 8)
    (stored,) = ledger.pool.take_events()
    assert isinstance(stored, BlockStored)
    assert list(stored.token_ids or []) == list(range(8))


@pytest.mark.parametrize("what", FORGERIES)
def test_a_forged_snapshot_is_refused(what: str) -> None:
    bytes = snapshot()
    fields = opened(bytes)
    FORGERIES[what](fields)
    assert fields != opened(bytes)
    for block_ids in ("same", "packed"):
        ledger = new_ledger()
        with pytest.raises(SnapshotError):
            ledger.restore(sealed(bytes, fields), block_ids=block_ids)
        assert ledger.num_requests == 0
        ledger.restore(bytes, block_ids=block_ids)


@pytest.mark.parametrize("part", [6, 7], ids=["tokens", "extra keys"])
def test_a_forged_snapshot_whose_tokens_do_not_match_its_hashes_is_refused(part: int) -> None:
    ledger = BlockLedger(NUM_BLOCKS, [FullAttention(4)], events=True)
    ledger.add("a", NAMES[:2], tokens=list(range(8)), extra_keys=[["x"], None])
    fields = opened(ledger.snapshot())
    if part == 6:
        request(fields, 0)[part].pop()
    else:
        request(fields, 0)[part].append(None)
    with pytest.raises(SnapshotError):
        BlockLedger(NUM_BLOCKS, [FullAttention(4)], events=True).restore(
            sealed(ledger.snapshot(), fields)
        )


@pytest.mark.parametrize("make", [BlockLedger, OffloadScheduler])
def test_a_snapshot_of_other_groups_is_refused_and_named_as_python_writes_them(
    make: type[BlockLedger | OffloadScheduler],
) -> None:
    window = SlidingWindow(4, 6, extra_retained_tokens=2, drops_last_block=True)
    slept: list[Any] = [FullAttention(4, drops_last_block=True), window]
    new: list[Any] = [ChunkedLocal(4, 8), StateSpace(4)]
    with pytest.raises(SnapshotError) as refused:
        make(NUM_BLOCKS, new).restore(make(NUM_BLOCKS, slept).snapshot())
    assert str(slept) in str(refused.value)
    assert str(new) in str(refused.value)


def test_a_ledger_that_has_served_is_not_new() -> None:
    bytes, used = snapshot(), new_ledger()
    used.add("gone", NAMES)
    used.free("gone")
    with pytest.raises(StateError, match="has served requests"):
        used.restore(bytes)
    cached = new_ledger()
    cached.add("gone", NAMES)
    cached.allocate("gone", 32)
    cached.free("gone")
    with pytest.raises(StateError, match="has served requests"):
        cached.restore(bytes, block_ids=range(1, 20))
    assert cached.pool.num_cached == 16


def test_a_hit_from_before_a_restore_is_refused() -> None:
    bytes, ledger = snapshot(), new_ledger()
    ledger.restore(bytes)
    ledger.free("b")
    ledger.add("b", NAMES[:3])
    hit = ledger.lookup("b", 8)
    other = new_ledger()
    other.restore(bytes)
    other.free("b")
    other.add("b", NAMES[:3])
    # Same name, same number, same blocks, and another ledger all the same.
    with pytest.raises(StateError, match="another ledger"):
        other.allocate("b", 1, hit=hit)
    assert ledger.allocate("b", 1, hit=hit) is not None
