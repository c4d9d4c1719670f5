"""A request that the scheduler half tracks, and what of it may be stored or reported."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from kvstow import OffloadScheduler, SlidingWindow
from kvstow.vllm.model import Model
from kvstow.vllm.tier import Tables


@dataclass(slots=True)
class TrackedRequest:
    """A request between its first lookup and its end.

    Attributes:
        num_reported: per group, the blocks of its table that the tier knows. A load may report its
            blocks when it begins; they count as computed only when vLLM counts them.
        due_tokens: the number of computed tokens that completes the next block hash.
        num_hashes: hashes that the tier knows.
        last_hash: the last of these.
        num_local_tokens: tokens that its last lookup found on the device.
        num_given_tokens: tokens from hits and loads when its first step was scheduled.
        num_own_tokens: those of them that vLLM found on the device or kvstow loads. Another
            connector loads the others, perhaps for a request whose blocks this one shares.
        num_settled_tokens: computed tokens whose blocks were stored because vLLM paused.
        is_admitted: vLLM gave it blocks.
        is_loading: its load is under way or has failed, so its table overstates what is computed.
        is_load_reported: vLLM knows how its load ended.
        is_stale: its blocks are not stored, because a reset came after their computation, because
            their hashes cannot be trusted, or because another connector did not load one of them.
        is_distrusted: another connector did not load one of its blocks. From `num_own_tokens` on
            its blocks have no keys.
        recompute: nothing is loaded for it, because a load of it has failed or cannot begin.
        max_stored_tokens: blocks that end behind these tokens are not stored. It never changes.
        max_load_tokens: the most tokens to load.
        has_low_priority: the blocks that only it has stored are evicted before all others.
        offered_since: since when vLLM takes tokens that its lookups find and begins no load,
            although neither requests nor transfers hold blocks that it may need. None if that did
            not hold at the last lookup.
        promote_until: when it stops waiting for the tier below; None unless it waits, or did.
        next_look: the number of the step that looks at it next, if no other does so before.
        scheduled_tokens: its tokens once the steps scheduled so far are over, without drafts and
            without tokens that are still to be sampled. Not each step of one token counts.
        filling: per group of windows or states, the blocks that the steps under way make full. They
            are recorded when vLLM allocates them, because a window drops blocks as soon as it has
            moved past them. A full-attention table keeps its blocks until the request is over.
        filling_from: per group, the index of the first of them in the table.
    """

    request: Request
    model: Model
    num_reported: list[int]
    due_tokens: int
    recompute: bool = False
    max_stored_tokens: int = sys.maxsize
    max_load_tokens: int = sys.maxsize
    has_low_priority: bool = False
    num_hashes: int = 0
    last_hash: bytes = b""
    num_local_tokens: int = 0
    num_given_tokens: int = 0
    num_own_tokens: int = 0
    num_settled_tokens: int = 0
    is_admitted: bool = False
    is_loading: bool = False
    is_load_reported: bool = False
    is_stale: bool = False
    is_distrusted: bool = False
    offered_since: float | None = None
    promote_until: float | None = None
    next_look: int = 0
    scheduled_tokens: int = 0
    filling: list[list[KVCacheBlock]] = field(default_factory=list)
    filling_from: list[int] = field(default_factory=list)

    def given_tokens(self) -> int:
        """Return the tokens from hits and loads, before the first step of the request.

        vLLM counts those as not computed that it computes again for its windows.
        """
        request, num_again = self.request, self.model.replayed_tokens
        num_given: int = request.num_computed_tokens
        if num_again and request.replay_start:
            num_given = max(num_given, request.replay_start + num_again)
        return num_given

    @property
    def is_proven(self) -> bool:
        """Whether its first step has ended, and read no block that was not loaded."""
        request = self.request
        num_computed: int = request.num_computed_tokens - request.num_in_flight_tokens
        return num_computed > self.num_given_tokens and not self.is_distrusted

    @property
    def num_submitted_tokens(self) -> int:
        """The tokens that earlier steps have found or write, as far as that is known.

        The steps that compute a part of a hit again have fewer tokens than the hit.
        """
        return max(self.num_given_tokens, self.scheduled_tokens)

    def new_hashes(self, offload: OffloadScheduler, num_tokens: int) -> Sequence[bytes]:
        """Return the hashes of the first `num_tokens` tokens that the tier does not have.

        The caller reports them. From now on they count as reported.
        """
        num_known, model = self.num_hashes, self.model
        stride = model.vllm_hashes_per_hash
        hashes: Sequence[bytes] = self.request.block_hashes
        known = num_known * stride
        if known and (len(hashes) < known or hashes[known - 1] != self.last_hash):
            # vLLM changed the tokens. A hash covers all tokens before it, so comparing the last
            # hash is enough.
            offload.truncate(self.request.request_id, 0)
            self.num_hashes = num_known = 0
        end = num_tokens // model.tokens_per_hash
        if end <= num_known:
            return ()
        first, end = (num_known + 1) * stride - 1, min(end * stride, len(hashes))
        # The hashes of a whole prompt are not copied.
        is_all = first == 0 and stride == 1 and end == len(hashes)
        new = hashes if is_all else hashes[first:end:stride]
        self.num_hashes += len(new)
        if new:
            self.last_hash = new[-1]
        return new

    def filled(self, g: int, num_full: int, tables: Tables) -> list[KVCacheBlock]:
        """Return those of the first `num_full` blocks of a group that the tier does not know."""
        reported = self.num_reported[g]
        if not self.model.is_window[g]:
            return tables[g].get(self.request.request_id, [])[reported:num_full]
        first = self.filling_from[g]
        return self.filling[g][reported - first : num_full - first]

    def num_wanted(self, g: int) -> int:
        """Return how many of a group's next blocks are to be stored."""
        num_wanted = self.max_stored_tokens // self.model.groups[g].block_size
        return max(0, num_wanted - self.num_reported[g])

    def num_cached_tokens(self, tables: Tables) -> int:
        """Return how many computed tokens lie in blocks that have the hashes of these tokens.

        Tokens of steps under way do not count. None counts before the first step has ended, because
        its outcome may be that another connector did not load the blocks that the step read. In a
        full-attention table the last block with its own key proves the blocks before it, because a
        hash covers all tokens before it. vLLM hashes a block in the step that fills it, or one step
        later if drafts filled it.
        """
        request, model = self.request, self.model
        hashes: Sequence[bytes] = request.block_hashes
        num_hashed = len(hashes) * model.tokens_per_vllm_hash
        num_computed: int = request.num_computed_tokens - request.num_in_flight_tokens
        if num_computed <= self.num_given_tokens:
            return 0  # the outcome of its first step is not known
        num_computed = min(num_computed, num_hashed)
        for g, block_size, num_hashes, suffix in model.full_groups:
            if num_computed < self.due_tokens:
                break
            table, reported = tables[g].get(request.request_id, ()), self.num_reported[g]
            num_due = model.num_cacheable_blocks(g, num_computed)
            end = min(num_due, len(table))
            while end > reported:
                if table[end - 1].block_hash == hashes[end * num_hashes - 1] + suffix:
                    break
                end -= 1
            if end < num_due:
                num_computed = (end + 1) * block_size - 1
        return num_computed

    def window_ids(self, g: int, blocks: Sequence[KVCacheBlock], tables: Tables) -> list[int]:
        """Return the ids of filled blocks of a window or state; 0 for those not to be stored.

        vLLM gives hashes only to blocks at which a hit can end. Another request may have taken a
        block since: its hash shows it. A hit on the device needs no block below its window, so the
        blocks that vLLM retains there have no hash, and yet a load must bring them. Such a block is
        stored if it is still in the request's table, and if the request computed it, because a load
        of another connector may leave it unwritten.
        """
        request, spec, first = self.request, self.model.groups[g], self.num_reported[g]
        ids = [
            block.block_id if block.block_hash == self.model.block_key(request, index, g) else 0
            for index, block in enumerate(blocks, first)
        ]
        if isinstance(spec, SlidingWindow) and spec.extra_retained_tokens:
            table = tables[g].get(request.request_id, [])
            start = max(0, -(-self.num_given_tokens // spec.block_size) - first)
            for at, retained in enumerate(table[first + start : first + len(blocks)], start):
                if retained is blocks[at] and not retained.is_null:
                    ids[at] = retained.block_id
        return ids


def has_ambiguous_hashes(
    request: Request, tokens_per_hash: int, unhashed: Collection[str] = ()
) -> bool:
    """Whether vLLM's hashes of a request may equal those of one that computes other KV.

    - It brings media of which the model's hashes always leave something out.
    - Two inputs share their place, as a video and its sound (`use_audio_in_video`). If the first
      goes on after a block, the hash of the block does not have the second one.
    - A prompt mixes tokens and embeddings. Its hashes have token 0 where an embedding is, and
      vLLM's zeros where a token is, so token 0 and an embedding of zeros look alike.

    Args:
        request: the request.
        tokens_per_hash: tokens per entry of `Request.block_hashes`.
        unhashed: the modalities of these media.
    """
    end = 0
    for item in request.mm_features:  # in the order of their places
        position = item.mm_position
        if item.modality in unhashed:
            return True
        if (position.offset // tokens_per_hash + 1) * tokens_per_hash < end:
            return True
        end = max(end, position.offset + position.length)
    is_token = getattr(request, "prompt_is_token_ids", None)  # not in each version
    if is_token is None:
        return False
    tokens, has_number = request.prompt_token_ids, request.prompt_embeds.any(dim=1).tolist()
    return any(
        not (token if is_given else is_not_zero)
        for token, is_not_zero, is_given in zip(tokens, has_number, is_token, strict=True)
    )


def only_reads_canvas(request: Request) -> bool:
    """Whether a request ends before its diffusion model computes the KV of the guessed tokens.

    vLLM gives the blocks of these tokens hashes all the same.
    """
    params = request.sampling_params
    extra = None if params is None else params.extra_args
    return bool(extra and extra.get("diffusion_read_only"))
