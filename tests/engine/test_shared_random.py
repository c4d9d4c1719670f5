"""Random requests on engines that share a store, which loses, damages and mixes up blocks.

Half of the runs have disks below their hosts too, which engines open again while the others run.

`serve` compares every token that a request loads. `KVSTOW_SEEDS=N` runs N seeds, and
`KVSTOW_SEED=N` repeats one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.engine.disk_world import forget_device, serve, settle, slot_file
from tests.engine.test_shared import keys, stat, value, world
from tests.engine.world import World
from tests.tiers.resp.server import Server

from kvstow._core import row_digests
from kvstow.tiers.namespace import Namespace

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


def open_worlds(
    draw: random.Random, url: str, folder: Path | None, opened: ExitStack
) -> list[World]:
    """Open the engines, with small disks in a folder if there is one."""
    worlds = []
    for number in range(NUM_ENGINES):
        below: dict[str, Any] = {}
        if folder is not None:
            # Fewer slots than blocks, so that claims take the places of what the disk has.
            below["disk"] = slot_file(folder / f"disk {number}", draw.choice([6, 20]))
        worlds.append(opened.enter_context(world(url, **below)))
    return worlds


def run(seed: int, server: Server, folder: Path | None = None) -> float:
    """Run a seed, and return the blocks that came from the store or a disk."""
    draw = random.Random(seed)
    server.command("FLUSHALL")
    num_promoted = 0.0
    for _ in range(1 if folder is None else 3):
        num_promoted += live(draw, server, folder)
    return num_promoted


def live(draw: random.Random, server: Server, folder: Path | None) -> float:
    """Run engines from their start to their end."""
    with ExitStack() as opened:
        worlds = open_worlds(draw, server.url, folder, opened)
        for number in range(30 if folder is None else 15):
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
        name = "shared_promoted_blocks" if folder is None else "promoted_blocks"
        return sum(stat(it, name) for it in worlds)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("has_disks", [False, True], ids=["store", "disks and store"])
def test_no_wrong_block_is_loaded(
    seed: int, has_disks: bool, server: Server, tmp_path: Path
) -> None:
    run(seed, server, tmp_path if has_disks else None)


def test_the_runs_load_from_the_store(server: Server, tmp_path: Path) -> None:
    """Ensure that the runs above try what they claim."""
    assert sum(run(seed, server) for seed in range(3)) > 20
    assert run(3, server, tmp_path) > 20


def test_without_its_proofs_a_wrong_block_is_loaded(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: wrong blocks are loaded if nothing compares."""
    monkeypatch.setattr(Namespace, "checksum", lambda *_: 0)
    monkeypatch.setattr(
        "kvstow.tiers.resp.commands.row_digests",
        lambda rows, slots: 0 * row_digests(rows, slots),
    )
    for seed in range(100, 130):
        try:
            run(seed, server)
        except AssertionError:
            return
    pytest.fail("no damage was loaded in 30 seeds")


def test_without_the_frames_of_the_disk_a_wrong_block_is_loaded(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The negative control for claims whose slots hold other blocks."""
    monkeypatch.setattr(
        "kvstow.tiers.slot_store.match", lambda frames, expected: frames["digest"] != 0
    )
    for seed in range(100, 130):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            run(seed, server, folder)
        except AssertionError:
            return
    pytest.fail("no other block was loaded in 30 seeds")
