"""Weights that change: no engine serves KV that other weights have computed.

Each block's bytes carry the weights that computed it. In the random lives, engines change their
weights, with a name and without, sleep and wake, end, and begin again from files of any of them,
while they share a store or keep disks. The store is a real server. `KVSTOW_SEEDS=N` runs N seeds,
and `KVSTOW_SEED=N` repeats one.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.disk_world import NUM_HOST, forget_device, serve, settle, slot_file
from tests.engine.disk_world import options as disk_options
from tests.engine.test_shared import options as shared_options
from tests.engine.test_shared import store_at
from tests.engine.world import BLOCK, DOCUMENT, RUNS, World
from tests.tiers.resp.server import Server
from tests.tiers.setup import LONG_S

from kvstow import ConfigError, StateError
from kvstow.engine.disk import Disk
from kvstow.tiers import Fingerprint, SlotTier, TierTicket
from kvstow.transfer import READY, BlockLayout, Event, mover_for

NUM_SEEDS = int(os.environ.get("KVSTOW_SEEDS", "4"))
SEEDS = [int(os.environ["KVSTOW_SEED"])] if "KVSTOW_SEED" in os.environ else list(range(NUM_SEEDS))
KINDS = ["disk", "store", "disk and store"]
NUM_ENGINES = 3
NUM_WEIGHTS = 3
NUM_ACTIONS = 50
SCALE = 10**6
NUM_WHOLE = (len(DOCUMENT) - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server"), "--maxmemory", "100mb") as server:
        yield server


class Weighted(World):
    """An engine whose KV depends on its weights. The name of weights `n` is `str(n)`."""

    def __init__(self, weights: int, kind: str, url: str, disk: Path) -> None:
        self.weights = weights
        below: dict[str, Any] = {}
        named = {"weights_version": str(weights)}
        if "disk" in kind:
            below = {"disk": slot_file(disk, 20, on_mismatch="reset")}
        if "store" in kind:
            below |= {"shared": store_at(url), "shared_options": shared_options(**named)}
        elif "disk" in kind:
            below["disk_options"] = disk_options(**named)
        super().__init__(17, NUM_HOST, mover=mover_for, **below)

    def compute(self, name: str, tokens: list[int], after: Event = READY) -> None:
        super().compute(name, [token + SCALE * self.weights for token in tokens], after)

    def cached(self, name: str, num_tokens: int) -> list[int]:
        """Return the tokens in the request's blocks, if these weights have computed them."""
        return [held - SCALE * self.weights for held in super().cached(name, num_tokens)]

    @property
    def disk(self) -> Disk:
        disk = self.engine._copies.disk
        assert disk is not None
        return disk

    def run(self, name: str, tokens: list[int]) -> None:
        """Admit a request that no tier has anything of, and compute it."""
        end_s = time.monotonic() + LONG_S
        while self.admit(name, tokens).state is not RUNS:
            self.engine.poll()
            assert time.monotonic() < end_s, "an admission does not come"
            time.sleep(0.001)
        self.compute(name, tokens)

    def sleep(self, name: str, **options: Any) -> None:
        self.engine.sleep(after=READY, identity="m", weights_version=name, **options)

    def wake(self, name: str) -> None:
        self.kv[:] = -1
        layouts = [BlockLayout.from_arrays([self.kv])]
        self.engine.wake(layouts, after=READY, identity="m", weights_version=name)

    def restart(self, path: Path) -> None:
        name = str(self.weights)
        self.engine.restart(path, after=READY, identity="m", weights_version=name)

    def end(self) -> None:
        settle(self)
        self.engine.check()
        self.engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_without_a_name_go_into_no_file(kind: str, server: Server, tmp_path: Path) -> None:
    server.command("FLUSHALL")
    path, disk = tmp_path / "snapshot", tmp_path / "disk"
    it = Weighted(1, kind, server.url, disk)
    try:
        assert serve(it, "old", DOCUMENT) == 0
        it.weights = 2
        it.engine.reset()
        assert serve(it, "new", DOCUMENT) == 0
        for name in "1", "2":
            with pytest.raises(StateError, match=r"no name since a reset.*, or sleep in HOST"):
                it.sleep(name, to=path)
        assert not path.exists()
        it.sleep("1")
        it.wake("1")
        assert serve(it, "same process", DOCUMENT) == NUM_WHOLE
        # The way out that the error names.
        it.engine.reset(weights_version="2")
        settle(it)
        assert serve(it, "named", DOCUMENT) == 0
        it.sleep("2", to=path)
    finally:
        it.engine.close()
    server.command("FLUSHALL")
    it = Weighted(2, kind, server.url, disk)
    try:
        it.restart(path)
        assert serve(it, "another process", DOCUMENT) == NUM_WHOLE
    finally:
        it.engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_without_a_name_take_no_file(kind: str, server: Server, tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    it = Weighted(1, kind, server.url, tmp_path / "disk")
    serve(it, "writer", DOCUMENT)
    it.sleep("1", to=path)
    it.engine.close()
    it = Weighted(1, kind, server.url, tmp_path / "disk")
    try:
        it.engine.reset()
        with pytest.raises(StateError, match=r"no name since a reset"):
            it.restart(path)
    finally:
        it.engine.close()


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_engine_that_names_its_new_weights_sleeps_in_a_file(
    kind: str, server: Server, tmp_path: Path
) -> None:
    """As the page about sleep says."""
    server.command("FLUSHALL")
    path = tmp_path / "snapshot"
    it = Weighted(1, kind, server.url, tmp_path / "disk")
    try:
        it.run("runs", DOCUMENT)
        it.sleep("1", to=path)
        it.wake("1")
        it.engine.preempt("runs")
        it.weights = 2
        it.engine.reset(weights_version="2")
        settle(it)
        assert serve(it, "runs", DOCUMENT) == 0
        it.sleep("2", to=path)
    finally:
        it.engine.close()
    it = Weighted(2, kind, server.url, tmp_path / "disk")
    try:
        it.restart(path)
        assert serve(it, "another process", DOCUMENT) == NUM_WHOLE
    finally:
        it.engine.close()


# -- random lives ------------------------------------------------------------------------------


class Fleet:
    """Engines that share a store or keep disks, and the files in which engines have slept.

    Attributes:
        counts: what has happened.
    """

    def __init__(self, seed: int, kind: str, server: Server, folder: Path) -> None:
        server.command("FLUSHALL")
        self.draw = random.Random(seed)
        self.kind, self.url, self.folder = kind, server.url, folder
        self.counts = Counter[str]()
        # The name that each file was written under.
        self.files: dict[Path, str] = {}
        self.engines = [self.begin(number, 0) for number in range(NUM_ENGINES)]

    def begin(self, number: int, weights: int) -> Weighted:
        """Start a process with these weights, perhaps from a file that has their name."""
        it = Weighted(weights, self.kind, self.url, self.folder / f"disk {number}")
        fitting = [path for path, name in self.files.items() if name == str(weights)]
        if fitting and self.draw.random() < 0.7:
            self.counts["restarts"] += 1
            it.restart(self.draw.choice(fitting[-2:]))
        return it

    def prompt(self) -> list[int]:
        """Return one of a few conversations, up to some length."""
        chat = self.draw.randrange(3)
        return [1000 * chat + at for at in range(self.draw.randrange(5, 29))]

    def act(self, at: int) -> None:
        """Let one engine do something."""
        number = self.draw.randrange(NUM_ENGINES)
        it, action = self.engines[number], self.draw.random()
        name = f"request {at}"
        if action < 0.55:
            settles = self.draw.random() < 0.5
            self.counts["loads"] += serve(it, name, self.prompt(), settles=settles) > 0
        elif action < 0.6:
            settle(it)
            forget_device(it)
        elif action < 0.7:
            self.change(it)
        elif action < 0.75:
            self.change_under(it, name)
        elif action < 0.8:
            it.sleep(it.disk.options.weights_version)
            it.wake(it.disk.options.weights_version)
        elif action < 0.9:
            self.sleep_in_a_file(it, number, at)
        else:
            it.end()
            # Often those with which the process before began.
            weights = self.draw.choice([int(it.disk.options.weights_version), 0, 1])
            self.engines[number] = self.begin(number, weights)
        self.engines[number].engine.check()

    def change(self, it: Weighted) -> None:
        """Change the weights, and name them if the engine has not had them."""
        it.weights = self.draw.randrange(NUM_WEIGHTS)
        name = str(it.weights) if self.draw.random() < 0.5 else None
        try:
            it.engine.reset(weights_version=name)
        except ConfigError:  # it has had them
            it.engine.reset()
        self.counts["changes"] += 1

    def change_under(self, it: Weighted, name: str) -> None:
        """Change the weights while a request runs whose KV the weights of before compute."""
        tokens = self.prompt()
        if it.admit(name, tokens).state is not RUNS:
            it.engine.finish(name)
            return
        old, new = it.weights, self.draw.randrange(NUM_WEIGHTS)
        it.engine.reset()
        it.weights = old
        it.compute(name, tokens)
        it.weights = new
        it.engine.finish(name)

    def sleep_in_a_file(self, it: Weighted, number: int, at: int) -> None:
        """Sleep as the engine allows it. Then wake, or end and begin another one."""
        path = self.folder / f"snapshot {at}"
        for name in str(it.weights), it.disk.options.weights_version:
            try:
                it.sleep(name, to=path)
            except ConfigError:
                continue
            except StateError:
                self.counts["refused sleeps"] += 1
                return
            self.files[path] = name
            if self.draw.random() < 0.5:
                it.wake(name)
            else:
                it.engine.close()
                self.engines[number] = self.begin(number, int(name))
            return
        pytest.fail("the engine sleeps under no name")

    def close(self) -> None:
        for it in self.engines:
            it.engine.close()


def live(seed: int, kind: str, server: Server, folder: Path) -> Counter[str]:
    """Run a seed. Return what has happened."""
    folder.mkdir()
    fleet = Fleet(seed, kind, server, folder)
    try:
        for at in range(NUM_ACTIONS):
            fleet.act(at)
        for it in fleet.engines:
            it.end()
    finally:
        fleet.close()
    return fleet.counts


@pytest.mark.parametrize("kind", KINDS)
def test_no_engine_serves_kv_of_other_weights(kind: str, server: Server, tmp_path: Path) -> None:
    counts = Counter[str]()
    for seed in SEEDS:
        print(f"seed {seed}")
        counts += live(seed, kind, server, tmp_path / str(seed))
    print(dict(counts))
    if len(SEEDS) > 1:
        assert min(counts[it] for it in ("loads", "restarts", "changes", "refused sleeps")) > 0


# What each negative control leaves out, and the kind of tiers that shows it.


def names_count_always(patch: pytest.MonkeyPatch) -> None:
    real = Disk.check_is_of
    patch.setattr(Disk, "check_is_of", lambda *args, in_file: real(*args, in_file=False))


def salt_is_empty(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvstow.engine.shared.Shared._new_salt", lambda _: b"")


def disk_is_warm(patch: pytest.MonkeyPatch) -> None:
    real = SlotTier.renew

    def renew(tier: SlotTier, given: Fingerprint | None) -> TierTicket:
        return real(tier, given or Fingerprint(tier._store.header.fingerprint))

    patch.setattr(SlotTier, "renew", renew)


def requests_are_fresh(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvstow.engine.state.State.make_stale", lambda _: None)


CONTROLS = [
    ("store", names_count_always),
    ("store", salt_is_empty),
    ("disk and store", salt_is_empty),
    ("disk", disk_is_warm),
    ("disk", requests_are_fresh),
]


@pytest.mark.parametrize(("kind", "leave_out"), CONTROLS)
def test_random_lives_detect_what_is_left_out(
    kind: str,
    leave_out: Callable[[pytest.MonkeyPatch], None],
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave_out(monkeypatch)
    with pytest.raises(AssertionError, match="reads another block"):
        for seed in range(300):
            live(seed, kind, server, tmp_path / str(seed))
