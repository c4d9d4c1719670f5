"""`OffloadScheduler`: what it stores, serves and evicts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.accounting.offload_rig import ALL, BLOCK_SIZE, GROUP, Rig, hashes, prefixes, some

from kvstow import (
    BlockLedger,
    BlockRemoved,
    BlockStored,
    ConfigError,
    InvalidBlock,
    Job,
    KvstowError,
    OffloadScheduler,
    SlidingWindow,
    StateError,
    hash_tokens,
)


def test_stored_blocks_are_loaded_again() -> None:
    rig = Rig(num_host_blocks=8)
    rig.add("first", "abcd")
    job = some(rig.compute("first", 4))
    assert job.block_ids.tolist() == rig.tables["first"]
    assert job.host_slots.tolist() == list(range(4))
    assert rig.found("abcd") == 0
    assert rig.end(job).ok
    rig.scheduler.finish("first")
    rig.add("second", "abcx")
    assert rig.scheduler.lookup("second", 0, ALL) == 3 * BLOCK_SIZE
    load = rig.load("second", 3)
    assert load.host_slots.tolist() == job.host_slots[:3].tolist()
    assert (load.job_id, job.job_id) == (2, 1)
    assert rig.end(load).ok
    assert {name: num for name, num in rig.scheduler.stats().items() if num} == {
        "stored_blocks": 4,
        "loaded_blocks": 3,
        "query_tokens": 4 * BLOCK_SIZE,
        "hit_tokens": 3 * BLOCK_SIZE,
        "resident_blocks": 4,
        "capacity_tokens": 8 * BLOCK_SIZE,
    }
    # Of the second request, only the block that the host lacks is stored.
    rest = some(rig.compute("second", 4))
    assert rest.block_ids.tolist() == rig.tables["second"][3:]


@pytest.mark.parametrize(("num_local", "max_tokens"), [(0, 9), (1, 12), (2, ALL), (4, ALL), (3, 5)])
def test_lookup_begins_after_the_local_hit_and_ends_at_max_tokens(
    num_local: int, max_tokens: int
) -> None:
    rig = Rig(8)
    rig.keep("abcd")
    rig.add("next", "abcde")
    found = rig.scheduler.lookup("next", num_local * BLOCK_SIZE, max_tokens)
    end = min(4, max_tokens // BLOCK_SIZE)
    assert found == max(0, end - num_local) * BLOCK_SIZE
    if found:
        rig.load("next", found // BLOCK_SIZE, num_local)


@pytest.mark.parametrize(
    ("num_hashed", "num_reported", "num_computed"), [(2, 5, 5), (5, 2, 5), (5, 5, 2), (5, 5, 0)]
)
def test_only_hashed_allocated_and_computed_blocks_are_stored(
    num_hashed: int, num_reported: int, num_computed: int
) -> None:
    scheduler = OffloadScheduler(8, [GROUP])
    scheduler.add("a", hashes("abcde"[:num_hashed]))
    table = list(range(11, 11 + num_reported))
    # One token short of the next block.
    num_tokens = num_computed * BLOCK_SIZE + BLOCK_SIZE - 1
    job = scheduler.store(["a"], [num_tokens], table, [0, num_reported])
    num_due = min(num_hashed, num_reported, num_computed)
    assert (job.block_ids.tolist() if job else []) == table[:num_due]
    # Named again, and rewound: no block is stored twice.
    for num_blocks in (num_due, num_due // 2):
        assert scheduler.store(["a"], [num_blocks * BLOCK_SIZE], [], [0, 0]) is None
    scheduler.check()


def test_chunks_and_generated_blocks_are_stored_once_each() -> None:
    rig = Rig(8)
    rig.add("a", "abcde")
    jobs = [rig.compute("a", num_blocks) for num_blocks in (0, 2, 2, 3, 5)]
    assert [len(job) if job else 0 for job in jobs] == [0, 2, 0, 1, 2]
    rig.scheduler.extend("a", hashes("abcdefg")[5:])
    rig.prompts["a"] = "abcdefg"
    jobs.append(rig.compute("a", 7))
    # In any order.
    for job in reversed(jobs):
        if job is not None:
            rig.end(job)
    assert rig.found("abcdefg") == 7
    assert rig.stat("stored_blocks") == rig.scheduler.num_resident == 7


def test_one_job_stores_for_many_requests_and_each_key_once() -> None:
    scheduler = OffloadScheduler(8, [GROUP])
    ledger = BlockLedger(20, [GROUP])
    prompts = {"a": "xya", "b": "xyb", "c": "z"}
    for id, prompt in prompts.items():
        ledger.add(id, hashes(prompt))
        scheduler.add(id, hashes(prompt))
    computed = [len(prompt) * BLOCK_SIZE for prompt in prompts.values()]
    step = ledger.allocate_step(list(prompts), computed)
    job = some(scheduler.store(list(prompts), np.array(computed), step.ids, step.offsets))
    own = [*ledger.block_table("a"), ledger.block_table("b")[2], *ledger.block_table("c")]
    assert job.block_ids.tolist() == own
    scheduler.complete(job.job_id)
    assert scheduler.num_resident == len({name for p in prompts.values() for name in prefixes(p)})


def test_key_in_flight_is_not_stored_again_and_is_a_miss() -> None:
    rig = Rig(8)
    for id in ("first", "second"):
        rig.add(id, "ab")
    job = some(rig.compute("first", 2))
    assert rig.compute("second", 2) is None
    assert rig.found("ab") == 0
    rig.end(job)
    assert rig.found("ab") == 2


def test_slots_that_a_lookup_pins_are_not_evicted() -> None:
    rig = Rig(num_host_blocks=4)
    rig.keep("abcd")
    rig.add("holder", "abcd")
    rig.scheduler.lookup("holder", BLOCK_SIZE, ALL)
    # Three slots are pinned, and their root must not be evicted before them.
    rig.add("other", "wxyz")
    assert rig.compute("other", 4) is None
    rig.end(rig.load("holder", 3, num_local=1))
    assert rig.found("abcd") == 4
    # The load has ended the pins, and the other request's blocks are due at its next step.
    assert len(some(rig.compute("other", 4))) == 4
    assert rig.stat("evicted_blocks") == 4


def test_load_unpins_slots_that_it_does_not_accept() -> None:
    rig = Rig(num_host_blocks=4)
    rig.keep("abcd")
    rig.add("a", "abcd")
    assert rig.scheduler.lookup("a", 0, ALL) == 4 * BLOCK_SIZE
    load = rig.load("a", 1)
    rig.add("other", "wxyz")
    assert len(some(rig.compute("other", 4))) == 3
    with pytest.raises(StateError, match="lookup"):
        rig.scheduler.load("a", BLOCK_SIZE, [[99]])
    assert rig.end(load).ok
    assert rig.found("abcd") == 1


@pytest.mark.parametrize("how", ["release", "finish", "lookup"])
def test_lookup_holds_its_slots_until_it_is_released(how: str) -> None:
    rig = Rig(num_host_blocks=2)
    rig.keep("ab")
    rig.add("a", "ab")
    assert rig.scheduler.lookup("a", 0, ALL) == 2 * BLOCK_SIZE
    rig.add("other", "yz")
    assert rig.compute("other", 2) is None
    if how == "lookup":
        assert rig.scheduler.lookup("a", 0, 0) == 0
    else:
        getattr(rig.scheduler, how)("a")
    rig.scheduler.check()
    assert len(some(rig.compute("other", 2))) == 2


def test_lookup_is_pending_while_another_request_loads_the_blocks() -> None:
    rig = Rig(8)
    rig.keep("abcd")
    rig.add("first", "abcd")
    rig.scheduler.lookup("first", BLOCK_SIZE, 3 * BLOCK_SIZE)
    load = rig.load("first", 2, num_local=1)
    assert rig.found("abcx") is None
    # A lookup that needs none of the blocks in the load is not pending.
    assert rig.found("abcd", num_local=3) == 1
    rig.add("short", "abcd")
    assert rig.scheduler.lookup("short", 0, 2 * BLOCK_SIZE - 1) == BLOCK_SIZE
    # A pending lookup pins nothing and releases what it held before.
    assert rig.scheduler.lookup("short", 0, ALL) is None
    with pytest.raises(StateError, match="lookup"):
        rig.scheduler.load("short", BLOCK_SIZE, [[99]])
    rig.end(load)
    assert rig.found("abcx") == 3


def test_prefix_of_a_too_large_prompt_is_stored() -> None:
    num_host_blocks, prompt = 3, "abcdefgh"
    rig = Rig(num_host_blocks)
    rig.keep(prompt)
    assert rig.found(prompt) == num_host_blocks
    assert rig.stat("dropped_blocks") == len(prompt) - num_host_blocks
    assert rig.stat("stored_blocks") == num_host_blocks
    # The earlier prompt is evicted for room, and then there is no more.
    rig.keep("stuvwxyz", id="other")
    assert (rig.found(prompt), rig.found("stuvwxyz")) == (0, num_host_blocks)
    assert rig.stat("evicted_blocks") == num_host_blocks


@pytest.mark.parametrize("use", ["load", "finish", "a lookup that is released", "nothing"])
def test_least_recently_used_chain_is_evicted_first_from_its_tail(use: str) -> None:
    rig = Rig(num_host_blocks=6)
    rig.add("live", "aaa")
    rig.end(some(rig.compute("live", 3)))
    rig.keep("bbb")
    if use == "load":
        rig.add("user", "aaa")
        rig.scheduler.lookup("user", 2 * BLOCK_SIZE, ALL)
        rig.end(rig.load("user", 1, num_local=2))
    elif use == "finish":
        rig.scheduler.finish("live")
    elif use == "a lookup that is released":
        assert rig.found("aaa") == 3
    lost, kept = ("bbb", "aaa") if use in ("load", "finish") else ("aaa", "bbb")
    for num_gone in (1, 2):
        rig.keep("cc"[:num_gone], id="new")
        assert (rig.found(lost), rig.found(kept)) == (3 - num_gone, 3)


def test_store_makes_the_chain_that_it_extends_recent() -> None:
    rig = Rig(num_host_blocks=5)
    for prompt in ("aa", "bb", "aax", "c"):
        rig.keep(prompt, id=prompt)
    assert (rig.found("aax"), rig.found("bb"), rig.found("c")) == (3, 1, 1)


def test_root_is_not_evicted_before_its_child() -> None:
    rig = Rig(num_host_blocks=2)
    rig.keep("ab")
    rig.add("holder", "ab")
    # The lookup holds only the child: its root is neither pinned nor a leaf.
    assert rig.scheduler.lookup("holder", BLOCK_SIZE, ALL) == BLOCK_SIZE
    rig.keep("z", id="other")
    assert (rig.found("z"), rig.found("ab")) == (0, 2)
    rig.scheduler.release("holder")
    rig.keep("z", id="other")
    assert (rig.found("z"), rig.found("ab")) == (1, 1)


def test_evicted_blocks_are_stored_again_with_their_prefix() -> None:
    rig = Rig(num_host_blocks=4)
    rig.add("long", "abcd")
    rig.end(some(rig.compute("long", 2)))
    rig.keep("wxyz", id="other")
    assert rig.found("abcd") == 0
    rig.end(some(rig.compute("long", 4)))
    assert rig.found("abcd") == 4


def test_preempted_and_resumed_request_stores_no_block_twice() -> None:
    rig = Rig(8)
    rig.add("a", "abcd")
    job = some(rig.compute("a", 2))
    rig.scheduler.finish("a")
    rig.add("a", "abcd")
    # In the middle of its prefill, with its store still in flight.
    rest = some(rig.compute("a", 4))
    assert len(rest) == 2
    rig.end(rest)
    rig.end(job)
    assert rig.found("abcd") == 4
    assert rig.stat("stored_blocks") == 4


def test_events_name_the_host() -> None:
    rig = Rig(num_host_blocks=3, events=True)
    rig.keep("ab")
    rig.keep("yz", id="other")
    rig.scheduler.reset()
    events = rig.scheduler.take_events()
    assert {event.medium for event in events} == {"CPU"}
    findable: set[bytes] = set()
    seen: list[set[bytes]] = []
    for event in events:
        if isinstance(event, BlockStored):
            assert not findable & set(event.block_hashes)
            findable |= set(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            assert findable >= set(event.block_hashes)
            findable -= set(event.block_hashes)
        else:
            findable.clear()
        seen.append(set(findable))
    # The tail of the first prompt was evicted for the second.
    assert set(hashes("ab")) in seen
    assert {hashes("ab")[0], *hashes("yz")} in seen
    assert findable == set()
    assert rig.scheduler.take_events() == []


def test_stored_events_name_parent_and_block_size() -> None:
    rig = Rig(8, events=True)
    rig.add("a", "abcd")
    for num_blocks in (1, 4):
        rig.end(some(rig.compute("a", num_blocks)))
    events = rig.scheduler.take_events()
    reported = [event for event in events if isinstance(event, BlockStored)]
    parents: list[bytes | None] = []
    for event in reported:
        parents += [event.parent_block_hash, *event.block_hashes[:-1]]
    assert parents == [None, *hashes("abcd")[:-1]]
    assert {(event.block_size, event.group) for event in reported} == {(BLOCK_SIZE, 0)}


def test_no_events_are_recorded_by_default() -> None:
    rig = Rig(4)
    rig.keep("ab")
    assert rig.scheduler.take_events() == []


prompts = st.text("ab", min_size=1, max_size=5)
moves = st.one_of(
    st.tuples(st.just("come"), prompts, st.integers(1, 5)),
    st.tuples(st.just("grow"), st.integers(0, 3), st.integers(1, 3)),
    st.tuples(st.just("end"), st.integers(0, 3), st.booleans() | st.just(True)),
    st.tuples(st.just("go"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("reset"), st.just(0), st.just(0)),
)


@settings(max_examples=300)
@given(num_host_blocks=st.integers(1, 8), ops=st.lists(moves, max_size=40))
def test_no_slot_is_lost_or_unreachable(
    num_host_blocks: int, ops: list[tuple[str, str | int, int]]
) -> None:
    rig = Rig(num_host_blocks)
    live: list[str] = []
    jobs: list[Job] = []
    used: set[str] = set()

    def check() -> None:
        found = {prompt: rig.found(prompt) for prompt in used}
        # A block whose parent is still in a store is resident, but found only when that ends.
        if None not in found.values() and not rig.stat("storing_blocks"):
            reached = {
                prompt[: end + 1] for prompt, num in found.items() for end in range(num or 0)
            }
            assert len(reached) == rig.scheduler.num_resident

    for number, (name, which, num) in enumerate(ops):
        if isinstance(which, str):
            id = f"request {number}"
            rig.add(id, which)
            used.add(which)
            live.append(id)
            found = rig.scheduler.lookup(id, 0, ALL)
            if found:
                jobs.append(rig.load(id, min(num, found // BLOCK_SIZE)))
        elif name == "grow" and live:
            id = live[which % len(live)]
            end = min(len(rig.prompts[id]), len(rig.tables[id]) + num)
            job = rig.compute(id, end)
            jobs += [job] if job else []
        elif name == "end" and jobs:
            rig.end(jobs.pop(which % len(jobs)), ok=bool(num))
        elif name == "go" and live:
            rig.scheduler.finish(live.pop(which % len(live)))
        elif name == "reset":
            rig.scheduler.reset()
        check()
    for job in jobs:
        rig.end(job)
    check()
    for id in live:
        rig.scheduler.finish(id)
    # Every slot can be used again.
    rig.keep("z" * num_host_blocks, id="last")
    assert rig.found("z" * num_host_blocks) == rig.scheduler.num_resident == num_host_blocks
    assert rig.stat("storing_blocks") == rig.stat("jobs_in_flight") == 0


def test_query_counts_once_however_often_a_request_asks() -> None:
    rig = Rig(num_host_blocks=8)
    rig.keep("ab")
    rig.add("loads", "abc")
    rig.scheduler.lookup("loads", 0, ALL)
    loads = rig.load("loads", 2)
    assert rig.stat("query_tokens") == 3 * BLOCK_SIZE
    rig.add("waits", "wxyz")
    for num_local in 0, 2, 1:
        rig.scheduler.lookup("waits", num_local * BLOCK_SIZE, 4 * BLOCK_SIZE - 1)
    assert rig.stat("query_tokens") == 3 * BLOCK_SIZE, "it still waits"
    for num_blocks in 2, 3:
        rig.compute("waits", num_blocks)
    # Of 4 blocks one is on the device, and of the last a token is left to compute.
    assert rig.stat("query_tokens") == (3 + 2) * BLOCK_SIZE
    rig.end(loads)


@pytest.mark.parametrize("threshold", [0, 256, 2**40])
def test_a_threshold_outside_1_to_255_is_refused(threshold: int) -> None:
    with pytest.raises(ConfigError, match=f"store_threshold is {threshold}: it must be 1 to 255"):
        OffloadScheduler(4, [GROUP], store_threshold=threshold)


def test_max_blocks_leaves_out_the_tail_of_a_chain_and_the_head_of_a_window() -> None:
    window = SlidingWindow(BLOCK_SIZE, 100 * BLOCK_SIZE)
    tier = OffloadScheduler(100, [GROUP, window])
    tier.add("a", hashes("abcdef"))
    num_tokens, ids = 6 * BLOCK_SIZE, list(range(1, 13))
    job = some(tier.store(["a"], [num_tokens], ids, [0, 6, 12], max_blocks=8))
    assert job.block_ids.tolist() == [1, 2, 3, 4, 5, 6, 11, 12]
    assert tier.stats()["throttled_blocks"] == 4
    tier.add("b", hashes("uvwxyz"))
    job = some(tier.store(["b"], [num_tokens], ids, [0, 6, 12], max_blocks=4))
    assert job.block_ids.tolist() == [1, 2, 3, 4]
    job = some(tier.store(["b"], [num_tokens], [], [0, 0, 0]))
    assert job.block_ids.tolist() == [5, 6], "blocks of a window may have left the device"
    tier.finish("b")
    assert tier.stats()["throttled_blocks"] == 4 + 6
    assert tier.stats()["dropped_blocks"] == 0
    tier.check()


def test_a_request_that_starts_over_counts_once_towards_the_threshold() -> None:
    scheduler = OffloadScheduler(8, [GROUP], store_threshold=2)
    scheduler.add("a", hashes("abc"))
    scheduler.add("b", hashes("abx"))

    def compute(id: str) -> list[int]:
        job = scheduler.store([id], [3 * BLOCK_SIZE], [1, 2, 3], [0, 3])
        return [] if job is None else job.block_ids.tolist()

    for _ in range(3):
        assert compute("a") == []
        scheduler.restart("a")
    assert compute("b") == [1, 2], "two requests have seen these"
    assert compute("a") == [], "a job is filling slots with them"
    scheduler.check()


# -- loads that report their blocks ------------------------------------------------------------


def held(scheduler: OffloadScheduler) -> None:
    """Bring a prompt of four blocks to the host, and look it up for request `b` after the first."""
    scheduler.add("a", hashes("wxyz"))
    job = some(scheduler.store(["a"], [4 * BLOCK_SIZE], [1, 2, 3, 4], [0, 4]))
    scheduler.complete(job.job_id)
    scheduler.add("b", hashes("wxyz"))
    assert scheduler.lookup("b", BLOCK_SIZE, ALL) == 3 * BLOCK_SIZE


def test_after_a_load_that_reports_its_blocks_a_store_takes_the_blocks_behind_it() -> None:
    scheduler = OffloadScheduler(8, [GROUP])
    held(scheduler)
    load = scheduler.load("b", 3 * BLOCK_SIZE, [[12, 13, 14]], local_ids=[[11]])
    assert load.block_ids.tolist() == [12, 13, 14]
    scheduler.complete(load.job_id)
    longer = hash_tokens([ord(letter) for letter in "wxyzv" for _ in range(BLOCK_SIZE)], BLOCK_SIZE)
    job = some(
        scheduler.store(["b"], [5 * BLOCK_SIZE], [15], [0, 1], new_hashes=[list(longer)[4:]])
    )
    assert job.block_ids.tolist() == [15]
    scheduler.complete(job.job_id)
    # What the tier has lost since is stored again, from the blocks that the load has reported.
    scheduler.reset()
    scheduler.add("c", hashes("wxyz"))
    again = some(scheduler.store(["b"], [5 * BLOCK_SIZE], [], [0, 0]))
    assert again.block_ids.tolist() == [11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("local_ids", "error", "says"),
    [
        ([[]], ConfigError, f"{BLOCK_SIZE} local tokens are 1 blocks of {BLOCK_SIZE}, not 0"),
        ([[11, 12]], ConfigError, f"{BLOCK_SIZE} local tokens are 1 blocks of {BLOCK_SIZE}, not 2"),
        ([[11], [11]], ConfigError, "block ids for 2 groups"),
        ([[0]], InvalidBlock, "is the null block"),
    ],
)
def test_wrong_local_blocks_are_refused_and_change_nothing(
    local_ids: list[list[int]], error: type[KvstowError], says: str
) -> None:
    scheduler = OffloadScheduler(8, [GROUP])
    held(scheduler)
    before = scheduler.stats()
    with pytest.raises(error, match=says):
        scheduler.load("b", 3 * BLOCK_SIZE, [[12, 13, 14]], local_ids=local_ids)
    assert scheduler.stats() == before
    scheduler.check()
    job = scheduler.load("b", 3 * BLOCK_SIZE, [[12, 13, 14]], local_ids=[[11]])
    scheduler.complete(job.job_id)
    assert scheduler.store(["b"], [4 * BLOCK_SIZE], [], [0, 0]) is None


def test_request_whose_load_failed_loads_into_other_blocks_only_after_a_restart() -> None:
    scheduler = OffloadScheduler(8, [GROUP])
    held(scheduler)
    failed = scheduler.load("b", 3 * BLOCK_SIZE, [[12, 13, 14]], local_ids=[[11]])
    scheduler.complete(failed.job_id, ok=False)
    assert scheduler.lookup("b", BLOCK_SIZE, ALL) == 3 * BLOCK_SIZE
    # A store would take block 12 for the tokens of block 22, and name all later blocks wrongly.
    with pytest.raises(StateError, match="has reported block 12 where the load fills block 22"):
        scheduler.load("b", 3 * BLOCK_SIZE, [[22, 23, 24]])
    scheduler.restart("b")
    assert scheduler.lookup("b", BLOCK_SIZE, ALL) == 3 * BLOCK_SIZE
    job = scheduler.load("b", 3 * BLOCK_SIZE, [[22, 23, 24]])
    scheduler.complete(job.job_id)
    longer = hash_tokens([ord(letter) for letter in "wxyzv" for _ in range(BLOCK_SIZE)], BLOCK_SIZE)
    ids, new = [11, 22, 23, 24, 25], [list(longer)[4:]]
    store = some(scheduler.store(["b"], [5 * BLOCK_SIZE], ids, [0, 5], new_hashes=new))
    assert store.block_ids.tolist() == [25]
    scheduler.check()


def test_a_load_reports_no_blocks_twice_and_none_of_a_window() -> None:
    scheduler = OffloadScheduler(8, [GROUP])
    held(scheduler)
    assert scheduler.store(["b"], [BLOCK_SIZE], [11], [0, 1]) is None  # the tier has it
    with pytest.raises(StateError, match="no block was reported before"):
        scheduler.load("b", 3 * BLOCK_SIZE, [[12, 13, 14]], local_ids=[[11]])
    scheduler.load("b", 3 * BLOCK_SIZE, [[12, 13, 14]])

    windows = OffloadScheduler(8, [SlidingWindow(BLOCK_SIZE, 2 * BLOCK_SIZE)])
    held(windows)
    with pytest.raises(StateError, match="all groups have full attention"):
        windows.load("b", 3 * BLOCK_SIZE, [[13, 14]], local_ids=[[11]])
    windows.load("b", 3 * BLOCK_SIZE, [[13, 14]])
