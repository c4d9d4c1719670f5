"""Random calls to a real Mooncake store, through calls that fail, hang and return wrong bytes.

`KVSTOW_SEEDS=N` runs N seeds, and `KVSTOW_SEED=N` repeats one.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.tiers.mooncake_master import Master, missing
from tests.tiers.shared_calls import NUM_SLOTS, SEEDS, SLOT_BYTES, Calls

from kvstow.tiers.breaker import Breaker
from kvstow.tiers.framed import HEADER_BYTES, Namespace
from kvstow.tiers.mooncake import MooncakeTier
from kvstow.transfer import HostArena

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

NAMESPACE = b"0123456789abcdef"
_FAILURES = (-800, -900, -707, -704, -200)
_PAUSE_S = 0.05


def _parts(pointers: list[int], sizes: list[int]) -> list[tuple[int, int]]:
    """Return the address and the size of a value's header, and of its block."""
    if len(pointers) == 2:
        return list(zip(pointers, sizes, strict=True))
    return [(pointers[0], HEADER_BYTES), (pointers[0] + HEADER_BYTES, sizes[0] - HEADER_BYTES)]


class Shaken:
    """A store whose batch calls meet faults.

    Attributes:
        rate: the probability of a fault in a call.
        num_faults: how many there were.
    """

    def __init__(self, store: Any, seed: int) -> None:
        """Take a real store."""
        self._store, self._random = store, random.Random(f"faults {seed}")
        self.rate = 0.0
        self.num_faults = 0

    def __getattr__(self, name: str) -> Any:
        """Return the store's own method for what is not shaken."""
        return getattr(self._store, name)

    def _shaken(self, call: Callable[[], Any], num: int) -> Any:
        if self._random.random() >= self.rate:
            return call()
        self.num_faults += 1
        kind = self._random.choice(["late", "not done", "done and failed", "partly"])
        if kind == "late":
            time.sleep(_PAUSE_S)
            return call()
        failure = self._random.choice(_FAILURES)
        if kind == "not done":
            return [failure] * num
        codes = call()
        if kind == "done and failed":
            return [failure] * num
        return [self._random.choice([code, failure]) for code in codes]

    def batch_put_from_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> Any:
        """Put, sometimes under the key of another block."""
        if len(keys) > 1 and self._random.random() < self.rate / 4:
            self.num_faults += 1
            pointers = pointers[1:] + pointers[:1]
        call = self._store.batch_put_from_multi_buffers
        return self._shaken(lambda: call(keys, pointers, sizes), len(keys))

    def batch_get_into_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> Any:
        """Get, sometimes with a bit that changed, or with the bytes of another block."""
        call = self._store.batch_get_into_multi_buffers
        codes = self._shaken(lambda: call(keys, pointers, sizes), len(keys))
        if self._random.random() < self.rate:
            self.num_faults += 1
            part = self._random.randrange(2)
            parts = [_parts(*value)[part] for value in zip(pointers, sizes, strict=True)]
            address, size = self._random.choice(parts)
            if self._random.random() < 0.5:
                target = ctypes.c_uint8.from_address(address + self._random.randrange(size))
                target.value ^= 1 << self._random.randrange(8)
            else:
                source, _ = self._random.choice(parts)
                ctypes.memmove(address, source, size // self._random.choice([1, 2]))
        return codes

    def batch_is_exist(self, keys: list[str]) -> Any:
        """Ask, with faults."""
        return self._shaken(lambda: self._store.batch_is_exist(keys), len(keys))

    def batch_remove(self, keys: list[str], force: bool) -> Any:
        """Delete, with faults."""
        return self._shaken(lambda: self._store.batch_remove(keys, force), len(keys))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield one real store for all seeds, with an arena that stays registered."""
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415

    master = Master(tmp_path_factory.mktemp("master"))
    store = MooncakeDistributedStore()
    address = f"127.0.0.1:{master.port}"
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", address)
    assert code == 0
    yield store
    store.close()
    master.kill()


@pytest.fixture(scope="module")
def arena(store: Any) -> Iterator[HostArena]:
    with HostArena(NUM_SLOTS, SLOT_BYTES) as arena:
        assert store.register_buffer(arena.memory.ctypes.data, arena.memory.nbytes) == 0
        yield arena
        store.unregister_buffer(arena.memory.ctypes.data)


@pytest.fixture(autouse=True)
def _always_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each call meet its own faults, which a breaker would keep from it."""
    monkeypatch.setattr(Breaker, "may_try", lambda _: True)


@pytest.fixture(autouse=True, params=["copied", "in place"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Move blocks both ways, which their size decides."""
    if request.param == "in place":
        monkeypatch.setattr("kvstow.tiers.mooncake.MAX_COPIED_BYTES", 0)


class _Tier(MooncakeTier):
    """A tier on a store that is there already, and knows the arena."""

    shaken: Shaken
    # Memory that the store knows. It stays, because the store outlives the tier.
    known: ClassVar[list[Any]] = []

    def connected(self) -> Any:
        return self.shaken

    def register(self, store: Any, memory: Any) -> None:
        self.known.append(memory)
        super().register(store, memory)


def run(seed: int, store: Any, arena: HostArena) -> tuple[int, int]:
    """Run a seed, and return how many blocks came back, and how many faults there were."""
    draw = random.Random(seed)
    namespace = seed.to_bytes(4, "little") * 4
    with _Tier(arena, "mooncake://127.0.0.1", namespace, timeout_s=0.4) as tier:
        tier.shaken = Shaken(store, seed)
        calls = Calls(seed, tier)
        for _ in range(12):
            tier.shaken.rate = draw.choice([0.0, 0.2, 0.6])
            calls.step()
    store.remove_by_regex(f"^{Namespace(namespace).prefix.decode()}", True)
    return calls.num_hits, tier.shaken.num_faults


@pytest.mark.parametrize("seed", SEEDS)
def test_no_wrong_block_is_served(seed: int, store: Any, arena: HostArena) -> None:
    run(seed, store, arena)


def test_the_runs_hit_and_harm(store: Any, arena: HostArena) -> None:
    """Ensure that the runs above try what they claim."""
    num_hits, num_faults = zip(*(run(seed, store, arena) for seed in range(4)), strict=True)
    assert sum(num_hits) > 20
    assert sum(num_faults) > 10


def test_without_its_header_a_wrong_block_is_served(
    store: Any, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: damage is served if nothing compares."""
    monkeypatch.setattr(Namespace, "checksum", lambda *_: 0)
    monkeypatch.setattr(
        "kvstow.tiers.mooncake.row_checksums", lambda rows, ids: np.zeros(len(ids), np.uint32)
    )
    for seed in range(100, 140):
        try:
            run(seed, store, arena)
        except AssertionError as error:
            assert "is wrong" in str(error)
            return
    pytest.fail("no damage was served in 40 seeds")
