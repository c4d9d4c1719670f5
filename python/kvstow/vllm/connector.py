"""`KVStowConnector`: the class that vLLM loads, once beside its scheduler and once per worker.

Each instance has one half: `SchedulerHalf` or `WorkerHalf`. The methods pass vLLM's calls to it.
With `observe` the halves are those of `idle`. In either case an `Observer` watches the requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from vllm import version as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_node_count, get_world_group
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from kvstow import ConfigError, StateSpace
from kvstow.observability.events import EventFile
from kvstow.vllm import settings
from kvstow.vllm.events import HostEvents
from kvstow.vllm.identity import Identity
from kvstow.vllm.idle import IdleScheduler, IdleWorker
from kvstow.vllm.logs import log_as_vllm
from kvstow.vllm.media import unhashed_modalities
from kvstow.vllm.messages import StepJobs
from kvstow.vllm.model import Model
from kvstow.vllm.observe import Observer
from kvstow.vllm.options import Options, path_of_engine, rank_in_engine
from kvstow.vllm.replicas import Replicas
from kvstow.vllm.scheduler import SchedulerHalf
from kvstow.vllm.stats import ConnectorPromMetrics, ConnectorStats, StatsReporter
from kvstow.vllm.tier import HostTier
from kvstow.vllm.worker import WorkerHalf

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM before 0.32 does not count hits by source
    CacheHitSource = None

if TYPE_CHECKING:
    import torch
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# As many as vLLM computes in a step or two on a large GPU: a store costs little per block then.
GATHERED_TOKENS = 16_384


class KVStowConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps prefixes in host memory when the device runs out of room.

    The options come from `kv_connector_extra_config`: see `kvstow.vllm.options.Options`. vLLM calls
    only the methods of one half on each instance, so either `_worker` or `_scheduler` exists.
    """

    if CacheHitSource is not None:
        _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Create the half that `role` asks for.

        Raises:
            ConfigError: vLLM's configuration or an option does not fit. It names the flag.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm()
        options = Options.parse(self._kv_transfer_config.kv_connector_extra_config)
        settings.check(vllm_config, options)
        parallel = vllm_config.parallel_config
        self._model = Model.of(kv_cache_config, parallel.decode_context_parallel_size)
        self._reporter: StatsReporter | None = None
        self._host_events: HostEvents | None = None
        self._event_file: EventFile | None = None
        if role == KVConnectorRole.WORKER:
            self._worker = self._worker_half(vllm_config, kv_cache_config, options)
        else:
            self._scheduler = self._scheduler_half(vllm_config, kv_cache_config, options)

    def _worker_half(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options
    ) -> WorkerHalf:
        settings.log_transfer(vllm_config)
        parallel = vllm_config.parallel_config
        return (IdleWorker if options.observe else WorkerHalf)(
            self._model,
            options,
            rank=rank_in_engine(parallel),
            world_size=parallel.world_size,
            num_local_ranks=_num_local_ranks(parallel),
            replicas=Replicas.of(vllm_config, kv_cache_config),
            identity=Identity.of(vllm_config, options),
        )

    def _scheduler_half(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options
    ) -> SchedulerHalf:
        """Return the half, and create what beside it watches requests and writes events."""
        model, parallel = self._model, vllm_config.parallel_config
        _, tokens_per_hash = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        if model.tokens_per_hash % tokens_per_hash:
            # vLLM refuses such a --prefix-match-unit. In the mode "all" it ignores the flag.
            sizes = sorted({group.block_size for group in model.groups})
            fix = "with --mamba-cache-mode align, or " if model.has_states else ""
            raise ConfigError(
                f"vLLM hashes {tokens_per_hash} tokens at a time, and that number must divide the "
                f"block size of each KV cache group, {sizes}: start vLLM {fix}without the connector"
            )
        settings.log(vllm_config, model, options, tokens_per_hash)
        if options.accelerate:
            from kvstow.vllm import accelerate  # noqa: PLC0415 - off by default

            accelerate.enable()
        kv_events = vllm_config.kv_events_config
        if kv_events is not None and kv_events.enable_kv_cache_events:
            # A lazy store comes long after its plan. Its block is on the device until then, so the
            # device's blocks bound the number of contents.
            self._host_events = HostEvents(kv_cache_config, model.group_ids, 2 * model.num_blocks)
        if options.events_path is not None:
            self._event_file = EventFile(path_of_engine(options.events_path, parallel))
        model = replace(model, tokens_per_vllm_hash=tokens_per_hash)
        self._observer = Observer.of(vllm_config, kv_cache_config, model, options)
        if options.observe:
            return cast("SchedulerHalf", IdleScheduler(options, parallel.world_size))
        tier = HostTier(
            model,
            options,
            world_size=parallel.world_size,
            horizon_blocks=_horizon_blocks(model, vllm_config),
            gathered_tokens=GATHERED_TOKENS,
            events=self._host_events is not None or self._event_file is not None,
            unhashed_modalities=unhashed_modalities(vllm_config),
        )
        return SchedulerHalf(
            tier,
            stores_sessions=_hashes_sessions_correctly(
                vllm_version.__version_tuple__[:2],
                has_drafts=vllm_config.speculative_config is not None,
                has_states=model.has_states,
            ),
            host_events=self._host_events,
        )

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False. Check the options, too, because vLLM asks this before it loads weights.

        Only an engine with CUDA graphs asks. Other engines check the options when they create the
        connector.

        Raises:
            ConfigError: an option does not exist, or cannot have its value.
        """
        Options.parse(extra_config)
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is dropped costs a later recompute and loses nothing."""
        return False

    # -- worker half ----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the device memory that vLLM has allocated."""
        self._worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Let go of the device memory before vLLM frees it to sleep (vLLM 0.33 and later)."""
        self._worker.unregister()

    def restore_kv_caches(self) -> None:
        """Take hold of the device memory again after vLLM has woken."""
        self._worker.restore()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take a step's jobs."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepJobs):
            self._worker.bind(connector_metadata)

    def has_connector_metadata(self) -> bool:
        """Return False: vLLM asks before each layer, and no layer waits for a load or a store."""
        return False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads."""
        self._worker.begin("load")

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM runs a request only when its load has landed."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are stored in a later step."""

    def wait_for_save(self) -> None:
        """Begin this step's stores; vLLM need not wait, because jobs hold their blocks."""
        self._worker.begin("store")

    def clear_connector_metadata(self) -> None:
        """End a step. vLLM 0.30 does not call `wait_for_save` in steps without tokens."""
        self.wait_for_save()
        super().clear_connector_metadata()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report the loads that failed; the scheduler half itself reports those that landed."""
        failed = self._worker.failed_request_ids()
        return KVConnectorTransferResults(finished_recving=set(failed), failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Report the jobs that have ended, and in the first steps this rank's host blocks.

        The number of host blocks does not use vLLM's handshake, because a `MultiConnector` passes
        on the handshake of only one of its connectors.
        """
        return self._worker.reports()

    # -- scheduler half -------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Take vLLM's accounting of the device blocks."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)
        self._observer.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Ignore the handshake, which in a `MultiConnector` belongs to another connector.

        vLLM's default method refuses a handshake of several pipeline stages.
        """

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens after the local hit that a load can bring, and whether it is async.

        None tokens: ask again later.
        """
        self._observer.looked_up(request, num_computed_tokens)
        found = self._scheduler.lookup(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load of the tokens that vLLM has accepted."""
        self._scheduler.allocated(request, blocks, num_external_tokens)
        self._observer.admitted(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Hand this step's jobs to the workers."""
        num_blocks = self._scheduler.num_host_blocks
        self._observer.stepped(num_blocks, scheduler_output.num_scheduled_tokens)
        return self._scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' reports, report the loads that have landed, and plan stores."""
        self._scheduler.processed(connector_output)
        self._write_events()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do the same as `request_finished_all_groups`."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Plan its last stores. vLLM may free its blocks: jobs hold references of their own."""
        self._scheduler.finished(request)
        self._observer.finished(request)
        return False, None

    def has_pending_block_frees(self) -> bool:
        """Whether jobs that end will free blocks, so that vLLM need not preempt for them."""
        return self._scheduler.holds_freed_blocks()

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must go on stepping, for stores to land or before it sleeps."""
        return not self._scheduler.may_rest()

    def reset_cache(self) -> bool | None:
        """Empty the tier, unless `preserve_on_sleep` keeps it: vLLM does not say why it resets.

        Jobs in flight end without effect.
        """
        if not self._scheduler.reset():
            self._observer.emptied()
        return True

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the host tier's block events. vLLM has no transfer events: they go to the file."""
        events = self._scheduler.take_events()
        return () if self._host_events is None else list(self._host_events.convert(events))

    # -- both -----------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Return the statistics since the last call."""
        if self.role == KVConnectorRole.WORKER:
            return self._worker.stats()
        num_blocks = self._scheduler.num_host_blocks
        if self._reporter is None:
            if not num_blocks:
                return None
            self._reporter = StatsReporter(num_blocks)
        report = self._reporter.report(self._scheduler.stats())
        if gauges := self._observer.gauges(num_blocks):
            report = report or ConnectorStats()
            report.data.update(gauges)
        return report

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """Return statistics from their serialised form.

        They are a copy, because each of vLLM's loggers adds later ones to what it gets here.
        """
        return ConnectorStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        """Return the connector's metrics for vLLM's `/metrics`."""
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End all jobs, and give the host memory back."""
        if self.role == KVConnectorRole.WORKER:
            self._worker.close()
        else:
            self._scheduler.close()
            self._write_events()
            self._observer.close()
        if self._event_file is not None:
            self._event_file.close()

    def _write_events(self) -> None:
        """Write the transfer events to the file; without a file, only empty their queue."""
        if self._event_file is None and self._host_events is None:
            return  # the tier keeps no events
        events = self._scheduler.take_transfer_events()
        if self._event_file is not None:
            self._event_file.write(events)


def _hashes_sessions_correctly(
    version: tuple[object, ...], *, has_drafts: bool, has_states: bool
) -> bool:
    """Whether vLLM's hashes of a session's blocks are those of the tokens in them.

    A session drops its last sampled token when its next chunk arrives. vLLM before 0.32 keeps the
    hash of the dropped token. vLLM before 0.33 counts drafts that it accepted beyond a stop as
    computed, and then mistakes the chunk's first tokens for them. If a session with recurrent
    states loses its blocks between chunks, vLLM's worker continues from a wrong state.
    """
    return not has_states and version >= ((0, 33) if has_drafts else (0, 32))


def _horizon_blocks(model: Model, config: VllmConfig) -> int:
    """Return the blocks that the next step may take: its tokens, and the longest prompt's load.

    In mode align a request takes two blocks of a group of states at most, and one for each draft.
    Groups that are left out take their blocks from the same queue: a ring one for each request.
    """
    scheduler, speculative = config.scheduler_config, config.speculative_config
    num_tokens: int = scheduler.max_num_batched_tokens + config.model_config.max_model_len
    num_requests = int(scheduler.max_num_seqs)
    num_drafts: int = 0 if speculative is None else speculative.num_speculative_tokens or 0
    has_few_states = config.cache_config.mamba_cache_mode == "align"

    def taken(block_size: int) -> int:
        return num_requests + (-(-num_tokens // block_size) if block_size else 0)

    own = sum(
        num_requests * (2 + num_drafts)
        if isinstance(group, StateSpace) and has_few_states
        else taken(group.block_size)
        for group in model.groups
    )
    return own + sum(map(taken, model.other_block_sizes))


def _num_local_ranks(parallel: ParallelConfig) -> int:
    """Return how many workers of a server this machine has. They are connected by now.

    vLLM reports a data-parallel size of 1 to each engine of a dense model, so engines that share
    this machine do not count.
    """
    if parallel.use_ray:
        # Ray spreads them over machines, of which the configuration does not know.
        num_ranks: int = get_world_group().world_size
        num_machines: int = get_node_count()
        return math.ceil(num_ranks / num_machines)
    return int(parallel.local_world_size * max(parallel.data_parallel_size_local, 1))
