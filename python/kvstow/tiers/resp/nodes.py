"""Which server has a key, and the connections to the servers.

- Independent servers: each key has one, chosen by rendezvous hashing (Thaler and Ravishankar,
  1998). So a server that is added or removed moves only its own part of the keys.
- A cluster: redis-py asks it for its slots. They are asked again after an error.
- Sentinel: redis-py asks for the present master. It is asked again after an error. If none answers
  and one wants a password, all are asked again with that of the servers.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvstow._core import ConfigError
from kvstow.tiers.resp.address import Address, Credentials, Node, Security
from kvstow.tiers.resp.wire import Wire


class Nodes:
    """The servers of one address. Any thread may use it.

    Attributes:
        address: the servers.
        errors: what redis-py raises.
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
        # redis-py derives the errors of a cluster from no other error of its own.
        self.errors: tuple[type[Exception], ...] = (
            redis.RedisError,
            redis.exceptions.RedisClusterException,
        )
        self.address = address
        self._credentials = credentials
        self._options = self._connection_options(credentials, security, timeout_s)
        self._lock = threading.Lock()
        self._cluster: Any = None
        self._master: Node | None = None

    def _connection_options(
        self, credentials: Credentials, security: Security, timeout_s: float
    ) -> dict[str, Any]:
        redis = self._redis
        options: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            # redis-py would try again for seconds, while a request waits.
            "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
            "protocol": 2,
            # Not the password itself, because redis-py's errors show the options of a connection.
            "credential_provider": credentials,
        }
        if self.address.is_encrypted:
            options |= {
                "ssl_ca_certs": security.ca_file,
                "ssl_certfile": security.certificate_file,
                "ssl_keyfile": security.key_file,
                "ssl_cert_reqs": "required",
                "ssl_check_hostname": True,
            }
        return options

    def assign(self, keys: Sequence[bytes]) -> dict[Node, list[int]]:
        """Return the positions of the keys that each server has.

        Raises:
            redis.RedisError: no server says who has them.
        """
        if self.address.kind == "sentinel":
            return {self._current_master(): list(range(len(keys)))}
        if self.address.kind == "cluster":
            cluster = self._current_cluster()
            found = map(cluster.get_node_from_key, keys)
            nodes = [Node(node.host, int(node.port)) for node in found]
        elif len(self.address.nodes) == 1:
            return {self.address.nodes[0]: list(range(len(keys)))}
        else:
            nodes = [self._winner(key) for key in keys]
        assigned: dict[Node, list[int]] = {}
        for at, node in enumerate(nodes):
            assigned.setdefault(node, []).append(at)
        return assigned

    def _winner(self, key: bytes) -> Node:
        def score(node: Node) -> bytes:
            return hashlib.blake2b(key, digest_size=8, salt=_salt(node)).digest()

        return max(self.address.nodes, key=score)

    def connect(self, node: Node) -> Wire:
        """Return a new connection.

        Raises:
            redis.RedisError: no connection.
        """
        redis, options = self._redis, dict(self._options, db=self.address.database)
        if node.path:
            made: Any = redis.UnixDomainSocketConnection(path=node.path, **options)
        else:
            kind = redis.SSLConnection if self.address.is_encrypted else redis.Connection
            made = kind(host=node.host, port=node.port, **options)
        return Wire(made)

    def client(self, node: Node) -> Any:
        """Return a client of redis-py, for calls that may be slow."""
        options = dict(self._options, db=self.address.database)
        if node.path:
            return self._redis.Redis(unix_socket_path=node.path, **options)
        ssl = self.address.is_encrypted
        return self._redis.Redis(host=node.host, port=node.port, ssl=ssl, **options)

    def all(self) -> list[Node]:
        """Return every server that has keys.

        Raises:
            redis.RedisError: no server says which these are.
        """
        if self.address.kind == "sentinel":
            return [self._current_master()]
        if self.address.kind == "cluster":
            return [
                Node(node.host, int(node.port)) for node in self._current_cluster().get_primaries()
            ]
        return list(self.address.nodes)

    def forget(self) -> None:
        """Ask the cluster or Sentinel again, because a server did not do what they said."""
        with self._lock:
            self._master = None
            cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()

    def _current_master(self) -> Node:
        with self._lock:
            if self._master is None:
                try:
                    self._master = self._ask_sentinel({})
                except self._redis.sentinel.MasterNotFoundError as error:
                    login = replace(self._credentials, username=None)
                    if not (login.get_credentials() and "AuthenticationError" in str(error)):
                        raise
                    self._master = self._ask_sentinel({"credential_provider": login})
            return self._master

    def _ask_sentinel(self, login: dict[str, Any]) -> Node:
        """Return the present master, of the first Sentinel that knows it."""
        asked = [(node.host, node.port) for node in self.address.nodes]
        options = login | {
            name: value
            for name, value in self._options.items()
            if name in _SENTINEL_OPTIONS or name.startswith("ssl_")
        }
        options |= {"ssl": True} if self.address.is_encrypted else {}
        sentinel = self._redis.Sentinel(asked, sentinel_kwargs=options)
        try:
            return Node(*sentinel.discover_master(self.address.service))
        finally:
            for client in sentinel.sentinels:
                client.close()

    def _current_cluster(self) -> Any:
        with self._lock:
            if self._cluster is None:
                nodes = [
                    self._redis.cluster.ClusterNode(node.host, node.port)
                    for node in self.address.nodes
                ]
                options = (
                    dict(self._options, ssl=True) if self.address.is_encrypted else self._options
                )
                try:
                    self._cluster = self._redis.RedisCluster(startup_nodes=nodes, **options)
                finally:
                    # redis-py closes these only if they belong to a cluster that serves.
                    for node in nodes:
                        if node.redis_connection is not None:
                            node.redis_connection.close()
            return self._cluster


_SENTINEL_OPTIONS = ("socket_timeout", "socket_connect_timeout", "retry", "protocol")


def _salt(node: Node) -> bytes:
    return hashlib.blake2b(str(node).encode(), digest_size=16).digest()
