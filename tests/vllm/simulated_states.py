"""The simulated engine with the states of vLLM's mode "align", as its workers keep them.

A request has one running state. Before a step the worker copies it into the block of the step's
last token (pre-copy). A step with drafts writes the state after each of its tokens, into the blocks
that follow, because vLLM may reject some. The next step reads the state of the last accepted token.
If a block ends among the accepted tokens, the worker copies the state of its end into the block
(post-copy). A prompt's last chunk may write one more state, where a later prompt can end its hit
(checkpoint). The worker's block tables only grow, so they differ from the scheduler's.

Each store is checked, too: its blocks must hold the KV of their keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.vllm.halves import cache_config, reraise
from tests.vllm.simulated import Simulated, WrongKV
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

try:  # since vLLM 0.31
    from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
except ImportError:
    compute_mamba_prefill_checkpoints = None

HAS_CHECKPOINTS = compute_mamba_prefill_checkpoints is not None


@dataclass
class _Row:
    """A request in the worker's batch.

    Attributes:
        table: per group, the ids of its blocks.
        column: where the running state lies in the table. None: the request has just come.
        num_accepted: tokens of the last step that count, drafts included.
        step: the first token, the end and the number of drafts of the present step.
    """

    table: list[list[int]]
    column: int | None = None
    num_accepted: int = 1
    step: tuple[int, int, int] = (0, 0, 0)


def is_aligned(spec: Any) -> bool:
    return isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align"


def _column(end: int, block_size: int) -> int:
    """The place of the block of the last token before `end`."""
    return -(-end // block_size) - 1


@dataclass
class SimulatedStates(Simulated):
    """An engine without a model, with a worker that keeps states in the mode "align".

    Attributes:
        eagle: whether the drafts come from EAGLE or MTP, so that hits drop their last block.
        draft_groups: the groups that such a draft model computes. Empty: vLLM does not know.
        unit: `--prefix-match-unit`.
        keeps_junctions: `--enable-mamba-shared-prefix-checkpoint`.
        retention: vLLM's interval of states to keep; 0: only where prompts end.
    """

    eagle: bool = False
    draft_groups: Sequence[int] = ()
    unit: int | None = None
    keeps_junctions: bool = False
    retention: int | None = 0
    rows: dict[str, _Row] = field(default_factory=dict)
    # By each hash: the tokens that it covers, and the salt.
    covered: dict[bytes, tuple[list[int], str | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        begin = self.half.transfers.begin_store

        def checked(job: Any, blocks: list[Any]) -> None:
            pool = self.scheduler.kv_cache_manager.block_pool.blocks
            self._check_stored(blocks if job.has_all_ids else [pool[at] for at in job.block_ids])
            begin(job, blocks)

        self.half.transfers.begin_store = checked  # type: ignore[method-assign]
        self.half._turn_off = reraise  # type: ignore[method-assign]

    def _cache_config(self) -> KVCacheConfig:
        config = cache_config(*self.specs, num_blocks=self.num_blocks, retention=self.retention)
        for group in self.draft_groups:
            config.kv_cache_groups[group].is_eagle_group = True
        return config

    def _config(self) -> Any:
        config = super()._config()
        if self.eagle:
            config.speculative_config.method = "eagle"
        cache = config.cache_config
        cache.block_size = max(s.block_size for s in self.specs if isinstance(s, MambaSpec))
        cache.prefix_match_unit = self.unit
        if self.keeps_junctions:
            cache.enable_mamba_shared_prefix_checkpoint = True
        return config

    def _hash(self, request: Request) -> Any:
        num_before, new = len(request.block_hashes), super()._hash(request)
        for at, block_hash in enumerate(new or (), num_before + 1):
            num_tokens = at * self.tokens_per_hash
            covered = list(request.all_token_ids[:num_tokens])
            self.covered[bytes(block_hash)] = covered, request.cache_salt
        return new

    def _check_stored(self, blocks: Sequence[Any]) -> None:
        """Each of these blocks holds the KV of its key, or has none."""
        for block in blocks:
            if block.block_hash is None or not self.is_checked:
                continue
            group = int.from_bytes(block.block_hash[-4:], "big")
            spec, (covered, salt) = self.specs[group], self.covered[bytes(block.block_hash[:-4])]
            right = self.values(covered, salt)[-spec.block_size :]
            if isinstance(spec, MambaSpec):
                right = right[-1:] * spec.block_size
            for found, value in zip(self.kv[spec.block_size][block.block_id], right, strict=True):
                if (found != value ^ group).any():
                    raise WrongKV(
                        f"step {self.num_steps}: block {block.block_id} of group {group} does not "
                        f"hold the KV of the {len(covered)} tokens of its key, and is stored"
                    )

    # -- the worker ---------------------------------------------------------------------------

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._update_rows(output)
        pages = self.memory.view(self.num_blocks, -1)
        pages[list(output.new_block_ids_to_zero or ())] = 0
        for copy in output.kv_cache_block_copies or ():
            pages[copy.dst_block_id] = pages[copy.src_block_id]
        return super()._execute(output)

    def _update_rows(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids:
            self.rows.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.rows[new.req_id] = _Row([list(ids) for ids in new.block_ids])
        cached = output.scheduled_cached_reqs
        for name, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.rows[name] = _Row([list(ids) for ids in added])
            elif added is not None:
                for ids, more in zip(self.rows[name].table, added, strict=True):
                    ids.extend(more)

    def _first_read(self, request: Request, spec: Any, end: int) -> int:
        """`_write` itself checks the state that it goes on from."""
        return end if is_aligned(spec) else super()._first_read(request, spec, end)

    def _compute(self, name: str, num_tokens: int, output: SchedulerOutput) -> list[int]:
        new, row = super()._compute(name, num_tokens, output), self.rows[name]
        is_at_end, row.num_accepted = False, max(1, len(new))
        for group, spec in enumerate(self.specs):
            if is_aligned(spec):
                is_at_end = self._keep(row, group)
                row.column = _column(row.step[1], spec.block_size)
        if is_at_end:
            row.num_accepted = 1
        return new

    def _write(
        self,
        request: Request,
        group: int,
        values: list[int],
        start: int,
        end: int,
        num_drafts: int,
    ) -> None:
        spec = self.specs[group]
        if not is_aligned(spec):
            super()._write(request, group, values, start, end, num_drafts)
            return
        row, kv = self.rows[request.request_id], self.kv[spec.block_size]
        row.step, table = (start, end, num_drafts), row.table[group]
        before = (start - 1) // spec.block_size if row.column is None else row.column
        column, num_further = _column(end, spec.block_size), row.num_accepted - 1
        if before not in (-1, column):
            kv[table[column]] = kv[table[before + num_further]]
            num_further = 0
        block = table[column + num_further]
        if start and self.is_checked and (kv[block] != values[start - 1] ^ group).any():
            raise WrongKV(
                f"step {self.num_steps}: request {request.request_id} goes on from block {block} "
                f"of group {group}, which does not hold the state after {start} tokens"
            )
        if num_drafts:
            for at in range(start, end):
                kv[table[column + at - start]] = values[at] ^ group
            return
        if (found := self._checkpoint(spec, start, end)) is not None:
            kv[table[found[1]]] = values[found[0] - 1] ^ group
        kv[table[column]] = values[end - 1] ^ group

    def _checkpoint(self, spec: Any, start: int, end: int) -> tuple[int, int] | None:
        """The tokens of the checkpoint of a chunk, and its place in the table, or None."""
        if not getattr(spec, "num_prefill_checkpoint_blocks", 0) or end - start == 1:
            return None
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        aligned = next(m for m in managers if m.kv_cache_spec is spec)
        given = {
            "hash_block_size": self.tokens_per_hash,
            "mamba_block_size": spec.block_size,
            "checkpoint_alignment": spec.prefill_checkpoint_alignment,
            "drop_eagle_block": self.eagle,
            "cache_hit_alignment_tokens": getattr(aligned, "cache_hit_alignment_tokens", 0),
        }
        known = inspect.signature(compute_mamba_prefill_checkpoints).parameters
        (offset,), (column,) = compute_mamba_prefill_checkpoints(
            [end], [end - start], **{name: value for name, value in given.items() if name in known}
        )
        return (start + offset, column) if offset else None

    def _keep(self, row: _Row, group: int) -> bool:
        """Copy the state of a block's end into the block, if a draft passed it (post-copy).

        Return whether the block is that of the running state.
        """
        _, end, num_drafts = row.step
        block_size: int = self.specs[group].block_size
        kv = self.kv[block_size]
        num_certain = end - num_drafts
        kept = (num_certain + row.num_accepted - 1) // block_size * block_size
        if not self.drafts or kept < num_certain:
            return False
        column, target = _column(end, block_size), kept // block_size - 1
        table = row.table[group]
        kv[table[target]] = kv[table[column + kept - num_certain]]
        return column == target
