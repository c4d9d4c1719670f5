"""Random calls to a real Mooncake store, through calls that fail, hang and return wrong bytes.

`KVSTOW_SEEDS=N` runs N seeds, and `KVSTOW_SEED=N` repeats one.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.tiers.mooncake_master import Master, missing
from tests.tiers.shared_calls import NUM_SLOTS, SEEDS, SLOT_BYTES, Calls

from kvstow.tiers.breaker import Breaker
from kvstow.tiers.mooncake import MooncakeTier
from kvstow.tiers.mooncake_link import Link
from kvstow.tiers.namespace import HEADER_BYTES, Namespace
from kvstow.transfer import HostArena

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

NAMESPACE = b"0123456789abcdef"
_IN_DOUBT = -800
_FAILURES = (_IN_DOUBT, -900, -707, -704, -200)
_PAUSE_S = 0.05


def _parts(pointers: list[int], sizes: list[int]) -> list[tuple[int, int]]:
    """Return the address and the size of a value's header, and of its block."""
    if len(pointers) == 2:
        return list(zip(pointers, sizes, strict=True))
    return [(pointers[0], HEADER_BYTES), (pointers[0] + HEADER_BYTES, sizes[0] - HEADER_BYTES)]


class Faults:
    """The faults of one seed.

    Attributes:
        random: what draws them.
        rate: the probability of a fault in a call.
        num_faults: how many there were.
        late: writes of failed gets that come after the job.
    """

    def __init__(self, seed: int) -> None:
        """Begin without faults."""
        self.random = random.Random(f"faults {seed}")
        self.rate = 0.0
        self.num_faults = 0
        self.late: list[Callable[[], None]] = []

    def come_late(self) -> None:
        """Write what has not arrived yet."""
        while self.late:
            self.late.pop()()


class Shaken:
    """A store whose batch calls meet faults. Its close ends what they have begun."""

    def __init__(self, store: Any, faults: Faults) -> None:
        """Take a real store, which stays open."""
        self._store, self._faults = store, faults
        self._random = faults.random
        self._registered: list[int] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def __getattr__(self, name: str) -> Any:
        """Return the store's own method for what is not shaken."""
        return getattr(self._store, name)

    def register_buffer(self, address: int, num_bytes: int) -> int:
        """Register memory until the close."""
        self._registered.append(address)
        code: int = self._store.register_buffer(address, num_bytes)
        return code

    def close(self) -> int:
        """Let no more bytes arrive."""
        with self._lock:
            self._is_closed = True
        for address in self._registered:
            self._store.unregister_buffer(address)
        return 0

    def _arrive_late(self, buffers: list[tuple[int, int]]) -> None:
        """Write into the buffers of a failed call: soon, or after the end of its job."""

        def arrive() -> None:
            with self._lock:
                if not self._is_closed:
                    for address, size in buffers:
                        ctypes.memset(address, 0xEE, size)

        if buffers and self._random.random() < 0.5:
            threading.Timer(0.001, arrive).start()
        elif buffers:
            self._faults.late.append(arrive)

    def _shaken(self, call: Callable[[], Any], num: int) -> Any:
        if self._random.random() >= self._faults.rate:
            return call()
        self._faults.num_faults += 1
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
        if len(keys) > 1 and self._random.random() < self._faults.rate / 4:
            self._faults.num_faults += 1
            pointers = pointers[1:] + pointers[:1]
        call = self._store.batch_put_from_multi_buffers
        return self._shaken(lambda: call(keys, pointers, sizes), len(keys))

    def batch_get_into_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> Any:
        """Get, sometimes with a bit that changed, or with the bytes of another block.

        If a get is in doubt, bytes arrive after it has returned.
        """
        call = self._store.batch_get_into_multi_buffers
        codes = self._shaken(lambda: call(keys, pointers, sizes), len(keys))
        if self._random.random() < self._faults.rate:
            self._faults.num_faults += 1
            part = self._random.randrange(2)
            parts = [_parts(*value)[part] for value in zip(pointers, sizes, strict=True)]
            address, size = self._random.choice(parts)
            if self._random.random() < 0.5:
                target = ctypes.c_uint8.from_address(address + self._random.randrange(size))
                target.value ^= 1 << self._random.randrange(8)
            else:
                source, _ = self._random.choice(parts)
                ctypes.memmove(address, source, size // self._random.choice([1, 2]))
        values = zip(codes, pointers, sizes, strict=True)
        failed = [value for code, *value in values if code == _IN_DOUBT]
        self._arrive_late([pair for value in failed for pair in zip(*value, strict=True)])
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

    store: Any
    faults: Faults

    def _connect(self) -> Link:
        return Link(Shaken(self.store, self.faults))


def run(seed: int, store: Any, arena: HostArena) -> tuple[int, Faults]:
    """Run a seed, and return how many blocks came back, and the faults."""
    draw = random.Random(seed)
    namespace = seed.to_bytes(4, "little") * 4
    with _Tier(arena, "mooncake://127.0.0.1", namespace, timeout_s=0.4) as tier:
        tier.store, tier.faults = store, Faults(seed)
        calls = Calls(seed, tier, tier.faults.come_late)
        for _ in range(12):
            tier.faults.rate = draw.choice([0.0, 0.2, 0.6])
            calls.step()
    store.remove_by_regex(f"^{Namespace(namespace).prefix.decode()}", True)
    return calls.num_hits, tier.faults


@pytest.mark.parametrize("seed", SEEDS)
def test_no_wrong_block_is_served(seed: int, store: Any, arena: HostArena) -> None:
    run(seed, store, arena)


def test_the_runs_hit_and_harm(store: Any, arena: HostArena) -> None:
    """Ensure that the runs above try what they claim."""
    num_hits, faults = zip(*(run(seed, store, arena) for seed in range(4)), strict=True)
    assert sum(num_hits) > 20
    assert sum(each.num_faults for each in faults) > 10


def test_without_its_header_a_wrong_block_is_served(
    store: Any, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: damage is served if nothing compares."""
    monkeypatch.setattr(Namespace, "checksum", lambda *_: 0)
    monkeypatch.setattr(
        "kvstow.tiers.mooncake.row_digests", lambda rows, ids: np.zeros(len(ids), np.uint64)
    )
    for seed in range(100, 140):
        try:
            run(seed, store, arena)
        except AssertionError as error:
            assert "is wrong" in str(error)
            return
    pytest.fail("no damage was served in 40 seeds")


@pytest.mark.parametrize("_way", ["in place"], indirect=True)
def test_bytes_of_a_failed_get_arrive_in_a_slot_unless_its_link_is_closed(
    store: Any, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: a slot changes after its job, if a doubt closes nothing."""
    end = Link.end
    monkeypatch.setattr(Link, "end", lambda link, **_: end(link, in_doubt=False))
    for seed in range(200, 240):
        try:
            run(seed, store, arena)
        except AssertionError as error:
            assert "bytes arrive after the end" in str(error) or "is wrong" in str(error)
            return
    pytest.fail("no slot changed in 40 seeds")
