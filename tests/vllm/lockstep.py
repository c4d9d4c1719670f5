"""Two of vLLM's `KVCacheManager` in lockstep, one with kvstow's faster functions.

The operations are those of vLLM's scheduler: requests with common prefixes, chunks, drafts, steps
in flight, loads from elsewhere, preemption, pins of a connector, evictions, resets, full pools.
After each operation everything that the managers hold must be equal, also the order of the free
queue.
All choices come from one seed.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.vllm.versions import skip_without_all_states
from vllm.sampling_params import SamplingParams
from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from kvstow.vllm.accelerate import allocation, lookup
from kvstow.vllm.accelerate import hashing as fast_hashing

PATCHES = (fast_hashing.PATCH, allocation.PATCH, lookup.PATCH)


class Switch:
    """Changes between vLLM's functions and kvstow's, which `apply` would do too slowly."""

    def __init__(self) -> None:
        for patch in PATCHES:
            assert patch.apply() is None
        originals = [place for patch in PATCHES for place in patch._undo]
        self._theirs = originals
        self._ours = [(owner, name, vars(owner)[name]) for owner, name, _ in originals]
        self.off()

    def on(self) -> None:
        self._set(self._ours)

    def off(self) -> None:
        self._set(self._theirs)

    @staticmethod
    def _set(places: list[tuple[Any, str, Any]]) -> None:
        for owner, name, function in places:
            setattr(owner, name, function)


@contextmanager
def switch() -> Iterator[Switch]:
    try:
        yield Switch()
    finally:
        for patch in PATCHES:
            patch.undo()


def full(block_size: int) -> KVCacheSpec:
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )


def window(block_size: int, num_tokens: int, extra: int = 0) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=1,
        dtype=torch.float32,
        sliding_window=num_tokens,
        extra_retained_tokens=extra,
    )


def state(block_size: int) -> KVCacheSpec:
    skip_without_all_states()
    return MambaSpec(
        block_size=block_size, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="all"
    )


# Models, and whether an early exit is possible.
MODELS: dict[str, tuple[Callable[[random.Random], list[KVCacheSpec]], bool]] = {
    "full": (lambda r: [full(4)], True),
    "two full": (lambda r: [full(4), full(4), window(4, 7)], True),
    "full and window": (lambda r: [full(4), window(4, r.choice([1, 2, 5, 9, 16]))], True),
    "full and two windows": (
        lambda r: [full(4), window(4, 9, r.randrange(3)), window(4, r.choice([1, 14]))],
        True,
    ),
    "window": (lambda r: [window(4, r.choice([1, 4, 10]))], True),
    "smaller windows": (lambda r: [full(4), window(2, 5)], False),
    "larger windows": (lambda r: [full(4), window(8, r.choice([1, 9, 20]))], True),
    "state": (lambda r: [full(4), state(4)], False),
}


@dataclass
class Side:
    """One manager and its requests."""

    is_fast: bool
    manager: KVCacheManager
    hasher: Any
    requests: dict[str, Request] = field(default_factory=dict)
    pinned: list[Any] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """Return everything that must be equal."""
        manager, pool = self.manager, self.manager.block_pool
        groups = manager.coordinator.single_type_managers
        return {
            "free queue": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "blocks": [
                (block.ref_cnt, block.block_hash, block.block_hash_num_tokens)
                for block in pool.blocks
            ],
            "index": [
                (key, [found.block_id] if not isinstance(found, dict) else list(found))
                for key, found in pool.cached_block_hash_to_block._cache.items()
            ],
            "tables": [
                {name: [b.block_id for b in blocks] for name, blocks in group.req_to_blocks.items()}
                for group in groups
            ],
            "cached": [dict(group.num_cached_block) for group in groups],
            "zeroing": [list(group.new_block_ids) for group in groups],
            "events": list(pool.kv_event_queue),
            "hashes": {name: r.block_hashes for name, r in self.requests.items()},
            "requests": {
                name: (r.num_computed_tokens, r.num_in_flight_tokens, r.num_tokens, r.status)
                for name, r in self.requests.items()
            },
        }


class Lockstep:
    """A sequence of random operations on both sides."""

    def __init__(self, seed: int, model: str, between: Switch, counts: Counter[str]) -> None:
        self.choose = random.Random(seed)
        self.between, self.counts = between, counts
        choose = self.choose
        make, _ = MODELS[model]
        specs = make(choose)
        sizes = [spec.block_size for spec in specs]
        self.unit = math.lcm(*sizes)
        hash_block_size = math.gcd(*sizes)
        use_eagle = model == "full" and choose.randrange(8) == 0
        num_blocks = choose.choice([12, 25, 60])
        self.max_tokens = choose.choice([40, 1000])
        function = getattr(hashing, choose.choice(["sha256", "sha256", "sha256_cbor"]))
        kv_cache_utils.init_none_hash(function)
        watermark = choose.choice([0.0, 0.0, 0.1])
        retention = None if model != "full and window" or choose.randrange(3) else 0
        events = choose.randrange(3) == 0
        self.templates = [[choose.randrange(1000) for _ in range(60)] for _ in range(3)]
        self.sides = []
        for is_fast in (False, True):
            (between.on if is_fast else between.off)()
            manager = KVCacheManager(
                KVCacheConfig(
                    num_blocks,
                    [],
                    [KVCacheGroupSpec([str(at)], spec) for at, spec in enumerate(specs)],
                    prefix_cache_retention_interval=retention,
                ),
                max_model_len=self.max_tokens,
                scheduler_block_size=self.unit,
                hash_block_size=hash_block_size,
                use_eagle=use_eagle,
                enable_kv_cache_events=events,
                watermark=watermark,
            )
            hasher = kv_cache_utils.get_request_block_hasher(hash_block_size, function)
            self.sides.append(Side(is_fast, manager, hasher))
        self.names = 0

    def both(self, call: Callable[[Side], Any]) -> Any:
        """Call both sides. Both must return the same, or raise the same."""
        results: list[Any] = []
        for side in self.sides:
            (self.between.on if side.is_fast else self.between.off)()
            try:
                results.append(call(side))
            except (AssertionError, ValueError) as error:
                results.append((type(error), str(error)))
        self.between.off()
        assert results[0] == results[1], results
        theirs, ours = (side.state() for side in self.sides)
        for what, value in theirs.items():
            assert ours[what] == value, what
        return results[0]

    def run(self, num_operations: int) -> None:
        operations = [
            (self.admit, 4),
            (self.step, 12),
            (self.settle, 4),
            (self.cache, 2),
            (self.finish, 1),
            (self.preempt, 1),
            (self.pin, 1),
            (self.evict, 1),
            (self.reset, 1),
        ]
        calls, weights = zip(*operations, strict=True)
        for _ in range(num_operations):
            call = self.choose.choices(calls, weights)[0]
            if call():
                self.counts[call.__name__] += 1

    def _one(self, *statuses: RequestStatus) -> str | None:
        requests = self.sides[0].requests
        names = [name for name, r in requests.items() if not statuses or r.status in statuses]
        return self.choose.choice(names) if names else None

    def admit(self) -> bool:
        """Look a new or preempted request up, and give it blocks."""
        choose = self.choose
        name = self._one(RequestStatus.WAITING, RequestStatus.PREEMPTED)
        if name is None:
            if len(self.sides[0].requests) >= 5:
                return False
            name = f"r{self.names}"
            self.names += 1
            template = choose.choice(self.templates)
            tail = [choose.randrange(1000) for _ in range(choose.randrange(1, 12))]
            tokens = (template[: choose.randrange(60)] + tail)[: self.max_tokens - 1]
            salt = "salt" if choose.randrange(6) == 0 else None
            self.both(lambda side: self._add(side, name, tokens, salt))
        num_external = self.unit * choose.choice([0, 0, 0, 1, 2])
        share, lookahead = choose.random(), choose.choice([0, 0, 2])
        must_fit, has_scheduled = choose.random() < 0.5, choose.random() < 0.5
        reserved = choose.choice([0, 0, 3])

        def admit(side: Side) -> Any:
            request, manager = side.requests[name], side.manager
            blocks, num_hit, _ = manager.get_computed_blocks(request)
            num_left = request.num_tokens - num_hit
            external = num_external if num_external < num_left else 0
            num_new = 0 if external else max(1, int(share * num_left))
            found = manager.allocate_slots(
                request,
                num_new,
                num_new_computed_tokens=num_hit,
                new_computed_blocks=blocks,
                num_lookahead_tokens=lookahead,
                num_external_computed_tokens=external,
                delay_cache_blocks=external > 0,
                full_sequence_must_fit=must_fit,
                reserved_blocks=reserved,
                has_scheduled_reqs=has_scheduled,
            )
            if found is None:
                return num_hit, None
            request.num_computed_tokens = num_hit + external + num_new
            request.num_in_flight_tokens = num_new
            request.status = RequestStatus.RUNNING
            return num_hit, blocks.get_block_ids(), found.get_block_ids()

        self.both(admit)
        return True

    def _add(self, side: Side, name: str, tokens: list[int], salt: str | None) -> None:
        params = SamplingParams(max_tokens=1000)
        side.requests[name] = Request(
            name, list(tokens), params, None, cache_salt=salt, block_hasher=side.hasher
        )

    def step(self) -> bool:
        """Grant a request its next tokens, drafts and slots of drafts included."""
        name = self._one(RequestStatus.RUNNING, RequestStatus.WAITING)
        if name is None:
            return False
        choose = self.choose
        num_drafts = choose.choice([0, 0, 0, 1, 3])
        lookahead = choose.choice([0, 0, 0, 2])
        chunk = choose.choice([1, 1, 1, 5])
        is_in_flight, samples = choose.random() < 0.4, choose.randrange(1000)
        is_placeholder = choose.random() < 0.3

        def step(side: Side) -> Any:
            request = side.requests[name]
            num_left = request.num_tokens - request.num_computed_tokens
            num_new = min(max(1, num_left), chunk) + num_drafts
            if request.num_computed_tokens + num_new > self.max_tokens:
                return "at the limit"
            found = side.manager.allocate_slots(request, num_new, num_lookahead_tokens=lookahead)
            if found is None:
                return None
            request.num_computed_tokens += num_new
            if is_in_flight:
                request.num_in_flight_tokens += num_new
            # Drafts are rejected at once, or count until a later step settles them.
            if num_drafts and not is_placeholder:
                request.num_computed_tokens -= num_drafts
                if is_in_flight:
                    request.num_in_flight_tokens -= num_drafts
            while request.num_tokens <= request.num_computed_tokens and not is_placeholder:
                request.append_output_token_ids(samples)
            return found.get_block_ids(), found is side.manager.empty_kv_cache_blocks

        self.both(step)
        return True

    def settle(self) -> bool:
        """End a request's steps in flight: their tokens are sampled, or their drafts rejected."""
        name = self._one(RequestStatus.RUNNING)
        if name is None:
            return False
        is_rejected, token = self.choose.random() < 0.5, self.choose.randrange(1000)

        def settle(side: Side) -> None:
            request = side.requests[name]
            request.num_in_flight_tokens = 0
            excess = request.num_computed_tokens - request.num_tokens + 1
            if excess > 0 and is_rejected:
                request.num_computed_tokens -= excess
            while request.num_tokens <= request.num_computed_tokens:
                request.append_output_token_ids(token)

        self.both(settle)
        return True

    def cache(self) -> bool:
        """Publish blocks, as when a load has landed or an asynchronous step ends."""
        name = self._one(RequestStatus.RUNNING)
        if name is None:
            return False

        def cache(side: Side) -> None:
            request = side.requests[name]
            side.manager.cache_blocks(request, min(request.num_computed_tokens, request.num_tokens))

        self.both(cache)
        return True

    def finish(self) -> bool:
        return self._leave(is_preempted=False)

    def preempt(self) -> bool:
        return self._leave(is_preempted=True)

    def _leave(self, *, is_preempted: bool) -> bool:
        name = self._one(RequestStatus.RUNNING)
        if name is None:
            return False

        def leave(side: Side) -> None:
            request = side.requests[name]
            side.manager.free(request)
            if is_preempted:
                request.num_computed_tokens = request.num_in_flight_tokens = 0
                request.status = RequestStatus.PREEMPTED
            else:
                del side.requests[name]

        self.both(leave)
        return True

    def pin(self) -> bool:
        """Take references as a connector does, or drop them."""
        share = self.choose.random()

        def pin(side: Side) -> None:
            pool = side.manager.block_pool
            if side.pinned:
                pool.free_blocks(side.pinned)
                side.pinned = []
                return
            cached = [b for b in pool.blocks if b.block_hash is not None and not b.is_null]
            side.pinned = cached[: int(3 * share)]
            pool.touch(side.pinned)

        self.both(pin)
        return True

    def evict(self) -> bool:
        ids = {self.choose.randrange(1, 12) for _ in range(3)}
        self.both(lambda side: side.manager.evict_blocks(set(ids)))
        return True

    def reset(self) -> bool:
        """Reset the prefix cache, at times after all requests have been preempted."""
        if self.choose.random() < 0.5:
            while self._one(RequestStatus.RUNNING):
                self.preempt()
            if self.sides[0].pinned:
                self.pin()
        is_reset: bool = self.both(lambda side: side.manager.reset_prefix_cache())
        return is_reset
