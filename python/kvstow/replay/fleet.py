r"""A fleet of servers and a tier that they share, by the accounting alone.

```
trace --> [ router ] --> server 0: host tier --+
                    \--> server 1: host tier --+-- put, contains, get --> [ shared store ]
```

Requests come one after another, in the order of the trace. Each is served to its end before the
next, so a block is in the store as soon as its request has ended. The device is left out, because
the host keeps all that the device has. The servers run the real scheduler.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from kvstow._core import ConfigError, FullAttention, OffloadScheduler
from kvstow.engine import Policy
from kvstow.memory import free_memory
from kvstow.replay.keys import block_digests
from kvstow.replay.trace import Trace, TraceRequest
from kvstow.tiers.claims import CLAIMS_PER_SLOT
from kvstow.transfer.layout import MAX_BLOCKS

Routing: TypeAlias = Literal["round-robin", "prefix"]
ROUTINGS: tuple[Routing, ...] = ("round-robin", "prefix")

MAX_SERVERS = 1024
_NAME = "request"
# What the accounting of a block on the host takes, its claims included.
_ACCOUNTING_BYTES = 1300
_MAX_SHARE = 1.25


class SharedBlocks:
    """A store that keeps the blocks that were put or read last.

    Attributes:
        num_evicted: blocks that it has dropped for room.
    """

    def __init__(self, max_blocks: int | None) -> None:
        """Begin empty. None for a store without a bound."""
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._max_blocks = max_blocks
        self.num_evicted = 0

    def __len__(self) -> int:
        """Return how many blocks it has."""
        return len(self._blocks)

    def has(self, digest: bytes) -> bool:
        """Return whether it has a block, as `contains` does: the block becomes no more recent."""
        return digest in self._blocks

    def get(self, digest: bytes) -> bool:
        """Return whether it has a block, which becomes the most recent."""
        if digest not in self._blocks:
            return False
        self._blocks.move_to_end(digest)
        return True

    def put(self, digest: bytes) -> None:
        """Keep a block."""
        self._blocks[digest] = None
        self._blocks.move_to_end(digest)
        while self._max_blocks is not None and len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
            self.num_evicted += 1


@dataclass(slots=True)
class FleetFigures:
    """What a fleet has done, in blocks.

    Attributes:
        asked: blocks of all prompts, partial last blocks included.
        host_hits: blocks that the host of the request's server had.
        shared_hits: blocks that came from the shared store.
        lost: blocks that the store was to have and had no more.
        puts: blocks that were written to the store.
        questions: requests that asked the store.
        asked_keys: the keys of these questions.
        busiest: those of `asked` that the server with the most of them got.
    """

    asked: int = 0
    host_hits: int = 0
    shared_hits: int = 0
    lost: int = 0
    puts: int = 0
    questions: int = 0
    asked_keys: int = 0
    busiest: int = 0

    @property
    def hit_ratio(self) -> float:
        """Blocks that were not computed, of those asked for."""
        return (self.host_hits + self.shared_hits) / max(self.asked, 1)


class _Server:
    """One server: a host tier, and the index of what the store is known to have."""

    def __init__(self, host_blocks: int, policy: Policy, store: SharedBlocks | None) -> None:
        num_claims = 0 if store is None else CLAIMS_PER_SLOT * host_blocks
        # The tier counts blocks, so their number of tokens does not matter.
        self.tier = OffloadScheduler(
            host_blocks,
            [FullAttention(1)],
            policy=policy,
            num_disk_blocks=num_claims,
            max_disk_blocks_in_flight=max(num_claims, 1),
        )
        self._store = store
        self.num_blocks = 0  # full ones, as the router counts them
        self.num_asked = 0
        if store is not None:
            self.tier.set_disk("on")

    def serve(self, digests: Sequence[bytes], num_prompt: int, figures: FleetFigures) -> None:
        """Serve a request. Its prompt may hit `num_prompt` blocks."""
        tier = self.tier
        tier.add(_NAME, digests)
        on_host = found = tier.lookup(_NAME, 0, num_prompt, promote=False) or 0
        if self._store is not None:
            tier.release(_NAME)
            found = self._promoted(self._store, num_prompt, figures)
        figures.host_hits += min(on_host, found)
        figures.shared_hits += max(0, found - on_host)
        blocks = np.arange(1, 1 + len(digests), dtype=np.int32)
        if found:
            tier.complete(tier.load(_NAME, found, [blocks[:found]]).job_id)
        job = tier.store([_NAME], [len(digests)], blocks, [0, len(digests)])
        if job is not None:
            tier.complete(job.job_id)
        while self._store is not None and (demote := tier.demote()) is not None:
            for digest in demote.hashes:
                self._store.put(digest)
            figures.puts += len(demote)
            tier.complete(demote.job_id)
        tier.finish(_NAME)

    def _promoted(self, store: SharedBlocks, num_prompt: int, figures: FleetFigures) -> int:
        """Ask the store, bring what it has to the host, and return the blocks of the hit."""
        tier = self.tier
        hashes, groups, parents = tier.unclaimed(_NAME, 0, num_prompt)
        if hashes:
            figures.questions += 1
            figures.asked_keys += len(hashes)
            # Behind the first gap no block helps.
            num_found = next((at for at, one in enumerate(hashes) if not store.has(one)), None)
            tier.claim(hashes[:num_found], groups[:num_found], parents[:num_found])
        while (found := tier.lookup(_NAME, 0, num_prompt)) is None:
            job = tier.promote()
            assert job is not None, "a lookup waits only for a promote"
            ok = [store.get(digest) for digest in job.hashes]
            figures.lost += ok.count(False)
            tier.complete(job.job_id, ok=ok)
        return found


@dataclass
class _Router:
    """Chooses the server of each request.

    Attributes:
        routing: "prefix" takes the server that last got the longest prefix of the prompt, unless
            that server has got over 1.25 times its share of the blocks.
    """

    servers: Sequence[_Server]
    routing: Routing
    num_requests: int = 0
    _last: dict[bytes, int] = field(default_factory=dict)

    def choose(self, digests: Sequence[bytes]) -> _Server:
        at = self.num_requests % len(self.servers)
        if self.routing == "prefix":
            at = self._best(digests)
            self._last.update(dict.fromkeys(digests, at))
        self.num_requests += 1
        self.servers[at].num_blocks += len(digests)
        return self.servers[at]

    def _best(self, digests: Sequence[bytes]) -> int:
        loads = [server.num_blocks for server in self.servers]
        known = (self._last[digest] for digest in reversed(digests) if digest in self._last)
        best = next(known, None)
        most = _MAX_SHARE * (sum(loads) + len(digests)) / len(loads)
        if best is None or (loads[best] + len(digests) > most and loads[best] > min(loads)):
            return loads.index(min(loads))
        return best


@dataclass(frozen=True)
class Fleet:
    """What every server of a fleet has in common.

    Attributes:
        host_blocks: slots of the host tier of each.
        policy: which of them are evicted first.
        routing: how requests find their server.
        shared_blocks: blocks of the shared store; None for no bound.
    """

    host_blocks: int
    policy: Policy = "lru"
    routing: Routing = "round-robin"
    shared_blocks: int | None = None

    def check(self, num_servers: int) -> None:
        """Raise `ConfigError` for sizes that cannot be, or that this machine lacks memory for."""
        if not 1 <= num_servers <= MAX_SERVERS:
            raise ConfigError(f"--servers is {num_servers}: it must be 1 to {MAX_SERVERS}")
        if not 1 <= self.host_blocks < MAX_BLOCKS:
            raise ConfigError(
                f"--host-blocks is {self.host_blocks}: it must be 1 to {MAX_BLOCKS - 1}, and 1 is "
                "as good as none"
            )
        if self.shared_blocks is not None and self.shared_blocks < 1:
            raise ConfigError(
                f"--shared-blocks is {self.shared_blocks}: it must be 1 or more, or left out for a "
                "store without a bound"
            )
        needed_bytes, free_bytes = num_servers * self.host_blocks * _ACCOUNTING_BYTES, free_memory()
        if free_bytes is not None and needed_bytes > free_bytes:
            raise ConfigError(
                f"the accounting of {num_servers} servers with {self.host_blocks} host blocks each "
                f"needs {needed_bytes / 2**30:,.1f} GiB, and {free_bytes / 2**30:,.1f} GiB of "
                "memory are free: lower --servers or --host-blocks"
            )

    def serve(
        self,
        trace: Trace,
        num_servers: int,
        *,
        is_shared: bool,
        served: Callable[[], object] = lambda: None,
    ) -> FleetFigures:
        """Serve a trace, and return what was hit.

        Args:
            trace: the requests.
            num_servers: the servers.
            is_shared: whether there is a shared store.
            served: called after each request.

        Raises:
            ConfigError: as `check`.
        """
        self.check(num_servers)
        store = SharedBlocks(self.shared_blocks) if is_shared else None
        servers = [_Server(self.host_blocks, self.policy, store) for _ in range(num_servers)]
        router, figures = _Router(servers, self.routing), FleetFigures()
        for request, digests in _requests(trace):
            num_prompt = min((request.prompt_tokens - 1) // trace.block_size, len(digests))
            prompt = digests[: len(request.trace_ids)]
            server = router.choose(prompt)
            server.serve(digests, num_prompt, figures)
            server.num_asked += len(request.trace_ids)
            served()
        figures.asked = sum(server.num_asked for server in servers)
        figures.busiest = max(server.num_asked for server in servers)
        return figures


def _requests(trace: Trace) -> Iterator[tuple[TraceRequest, list[bytes]]]:
    """Yield each request with the digests of its full blocks, generated ones included."""
    for request in trace.requests:
        digests = block_digests(request, trace.block_size)
        yield request, digests[: request.total_tokens // trace.block_size]


@dataclass(frozen=True, slots=True)
class Row:
    """A fleet of one size, without and with a shared store."""

    num_servers: int
    alone: FleetFigures
    shared: FleetFigures

    def as_json(self) -> dict[str, object]:
        """Return the row for `json.dumps`."""
        return {
            "servers": self.num_servers,
            "alone": asdict(self.alone) | {"hit_ratio": self.alone.hit_ratio},
            "shared": asdict(self.shared) | {"hit_ratio": self.shared.hit_ratio},
        }


def serve_all(
    fleet: Fleet,
    trace: Trace,
    numbers: Sequence[int],
    served: Callable[[], object] = lambda: None,
) -> list[Row]:
    """Serve a trace by fleets of these sizes, each without and with a shared store."""
    return [
        Row(
            number,
            fleet.serve(trace, number, is_shared=False, served=served),
            fleet.serve(trace, number, is_shared=True, served=served),
        )
        for number in numbers
    ]
