"""`BlockLedger` against a naive ledger over the naive pool, and what its results and events say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.accounting.model import ModelPool, Refused, flat

from kvstow import (
    AllBlocksCleared,
    BlockLedger,
    BlockStored,
    ConfigError,
    FullAttention,
    KvstowError,
    PrefixHit,
    SlidingWindow,
    SnapshotError,
    StateError,
    UnknownRequest,
)

BLOCK_SIZE = 4
MAX_BLOCKS = 28


@dataclass
class ModelHit:
    owner: ModelRequest
    names: list[bytes]
    blocks: list[list[int]]


@dataclass(eq=False)  # one request is not another of the same content
class ModelRequest:
    names: list[bytes]
    tokens: list[int]
    tables: list[list[int]]
    granted: int = 0
    published: int = 0
    hits: int = 0
    running: bool = False
    delayed: bool = False


@dataclass
class ModelLedger:
    pool: ModelPool
    num_groups: int
    block_size: int
    publish: str = "granted"
    requests: dict[str, ModelRequest] = field(default_factory=dict)

    def request(self, who: str) -> ModelRequest:
        if who not in self.requests:
            raise Refused
        return self.requests[who]

    def add(self, who: str, names: list[bytes], tokens: list[int]) -> None:
        if who in self.requests:
            raise Refused
        self.requests[who] = ModelRequest(names, tokens, [[] for _ in range(self.num_groups)])

    def extend(self, who: str, names: list[bytes], tokens: list[int]) -> None:
        self.request(who).names.extend(names)
        self.request(who).tokens.extend(tokens)

    def lookup(self, who: str, max_tokens: int) -> ModelHit:
        names = self.request(who).names[: max_tokens // self.block_size]
        found = [self.pool.lookup(names, group) for group in range(self.num_groups)]
        num_hit = min(map(len, found))
        return ModelHit(self.request(who), names[:num_hit], [ids[:num_hit] for ids in found])

    def allocate(
        self,
        who: str,
        new: int,
        hit: ModelHit | None = None,
        external: int = 0,
        lookahead: int = 0,
        delay: bool = False,
        reserve: int = 0,
        must_fit: int | None = None,
    ) -> list[list[int]] | None:
        """The ids taken per group; None where they do not fit now."""
        request, num_hit = self.request(who), len(hit.names) if hit else 0
        self._check(request, new, num_hit, external, hit)
        loaded = request.granted + num_hit * self.block_size + external
        goals = [loaded, loaded + new + lookahead]
        # Whether it fits is not predicted: it is tried on a copy.
        for tokens, kept in ([(must_fit, 0)] if must_fit else []) + [(goals[-1], reserve)]:
            trial = self.pool.copy()
            try:
                self._take(trial, [table[:] for table in request.tables], hit, [tokens])
            except Refused:
                return None
            if trial.num_free < kept:
                return None
        taken = self._take(self.pool, request.tables, hit, goals)
        request.granted, request.running, request.delayed = loaded + new, True, delay
        request.hits = max(request.hits, num_hit)
        request.published = max(request.published, num_hit)
        if not delay and self.publish == "granted":
            self._publish(request, request.granted)
        return taken

    def _check(
        self, request: ModelRequest, new: int, num_hit: int, external: int, hit: ModelHit | None
    ) -> None:
        if new + external + num_hit == 0 or external % self.block_size or request.delayed:
            raise Refused
        if request.running and (hit is not None or external):
            raise Refused
        if external and num_hit + external // self.block_size > len(request.names):
            raise Refused
        if hit is not None and hit.owner is not request:
            raise Refused
        for group, ids in enumerate(hit.blocks if hit else []):
            for id, name in zip(ids, hit.names if hit else [], strict=True):
                if self.pool.held.get(id) != (name, group):
                    raise Refused

    def _take(
        self, pool: ModelPool, tables: list[list[int]], hit: ModelHit | None, goals: list[int]
    ) -> list[list[int]]:
        """All groups touch their hits before any takes a block, then all reach goal by goal."""
        for table, ids in zip(tables, hit.blocks if hit else [], strict=bool(hit)):
            pool.touch(ids)
            table.extend(ids)
        starts = [len(table) for table in tables]
        for tokens in goals:
            for table in tables:
                num_missing = -(-tokens // self.block_size) - len(table)
                table.extend(pool.allocate(max(0, num_missing)))
        return [table[start:] for table, start in zip(tables, starts, strict=True)]

    def _publish(self, request: ModelRequest, num_tokens: int) -> None:
        end = min(num_tokens // self.block_size, len(request.names))
        for group, table in enumerate(request.tables):
            for at in range(request.published, end):
                parent = request.names[at - 1] if at else None
                tokens = request.tokens[at * self.block_size : (at + 1) * self.block_size]
                self.pool.publish(table[at], (request.names[at], group), parent, *tokens)
        request.published = max(request.published, end)

    def step(self, asked: list[tuple[str, int]], lookahead: int) -> list[list[int]]:
        """Flat over (request, group), up to the first request that does not fit."""
        for who, new in asked:
            self._check(self.request(who), new, 0, 0, None)
        taken: list[list[int]] = []
        for who, new in asked:
            ids = self.allocate(who, new, lookahead=lookahead)
            if ids is None:
                break
            taken += ids
        return taken

    def cache(self, who: str, num_tokens: int) -> None:
        if num_tokens > self.request(who).granted:
            raise Refused
        self.requests[who].delayed = False
        self._publish(self.requests[who], num_tokens)

    def rewind(self, who: str, num_tokens: int) -> None:
        request = self.request(who)
        if not request.published * self.block_size <= num_tokens <= request.granted:
            raise Refused
        request.granted = num_tokens

    def cache_step(self, whos: list[str], num_tokens: list[int]) -> None:
        for who, num in zip(whos, num_tokens, strict=True):
            if num > self.request(who).granted:
                raise Refused
        for who, num in zip(whos, num_tokens, strict=True):
            self.cache(who, num)

    def free(self, who: str, num_computed_tokens: int | None = None) -> list[str]:
        request, uncomputed = self.request(who), set[int]()
        if num_computed_tokens is not None:
            if num_computed_tokens > request.granted:
                raise Refused
            first = max(request.hits, num_computed_tokens // self.block_size)
            own = [id for table in request.tables for id in table[first:]]
            self.pool.evict(own)
            uncomputed = set(own)
        for table in request.tables:
            self.pool.free(table[::-1])
        del self.requests[who]
        others = self.requests.items()
        return sorted(
            who for who, one in others if uncomputed & {id for ids in one.tables for id in ids}
        )


def chain(which: int, start: int, num_blocks: int) -> tuple[list[bytes], list[int]]:
    """Hashes and tokens of blocks of one of several prompts, alike in their first two blocks."""
    names = [at if at < 2 else 100 * which + at for at in range(start, start + num_blocks)]
    tokens = [name * BLOCK_SIZE + at for name in names for at in range(BLOCK_SIZE)]
    return [name.to_bytes(8, "big") for name in names], tokens


def plain(value: object) -> object:
    """Arrays as lists, to compare with the model's."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, tuple) else value


whos = st.integers(0, 3)
whiches = st.integers(1, 3)
few = st.integers(0, 3)
with_requests = precondition(lambda self: bool(self.model.requests))
pool_ids = st.lists(st.integers(-1, MAX_BLOCKS), max_size=3)


class LedgerMachine(RuleBasedStateMachine):
    """One op drives both; then everything that can be observed is compared."""

    @initialize(
        num_blocks=st.integers(8, MAX_BLOCKS),
        num_groups=st.integers(1, 2),
        publish=st.sampled_from(["granted", "computed"]),
    )
    def build(
        self, num_blocks: int, num_groups: int, publish: Literal["granted", "computed"]
    ) -> None:
        attention = [FullAttention(BLOCK_SIZE)] * num_groups
        self.real = BlockLedger(num_blocks, attention, publish=publish, events=True)
        self.model = ModelLedger(ModelPool(num_blocks), num_groups, BLOCK_SIZE, publish)
        self.hits: list[tuple[PrefixHit, ModelHit]] = []

    def both(self, real: Callable[[], object], model: Callable[[], object]) -> None:
        try:
            expected = model()
        except Refused:
            with pytest.raises(KvstowError):
                real()
            return
        assert plain(real()) == expected

    def known(self, who: int) -> str:
        return list(self.model.requests)[who % len(self.model.requests)]

    @rule(who=whos, which=whiches, num_blocks=st.integers(0, 7))
    def add(self, who: int, which: int, num_blocks: int) -> None:
        names, tokens = chain(which, 0, num_blocks)
        self.both(
            lambda: self.real.add(f"request {who}", names, tokens=tokens),
            lambda: self.model.add(f"request {who}", names[:], tokens[:]),
        )

    @with_requests
    @rule(who=whos, which=whiches, num_blocks=few)
    def extend(self, who: int, which: int, num_blocks: int) -> None:
        id = self.known(who)
        names, tokens = chain(which, len(self.model.requests[id].names), num_blocks)
        self.both(
            lambda: self.real.extend(id, names, tokens=tokens),
            lambda: self.model.extend(id, names, tokens),
        )

    def allocate(
        self,
        id: str,
        new: int,
        hit: tuple[PrefixHit, ModelHit] | None = None,
        external: int = 0,
        lookahead: int = 0,
        delay: bool = False,
        reserve: int = 0,
        must_fit: int | None = None,
    ) -> None:
        real, model = hit or (None, None)
        self.both(
            lambda: self.real.allocate(
                id,
                new,
                hit=real,
                num_external_tokens=external,
                num_lookahead_tokens=lookahead,
                delay_caching=delay,
                reserve=reserve,
                must_fit_tokens=must_fit,
            ),
            lambda: self.model.allocate(
                id, new, model, external, lookahead, delay, reserve, must_fit
            ),
        )

    @rule(
        who=whos,
        which=whiches,
        num_blocks=st.integers(1, 7),
        new=st.integers(0, 12),
        external=few,
        delay=st.booleans(),
        reserve=few,
        must_fit=st.none() | st.integers(0, 40),
        lost=few,
        old=st.sampled_from([0, 0, 0, 0, 1, 2]),
    )
    def admit(
        self,
        who: int,
        which: int,
        num_blocks: int,
        new: int,
        external: int,
        delay: bool,
        reserve: int,
        must_fit: int | None,
        lost: int,
        old: int,
    ) -> None:
        """What an engine does with a new or preempted request; sometimes with a hit gone bad."""
        id = f"request {who}"
        if new and id in self.model.requests and self.model.requests[id].running:
            self.free(id)
        if id not in self.model.requests:
            self.add(who, which, num_blocks)
        max_tokens = num_blocks * BLOCK_SIZE + new
        hit = real, model = self.real.lookup(id, max_tokens), self.model.lookup(id, max_tokens)
        assert real.num_tokens == len(model.names) * BLOCK_SIZE
        assert plain(real.blocks) == model.blocks
        self.hits.append(hit)
        if len(model.names) > lost > 0:
            self.in_pool("evict", [model.blocks[-1][lost]])
        elif len(self.hits) > old > 0:
            hit = self.hits[-1 - old]
        num_loaded = min(external, len(self.model.requests[id].names) - len(model.names))
        self.allocate(id, new, hit, num_loaded * BLOCK_SIZE, 0, delay, reserve, must_fit)

    @with_requests
    @rule(who=whos, new=st.integers(0, 9), external=st.integers(0, 40), lookahead=few)
    def grow(self, who: int, new: int, external: int, lookahead: int) -> None:
        external = max(0, external - 30)
        self.allocate(self.known(who), new, external=external, lookahead=lookahead)

    @with_requests
    @rule(who=st.lists(whos, max_size=4), new=st.integers(0, 5), lookahead=few)
    def step(self, who: list[int], new: int, lookahead: int) -> None:
        asked = [(self.known(each), new + at % 2) for at, each in enumerate(who)]

        def real() -> object:
            ids, counts = [id for id, _ in asked], [num for _, num in asked]
            taken = self.real.allocate_step(ids, counts, num_lookahead_tokens=lookahead)
            assert len(taken.offsets) == taken.num_granted * self.model.num_groups + 1
            assert (taken.offsets[0], taken.offsets[-1]) == (0, len(taken.ids))
            parts = np.split(taken.ids, taken.offsets[1:-1]) if taken.num_granted else []
            return [part.tolist() for part in parts]

        self.both(real, lambda: self.model.step(asked, lookahead))

    @with_requests
    @rule(name=st.sampled_from(["cache", "rewind"]), who=whos, back=st.integers(-1, 8))
    def up_to(self, name: str, who: int, back: int) -> None:
        id = self.known(who)
        num_tokens = max(0, self.model.requests[id].granted - back)
        self.both(
            lambda: getattr(self.real, name)(id, num_tokens),
            lambda: getattr(self.model, name)(id, num_tokens),
        )

    @with_requests
    @rule(who=st.lists(whos, max_size=4), back=st.integers(-1, 8))
    def cache_step(self, who: list[int], back: int) -> None:
        ids = [self.known(each) for each in who]
        nums = [max(0, self.model.requests[id].granted - back) for id in ids]
        self.both(lambda: self.real.cache_step(ids, nums), lambda: self.model.cache_step(ids, nums))

    @with_requests
    @rule(who=whos, back=st.none() | st.integers(-1, 30))
    def free_any(self, who: int, back: int | None) -> None:
        id = self.known(who)
        granted = self.model.requests[id].granted
        self.free(id, None if back is None else max(0, granted - back))

    def free(self, id: str, num: int | None = None) -> None:
        self.both(
            lambda: self.real.free(id, num_computed_tokens=num), lambda: self.model.free(id, num)
        )

    @rule(name=st.sampled_from(["pin", "unpin", "evict"]), ids=pool_ids)
    def in_pool(self, name: str, ids: list[int]) -> None:
        self.both(
            lambda: getattr(self.real.pool, name)(ids), lambda: getattr(self.model.pool, name)(ids)
        )

    @rule()
    def reset(self) -> None:
        self.both(self.real.pool.reset, self.model.pool.reset)

    @invariant()
    def equal(self) -> None:
        real, model = self.real, self.model
        real.check()
        assert real.num_requests == len(model.requests)
        assert real.pool.num_free == model.pool.num_free
        assert real.pool.num_cached == len(model.pool.held)
        assert real.pool.free_order().tolist() == model.pool.queue
        assert real.pool.ref_counts(range(real.pool.num_blocks)).tolist() == model.pool.refs
        for who, request in model.requests.items():
            assert real.num_granted_tokens(who) == request.granted
            for group, table in enumerate(request.tables):
                assert real.block_table(who, group).tolist() == table
            assert plain(real.lookup(who, 2**40).blocks) == model.lookup(who, 2**40).blocks
        assert flat(real.pool.take_events()) == model.pool.events
        model.pool.events.clear()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=250, stateful_step_count=50)


def ledger_of(num_blocks: int, num_groups: int = 1, *, events: bool = False) -> BlockLedger:
    return BlockLedger(num_blocks, [FullAttention(BLOCK_SIZE)] * num_groups, events=events)


def publish(ledger: BlockLedger, id: str, num_blocks: int) -> list[bytes]:
    """A request that has computed all its blocks."""
    names, _ = chain(1, 0, num_blocks)
    ledger.add(id, names)
    assert ledger.allocate(id, num_blocks * BLOCK_SIZE) is not None
    return names


def num_found(ledger: BlockLedger, names: list[bytes]) -> int:
    """Blocks that a new request with these hashes would hit."""
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
    for num_taken in range(1, num_blocks + 1):
        assert ledger.allocate("b", BLOCK_SIZE) is not None
        assert num_found(ledger, names) == num_blocks - num_taken


def test_no_group_takes_another_groups_hit() -> None:
    num_groups, num_blocks = 2, 2
    ledger = ledger_of(1 + 2 * num_groups * num_blocks, num_groups)
    names = publish(ledger, "a", num_blocks)
    ledger.free("a")
    ledger.add("filler", chain(2, 2, num_blocks)[0])
    assert ledger.allocate("filler", num_blocks * BLOCK_SIZE) is not None
    ledger.free("filler")
    # What the next block would be taken from is now just what is hit.
    ledger.add("b", [*names, b"external"])
    hit = ledger.lookup("b", 2**40)
    hits = np.concatenate(hit.blocks).tolist()
    head = ledger.pool.free_order()[: len(hits)].tolist()
    assert sorted(head) == sorted(hits)
    got = ledger.allocate("b", BLOCK_SIZE, hit=hit, num_external_tokens=BLOCK_SIZE)
    assert got is not None
    assert [len(ids) for ids in got] == [2] * num_groups
    for group, (found, taken) in enumerate(zip(hit.blocks, got, strict=True)):
        assert ledger.block_table("b", group).tolist() == found.tolist() + taken.tolist()
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
    # The second block is full, but of drafts: its hash is not known.
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

    # A hit that lies free leaves the queue as a taken block does: both count.
    assert served(num_free - num_asked, None)
    assert not served(num_free - num_asked + 1, None)
    assert served(0, num_free * BLOCK_SIZE)
    assert not served(0, num_free * BLOCK_SIZE + 1)
    # The two are not added up.
    assert served(num_free - num_asked, num_free * BLOCK_SIZE)


def test_allocate_step_equals_allocations_in_turn() -> None:
    ids, counts = ["a", "b", "c", "d"], [3 * BLOCK_SIZE, 1, 4 * BLOCK_SIZE, 1]
    at_once, in_turn = ledger_of(8, 2), ledger_of(8, 2)
    for ledger in (at_once, in_turn):
        for id in ids:
            ledger.add(id, [])
    # "a" takes 6 of 7, "b" would need 2: "c" and "d" are not asked.
    taken = at_once.allocate_step(ids, np.array(counts, ">u2"))
    got = [in_turn.allocate(id, count) for id, count in zip(ids[:1], counts[:1], strict=True)]
    assert in_turn.allocate("b", 1) is None
    assert (taken.num_granted, taken.offsets.tolist()) == (1, [0, 3, 6])
    assert got[0] is not None
    assert taken.ids.tolist() == np.concatenate(got[0]).tolist()
    assert {array.dtype for array in (taken.ids, taken.offsets)} == {np.dtype(np.int32)}


def test_a_request_freed_before_its_step_leaves_no_keys() -> None:
    for publish in ("granted", "computed"):
        ledger = BlockLedger(8, [FullAttention(BLOCK_SIZE)], publish=publish)
        names, _ = chain(1, 0, 3)
        ledger.add("a", names)
        assert ledger.allocate("a", 3 * BLOCK_SIZE) is not None
        assert ledger.free("a", num_computed_tokens=BLOCK_SIZE) == []
        # Of the first block vLLM's order has a key already.
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
    # What it hit is not its own: only "a" could say whether that was computed.
    assert ledger.free("hits all", num_computed_tokens=0) == []
    assert num_found(ledger, names) == 1
    assert ledger.free("hits one") == []


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
    with pytest.raises(ConfigError, match="2 requests and 1 numbers of computed tokens"):
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
            for one in (ledger, other):
                names = publish(one, "a", 4)
                one.free("a")
                one.add("b", names)
                hits.append(one.lookup("b", 4 * BLOCK_SIZE))
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


def test_the_caller_owns_returned_arrays() -> None:
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
    ledger.extend("a", names[2:], tokens=tokens[2 * BLOCK_SIZE + 1 :])
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


def test_a_hit_ends_at_a_block_end_of_every_group() -> None:
    ledger = BlockLedger(64, [FullAttention(8), FullAttention(4)])
    names = [bytes([at + 1] * 8) for at in range(4)]
    ledger.add("a", names)
    assert ledger.allocate("a", 16) is not None
    last_of_four = ledger.block_table("a", 1)[3:]
    ledger.free("a")
    ledger.add("b", names)
    assert ledger.lookup("b", 100).num_tokens == 16
    ledger.pool.evict(last_of_four)
    # Three small blocks are there, but the second large one would be cut in half.
    hit = ledger.lookup("b", 100)
    assert (hit.num_tokens, [len(blocks) for blocks in hit.blocks]) == (8, [1, 2])
