"""Two servers of several ranks, each with a disk before one shared store, in random turns.

Steps overlap, so orders and reports arrive late. Weights change in place, servers start again,
values and slots are damaged or lost on one rank, jobs are held up and miss their deadline. Every
block that a request loads is compared. `KVSTOW_SEEDS=N` runs N lives, `KVSTOW_SEED=N` repeats one.
"""

from __future__ import annotations

import copy
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.resp.server import Server as Store
from tests.vllm.halves import BLOCK_SIZE, Step
from tests.vllm.halves_below import Server, folder_on_disk
from tests.vllm.sharing import LONG_S, keys, redis_of
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstow.vllm.below import shared
from kvstow.vllm.messages import StepJobs, StepReports

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

NUM_LIVES = int(os.environ.get("KVSTOW_SEEDS", "2"))
NUM_TURNS = 120
PROMPTS = "pqrstuv"
SLOT = 4096 + 128


class Late(Server):
    """A server whose ranks take a step's jobs up to `depth` steps after the scheduler's plan."""

    def __init__(self, *args: Any, chances: random.Random, **more: Any) -> None:
        self.chances = chances
        self.depth = 0
        self.steps: deque[tuple[StepJobs, list[tuple[bytes, int]]]] = deque()
        self.held: list[Callable[[], None]] = []
        super().__init__(*args, **more)
        for rank in self.ranks:
            self._delay(rank.worker.below)

    def _delay(self, worker: Any) -> None:
        begin = worker._runner.begin

        def begin_perhaps(*args: Any, **more: Any) -> None:
            if self.chances.random() < 0.05:
                self.held.append(lambda: begin(*args, **more))
            else:
                begin(*args, **more)

        worker._runner.begin = begin_perhaps

    def release(self) -> None:
        while self.held:
            self.held.pop(self.chances.randrange(len(self.held)))()

    def step(self, *requests: Request) -> set[str]:
        """Plan a step, and let the ranks run those that are due."""
        scheduled = {r.request_id: r.num_tokens - r.num_computed_tokens for r in requests}
        jobs = self.half.build(Step(scheduled))
        filled: list[tuple[bytes, int]] = []
        for request in requests:
            (table,) = self.scheduler.manager.get_blocks(request.request_id).blocks
            first = request.num_computed_tokens // BLOCK_SIZE
            for index in range(first, request.num_tokens // BLOCK_SIZE):
                filled.append((request.block_hashes[index], table[index].block_id))
            request.num_computed_tokens = request.num_tokens
        self.steps.append((jobs, filled))
        if self.chances.random() < 0.2:
            self.release()
        landed: set[str] = set()
        # vLLM finishes a request when the outcome of its step is known.
        depth = 0 if requests else self.chances.randrange(self.depth + 1)
        while len(self.steps) > depth:
            landed |= self._run(*self.steps.popleft())
        return landed

    def _run(self, jobs: StepJobs, filled: list[tuple[bytes, int]]) -> set[str]:
        news = []
        for at, rank in enumerate(self.ranks):
            rank.worker.bind(copy.deepcopy(jobs))
            rank.worker.begin("load")
            for block_hash, block in filled:
                rank.blocks[block] = self.content(at, block_hash)
            rank.worker.begin("store")
            news.append(rank.worker.reports() or StepReports())
        output = KVConnectorOutput(kv_connector_worker_meta=reduce(StepReports.aggregate, news))
        self.half.processed(output)
        assert not self.half.tier.is_off
        if self.half.offload is not None:
            self.half.offload.check()
        return output.finished_recving or set()

    def flush(self) -> None:
        while self.steps:
            self._run(*self.steps.popleft())

    def forget(self) -> None:
        self.flush()
        self.release()
        while self.half.transfers.in_flight:
            self.step()
        super().forget()


class Life:
    """Two servers on one store."""

    def __init__(self, seed: int, folder: Path, store: Store) -> None:
        self.seed, self.folder, self.store = seed, folder, store
        self.chances = random.Random(seed)
        self.num_ranks = self.chances.choice([1, 2, 3])
        self.servers: dict[str, Late] = {}
        self.counts: Counter[str] = Counter()
        self.num_requests = self.num_weights = 0
        for name in "ab":
            (folder / name).mkdir()
            self.start(name)

    def start(self, name: str) -> None:
        chances = self.chances
        if name in self.servers:
            before = self.servers.pop(name)
            before.flush()
            before.release()
            before.close()
        options: dict[str, Any] = {
            "store_threshold": chances.choice([1, 1, 2]),
            "disk_admit": chances.choice(["all", "returned"]),
            "min_promote_tokens": chances.choice([0, 0, 40]),
            "verify": chances.choice(["off", "checksum"]),
            "lazy_offload": chances.random() < 0.3,
            "skip_slow_loads": chances.random() < 0.2,
            "load_timeout_s": 50.0,
            "shared_timeout_s": LONG_S,
        }
        version = self.version(name)
        version.write_text("v1")  # which `Server` has at its start
        if chances.random() < 0.5:
            options |= {"preserve_on_sleep": True, "weights_version_path": str(version)}
        server = self.servers[name] = Late(
            self.folder / name,
            chances=chances,
            num_ranks=self.num_ranks,
            shared=self.store.url,
            shared_ask_timeout_s=LONG_S,
            disk_path=str(self.folder / name),
            disk_bytes_to_use=self.num_ranks * (4096 + 100 * SLOT),
            **options,
        )
        server.depth = chances.choice([0, 1, 2])

    def version(self, name: str) -> Path:
        """Return the file that names a server's weights."""
        return self.folder / f"{name}.version"

    def turn(self) -> None:
        chances = self.chances
        name = chances.choice("ab")
        server, chance = self.servers[name], chances.random()
        if chance < 0.6:
            self.num_requests += 1
            prompt, num_tokens = chances.choice(PROMPTS), chances.choice([40, 100, 130])
            request = server.begin(f"{self.num_requests}-{prompt}", num_tokens)
            self.counts["loaded tokens"] += server.serve(request, settles=False)
            if chances.random() < 0.7:
                server.forget()
        elif chance < 0.7:
            for _ in range(chances.randrange(6)):
                server.step()
        elif chance < 0.74:
            self.change_weights(name)
        elif chance < 0.78:
            self.start(name)
            self.counts["starts"] += 1
        elif chance < 0.84:
            self.lose_values()
        elif chance < 0.9:
            self.damage_slot(name)
        elif chance < 0.92:
            server.scheduler.now += 60.0  # all jobs under way are late
            server.step()
        else:
            server.release()
            server.settle()

    def change_weights(self, name: str) -> None:
        """Empty the caches before the weights change, or after that, or although they do not."""
        server = self.servers[name]
        is_first = self.chances.random() < 0.5
        if is_first:
            server.half.reset()
        server.forget()
        if self.chances.random() < 0.8:
            self.num_weights += 1
            server.weights = f"changed {self.num_weights}"
            self.version(name).write_text(server.weights)
        if not is_first:
            server.half.reset()
        self.counts["resets"] += 1

    def lose_values(self) -> None:
        """Drop, damage or exchange values in the store."""
        found, client = keys(self.store), redis_of(self.store)
        if len(found) < 2:
            return
        for _ in range(self.chances.randrange(1, 6)):
            one, other = self.chances.sample(found, 2)
            held, held_by_other = client.get(one), client.get(other)
            kind = self.chances.choice(["drop", "damage", "exchange"])
            if kind == "drop" or held is None or held_by_other is None:
                client.delete(one)
            elif kind == "damage":
                at = self.chances.randrange(len(held))
                client.set(one, held[:at] + bytes([held[at] ^ 1]) + held[at + 1 :])
            else:
                client.set(one, held_by_other)
                client.set(other, held)
            self.counts[kind] += 1

    def damage_slot(self, name: str) -> None:
        """Damage a slot of one rank, or copy another slot over it."""
        path = self.folder / name / f"rank{self.chances.randrange(self.num_ranks)}"
        num_slots = path.stat().st_size // 4096
        with open(path, "r+b") as file:
            one, other = self.chances.randrange(num_slots), self.chances.randrange(num_slots)
            file.seek(4096 * other)
            page = bytearray(file.read(4096))
            page[0] ^= self.chances.choice([0, 1])
            file.seek(4096 * one)
            file.write(page)
            file.flush()
            os.fsync(file.fileno())
        self.counts["damaged slots"] += 1

    def live(self) -> None:
        try:
            for _ in range(NUM_TURNS):
                self.turn()
            for server in self.servers.values():
                server.release()
                found = server.stats()
                for each in ("promoted_blocks", "shared_promoted_blocks", "late_jobs"):
                    self.counts[each] += found.get(each, 0)
        finally:
            for server in self.servers.values():
                server.release()
                server.close()


@pytest.fixture
def folders() -> Iterator[Callable[[], Path]]:
    with folder_on_disk() as folder:
        made: list[Path] = []

        def make() -> Path:
            made.append(folder / str(len(made)))
            made[-1].mkdir()
            return made[-1]

        yield make


def test_no_request_loads_a_block_that_is_not_its_own(
    folders: Callable[[], Path], store: Store
) -> None:
    counts: Counter[str] = Counter()
    for _ in range(NUM_LIVES):
        seed = int(os.environ.get("KVSTOW_SEED") or random.SystemRandom().randrange(2**32))
        print(f"seed {seed}")
        store.command("FLUSHALL")
        life = Life(seed, folders(), store)
        life.live()
        counts += life.counts
    print(dict(counts))
    assert {"loaded tokens", "resets", "starts"} <= counts.keys()


def test_names_that_a_reset_keeps_would_be_seen(
    folders: Callable[[], Path], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_random", lambda: b"always the same!")
    with pytest.raises(AssertionError, match="wrong bytes"):
        for seed in range(200):
            store.command("FLUSHALL")
            Life(seed, folders(), store).live()
