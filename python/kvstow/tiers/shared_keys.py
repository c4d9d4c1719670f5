"""The keys of a shared store, seen from outside: which models have blocks there, and their removal.

A server of a model that is removed meanwhile goes on, and puts its blocks again.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

from kvstow._core import ConfigError, TransferError
from kvstow.tiers.mooncake import connect
from kvstow.tiers.namespace import KEY_PREFIX, NAMESPACE_BYTES, Namespace
from kvstow.tiers.resp.address import (
    PASSWORD_VARIABLE,
    USERNAME_VARIABLE,
    Address,
    Credentials,
    Security,
)
from kvstow.tiers.resp.login import hide_password
from kvstow.tiers.resp.nodes import Nodes
from kvstow.tiers.resp.reasons import ACCESS, OF_CLUSTER, reason

_BATCH: Final = 1000
_DIGITS: Final = 2 * NAMESPACE_BYTES


def namespace_of(fingerprint: str) -> Namespace:
    """Return the namespace that the digits of a fingerprint name.

    Raises:
        ConfigError: they are no fingerprint.
    """
    if not _is_fingerprint(fingerprint):
        raise ConfigError(
            f"fingerprint is {fingerprint!r}, expected {_DIGITS} hexadecimal digits: take those "
            "that `kvstow tier info URL` shows, or that the server logs when it starts"
        )
    return Namespace(bytes.fromhex(fingerprint))


def _is_fingerprint(text: str) -> bool:
    return re.fullmatch(rf"[0-9a-f]{{{_DIGITS}}}", text) is not None


def is_mooncake(url: str) -> bool:
    """Return whether a URL names a Mooncake master."""
    return url.startswith("mooncake://")


def count_blocks(
    url: str, *, credentials: Credentials | None = None, security: Security | None = None
) -> dict[str, int]:
    """Return how many blocks each fingerprint has on RESP servers.

    It reads every key, so it takes long on a large store. A server that takes or drops many blocks
    meanwhile may name some twice.

    Raises:
        ConfigError: `url` names no RESP server. Mooncake does not list its keys.
        TransferError: a server does not answer.
    """
    if is_mooncake(url):
        raise ConfigError(
            f"{url} is a Mooncake master, which lists no keys: each server logs the fingerprints "
            "under which it shares blocks, and kvstow tier reset takes one"
        )
    found: Counter[str] = Counter()
    with _clients(url, credentials, security) as clients:
        for client in clients:
            for key in client.scan_iter(match=KEY_PREFIX + b"*", count=_BATCH):
                digits = key[len(KEY_PREFIX) :][:_DIGITS].decode("ascii", "replace")
                if _is_fingerprint(digits):  # or the key of another program, of any characters
                    found[digits] += 1
    return dict(found)


def delete_blocks(
    url: str,
    namespace: Namespace,
    *,
    credentials: Credentials | None = None,
    security: Security | None = None,
) -> int:
    """Delete all blocks of one model from a store, and return how many there were.

    Args:
        url: the store.
        namespace: that of the model.
        credentials: how to log in to RESP servers; None for those of the environment.
        security: how TLS proves both sides.

    Raises:
        ConfigError: `url` names no store.
        TransferError: the store does not answer, or refuses.
    """
    if is_mooncake(url):
        with connect(url) as store:
            num = int(store.remove_by_regex(f"^{namespace.prefix.decode()}", True))
        if num < 0:
            raise TransferError(f"Mooncake refused to delete blocks ({num})")
        return num
    num = 0
    with _clients(url, credentials, security) as clients:
        for client in clients:
            keys = client.scan_iter(match=namespace.prefix + b"*", count=_BATCH)
            while batch := list(islice(keys, _BATCH)):
                num += _delete(client, batch)
    return num


def _delete(client: Any, keys: list[bytes]) -> int:
    """Delete keys one by one, because a cluster refuses several that have different slots."""
    with client.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.unlink(key)
        return sum(pipeline.execute())


def _refuse_cluster(clients: list[Any], address: Address) -> None:
    """Refuse a server that has only a part of the keys, as the others would be left out."""
    for client, node in zip(clients, address.nodes, strict=True):
        if client.info("cluster").get("cluster_enabled"):
            raise ConfigError(f"the server at {node}: {OF_CLUSTER}")


@contextmanager
def _clients(
    url: str, credentials: Credentials | None, security: Security | None
) -> Iterator[list[Any]]:
    """Yield a redis-py client for each server that has keys."""
    address = Address.parse(url)
    credentials = credentials or Credentials.find()
    nodes = Nodes(address, credentials, security or Security(), 30.0)
    clients: list[Any] = []
    try:
        clients += [nodes.client(node) for node in nodes.ask(math.inf).servers]
        if address.kind == "servers":
            _refuse_cluster(clients, address)
        yield clients
    except nodes.errors as error:
        hide_password(error, credentials)
        why = reason(error)
        if why == ACCESS:
            why = (
                "the access list refused to list or delete keys: log in as the administrator "
                f"({USERNAME_VARIABLE}, {PASSWORD_VARIABLE})"
            )
        raise TransferError(f"{address}: {why}") from error
    # Of redis-py, which takes an answer for what it has asked for.
    except (AttributeError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise TransferError(f"{address} does not speak RESP: check the port") from error
    finally:
        for client in clients:
            client.close()
