"""Random calls to a real server, through a network that flips, loses, cuts and delays.

Whatever happens, a block that is reported as True has the bytes that were last put under its key,
and a host slot does not change after its ticket has ended. `KVSTOW_SEEDS=N` runs N seeds, and
`KVSTOW_SEED=N` repeats one.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.resp.proxy import Faults, Proxy
from tests.tiers.resp.server import Server

from kvstow.tiers import TierBlocks
from kvstow.tiers.breaker import Breaker
from kvstow.tiers.framed import Namespace
from kvstow.tiers.resp import RespTier
from kvstow.transfer import HostArena

NUM_SLOTS, SLOT_BYTES, NUM_KEYS = 48, 9000, 24
NAMESPACE = b"0123456789abcdef"
NUM_SEEDS = int(os.environ.get("KVSTOW_SEEDS", "12"))
SEEDS = [int(os.environ["KVSTOW_SEED"])] if "KVSTOW_SEED" in os.environ else list(range(NUM_SEEDS))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(autouse=True)
def _always_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each call meet its own faults, which a breaker would keep from it."""
    monkeypatch.setattr(Breaker, "may_try", lambda _: True)


class Run:
    """One seed: what was put, and what must not change any more."""

    def __init__(self, seed: int, server: Server, proxy: Proxy) -> None:
        self.random = random.Random(seed)
        self.proxy = proxy
        server.command("FLUSHALL")
        self.arena = HostArena(NUM_SLOTS, SLOT_BYTES)
        url = f"redis://127.0.0.1:{proxy.port}"
        self.tier = RespTier(self.arena, url, NAMESPACE, timeout_s=0.4)
        # A key's bytes are those of a number: a chain of hashes never names two contents.
        self.num_hits = self.num_calls = 0

    def bytes_of(self, key: int) -> np.ndarray:
        return np.random.default_rng(key).integers(0, 256, SLOT_BYTES, dtype=np.uint8)

    def step(self) -> None:
        keys = self.random.sample(range(NUM_KEYS), self.random.randint(1, 20))
        slots = self.random.sample(range(NUM_SLOTS), len(keys))
        blocks = TierBlocks([b"%020d" % key for key in keys], [key % 3 for key in keys])
        deadline = self.random.choice([None, time.monotonic() + self.random.uniform(0.001, 0.3)])
        kind = self.random.choice(["put", "put", "get", "get", "contains", "delete"])
        self.num_calls += 1
        if kind == "put":
            for key, slot in zip(keys, slots, strict=True):
                self.arena.slots[slot] = self.bytes_of(key)
            ticket = self.tier.put(blocks, slots, deadline=deadline)
        elif kind == "get":
            ticket = self.tier.get(blocks, slots, deadline=deadline)
        elif kind == "contains":
            ticket = self.tier.contains(blocks, deadline=deadline)
        else:
            ticket = self.tier.delete(blocks)
        begin_s = time.monotonic()
        ticket.wait(20)
        while not ticket.has_ended:
            assert time.monotonic() - begin_s < 20, "the job does not end"
            time.sleep(0.0005)
        if kind != "get":
            return
        for key, slot, ok in zip(keys, slots, ticket.ok.tolist(), strict=True):
            if ok:
                self.num_hits += 1
                assert (self.arena.slots[slot] == self.bytes_of(key)).all(), f"key {key} is wrong"
        kept = self.arena.slots[slots].copy()
        time.sleep(0.002)
        assert (self.arena.slots[slots] == kept).all(), "bytes arrive after the end"

    def close(self) -> None:
        self.tier.close()
        self.arena.close()


def run(seed: int, server: Server) -> Run:
    draw = random.Random(f"faults {seed}")
    with Proxy(server.port, seed) as proxy:
        one = Run(seed, server, proxy)
        try:
            for _ in range(12):
                proxy.faults = Faults()
                if draw.random() < 0.7:
                    flip, cut, lose = (draw.choice([0, 0, 0.02, 0.1]) for _ in range(3))
                    proxy.faults = Faults(flip, cut, lose, draw.choice([0, 0, 0.03]))
                one.step()
        finally:
            one.close()
    return one


@pytest.mark.parametrize("seed", SEEDS)
def test_no_wrong_block_is_served(seed: int, server: Server) -> None:
    run(seed, server)


def test_the_runs_hit_and_harm(server: Server) -> None:
    """Ensure that the runs above try what they claim."""
    runs = [run(seed, server) for seed in range(4)]
    assert sum(one.num_hits for one in runs) > 20
    assert sum(one.proxy.num_faults for one in runs) > 10


def test_without_its_header_a_wrong_block_is_served(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The negative control: damage is served if nothing compares."""
    monkeypatch.setattr(Namespace, "checksum", lambda *_: 0)
    monkeypatch.setattr(
        "kvstow.tiers.resp.commands.row_checksums", lambda rows, ids: np.zeros(len(ids), np.uint32)
    )
    for seed in range(100, 140):
        try:
            run(seed, server)
        except AssertionError as error:
            assert "is wrong" in str(error)
            return
    pytest.fail("no damage was served in 40 seeds")
