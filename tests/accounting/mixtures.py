"""A scheduler with a disk tier, its ledger, and the bytes of all three memories on each rank.

A block is two words, which depend on its tokens, group, rank and weights. Copies move one word at a
time, so a torn block is visible. Every word that a request reads is compared.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow import (
    BlockLedger,
    FullAttention,
    Job,
    JobEnd,
    OffloadScheduler,
    OutOfBlocks,
    SlidingWindow,
    StateError,
    TierJob,
    hash_tokens,
)

BLOCK: Final = 4
NUM_DEVICE: Final = 24
GARBAGE: Final = -1
PATIENCE_S: Final = 1.0
# Of the chains of tokens that prompts take their beginnings from.
NUM_CHAINS: Final = 5
MOST_TOKENS: Final = 40

Words: TypeAlias = npt.NDArray[np.int64]
Memory = Literal["device", "host", "disk"]
# By method of `World`, how often it is called.
TURNS: Final = {
    "add": 80,
    "serve": 400,
    "drop": 45,
    "forget_device": 40,
    "demote": 60,
    "promote": 60,
    "go_on": 230,
    "store_lazily": 20,
    "expire": 4,
    "reset": 1,
    "rot": 1,
    "set_disk": 6,
    "end_all": 1,
    "hold": 12,
    "wake": 12,
    "move_on": 2,
}
# Memory and row.
Place: TypeAlias = tuple[Memory, int]


@dataclass
class Request:
    """A request, as the world knows it."""

    tokens: list[int]
    state: Literal["waiting", "loading", "running"] = "waiting"
    num_computed: int = 0
    job_id: int = 0
    num_asked: int = 0


@dataclass
class Flight:
    """A job under way.

    Attributes:
        pairs: from where each row is copied to where, with the block of the job that it belongs to.
        left: by rank, the words that are still to be copied, as (pair, word).
        reported: the ranks that have reported.
        name: of a load, its request.
    """

    job: Job | TierJob
    direction: Literal["store", "load", "demote", "promote"]
    pairs: list[tuple[Place, Place, int]]
    num_blocks: int
    left: list[list[tuple[int, int]]]
    reported: set[int] = field(default_factory=set)
    name: str = ""


class World:
    """Turns that a seed chooses.

    Attributes:
        counts: what has happened, so that a test can ask whether the mixture was met.
    """

    def __init__(self, seed: int, *, sleeps: bool, threshold: int) -> None:
        self.seed, self.sleeps = seed, sleeps
        self.chances = chances = random.Random(seed)
        self.num_ranks = chances.choice([1, 2])
        groups: list[list[FullAttention | SlidingWindow]] = [
            [FullAttention(BLOCK)],
            [FullAttention(BLOCK), SlidingWindow(BLOCK, 6)],
            [FullAttention(BLOCK), FullAttention(2 * BLOCK)],
        ]
        self.groups = chances.choice(groups)
        self.mode: Literal["eager", "lazy"] = chances.choice(["eager", "eager", "lazy"])
        has_windows = any(isinstance(group, SlidingWindow) for group in self.groups)
        can_join = self.mode == "eager" and not has_windows
        self.per_slot = chances.choice([1, 2]) if can_join else 1
        self.num_host, self.num_disk = chances.choice([8, 10, 16]), chances.choice([8, 30, 60])
        self.options: dict[str, Any] = {
            "mode": self.mode,
            "policy": chances.choice(["lru", "hit-density"]),
            "blocks_per_slot": self.per_slot,
            "world_size": self.num_ranks,
            "num_device_blocks": NUM_DEVICE,
            "store_threshold": threshold,
            "num_disk_blocks": self.num_disk,
            "disk_policy": chances.choice(["lru", "hit-density"]),
            "disk_admit": chances.choice(["all", "all", "returned"]),
            "max_disk_blocks_in_flight": chances.choice([2, 64]),
            "min_promote_tokens": chances.choice([0, 0, 0, 8]),
            "events": chances.choice([False, True]),
        }
        self.ledger = BlockLedger(NUM_DEVICE, self.groups, publish="computed")
        self.scheduler = self.new_scheduler()
        sizes: dict[Memory, int] = {
            "device": NUM_DEVICE,
            "host": self.num_host * self.per_slot,
            "disk": self.num_disk * self.per_slot,
        }
        self.memory: list[dict[Memory, Words]] = [
            {name: np.full((size, 2), GARBAGE) for name, size in sizes.items()}
            for _ in range(self.num_ranks)
        ]
        # Rows whose bytes a checksum would find damaged.
        self.damaged: list[set[Place]] = [set() for _ in range(self.num_ranks)]
        self.requests: dict[str, Request] = {}
        self.flights: dict[int, Flight] = {}
        self.num_added = self.weights = 0
        self.now_s = 0.0
        self.counts: Counter[str] = Counter()
        # Of a held image: by rank and place on the host, the words that the device had.
        self.image: list[dict[int, list[int]]] | None = None
        self.placed: list[tuple[int, int]] = []  # its device blocks, and their places
        self.is_asleep = False

    def new_scheduler(self) -> OffloadScheduler:
        scheduler = OffloadScheduler(self.num_host, self.groups, **self.options)
        scheduler.set_disk("on")
        return scheduler

    # -- what blocks must hold -------------------------------------------------------------------

    def words(self, tokens: list[int], group: int, rank: int) -> list[int]:
        """Return the words of the block that these tokens, from the first on, end in."""
        text = repr((tokens, group, rank, self.weights)).encode()
        return [zlib.crc32(text), zlib.crc32(text, 1)]

    def blocks_of(self, name: str) -> Iterator[tuple[int, int, list[int]]]:
        """Yield the computed blocks of a request's tables: group, block id, and tokens."""
        request = self.requests[name]
        for g, group in enumerate(self.groups):
            table = self.ledger.block_table(name, g).tolist()
            num_blocks = -(-request.num_computed // group.block_size)
            window = getattr(group, "window", None)
            first = 0 if window is None else max(0, request.num_computed - window + 1)
            for at, block in enumerate(table[:num_blocks]):
                end = min((at + 1) * group.block_size, request.num_computed)
                if block:
                    yield g, block, request.tokens[:end]
                else:
                    assert end <= first, f"seed {self.seed}: {name} lacks a block that it reads"

    def read(self, name: str) -> None:
        """Compare all that a request holds with what it must hold."""
        for g, block, tokens in self.blocks_of(name):
            for rank, memory in enumerate(self.memory):
                held, expected = memory["device"][block].tolist(), self.words(tokens, g, rank)
                assert held == expected, f"seed {self.seed}: {name} reads a block not its own"
                self.counts["words read"] += 2

    # -- jobs ------------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        return self.chances.choice([None, self.now_s + PATIENCE_S])

    def begin(self, job: Job | TierJob | None, direction: Any, name: str = "") -> None:
        if job is None:
            return
        pairs: list[tuple[Place, Place, int]] = []
        if isinstance(job, TierJob):
            ends = zip(job.host_slots.tolist(), job.disk_slots.tolist(), strict=True)
            for at, (host, disk) in enumerate(ends):
                for part in range(self.per_slot):
                    above: Place = ("host", host * self.per_slot + part)
                    below: Place = ("disk", disk * self.per_slot + part)
                    pair = (above, below) if direction == "demote" else (below, above)
                    pairs.append((*pair, at))
            num_blocks = len(job.host_slots)
        else:
            self.ledger.pool.pin(job.block_ids)
            ends = zip(job.block_ids.tolist(), job.host_slots.tolist(), strict=True)
            for at, (block, place) in enumerate(ends):
                above, below = ("device", block), ("host", place)
                pair = (above, below) if direction == "store" else (below, above)
                pairs.append((*pair, at))
            num_blocks = len(job.block_ids)
        words = [(at, word) for at in range(len(pairs)) for word in (0, 1)]
        left = [self.chances.sample(words, len(words)) for _ in range(self.num_ranks)]
        self.flights[job.job_id] = Flight(job, direction, pairs, num_blocks, left, name=name)
        self.counts[direction] += 1
        if self.image is not None:
            self.counts[f"{direction} beside an image"] += 1

    def copy(self, flight: Flight, rank: int, num_words: int) -> None:
        """Copy some of the words of a job."""
        memory, damaged, left = self.memory[rank], self.damaged[rank], flight.left[rank]
        for _ in range(min(num_words, len(left))):
            at, word = left.pop()
            (source, row), (target, to), _ = flight.pairs[at]
            memory[target][to, word] = memory[source][row, word]
            if (source, row) in damaged:
                damaged.add((target, to))
            elif not any(pair == at for pair, _ in left):
                damaged.discard((target, to))

    def report(self, flight: Flight, rank: int) -> None:
        """Report a rank's part, whose copy ends now, or is given up."""
        ok: bool | list[bool] = True
        if self.chances.random() < 0.1:
            flight.left[rank].clear()
            ok = False
        else:
            # A checksum finds what was damaged before or meanwhile.
            is_damaged = {
                at
                for source, target, at in flight.pairs
                if {source, target} & self.damaged[rank] and flight.direction != "store"
            }
            self.copy(flight, rank, 1 << 30)
            is_damaged |= {at for _, target, at in flight.pairs if target in self.damaged[rank]}
            if is_damaged or flight.direction in ("demote", "promote"):
                ok = [at not in is_damaged for at in range(flight.num_blocks)]
        flight.reported.add(rank)
        end = self.scheduler.complete(flight.job.job_id, ok=ok, rank=rank)
        assert (end is not None) == (len(flight.reported) == self.num_ranks)
        if end is not None:
            self.end(end)

    def end(self, end: JobEnd) -> None:
        flight = self.flights.pop(end.job_id)
        if flight.direction in ("store", "load"):
            self.ledger.pool.unpin(end.block_ids)
        if flight.direction == "load":
            name = flight.name
            request = self.requests.get(name)
            if request is None or request.job_id != end.job_id:
                return
            if end.ok:
                request.state, request.job_id = "running", 0
                self.ledger.cache(name, request.num_computed)
                self.read(name)
                self.counts["loaded"] += 1
            else:
                self.restart(name)

    def settle(self) -> None:
        for flight in list(self.flights.values()):
            for rank in set(range(self.num_ranks)) - flight.reported:
                self.report(flight, rank)

    # -- requests --------------------------------------------------------------------------------

    def restart(self, name: str) -> None:
        self.requests[name] = Request(self.requests[name].tokens)
        self.scheduler.restart(name)
        self.ledger.restart(name)

    def leave(self, name: str) -> None:
        del self.requests[name]
        self.scheduler.finish(name)
        self.ledger.free(name)

    def add(self) -> None:
        if len(self.requests) >= 5:
            return
        chain = self.chances.randrange(NUM_CHAINS)
        num_shared = self.chances.choice([8, 16, 24, 33])
        tail = [self.chances.randrange(2) for _ in range(self.chances.randrange(6))]
        tokens = [100 * chain + at for at in range(num_shared)] + tail
        self.num_added += 1
        name = f"r{self.num_added}"
        self.requests[name] = Request(tokens)
        hashes = hash_tokens(tokens, self.ledger.hash_block_size)
        self.ledger.add(name, hashes)
        self.scheduler.add(name, hashes)

    def admit(self, name: str) -> None:
        """Look a request up, and begin its load or its run."""
        request = self.requests[name]
        end = len(request.tokens) - 1
        hit = self.ledger.lookup(name, end)
        num_local = hit.num_tokens
        request.num_asked += 1
        may_wait = request.num_asked < 10
        found = self.scheduler.lookup(name, num_local, end, promote=may_wait)
        if found is None:
            self.counts["pending"] += 1
            return
        if self.is_asleep or self.chances.random() < 0.1:
            return  # it holds what was found
        if found and self.chances.random() < 0.2:
            unit = self.ledger.hit_block_size
            found = self.chances.randrange(found // unit + 1) * unit
        num_new = 0 if found else self.chances.randrange(1, len(request.tokens) - num_local + 1)
        blocks = self.ledger.allocate(
            name,
            num_new,
            hit=hit,
            num_external_tokens=found,
            delay_caching=found > 0,
        )
        if blocks is None:
            self.scheduler.release(name)
            return
        self.scheduler.invalidate(np.concatenate(blocks))
        if not found:
            self.scheduler.release(name)
            request.num_computed = num_local
            request.state = "running"
            self.read(name)
            self.compute(name, num_local + num_new)
            return
        try:
            job = self.scheduler.load(name, found, blocks, deadline=self.deadline())
        except StateError:  # a shorter load may need another window, or a block proved damaged
            self.counts["refused loads"] += 1
            self.restart(name)
            return
        request.state, request.job_id = "loading", job.job_id
        request.num_computed = num_local + found
        self.begin(job, "load", name)

    def compute(self, name: str, num_tokens: int) -> None:
        """Write the tokens up to `num_tokens`, and store what is full."""
        request = self.requests[name]
        request.num_computed, num_before = num_tokens, request.num_computed
        for g, block, tokens in self.blocks_of(name):
            if len(tokens) > num_before:
                for rank, memory in enumerate(self.memory):
                    memory["device"][block] = self.words(tokens, g, rank)
        self.ledger.cache(name, num_tokens)
        job = self.scheduler.store_step(
            self.ledger,
            [name],
            [num_tokens],
            max_blocks=self.chances.choice([None, None, 3]),
            deadline=self.deadline(),
        )
        self.begin(job, "store")

    def run(self, name: str) -> None:
        request = self.requests[name]
        self.read(name)
        if len(request.tokens) >= MOST_TOKENS:
            self.leave(name)
            return
        num_left = len(request.tokens) - request.num_computed
        if not num_left:
            request.tokens.append(self.chances.randrange(2))
            size = self.ledger.hash_block_size
            hashes = hash_tokens(request.tokens, size)[self.ledger.num_hashes(name) :]
            if len(hashes):
                self.ledger.extend(name, hashes)
                self.scheduler.extend(name, hashes)
            num_left = 1
        num_new = self.chances.randrange(1, num_left + 1)
        blocks = self.ledger.allocate(name, num_new)
        if blocks is None:
            self.leave(name) if self.chances.random() < 0.5 else self.restart(name)
            return
        self.scheduler.invalidate(np.concatenate(blocks))
        self.compute(name, request.num_computed + num_new)

    # -- sleep -----------------------------------------------------------------------------------

    def hold(self) -> None:
        """Hold an image of the device; perhaps let the device sleep."""
        if self.image is not None:
            return
        if self.chances.random() < 0.8:
            self.settle()
        try:
            missing = self.scheduler.hold_image(self.ledger)
        except (StateError, OutOfBlocks):
            self.counts["refused images"] += 1
            return
        for block, place in zip(missing.block_ids, missing.host_slots, strict=True):
            for rank, memory in enumerate(self.memory):
                memory["host"][place] = memory["device"][block]
                self.damaged[rank].discard(("host", int(place)))
        job = self.scheduler.image
        self.placed = list(zip(job.block_ids.tolist(), job.host_slots.tolist(), strict=True))
        self.image = [
            {place: memory["device"][block].tolist() for block, place in self.placed}
            for memory in self.memory
        ]
        self.counts["images"] += 1
        self.is_asleep = self.chances.random() < 0.7
        if self.is_asleep:
            for memory in self.memory:
                memory["device"][:] = GARBAGE

    def image_places(self) -> list[int] | None:
        """Return the places of the image on the host; None if it is known to be damaged."""
        try:
            places: list[int] = self.scheduler.image.host_slots.tolist()
        except StateError:
            return None
        return places

    def image_is_whole(self) -> bool:
        """Compare the image with what the device had, unless it is known to be damaged."""
        assert self.image is not None
        places = self.image_places()
        if places is None:
            return False
        is_whole = True
        for rank, expected in enumerate(self.image):
            for place in places:
                if ("host", place) in self.damaged[rank]:
                    is_whole = False
                    continue
                held = self.memory[rank]["host"][place].tolist()
                assert held == expected[place], f"seed {self.seed}: the image has lost a block"
                self.counts["words of images"] += 2
        return is_whole

    def wake(self) -> None:
        """End the sleep, and release the image."""
        if self.image is None:
            return
        is_whole = self.image_is_whole()
        if self.is_asleep:
            if is_whole:
                for block, place in self.placed:
                    for memory in self.memory:
                        memory["device"][block] = memory["host"][place]
                self.ledger.pool.evict(self.lost())
                self.counts["wakes"] += 1
            else:
                for name, request in self.requests.items():
                    if request.state != "waiting":
                        self.restart(name)
                self.ledger.pool.evict(range(1, NUM_DEVICE))
        self.scheduler.release_image()
        self.image, self.is_asleep = None, False
        for name, request in self.requests.items():
            if request.state == "running":
                self.read(name)

    def lost(self) -> list[int]:
        """Return the device blocks that no table has, whose content is in no image."""
        groups = range(len(self.groups))
        tables = [self.ledger.block_table(name, g) for name in self.requests for g in groups]
        return sorted(set(range(1, NUM_DEVICE)) - {int(at) for table in tables for at in table})

    def move_on(self) -> None:
        """Go on with another scheduler, from a snapshot; the movers have stopped."""
        snapshot = self.scheduler.snapshot()
        for flight in self.flights.values():
            if isinstance(flight.job, Job):
                self.ledger.pool.unpin(flight.job.block_ids)
        self.flights.clear()
        was_whole = self.image is not None and self.image_is_whole()
        self.scheduler = self.new_scheduler()
        self.scheduler.restore(snapshot)
        if self.image is not None:
            try:
                self.scheduler.image  # noqa: B018 - it raises
            except StateError:
                assert not was_whole, f"seed {self.seed}: a snapshot has lost an image"
        for name, request in self.requests.items():
            if request.state == "loading":
                self.restart(name)
        self.counts["snapshots"] += 1

    # -- turns -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Empty both tiers; awake, the weights change."""
        self.scheduler.reset()
        self.scheduler.set_disk("on")
        if not self.is_asleep and self.image is None:
            for name in list(self.requests):
                self.leave(name)
            self.ledger.pool.evict(range(1, NUM_DEVICE))
            self.weights += 1
        for name, request in self.requests.items():
            if request.state == "loading":
                self.restart(name)

    def expire(self) -> None:
        self.now_s += 0.7
        for job_id in self.scheduler.expire(self.now_s):
            name = self.flights[job_id].name
            if name in self.requests and self.requests[name].job_id == job_id:
                self.restart(name)

    def rot(self) -> None:
        """Damage a row of a memory on one rank."""
        rank = self.chances.randrange(self.num_ranks)
        name: Memory = self.chances.choice(["host", "disk"])
        row = self.chances.randrange(len(self.memory[rank][name]))
        pairs = [pair for flight in self.flights.values() for pair in flight.pairs]
        if any(target == (name, row) for _, target, _ in pairs):
            return  # its checksum comes after the copy
        self.memory[rank][name][row] = GARBAGE
        self.damaged[rank].add((name, row))

    def end_all(self) -> None:
        """Stop the movers, and the tier or a part of it."""
        kept = [
            job_id
            for job_id, flight in self.flights.items()
            if isinstance(flight.job, TierJob) and self.chances.random() < 0.7
        ]
        for end in self.scheduler.end_all(kept):
            self.end(end)

    def turn(self) -> None:
        """Do something, and check every invariant."""
        turn = self.chances.choices(list(TURNS), list(TURNS.values()))[0]
        if turn not in ("hold", "wake", "move_on") or self.sleeps:
            getattr(self, turn)()
        self.scheduler.check()
        self.ledger.check()
        if self.image is not None:
            self.image_is_whole()

    def some(self, *states: str) -> str:
        """Return a request in one of these states; empty if there is none."""
        names = [name for name, request in self.requests.items() if request.state in states]
        return self.chances.choice(names) if names else ""

    def serve(self) -> None:
        """Go on with a request."""
        name = self.some("waiting", "running")
        if name and self.requests[name].state == "waiting":
            self.admit(name)
        elif name and not self.is_asleep:
            self.run(name)

    def drop(self) -> None:
        """Finish or preempt a request, or give up what it holds."""
        if name := self.some("waiting", "loading", "running"):
            is_waiting = self.requests[name].state == "waiting"
            if self.chances.random() < 0.5:
                self.leave(name)
            elif is_waiting:
                self.scheduler.release(name)
            elif not self.is_asleep:
                self.restart(name)

    def forget_device(self) -> None:
        """Let the device evict all that no request holds."""
        if not self.is_asleep:
            self.ledger.pool.evict(self.lost())

    def demote(self) -> None:
        limit = self.chances.choice([None, 1, 3])
        self.begin(self.scheduler.demote(max_blocks=limit, deadline=self.deadline()), "demote")

    def promote(self) -> None:
        limit = self.chances.choice([None, 1, 3])
        self.begin(self.scheduler.promote(max_blocks=limit, deadline=self.deadline()), "promote")

    def go_on(self) -> None:
        """Let a rank copy a part of a job, and perhaps report it."""
        if not self.flights:
            return
        flight = self.chances.choice(list(self.flights.values()))
        rank = self.chances.randrange(self.num_ranks)
        if rank not in flight.reported:
            self.copy(flight, rank, self.chances.randrange(6))
            if self.chances.random() < 0.6:
                self.report(flight, rank)

    def store_lazily(self) -> None:
        if self.mode == "lazy" and not self.is_asleep:
            job = self.scheduler.store_evictable(self.ledger.pool, 8, deadline=self.deadline())
            self.begin(job, "store")

    def set_disk(self) -> None:
        is_on = self.chances.random() < 0.8
        self.scheduler.set_disk("on" if is_on else self.chances.choice(("read_only", "off")))

    def live(self, num_turns: int) -> None:
        """Turn often, then wake and serve everyone."""
        for _ in range(num_turns):
            self.turn()
        self.settle()
        self.wake()
        for name in list(self.requests):
            self.leave(name)
        self.settle()
        self.scheduler.check()
        assert len(self.scheduler.used_slots()) == self.scheduler.num_resident
