"""Which server has a key, and the connections to the servers.

- Independent servers: each key has one, chosen by rendezvous hashing (Thaler and Ravishankar,
  1998). So a server that is added or removed moves only its own part of the keys.
- A cluster says which of its servers has which slots.
- Sentinel names the present master. It may answer without a password. If none does and one wants a
  password, all are asked again with that of the servers.

A cluster or Sentinel is asked again after an error, at most once a second. The server of the URL
that answered last is asked first, but before it one that has named another server for a key: the
others may not know yet that a slot has moved. A server that has failed itself is asked last: one
that is cut off from its cluster still names the servers of before. The URL may have another name
for it. So the one that named it is asked last, too, if it says that the cluster is down. If none of
the URL answers, the servers of the cluster are asked that were known last. One that hangs has only
its share of the time, so that the others are asked too.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvstow._core import ConfigError
from kvstow.tiers.resp.address import MAX_PORT, Address, Credentials, Node, Security
from kvstow.tiers.resp.login import log_in_within, password_of
from kvstow.tiers.resp.wire import Refusal, Wire, WireError, command

# Connecting takes several round trips. A job with less time than this connects for later ones.
_MIN_CONNECT_S: Final = 0.25
_ASK_AGAIN_S: Final = 1.0
_NUM_SLOTS: Final = 16384
_MAX_HOST_CHARACTERS: Final = 255


class NoTime(Exception):
    """No time is left to ask a server. This says nothing of the server."""


class NoMaster(Exception):
    """No Sentinel has named the master.

    Attributes:
        service: the name of the servers.
        errors: what asking each Sentinel raised, for those that did not answer.
    """

    def __init__(self, service: str, errors: Sequence[Exception]) -> None:
        """Keep both for `reason`."""
        super().__init__(f"no Sentinel has named the master {service!r}")
        self.service, self.errors = service, errors


def seconds_left(until_s: float) -> float:
    """Return the seconds until a time of `time.monotonic`.

    Raises:
        NoTime: there are none.
    """
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise NoTime("no time was left to ask it")
    return left_s


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """Which server has which key, as far as it was known at one time.

    Attributes:
        servers: all servers that have keys.
        owner: returns the server of a key, or None for a key that no server has. Without it, the
            one server has all.
    """

    servers: tuple[Node, ...]
    owner: Callable[[bytes], Node | None] | None = None

    def assign(self, keys: Sequence[bytes]) -> dict[Node, list[int]]:
        """Return the positions of the keys that each server has."""
        if self.owner is None:
            return {self.servers[0]: list(range(len(keys)))}
        assigned: dict[Node, list[int]] = {}
        for at, owner in enumerate(map(self.owner, keys)):
            if owner is not None:
                assigned.setdefault(owner, []).append(at)
        return assigned


class Nodes:
    """The servers of one address. Any thread may use it.

    Attributes:
        address: the servers.
        known: what the servers of the URL said last; None before the first answer.
        errors: what connecting and asking raise, beside `NoTime`.
    """

    def __init__(
        self, address: Address, credentials: Credentials, security: Security, timeout_s: float
    ) -> None:
        """Connect to nothing yet.

        Args:
            address: the servers.
            credentials: how to log in.
            security: how TLS proves both sides.
            timeout_s: the most seconds that connecting may take.

        Raises:
            ConfigError: redis-py is not installed, or files for TLS are named without TLS.
        """
        security.check(address)
        try:
            import redis  # noqa: PLC0415 - an optional dependency
        except ImportError as error:
            raise ConfigError(
                "the shared tier on a RESP server needs redis-py, which is not installed: run pip "
                "install 'kvstow[redis]'"
            ) from error
        self._redis: Any = redis
        self._wants_login: Final = redis.AuthenticationError
        self.errors: Final = (redis.RedisError, Refusal, WireError, OSError, NoMaster)
        self.address: Final = address
        self._timeout_s = timeout_s
        self._security = security
        # redis-py would try again for seconds, while a request waits.
        once = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        plain: dict[str, Any] = {"retry": once, "protocol": 2}
        # As a provider, because redis-py's errors show the options of a connection.
        self._options = plain | {"credential_provider": credentials}
        # For a server of the URL. The second ones count if one of these servers wants a password.
        self._asking_options = [self._options]
        if address.kind == "sentinel":
            own = plain | {"credential_provider": replace(credentials, username=None)}
            # A password file may be empty now.
            has_login = credentials.password is not None or credentials.password_file is not None
            self._asking_options = [plain, own] if has_login else [plain]
        self._sources = deque(address.nodes)
        self._lock = threading.Lock()
        self._is_doubted, self._asked_s = False, 0.0
        self._knows_better: list[Node] = []
        self._failed: frozenset[Node] = frozenset()
        self._told_by: Node | None = None
        self.known: Topology | None = None
        if address.kind == "servers":
            owner = _by_rendezvous(address.nodes) if len(address.nodes) > 1 else None
            self.known = Topology(address.nodes, owner)

    # -- connections ---------------------------------------------------------------------------

    def connect(self, node: Node, limit_s: float) -> Wire:
        """Return a new connection.

        Args:
            node: the server.
            limit_s: the most seconds for each step, such as the login; 0.25 at least.

        Raises:
            redis.RedisError: no connection; or another one of `errors`.
        """
        return self._connect(node, limit_s, dict(self._options, db=self.address.database))

    def _connect(self, node: Node, limit_s: float, options: dict[str, Any]) -> Wire:
        options = options | self._limits(limit_s)
        if node.path:
            made: Any = self._redis.UnixDomainSocketConnection(path=node.path, **options)
        else:
            made = self._redis.Connection(host=node.host, port=node.port, **options)
        try:
            # Looking up a name takes as long as the system's resolver lets it, some 10 s for each
            # of its servers. Tickets answer at their deadline, and their slots stay reserved.
            return Wire(made, password_of(options.get("credential_provider")))
        # Of the system's resolver, or of redis-py, which then goes on.
        except (OverflowError, RecursionError, ValueError) as error:
            made.disconnect()
            why = "its name cannot be looked up, or it does not speak RESP"
            raise WireError(why) from error

    def _limits(self, limit_s: float) -> dict[str, Any]:
        """Return how to log in.

        Raises:
            WireError: TLS cannot use its files any more.
        """
        redis, limit_s = self._redis, min(max(limit_s, _MIN_CONNECT_S), self._timeout_s)
        try:
            context = self._security.context() if self.address.is_encrypted else None
        except ConfigError as error:
            raise WireError(str(error)) from error
        refusals = redis.ResponseError, redis.BusyLoadingError
        return {
            "socket_timeout": limit_s,
            "socket_connect_timeout": limit_s,
            "redis_connect_func": log_in_within(limit_s, context, refusals),
        }

    def client(self, node: Node) -> Any:
        """Return a client of redis-py, for calls that may be slow."""
        options = dict(self._options, db=self.address.database) | self._limits(self._timeout_s)
        if node.path:
            return self._redis.Redis(unix_socket_path=node.path, **options)
        return self._redis.Redis(host=node.host, port=node.port, **options)

    # -- which server has a key ----------------------------------------------------------------

    def doubt(
        self,
        *,
        knows_better: Node | None = None,
        failed: Node | None = None,
        is_down: bool = False,
    ) -> None:
        """Let the cluster or Sentinel be asked again, as a server did not do what they said.

        Args:
            knows_better: the server of the cluster that has named another one for a key.
            failed: the server that has failed.
            is_down: whether it says that the cluster is down.
        """
        if knows_better is not None:
            self._knows_better = [knows_better]
        if failed is not None and self.address.kind == "cluster":
            self._failed |= {failed}
            if is_down and self._told_by is not None:
                self._failed |= {self._told_by}
        self._is_doubted = self.address.kind != "servers"

    @property
    def must_ask(self) -> bool:
        """Whether it is time for `ask`."""
        is_due = self._is_doubted and time.monotonic() >= self._asked_s + _ASK_AGAIN_S
        return self.known is None or is_due

    def ask(self, until_s: float) -> Topology:
        """Return which server has which key, from another thread if that has asked meanwhile.

        Raises:
            redis.RedisError: no server of the URL says it; or another one of `errors`.
            NoTime: there is no time to ask, or another thread still asks.
        """
        until_s = min(until_s, time.monotonic() + self._timeout_s)
        if not self._lock.acquire(timeout=seconds_left(until_s)):
            raise NoTime("another thread still asks which server has the keys")
        try:
            if self.must_ask:
                self._is_doubted, self._asked_s = False, time.monotonic()
                try:
                    self.known = self._ask_all(until_s)
                except BaseException:
                    self._is_doubted = True
                    raise
            assert self.known is not None
            return self.known
        finally:
            self._lock.release()

    def _ask_all(self, until_s: float) -> Topology:
        """Return the answer of the first server that knows one."""
        errors: list[Exception] = []
        is_cluster = self.address.kind == "cluster"
        more = self.known.servers if is_cluster and self.known is not None else ()
        first, self._knows_better = self._knows_better, []
        failed = self._failed
        num_left = len(self._asking_options) * len({*first, *self._sources, *more})
        for options in self._asking_options:
            if options is not self._asking_options[0]:
                if not any(isinstance(error, self._wants_login) for error in errors):
                    break
                errors.clear()
            nodes = dict.fromkeys([*first, *self._sources, *more])
            for node in sorted(nodes, key=failed.__contains__):
                left_s = until_s - time.monotonic()
                if errors and left_s <= 0:  # the next job begins with this one
                    break
                try:
                    limit_s = max(left_s / num_left, _MIN_CONNECT_S)
                    if (found := self._ask_one(node, options, limit_s)) is not None:
                        self._answered(node, failed)
                        return found
                except self.errors as error:
                    errors.append(error)
                num_left -= 1
                if node == self._sources[0]:
                    self._sources.rotate(-1)
        for one in errors:
            if isinstance(one, Refusal) or is_cluster:
                raise one
        raise NoMaster(self.address.service, errors)

    def _answered(self, node: Node, failed: frozenset[Node]) -> None:
        """Ask a server of the URL first from now on. Those that had failed are forgiven."""
        if node in self._sources:
            self._sources.rotate(-self._sources.index(node))
        self._failed -= failed
        self._told_by = node

    def _ask_one(self, node: Node, options: dict[str, Any], limit_s: float) -> Topology | None:
        """Return what one server of the URL says, or None if it knows no master."""
        is_sentinel = self.address.kind == "sentinel"
        words = (b"SENTINEL", b"MASTERS") if is_sentinel else (b"CLUSTER", b"SLOTS")
        wire = self._connect(node, limit_s, options)
        try:
            wire.limit(time.monotonic() + limit_s)
            wire.send([command(*words)])
            answer: Any = wire.answer()
        finally:
            wire.close()
        if isinstance(answer, Refusal):
            # Sentinel does not know the EXISTS of a login, so it asks for a password only now.
            raise self._wants_login(str(answer)) if answer.code == "NOAUTH" else answer
        try:
            return self._master(answer) if is_sentinel else self._slots(answer, node)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            shown = wire.shown(answer) if isinstance(answer, bytes) else str(answer)[:40]
            raise WireError(f"expected a list of servers, got {shown}") from error

    def _master(self, answer: Any) -> Topology | None:
        """Read the answer to SENTINEL MASTERS."""
        for names in answer:
            master = dict(zip(names[::2], names[1::2], strict=True))
            flags = set(master[b"flags"].split(b","))
            is_own = master[b"name"].decode("utf-8", "replace") == self.address.service
            if is_own and b"master" in flags and not flags & {b"s_down", b"o_down"}:
                return Topology((_named(master[b"ip"].decode("ascii"), master[b"port"]),))
        return None

    def _slots(self, answer: Any, asked: Node) -> Topology:
        """Read the answer to CLUSTER SLOTS."""
        owners: list[Node | None] = [None] * _NUM_SLOTS
        if len(answer) > _NUM_SLOTS:
            raise ValueError(len(answer))
        for first, last, named, *_ in answer:
            if not 0 <= first <= last < _NUM_SLOTS:
                raise ValueError(first, last)
            owner = _named(_host(named) or asked.host, named[1])
            owners[first : last + 1] = [owner] * (last + 1 - first)
        servers = tuple(dict.fromkeys(owner for owner in owners if owner is not None))
        if not servers:
            raise WireError("the cluster has given no slot to a server: run CLUSTER ADDSLOTS")
        key_slot = self._redis.crc.key_slot
        return Topology(servers, lambda key: owners[key_slot(key)])


def _host(named: Any) -> str:
    """Return the host of a server in an answer to CLUSTER SLOTS; empty for that of the one asked.

    A cluster that prefers hostnames calls a server without one "?", and adds its address.
    """
    host, _, *more = named
    if host == b"?":
        facts = more[1] if len(more) > 1 else []
        host = dict(zip(facts[::2], facts[1::2], strict=True)).get(b"ip")
    return host.decode("ascii") if host else ""


def _named(host: str, port: bytes | int) -> Node:
    """Return a server that another one names. Messages show its name as it is.

    Raises:
        ValueError: no server has such a name.
    """
    node = Node(host, int(port))
    is_short = len(host) <= _MAX_HOST_CHARACTERS
    if not (host.isprintable() and is_short and 0 <= node.port <= MAX_PORT):
        raise ValueError(node)
    return node


def _by_rendezvous(nodes: Sequence[Node]) -> Callable[[bytes], Node]:
    """Return which of several independent servers has a key."""
    salts = [hashlib.blake2b(str(node).encode(), digest_size=16).digest() for node in nodes]

    def owner(key: bytes) -> Node:
        scores = [hashlib.blake2b(key, digest_size=8, salt=salt).digest() for salt in salts]
        return nodes[scores.index(max(scores))]

    return owner
