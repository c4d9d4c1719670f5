"""What the connector checks and logs of vLLM's configuration at its start."""

from __future__ import annotations

import logging
from math import ceil
from typing import TYPE_CHECKING, Final

from vllm import envs
from vllm import version as vllm_version
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.kv_cache_interface import KVCacheSpec

from kvstow import ConfigError
from kvstow.build import version_and_build
from kvstow.vllm.media import unhashed_modalities
from kvstow.vllm.model import Model
from kvstow.vllm.options import Options, rank_in_engine
from kvstow.vllm.shaping import reads_tokenizer

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

logger = logging.getLogger("vllm." + __name__)

# Time to end calls under way and to close files and memory, beside that for the last blocks.
_CLOSING_S: Final = 5


def check(config: VllmConfig, options: Options) -> None:
    """Raise `ConfigError` for a configuration that cannot work, and name the flag."""
    if not config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "enable_prefix_caching is False, and the host tier needs vLLM's block hashes: start "
            "vLLM with --enable-prefix-caching, or without the connector if vLLM switches that off "
            "for this model"
        )
    parallel = config.parallel_config
    for name, flag in (
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        if getattr(parallel, name, 1) > 1 and not hasattr(KVCacheSpec, "dcp_sharded"):
            raise ConfigError(
                f"{flag} is {getattr(parallel, name)}, and vLLM before 0.31 does not say which "
                "blocks context-parallel ranks divide: set it to 1, use a later vLLM, or start "
                "vLLM without the connector"
            )
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise ConfigError(
            f"distributed_executor_backend is external_launcher, which runs a scheduler on each of "
            f"{parallel.world_size} ranks. These must make equal decisions, and copies end at "
            "different times on each rank: let vLLM launch the ranks, or start it without the "
            "connector"
        )
    if getattr(parallel, "enable_fault_tolerance", False):
        raise ConfigError(
            "enable_fault_tolerance is True, and vLLM then keeps the hashes of blocks that a "
            "failed step did not write: start vLLM without --enable-fault-tolerance and "
            "--fault-tolerance-config, or without the connector"
        )
    if (
        _returns_routed_experts(config)
        and not options.observe
        and vllm_version.__version_tuple__[:2] < (0, 33)
    ):
        raise ConfigError(
            f"enable_return_routed_experts is True, and vLLM {vllm_version.__version__} ends at a "
            "hit on the host whose routed experts it has dropped: start vLLM without "
            "--enable-return-routed-experts, use vLLM 0.33 or later, or start it without the "
            "connector"
        )
    if (
        reads_tokenizer(config.model_config)
        and not options.observe
        and not getattr(config, "use_v2_model_runner", False)
    ):
        raise ConfigError(
            "this model embeds n-grams (Engram), and vLLM's older runner keeps the generated "
            "tokens of these in memory that no load writes: start vLLM with "
            "VLLM_USE_V2_MODEL_RUNNER=1, or without the connector"
        )
    parts = _flag(config).kv_connector_extra_config.get("connectors", [])
    num_own = sum(part.get("kv_connector") == "KVStowConnector" for part in parts)
    if num_own > 1:
        raise ConfigError(
            f"{num_own} connectors of the MultiConnector are KVStowConnector, and each would copy "
            "the same blocks: name it once, with the host memory of all"
        )


def log(config: VllmConfig, model: Model, options: Options, tokens_per_hash: int) -> None:
    """Log which kvstow this is, and a warning for each setting that works worse than another."""
    logger.info("kvstow: version %s", version_and_build())
    if options.observe:
        logger.info(
            "kvstow: observe is true, so there is no host tier, and kvstow only reports hit "
            "ratios. A tier would have blocks of %d bytes on each rank",
            model.slot_stride_bytes,
        )
    if model.has_states and tokens_per_hash < model.tokens_per_hit:
        logger.warning(
            "kvstow: vLLM matches prefixes in units of %d tokens, and hits of the host tier end at "
            "multiples of %d. vLLM may then keep no state where such a hit ends. Start vLLM "
            "without --prefix-match-unit for more hits on the host",
            tokens_per_hash,
            model.tokens_per_hit,
        )
    if model.has_states and options.eviction_policy == "hit-density":
        logger.warning(
            "kvstow: eviction_policy is hit-density, which evicts recurrent states before the "
            "blocks that need them. Set it to lru for more hits on the host"
        )
    if _returns_routed_experts(config) and not options.observe:
        logger.warning(
            "kvstow: enable_return_routed_experts is True, and vLLM refuses a hit if it lacks the "
            "routed experts of one of its blocks. It has those of twice the device's %d blocks at "
            "most, and none from before a reset, a sleep or its start, so it refuses older blocks "
            "of the host, a disk or a shared store. Start vLLM without "
            "--enable-return-routed-experts for more hits",
            model.num_blocks,
        )
    _log_end(config, options)
    unhashed = sorted(unhashed_modalities(config))
    if unhashed and not options.observe:
        logger.warning(
            "kvstow: nothing is stored or loaded for requests with media of the kind %s, because "
            "vLLM may compute other KV for equal hashes of them. Start vLLM without "
            "--video-pruning-rate. For images use vLLM 0.33 or later, or bound how many a prompt "
            "may have (--limit-mm-per-prompt)",
            " and ".join(unhashed),
        )


def _returns_routed_experts(config: VllmConfig) -> bool:
    enabled: bool = getattr(getattr(config, "aux_output_config", None), "enabled", False)
    return enabled


def _flag(config: VllmConfig) -> KVTransferConfig:
    """Return the whole flag as far as this process knows it.

    Inside a `MultiConnector` each connector gets a configuration with its own part of the flag. A
    worker sees the outer part as well.
    """
    transfer = (get_current_vllm_config_or_none() or config).kv_transfer_config
    assert transfer is not None, "the connector's configuration is there"
    return transfer


def log_transfer(config: VllmConfig) -> None:
    """Log a warning for each setting of the flag itself that works worse than another.

    vLLM's scheduler reads these settings from the outer part of the flag. The first worker logs.
    """
    if rank_in_engine(config.parallel_config):
        return
    transfer = _flag(config)
    is_outer = transfer.kv_connector == "MultiConnector"
    where = ' beside "kv_connector": "MultiConnector"' if is_outer else ""
    if transfer.kv_role != "kv_both":
        logger.warning(
            "kvstow: kv_role is %r%s. Set it to kv_both, or vLLM gives freed blocks away before "
            "the steps that may still write them are over",
            transfer.kv_role,
            where,
        )
    if transfer.kv_load_failure_policy != "recompute":
        logger.warning(
            "kvstow: kv_load_failure_policy is %r%s, so a request whose load fails ends with an "
            'error. Set it to "recompute" to recompute the request instead',
            transfer.kv_load_failure_policy,
            where,
        )


def _log_end(config: VllmConfig, options: Options) -> None:
    """Log a warning if vLLM ends its workers before they have written what only the host has.

    vLLM's limit counts for worker processes. A worker in the engine's process has the time of
    `--shutdown-timeout`. If that is 0, vLLM waits for no worker, and the docs say so.
    """
    worker_s = envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
    if (
        options.disk_path is not None
        and config.shutdown_timeout > 0
        and config.parallel_config.distributed_executor_backend == "mp"
        and options.disk_flush_s >= worker_s
    ):
        logger.warning(
            "kvstow: disk_flush_s is %g, but vLLM ends a worker that has not ended within %d "
            "seconds. Set VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS to %d or more, or a server that "
            "stops may lose some of its last blocks",
            options.disk_flush_s,
            worker_s,
            ceil(options.disk_flush_s + _CLOSING_S),
        )
