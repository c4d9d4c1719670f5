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

A part of a job may concern several servers. All are asked, and then read in the order in which they
answer. Those to which the thread has no connection come last, because connecting may hang. One that
hangs is given up before the job is late (`queued`), so that it costs no block of the others.

What the outcome of a call means for the connection, the list of servers and the breaker:

```
outcome                               connection  list     breaker
all done, or blocks that are missing  stays       stays    success
OOM, WRONGTYPE, ASK, TRYAGAIN         stays       stays    success: only some keys are refused
MOVED                                 stays       doubted  success
another refusal                       closed      doubted  failure
an error, or no answer in time        closed      doubted  failure
no answer, within hardly any time     closed      stays    -
no time to ask                        stays       stays    -
```
"""

from __future__ import annotations

import select
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstow._core import TransferError
from kvstow.arguments import checked_int
from kvstow.tiers.breaker import FAIR_S, left_alone
from kvstow.tiers.queued import DEFAULT_QUEUED_BYTES, DEFAULT_TIMEOUT_S, Job, QueuedTier, Worker
from kvstow.tiers.resp.address import Address, Credentials, Node, Security
from kvstow.tiers.resp.commands import Memory, Part, contains, delete, get, memory_policy, put
from kvstow.tiers.resp.health import Health, Kind, warn_of_policy
from kvstow.tiers.resp.nodes import Nodes, NoTime, Topology, seconds_left
from kvstow.tiers.resp.reasons import OF_CLUSTER, reason
from kvstow.tiers.resp.wire import Refusal, Wire, WireError
from kvstow.tiers.tier import Rows
from kvstow.transfer import HostArena

# Refusals that concern single keys, or new blocks of a server that is full.
_OF_KEYS: Final = frozenset({"OOM", "WRONGTYPE", "MOVED", "ASK", "TRYAGAIN"})
_MAX_WAIT_S: Final = 86400.0


def checked_expiry(ttl_s: int | None) -> tuple[bytes, ...]:
    """Return the options of SET for blocks that the server drops after some seconds.

    Raises:
        ConfigError: `ttl_s` is neither None nor a number of seconds from 1 to 2^31 - 1.
    """
    if ttl_s is None:
        return ()
    fix = "pass whole seconds, or None"
    return b"EX", b"%d" % checked_int("ttl_s", ttl_s, 1, 2**31 - 1, fix)


class RespTier(QueuedTier):
    """Blocks on RESP servers: Redis, Valkey, or another one with SET, GET, EXISTS and DEL.

    An answer never takes longer than its deadline. A server that fails several times in a row is
    left alone for a while (`Health`), and all of its blocks are misses. If it fails only puts, its
    blocks are still read. If it fails only gets, it is still asked what it has.
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
        self.set_options: Final = checked_expiry(ttl_s)
        self.nodes: Final = Nodes(
            self.address, credentials or Credentials.find(), security or Security(), self.timeout_s
        )
        self.health: Final = Health(self.address)
        self.start()

    @property
    def rows(self) -> Rows:
        """All host slots, one a row."""
        return self._rows

    def _worker(self) -> Worker:
        return _Connections(self)


@dataclass(slots=True, eq=False)
class _Call:
    """What a part of a job asks of one server.

    Attributes:
        node: the server.
        part: its blocks, and what the server has said of them.
        until_s: when the server has had its time.
        kind: what it is for `Health`.
        num_left: servers that have yet to be asked, this one included.
        begin_s: when the server was asked, or was found to answer.
        error: why the call failed.
    """

    node: Node
    part: Part
    until_s: float
    kind: Kind
    num_left: int = 1
    begin_s: float = 0.0
    error: TransferError | None = None
    steps: Generator[None] = field(init=False)


class _Connections:
    """One thread's connections, one to each server."""

    def __init__(self, tier: RespTier) -> None:
        """Connect to nothing yet."""
        # A job has the tier, and a thread that waits for one has not.
        self._tier: RespTier = weakref.proxy(tier)
        self._wires: dict[Node, Wire] = {}
        self._topology: Topology | None = None

    def hand_over(self, _: Callable[[], None]) -> bool:
        """Return False, because a thread is good for any number of parts."""
        return False

    def close(self) -> None:
        """Close all connections."""
        for node in list(self._wires):
            self._drop(node)

    def carry_out(self, job: Job, part: range) -> None:
        """Ask each server for the blocks that it has."""
        tier, blocks = self._tier, job.blocks
        groups = blocks.groups[part.start : part.stop].tolist()
        keys = job.namespace.keys(groups, [blocks.hashes[at] for at in part])
        assigned = self._assigned(job, keys)
        calls = [
            self._call(job, node, [part[at] for at in places], [keys[at] for at in places])
            for node, places in assigned.items()
        ]
        try:
            connected = [call for call in calls if call.node in self._wires]
            self._ask(connected)
            self._ask([call for call in calls if call not in connected])
        finally:
            for call in calls:
                call.steps.close()  # no step writes to the job once it has ended
        errors = [call.error for call in calls if call.error is not None]
        if num_lost := len(keys) - sum(map(len, assigned.values())):
            tier.nodes.doubt()
            why = f"no server of the cluster at {tier.address} has the slots of {num_lost} blocks"
            errors.append(TransferError(why))
        if errors:
            raise errors[0]

    # -- which servers are asked ---------------------------------------------------------------

    def _assigned(self, job: Job, keys: list[bytes]) -> dict[Node, list[int]]:
        """Return the positions of the keys that each server has.

        A server that is no master any more closes its connections. So the cluster or Sentinel is
        asked first, if one is closed.

        Raises:
            TransferError: no server has said it yet.
        """
        nodes = self._tier.nodes
        assigned = self._current_topology(job).assign(keys)
        closed = [node for node in assigned.keys() & self._wires if not self._wires[node].is_idle]
        for node in closed:
            self._drop(node)
            nodes.doubt()
        return self._current_topology(job).assign(keys) if closed and nodes.must_ask else assigned

    def _current_topology(self, job: Job) -> Topology:
        """Return which server has which key, and let go of servers that have none any more.

        Raises:
            TransferError: no server has said it yet.
        """
        nodes = self._tier.nodes
        topology = self._asked_topology(job) if nodes.must_ask else nodes.known
        assert topology is not None
        if topology is not self._topology:
            self._topology = topology
            self._tier.health.keep(topology.servers)
            for node in self._wires.keys() - set(topology.servers):
                self._drop(node)
        return topology

    def _asked_topology(self, job: Job) -> Topology:
        """Ask which server has which key. Return what was known before if no server says it."""
        address, nodes, health = self._tier.address, self._tier.nodes, self._tier.health
        try:
            if not health.may_call(None):
                raise left_alone(address)
            try:
                topology = nodes.ask(job.until_s)
            except NoTime as error:
                raise TransferError(f"{address}: {error}") from error
            except nodes.errors as error:
                health.failed(error, None)
                raise TransferError(f"{address}: {reason(error)}") from error
        except TransferError:
            if nodes.known is None:
                raise
            return nodes.known
        health.succeeded(None)
        return topology

    # -- one call to one server ------------------------------------------------------------------

    def _call(self, job: Job, node: Node, positions: list[int], keys: list[bytes]) -> _Call:
        part = Part(
            positions,
            keys,
            job.blocks.groups[positions].tolist(),
            [job.blocks.hashes[at] for at in positions],
            job.host_slots[positions].tolist() if len(job.host_slots) else [],
        )
        kind: Kind = job.operation if job.operation in ("put", "get") else "ask"
        call = _Call(node, part, job.until_s, kind)
        call.steps = self._steps(job, call)
        return call

    def _ask(self, calls: Sequence[_Call]) -> None:
        """Send to each server, and then read what each says."""
        waiting: list[_Call] = []
        for at, call in enumerate(calls):
            call.num_left = len(calls) - at
            if self._step(call):
                waiting.append(call)
        for call in self._as_they_answer(waiting):
            self._step(call)

    def _as_they_answer(self, calls: list[_Call]) -> Iterator[_Call]:
        """Yield the calls whose server has begun to answer, and at the end the others."""
        if len(calls) == 1:
            yield from calls
            return
        poll, waiting = select.poll(), {self._wires[call.node].fileno(): call for call in calls}
        for number in waiting:
            poll.register(number, select.POLLIN)
        while waiting:
            left_s = max(0.0, calls[0].until_s - time.monotonic())
            ready = poll.poll(1000 * min(left_s, self._tier.timeout_s, _MAX_WAIT_S))
            for number, _ in ready:
                poll.unregister(number)
                self._begin(waiting[number])  # the time that others took is not its own
                yield waiting.pop(number)
            if not ready:
                yield from waiting.values()
                return

    def _steps(self, job: Job, call: _Call) -> Generator[None]:
        """Send the commands, pause, and note the answers in the job."""
        tier, node, part = self._tier, call.node, call.part
        if not tier.health.may_call(node, call.kind):
            raise left_alone(node)
        wire = self._wire(call)
        seconds_left(call.until_s)
        self._begin(call)
        memory = Memory(tier.rows, tier.sums)
        try:
            if call.kind == "put":
                options = tier.set_options
                if tier.health.is_new(node):
                    warn_of_policy(node, *memory_policy(wire), has_ttl=bool(options))
                yield from put(wire, part, memory, job.namespace, options)
            elif call.kind == "get":
                yield from get(wire, part, memory, job.namespace)
            elif job.operation == "contains":
                yield from contains(wire, part)
            else:
                yield from delete(wire, part)
        except BaseException:
            self._drop(node)
            raise
        finally:
            job.ok[part.positions] = part.ok
            if part.num_wrong:
                tier.count_wrong(part.num_wrong)
        if part.refusal is not None:
            raise part.refusal

    def _begin(self, call: _Call) -> None:
        """Let a server have its time from now on."""
        call.begin_s = time.monotonic()
        self._wires[call.node].limit(min(call.until_s, call.begin_s + self._tier.timeout_s))

    def _wire(self, call: _Call) -> Wire:
        """Return a connection to a server."""
        node = call.node
        if node not in self._wires:
            limit_s = seconds_left(call.until_s) / call.num_left
            self._wires[node] = self._tier.nodes.connect(node, limit_s)
        return self._wires[node]

    def _drop(self, node: Node) -> None:
        """Close the connection to a server."""
        if (wire := self._wires.pop(node, None)) is not None:
            wire.close()

    def _step(self, call: _Call) -> bool:
        """Take the next step of a call. Return whether the server has to answer now."""
        try:
            next(call.steps)
        except StopIteration:
            self._succeeded(call)
        except TransferError as error:
            call.error = error
        except NoTime as error:
            call.error = TransferError(f"{call.node}: {error}")
        except Refusal as refusal:
            why = reason(refusal)
            if refusal.code == "MOVED":
                self._tier.nodes.doubt(knows_better=call.node)
                if self._tier.address.kind == "servers":
                    self._tier.health.lacks_keys(call.node)
                    why = OF_CLUSTER
            if refusal.code in _OF_KEYS:
                self._succeeded(call)
            else:
                self._failed(call, refusal)
            call.error = TransferError(f"{call.node} refused: {why}")
        except self._tier.nodes.errors as error:
            # An answer that had hardly any time says nothing of the server.
            if not isinstance(error, WireError) or call.until_s - call.begin_s >= FAIR_S:
                self._failed(call, error)
            call.error = TransferError(f"{call.node}: {reason(error)}")
            call.error.__cause__ = error
        else:
            return True
        return False

    def _failed(self, call: _Call, error: Exception) -> None:
        self._drop(call.node)
        is_down = isinstance(error, Refusal) and error.code == "CLUSTERDOWN"
        self._tier.nodes.doubt(failed=call.node, is_down=is_down)
        self._tier.health.failed(error, call.node, call.kind)

    def _succeeded(self, call: _Call) -> None:
        self._tier.health.succeeded(call.node, call.kind)
