"""`RespTier`: the queues and threads of a shared tier on RESP servers.

```
put      -> [bounded queue] -> threads of puts  -\
get, contains, delete -> [queue] -> other threads -+-> one connection per thread and server
```

How it could serve a wrong block, and what prevents it:

- A block of another model, schema, group or key lies under the key, whole or in part: the header
  must equal the one of this block, byte for byte, and the bytes their checksum.
- A host slot changes while a put reads it: the caller reserves it until the ticket has ended. The
  checksum is taken before, so a change meanwhile makes a block that no get accepts.
- Bytes arrive in a host slot after its job has ended: a job ends only after its thread has read
  the whole answer or has closed the connection.
- An answer belongs to an earlier command: a connection is closed after each error and each late
  answer.
- A server keeps a bad block for ever: a get that finds one deletes it, and a put always replaces
  what is there.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Final, Literal, TypeAlias, TypeVar

import numpy as np

from kvstow._core import ConfigError, StateError, TransferError
from kvstow.arguments import checked_int
from kvstow.tiers.breaker import Breaker
from kvstow.tiers.framed import Namespace
from kvstow.tiers.resp.address import Address, Credentials, Node, Security
from kvstow.tiers.resp.commands import Part, contains, delete, get, put
from kvstow.tiers.resp.nodes import Nodes
from kvstow.tiers.resp.wire import Refusal, Wire, WireError
from kvstow.tiers.ticket import Bools, TierTicket
from kvstow.tiers.tier import Checked, Mode, SharedTier, TierStats
from kvstow.transfer import HostArena
from kvstow.transfer.fork import FORKED, close_in_children
from kvstow.transfer.mover import Index

logger = logging.getLogger(__name__)

Operation: TypeAlias = Literal["put", "get", "contains", "delete"]

DEFAULT_TIMEOUT_S: Final = 5.0
DEFAULT_QUEUED_BYTES: Final = 256 << 20
_BLOCKS_PER_CHUNK: Final = 16
_KEYS_PER_CHUNK: Final = 8192
_MAX_THREADS: Final = 64
# A server that had less time to answer has not failed.
_FAIR_S: Final = 0.02
# Answers of a server that no longer has the key, and of one that is full.
_MOVED: Final = frozenset({"MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "READONLY"})
_FULL: Final = frozenset({"OOM"})

_T = TypeVar("_T")


@dataclass(slots=True)
class _Job:
    """One call, until all of its chunks have ended."""

    operation: Operation
    blocks: Checked
    host_slots: Index
    ticket: TierTicket
    until_s: float
    num_chunks: int
    ok: Bools
    error: TransferError | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_Chunk: TypeAlias = tuple[_Job, range]


class RespTier(SharedTier):
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
            StateError: the arena is closed.
        """
        super().__init__(arena)
        self.address: Final = Address.parse(url)
        self._namespace = Namespace(namespace)
        self._timeout_s = _checked_seconds("timeout_s", timeout_s)
        fix = "pass whole seconds, or None"
        ttl = None if ttl_s is None else checked_int("ttl_s", ttl_s, 1, 2**31 - 1, fix)
        self._set_options = () if ttl is None else (b"EX", b"%d" % ttl)
        threads = checked_int("num_threads", num_threads, 1, _MAX_THREADS, "pass 1 to 4")
        self._max_queued_bytes = checked_int(
            "max_queued_bytes", max_queued_bytes, self.slot_bytes, 2**63 - 1, "pass a block or more"
        )
        self._nodes = Nodes(
            self.address, credentials or Credentials.find(), security or Security(), self._timeout_s
        )
        self._failures: tuple[type[Exception], ...] = (WireError, OSError, *self._nodes.errors)
        self._breakers: dict[Node | None, Breaker] = {}
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(TierStats.__dataclass_fields__, 0)
        self._queued_bytes = 0
        self._is_closed = self._is_forked = False
        self._puts: SimpleQueue[_Chunk | None] = SimpleQueue()
        self._others: SimpleQueue[_Chunk | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name="kvstow-resp", daemon=True)
            for queue in (self._puts, self._others)
            for _ in range(threads)
        ]
        close_in_children(self)
        for thread in self._threads:
            thread.start()

    # -- what the caller's thread does -----------------------------------------------------------

    @property
    def mode(self) -> Mode:
        """What the tier still does. A server that fails may come back, so this stays on."""
        return "off" if self._is_closed else "on"

    @property
    def error(self) -> TransferError | None:
        """Why the tier is off; None, because a server that fails may come back."""
        return None

    def stats(self) -> TierStats:
        """Return what the tier has done, and what it does now."""
        with self._lock:
            return TierStats(**self._counts)

    def _put(self, blocks: Checked, host_slots: Index, deadline: float | None) -> TierTicket:
        num_bytes = len(blocks) * self.slot_bytes
        with self._lock:
            has_room = self._queued_bytes + num_bytes <= self._max_queued_bytes
            self._queued_bytes += num_bytes if has_room else 0
            self._counts["failed_puts"] += 0 if has_room else len(blocks)
        if not has_room:
            ticket = TierTicket(len(blocks), deadline)
            ticket.end(None, TransferError(f"{num_bytes} bytes more than the queue of puts takes"))
            return ticket
        return self._begin("put", blocks, host_slots, deadline)

    def _get(self, blocks: Checked, host_slots: Index, deadline: float | None) -> TierTicket:
        return self._begin("get", blocks, host_slots, deadline)

    def _contains(self, blocks: Checked, deadline: float | None) -> TierTicket:
        return self._begin("contains", blocks, np.empty(0, np.int64), deadline)

    def _delete(self, blocks: Checked) -> TierTicket:
        return self._begin("delete", blocks, np.empty(0, np.int64), None)

    def _begin(
        self, operation: Operation, blocks: Checked, host_slots: Index, deadline: float | None
    ) -> TierTicket:
        ticket = TierTicket(len(blocks), deadline)
        now_s = time.monotonic()
        until_s = now_s + self._timeout_s if ticket.deadline is None else ticket.deadline
        size = _BLOCKS_PER_CHUNK if operation in ("put", "get") else _KEYS_PER_CHUNK
        chunks = [range(at, min(at + size, len(blocks))) for at in range(0, len(blocks), size)]
        ok = np.zeros(len(blocks), np.bool_)
        job = _Job(operation, blocks, host_slots, ticket, until_s, len(chunks), ok)
        if not chunks:
            ticket.end(ok)
        queue = self._puts if operation == "put" else self._others
        for chunk in chunks:
            queue.put((job, chunk))
        return ticket

    def close(self) -> None:
        """Carry out every job, each up to its deadline, and stop."""
        if self._is_forked:
            return
        self._is_closed = True
        for thread, queue in zip(self._threads, self._queues(), strict=True):
            if thread.is_alive():
                queue.put(None)
        for thread in self._threads:
            thread.join()
        self._nodes.forget()

    def _queues(self) -> list[SimpleQueue[_Chunk | None]]:
        half = len(self._threads) // 2
        return [self._puts] * half + [self._others] * half

    def close_in_child(self) -> None:
        """Become unusable in a forked child, which has none of the threads."""
        self._is_closed = self._is_forked = True

    def _check_open(self) -> None:
        if self._is_forked:
            raise StateError(f"this RespTier {FORKED}; build a new one in the child")
        if self._is_closed:
            raise StateError("this RespTier is closed; build a new one")

    # -- what the threads do ---------------------------------------------------------------------

    def _run(self, queue: SimpleQueue[_Chunk | None]) -> None:
        wires: dict[Node, Wire] = {}
        while (task := queue.get()) is not None:
            job, chunk = task
            error: TransferError | None = None
            try:
                error = self._carry_out(job, chunk, wires)
            except Exception as unexpected:
                logger.exception("kvstow: the shared tier failed; please report this")
                error = TransferError(f"the shared tier failed: {unexpected!r}")
                _close_all(wires)
            self._end_chunk(job, chunk, error)
        _close_all(wires)

    def _end_chunk(self, job: _Job, chunk: range, error: TransferError | None) -> None:
        num_bytes = len(chunk) * self.slot_bytes
        with job.lock:
            job.error = job.error or error
            job.num_chunks -= 1
            is_last = not job.num_chunks
        if job.operation == "put":
            with self._lock:
                self._queued_bytes -= num_bytes
        if not is_last:
            return
        job.ticket.end(job.ok, job.error)
        num_ok = int(job.ticket.ok.sum())
        names = {"put": ("put", "failed_puts"), "get": ("got", "failed_gets")}
        if job.operation in names:
            done, failed = names[job.operation]
            with self._lock:
                self._counts[f"{done}_blocks"] += num_ok
                self._counts[f"{done}_bytes"] += num_ok * self.slot_bytes
                self._counts[failed] += len(job.blocks) - num_ok

    def _carry_out(self, job: _Job, chunk: range, wires: dict[Node, Wire]) -> TransferError | None:
        """Do a part of a job. Returns why blocks of it failed together, if they did."""
        blocks, key = job.blocks, self._namespace.key
        keys = [key(int(blocks.groups[at]), blocks.hashes[at]) for at in chunk]
        try:
            assigned = self._attempt(None, job, lambda: self._nodes.assign(keys))
        except TransferError as error:
            return error
        first = None
        for node, places in assigned.items():
            positions = [chunk[at] for at in places]
            part = Part(
                positions,
                [keys[at] for at in places],
                [int(blocks.groups[at]) for at in positions],
                [blocks.hashes[at] for at in positions],
                [int(job.host_slots[at]) for at in positions] if len(job.host_slots) else [],
            )
            try:
                self._attempt(node, job, partial(self._ask, node, job, part, wires))
            except TransferError as error:
                first = first or error
        return first

    def _ask(self, node: Node, job: _Job, part: Part, wires: dict[Node, Wire]) -> None:
        """Ask one server, and note its answers."""
        if node not in wires:
            wires[node] = self._nodes.connect(node)
        wire = wires[node]
        wire.limit(min(job.until_s, time.monotonic() + self._timeout_s))
        num_wrong = 0
        try:
            if job.operation == "put":
                ok, refusal = put(wire, part, self._rows, self._namespace, self._set_options)
            elif job.operation == "get":
                ok, refusal, num_wrong = get(wire, part, self._rows, self._namespace)
            elif job.operation == "contains":
                ok, refusal = contains(wire, part)
            else:
                ok, refusal = delete(wire, part)
        except BaseException:
            wires.pop(node).close()
            raise
        job.ok[part.positions] = ok
        if num_wrong:
            with self._lock:
                self._counts["mismatched_blocks"] += num_wrong
        if refusal is not None:
            raise refusal

    def _attempt(self, node: Node | None, job: _Job, call: Callable[[], _T]) -> _T:
        """Return what `call` returns, unless the breaker of this server is open.

        Raises:
            TransferError: the breaker is open, it is too late, or the call failed.
        """
        with self._lock:
            breaker = self._breakers.setdefault(node, Breaker())
        begin_s = time.monotonic()
        if begin_s >= job.until_s:
            raise TransferError("the job was late before a thread began it")
        name = self.address if node is None else node
        if not breaker.may_try():
            raise TransferError(f"{name} has failed and is left alone for a while")
        try:
            result = call()
        except Refusal as refusal:
            if refusal.code in _MOVED:
                self._nodes.forget()
            elif refusal.code not in _FULL:
                self._failed(breaker, name, refusal)
            raise TransferError(f"{name} refused: {refusal}") from refusal
        except self._failures as error:
            self._nodes.forget()
            # An answer that had hardly any time says nothing of the server.
            if isinstance(error, WireError) and job.until_s - begin_s < _FAIR_S:
                raise TransferError(f"{name}: {error}") from error
            self._failed(breaker, name, error)
            raise TransferError(f"{name}: {error}") from error
        if breaker.succeeded():
            logger.warning("kvstow: the shared tier at %s answers again", name)
        return result

    def _failed(self, breaker: Breaker, name: object, error: Exception) -> None:
        if breaker.failed():
            logger.warning(
                "kvstow: the shared tier at %s fails (%s). It is left alone for some seconds at a "
                "time, and its blocks are recomputed",
                name,
                error,
            )


def _close_all(wires: dict[Node, Wire]) -> None:
    for wire in wires.values():
        wire.close()
    wires.clear()


def _checked_seconds(name: str, value: float) -> float:
    given: object = value
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not 0 < value < math.inf:
        raise ConfigError(f"{name} is {given!r}, and it must be a number of seconds above 0")
    return float(value)
