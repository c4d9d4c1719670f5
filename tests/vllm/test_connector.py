"""The connector: what it refuses, where it is registered, and the worker half's host memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.vllm.halves import (
    BLOCK_SIZE,
    FULL,
    NUM_BLOCKS,
    PAGE_BYTES,
    cache_config,
    engine_config,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
)

import kvstow.vllm
from kvstow import ConfigError, StateSpace, TransferError
from kvstow.transfer import READY
from kvstow.vllm import KVStowConnector, settings
from kvstow.vllm.logs import log_as_vllm
from kvstow.vllm.messages import Copies, StepJobs, StepReports
from kvstow.vllm.model import Model
from kvstow.vllm.options import Options

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_bytes_touse": 1}, "did you mean 'cpu_bytes_to_use'"),
        ({"lazy": True}, "lazy_offload"),
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use is 0"),
        ({"cpu_bytes_to_use": "8 GiX"}, "cpu_bytes_to_use is '8 GiX'"),
        ({"cpu_bytes_to_use_per_rank": 1.5}, "cpu_bytes_to_use_per_rank is 1.5"),
        ({"num_cpu_blocks": 1.5}, "num_cpu_blocks is 1.5"),
        ({"num_cpu_blocks": "4"}, "num_cpu_blocks is '4'"),
        ({"num_cpu_blocks": True}, "num_cpu_blocks is True"),
        ({"num_cpu_blocks": 4, "cpu_bytes_to_use": 1 << 30}, "keep one"),
        ({"lazy_offload": "yes"}, "true or false"),
        ({"load_timeout_s": 0}, "seconds above 0"),
        ({"load_timeout_s": float("inf")}, "seconds above 0"),
        ({"load_timeout_s": 10**400}, "seconds above 0"),
        ({"eviction_policy": "fifo"}, "lru, hit-density"),
        ({"verify": "md5"}, "off, checksum"),
        ({"offload_prompt_only": 1}, "offload_prompt_only is 1, and it must be true or false"),
        ({"store_threshold": 0}, "store_threshold is 0, and it must be a whole number of at least"),
        ({"store_threshold": 256}, "at least 1 and at most 255"),
        ({"max_store_blocks_in_flight": 0}, "max_store_blocks_in_flight is 0"),
        ({"events_path": ""}, "events_path"),
        ({"disk_path": "/d\0"}, "it must be a text that is not empty and has no null character"),
        ({"events_path": "\ud800"}, "and it must be the name of a file"),
        ({"disk_path": "~/kv"}, "a whole path, because nothing replaces ~ here"),
        ({"record_trace": "$HOME/t"}, "a whole path, because nothing replaces $ here"),
        ({"observe_gib": "32GiB"}, "a finite number of GiB above 0"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="kv_connector_extra_config") as refused:
        Options.parse(options)
    assert message in str(refused.value)


def test_sizes_may_have_units() -> None:
    for given in ("32GiB", "32 gib", 32 << 30, float(32 << 30), str(32 << 30)):
        assert Options.parse({"cpu_bytes_to_use": given}).cpu_bytes_to_use == 32 << 30
        options = Options.parse({"cpu_bytes_to_use_per_rank": given})
        assert options.cpu_bytes_to_use_per_rank == 32 << 30
    assert Options.parse({"num_cpu_blocks": 4.0}).num_cpu_blocks == 4


def test_too_little_memory_for_one_block_names_the_minimum() -> None:
    with pytest.raises(ConfigError, match="raise cpu_bytes_to_use to at least 8192"):
        Options(cpu_bytes_to_use=4096).num_host_blocks(4096, world_size=2)
    assert Options(cpu_bytes_to_use=8192).num_host_blocks(4096, world_size=2) == 1
    assert Options(cpu_bytes_to_use_per_rank=8192).num_host_blocks(4096, world_size=2) == 2
    assert Options(num_cpu_blocks=7).num_host_blocks(4096, world_size=2) == 7


def test_vllm_without_prefix_caching_is_refused(folder: Path) -> None:
    config = engine_config(folder, {"num_cpu_blocks": 4}, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="--enable-prefix-caching"):
        KVStowConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL))


def test_a_misspelt_option_is_refused_in_both_roles(folder: Path) -> None:
    config = engine_config(folder, {"num_cpu_block": 4})
    for role in KVConnectorRole:
        with pytest.raises(ConfigError, match="did you mean 'num_cpu_blocks'"):
            KVStowConnector(config, role, cache_config(FULL))


def test_a_scheduler_beside_each_rank_is_refused(folder: Path) -> None:
    """None of these schedulers would get the reports of the other ranks."""
    config = engine_config(folder, {"num_cpu_blocks": 4})
    config.parallel_config.distributed_executor_backend = "external_launcher"
    KVStowConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL))
    config.parallel_config.world_size = 2
    with pytest.raises(ConfigError, match="external_launcher"):
        KVStowConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL))


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallel_ranks_of_vllm_030_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = engine_config(folder, {"num_cpu_blocks": 4})
    setattr(config.parallel_config, name, 2)
    monkeypatch.delattr(KVCacheSpec, "dcp_sharded", raising=False)
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} is 2, and vLLM before 0.31"):
        KVStowConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL))


def test_a_server_that_goes_on_after_a_failed_step_is_refused(folder: Path) -> None:
    """Lookups would find the blocks that the step did not write, and the tier would store them."""
    config = engine_config(folder, {"num_cpu_blocks": 4})
    config.parallel_config.enable_fault_tolerance = True
    for role in KVConnectorRole:
        with pytest.raises(ConfigError, match="--enable-fault-tolerance"):
            KVStowConnector(config, role, cache_config(FULL))


def test_routed_experts_of_hits_that_vllm_may_have_dropped_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    """Before 0.33, vLLM keeps those of as many blocks as the device has, and fails without.

    Later it refuses the hit, which is worth a warning.
    """
    config = engine_config(folder, {"num_cpu_blocks": 4})
    if not hasattr(config, "aux_output_config"):
        pytest.skip("vLLM 0.30 itself refuses this with a connector")
    config.aux_output_config.enable_return_routed_experts = True
    for role in KVConnectorRole:
        monkeypatch.setattr("vllm.version.__version_tuple__", (0, 32, 0))
        with pytest.raises(ConfigError, match="without --enable-return-routed-experts"):
            KVStowConnector(config, role, cache_config(FULL))
        monkeypatch.setattr("vllm.version.__version_tuple__", (0, 33, 0))
        KVStowConnector(config, role, cache_config(FULL))
    warning = f"twice the device's {cache_config(FULL).num_blocks} blocks"
    assert sum(warning in line for line in log) == 1
    monkeypatch.setattr("vllm.version.__version_tuple__", (0, 32, 0))
    settings.check(config, Options(observe=True))


def test_each_data_parallel_engine_writes_files_of_its_own(folder: Path, tmp_path: Path) -> None:
    options = {"events_path": str(tmp_path / "events"), "record_trace": str(tmp_path / "trace")}
    config = engine_config(folder, {"num_cpu_blocks": 4} | options)
    for engine in range(2):
        config.parallel_config.data_parallel_index = engine
        KVStowConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL)).shutdown()
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"events", "events.engine1", "trace", "trace.engine1"}


@pytest.mark.parametrize(
    ("disk", "worker_s", "backend", "shutdown_s", "warns"),
    [
        ({"disk_flush_s": 20}, None, "mp", 30, True),
        ({"disk_flush_s": 5}, None, "mp", 30, True),
        ({"disk_flush_s": 3}, None, "mp", 30, False),
        ({"disk_flush_s": 20}, "25", "mp", 30, False),
        ({"disk_flush_s": 20}, None, "uni", 30, False),
        ({"disk_flush_s": 20}, None, "mp", 0, False),
        (None, "1", "mp", 30, False),
    ],
)
def test_workers_that_vllm_ends_before_they_have_written_are_a_warning(
    folder: Path,
    log: list[str],
    monkeypatch: pytest.MonkeyPatch,
    disk: dict[str, Any] | None,
    worker_s: str | None,
    backend: str,
    shutdown_s: int,
    warns: bool,
) -> None:
    monkeypatch.delenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", raising=False)
    if worker_s is not None:
        monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", worker_s)
    options: dict[str, Any] = {"num_cpu_blocks": 4}
    if disk is not None:
        options |= {"disk_path": "/a", "disk_bytes_to_use": "1GiB"} | disk
    config = engine_config(folder, options, shutdown_timeout=shutdown_s)
    config.parallel_config.distributed_executor_backend = backend
    KVStowConnector(config, KVConnectorRole.SCHEDULER, cache_config(FULL))
    warned = [line for line in log if "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS" in line]
    assert len(warned) == warns
    if warned and disk is not None:
        assert f"TIMEOUT_SECONDS to {disk['disk_flush_s'] + 5} or more" in warned[0]


def test_options_are_checked_before_weights_load() -> None:
    """vLLM asks the connector about CUDA graphs long before it builds an engine."""
    asks = KVStowConnector.requires_piecewise_for_cudagraph
    assert not asks({}) and not asks({"num_cpu_blocks": 4})
    with pytest.raises(ConfigError, match="did you mean 'num_cpu_blocks'"):
        asks({"num_cpu_block": 4})
    kvstow.vllm.register()
    child = {"kv_connector": "KVStowConnector", "kv_role": "kv_both"}
    children = [child | {"kv_connector_extra_config": {"lazy": True}}]
    with pytest.raises(ConfigError, match="has no option 'lazy'"):
        MultiConnector.requires_piecewise_for_cudagraph({"connectors": children})


def test_an_unknown_kind_of_attention_is_refused() -> None:
    class CrossSpec(type(FULL)):  # type: ignore[misc]
        pass

    unknown = CrossSpec(**vars(FULL))
    with pytest.raises(ConfigError, match="KV cache group 1 is of kind CrossSpec"):
        Model.of(cache_config(FULL, unknown))


def mamba(mode: str) -> MambaSpec:
    """Return a state of 32 bytes, padded to the size of an attention block."""
    return MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((8,),),
        dtypes=(torch.float32,),
        page_size_padded=PAGE_BYTES,
        mamba_cache_mode=mode,
    )


def test_recurrent_states_are_served_where_vllm_caches_them() -> None:
    for mode in ("align", "all"):
        model = Model.of(cache_config(FULL, mamba(mode)))
        assert model.groups[1] == StateSpace(BLOCK_SIZE)
        assert model.slot_bytes == PAGE_BYTES and model.tokens_per_hit == BLOCK_SIZE
    for mode in ("none", "new"):
        with pytest.raises(ConfigError, match="group 1 is of kind MambaSpec in mode") as refused:
            Model.of(cache_config(FULL, mamba(mode)))
        assert repr(mode) in str(refused.value) and "--mamba-cache-mode" in str(refused.value)


def test_a_padded_state_is_copied_with_its_padding() -> None:
    """vLLM registers a view of the states whose stride is the padded size."""
    model = Model.of(cache_config(FULL, mamba("align")))
    memory = torch.zeros(NUM_BLOCKS * PAGE_BYTES, dtype=torch.int8)
    states = memory.as_strided((NUM_BLOCKS, 1, 1, 32), (PAGE_BYTES, 32, 32, 1))
    for layout in model.layouts({"0": memory, "1": states}):
        (region,) = layout.regions
        assert region.base_address == memory.data_ptr()
        assert (region.block_stride_bytes, region.block_bytes) == (PAGE_BYTES, PAGE_BYTES)
    with pytest.raises(ConfigError, match=rf"layer '1' begins \+{PAGE_BYTES} bytes from where"):
        model.layouts({"0": memory, "1": states[1:]})


def test_a_layout_that_differs_from_vllms_configuration_is_refused() -> None:
    model = Model.of(cache_config(FULL))
    tensor = torch.zeros(NUM_BLOCKS * PAGE_BYTES, dtype=torch.uint8)
    assert model.layouts({"0": tensor})[0].slot_bytes == PAGE_BYTES
    with pytest.raises(ConfigError, match=r"layer '0' begins \+64 bytes from where"):
        model.layouts({"0": tensor[64:]})
    with pytest.raises(ConfigError, match=f"it should take {NUM_BLOCKS * PAGE_BYTES}"):
        model.layouts({"0": tensor[:-1].clone()})
    with pytest.raises(ConfigError, match="registers no KV cache for layer '0'"):
        model.layouts({})


def test_more_host_blocks_than_memory_are_refused(folder: Path) -> None:
    config = engine_config(folder, {"num_cpu_blocks": 2**31 - 2})
    connector = KVStowConnector(config, KVConnectorRole.WORKER, cache_config(FULL))
    tensor = torch.zeros(NUM_BLOCKS * PAGE_BYTES, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="lower cpu_bytes_to_use or num_cpu_blocks"):
        connector.register_kv_caches({"0": tensor})


def test_layers_side_by_side_in_a_block_are_one_region() -> None:
    size = 2 * PAGE_BYTES * NUM_BLOCKS
    packed = KVCacheTensor(size, ["a", "b"], layer_stride=PAGE_BYTES, block_stride=2 * PAGE_BYTES)
    model = Model.of(KVCacheConfig(NUM_BLOCKS, [packed], [KVCacheGroupSpec(["b", "a"], FULL)]))
    tensor = torch.zeros(size, dtype=torch.uint8)
    (layout,) = model.layouts({"a": tensor, "b": tensor[PAGE_BYTES:]})
    (region,) = layout.regions
    assert (region.base_address, region.block_bytes) == (tensor.data_ptr(), 2 * PAGE_BYTES)


def test_the_connector_is_known_by_name() -> None:
    kvstow.vllm.register()
    kvstow.vllm.register()
    assert KVConnectorFactory.get_connector_class_by_name("KVStowConnector") is KVStowConnector


def test_registering_again_keeps_the_host_memory(folder: Path) -> None:
    config = engine_config(folder, {"num_cpu_blocks": 4})
    connector = KVStowConnector(config, KVConnectorRole.WORKER, cache_config(FULL))
    worker = connector._worker
    assert worker is not None
    tensors = [torch.full((NUM_BLOCKS * PAGE_BYTES,), at, dtype=torch.uint8) for at in (7, 8)]
    connector.register_kv_caches({"0": tensors[0]})
    worker.movers[0].store([1], [2], after=READY).wait(10)
    connector.register_kv_caches({"0": tensors[1]})
    worker.movers[0].load([2], [3], after=READY).wait(10)
    loaded = tensors[1][3 * PAGE_BYTES : 4 * PAGE_BYTES]
    assert loaded.eq(7).all() and tensors[1].eq(7).sum() == PAGE_BYTES
    connector.shutdown()
    assert worker.arena is None


def test_checksums_of_slots_outlive_sleep(folder: Path) -> None:
    """vLLM 0.33 tells its connectors to release the device memory and to take it again."""
    config = engine_config(folder, {"num_cpu_blocks": 4, "verify": "checksum"})
    connector = KVStowConnector(config, KVConnectorRole.WORKER, cache_config(FULL))
    worker = connector._worker
    assert worker is not None
    tensor = torch.full((NUM_BLOCKS * PAGE_BYTES,), 7, dtype=torch.uint8)
    connector.register_kv_caches({"0": tensor})
    worker.movers[0].store([1], [2], after=READY).wait(10)
    for _ in range(2):
        connector.unregister_kv_caches()
    tensor.zero_()
    load = Copies(1, *(np.array(ids, dtype=np.int32) for ids in ([3], [2], [0, 1])))
    connector.bind_connector_metadata(StepJobs(loads=[load]))
    connector.start_load_kv(None)
    reports = connector.build_connector_worker_meta()
    assert isinstance(reports, StepReports) and reports.reports == [(1, 0, False)], "no memory"
    for _ in range(2):
        connector.restore_kv_caches()
    worker.movers[0].load([2], [3], after=READY).wait(10)
    assert tensor[3 * PAGE_BYTES : 4 * PAGE_BYTES].eq(7).all() and tensor.sum() == 7 * PAGE_BYTES
    assert worker.arena is not None
    worker.arena.slots[2, 5] ^= 1
    with pytest.raises(TransferError, match="slot 2 does not hold"):
        worker.movers[0].load([2], [3], after=READY).wait(10)
    connector.shutdown()
    connector.restore_kv_caches()
    assert worker.movers == []


def test_lines_of_the_tiers_look_as_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    own, of_vllm = logging.getLogger("kvstow"), logging.getLogger("vllm")
    written: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = written.append  # type: ignore[assignment, method-assign]
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(of_vllm, "handlers", [handler])
    monkeypatch.setattr(of_vllm, "level", logging.INFO)
    monkeypatch.setattr(own, "handlers", [])
    monkeypatch.setattr(own, "level", own.level)
    for _ in range(2):  # of the scheduler half and of a worker
        log_as_vllm()
    logging.getLogger("kvstow.tiers.asking").warning("the store fails")
    assert [(line.levelname, line.getMessage()) for line in written] == [
        ("WARNING", "the store fails")
    ]
    theirs = logging.NullHandler()
    monkeypatch.setattr(own, "handlers", [theirs])
    log_as_vllm()
    assert own.handlers == [theirs], "what the program has set up stays"
