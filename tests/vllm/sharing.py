"""Servers on one store, without an engine: how they start, and what the store holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.tiers.resp.server import Server as Store
from tests.vllm.halves_below import Server

from kvstow.tiers.namespace import KEY_PREFIX, NAMESPACE_BYTES

NUM_HIT, NUM_BLOCKS = 96, 6
LONG_S = 20.0
Started = Callable[..., Server]


def serve(server: Server, name: str, **settings: Any) -> int:
    """Serve a prompt, and empty the device."""
    found = server.serve(server.begin(name, **settings))
    server.forget()
    return found


def stat(server: Server, name: str) -> int:
    return server.stats()[f"shared_{name}"]


def keys(store: Store) -> list[bytes]:
    words = store.command("KEYS", "kvstow:*").split(b"\r\n")
    return sorted(word for word in words if word.startswith(KEY_PREFIX))


def value(store: Store, key: bytes) -> bytes:
    found: bytes = redis_of(store).get(key)
    return found


def redis_of(store: Store) -> Any:
    """Return a client of redis-py."""
    return pytest.importorskip("redis").Redis(port=store.port)


def name_of(key: bytes) -> bytes:
    """Return a key without its namespace."""
    return key[len(KEY_PREFIX) + 2 * NAMESPACE_BYTES :]


def held(server: Server, direction: str) -> list[Callable[[], None]]:
    """Hold up the jobs of one direction on rank 0; the caller lets them go."""
    worker = server.ranks[0].worker.below
    assert worker is not None
    begin = worker._runner.begin
    jobs: list[Callable[[], None]] = []

    def begin_later(way: Any, *args: Any, **more: Any) -> None:
        if way == direction:
            jobs.append(lambda: begin(way, *args, **more))
        else:
            begin(way, *args, **more)

    worker._runner.begin = begin_later  # type: ignore[assignment, method-assign]
    return jobs


def release(server: Server, jobs: list[Callable[[], None]]) -> None:
    worker = server.ranks[0].worker.below
    assert worker is not None
    del worker._runner.begin
    for go in jobs:
        go()


class AnySum(int):
    """A checksum that equals every other."""

    __array_ufunc__ = None  # numpy leaves comparisons to this class

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def refuse(*args: Any, **more: Any) -> Any:
    raise OSError("the test lets every store fail")
