"""Random requests on engines that share a store, which loses, damages and mixes up blocks.

`serve` compares every token that a request loads. `KVSTOW_SEEDS=N` runs N seeds, and
`KVSTOW_SEED=N` repeats one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.engine.disk_world import forget_device, serve, settle
from tests.engine.test_shared import keys, stat, value, world
from tests.tiers.resp.server import Server

from kvstow._core import row_checksums
from kvstow.tiers.framed import Namespace

NUM_SEEDS = int(os.environ.get("KVSTOW_SEEDS", "6"))
SEEDS = [int(os.environ["KVSTOW_SEED"])] if "KVSTOW_SEED" in os.environ else list(range(NUM_SEEDS))
NUM_ENGINES = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server"), "--maxmemory", "100mb") as server:
        yield server


def prompt(draw: random.Random) -> list[int]:
    """Return one of a few conversations, up to some length."""
    chat = draw.randrange(3)
    return [1000 * chat + at for at in range(draw.randrange(5, 29))]


def harm(draw: random.Random, server: Server) -> None:
    """Lose, damage or mix up some blocks of the store."""
    held = keys(server)
    for key in draw.sample(held, min(len(held), draw.randrange(4))):
        kept = bytearray(value(server, key))
        kind = draw.choice(["lose", "flip", "another", "cut"])
        if kind == "lose":
            server.command("DEL", key)
            continue
        if kind == "flip":
            kept[draw.randrange(len(kept))] ^= 1 << draw.randrange(8)
        elif kind == "another":
            kept = bytearray(value(server, draw.choice(held)))
        server.command("SET", key, bytes(kept[: len(kept) - (kind == "cut")]))


def run(seed: int, server: Server) -> float:
    """Run a seed, and return the blocks that came from the store."""
    draw = random.Random(seed)
    server.command("FLUSHALL")
    with ExitStack() as opened:
        worlds = [opened.enter_context(world(server.url)) for _ in range(NUM_ENGINES)]
        for number in range(30):
            it, action = draw.choice(worlds), draw.random()
            if action < 0.7:
                serve(it, f"request {number}", prompt(draw))
            elif action < 0.8:
                forget_device(it)
            elif action < 0.95:
                harm(draw, server)
            else:
                it.engine.reset()
                settle(it)
            it.engine.check()
        return sum(stat(it, "promoted_blocks") for it in worlds)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_wrong_block_is_loaded(seed: int, server: Server) -> None:
    run(seed, server)


def test_the_runs_load_from_the_store(server: Server) -> None:
    """Ensure that the runs above try what they claim."""
    assert sum(run(seed, server) for seed in range(3)) > 20


def test_without_its_proofs_a_wrong_block_is_loaded(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: wrong blocks are loaded if nothing compares."""
    monkeypatch.setattr(Namespace, "checksum", lambda *_: 0)
    monkeypatch.setattr(
        "kvstow.tiers.resp.commands.row_checksums",
        lambda rows, slots: 0 * row_checksums(rows, slots),
    )
    for seed in range(100, 130):
        try:
            run(seed, server)
        except AssertionError:
            return
    pytest.fail("no damage was loaded in 30 seeds")
