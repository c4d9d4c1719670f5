"""The naive ledger. It does not predict: it allocates from a copy of its pool first.

`ledger_model.rs` is the model of the core. This one drives the Python binding, and it also records
events with their parents and tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from tests.accounting.model import ModelPool, Refused

BLOCK_SIZE = 4
MAX_BLOCKS = 28


@dataclass
class ModelHit:
    owner: ModelRequest
    names: list[bytes]
    blocks: list[list[int]]


@dataclass(eq=False)  # two requests with equal content are different requests
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
        """Return the allocated ids per group, or None if they do not fit now."""
        request, num_hit = self.request(who), len(hit.names) if hit else 0
        self._check(request, new, num_hit, external, hit)
        loaded = request.granted + num_hit * self.block_size + external
        goals = [loaded, loaded + new + lookahead]
        # Try on a copy of the pool whether the blocks fit.
        for tokens, kept in ([(must_fit, 0)] if must_fit else []) + [(goals[-1], reserve)]:
            trial = self.pool.copy()
            try:
                self._allocate(trial, [table[:] for table in request.tables], hit, [tokens])
            except Refused:
                return None
            if trial.num_free < kept:
                return None
        allocated = self._allocate(self.pool, request.tables, hit, goals)
        request.granted, request.running, request.delayed = loaded + new, True, delay
        request.hits = max(request.hits, num_hit)
        request.published = max(request.published, num_hit)
        if not delay and self.publish == "granted":
            self._publish(request, request.granted)
        return allocated

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

    def _allocate(
        self, pool: ModelPool, tables: list[list[int]], hit: ModelHit | None, goals: list[int]
    ) -> list[list[int]]:
        """Touch the hits of all groups, and then allocate blocks up to each goal."""
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
        """Return the ids per request and group, up to the first request that does not fit."""
        for who, new in asked:
            self._check(self.request(who), new, 0, 0, None)
        allocated: list[list[int]] = []
        for who, new in asked:
            ids = self.allocate(who, new, lookahead=lookahead)
            if ids is None:
                break
            allocated += ids
        return allocated

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
            who for who, other in others if uncomputed & {id for ids in other.tables for id in ids}
        )


def chain(which: int, start: int, num_blocks: int) -> tuple[list[bytes], list[int]]:
    """Return hashes and tokens of a prompt. All prompts share their first two blocks."""
    names = [at if at < 2 else 100 * which + at for at in range(start, start + num_blocks)]
    tokens = [name * BLOCK_SIZE + at for name in names for at in range(BLOCK_SIZE)]
    return [name.to_bytes(8, "big") for name in names], tokens


def plain(value: object) -> object:
    """Return arrays as lists, which the model uses."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, tuple) else value
