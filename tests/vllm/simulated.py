"""vLLM's real scheduler and both halves of the connector, with a simulated model and checked KV.

The compute of a step is simulated: the KV of a token is a number that depends on all tokens before
it, on the cache salt and on the group. So a read of KV of other tokens, or of KV that was never
written, fails at once, at the block where it happens. A recurrent state is the number of its last
token, in all of its block. A ring has the tokens since the last `TOKENS_PER_KEY` that became one
key. Windows that vLLM caches no prefix of are computed again for the last tokens of a hit, which
writes nothing else. The schedulers are vLLM's own, with steps that overlap or not. kvstow's own
movers make the copies, when the test lets them.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tests.vllm.halves import BLOCK_SIZE, FULL, PAGE_BYTES, cache_config, own_part
from tests.vllm.movers import LateMover, LateTicket
from tests.vllm.places import place, replayed, written
from tests.vllm.setting import CONNECTOR
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheConfig, MambaSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvstow.vllm.scheduler import SchedulerHalf
from kvstow.vllm.worker import WorkerHalf

VOCAB_SIZE = 50
NUM_DRAFTS = 3
TOKENS_PER_KEY = 4


class WrongKV(AssertionError):
    """A request reads KV of other tokens than its own."""


@dataclass
class _Sampled:
    """The tokens that a step has sampled for a request and the scheduler does not know yet."""

    num_scheduled: int
    tokens: list[int]
    num_rejected: int


@dataclass
class Simulated:
    """An engine without a model.

    Attributes:
        weights: the number of the present weights, on which the KV of every token depends.
        is_checked: whether reads of wrong KV fail.
    """

    folder: Path
    options: dict[str, Any]
    specs: Sequence[Any] = (FULL,)
    num_blocks: int = 24
    num_in_flight: int = 1  # 2: asynchronous scheduling
    drafts: bool = False
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    weights: int = 0
    is_checked: bool = True

    def __post_init__(self) -> None:
        init_none_hash(sha256_cbor)
        self.dice = random.Random(self.seed)
        size = PAGE_BYTES * self.num_blocks
        names = [str(at) for at in range(len(self.specs))]
        cache, config = self._cache_config(), self._config()
        config.cache_config.num_gpu_blocks = self.num_blocks
        kind = AsyncScheduler if self.num_in_flight > 1 else Scheduler
        sizes = [spec.block_size for spec in self.specs if spec.prefix_cacheable]
        self.tokens_per_hash = config.cache_config.prefix_match_unit or math.gcd(*sizes)
        self.scheduler = kind(
            config,
            cache,
            StructuredOutputManager(config),
            block_size=math.lcm(*(spec.block_size for spec in self.specs)),
            hash_block_size=self.tokens_per_hash,
        )
        made = self.scheduler.connector
        self.connector = own_part(made)
        self.half: SchedulerHalf = self.connector._scheduler
        self.memory = torch.zeros(size, dtype=torch.uint8)
        self.worker_connector: Any = type(made)(config, KVConnectorRole.WORKER, cache)
        self.worker_connector.register_kv_caches(dict.fromkeys(names, self.memory))
        self.worker: WorkerHalf = own_part(self.worker_connector)._worker
        self.waiting: list[LateTicket] = []
        # Groups may share a mover.
        late = {id(mover): LateMover(mover, self.waiting) for mover in self.worker.movers}
        self.worker.movers = [late[id(m)] for m in self.worker.movers]  # type: ignore[misc]
        # By tokens of a block: [block, position in it, copies of one number].
        numbers = self.memory.view(torch.int64)
        self.kv = {
            size: numbers.view(self.num_blocks, size, -1).numpy()
            for size in {spec.block_size for spec in self.specs}
        }
        numbers[:] = -1
        self._hasher = get_request_block_hasher(self.tokens_per_hash, sha256_cbor)
        # By the last hash of a chain: its tokens and the salt.
        self.hashed: dict[Any, tuple[list[int], str | None]] = {}
        self.steps: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.sampled: dict[str, deque[_Sampled]] = {}
        self.drafted: dict[str, list[int]] = {}
        self.num_steps = 0
        self.answers: dict[str, list[int]] = {}

    def _cache_config(self) -> KVCacheConfig:
        return cache_config(*self.specs, num_blocks=self.num_blocks)

    def _config(self) -> Any:
        if self.drafts:
            self.settings["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": NUM_DRAFTS,
                "prompt_lookup_max": 2,
            }
        defaults = {
            "model": str(self.folder),
            "skip_tokenizer_init": True,
            "block_size": BLOCK_SIZE,
            "max_model_len": 512,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "kv_transfer_config": CONNECTOR | {"kv_connector_extra_config": self.options},
        }
        config = EngineArgs(**(defaults | self.settings)).create_engine_config()
        config.scheduler_config.async_scheduling = self.num_in_flight > 1
        for spec in self.specs:
            if isinstance(spec, MambaSpec):
                config.cache_config.mamba_cache_mode = spec.mamba_cache_mode
        return config

    # -- requests -----------------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 4,
        resumable: bool = False,
        priority: int = 0,
        salt: str | None = None,
        reads_cache: bool | None = None,
        hints: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Add a request, or the next chunk of a session of that name."""
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            skip_reading_prefix_cache=None if reads_cache is None else not reads_cache,
            extra_args={"kv_transfer_params": {"kvstow": dict(hints)}} if hints else None,
        )
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hash,
            resumable=resumable,
            priority=priority,
            cache_salt=salt,
        )
        self.scheduler.add_request(request)

    def _hash(self, request: Request) -> Any:
        new = self._hasher(request)
        if new:
            before = request.block_hashes
            if before:
                self.hashed.pop(before[-1], None)
            num_tokens = (len(before) + len(new)) * self.tokens_per_hash
            self.hashed[new[-1]] = (list(request.all_token_ids[:num_tokens]), request.cache_salt)
        return new

    def ask_for_all(self) -> int:
        """Ask for every chain of blocks that was ever hashed, and return the tokens of host hits.

        The device is empty before each request, so all hits come from the host and are checked.
        """
        assert self.scheduler.reset_prefix_cache()
        num_loaded = 0
        for number, (prompt, salt) in enumerate(list(self.hashed.values())):
            name = f"all-{number}"
            offload = self.half.offload
            assert offload is not None
            before = offload.stats()["hit_tokens"]
            self.add(name, [*prompt, 0], max_tokens=1, salt=salt)
            self.settle()
            assert self.answers[name] == self.right_answer([*prompt, 0], 1, salt)
            num_loaded += offload.stats()["hit_tokens"] - before
            assert self.scheduler.reset_prefix_cache()
        return num_loaded

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def requests(self) -> dict[str, Request]:
        """The requests that have not finished."""
        found = self.scheduler.requests.items()
        return {name: request for name, request in found if not request.is_finished()}

    # -- steps --------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one turn of vLLM's engine loop. Return False if there was nothing to do."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.steps.append((output, self._execute(output)))
            self.num_steps += 1
            is_more = output.total_num_scheduled_tokens > 0 or self.scheduler.has_requests()
            if len(self.steps) < self.num_in_flight and is_more:
                return True
        if not self.steps:
            return False
        self._update()
        return True

    def _update(self) -> None:
        output, result = self.steps.popleft()
        for name in output.num_scheduled_tokens:
            self.sampled[name].popleft()
        answered = self.scheduler.update_from_output(output, result)
        for outputs in answered.values():
            for output in outputs.outputs:
                self.answers.setdefault(output.request_id, []).extend(output.new_token_ids)
        if self.drafts and self.num_in_flight == 1:
            names = list(self.drafted)
            drafts = [self.drafted.pop(name) for name in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def settle(self, num_steps: int = 300, *, copies: bool = True) -> None:
        """Step until nothing is left to do, and make all requested copies."""
        for _ in range(num_steps):
            if copies:
                self.copy()
            if not self.step():
                return
        left = {name: request.status.name for name, request in self.requests.items()}
        raise AssertionError(f"vLLM does not come to rest: {left}")

    def copy(self, share: float = 1.0, failing: float = 0.0) -> None:
        """Make a share of the requested copies. Some of them fail."""
        waiting, self.waiting[:] = self.waiting[:], []
        for ticket in waiting:
            if self.dice.random() >= share:
                self.waiting.append(ticket)
            else:
                ticket.go(fails=self.dice.random() < failing)

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        connector = self.worker_connector
        meta = output.kv_connector_metadata
        assert meta is not None
        connector.handle_preemptions(meta)
        connector.bind_connector_metadata(meta)
        connector.start_load_kv(None)
        sampled = [self._compute(name, num, output) for name, num in self._scheduled(output)]
        connector.wait_for_save()
        ended = connector.get_transfer_results(output.finished_req_ids)
        reported = KVConnectorOutput(
            finished_sending=ended.finished_sending,
            finished_recving=ended.finished_recving,
            failed_recving=ended.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return self._output(output, sampled, reported)

    def _output(
        self, output: SchedulerOutput, sampled: list[list[int]], reported: KVConnectorOutput
    ) -> ModelRunnerOutput:
        """Return what a step has computed, and what the connector reports after it."""
        names = [name for name, _ in self._scheduled(output)]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=reported,
        )

    @staticmethod
    def _scheduled(output: SchedulerOutput) -> list[tuple[str, int]]:
        return list(output.num_scheduled_tokens.items())

    def _compute(self, name: str, num_tokens: int, output: SchedulerOutput) -> list[int]:
        """Read and write KV as a model does, and return the sampled tokens."""
        request = self.scheduler.requests[name]
        in_flight = self.sampled.setdefault(name, deque())
        start = request.num_computed_tokens - num_tokens
        # Stale shares of sampled tokens that are not delivered yet do not count.
        num_stale, pending = request.num_stale_output_tokens, []
        for sampled in in_flight:
            if num_stale > 0 and request.drop_stale_output:
                num_stale -= sampled.num_scheduled
            else:
                pending += sampled.tokens
                start -= sampled.num_rejected
        tokens = [*request.all_token_ids, *pending]
        num_true = len(tokens)
        drafts = list(output.scheduled_spec_decode_tokens.get(name, ()))
        if drafts and self.num_in_flight > 1:
            # vLLM's worker has the drafts then, and its scheduler only their number.
            own = self.drafted.pop(name, [])
            drafts = [*own, *drafts][: len(drafts)]
        values = self.values(tokens + drafts, salt := request.cache_salt)
        if not self._check(request, values, start):
            values = self.values(tokens + drafts, salt := "wrong")
        for group in range(len(self.specs)):
            self._write(request, group, values, start, start + num_tokens, len(drafts))
        new: list[int] = []
        if start + num_tokens >= num_true:
            for draft in [*drafts, None]:
                new.append(self.next(tokens, salt))
                tokens.append(new[-1])
                if draft != new[-1]:
                    break
            if self.drafts:
                self.drafted[name] = self._draft(tokens, salt)
        in_flight.append(_Sampled(num_tokens, new, len(drafts) + 1 - len(new) if new else 0))
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
        """Write the KV of a step's tokens, the last of which are drafts, for a group."""
        spec, name = self.specs[group], request.request_id
        table = self.scheduler.kv_cache_manager.get_blocks(name).blocks[group]
        first = max(start, self._hit_end(request)) if spec.prefix_cacheable else start
        for at in written(spec, first, end):
            block, at_block = place(spec, table, at)
            assert not block.is_null, f"{name}: a null block at token {at}, group {group}"
            self.kv[spec.block_size][block.block_id, at_block] = values[at] ^ group

    def _draft(self, tokens: list[int], salt: str | None) -> list[int]:
        """Tokens that may come next: some right ones, then perhaps a wrong one."""
        tokens, first = list(tokens), len(tokens)
        for _ in range(self.dice.randrange(NUM_DRAFTS + 1)):
            is_right = self.dice.random() < 0.8
            tokens.append(self.next(tokens, salt) if is_right else self.dice.randrange(VOCAB_SIZE))
        return tokens[first:]

    def _check(self, request: Request, values: list[int], end: int) -> bool:
        """Every group's KV before token `end`, as far as attention reads it, is the request's."""
        if not self.is_checked:
            return True
        tables = self.scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        for group, (table, spec) in enumerate(zip(tables, self.specs, strict=True)):
            for at in range(self._first_read(request, spec, end), end):
                block, at_block = place(spec, table, at)
                found = self.kv[spec.block_size][block.block_id, at_block]
                if block.is_null or (found != values[at] ^ group).any():
                    raise WrongKV(
                        f"step {self.num_steps}: request {request.request_id} reads block "
                        f"{block.block_id} of group {group} at token {at} of {end} "
                        f"({request.num_tokens} known), which holds other KV"
                    )
        return True

    def _first_read(self, request: Request, spec: Any, end: int) -> int:
        """The first token whose KV, or the state after it, token `end` needs."""
        if (chunk := getattr(spec, "attention_chunk_size", None)) is not None:
            return int(end // chunk * chunk)
        window = 2 if isinstance(spec, MambaSpec) else getattr(spec, "sliding_window", None)
        if isinstance(spec, CircularBufferSpec):
            window = end % TOKENS_PER_KEY + 1
        first = 0 if window is None else max(0, end - window + 1)
        return max(first, request.replay_start) if replayed(spec) else first

    def _hit_end(self, request: Request) -> int:
        """The tokens of a hit whose last ones are computed again; 0 unless there are such."""
        num_again = max(map(replayed, self.specs))
        return request.replay_start + num_again if num_again and request.replay_start else 0

    # -- what is right ------------------------------------------------------------------------

    def values(self, tokens: Sequence[int], salt: str | None) -> list[int]:
        """The KV of each token, which depends on all before it."""
        value, found = sum(map(ord, salt or "")) + 1 + 1_000_003 * self.weights, []
        for token in tokens:
            value = (value * 6364136223846793005 + token + 1442695040888963407) & (2**62 - 1)
            found.append(value ^ (value >> 31))
        return found

    def next(self, tokens: Sequence[int], salt: str | None) -> int:
        return int(self.values(tokens, salt)[-1] >> 8) % VOCAB_SIZE

    def right_answer(self, prompt: Sequence[int], num_tokens: int, salt: str | None) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(self.next(tokens, salt))
        return tokens[len(prompt) :]

    # -- afterwards ---------------------------------------------------------------------------

    def check_at_rest(self, *, is_off: bool = False) -> None:
        """Check that ended requests and jobs hold nothing, and that the tier is off if `is_off`."""
        pool = self.scheduler.kv_cache_manager.block_pool
        assert not (self.scheduler.requests or self.half.requests._unproven)
        held = {block.block_id: block.ref_cnt for block in pool.blocks[1:] if block.ref_cnt}
        assert not held, f"blocks are still held, by id: {held}"
        assert pool.get_num_free_blocks() == self.num_blocks - 1
        queue = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        assert sorted(queue) == list(range(1, self.num_blocks))
        assert self.half.tier.is_off == is_off
        if is_off:
            assert self.half.stats() == {"quarantined_jobs": 0, "quarantined_blocks": 0}
            return
        offload = self.half.offload
        assert offload is not None
        offload.check()
        assert offload.stats()["jobs_in_flight"] == 0

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker_connector.shutdown()


def tokens(num_tokens: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_tokens)]
