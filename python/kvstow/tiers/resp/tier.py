"""`RespTier`: a shared tier on RESP servers.

How it could serve a wrong block, and what prevents it:

- A block of another model, schema, group or key lies under the key, whole or in part: the header
  must equal the one of this block, byte for byte, and the bytes their checksum.
- A host slot changes while a put reads it: the caller reserves it until the ticket has ended. The
  checksum is taken before, so a change meanwhile makes a block that no get accepts.
- Bytes arrive in a host slot after its job has ended: a job ends only after its thread has read
  the whole answer or has closed the connection.
- An answer belongs to an earlier command: a connection is closed after each error and each late
  answer, and if bytes wait that nobody asked for.
- A server keeps a bad block for ever: a get that finds one deletes it, and a put always replaces
  what is there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from kvstow._core import TransferError
from kvstow.arguments import checked_int
from kvstow.tiers.breaker import Breaker
from kvstow.tiers.queued import DEFAULT_QUEUED_BYTES, DEFAULT_TIMEOUT_S, Job, QueuedTier, Worker
from kvstow.tiers.resp.address import Address, Credentials, Node, Security
from kvstow.tiers.resp.commands import Memory, Part, Rows, contains, delete, get, memory_policy, put
from kvstow.tiers.resp.nodes import Nodes, NoTime, Topology, seconds_left
from kvstow.tiers.resp.reasons import reason
from kvstow.tiers.resp.wire import Refusal, Wire, WireError
from kvstow.transfer import HostArena

logger = logging.getLogger(__name__)

# A server that had less time to answer has not failed.
_FAIR_S: Final = 0.02
# Answers of a server that no longer has the key, of one whose key moves, and of one that is full.
_MOVED: Final = frozenset({"MOVED", "READONLY"})
_MOVES: Final = frozenset({"ASK", "TRYAGAIN"})
_FULL: Final = frozenset({"OOM"})

_T = TypeVar("_T")


class RespTier(QueuedTier):
    """Blocks on RESP servers: Redis, Valkey, or another one with SET, GET, EXISTS and DEL.

    An answer never takes longer than its deadline. A server that fails several times in a row is
    left alone for a while (`Breaker`), and all of its blocks are misses.
    """

    def __init__(  # noqa: PLR0913 - options, each with a default
        self,
        arena: HostArena,
        url: str,
        namespace: bytes,
        *,
        credentials: Credentials | None = None,
        security: Security | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        ttl_s: int | None = None,
        num_threads: int = 2,
        max_queued_bytes: int = DEFAULT_QUEUED_BYTES,
    ) -> None:
        """Start the threads, which connect when the first job comes.

        Args:
            arena: the host side.
            url: the servers; see `kvstow.tiers.resp.address.FORMS`.
            namespace: 16 bytes, a digest of all that decides what a block's bytes mean.
            credentials: how to log in; None for those of the environment.
            security: how TLS proves both sides.
            timeout_s: the most seconds for a job without a deadline, and for connecting.
            ttl_s: seconds after which the store drops a block; None to keep it.
            num_threads: threads for puts, and as many for all other calls.
            max_queued_bytes: bytes of puts that may wait. More puts fail at once.

        Raises:
            ConfigError: a wrong argument, or redis-py is not installed.
            StateError: the arena is closed, or the system starts no more threads.
        """
        super().__init__(
            arena,
            namespace,
            timeout_s=timeout_s,
            num_threads=num_threads,
            max_queued_bytes=max_queued_bytes,
        )
        self.address: Final = Address.parse(url)
        fix = "pass whole seconds, or None"
        ttl = None if ttl_s is None else checked_int("ttl_s", ttl_s, 1, 2**31 - 1, fix)
        self.set_options: Final = () if ttl is None else (b"EX", b"%d" % ttl)
        self.nodes: Final = Nodes(
            self.address, credentials or Credentials.find(), security or Security(), self.timeout_s
        )
        self._breakers: dict[Node | None, Breaker] = {}
        self._breakers_lock = threading.Lock()
        self._seen: set[Node] = set()
        self.start()

    @property
    def rows(self) -> Rows:
        """All host slots, one a row."""
        return self._rows

    def breaker(self, node: Node | None) -> Breaker:
        """Return the breaker of a server. None stands for the question which server has a key."""
        with self._breakers_lock:
            return self._breakers.setdefault(node, Breaker())

    def is_new(self, node: Node) -> bool:
        """Return whether this is the first question about a server."""
        with self._breakers_lock:
            is_new = node not in self._seen
            self._seen.add(node)
        return is_new

    def _worker(self) -> Worker:
        return _Connections(self)


class _Connections:
    """One thread's connections, one to each server."""

    def __init__(self, tier: RespTier) -> None:
        self._tier = tier
        self._wires: dict[Node, Wire] = {}
        self._failures: tuple[type[Exception], ...] = tier.nodes.errors

    def hand_over(self, _: Callable[[], None]) -> bool:
        """Return False, because a thread is good for any number of parts."""
        return False

    def close(self) -> None:
        """Close all connections."""
        for wire in self._wires.values():
            wire.close()
        self._wires.clear()

    def carry_out(self, job: Job, part: range) -> None:
        """Ask each server for the blocks that it has."""
        blocks, key = job.blocks, job.namespace.key
        keys = [key(int(blocks.groups[at]), blocks.hashes[at]) for at in part]
        assigned = self._topology(job).assign(keys)
        first = None
        if num_lost := len(keys) - sum(map(len, assigned.values())):
            self._tier.nodes.doubt()
            where = f"the cluster at {self._tier.address}"
            first = TransferError(f"no server of {where} has the slots of {num_lost} blocks")
        for node, places in assigned.items():
            positions = [part[at] for at in places]
            own = Part(
                positions,
                [keys[at] for at in places],
                [int(blocks.groups[at]) for at in positions],
                [blocks.hashes[at] for at in positions],
                [int(job.host_slots[at]) for at in positions] if len(job.host_slots) else [],
            )
            try:
                self._attempt(node, job, partial(self._ask, node, job, own))
            except TransferError as error:
                first = first or error
        if first is not None:
            raise first

    def _topology(self, job: Job) -> Topology:
        """Return which server has which key, as it was known before if no server says it now.

        Raises:
            TransferError: no server has said it yet.
        """
        nodes = self._tier.nodes
        if nodes.must_ask:
            try:
                return self._attempt(None, job, lambda: nodes.ask(job.until_s))
            except TransferError:
                if nodes.known is None:
                    raise
        assert nodes.known is not None
        return nodes.known

    def _ask(self, node: Node, job: Job, part: Part) -> None:
        """Ask one server, and note its answers."""
        tier = self._tier
        if node in self._wires and not self._wires[node].is_idle:
            self._wires.pop(node).close()
            tier.nodes.doubt()  # a server that is no master any more closes its connections
        if node not in self._wires:
            self._wires[node] = tier.nodes.connect(node, seconds_left(job.until_s))
        wire = self._wires[node]
        seconds_left(job.until_s)  # else the connection serves the next call
        wire.limit(min(job.until_s, time.monotonic() + tier.timeout_s))
        num_wrong, memory = 0, Memory(tier.rows, tier.sums)
        try:
            if job.operation == "put" and tier.is_new(node):
                _warn_of_policy(node, *memory_policy(wire))
            if job.operation == "put":
                ok, refusal = put(wire, part, memory, job.namespace, tier.set_options)
            elif job.operation == "get":
                ok, refusal, num_wrong = get(wire, part, memory, job.namespace)
            elif job.operation == "contains":
                ok, refusal = contains(wire, part)
            else:
                ok, refusal = delete(wire, part)
        except BaseException:
            self._wires.pop(node).close()
            raise
        job.ok[part.positions] = ok
        if num_wrong:
            tier.count_wrong(num_wrong)
        if refusal is not None:
            raise refusal

    def _attempt(self, node: Node | None, job: Job, call: Callable[[], _T]) -> _T:
        """Return what `call` returns, unless the breaker of this server is open.

        Raises:
            TransferError: the breaker is open, it is too late, or the call failed.
        """
        breaker, begin_s = self._tier.breaker(node), time.monotonic()
        name = self._tier.address if node is None else node
        if not breaker.may_try():
            raise TransferError(f"{name} has failed and is left alone for a while")
        try:
            result = call()
        except Refusal as refusal:
            if refusal.code in _MOVED:
                self._tier.nodes.doubt()
            elif refusal.code not in _FULL | _MOVES:
                self._tier.nodes.doubt()
                _failed(breaker, name, refusal)
            raise TransferError(f"{name} refused: {reason(refusal)}") from refusal
        except NoTime as error:
            raise TransferError(f"{name}: {error}") from error
        except self._failures as error:
            self._tier.nodes.doubt()
            # An answer that had hardly any time says nothing of the server.
            if not isinstance(error, WireError) or job.until_s - begin_s >= _FAIR_S:
                _failed(breaker, name, error)
            raise TransferError(f"{name}: {reason(error)}") from error
        if breaker.succeeded():
            logger.warning("kvstow: the shared tier at %s answers again", name)
        return result


def _failed(breaker: Breaker, name: object, error: Exception) -> None:
    if breaker.failed():
        logger.warning(
            "kvstow: the shared tier at %s fails (%s). It is left alone for some seconds at a "
            "time, and its blocks are recomputed",
            name,
            reason(error),
        )


def _warn_of_policy(node: Node, policy: str, max_bytes: int) -> None:
    """Warn of a server that does not make room for new blocks, or that has no bound."""
    if policy == "noeviction" and max_bytes:
        logger.warning(
            "kvstow: the server at %s has maxmemory-policy noeviction: once it is full, it refuses "
            "new blocks. Set maxmemory-policy allkeys-lru",
            node,
        )
    elif policy and not max_bytes:
        logger.warning(
            "kvstow: the server at %s has maxmemory 0, so it grows until the machine has no memory "
            "left. Set maxmemory, and maxmemory-policy allkeys-lru",
            node,
        )
