"""Which servers of a shared tier are left alone, and what the log says of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from typing import Final, Literal, TypeAlias

from kvstow.tiers.breaker import ANSWERS_AGAIN, FAILS, Breaker, with_times
from kvstow.tiers.resp.address import Address, Node
from kvstow.tiers.resp.reasons import OF_CLUSTER, reason

logger = logging.getLogger(__name__)

Kind: TypeAlias = Literal["put", "get", "ask"]
"""What a call is: a put, a get, or one that moves no block."""

_TAKES_NO_PUTS: Final = (
    "kvstow: the shared tier at %s takes no puts (%s). It gets none for some seconds at a time, "
    "and lacks their blocks"
)
_TAKES_PUTS: Final = "kvstow: the shared tier at %s takes puts again"
_LACKS_KEYS: Final = "kvstow: the shared tier at %s lacks blocks (%s)"


class Health:
    """A breaker for each server's puts, its gets, and all other calls. Any thread may use it.

    A server may refuse puts for long and still answer, for example as a replica. It may answer
    questions and send no block, for example through a network that drops large packets. The node
    None stands for the question which server has a key.
    """

    def __init__(self, address: Address) -> None:
        """Take all servers for well."""
        self._address = address
        self._breakers: dict[tuple[Node | None, Kind], Breaker] = {}
        self._known: set[Node] = set()
        self._parts: set[Node] = set()
        self._lock = threading.Lock()

    def _breaker(self, node: Node | None, kind: Kind) -> Breaker:
        with self._lock:
            return self._breakers.setdefault((node, kind), Breaker())

    def may_call(self, node: Node | None, kind: Kind = "ask") -> bool:
        """Return whether a server may be called now."""
        return self._breaker(node, kind).may_try()

    def failed(self, error: Exception, node: Node | None, kind: Kind = "ask") -> None:
        """Note that a server has failed."""
        if num_times := self._breaker(node, kind).failed():
            at, why = node or self._address, with_times(reason(error), num_times)
            logger.warning(_TAKES_NO_PUTS if kind == "put" else FAILS, at, why)

    def succeeded(self, node: Node | None, kind: Kind = "ask") -> None:
        """Note that a server has answered."""
        if self._breaker(node, kind).succeeded():
            logger.warning(_TAKES_PUTS if kind == "put" else ANSWERS_AGAIN, node or self._address)

    def lacks_keys(self, node: Node) -> None:
        """Note that a server has named another one for a key, and warn once."""
        with self._lock:
            is_first = node not in self._parts
            self._parts.add(node)
        if is_first:
            logger.warning(_LACKS_KEYS, node, OF_CLUSTER)

    def is_new(self, node: Node) -> bool:
        """Return whether this is the first question about a server."""
        with self._lock:
            is_new = node not in self._known
            self._known.add(node)
        return is_new

    def keep(self, servers: Collection[Node]) -> None:
        """Forget all servers but these, because the others have no keys any more."""
        with self._lock:
            self._known.intersection_update(servers)
            for node, kind in list(self._breakers):
                if node is not None and node not in servers:
                    del self._breakers[node, kind]


def warn_of_policy(node: Node, policy: str, max_bytes: int, *, has_ttl: bool) -> None:
    """Warn of a server that does not make room for new blocks, or that has no bound."""
    # The policies volatile-* drop only what expires.
    keeps_all = policy == "noeviction" or (policy.startswith("volatile-") and not has_ttl)
    if keeps_all and max_bytes:
        logger.warning(
            "kvstow: the server at %s has maxmemory-policy %s: once it is full, it refuses new "
            "blocks. Set maxmemory-policy allkeys-lru",
            node,
            policy,
        )
    elif policy and not max_bytes:
        logger.warning(
            "kvstow: the server at %s has maxmemory 0, so it grows until the machine has no memory "
            "left. Set maxmemory, and maxmemory-policy allkeys-lru",
            node,
        )
