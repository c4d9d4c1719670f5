"""Host tiers of several sizes as accounting alone, for models with several groups.

With windows or states, more slots can hit less, and what a slot is worth depends on which blocks of
a prompt are left. No single curve has that. So each size gets the accounting of a real tier: the
lookups that vLLM makes, and the stores that would follow. There are no bytes, and a copy ends at
once.

vLLM keeps a window or a state where a hit may end: at the end of a prompt, where the prompt parts
from others, and perhaps at regular intervals. A real tier stores those, and so does each size here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from vllm.v1.request import Request

from kvstow import ChunkedLocal, FullAttention, OffloadScheduler, SlidingWindow, StateSpace
from kvstow.vllm.model import Group, Model

# What a slot of the accounting takes, with its key in the index.
SLOT_BYTES: Final = 150
Ids = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Running:
    """A request that the tiers know.

    Attributes:
        num_hashes: the hashes that they have.
        num_stored: the tokens that were reported as computed.
        ends: per tier, the tokens at which a hit may end.
    """

    num_hashes: int
    num_stored: int
    ends: list[set[int]]


class ShadowSlots:
    """The hits that tiers of these sizes would have.

    Attributes:
        hits: tokens that each tier would have loaded, weighed as the caller weighs lookups.
    """

    def __init__(
        self,
        model: Model,
        retention_interval: int | None,
        sizes: Sequence[int],
        *,
        has_all_states: bool,
    ) -> None:
        """Begin with empty tiers.

        Args:
            model: the model, with the tokens of vLLM's hashes.
            retention_interval: the tokens between the windows or states that vLLM retains; 0: only
                those at which a prompt ends or parts from others; None: all.
            sizes: slots of each tier.
            has_all_states: as `ShadowTier` has it.
        """
        self._model = model
        self._has_all_states = has_all_states
        self._interval = retention_interval
        self._tiers = [OffloadScheduler(size, model.groups) for size in sizes]
        self._running: dict[str, _Running] = {}
        self.hits = [0.0] * len(sizes)

    def admitted(self, request: Request, num_local_tokens: int, *, counts: bool) -> None:
        """Look up a request in each tier.

        Args:
            request: the request.
            num_local_tokens: tokens that the device has.
            counts: whether the request reads the cache.
        """
        name, num_tokens = request.request_id, request.num_tokens
        hashes = self._hashes(request, 0, num_tokens)
        prompt_ends = where_prompts_end(self._model, request.num_prompt_tokens)
        running = _Running(len(hashes), 0, [])
        for at, tier in enumerate(self._tiers):
            tier.add(name, hashes)
            ends = {num_local_tokens}
            if counts:
                found = tier.lookup(name, num_local_tokens, num_tokens - 1) or 0
                self.hits[at] += found
                ends |= {num_local_tokens + found, tier.full_attention_hit(name)}
                if found:
                    tier.restart(name)  # a load makes its request recent
                else:
                    tier.release(name)
            running.ends.append(prompt_ends | ends - {0})
        self._running[name] = running

    def computed(self, request: Request, num_tokens: int) -> None:
        """Store what a request has computed: its first tokens."""
        running = self._running.get(request.request_id)
        if running is None:
            return
        unit = self._model.tokens_per_hit
        begin, end = running.num_stored, num_tokens // unit * unit
        if end <= begin:
            return
        running.num_stored = end
        new_hashes = self._hashes(request, running.num_hashes, num_tokens)
        running.num_hashes += len(new_hashes)
        for tier, ends in zip(self._tiers, running.ends, strict=True):
            ids, offsets = self._blocks(begin, num_tokens, request.num_prompt_tokens, ends)
            job = tier.store([request.request_id], [end], ids, offsets, new_hashes=[new_hashes])
            if job is not None:
                tier.complete(job.job_id)

    def finished(self, request: Request) -> None:
        """Make a request recent, and forget it."""
        if self._running.pop(request.request_id, None) is not None:
            for tier in self._tiers:
                tier.finish(request.request_id)

    def emptied(self) -> None:
        """Empty all tiers. What runs is not stored any more."""
        for tier in self._tiers:
            for name in self._running:
                tier.finish(name)
            tier.reset()
        self._running.clear()

    def halve(self) -> None:
        """Halve the weight of all hits."""
        self.hits = [number / 2 for number in self.hits]

    def _hashes(self, request: Request, begin: int, num_tokens: int) -> Sequence[bytes]:
        """Return the hashes from number `begin` to those of `num_tokens` tokens."""
        stride = self._model.vllm_hashes_per_hash
        hashes: Sequence[bytes] = request.block_hashes
        end = num_tokens // self._model.tokens_per_hash * stride
        return hashes[(begin + 1) * stride - 1 : end : stride]

    def _blocks(
        self, begin: int, num_tokens: int, num_prompt: int, ends: set[int]
    ) -> tuple[Ids, list[int]]:
        """Return ids for the blocks of these tokens, group by group; 0 where nothing is stored.

        In the mode "align" vLLM has states of a prompt only where its steps end. An answer has one
        token in each step.
        """
        parts: list[Ids] = []
        offsets = [0]
        unit = self._model.tokens_per_hit
        end = num_tokens // unit * unit
        for group in self._model.groups:
            size = group.block_size
            first, last = begin // size, end // size
            interval = self._interval
            is_sparse = isinstance(group, StateSpace) and not self._has_all_states
            if keeps_all(group) or (interval is None and not is_sparse):
                part = np.ones(last - first, dtype=np.int32)
            else:
                part = np.zeros(last - first, dtype=np.int32)
                num_needed, num_dropped = num_blocks_needed(group, size), num_blocks_dropped(group)
                step = size if interval is None else interval
                regular: Iterable[int] = range(step, end + 1, step) if step else ()
                if is_sparse:
                    regular = [one for one in regular if one == num_tokens or one > num_prompt]
                for one in (*ends, *regular):
                    stop = one // size - first
                    part[max(0, stop - num_needed) : max(0, stop + num_dropped)] = 1
            parts.append(part)
            offsets.append(offsets[-1] + len(part))
        ids = np.concatenate(parts)
        # Any distinct ids will do, because the copies end at once.
        return ids * np.arange(1, len(ids) + 1, dtype=np.int32), offsets


def keeps_all(group: Group) -> bool:
    """Return whether vLLM keeps each block of a group, wherever a hit may end."""
    return isinstance(group, FullAttention | ChunkedLocal)


def where_prompts_end(model: Model, num_prompt_tokens: int) -> set[int]:
    """Return the tokens at which vLLM lets a hit of a later prompt with this beginning end."""
    unit = model.tokens_per_hit
    again = (num_prompt_tokens - 1) // unit * unit  # one token is left to compute
    if not any(map(num_blocks_dropped, model.groups)):
        return {again}
    longer = num_prompt_tokens // unit * unit
    return {max(0, again - unit), max(0, longer - unit)}


def num_blocks_dropped(group: Group) -> int:
    """Return the blocks after the end of a hit that a draft model needs of a group."""
    return int(isinstance(group, FullAttention | SlidingWindow) and group.drops_last_block)


def num_blocks_needed(group: Group, block_size: int) -> int:
    """Return the blocks of this size before the end of a hit that it needs of a group."""
    if isinstance(group, SlidingWindow):
        return -(-(group.window - 1) // block_size)
    return 1
