"""A plan for a model with recurrent states counts device blocks as vLLM's `KVCacheManager` does.

vLLM serves the requests in the mode "align", one after the other. The chunks of a prompt end where
vLLM's scheduler ends them: at a block's end, after the last full block that leaves a token to
compute, and where the prompt parts from earlier ones.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.request import Request

from kvstow import FullAttention, StateSpace
from kvstow.geometry import Geometry, KvGroup
from kvstow.plan import PlanTrace, Server, build_workload
from kvstow.plan.simulate import STEP_TOKENS
from kvstow.plan.traces import PlanRequest
from kvstow.replay import TraceRequest

BLOCK = 512
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
STATE = MambaSpec(
    block_size=BLOCK, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align"
)


def chats(seed: int) -> list[TraceRequest]:
    """Return turns of chats that begin with one of a few system prompts."""
    print(f"seed {seed}")
    chances, new = random.Random(seed), iter(range(10**6))
    known = [[next(new) for _ in range(chances.randint(1, 30))] for _ in range(4)]
    requests: list[TraceRequest] = []
    for number in range(60):
        old = chances.choice(known)
        kept = old if chances.random() < 0.5 else old[: chances.randint(1, len(old))]
        ids = [*kept, *(next(new) for _ in range(chances.randint(0, 20)))]
        known.append(ids)
        prompt_tokens = len(ids) * BLOCK - chances.choice([0, 1, 10, 100, BLOCK - 1])
        # vLLM computes no KV for the last token of an answer, and a plan counts it. So no request
        # ends where that token fills a block or begins one.
        output_tokens = chances.choice([3, 5, 40])
        requests.append(
            TraceRequest(number + 1, float(number), prompt_tokens, output_tokens, tuple(ids))
        )
    return requests


class Served:
    """What vLLM's manager counts while it serves requests.

    Attributes:
        num_hits: blocks found on the device.
        peak: the most blocks in use.
        fits: whether it had blocks for all tokens.
    """

    def __init__(self, requests: list[TraceRequest], num_blocks: int, num_states: int) -> None:
        specs = [KVCacheGroupSpec([str(at)], STATE) for at in range(num_states)]
        groups = [*specs, KVCacheGroupSpec(["full"], FULL)]
        self._manager = KVCacheManager(
            KVCacheConfig(num_blocks, [], groups, prefix_cache_retention_interval=0),
            max_model_len=1 << 20,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            max_in_flight_tokens=STEP_TOKENS,
        )
        self.num_hits, self.peak = 0, 0
        self.fits = all(map(self._serve, requests))

    def _serve(self, one: TraceRequest) -> bool:
        tokens = [trace_id for trace_id in one.trace_ids for _ in range(BLOCK)]
        request = Request(
            request_id=str(one.line),
            prompt_token_ids=tokens[: one.prompt_tokens],
            sampling_params=SamplingParams(max_tokens=one.output_tokens),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256_cbor),
        )
        found, start, junction = self._manager.get_computed_blocks(request)
        request.shared_prefix_boundary = junction
        self.num_hits += start // BLOCK
        prompt, local = one.prompt_tokens, start
        while start < prompt:
            end = min(start + STEP_TOKENS, prompt)
            end = end // BLOCK * BLOCK if end < prompt else end
            stops = (end, (prompt - 1) // BLOCK * BLOCK, junction)
            end = min(stop for stop in stops if stop > start)
            hit = (local, found) if start == local else (0, None)
            if not self._allocate(request, end - start, *hit):
                return False
            start = end
        for token in range(one.output_tokens - 1):
            request.append_output_token_ids(10**7 + 100 * one.line + token)
            if not self._allocate(request, 1):
                return False
        self._manager.free(request)
        return True

    def _allocate(self, request: Request, num_tokens: int, *hit: object) -> bool:
        self._manager.new_step_starts()
        if request.num_computed_tokens == 0 and hit and hit[0]:
            slots = self._manager.allocate_slots(request, num_tokens, *hit)
            request.num_computed_tokens = hit[0]
        else:
            slots = self._manager.allocate_slots(request, num_tokens)
        if slots is None:
            return False
        request.num_computed_tokens += num_tokens
        pool = self._manager.block_pool
        self.peak = max(self.peak, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
        return True


@pytest.mark.parametrize(("seed", "num_states"), [(0, 1), (1, 9), (4, 3), (7, 9)])
def test_plan_hits_and_needs_what_vllm_hits_and_needs(seed: int, num_states: int) -> None:
    init_none_hash(sha256_cbor)
    requests = chats(seed)
    planned = server(requests, num_states)
    needed = planned.num_needed
    assert not Served(requests, needed, num_states).fits
    for num_blocks in (needed + 1, needed + 30, 3 * needed):
        served = Served(requests, num_blocks, num_states)
        plan = replace(planned, num_device_blocks=num_blocks - 1).serve(0).served
        assert served.fits
        assert served.peak == needed
        assert plan.device_hits == served.num_hits > 0


def server(requests: list[TraceRequest], num_states: int) -> Server:
    groups = (
        *[KvGroup(StateSpace(BLOCK), 1, 1)] * num_states,
        KvGroup(FullAttention(BLOCK), 1, 1),
    )
    geometry = Geometry("states", "", groups, BLOCK, 1, 1, 1, ())
    trace = PlanTrace(("chats",), BLOCK, False, [PlanRequest(one, 0) for one in requests])
    return Server(geometry, build_workload(trace, BLOCK))
