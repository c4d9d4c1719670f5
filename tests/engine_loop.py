"""An engine's loop with random turns: the KV of each token is known, and every read is compared.

The device is a queue of computes, as a CUDA stream is. A launched compute runs later, in order.
Only then it writes its tokens and sets its event. A token's KV depends on all tokens up to it. So a
block that no request wrote, or that another request wrote, never compares equal.
"""

import random
import time
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstow import (
    AdmissionState,
    Engine,
    FullAttention,
    OutOfBlocks,
    SlidingWindow,
    StateError,
    StateSpace,
    UnknownRequest,
    hash_tokens,
)
from kvstow.transfer import READY, BlockLayout, Event, HostEvent

BLOCK = 4
GARBAGE = -1
SHAPES: dict[str, dict[str, Any]] = {
    "eager": {},
    "lazy": {"mode": "lazy", "horizon_blocks": 8},
    "window": {"windows": 1, "num_blocks": 26},
    "lazy window": {"windows": 1, "num_blocks": 26, "mode": "lazy", "horizon_blocks": 16},
    "states": {"states": 1, "num_blocks": 26},
    "ranks": {"world_size": 2},
    "slots of two": {"blocks_per_slot": 2},
}


@dataclass
class Request:
    """A request, as the loop knows it.

    Attributes:
        tokens: known so far.
        num_done: tokens whose KV is on the device once all launched computes have run.
        num_hashed: tokens whose blocks' hashes the engine knows.
    """

    tokens: list[int]
    num_done: int = 0
    num_hashed: int = 0
    values: list[int] = field(default_factory=list)

    def kv(self, group: int, rank: int) -> npt.NDArray[np.int64]:
        """Return the KV of all known tokens."""
        known = self.values[-1] if self.values else 0
        for token in self.tokens[len(self.values) :]:
            known = zlib.crc32(token.to_bytes(4, "little"), known)
            self.values.append(known)
        return np.array(self.values) + (group << 33) + (rank << 36)


class Loop:
    """An engine, its device, and the requests that it serves."""

    def __init__(
        self,
        seed: int,
        *,
        num_blocks: int = 14,
        num_host_blocks: int = 30,
        windows: int = 0,
        states: int = 0,
        folder: Path | None = None,
        **options: Any,
    ) -> None:
        self.seed = seed
        self.chances = random.Random(seed)
        self.groups: list[FullAttention | SlidingWindow | StateSpace] = [FullAttention(BLOCK)]
        self.groups += [SlidingWindow(BLOCK, 6)] * windows + [StateSpace(BLOCK)] * states
        self.world_size = int(options.get("world_size", 1))
        self.folder = folder
        self.requests: dict[str, Request] = {}
        self.launched: deque[tuple[Callable[[], None], HostEvent]] = deque()
        self.is_device_busy = self.must_reset = False
        self.num_added = self.num_hits = self.num_loads = self.num_checked = 0
        self.memory = self.new_memory(num_blocks)
        self.engine = Engine(
            num_blocks, num_host_blocks, self.groups, self.layouts, **options
        )  # fmt: skip

    def new_memory(self, num_blocks: int) -> list[list[npt.NDArray[np.int64]]]:
        shape = (num_blocks, BLOCK)
        return [[np.full(shape, GARBAGE) for _ in self.groups] for _ in range(self.world_size)]

    @property
    def layouts(self) -> Any:
        ranks = [[BlockLayout.from_arrays([group]) for group in own] for own in self.memory]
        return ranks if self.world_size > 1 else ranks[0]

    # -- the device ----------------------------------------------------------------------------

    @property
    def last(self) -> Event:
        """The event that a load must wait for."""
        return self.launched[-1][1] if self.launched else READY

    def launch(self, parts: list[tuple[str, int, int]]) -> HostEvent:
        """Queue the compute of tokens `begin` to `end` of some requests."""
        event = HostEvent()
        calls = [self.kernel(name, begin, end) for name, begin, end in parts]

        def run() -> None:
            for call in calls:
                call()

        self.launched.append((run, event))
        return event

    def kernel(self, name: str, begin: int, end: int) -> Callable[[], None]:
        tables, request, memory = self.engine.tables(name), self.requests[name], self.memory
        values = {
            (rank, group): request.kv(group, rank)[:end]
            for rank in range(self.world_size)
            for group in range(len(self.groups))
        }

        def run() -> None:
            at = np.arange(end)
            for (rank, group), value in values.items():
                blocks, place = tables[group][at // BLOCK], at % BLOCK
                cells = memory[rank][group]
                assert blocks[self.first_read(group, begin) : begin].all(), (
                    f"seed {self.seed}: {name} lacks a block of group {group} that it reads"
                )
                is_read, is_written = (blocks > 0) & (at < begin), at >= begin
                if isinstance(self.groups[group], StateSpace):  # a block holds one state
                    is_read &= at == begin - 1
                    is_written &= (place == BLOCK - 1) | (at == end - 1)
                    place[:] = 0
                held = cells[blocks[is_read], place[is_read]]
                assert held.tolist() == value[is_read].tolist(), (
                    f"seed {self.seed}: {name} reads KV of group {group} that is not its own"
                )
                self.num_checked += len(held)
                cells[blocks[is_written], place[is_written]] = value[is_written]
                cells[0] = GARBAGE

        return run

    def first_read(self, group: int, begin: int) -> int:
        """Return the first token whose KV token `begin` needs, in a group."""
        attention = self.groups[group]
        if isinstance(attention, StateSpace):
            return max(0, begin - 1)
        window = attention.window if isinstance(attention, SlidingWindow) else begin + 1
        return max(0, begin - window + 1)

    def run_one(self) -> None:
        """Run the compute that was launched first."""
        self.is_device_busy = True  # no interrupt of the engine's thread reaches the device
        run, event = self.launched.popleft()
        run()
        event.set()
        self.is_device_busy = False

    # -- the loop ------------------------------------------------------------------------------

    def add(self) -> None:
        """Add a request whose prompt shares its begin with others."""
        head = self.chances.choice([1, 2, 3])
        num_shared = self.chances.randrange(0, 25)
        tail = [self.chances.randrange(50) for _ in range(self.chances.randrange(1, 8))]
        request = Request([100 * head + at for at in range(num_shared)] + tail)
        self.num_added += 1
        name = f"r{self.num_added}"
        self.requests[name] = request
        self.engine.add(name, hash_tokens(request.tokens, BLOCK))
        request.num_hashed = len(request.tokens) // BLOCK * BLOCK

    def state(self, name: str) -> str:
        return self.engine._state.requests[name].state

    def names(self, state: str) -> list[str]:
        return [name for name in self.requests if self.state(name) == state]

    def admit(self, name: str) -> None:
        request = self.requests[name]
        num_new = self.chances.randrange(1, 30)
        try:
            found = self.engine.admit(
                name,
                len(request.tokens),
                num_new,
                after=self.last,
                num_lookahead_tokens=self.num_lookahead(),
            )
        except OutOfBlocks:
            self.leave(name)
            return
        if found.state in {AdmissionState.RUNS, AdmissionState.LOADS}:
            request.num_done = found.num_hit_tokens + found.num_external_tokens
            self.num_hits += found.num_hit_tokens
            self.num_loads += found.state is AdmissionState.LOADS

    def grow(self, name: str) -> None:
        """Grant a running request slots for more tokens, generated ones among them."""
        request = self.requests[name]
        num_granted = self.engine.ledger.num_granted_tokens(name)
        if num_granted >= len(request.tokens):
            request.tokens.append(self.chances.randrange(50))
            num_full = len(request.tokens) // BLOCK * BLOCK
            if num_full > request.num_hashed:
                hashes = hash_tokens(request.tokens, BLOCK)[request.num_hashed // BLOCK :]
                self.engine.extend(name, hashes)
                request.num_hashed = num_full
        num_new = self.chances.randint(1, len(request.tokens) - num_granted)
        num_lookahead = self.num_lookahead()
        try:
            step = self.engine.step(
                [name],
                [num_new],
                num_lookahead_tokens=num_lookahead,
                num_in_flight_tokens=max(0, num_granted - request.num_done),
            )
        except OutOfBlocks:  # the next turn may ask for fewer tokens
            return
        if not step.num_granted:
            self.engine.preempt(name)

    def num_lookahead(self) -> int:
        return self.chances.choice([0, 0, BLOCK + 1])

    def compute(self, names: list[str]) -> None:
        """Launch the compute of all granted tokens, and report it."""
        parts = []
        for name in names:
            granted = self.engine.ledger.num_granted_tokens(name)
            if granted > self.requests[name].num_done:
                parts.append((name, self.requests[name].num_done, granted))
        if not parts:
            return
        event = self.launch(parts)
        for name, _, end in parts:
            self.requests[name].num_done = end
        if self.chances.random() < 0.9:  # else the requests leave in between, perhaps
            self.report(names, event)

    def report(self, names: list[str], event: Event) -> None:
        counts = [self.requests[name].num_done for name in names]
        self.engine.computed(names, counts, after=event)

    def leave(self, name: str) -> None:
        del self.requests[name]
        self.engine.finish(name)

    def poll(self) -> None:
        landed = self.engine.poll()
        for name in landed.loaded:
            assert self.state(name) == "running"

    def reset(self) -> None:
        """Reset, and after an interrupt again: until then no sleep may name the weights."""
        self.must_reset = True
        self.engine.reset()
        self.must_reset = False

    def sleep(self) -> None:
        """Sleep, and wake over other memory and under other ids."""
        to: dict[str, Any] = {}
        if self.folder is not None and self.chances.random() < 0.5:
            to = {"to": self.folder / "image"}
        who: dict[str, Any] = {"identity": "a model", "weights_version": "1"}
        while self.launched:
            self.run_one()
        preserve = self.chances.random() < 0.7
        try:
            self.engine.sleep(after=READY, preserve=preserve, **to, **who)
        except OutOfBlocks:
            return
        except StateError:  # a reset has left the weights without a name
            assert to
            return
        self.wake(who)

    def wake(self, who: dict[str, Any]) -> None:
        num_blocks = self.engine.ledger.pool.num_blocks
        for group in (group for own in self.memory for group in own):
            group[:] = GARBAGE - 1
        self.memory = self.new_memory(num_blocks)
        block_ids: Any = self.chances.choice(["same", "packed"])
        self.engine.wake(self.layouts, after=READY, block_ids=block_ids, **who)

    def turn(self) -> None:
        """Carry out one random operation."""
        chance = self.chances.random()
        running, added = self.names("running"), self.names("added")
        if chance < 0.15 and len(self.requests) < 8:
            self.add()
        elif chance < 0.35 and added:
            self.admit(self.chances.choice(added))
        elif chance < 0.50 and running:
            self.grow(self.chances.choice(running))
        elif chance < 0.65 and running:
            self.compute(self.chances.sample(running, self.chances.randint(1, len(running))))
        elif chance < 0.75 and self.launched:
            self.run_one()
        elif chance < 0.88:
            self.poll()
        elif chance < 0.94 and self.requests:
            self.leave(self.chances.choice(list(self.requests)))
        elif chance < 0.97 and self.requests:
            self.engine.preempt(self.chances.choice(list(self.requests)))
        elif chance < 0.98 and running:
            name = self.chances.choice(running)
            with_slots = self.engine.ledger.num_granted_tokens(name)
            done = self.requests[name].num_done
            if with_slots > done > 0:
                with suppress(StateError):  # a window has given up blocks that they read
                    self.engine.rewind(name, done)
        elif chance < 0.985:
            self.sleep()
        elif chance < 0.987:
            self.reset()

    def serve_all(self) -> None:
        """Serve every request to its end, and three new ones."""
        for _ in range(3):
            self.add()
        end_s = time.monotonic() + 60
        while self.requests and time.monotonic() < end_s:
            self.poll()
            while self.launched:
                self.run_one()
            for name in list(self.requests):
                state = self.state(name)
                if state == "added":
                    self.admit(name)
                elif state == "running":
                    granted = self.engine.ledger.num_granted_tokens(name)
                    if granted >= len(self.requests[name].tokens):
                        self.compute([name])
                        self.leave(name)
                    else:
                        self.grow(name)
        assert not self.requests, f"seed {self.seed}: {list(self.requests)} never end"
        while self.launched:
            self.run_one()

    def adopt(self) -> None:
        """Go on after an operation was cut short, with the requests that the engine knows."""
        for name in list(self.requests):
            try:
                self.engine.preempt(name)
            except UnknownRequest:
                del self.requests[name]
                continue
            hashes = self.engine.ledger.known(name)[0]
            self.requests[name].num_hashed = len(hashes) * BLOCK
        for name in self.engine._state.requests.keys() - self.requests.keys():
            self.engine.finish(name)

    def close(self) -> None:
        self.engine.close()
        self.engine.check()
        for name in list(self.engine._state.requests):
            self.engine.finish(name)
        pool = self.engine.ledger.pool
        assert pool.num_free == pool.num_blocks - 1, f"seed {self.seed}: a pin was left behind"


def turns(loop: Loop, num_turns: int) -> None:
    """Take random turns, and check the engine after every fifth."""
    for number in range(num_turns):
        loop.turn()
        if number % 5 == 0:
            loop.engine.check()
    loop.serve_all()
