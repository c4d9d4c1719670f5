"""`KVStowDisk` below vLLM's own CPU tier, with vLLM's manager, on a CPU.

What moves chunks between the GPU and the CPU tier needs a GPU, and is vLLM's own.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tests.vllm.runner  # noqa: F401 - before anything imports vLLM
from tests.tiers.setup import LONG_S
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingKVEventsConfig,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kvstow.tiers import SlotFile
from kvstow.vllm.secondary_tier import KVStowDisk

CHUNK = 8192
NUM_CHUNKS = 4
NUM_SLOTS = 8
# Whether vLLM says where in a request each chunk is.
SAYS_ORDER = hasattr(ReqContext, "set_offload_key_position")
says_order = pytest.mark.skipif(
    not SAYS_ORDER, reason="this vLLM does not say where a chunk is in its request"
)
KEYS = [make_offload_key(bytes([number]) * 32, number % 2) for number in range(40)]


def content(key: OffloadKey, epoch: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng([key[0], epoch]).integers(0, 256, CHUNK, np.uint8)


class Spec:
    """What a tier reads of vLLM's `OffloadingSpec`."""

    def __init__(self, model: str) -> None:
        parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True)
        self.config = OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("a",), 0), OffloadingGroupConfig(16, ("b",), 1)),
            worker_kv_bytes_per_block=CHUNK,
            enable_kv_cache_events=True,
            extra_config={},
            engine_id="engine",
            model=OffloadingModelConfig(model, "float32"),
            cache=OffloadingCacheConfig(16, 1),
            parallel=parallel,
        )
        self.kv_events_config = OffloadingKVEventsConfig(True, False)
        self.blocks_per_chunk = 1


class Model(SimpleNamespace):
    """What a tier reads of vLLM's `ModelConfig`."""

    def compute_hash(self) -> str:
        return str(self.hf_config.rope)


def configuration(name: str) -> SimpleNamespace:
    """Return what a tier reads of vLLM's `VllmConfig`."""
    model = Model(
        model=name,
        revision=None,
        dtype="float32",
        hf_config=SimpleNamespace(rope=1),
        multimodal_config=None,
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo="sha256", enable_prefix_caching=True
        ),
        parallel_config=SimpleNamespace(),
        load_config=SimpleNamespace(
            load_format="auto", model_loader_extra_config={}, download_dir=None
        ),
        speculative_config=None,
    )


class World:
    """vLLM's CPU tier of four chunks, and a slot file below it."""

    def __init__(
        self,
        folder: Path,
        name: str | None = None,
        change: Callable[[Any], object] = lambda _: None,
        **options: Any,
    ) -> None:
        """`change` changes vLLM's configuration before the tier reads it."""
        model = folder / "model"
        model.mkdir(exist_ok=True)
        if not any(model.iterdir()):
            (model / "weights").write_text("first")
        # Without the name of kvstow, by which other tests look for memory that is left.
        self.region = SharedOffloadRegion(f"chunks{uuid.uuid4().hex}", NUM_CHUNKS, 0, CHUNK, CHUNK)
        self.primary = CPUPrimaryTierOffloadingManager(NUM_CHUNKS, self.region)
        self.view = self.primary.get_kv_memoryview()
        config = {
            "type": "KVStowDisk",
            "module_path": "kvstow.vllm.secondary_tier",
            "path": str(folder / "slots"),
            "max_bytes": SlotFile.bytes_for(NUM_SLOTS, CHUNK),
        }
        # The tier finds it where the connector has it.
        vllm_config = configuration(name or str(model))
        change(vllm_config)
        try:
            disk = SecondaryTierFactory.create_secondary_tier(
                config | options, self.view, Spec(name or str(model))
            )
        except BaseException:
            self.primary.shutdown()
            raise
        assert isinstance(disk, KVStowDisk)
        self.disk = disk
        self.manager = TieringOffloadingManager(self.primary, [self.disk])
        self.epoch = 0

    def request(self, name: str, keys: Sequence[OffloadKey] = ()) -> ReqContext:
        """Begin a request whose chunks have these keys."""
        request = ReqContext(name)
        if SAYS_ORDER:
            for at, key in enumerate(keys):
                request.set_offload_key_position(key, at + 1)
        self.manager.on_new_request(request)
        return request

    def reset(self) -> None:
        """Reset as vLLM does, and let its workers write what they have left."""
        self.manager.reset_cache()
        self.flush()
        for _ in range(2):
            self.end_step()

    def flush(self) -> None:
        """Report that the workers have nothing left to write of before a reset."""
        if (flushed := getattr(self.manager, "on_reset_flushed", None)) is not None:  # vLLM 0.33
            flushed()

    def change_weights(self) -> None:
        """Change the weights in place. vLLM resets, and its CPU tier forgets all."""
        self.reset()
        self.epoch += 1

    def end_step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def wait(self) -> None:
        """Wait for the disk, and let vLLM learn what has ended."""
        for job in self.disk._jobs:
            if job.ticket is not None:
                job.ticket.wait(LONG_S)
        self.end_step()  # ends the step that has asked already
        self.end_step()

    def store(self, keys: list[OffloadKey]) -> None:
        """Store chunks as the GPU would, and let them go on to the disk."""
        request = self.request(f"store {keys[0]!r}", keys)
        self.compute(keys, request)
        self.manager.on_request_finished(request)
        self.wait()

    def compute(self, keys: list[OffloadKey], request: ReqContext) -> None:
        """Store chunks of a request that goes on."""
        output = self.manager.prepare_store(keys, request)
        assert output is not None
        rows = np.asarray(self.view).view(np.uint8)
        for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            rows[chunk] = content(key, self.epoch)
        if output.keys_to_store:
            # vLLM has them in a set, whose order may be any.
            self.manager.complete_store(output.keys_to_store[::-1], request)

    def load(self, key: OffloadKey) -> npt.NDArray[np.uint8] | None:
        """Return what the GPU would load; None for a miss."""
        request = self.request(f"load {key!r}", [key])
        try:
            for _ in range(3):
                if self.manager.lookup(key, request) == LookupResult.HIT:
                    spec = self.manager.prepare_load([key], request)
                    rows = np.asarray(self.view).view(np.uint8)
                    found: npt.NDArray[np.uint8] = rows[spec.chunk_ids[0]].copy()
                    del rows
                    self.manager.complete_load([key], request)
                    return found
                self.end_step()
                self.wait()
            return None
        finally:
            self.manager.on_request_finished(request)

    def has(self, key: OffloadKey) -> bool:
        return self.disk.lookup(key, ReqContext("ask")) is LookupResult.HIT

    def close(self) -> None:
        self.manager.shutdown()


Make = Callable[..., World]


def fill_primary(world: World) -> None:
    """Push every chunk out of the CPU tier."""
    world.store(KEYS[30:34])
