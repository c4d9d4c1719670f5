"""`OffloadScheduler`: what it stores, serves, evicts and forgets, over memories that hold names.

A prompt is a string, one letter a block, so prompts that begin alike share blocks. A block's
content is the prompt up to and with its letter: whatever is lost, stale or swapped shows.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow import (
    BlockLedger,
    BlockPool,
    BlockRemoved,
    BlockStored,
    CacheStoreCommitted,
    ChunkedLocal,
    ConfigError,
    FullAttention,
    InvalidBlock,
    Job,
    JobEnd,
    OffloadScheduler,
    SlidingWindow,
    StateError,
    StateSpace,
    TransferCompleted,
    TransferInitiated,
    hash_tokens,
)

BLOCK_SIZE = 4
GROUP = FullAttention(BLOCK_SIZE)
ALL = 2**40


def hashes(prompt: str) -> list[bytes]:
    return hash_tokens([ord(letter) for letter in prompt for _ in range(BLOCK_SIZE)], BLOCK_SIZE)


def prefixes(prompt: str) -> list[str]:
    return [prompt[: end + 1] for end in range(len(prompt))]


class Rig:
    """A scheduler, and the two memories whose blocks its jobs copy when they end."""

    def __init__(self, num_host_blocks: int, *, events: bool = False) -> None:
        self.scheduler = OffloadScheduler(num_host_blocks, [GROUP], events=events)
        self.host: dict[int, str] = {}
        self.device: dict[int, str] = {}
        self.prompts: dict[str, str] = {}
        self.tables: dict[str, list[int]] = {}
        self.num_told: dict[str, int] = {}
        self.stores: dict[int, Job] = {}
        self.loads: dict[int, tuple[Job, list[str]]] = {}

    def add(self, id: str, prompt: str) -> None:
        self.scheduler.add(id, hashes(prompt))
        self.prompts[id], self.tables[id], self.num_told[id] = prompt, [], 0

    def compute(self, id: str, num_blocks: int) -> Job | None:
        """Steps of this request filled its table up to `num_blocks`."""
        table = self.tables[id]
        table += [len(self.device) + 1 + at for at in range(num_blocks - len(table))]
        new = table[self.num_told[id] :]
        self.num_told[id] = len(table)
        self.device |= dict(zip(table, prefixes(self.prompts[id]), strict=False))
        # A block more is half full by then.
        num_tokens = num_blocks * BLOCK_SIZE + BLOCK_SIZE // 2
        job = self.scheduler.store([id], [num_tokens], new, [0, len(new)])
        if job is not None:
            assert len(job) == len(job.block_ids) == len(job.host_slots) > 0
            self.stores[job.job_id] = job
        self.scheduler.check()
        return job

    def load(self, id: str, num_blocks: int, num_local: int = 0) -> Job:
        """Accepts that many blocks of what the lookup of this request found."""
        new = [len(self.device) + 1 + at for at in range(num_blocks)]
        job = self.scheduler.load(id, num_blocks * BLOCK_SIZE, [new])
        assert job.block_ids.tolist() == new
        self.device |= dict.fromkeys(new, "being loaded")
        self.tables[id] += new
        wanted = prefixes(self.prompts[id])[num_local : num_local + num_blocks]
        assert [self.host[slot] for slot in job.host_slots] == wanted
        self.loads[job.job_id] = job, wanted
        self.scheduler.check()
        return job

    def end(self, job: Job, *, ok: bool = True) -> JobEnd:
        store = self.stores.pop(job.job_id, None)
        for id, slot in zip(job.block_ids.tolist(), job.host_slots.tolist(), strict=True):
            if store is None:
                self.device[id] = self.host[slot] if ok else "torn"
            else:
                self.host[slot] = self.device[id] if ok else "torn"
        if store is None:
            _, wanted = self.loads.pop(job.job_id)
            assert not ok or [self.device[id] for id in job.block_ids] == wanted
        end = some(self.scheduler.complete(job.job_id, ok=ok))
        assert end.block_ids.tolist() == job.block_ids.tolist()
        self.scheduler.check()
        return end

    def keep(self, prompt: str, id: str = "kept") -> None:
        """A request with this prompt came and went, and its stores have landed."""
        self.add(id, prompt)
        job = self.compute(id, len(prompt))
        if job is not None:
            assert self.end(job).ok
        self.scheduler.finish(id)

    def found(self, prompt: str, num_local: int = 0) -> int | None:
        """Blocks that the host could serve; leaves pins and ranks as they are."""
        probe = f"probe {len(self.prompts)}"
        self.add(probe, prompt)
        num_tokens = self.scheduler.lookup(probe, num_local * BLOCK_SIZE, ALL)
        self.scheduler.release(probe)
        return None if num_tokens is None else num_tokens // BLOCK_SIZE

    def stat(self, name: str) -> int:
        return self.scheduler.stats()[name]


T = TypeVar("T", Job, JobEnd)


def some(made: T | None) -> T:
    assert made is not None
    return made


def test_what_was_stored_comes_back() -> None:
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
    # Of the second request only what the host does not have is stored.
    rest = some(rig.compute("second", 4))
    assert rest.block_ids.tolist() == rig.tables["second"][3:]


@pytest.mark.parametrize(("num_local", "max_tokens"), [(0, 9), (1, 12), (2, ALL), (4, ALL), (3, 5)])
def test_a_lookup_begins_after_the_local_hit_and_ends_at_max_tokens(
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
    ("num_hashed", "num_told", "num_computed"), [(2, 5, 5), (5, 2, 5), (5, 5, 2), (5, 5, 0)]
)
def test_only_what_is_hashed_allocated_and_computed_is_stored(
    num_hashed: int, num_told: int, num_computed: int
) -> None:
    scheduler = OffloadScheduler(8, [GROUP])
    scheduler.add("a", hashes("abcde"[:num_hashed]))
    table = list(range(11, 11 + num_told))
    # One token short of a block more.
    num_tokens = num_computed * BLOCK_SIZE + BLOCK_SIZE - 1
    job = scheduler.store(["a"], [num_tokens], table, [0, num_told])
    num_due = min(num_hashed, num_told, num_computed)
    assert (job.block_ids.tolist() if job else []) == table[:num_due]
    # Asked again, and rewound: nothing is stored twice.
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


def test_a_job_may_be_named_by_any_integer() -> None:
    scheduler = OffloadScheduler(2, [GROUP])
    scheduler.add("a", hashes("a"))
    job = some(scheduler.store(["a"], [BLOCK_SIZE], [1], [0, 1]))
    assert some(scheduler.complete(np.int64(job.job_id))).ok  # type: ignore[arg-type]


def test_a_key_in_flight_is_not_stored_again_and_is_a_miss() -> None:
    rig = Rig(8)
    for id in ("first", "second"):
        rig.add(id, "ab")
    job = some(rig.compute("first", 2))
    assert rig.compute("second", 2) is None
    assert rig.found("ab") == 0
    rig.end(job)
    assert rig.found("ab") == 2


def test_what_a_lookup_pins_is_not_evicted() -> None:
    rig = Rig(num_host_blocks=4)
    rig.keep("abcd")
    rig.add("holder", "abcd")
    rig.scheduler.lookup("holder", BLOCK_SIZE, ALL)
    # Three are pinned, and their root may not go before them.
    rig.add("other", "wxyz")
    assert rig.compute("other", 4) is None
    rig.end(rig.load("holder", 3, num_local=1))
    assert rig.found("abcd") == 4
    # The pins are gone with the load, and the others' blocks are due at its next step.
    assert len(some(rig.compute("other", 4))) == 4
    assert rig.stat("evicted_blocks") == 4


def test_what_a_load_does_not_accept_is_unpinned() -> None:
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
def test_a_lookup_lasts_until_it_is_given_back(how: str) -> None:
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


def test_a_lookup_is_pending_while_another_loads_the_same() -> None:
    rig = Rig(8)
    rig.keep("abcd")
    rig.add("first", "abcd")
    rig.scheduler.lookup("first", BLOCK_SIZE, 3 * BLOCK_SIZE)
    load = rig.load("first", 2, num_local=1)
    assert rig.found("abcx") is None
    # Where nothing that is being loaded is needed, nothing is pending.
    assert rig.found("abcd", num_local=3) == 1
    rig.add("short", "abcd")
    assert rig.scheduler.lookup("short", 0, 2 * BLOCK_SIZE - 1) == BLOCK_SIZE
    # Pending pins nothing and gives back what was found before.
    assert rig.scheduler.lookup("short", 0, ALL) is None
    with pytest.raises(StateError, match="lookup"):
        rig.scheduler.load("short", BLOCK_SIZE, [[99]])
    rig.end(load)
    assert rig.found("abcx") == 3


def test_a_request_may_finish_while_its_store_is_under_way() -> None:
    rig = Rig(8)
    rig.add("a", "abc")
    job = some(rig.compute("a", 3))
    rig.scheduler.finish("a")
    assert rig.stat("dropped_blocks") == 0
    assert rig.end(job).ok
    assert rig.found("abc") == 3


def test_a_request_may_finish_while_its_load_is_under_way() -> None:
    rig = Rig(num_host_blocks=3)
    rig.keep("abc")
    rig.add("a", "abc")
    rig.scheduler.lookup("a", 0, ALL)
    load = rig.load("a", 3)
    rig.scheduler.finish("a")
    # The copy still reads the slots.
    rig.add("other", "xyz")
    assert rig.compute("other", 3) is None
    assert rig.end(load).ok
    assert len(some(rig.compute("other", 3))) == 3


def test_a_failed_store_gives_its_slots_back() -> None:
    rig = Rig(num_host_blocks=3)
    rig.add("a", "abc")
    job = some(rig.compute("a", 2))
    assert not rig.end(job, ok=False).ok
    assert rig.found("abc") == 0
    assert {name: num for name, num in rig.scheduler.stats().items() if num} == {
        "failed_stores": 1,
        "capacity_tokens": 3 * BLOCK_SIZE,
    }
    # The next step that confirms more of this request stores it from its start.
    rig.end(some(rig.compute("a", 3)))
    assert rig.found("abc") == 3


def test_a_failed_store_takes_what_hangs_on_it_along() -> None:
    rig = Rig(num_host_blocks=4)
    rig.add("a", "abcd")
    root, rest = some(rig.compute("a", 1)), some(rig.compute("a", 3))
    rig.end(root, ok=False)
    rig.end(rest)
    assert (rig.found("abcd"), rig.scheduler.num_resident) == (0, 0)
    rig.end(some(rig.compute("a", 4)))
    assert rig.found("abcd") == 4


def test_a_failed_load_keeps_the_host_copy_and_no_pin() -> None:
    rig = Rig(num_host_blocks=2)
    rig.keep("ab")
    rig.add("a", "ab")
    rig.scheduler.lookup("a", 0, ALL)
    assert not rig.end(rig.load("a", 2), ok=False).ok
    assert (rig.stat("failed_loads"), rig.stat("loaded_blocks")) == (1, 0)
    assert rig.found("ab") == 2
    rig.keep("yz", id="other")
    assert (rig.found("ab"), rig.found("yz")) == (0, 2)


def test_a_reset_fences_the_store_that_it_overtakes() -> None:
    rig = Rig(num_host_blocks=4)
    rig.add("a", "ab")
    late = some(rig.compute("a", 2))
    rig.scheduler.reset()
    rig.scheduler.check()
    # The copy still writes its slots: nobody else gets them.
    rig.add("b", "ax")
    rig.add("c", "yz")
    store = some(rig.compute("b", 2))
    assert not set(store.host_slots) & set(late.host_slots)
    assert rig.compute("c", 2) is None
    rig.end(store)
    assert not rig.end(late).ok
    assert (rig.found("ab"), rig.found("ax")) == (1, 2)
    assert len(some(rig.compute("c", 2))) == 2


def test_a_reset_fails_the_load_that_it_overtakes() -> None:
    rig = Rig(num_host_blocks=2)
    rig.keep("ab")
    rig.add("a", "ab")
    rig.scheduler.lookup("a", 0, ALL)
    load = rig.load("a", 2)
    rig.scheduler.reset()
    assert rig.found("ab") == 0
    # The copy still reads its slots.
    rig.add("other", "yz")
    assert rig.compute("other", 2) is None
    assert not rig.end(load).ok
    assert (rig.stat("failed_loads"), rig.stat("loaded_blocks")) == (1, 0)
    assert len(some(rig.compute("other", 2))) == 2


def test_a_reset_takes_back_what_lookups_found() -> None:
    rig = Rig(2)
    rig.keep("ab")
    rig.add("a", "ab")
    assert rig.scheduler.lookup("a", 0, ALL) == 2 * BLOCK_SIZE
    rig.scheduler.reset()
    with pytest.raises(StateError, match="lookup"):
        rig.scheduler.load("a", BLOCK_SIZE, [[1]])
    assert rig.scheduler.num_resident == 0
    # And the live request's blocks are due again.
    assert len(some(rig.compute("a", 2))) == 2


def test_a_prefix_is_kept_of_what_is_too_large() -> None:
    num_host_blocks, prompt = 3, "abcdefgh"
    rig = Rig(num_host_blocks)
    rig.keep(prompt)
    assert rig.found(prompt) == num_host_blocks
    assert rig.stat("dropped_blocks") == len(prompt) - num_host_blocks
    assert rig.stat("stored_blocks") == num_host_blocks
    # What came before makes room first, and then no more than there is.
    rig.keep("stuvwxyz", id="other")
    assert (rig.found(prompt), rig.found("stuvwxyz")) == (0, num_host_blocks)
    assert rig.stat("evicted_blocks") == num_host_blocks


@pytest.mark.parametrize("use", ["load", "finish", "a lookup that is given back", "nothing"])
def test_the_least_recently_used_chain_goes_first_and_its_tail_first(use: str) -> None:
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
    elif use == "a lookup that is given back":
        assert rig.found("aaa") == 3
    lost, kept = ("bbb", "aaa") if use in ("load", "finish") else ("aaa", "bbb")
    for num_gone in (1, 2):
        rig.keep("cc"[:num_gone], id="new")
        assert (rig.found(lost), rig.found(kept)) == (3 - num_gone, 3)


def test_a_store_makes_the_chain_that_it_extends_recent() -> None:
    rig = Rig(num_host_blocks=5)
    for prompt in ("aa", "bb", "aax", "c"):
        rig.keep(prompt, id=prompt)
    assert (rig.found("aax"), rig.found("bb"), rig.found("c")) == (3, 1, 1)


def test_a_root_does_not_go_before_its_child() -> None:
    rig = Rig(num_host_blocks=2)
    rig.keep("ab")
    rig.add("holder", "ab")
    # Holds the child alone: its root is neither pinned nor a leaf.
    assert rig.scheduler.lookup("holder", BLOCK_SIZE, ALL) == BLOCK_SIZE
    rig.keep("z", id="other")
    assert (rig.found("z"), rig.found("ab")) == (0, 2)
    rig.scheduler.release("holder")
    rig.keep("z", id="other")
    assert (rig.found("z"), rig.found("ab")) == (1, 1)


def test_what_was_evicted_meanwhile_is_stored_again_with_its_prefix() -> None:
    rig = Rig(num_host_blocks=4)
    rig.add("long", "abcd")
    rig.end(some(rig.compute("long", 2)))
    rig.keep("wxyz", id="other")
    assert rig.found("abcd") == 0
    rig.end(some(rig.compute("long", 4)))
    assert rig.found("abcd") == 4


def test_preempted_and_resumed_nothing_is_stored_twice() -> None:
    rig = Rig(8)
    rig.add("a", "abcd")
    job = some(rig.compute("a", 2))
    rig.scheduler.finish("a")
    rig.add("a", "abcd")
    # In the middle of its prefill, and with its store still under way.
    rest = some(rig.compute("a", 4))
    assert len(rest) == 2
    rig.end(rest)
    rig.end(job)
    assert rig.found("abcd") == 4
    assert rig.stat("stored_blocks") == 4


def test_events_speak_of_the_host() -> None:
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
    # Room was made for the second prompt by the tail of the first.
    assert set(hashes("ab")) in seen
    assert {hashes("ab")[0], *hashes("yz")} in seen
    assert findable == set()
    assert rig.scheduler.take_events() == []


def test_stored_events_name_parent_and_size() -> None:
    rig = Rig(8, events=True)
    rig.add("a", "abcd")
    for num_blocks in (1, 4):
        rig.end(some(rig.compute("a", num_blocks)))
    events = rig.scheduler.take_events()
    told = [event for event in events if isinstance(event, BlockStored)]
    parents: list[bytes | None] = []
    for event in told:
        parents += [event.parent_block_hash, *event.block_hashes[:-1]]
    assert parents == [None, *hashes("abcd")[:-1]]
    assert {(event.block_size, event.group) for event in told} == {(BLOCK_SIZE, 0)}


def test_without_events_none_are_kept() -> None:
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
def test_no_slot_is_lost_and_none_is_out_of_reach(
    num_host_blocks: int, ops: list[tuple[str, str | int, int]]
) -> None:
    rig = Rig(num_host_blocks)
    live: list[str] = []
    jobs: list[Job] = []
    used: set[str] = set()

    def check() -> None:
        found = {prompt: rig.found(prompt) for prompt in used}
        # A block whose parent's store is still under way is resident, and found when that ends.
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
    # Every slot can be had again.
    rig.keep("z" * num_host_blocks, id="last")
    assert rig.found("z" * num_host_blocks) == rig.scheduler.num_resident == num_host_blocks
    assert rig.stat("storing_blocks") == rig.stat("jobs_in_flight") == 0


def test_a_job_ends_when_every_rank_has_reported_it_and_fails_if_any_has() -> None:
    scheduler = OffloadScheduler(8, [GROUP], world_size=3)
    for id, ok in (("well", True), ("badly", False)):
        scheduler.add(id, hashes(id[0]))
        job = some(scheduler.store([id], [BLOCK_SIZE], [1], [0, 1]))
        assert scheduler.complete(job.job_id, rank=2) is None
        assert scheduler.complete(job.job_id, rank=0, ok=ok) is None
        with pytest.raises(StateError, match="rank 0 has reported"):
            scheduler.complete(job.job_id, rank=0)
        with pytest.raises(ConfigError, match="rank 3 of 3"):
            scheduler.complete(job.job_id, rank=3)
        assert scheduler.num_resident == (0 if ok else 1)
        end = some(scheduler.complete(job.job_id, rank=1))
        assert (end.ok, end.late, end.block_ids.tolist()) == (ok, False, [1])
    assert scheduler.num_resident == 1
    assert scheduler.stats()["failed_stores"] == 1


def test_a_late_load_fails_once_and_keeps_its_blocks_until_it_has_ended() -> None:
    rig = Rig(4)
    rig.keep("ab")
    scheduler = rig.scheduler
    scheduler.add("late", hashes("abc"))
    assert scheduler.lookup("late", 0, ALL) == 2 * BLOCK_SIZE
    job = scheduler.load("late", 2 * BLOCK_SIZE, [[7, 8]], deadline=10.0)
    assert scheduler.expire(10.0) == []
    assert scheduler.expire(10.5) == [job.job_id]
    assert scheduler.expire(99.0) == [], "told once"
    stats = scheduler.stats()
    assert (stats["jobs_in_flight"], stats["quarantined_jobs"]) == (0, 1)
    assert (stats["late_jobs"], stats["quarantined_blocks"]) == (1, 2)
    # No lookup waits for it, and the slots that it reads stay: there is no room for others.
    scheduler.add("other", hashes("ab"))
    assert scheduler.lookup("other", 0, ALL) == 2 * BLOCK_SIZE
    scheduler.release("other")
    scheduler.add("big", hashes("wxyz"))
    store = some(scheduler.store(["big"], [4 * BLOCK_SIZE], [1, 2, 3, 4], [0, 4]))
    assert len(store) == 2
    end = some(scheduler.complete(job.job_id))
    assert (end.ok, end.late, end.block_ids.tolist()) == (False, True, [7, 8])
    assert scheduler.stats()["quarantined_jobs"] == 0
    scheduler.check()


def test_a_late_store_never_becomes_visible_and_its_keys_can_be_stored_again() -> None:
    scheduler = OffloadScheduler(4, [GROUP])
    scheduler.add("first", hashes("ab"))
    late = some(scheduler.store(["first"], [2 * BLOCK_SIZE], [1, 2], [0, 2], deadline=1.0))
    assert scheduler.expire(2.0) == [late.job_id]
    scheduler.add("second", hashes("ab"))
    again = some(scheduler.store(["second"], [2 * BLOCK_SIZE], [3, 4], [0, 2]))
    assert set(again.host_slots.tolist()).isdisjoint(late.host_slots.tolist())
    assert some(scheduler.complete(again.job_id)).ok
    assert not some(scheduler.complete(late.job_id)).ok
    assert (scheduler.num_resident, scheduler.stats()["stored_blocks"]) == (2, 2)
    scheduler.check()


def test_stopped_movers_end_every_job_and_late_reports_are_swallowed() -> None:
    rig = Rig(4)
    rig.keep("ab")
    scheduler = rig.scheduler
    scheduler.add("a", hashes("abc"))
    scheduler.lookup("a", 0, ALL)
    load = scheduler.load("a", 2 * BLOCK_SIZE, [[7, 8]], deadline=1.0)
    scheduler.add("b", hashes("x"))
    store = some(scheduler.store(["b"], [BLOCK_SIZE], [9], [0, 1]))
    scheduler.expire(2.0)
    ends = [(end.job_id, end.ok, end.late, end.block_ids.tolist()) for end in scheduler.end_all()]
    assert ends == [(load.job_id, False, True, [7, 8]), (store.job_id, False, False, [9])]
    assert scheduler.end_all() == []
    assert scheduler.complete(store.job_id) is None
    assert scheduler.complete(load.job_id, ok=False) is None
    with pytest.raises(StateError):
        scheduler.complete(store.job_id + 1)
    assert scheduler.num_resident == 2
    scheduler.check()


def test_a_deadline_that_is_no_time_is_refused() -> None:
    scheduler = OffloadScheduler(4, [GROUP])
    with pytest.raises(ConfigError, match="NaN"):
        scheduler.expire(float("nan"))
    with pytest.raises(ConfigError, match="NaN"):
        scheduler.store([], [], [], [0], deadline=float("nan"))


def test_ids_outside_the_device_pool_are_refused() -> None:
    scheduler = OffloadScheduler(4, [GROUP], num_device_blocks=8)
    scheduler.add("a", hashes("ab"))
    with pytest.raises(InvalidBlock, match="block 8 "):
        scheduler.store(["a"], [BLOCK_SIZE], [8], [0, 1])
    store = some(scheduler.store(["a"], [BLOCK_SIZE], [7], [0, 1]))
    scheduler.complete(store.job_id)
    scheduler.add("b", hashes("ab"))
    scheduler.lookup("b", 0, ALL)
    with pytest.raises(InvalidBlock, match="block 9 "):
        scheduler.load("b", BLOCK_SIZE, [[9]])
    assert len(scheduler.load("b", BLOCK_SIZE, [[6]])) == 1
    scheduler.check()


WINDOW = SlidingWindow(BLOCK_SIZE, 2 * BLOCK_SIZE)


def test_of_a_window_only_what_is_read_is_loaded() -> None:
    """Two blocks cover what a token that follows a full block reads of a window of two blocks."""
    scheduler = OffloadScheduler(16, [GROUP, WINDOW])
    scheduler.add("a", hashes("abcd"))
    table = [[1, 2, 3, 4], [5, 6, 7, 8]]
    store = some(scheduler.store(["a"], [4 * BLOCK_SIZE], [*table[0], *table[1]], [0, 4, 8]))
    assert store.offsets.tolist() == [0, 4, 8]
    assert store.block_ids.tolist() == [*table[0], *table[1]]
    scheduler.complete(store.job_id)
    scheduler.add("b", hashes("abcdx"))
    assert scheduler.lookup("b", 0, ALL) == 4 * BLOCK_SIZE
    for targets in ([[11, 12, 13, 14], [15, 16, 17, 18]], [[11, 12, 13, 14]]):
        with pytest.raises(ConfigError, match="group"):
            scheduler.load("b", 4 * BLOCK_SIZE, targets)
    load = scheduler.load("b", 4 * BLOCK_SIZE, [[11, 12, 13, 14], [17, 18]])
    assert load.offsets.tolist() == [0, 4, 6]
    slot_of = dict(zip(store.block_ids.tolist(), store.host_slots.tolist(), strict=True))
    assert load.host_slots.tolist() == [slot_of[id] for id in (1, 2, 3, 4, 7, 8)]
    scheduler.check()


def test_null_blocks_are_never_stored() -> None:
    scheduler = OffloadScheduler(16, [GROUP, WINDOW])
    scheduler.add("a", hashes("abcd"))
    with pytest.raises(InvalidBlock, match="null"):
        scheduler.store(["a"], [BLOCK_SIZE], [0, 5], [0, 1, 2])
    table = [1, 2, 3, 4, 0, 0, 7, 8]
    store = some(scheduler.store(["a"], [4 * BLOCK_SIZE], table, [0, 4, 8]))
    assert store.block_ids.tolist() == [1, 2, 3, 4, 7, 8]
    scheduler.check()


def test_a_prefix_is_served_as_far_as_every_group_can() -> None:
    scheduler = OffloadScheduler(16, [GROUP, WINDOW])
    scheduler.add("a", hashes("abcd"))
    # Of the window only the two first blocks came to the host.
    store = some(scheduler.store(["a"], [2 * BLOCK_SIZE], [1, 2, 5, 6], [0, 2, 4]))
    scheduler.complete(store.job_id)
    store = some(scheduler.store(["a"], [4 * BLOCK_SIZE], [3, 4, 0, 0], [0, 2, 4]))
    scheduler.complete(store.job_id)
    scheduler.add("b", hashes("abcde"))
    assert scheduler.lookup("b", 0, ALL) == 2 * BLOCK_SIZE
    # What is on the device already need not come from the host.
    assert scheduler.lookup("b", 3 * BLOCK_SIZE, ALL) == 0


class LazyRig:
    """A device pool whose blocks hold names, and a lazy scheduler beside it."""

    def __init__(self, num_device_blocks: int, num_host_blocks: int) -> None:
        self.ledger = BlockLedger(num_device_blocks, [GROUP])
        self.scheduler = OffloadScheduler(num_host_blocks, [GROUP], mode="lazy")

    def serve(self, id: str, prompt: str) -> None:
        """A request computes its prompt and leaves."""
        for part in (self.ledger, self.scheduler):
            part.add(id, hashes(prompt))
        hit = self.ledger.lookup(id, ALL)
        num_new = len(prompt) * BLOCK_SIZE - hit.num_tokens
        assert self.ledger.allocate(id, num_new, hit=hit) is not None
        table = self.ledger.block_table(id)
        assert (
            self.scheduler.store([id], [len(prompt) * BLOCK_SIZE], table, [0, len(table)]) is None
        )
        self.scheduler.finish(id)
        self.ledger.free(id)

    def store(self, num_blocks: int) -> list[int]:
        """What is stored of the next `num_blocks`; the copies land at once."""
        order = self.ledger.pool.free_order().tolist()
        job = self.scheduler.store_evictable(self.ledger.pool, num_blocks)
        assert self.ledger.pool.free_order().tolist() == order
        if job is None:
            return []
        assert some(self.scheduler.complete(job.job_id)).ok
        self.scheduler.check()
        stored: list[int] = job.block_ids.tolist()
        return stored

    def found(self, prompt: str) -> int:
        self.scheduler.add("probe", hashes(prompt))
        num_tokens = self.scheduler.lookup("probe", 0, ALL)
        self.scheduler.finish("probe")
        assert num_tokens is not None
        return num_tokens // BLOCK_SIZE


def test_lazy_stores_what_goes_first_and_no_further_than_the_horizon() -> None:
    rig = LazyRig(9, 16)
    rig.serve("first", "abcd")
    # The queue begins with the four blocks that were never used; then the prompt, its tail first.
    assert rig.ledger.pool.free_order().tolist() == [5, 6, 7, 8, 4, 3, 2, 1]
    assert rig.store(4) == []
    assert rig.store(6) == [3, 4]
    assert rig.found("abcd") == 0, "its root is still on the device alone"
    assert rig.store(6) == []
    assert rig.store(8) == [1, 2]
    assert rig.found("abcd") == 4


def test_lazy_and_eager_skip_what_the_host_has_or_is_being_given() -> None:
    scheduler = OffloadScheduler(16, [GROUP], mode="lazy")
    scheduler.add("a", hashes("ab"))
    scheduler.store(["a"], [2 * BLOCK_SIZE], [1, 2], [0, 2])
    scheduler.add("b", hashes("ab"))
    scheduler.store(["b"], [2 * BLOCK_SIZE], [3, 4], [0, 2])
    # Two blocks hold each key: one copy of each, also while the first is under way.
    first = some(scheduler.store_candidates([2, 4, 1], [hashes("ab")[at] for at in (1, 1, 0)]))
    assert first.block_ids.tolist() == [1, 2]
    assert scheduler.store_candidates([3], hashes("a")) is None
    scheduler.complete(first.job_id)
    assert scheduler.store_candidates([1, 2, 3, 4], hashes("ab") * 2) is None
    scheduler.check()


def test_lazy_stores_only_what_was_computed() -> None:
    scheduler = OffloadScheduler(16, [GROUP], mode="lazy")
    scheduler.add("a", hashes("abc"))
    scheduler.store(["a"], [2 * BLOCK_SIZE - 1], [1, 2], [0, 2])
    # Block 2 is not full, 3 was never told of, and 1 does not hold what is claimed.
    assert scheduler.store_candidates([2, 3], hashes("abc")[1:]) is None
    assert scheduler.store_candidates([1], hashes("x")) is None
    assert len(some(scheduler.store_candidates([1], hashes("a")))) == 1


def test_a_lazy_store_that_failed_is_planned_again() -> None:
    rig = LazyRig(5, 16)
    rig.serve("a", "ab")
    job = some(rig.scheduler.store_evictable(rig.ledger.pool, 4))
    assert rig.scheduler.store_evictable(rig.ledger.pool, 4) is None
    assert not some(rig.scheduler.complete(job.job_id, ok=False)).ok
    assert rig.store(4) == job.block_ids.tolist()
    rig.scheduler.reset()
    assert rig.store(4) == job.block_ids.tolist()


def test_lazy_with_slots_short_stores_what_goes_first() -> None:
    rig = LazyRig(6, 2)
    rig.serve("a", "abcd")
    assert rig.store(5) == [3, 4]


def test_lazy_never_evicts_what_is_above_a_block_that_it_stored() -> None:
    """A prompt's tail comes to the host before its root; with both there, the tail goes first."""
    rig = LazyRig(9, 4)
    rig.serve("first", "abcd")
    rig.store(8)
    rig.serve("second", "wx")
    rig.store(2)
    assert rig.found("abcd") == 4, "there was no need to go further"
    rig.store(8)
    assert (rig.found("abcd"), rig.found("wx")) == (2, 2)


def test_an_eager_scheduler_does_not_store_lazily() -> None:
    scheduler, pool = OffloadScheduler(4, [GROUP]), BlockPool(4)
    with pytest.raises(StateError, match="eager"):
        scheduler.store_evictable(pool, 4)
    with pytest.raises(StateError, match="eager"):
        scheduler.store_candidates([], [])
    with pytest.raises(ConfigError, match="1 blocks and 0 hashes"):
        scheduler.store_candidates([1], [])


@pytest.mark.parametrize("num_blocks", range(1, 8))
def test_slots_of_several_blocks_hold_whole_slots_only(num_blocks: int) -> None:
    """Three blocks a slot: what does not fill one is not stored, and is not found."""
    scheduler = OffloadScheduler(4, [GROUP], blocks_per_slot=3)
    prompt = "abcdefg"[:num_blocks]
    scheduler.add("a", hashes(prompt))
    table = list(range(1, num_blocks + 1))
    job = scheduler.store(["a"], [num_blocks * BLOCK_SIZE], table, [0, num_blocks])
    num_whole = num_blocks // 3 * 3
    if job is not None:
        assert job.block_ids.tolist() == table[:num_whole]
        places = job.host_slots.reshape(-1, 3)
        assert (places % 3 == [0, 1, 2]).all()
        assert (places // 3 == places[:, :1] // 3).all(), "side by side"
        scheduler.complete(job.job_id)
    assert scheduler.num_resident == num_whole // 3
    scheduler.add("b", hashes(prompt + "x"))
    assert scheduler.lookup("b", 0, ALL) == num_whole * BLOCK_SIZE
    scheduler.check()


def test_of_a_slot_of_several_blocks_only_what_is_missing_is_loaded() -> None:
    scheduler = OffloadScheduler(4, [GROUP], blocks_per_slot=3)
    scheduler.add("a", hashes("abcdef"))
    store = some(scheduler.store(["a"], [6 * BLOCK_SIZE], range(1, 7), [0, 6]))
    scheduler.complete(store.job_id)
    scheduler.add("b", hashes("abcdefg"))
    assert scheduler.lookup("b", BLOCK_SIZE, ALL) == 5 * BLOCK_SIZE
    load = scheduler.load("b", 3 * BLOCK_SIZE, [[11, 12, 13]])
    assert load.host_slots.tolist() == store.host_slots.tolist()[1:4]
    assert some(scheduler.complete(load.job_id)).block_ids.tolist() == [11, 12, 13]
    assert scheduler.stats()["loaded_blocks"] == 3
    assert scheduler.stats()["stored_blocks"] == 6
    scheduler.check()


def test_a_query_counts_once_however_often_a_request_asks() -> None:
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


@pytest.mark.parametrize(
    ("groups", "blocks_per_slot", "num_tokens"),
    [
        ([FullAttention(4)], 1, 40),
        ([FullAttention(4)], 3, 120),
        # 12 tokens are 3 blocks of 4 and 2 of 6: 10 slots hold that twice.
        ([FullAttention(4), SlidingWindow(6, 20)], 1, 24),
        ([FullAttention(4), FullAttention(4)], 2, 40),
    ],
)
def test_capacity_in_tokens_counts_the_blocks_of_all_groups(
    groups: list[FullAttention | SlidingWindow], blocks_per_slot: int, num_tokens: int
) -> None:
    scheduler = OffloadScheduler(10, groups, blocks_per_slot=blocks_per_slot)
    assert scheduler.stats()["capacity_tokens"] == num_tokens


def test_slots_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 blocks per slot"):
        OffloadScheduler(4, [GROUP], blocks_per_slot=0)
    with pytest.raises(ConfigError, match="2 blocks per slot in lazy mode"):
        OffloadScheduler(4, [GROUP], blocks_per_slot=2, mode="lazy")
    with pytest.raises(ConfigError, match="at most"):
        OffloadScheduler(2**30, [GROUP], blocks_per_slot=4)
    for group in (WINDOW, ChunkedLocal(BLOCK_SIZE, 8), StateSpace(BLOCK_SIZE)):
        with pytest.raises(ConfigError, match="2 blocks per slot with a group that skips"):
            OffloadScheduler(4, [GROUP, group], blocks_per_slot=2)


def test_lazy_stores_again_what_was_used_again_after_the_host_evicted_it() -> None:
    rig = LazyRig(9, 2)
    rig.serve("first", "ab")
    assert rig.store(8) == [1, 2]
    rig.serve("other", "yz")
    assert len(rig.store(8)) == 2
    assert rig.found("ab") == 0
    assert rig.store(8) == [], "no back and forth while nothing is used"
    rig.serve("again", "ab")
    assert rig.store(8) == [1, 2]
    assert rig.found("ab") == 2


def test_transfer_events_tell_of_every_job_once() -> None:
    scheduler = OffloadScheduler(4, [GROUP], events=True)
    scheduler.add("a", hashes("ab"))
    store = some(scheduler.store(["a"], [2 * BLOCK_SIZE], [1, 2], [0, 2]))
    (begun,) = scheduler.take_transfer_events()
    assert isinstance(begun, TransferInitiated)
    assert (begun.job_id, begun.direction, begun.num_blocks) == (store.job_id, "store", 2)
    scheduler.complete(store.job_id)
    committed, ended = scheduler.take_transfer_events()
    assert isinstance(committed, CacheStoreCommitted)
    assert (committed.job_id, committed.num_blocks) == (store.job_id, 2)
    assert isinstance(ended, TransferCompleted)
    assert (ended.job_id, ended.direction, ended.ok) == (store.job_id, "store", True)
    scheduler.add("b", hashes("abc"))
    scheduler.lookup("b", 0, ALL)
    load = scheduler.load("b", 2 * BLOCK_SIZE, [[3, 4]], deadline=1.0)
    assert scheduler.stats()["hit_tokens"] == 2 * BLOCK_SIZE
    scheduler.expire(2.0)
    assert len(scheduler.take_transfer_events()) == 1, "late, but not ended"
    scheduler.complete(load.job_id)
    (ended,) = scheduler.take_transfer_events()
    assert isinstance(ended, TransferCompleted)
    assert (ended.direction, ended.ok) == ("load", False)
    assert OffloadScheduler(4, [GROUP]).take_transfer_events() == []


@pytest.mark.parametrize("finished_first", [False, True])
def test_of_a_hybrid_what_goes_first_leaves_a_shorter_prefix_in_every_group(
    finished_first: bool,
) -> None:
    scheduler = OffloadScheduler(8, [GROUP, WINDOW])
    scheduler.add("old", hashes("abcd"))
    table = [1, 2, 3, 4, 5, 6, 7, 8]
    job = some(scheduler.store(["old"], [4 * BLOCK_SIZE], table, [0, 4, 8]))
    if finished_first:
        scheduler.finish("old")
    scheduler.complete(job.job_id)
    if not finished_first:
        scheduler.finish("old")
    # A block of each group: the last of each goes for it.
    scheduler.add("new", hashes("x"))
    job = some(scheduler.store(["new"], [BLOCK_SIZE], [9, 10], [0, 1, 2]))
    assert len(job) == 2
    scheduler.add("probe", hashes("abcde"))
    assert scheduler.lookup("probe", 0, ALL) == 3 * BLOCK_SIZE
    scheduler.check()
