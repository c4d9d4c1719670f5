"""`BlockLedger` behaves as the naive ledger does, in any order of operations."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.accounting.ledger_model import (
    BLOCK_SIZE,
    MAX_BLOCKS,
    ModelHit,
    ModelLedger,
    chain,
    plain,
)
from tests.accounting.model import ModelPool, Refused, flat

from kvstow import (
    BlockLedger,
    FullAttention,
    KvstowError,
    PrefixHit,
)

whos = st.integers(0, 3)
whiches = st.integers(1, 3)
few = st.integers(0, 3)
with_requests = precondition(lambda self: bool(self.model.requests))
pool_ids = st.lists(st.integers(-1, MAX_BLOCKS), max_size=3)


class LedgerMachine(RuleBasedStateMachine):
    """Each operation drives the ledger and its model. Then all observable state must be equal."""

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
        """Admit a new or preempted request as an engine does, sometimes with a stale hit."""
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
            step = self.real.allocate_step(ids, counts, num_lookahead_tokens=lookahead)
            assert len(step.offsets) == step.num_granted * self.model.num_groups + 1
            assert (step.offsets[0], step.offsets[-1]) == (0, len(step.ids))
            parts = np.split(step.ids, step.offsets[1:-1]) if step.num_granted else []
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
