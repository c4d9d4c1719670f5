"""vLLM's block pool, SGLang's Rust tree and kvstow's ledger, each in its own terms."""

import copy
import functools
import importlib.util
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Protocol, TypeVar

import numpy as np
import torch

import kvstow

from . import vllm_side

FOLDER = Path(__file__).parents[2] / ".rivals"
NUM_ROUND_BLOCKS = 8_192
BLOCK_SIZE = 16
GROUPS = (kvstow.FullAttention(block_size=BLOCK_SIZE),)

T = TypeVar("T")
Clock = Callable[[str, Callable[[], object]], None]


class SideMissing(Exception):
    """A side is not installed, or does not load."""

    def __init__(self, side: str, why: str) -> None:
        super().__init__(f"{side}: {why} (make bench-rivals installs it)")


@dataclass
class Shape:
    """A pool, and the prompts that it serves. `num_prompts` differ, and no two share a prefix."""

    name: str
    num_blocks: int
    num_prompt_blocks: int
    is_shuffled: bool

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_blocks * BLOCK_SIZE

    @property
    def num_spare_blocks(self) -> int:
        """Blocks for the token after each hit of a round, in vLLM's pool and kvstow's."""
        return NUM_ROUND_BLOCKS // self.num_prompt_blocks


@dataclass
class Prompts:
    """What identifies each prompt: hashes, and tokens."""

    shape: Shape
    num_prompts: int
    hashes: list[kvstow.Hashes] = field(init=False)
    lists: list[list[bytes]] = field(init=False)

    def __post_init__(self) -> None:
        def hashes(which: int) -> kvstow.Hashes:
            first = which * 1_000_003
            tokens = np.arange(first, first + self.shape.num_prompt_blocks)
            return kvstow.Hashes(kvstow.hash_tokens(tokens, 1), BLOCK_SIZE)  # one token a block

        self.hashes = [hashes(which) for which in range(self.num_prompts)]
        self.lists = [list(each) for each in self.hashes]


class Side(Protocol):
    """A program. Its calls take whole prompts, and time their work with `clock(name, work)`."""

    name: str

    def publish(self, prompts: Sequence[int], what: str, clock: Clock) -> None:
        """Allocate and publish prompts. Requests hold their blocks."""

    def free(self, num_requests: int, clock: Clock) -> None:
        """Free the requests that began first."""

    def look_up(self, prompts: Sequence[int], clock: Clock) -> None:
        """Find cached prompts."""

    def admit(self, prompts: Sequence[int], clock: Clock) -> None:
        """Look up cached prompts with a reference on each block. Drop it without counting."""

    def reset(self) -> None:
        """Free and forget everything."""


def _each(call: Callable[[T], object], arguments: Iterable[T]) -> None:
    for argument in arguments:
        call(argument)


def _require_hits(side: str, num_tokens: Iterable[int], expected: int) -> None:
    for each in num_tokens:
        if each != expected:
            raise SystemExit(f"{side} found {each} of {expected} tokens: it did other work")


class Match(Protocol):
    """What SGLang's tree finds."""

    device_prefix_len: int
    last_device_node_id: int


class Lock(Protocol):
    """A reference on a node of SGLang's tree and on all nodes above it."""

    node_id: int
    skipped_lock_components: object
    component_lock_uuids: object
    component_host_lock_uuids: object


class VllmSide:
    name = "vLLM"

    def __init__(self, prompts: Prompts) -> None:
        shape, num_prompts = prompts.shape, prompts.num_prompts
        self.num_tokens = shape.num_tokens
        num_blocks = shape.num_blocks + shape.num_spare_blocks
        self.manager = vllm_side.manager(num_blocks + 1, GROUPS)
        if shape.is_shuffled:
            pool = self.manager.block_pool
            blocks = pool.get_new_blocks(num_blocks)
            random.Random(0).shuffle(blocks)
            pool.free_blocks(blocks)
        # One token more than the blocks hold: vLLM leaves the last one to compute.
        first = vllm_side.request("0", self.num_tokens + 1, BLOCK_SIZE)
        self.requests = []
        for which in range(num_prompts):
            request = copy.copy(first)
            request.request_id, request.block_hashes = str(which), prompts.lists[which]
            self.requests.append(request)
        self.held: deque[int] = deque()

    def publish(self, prompts: Sequence[int], what: str, clock: Clock) -> None:
        manager, requests, num_tokens = self.manager, self.requests, self.num_tokens
        call = functools.partial(
            _each, lambda at: manager.allocate_slots(requests[at], num_tokens), prompts
        )
        clock(what, call)
        self.held.extend(prompts)

    def free(self, num_requests: int, clock: Clock) -> None:
        oldest = [self.held.popleft() for _ in range(num_requests)]
        requests = self.requests
        clock("free", lambda: _each(lambda at: self.manager.free(requests[at]), oldest))

    def look_up(self, prompts: Sequence[int], clock: Clock) -> None:
        found: list[int] = []
        requests, look_up = self.requests, self.manager.get_computed_blocks
        clock("lookup", lambda: _each(lambda at: found.append(look_up(requests[at])[1]), prompts))
        _require_hits(self.name, found, self.num_tokens)

    def admit(self, prompts: Sequence[int], clock: Clock) -> None:
        manager, requests = self.manager, self.requests

        def admit(at: int) -> None:
            hit, num_tokens, _ = manager.get_computed_blocks(requests[at])
            manager.allocate_slots(requests[at], 1, num_tokens, hit)

        clock("admit a hit", lambda: _each(admit, prompts))
        _each(lambda at: manager.free(requests[at]), prompts)

    def reset(self) -> None:
        self.free(len(self.held), lambda _, call: _each(lambda _: call(), [0]))
        if not self.manager.reset_prefix_cache():
            raise SystemExit("vLLM's pool is not idle")


class SglangSide:
    name = "SGLang"

    def __init__(self, prompts: Prompts) -> None:
        self.core = _sglang_tree_module()
        shape = prompts.shape
        self.num_tokens = shape.num_tokens
        torch.set_num_threads(1)
        self.tree = self.core.RustUnifiedTreeCoreBinding(
            self.core.TreeCoreInitParamsBinding(
                eviction_policy="lru", slru_protected_threshold=2, tlru_tail_budget=0,
                tlru_float_config=None, page_size=BLOCK_SIZE, is_write_back=False,
                enable_hicache=False, write_through_threshold=256, device="cpu",
                swa_sliding_window_size=None, swa_req_ring=False, enable_kv_cache_events=False,
                dynamo_kv_event_format=False, mamba_cache_chunk_size=None,
                mamba_max_states_per_path=None,
            ),
            [0],
        )  # fmt: skip
        order = list(range(shape.num_blocks))
        if shape.is_shuffled:
            random.Random(0).shuffle(order)
        slots = torch.tensor(order)[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
        self.all_free = list(slots.reshape(-1, self.num_tokens).unbind())
        self.free_values = deque(self.all_free)
        self.keys = []
        for which in range(prompts.num_prompts):
            first = which * 1_000_003
            key = array("q")
            key.frombytes(np.arange(first, first + self.num_tokens, dtype=np.int64).tobytes())
            self.keys.append(key)
        self.held: deque[tuple[int, Lock]] = deque()

    def publish(self, prompts: Sequence[int], what: str, clock: Clock) -> None:
        clock(what, lambda: _each(self._publish, prompts))

    def free(self, num_requests: int, clock: Clock) -> None:
        oldest = [self.held.popleft() for _ in range(num_requests)]
        clock("free", lambda: _each(lambda held: self._unlock(held[1]), oldest))
        for at, _ in oldest:
            self._match(at)  # SGLang's cache makes a prompt the newest when its request ends

    def look_up(self, prompts: Sequence[int], clock: Clock) -> None:
        found: list[int] = []
        clock(
            "lookup",
            lambda: _each(lambda at: found.append(self._match(at).device_prefix_len), prompts),
        )
        _require_hits(self.name, found, self.num_tokens)

    def admit(self, prompts: Sequence[int], clock: Clock) -> None:
        locks: list[Lock] = []
        tree = self.tree
        root = tree.root_node_handle()

        def admit(at: int) -> None:
            node = self._match(at).last_device_node_id
            tree.collect_full_device_indices(node, root)
            locks.append(tree.inc_lock_ref(node))

        clock("admit a hit", lambda: _each(admit, prompts))
        for lock in locks:
            self._unlock(lock)

    def reset(self) -> None:
        self.held.clear()
        self.tree.reset()
        self.free_values = deque(self.all_free)

    def _publish(self, at: int) -> None:
        tree, core = self.tree, self.core
        if not self.free_values:
            self._evict()
        step = tree.begin_insert(
            core.InsertParamsBinding(
                key=self.keys[at], value=self.free_values.popleft(), extra_key=None,
                cache_salt=None, session_id=None, mamba_value=None, prev_prefix_len=0,
                swa_evicted_seqlen=0, swa_branching_seqlen=None, inserted_len=0, priority=0,
                track_adopted_ranges=False, rotation_base=None,
            )
        )  # fmt: skip
        while step.result is None:
            step = tree.resume_insert()
        tree.end_insert()
        self.held.append((at, tree.inc_lock_ref(step.result.last_device_node)))

    def _evict(self) -> None:
        tree, tracker = self.tree, {0: 0}
        tree.evict_device_start(0, self.num_tokens)
        while tracker[0] < self.num_tokens:
            node = tree.evict_device_next_node(0, tracker).node_id
            evicted = tree.evict_device_leaf(node)
            tracker[0] += evicted.tracker[0]
            self.free_values.extend(evicted.new_device_frees[0])
        tree.evict_device_end(0)

    def _match(self, at: int) -> Match:
        core = self.core
        key = core.MatchParamsBinding(key=self.keys[at], extra_key=None, cache_salt=None)
        found: Match = self.tree.match_prefix(key)
        return found

    def _unlock(self, lock: Lock) -> None:
        params = self.core.DecLockRefParamsBinding(
            node_id=lock.node_id,
            skipped_lock_components=lock.skipped_lock_components,
            component_lock_uuids=lock.component_lock_uuids,
            component_host_lock_uuids=lock.component_host_lock_uuids,
        )
        self.tree.dec_lock_ref(lock.node_id, params, False)


def _sglang_tree_module() -> ModuleType:
    """Load the one file of SGLang's wheel that has the tree. It needs torch's libraries."""
    folder = FOLDER / "sglang" / "sglang" / "srt" / "mem_cache" / "rust_tree_core"
    path = next(folder.glob("mem_cache.*.so"), None)
    spec = path and importlib.util.spec_from_file_location("mem_cache", path)
    if not spec or not spec.loader:
        raise SideMissing("SGLang", "its wheel is not in .rivals/")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise SideMissing("SGLang", f"its tree does not load here: {error}") from error
    return module


class KvstowSide:
    name = "kvstow"

    def __init__(self, prompts: Prompts) -> None:
        shape = prompts.shape
        self.prompts, self.num_tokens = prompts, shape.num_tokens
        num_blocks = shape.num_blocks + shape.num_spare_blocks
        self.ledger = kvstow.BlockLedger(num_blocks + 1, GROUPS)
        if shape.is_shuffled:
            names = [str(at) for at in range(num_blocks)]
            for name in names:
                self.ledger.add(name, [])
                self.ledger.allocate(name, BLOCK_SIZE)
            random.Random(0).shuffle(names)
            for name in names:
                self.ledger.free(name)
        self.num_requests = 0
        self.held: deque[str] = deque()

    def _add(self, prompts: Sequence[int], clock: Clock) -> list[str]:
        start = self.num_requests
        self.num_requests += len(prompts)
        names = [f"request-{at}" for at in range(start, self.num_requests)]
        add, hashes = self.ledger.add, [self.prompts.hashes[at] for at in prompts]
        clock("add", lambda: _each(lambda it: add(*it), zip(names, hashes, strict=True)))
        return names

    def publish(self, prompts: Sequence[int], what: str, clock: Clock) -> None:
        names, allocate, num_tokens = (
            self._add(prompts, clock),
            self.ledger.allocate,
            self.num_tokens,
        )
        clock(what, lambda: _each(lambda name: allocate(name, num_tokens), names))
        self.held.extend(names)

    def free(self, num_requests: int, clock: Clock) -> None:
        oldest = [self.held.popleft() for _ in range(num_requests)]
        free = self.ledger.free
        clock("free", lambda: _each(free, oldest))

    def look_up(self, prompts: Sequence[int], clock: Clock) -> None:
        ledger, num_tokens = self.ledger, self.num_tokens
        lists = [(f"list-{at}", self.prompts.lists[at]) for at in prompts]
        clock("add a list", lambda: _each(lambda it: ledger.add(*it), lists))
        for name, _ in lists:
            ledger.free(name)
        names = self._add(prompts, clock)
        found: list[kvstow.PrefixHit] = []
        clock("lookup", lambda: found.extend([ledger.lookup(name, num_tokens) for name in names]))
        _require_hits(self.name, [hit.num_tokens for hit in found], num_tokens)
        for name in names:
            ledger.free(name)

    def admit(self, prompts: Sequence[int], clock: Clock) -> None:
        ledger, num_tokens = self.ledger, self.num_tokens
        names = self._add(prompts, clock)
        clock(
            "admit a hit",
            lambda: [
                ledger.allocate(name, 1, hit=ledger.lookup(name, num_tokens)) for name in names
            ],
        )
        for name in names:
            ledger.free(name)

    def reset(self) -> None:
        while self.held:
            self.ledger.free(self.held.popleft())
        if not self.ledger.pool.reset():
            raise SystemExit("kvstow's pool is not idle")
        self.ledger.check()
