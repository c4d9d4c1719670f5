"""`BlockLedger` against a naive ledger over the naive pool, and what its results and events say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
)
from tests.accounting.model import ModelPool, Refused, flat

from kvstow import BlockLedger, FullAttention, KvstowError, PrefixHit, UnknownRequest

BLOCK_SIZE = 4
MAX_BLOCKS = 20
MAX_TOKENS = 30


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
    running: bool = False
    delayed: bool = False


@dataclass
class ModelLedger:
    pool: ModelPool
    num_groups: int
    block_size: int
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
        *,
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
        request.published = max(request.published, num_hit)
        if not delay:
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
                table += pool.allocate(max(0, -(-tokens // self.block_size) - len(table)))
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

    def free(self, who: str) -> None:
        for table in self.request(who).tables:
            self.pool.free(table[::-1])
        del self.requests[who]


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


ids_of_requests = st.sampled_from(["a", "b", "c", "d"])
whiches = st.integers(1, 3)
few = st.integers(0, 3)
some_tokens = st.integers(0, MAX_TOKENS)
pool_ids = st.lists(st.integers(-1, MAX_BLOCKS), max_size=3)


class LedgerMachine(RuleBasedStateMachine):
    """One op drives both; then everything that can be observed is compared."""

    hits: Bundle[tuple[PrefixHit, ModelHit]] = Bundle("hits")

    @initialize(num_blocks=st.integers(4, MAX_BLOCKS), num_groups=st.integers(1, 2))
    def build(self, num_blocks: int, num_groups: int) -> None:
        attention = [FullAttention(BLOCK_SIZE)] * num_groups
        self.real = BlockLedger(num_blocks, attention, events=True)
        self.model = ModelLedger(ModelPool(num_blocks), num_groups, BLOCK_SIZE)

    def both(self, real: Callable[[], object], model: Callable[[], object]) -> None:
        try:
            expected = model()
        except Refused:
            with pytest.raises(KvstowError):
                real()
            return
        assert plain(real()) == expected

    @rule(who=ids_of_requests, which=whiches, num_blocks=st.integers(0, 6))
    def add(self, who: str, which: int, num_blocks: int) -> None:
        names, tokens = chain(which, 0, num_blocks)
        self.both(
            lambda: self.real.add(who, names, tokens=tokens),
            lambda: self.model.add(who, names[:], tokens[:]),
        )

    @rule(who=ids_of_requests, which=whiches, num_blocks=few)
    def extend(self, who: str, which: int, num_blocks: int) -> None:
        known = self.model.requests.get(who)
        names, tokens = chain(which, len(known.names) if known else 0, num_blocks)
        self.both(
            lambda: self.real.extend(who, names, tokens=tokens),
            lambda: self.model.extend(who, names, tokens),
        )

    @rule(target=hits, who=ids_of_requests, max_tokens=some_tokens | st.just(2**40))
    def look(self, who: str, max_tokens: int) -> MultipleResults[tuple[PrefixHit, ModelHit]]:
        if who not in self.model.requests:
            with pytest.raises(UnknownRequest):
                self.real.lookup(who, max_tokens)
            return multiple()
        real, model = self.real.lookup(who, max_tokens), self.model.lookup(who, max_tokens)
        assert real.num_tokens == len(model.names) * BLOCK_SIZE
        assert plain(real.blocks) == model.blocks
        return multiple((real, model))

    @rule(
        who=ids_of_requests,
        hit=hits | st.none(),
        new=st.integers(0, 12),
        external=few.map(lambda num: num * BLOCK_SIZE) | few,
        lookahead=few,
        delay=st.booleans(),
        reserve=few,
        must_fit=some_tokens | st.none(),
    )
    def allocate(
        self,
        who: str,
        hit: tuple[PrefixHit, ModelHit] | None,
        new: int,
        external: int,
        lookahead: int,
        delay: bool,
        reserve: int,
        must_fit: int | None,
    ) -> None:
        real, model = hit or (None, None)
        self.both(
            lambda: self.real.allocate(
                who,
                new,
                hit=real,
                num_external_tokens=external,
                num_lookahead_tokens=lookahead,
                delay_caching=delay,
                reserve=reserve,
                must_fit_tokens=must_fit,
            ),
            lambda: self.model.allocate(
                who,
                new,
                hit=model,
                external=external,
                lookahead=lookahead,
                delay=delay,
                reserve=reserve,
                must_fit=must_fit,
            ),
        )

    @rule(who=ids_of_requests, which=whiches, new=st.integers(1, 12), external=few)
    def admit(self, who: str, which: int, new: int, external: int) -> None:
        """What an engine does with a new request, so that hits are common."""
        self.add(who, which, 6)
        if self.model.requests[who].running:
            return
        real, model = self.real.lookup(who, MAX_TOKENS), self.model.lookup(who, MAX_TOKENS)
        num_loaded = min(external, len(self.model.requests[who].names) - len(model.names))
        self.allocate(who, (real, model), new, num_loaded * BLOCK_SIZE, 0, False, 0, None)

    @rule(
        who=st.lists(ids_of_requests, max_size=4), new=st.integers(0, 6) | st.just(1), lookahead=few
    )
    def step(self, who: list[str], new: int, lookahead: int) -> None:
        asked = [(name, new + at % 2) for at, name in enumerate(who)]

        def real() -> object:
            counts = [num for _, num in asked]
            taken = self.real.allocate_step(who, counts, num_lookahead_tokens=lookahead)
            assert len(taken.offsets) == taken.num_granted * self.model.num_groups + 1
            assert (taken.offsets[0], taken.offsets[-1]) == (0, len(taken.ids))
            return tuple(np.split(taken.ids, taken.offsets[1:-1]) if taken.num_granted else ())

        self.both(real, lambda: self.model.step(asked, lookahead))

    @rule(name=st.sampled_from(["cache", "rewind"]), who=ids_of_requests, num_tokens=some_tokens)
    def up_to(self, name: str, who: str, num_tokens: int) -> None:
        self.both(
            lambda: getattr(self.real, name)(who, num_tokens),
            lambda: getattr(self.model, name)(who, num_tokens),
        )

    @rule(who=ids_of_requests)
    def free(self, who: str) -> None:
        self.both(lambda: self.real.free(who), lambda: self.model.free(who))

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
TestLedger.settings = settings(max_examples=200, stateful_step_count=30)
