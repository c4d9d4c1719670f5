"""One slot file through servers of many configurations: vLLM's own connector reads no wrong KV.

vLLM's scheduler, its `OffloadingConnector` and its CPU tier are real. Simulated are the compute and
the copies between the device and the CPU tier, which need a GPU. `KVSTOW_SEEDS=N` runs N files,
from `KVSTOW_SEED` on.
"""

from __future__ import annotations

import math
import os
import random
import shutil
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiers.setup import LONG_S
from tests.vllm.halves import FULL, PAGE_BYTES, STATE, WINDOW
from tests.vllm.simulated import Simulated, WrongKV, tokens
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvstow.tiers import Fingerprint
from kvstow.tiers.slot_index import SlotFileMismatch
from kvstow.vllm import secondary_identity

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

FIRST_SEED = int(os.environ.get("KVSTOW_SEED", "1"))
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("KVSTOW_SEEDS", "2")))
NUM_LIVES = 6
NUM_REQUESTS = 50
NUM_SLOTS = 96
# Blocks of 32 tokens in as many bytes as those of 16.
LARGE = replace(FULL, block_size=32, head_size=4)
GROUPS = {
    "full": (FULL,),
    "two": (FULL, FULL),
    "sizes": (FULL, LARGE),
    "window": (FULL, WINDOW),
    "state": (FULL, STATE),
}
TRUNKS = [tokens(130, seed) for seed in range(2)]


@dataclass(frozen=True)
class Setting:
    """What an operator chooses at a start."""

    weights: int = 0
    rope: int = 0
    groups: str = "full"
    blocks_per_chunk: int = 1
    hash_name: str = "sha256"
    hash_seed: str | None = "0"
    has_version: bool = False
    has_adapters: bool = False

    @property
    def is_private(self) -> bool:
        """Whether no later server may read the chunks."""
        is_random = self.hash_name == "xxhash" and self.hash_seed is None
        return is_random or (self.has_adapters and not self.has_version)


CHOICES: dict[str, tuple[Any, ...]] = {
    "weights": (0, 1),
    "rope": (0, 1),
    "groups": tuple(GROUPS),
    "blocks_per_chunk": (1, 2),
    "hash_name": ("sha256", "sha256_cbor", "xxhash"),
    "hash_seed": ("0", "1", None),
    "has_version": (False, True),
    "has_adapters": (False, True),
}


class Copier(OffloadingWorker):
    """Copies between the device and vLLM's CPU tier when the test lets it, as vLLM's worker."""

    def __init__(self, device: np.ndarray[Any, Any], primary: Any, per_chunk: int) -> None:
        self.device, self.primary, self.per_chunk = device, primary, per_chunk
        self.waiting: tuple[deque[Any], deque[Any]] = (deque(), deque())
        self.ended: list[int] = []

    def submit_store(self, job_id: int, blocks: Any, chunks: Any) -> bool:
        self.waiting[0].append((job_id, blocks, chunks))
        return True

    def submit_load(self, job_id: int, chunks: Any, blocks: Any) -> bool:
        self.waiting[1].append((job_id, blocks, chunks))
        return True

    def go(self, which: int) -> None:
        """Make the oldest copy of a direction."""
        job_id, blocks, chunks = self.waiting[which].popleft()
        rows = np.asarray(self.primary.get_kv_memoryview()).view(np.uint8)
        page, chunk_at, block_at = self.device.shape[1], 0, 0
        for size, first in zip(blocks.group_sizes, blocks.block_indices, strict=True):
            skip = first % self.per_chunk
            for at in range(skip, skip + size):
                row = rows[chunks.block_ids[chunk_at + at // self.per_chunk]]
                place = row[at % self.per_chunk * page :][:page]
                block = self.device[blocks.block_ids[block_at]]
                (block if which else place)[:] = place if which else block
                block_at += 1
            chunk_at += -(-(skip + size) // self.per_chunk) if size else 0
        self.ended.append(job_id)

    def wait(self, job_ids: Collection[int]) -> None:
        for which, queue in enumerate(self.waiting):
            while any(job[0] in job_ids for job in queue):
                self.go(which)

    def get_finished(self) -> list[TransferResult]:
        ended, self.ended = self.ended, []
        return [TransferResult(job_id, True) for job_id in ended]

    def shutdown(self) -> None:
        pass


@dataclass
class State:
    """What lies on the machine between two servers.

    Attributes:
        model: the folder of the model.
        version: what the file of `weights_version_path` says.
        adapter: the number of the adapter's weights, always under one name and path.
        kept: whose chunks the file has that a start may use; None for nobody's.
        keys: these chunks.
    """

    model: Path
    version: int = 0
    adapter: int = 0
    kept: tuple[Any, ...] | None = None
    keys: frozenset[bytes] = frozenset()

    @property
    def version_path(self) -> Path:
        return self.model.parent / "version"

    def whose(self, setting: Setting) -> tuple[Any, ...]:
        """Return what a server must have in common with another one to read its chunks."""
        version = self.version if setting.has_version else None
        return (version, *astuple(replace(setting, has_adapters=False)))


class Offloaded(Simulated):
    """An engine with vLLM's own connector, whose CPU tier has few chunks."""

    def __init__(self, state: State, setting: Setting, on_mismatch: str, seed: int) -> None:
        self.state, self.setting, self.adapter = state, setting, 0
        tier = {
            "type": "KVStowDisk",
            "module_path": "kvstow.vllm.secondary_tier",
            "path": str(state.model.parent / "slots"),
            "max_bytes": NUM_SLOTS * (4096 + 128) + 4096,
            "on_mismatch": on_mismatch,
        }
        if setting.has_version:
            tier["weights_version_path"] = str(state.version_path)
        options = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 24 * 4096,
            "blocks_per_chunk": setting.blocks_per_chunk,
            "secondary_tiers": [tier],
        }
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": options,
        }
        settings = {"kv_transfer_config": transfer, "enable_lora": setting.has_adapters}
        super().__init__(
            state.model,
            {},
            specs=GROUPS[setting.groups],
            num_blocks=40,
            num_in_flight=1 + seed % 2,
            seed=seed,
            settings=settings,
        )

    def __post_init__(self) -> None:
        hash_function = get_hash_fn_by_name(self.setting.hash_name)
        init_none_hash(hash_function)
        self.dice = random.Random(self.seed)
        cache, config = self._cache_config(), self._config()
        config.cache_config.num_gpu_blocks = self.num_blocks
        config.cache_config.prefix_caching_hash_algo = self.setting.hash_name
        config.model_config.hf_config.rms_norm_eps = 1.0 + self.setting.rope
        kind = AsyncScheduler if self.num_in_flight > 1 else Scheduler
        sizes = [spec.block_size for spec in self.specs]
        self.tokens_per_hash = math.gcd(*sizes)
        self.scheduler = kind(
            config,
            cache,
            StructuredOutputManager(config),
            block_size=math.lcm(*sizes),
            hash_block_size=self.tokens_per_hash,
        )
        self.memory = torch.full((self.num_blocks, PAGE_BYTES), 255, dtype=torch.uint8)
        numbers = self.memory.view(torch.int64)
        self.kv = {size: numbers.view(self.num_blocks, size, -1).numpy() for size in set(sizes)}
        connector: Any = self.scheduler.connector
        manager = connector.connector_scheduler.manager
        (self.disk,) = manager.secondary_tiers
        self.copier = Copier(
            self.memory.numpy(), manager.primary_tier, self.setting.blocks_per_chunk
        )
        self.worker_connector = OffloadingConnector(config, KVConnectorRole.WORKER, cache)
        assert self.worker_connector.connector_worker is not None
        self.worker_connector.connector_worker.worker = self.copier
        self._hasher = get_request_block_hasher(self.tokens_per_hash, hash_function)
        self.hashed = {}
        self.steps, self.sampled, self.drafted = deque(), {}, {}
        self.num_steps, self.answers = 0, {}
        self.load_weights()

    def load_weights(self) -> None:
        version = self.state.version if self.setting.has_version else 0
        self.weights = 1 + self.setting.weights + 10 * self.setting.rope + 100 * version

    def values(self, tokens: Sequence[int], salt: str | None) -> list[int]:
        own = f"{salt} of adapter {self.adapter}" if self.adapter else salt
        return super().values(tokens, own)

    def _compute(self, name: str, num_tokens: int, output: Any) -> list[int]:
        has_adapter = self.scheduler.requests[name].lora_request is not None
        self.adapter = (1 + self.state.adapter) * has_adapter
        return super()._compute(name, num_tokens, output)

    def ask(self, name: str, prompt: list[int], salt: str | None, *, has_adapter: bool) -> None:
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        adapter = LoRARequest("adapter", 1, "/adapters/one") if has_adapter else None
        self.scheduler.add_request(
            Request(
                name,
                prompt,
                params,
                None,
                lora_request=adapter,
                cache_salt=salt,
                block_hasher=self._hasher,
            )
        )

    def copy(self, share: float = 1.0, failing: float = 0.0) -> None:
        for which in (0, 1):
            while self.copier.waiting[which] and self.dice.random() < share:
                self.copier.go(which)
        for job in self.disk._jobs if share == 1.0 else ():
            if job.ticket is not None:
                job.ticket.wait(LONG_S)

    def reset(self) -> None:
        """Reset as vLLM does for new weights, and let the workers end what they have begun."""
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def start(state: State, setting: Setting, dice: random.Random) -> Offloaded:
    """Start a server, and check that it finds what it may find, or is refused the file."""
    (state.model / "weights.bin").write_text(str(setting.weights))
    state.version_path.write_text(str(state.version))
    whose, on_mismatch = state.whose(setting), dice.choice(["refuse", "refuse", "reset"])
    is_other = state.kept not in (None, whose) and not setting.is_private
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONHASHSEED", raising=False)
        if setting.hash_seed is not None:
            patch.setenv("PYTHONHASHSEED", setting.hash_seed)
        if is_other and on_mismatch == "refuse":
            with pytest.raises(SlotFileMismatch):
                Offloaded(state, setting, on_mismatch, 0)
            on_mismatch = "reset"
        engine = Offloaded(state, setting, on_mismatch, dice.randrange(1000))
    is_warm = state.kept == whose and not setting.is_private
    assert frozenset(engine.disk._slots) == (state.keys if is_warm else frozenset())
    return engine


def serve(engine: Offloaded, dice: random.Random, *, resets: bool = False) -> None:
    """Serve requests with shared beginnings, perhaps with a reset among them, and stop."""
    state, is_kept = engine.state, not engine.setting.is_private
    try:
        for number in range(NUM_REQUESTS):
            ask_and_step(engine, f"r{number}", dice)
            if resets and number == NUM_REQUESTS // 2:
                engine.settle()
                if is_new := dice.random() < 0.5:
                    state.version += 1
                    state.version_path.write_text(str(state.version))
                engine.reset()
                engine.load_weights()
                is_kept &= engine.setting.has_version and not is_new
        engine.settle()
    finally:
        engine.close()
    state.keys = frozenset(engine.disk._slots)
    state.kept = state.whose(engine.setting) if is_kept else None


def ask_and_step(engine: Offloaded, name: str, dice: random.Random) -> None:
    trunk = dice.choice(TRUNKS)[: dice.randrange(20, 130)]
    engine.ask(
        name,
        trunk + tokens(dice.randrange(1, 30), dice.randrange(3)),
        dice.choice([None, None, "pepper"]),
        has_adapter=engine.setting.has_adapters and dice.random() < 0.5,
    )
    for _ in range(dice.randrange(12)):
        engine.step()
        engine.copy(dice.choice([0.3, 1.0]))


@pytest.fixture
def state(folder: Path, tmp_path: Path) -> State:
    return State(Path(shutil.copytree(folder, tmp_path / "model")))


@pytest.mark.parametrize("seed", SEEDS)
def test_servers_of_many_settings_read_no_wrong_kv_from_one_file(state: State, seed: int) -> None:
    print(f"KVSTOW_SEED={seed} repeats these servers")
    dice, setting = random.Random(seed), Setting()
    for _ in range(NUM_LIVES):
        serve(start(state, setting, dice), dice, resets=dice.random() < 0.3)
        if dice.random() < 0.6:
            names = dice.sample(list(CHOICES), dice.choice([0, 1, 1, 2]))
            setting = Setting(**{name: dice.choice(CHOICES[name]) for name in names})
            if setting.groups == "window":  # vLLM itself fails with larger chunks of them
                setting = replace(setting, blocks_per_chunk=1)
        if setting.has_adapters and dice.random() < 0.5:
            state.adapter += 1
            state.version += 1


@pytest.mark.parametrize(
    ("guard", "first", "second"),
    [
        ("shape", Setting(groups="two"), Setting(groups="sizes")),
        ("shape", Setting(), Setting(blocks_per_chunk=2)),
        ("weights", Setting(), Setting(weights=1)),
        ("model", Setting(), Setting(rope=1)),
        ("weights_version", Setting(has_version=True), Setting(has_version=True)),
        ("adapters", Setting(has_adapters=True), Setting(has_adapters=True)),
    ],
    ids=["groups", "chunks", "weights", "model", "version", "adapters"],
)
def test_without_one_guard_a_server_reads_wrong_kv(
    state: State, monkeypatch: pytest.MonkeyPatch, guard: str, first: Setting, second: Setting
) -> None:
    """The control: the fingerprint, and the empty file, are what keeps wrong KV away."""

    def without(fields: dict[str, str | int]) -> Fingerprint:
        return Fingerprint({name: value for name, value in fields.items() if name != guard})

    monkeypatch.setattr(secondary_identity, "Fingerprint", without)
    if guard == "adapters":
        monkeypatch.setattr(secondary_identity, "_why_adapters_are_unknown", lambda *_: "")
        monkeypatch.setattr(Setting, "is_private", False)
    serve(start(state, first, random.Random(1)), random.Random(1))
    state.version += 1
    state.adapter += 1
    state.kept = state.whose(second)
    with pytest.raises(WrongKV):
        serve(start(state, second, random.Random(1)), random.Random(1))
