"""`BlockLedger`: allocation, publication, snapshots and events, one rule per test."""

from __future__ import annotations

import numpy as np
import pytest
from tests.accounting.ledger_model import BLOCK_SIZE, chain

from kvstow import (
    AllBlocksCleared,
    BlockLedger,
    BlockStored,
    ConfigError,
    FullAttention,
    SlidingWindow,
    SnapshotError,
    StateError,
    UnknownRequest,
)


def ledger_of(num_blocks: int, num_groups: int = 1, *, events: bool = False) -> BlockLedger:
    return BlockLedger(num_blocks, [FullAttention(BLOCK_SIZE)] * num_groups, events=events)


def publish(ledger: BlockLedger, id: str, num_blocks: int) -> list[bytes]:
    """Add a request whose blocks are all published, and return its hashes."""
    names, _ = chain(1, 0, num_blocks)
    ledger.add(id, names)
    assert ledger.allocate(id, num_blocks * BLOCK_SIZE) is not None
    return names


def num_found(ledger: BlockLedger, names: list[bytes]) -> int:
    """Return how many blocks a new request with these hashes would hit."""
    ledger.add("probe", names)
    num_tokens = ledger.lookup("probe", 2**40).num_tokens
    ledger.free("probe")
    return num_tokens // BLOCK_SIZE


def test_max_tokens_of_a_lookup_is_inclusive() -> None:
    ledger = ledger_of(8)
    names = publish(ledger, "a", 3)
    ledger.add("b", names)
    for num_tokens in range(4 * BLOCK_SIZE):
        hit = ledger.lookup("b", num_tokens)
        assert hit.num_tokens == min(num_tokens // BLOCK_SIZE, 3) * BLOCK_SIZE
        assert [len(ids) * BLOCK_SIZE for ids in hit.blocks] == [hit.num_tokens]


def test_requests_are_freed_group_by_group_tail_first() -> None:
    ledger = ledger_of(8, num_groups=2)
    publish(ledger, "a", 3)
    tables = [ledger.block_table("a", group).tolist() for group in range(2)]
    rest = ledger.pool.free_order().tolist()
    ledger.free("a")
    assert ledger.pool.free_order().tolist() == rest + tables[0][::-1] + tables[1][::-1]


def test_a_prefix_outlives_its_extensions() -> None:
    num_blocks = 4
    ledger = ledger_of(1 + num_blocks)
    names = publish(ledger, "a", num_blocks)
    ledger.free("a")
    ledger.add("b", [])
    for num_evicted in range(1, num_blocks + 1):
        assert ledger.allocate("b", BLOCK_SIZE) is not None
        assert num_found(ledger, names) == num_blocks - num_evicted


def test_no_group_allocates_a_hit_of_another_group() -> None:
    num_groups, num_blocks = 2, 2
    ledger = ledger_of(1 + 2 * num_groups * num_blocks, num_groups)
    names = publish(ledger, "a", num_blocks)
    ledger.free("a")
    ledger.add("filler", chain(2, 2, num_blocks)[0])
    assert ledger.allocate("filler", num_blocks * BLOCK_SIZE) is not None
    ledger.free("filler")
    # The head of the free queue now consists of the hit blocks.
    ledger.add("b", [*names, b"external"])
    hit = ledger.lookup("b", 2**40)
    hits = np.concatenate(hit.blocks).tolist()
    head = ledger.pool.free_order()[: len(hits)].tolist()
    assert sorted(head) == sorted(hits)
    got = ledger.allocate("b", BLOCK_SIZE, hit=hit, num_external_tokens=BLOCK_SIZE)
    assert got is not None
    assert [len(ids) for ids in got] == [2] * num_groups
    for group, (found, new) in enumerate(zip(hit.blocks, got, strict=True)):
        assert ledger.block_table("b", group).tolist() == found.tolist() + new.tolist()
    held = np.concatenate([*hit.blocks, *got])
    assert len(set(held.tolist())) == len(held)
    assert ledger.pool.ref_counts(held).tolist() == [1] * len(held)


def test_external_blocks_are_published_once_their_load_has_landed() -> None:
    ledger = ledger_of(8)
    names, _ = chain(1, 0, 3)
    ledger.add("a", names)
    assert ledger.allocate("a", 0, num_external_tokens=2 * BLOCK_SIZE, delay_caching=True)
    assert ledger.num_granted_tokens("a") == 2 * BLOCK_SIZE
    assert num_found(ledger, names) == 0
    with pytest.raises(StateError, match="waits for a load"):
        ledger.allocate("a", 1)
    ledger.cache("a", 2 * BLOCK_SIZE)
    assert num_found(ledger, names) == 2
    assert ledger.allocate("a", BLOCK_SIZE) is not None
    assert num_found(ledger, names) == 3


def test_a_failed_load_leaves_no_keys() -> None:
    ledger = ledger_of(8)
    order = ledger.pool.free_order().tolist()
    names, _ = chain(1, 0, 3)
    ledger.add("a", names)
    assert ledger.allocate("a", 0, num_external_tokens=2 * BLOCK_SIZE, delay_caching=True)
    ledger.free("a")
    assert num_found(ledger, names) == 0
    assert sorted(ledger.pool.free_order().tolist()) == order
    ledger.add("a", names)
    assert ledger.allocate("a", 3 * BLOCK_SIZE) is not None
    assert num_found(ledger, names) == 3


def test_rejected_drafts_are_rewound_and_never_published() -> None:
    ledger = ledger_of(8)
    names, _ = chain(1, 0, 2)
    ledger.add("a", names[:1])
    num_drafts = 3
    assert ledger.allocate("a", BLOCK_SIZE + 1 + num_drafts) is not None
    # Drafts fill the second block, so its hash is not known yet.
    assert num_found(ledger, names) == 1
    ledger.rewind("a", BLOCK_SIZE + 1)
    table = ledger.block_table("a").tolist()
    ledger.extend("a", names[1:])
    got = ledger.allocate("a", BLOCK_SIZE - 2)
    assert got is not None
    assert (got[0].tolist(), ledger.block_table("a").tolist()) == ([], table)
    assert num_found(ledger, names) == 1
    assert ledger.allocate("a", 1) is not None
    assert num_found(ledger, names) == 2


def test_lookahead_tokens_get_slots_but_are_not_granted() -> None:
    ledger = ledger_of(8)
    names, _ = chain(1, 0, 2)
    ledger.add("a", names)
    assert ledger.allocate("a", BLOCK_SIZE, num_lookahead_tokens=BLOCK_SIZE) is not None
    assert len(ledger.block_table("a")) == 2
    assert ledger.num_granted_tokens("a") == BLOCK_SIZE
    assert num_found(ledger, names) == 1


@pytest.mark.parametrize("num_hit", [0, 2])
def test_reserve_and_must_fit_refuse_at_their_bound(num_hit: int) -> None:
    num_free, num_asked = 7, 4

    def served(reserve: int, must_fit_tokens: int | None) -> bool:
        ledger = ledger_of(1 + num_free)
        if num_hit:
            publish(ledger, "before", num_hit)
            ledger.free("before")
        ledger.add("a", chain(1, 0, num_asked)[0])
        got = ledger.allocate(
            "a",
            (num_asked - num_hit) * BLOCK_SIZE,
            hit=ledger.lookup("a", 2**40),
            reserve=reserve,
            must_fit_tokens=must_fit_tokens,
        )
        if got is None:
            assert ledger.pool.num_free == num_free
            assert (ledger.block_table("a").tolist(), ledger.num_granted_tokens("a")) == ([], 0)
        return got is not None

    # Both new blocks and free hit blocks leave the free queue, so both count.
    assert served(num_free - num_asked, None)
    assert not served(num_free - num_asked + 1, None)
    assert served(0, num_free * BLOCK_SIZE)
    assert not served(0, num_free * BLOCK_SIZE + 1)
    # The ledger does not add the two limits.
    assert served(num_free - num_asked, num_free * BLOCK_SIZE)


def test_allocate_step_equals_allocations_in_turn() -> None:
    ids, counts = ["a", "b", "c", "d"], [3 * BLOCK_SIZE, 1, 4 * BLOCK_SIZE, 1]
    at_once, in_turn = ledger_of(8, 2), ledger_of(8, 2)
    for ledger in (at_once, in_turn):
        for id in ids:
            ledger.add(id, [])
    # "a" gets 6 of 7 blocks. "b" needs 2, so the step ends before it.
    step = at_once.allocate_step(ids, np.array(counts, ">u2"))
    got = [in_turn.allocate(id, count) for id, count in zip(ids[:1], counts[:1], strict=True)]
    assert in_turn.allocate("b", 1) is None
    assert (step.num_granted, step.offsets.tolist()) == (1, [0, 3, 6])
    assert repr(step) == "StepAllocation(num_granted=1)"
    assert got[0] is not None
    assert step.ids.tolist() == np.concatenate(got[0]).tolist()
    assert {array.dtype for array in (step.ids, step.offsets)} == {np.dtype(np.int32)}


def test_a_request_freed_before_its_step_leaves_no_keys() -> None:
    for publish in ("granted", "computed"):
        ledger = BlockLedger(8, [FullAttention(BLOCK_SIZE)], publish=publish)
        names, _ = chain(1, 0, 3)
        ledger.add("a", names)
        assert ledger.allocate("a", 3 * BLOCK_SIZE) is not None
        assert ledger.free("a", num_computed_tokens=BLOCK_SIZE) == []
        # With "granted", vLLM's order, the first block already has a key.
        assert num_found(ledger, names) == (1 if publish == "granted" else 0)
        ledger.check()


def test_free_names_requests_that_hit_uncomputed_blocks() -> None:
    ledger = ledger_of(16)
    names = publish(ledger, "a", 3)
    for id in ("hits all", "hits one"):
        ledger.add(id, names)
        hit = ledger.lookup(id, (3 if id == "hits all" else 1) * BLOCK_SIZE)
        assert ledger.allocate(id, 1, hit=hit) is not None
    assert ledger.free("a", num_computed_tokens=BLOCK_SIZE) == ["hits all"]
    assert num_found(ledger, names) == 1
    # "hits all" does not own its hit blocks: only "a" knows whether they are computed.
    assert ledger.free("hits all", num_computed_tokens=0) == []
    assert num_found(ledger, names) == 1
    assert ledger.free("hits one") == []


def test_hit_blocks_that_a_copy_pins_take_no_room() -> None:
    """A pinned block is not free, so the pool has as many free blocks after the hit."""
    ledger = ledger_of(6)
    names = publish(ledger, "a", 2)
    table = ledger.block_table("a")
    ledger.free("a")
    ledger.pool.pin(table)
    assert ledger.pool.num_free == 3
    ledger.add("b", names)
    hit = ledger.lookup("b", 2 * BLOCK_SIZE)
    assert ledger.allocate("b", 3 * BLOCK_SIZE, hit=hit) is not None
    assert ledger.pool.num_free == 0
    ledger.pool.unpin(table)
    ledger.check()


def test_computed_blocks_are_published_step_by_step() -> None:
    ledger = BlockLedger(16, [FullAttention(BLOCK_SIZE)], publish="computed")
    names, _ = chain(1, 0, 4)
    for id in ("a", "b"):
        ledger.add(id, names)
    assert ledger.allocate_step(["a", "b"], [2 * BLOCK_SIZE] * 2).num_granted == 2
    assert ledger.allocate("a", BLOCK_SIZE) is not None
    assert num_found(ledger, names) == 0
    with pytest.raises(ConfigError, match=f'"b".* granted {2 * BLOCK_SIZE}'):
        ledger.cache_step(["a", "b"], [BLOCK_SIZE, 3 * BLOCK_SIZE])
    with pytest.raises(ConfigError, match="2 request_ids and 1 num_computed_tokens"):
        ledger.cache_step(["a", "b"], [BLOCK_SIZE])
    with pytest.raises(UnknownRequest):
        ledger.cache_step(["a", "nobody"], [BLOCK_SIZE, 0])
    assert num_found(ledger, names) == 0
    ledger.cache_step(["a", "b"], [2 * BLOCK_SIZE, 0])
    assert num_found(ledger, names) == 2
    ledger.cache_step(["a", "b"], [3 * BLOCK_SIZE - 1, 2 * BLOCK_SIZE])
    assert num_found(ledger, names) == 2
    with pytest.raises(StateError, match="are published"):
        ledger.rewind("a", BLOCK_SIZE)
    ledger.rewind("a", 2 * BLOCK_SIZE + 1)
    with pytest.raises(ConfigError, match=f"granted {2 * BLOCK_SIZE + 1}"):
        ledger.cache("a", 3 * BLOCK_SIZE)


def test_a_rewind_behind_freed_blocks_names_the_argument_that_keeps_them() -> None:
    ledger = BlockLedger(8, [SlidingWindow(BLOCK_SIZE, BLOCK_SIZE)], publish="computed")
    ledger.add("a", [])
    for _ in range(2):
        ledger.allocate("a", 2 * BLOCK_SIZE)
    with pytest.raises(StateError, match="before the next step, or pass num_in_flight_tokens"):
        ledger.rewind("a", BLOCK_SIZE)


def test_a_snapshot_is_restored_only_with_equal_publish() -> None:
    granted, computed = ledger_of(8), BlockLedger(8, [FullAttention(4)], publish="computed")
    publish(granted, "a", 2)
    with pytest.raises(SnapshotError, match="publishes Granted tokens"):
        computed.restore(granted.snapshot())
    with pytest.raises(ConfigError, match='publish is "soon"'):
        BlockLedger(8, [FullAttention(4)], publish="soon")  # type: ignore[arg-type]


def test_a_hit_of_another_ledger_is_refused() -> None:
    windowed = [SlidingWindow(BLOCK_SIZE, 2 * BLOCK_SIZE + 1)]
    twice = [FullAttention(BLOCK_SIZE)] * 2
    for groups in ([FullAttention(BLOCK_SIZE)], windowed, twice, windowed * 2):
        for others in ([FullAttention(BLOCK_SIZE)], windowed, twice, windowed * 2):
            ledger, other = BlockLedger(32, groups), BlockLedger(32, others)
            hits = []
            for each in (ledger, other):
                names = publish(each, "a", 4)
                each.free("a")
                each.add("b", names)
                hits.append(each.lookup("b", 4 * BLOCK_SIZE))
            with pytest.raises(StateError, match="of another ledger: look it up in this one"):
                ledger.allocate("b", BLOCK_SIZE, hit=hits[1])
            ledger.check()
            assert ledger.num_granted_tokens("b") == 0
            assert ledger.allocate("b", BLOCK_SIZE, hit=hits[0]) is not None
            ledger.check()


@pytest.mark.parametrize("count", [2**40 + 1, 2**63, 2**64 - 1])
def test_too_many_tokens_in_flight_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"max_in_flight_tokens is {count}, more than {2**40}"):
        BlockLedger(8, [SlidingWindow(16, 64)], max_in_flight_tokens=count)
    ledger = BlockLedger(8, [SlidingWindow(16, 64)], max_in_flight_tokens=2**40)
    ledger.add("a", [])
    assert ledger.allocate("a", 16, must_fit_tokens=1600) is None


def test_the_sum_of_tokens_of_a_request_is_bounded() -> None:
    ledger = BlockLedger(4096, [FullAttention(2**30)])
    ledger.add("a", [])
    assert ledger.allocate("a", 2**40) is not None
    with pytest.raises(ConfigError, match=f"{2**40 + 1} tokens in all"):
        ledger.allocate("a", 1)
    with pytest.raises(ConfigError, match="tokens in all"):
        ledger.allocate_step(["a"], [2**40], num_lookahead_tokens=2**40)


def test_changes_of_returned_arrays_do_not_change_the_ledger() -> None:
    ledger = ledger_of(8)
    names = publish(ledger, "a", 3)
    ledger.add("b", names)
    hit = ledger.lookup("b", 2**40)
    for array in [*hit.blocks, ledger.block_table("a"), ledger.pool.free_order()]:
        array[:] = 0
    assert ledger.allocate("b", 1, hit=hit) is not None
    assert ledger.block_table("b")[:3].tolist() == ledger.block_table("a").tolist() == [1, 2, 3]
    ledger.check()


def test_events_report_parents_tokens_extra_keys_and_sizes() -> None:
    ledger = ledger_of(8, events=True)
    names, tokens = chain(1, 0, 3)
    keys = [("salt", 7, b"x", ("nested", None)), None]
    ledger.add("a", names[:2], tokens=tokens[: 2 * BLOCK_SIZE + 1], extra_keys=keys)
    ledger.extend("a", names[2:], tokens=tokens[2 * BLOCK_SIZE :])
    assert ledger.allocate("a", BLOCK_SIZE) is not None
    assert ledger.allocate("a", 2 * BLOCK_SIZE) is not None
    first, second = ledger.pool.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.block_hashes, second.block_hashes) == (names[:1], names[1:])
    assert (first.parent_block_hash, second.parent_block_hash) == (None, names[0])
    assert (first.token_ids, second.token_ids) == (tokens[:BLOCK_SIZE], tokens[BLOCK_SIZE:])
    assert (first.extra_keys, second.extra_keys) == ([keys[0]], [None, None])
    assert {first.block_size, second.block_size} == {BLOCK_SIZE}
    assert {first.medium, second.medium} == {"GPU"}
    ledger.free("a")
    assert ledger.pool.reset()
    (cleared,) = ledger.pool.take_events()
    assert isinstance(cleared, AllBlocksCleared)
    assert cleared.medium == "GPU"


def test_an_event_keeps_a_key_that_repeats_within_a_hash() -> None:
    """A router that computes hashes needs it. The hashes of a larger block repeat their keys."""
    ledger = BlockLedger(64, [FullAttention(8), FullAttention(4)], events=True)
    names, keys = [b"hash", b"hush"], [("img", "img", "adapter"), ("adapter", "salt")]
    ledger.add("a", names, tokens=range(8), extra_keys=keys)
    assert ledger.allocate("a", 8) is not None
    stored = [event for event in ledger.pool.take_events() if isinstance(event, BlockStored)]
    assert {event.block_size: event.extra_keys for event in stored} == {
        4: keys,
        8: [("img", "img", "adapter", "salt")],
    }


def test_tokens_of_an_extension_are_those_of_its_blocks() -> None:
    """An event reports a block's own tokens, also if `add` got those of a partly filled block."""
    names, tokens = chain(1, 0, 3)
    for num_more in range(BLOCK_SIZE):
        ledger = ledger_of(8, events=True)
        num_first = 2 * BLOCK_SIZE + num_more
        ledger.add("a", names[:2], tokens=tokens[:num_first])
        wrong = tokens[num_first:] if num_more else tokens[num_first + 1 :]
        with pytest.raises(ConfigError, match=f"^{len(wrong)} tokens for 1 hashes of {BLOCK_SIZE}"):
            ledger.extend("a", names[2:], tokens=wrong)
        with pytest.raises(ConfigError, match=r"for 1 more hashes .* tokens of these blocks alone"):
            ledger.extend("a", names[2:], tokens=tokens)
        ledger.extend("a", names[2:], tokens=[*tokens[2 * BLOCK_SIZE :], *tokens[:num_more]])
        hashes, known, _ = ledger.known("a")
        assert list(hashes) == names
        assert known == tokens
        assert ledger.allocate("a", 3 * BLOCK_SIZE) is not None
        (stored,) = ledger.pool.take_events()
        assert isinstance(stored, BlockStored)
        assert stored.token_ids == tokens


def test_a_hit_ends_at_a_block_boundary_of_every_group() -> None:
    ledger = BlockLedger(64, [FullAttention(8), FullAttention(4)])
    names = [bytes([at + 1] * 8) for at in range(4)]
    ledger.add("a", names)
    assert ledger.allocate("a", 16) is not None
    last_of_four = ledger.block_table("a", 1)[3:]
    ledger.free("a")
    ledger.add("b", names)
    assert ledger.lookup("b", 100).num_tokens == 16
    ledger.pool.evict(last_of_four)
    # Three small blocks are cached, but a hit of them would end inside a large block.
    hit = ledger.lookup("b", 100)
    assert (hit.num_tokens, [len(blocks) for blocks in hit.blocks]) == (8, [1, 2])
