"""The hit ratios that host tiers of several sizes would have, from the lookups of a server.

What a real tier counts and keeps, and so what counts here:

- A request counts once, when vLLM first admits it. Its lookup covers the blocks that a hit can
  bring: all whole blocks, with one token left to compute. Blocks that the device has are hits at
  every size, 0 included.
- The blocks of a prompt enter the tier when they are computed. Those that the tier has become most
  recent when the request is admitted. When the request ends, its whole chain does, generated blocks
  included, tail before root.
- The tier stores every block (eager, lru). Hints of a request with `store: false` are respected.

One group of full attention makes this exact while the curve watches every key. For a model with
windows or states, `ShadowSlots` keeps the accounting of each size, as far as its memory allows. The
curve estimates the others: hits end only at the `Checkpoints`, and slots are converted to blocks
with the mean number of slots that a block took (`_slots_per_key`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Final

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from kvstow import HitCurve
from kvstow.observability.metrics import SHADOW_KEY
from kvstow.vllm.hints import Hints
from kvstow.vllm.model import Model
from kvstow.vllm.options import Options
from kvstow.vllm.requests import in_both
from kvstow.vllm.shadow_slots import (
    SLOT_BYTES,
    ShadowSlots,
    keeps_all,
    num_blocks_dropped,
    num_blocks_needed,
    where_prompts_end,
)

# Enough to be exact for 400,000 distinct blocks. `ShadowSlots` may take as much again.
CURVE_BYTES: Final = 32 << 20
# Blocks that no request used for so many half-lives are forgotten.
KEPT_TURNS: Final = 24
# After so many half-lives without a call, earlier lookups weigh nothing.
MAX_TURNS: Final = 64
FACTORS: Final = (0.5, 1, 2, 4, 8)
MAX_RETAINED: Final = 1 << 16
_UNBOUNDED: Final = 1 << 62


class ShadowTier:
    """Host tiers of several sizes without memory: what they would hit.

    Attributes:
        num_slots: host slots of a tier as large as the options say; 0 until the ranks have reported
            it (`resize`). No ratio is known before.
    """

    def __init__(  # noqa: PLR0913 - what vLLM's configuration says, and a clock for tests
        self,
        model: Model,
        options: Options,
        *,
        world_size: int,
        retention_interval: int | None,
        has_all_states: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with an empty tier.

        Args:
            model: the model, with the tokens of vLLM's hashes.
            options: the user's options, which give the sizes.
            world_size: ranks that share the bytes.
            retention_interval: the tokens between the windows or states that vLLM retains; 0: only
                those at which a prompt ends or parts from others; None: all.
            has_all_states: whether a step keeps the state after each block, and not only the last.
            clock: seconds, monotonic.
        """
        self.num_slots = 0
        self._curve = HitCurve(max_bytes=CURVE_BYTES)
        self._model, self._retention_interval = model, retention_interval
        self._has_all_states = has_all_states
        self._slots: ShadowSlots | None = None
        self._tokens_per_key = model.tokens_per_hit
        self._num_dropped = 0
        self._options = options
        total_bytes = options.total_bytes(model.slot_stride_bytes, world_size)
        self._tier_gib = total_bytes / (1 << 30)
        self._gib = options.observe_gib or self._tier_gib
        self._checkpoints = Checkpoints(model, retention_interval)
        self._half_life_s = options.observe_half_life_s
        self._clock = clock
        self._turn_began = clock()
        # Weighed as the curve weighs lookups.
        self._past_s = self._num_hits = self._num_lookups = 0.0
        self._num_new_keys = self._num_window_slots = 0.0
        self._computing: dict[str, tuple[Request, int]] = {}
        # The requests of the last step, of which vLLM had not counted the tokens yet.
        self._scheduled: Collection[str] = ()

    def bind(self, manager: KVCacheManager) -> None:
        """Take vLLM's accounting, before the first request: hits of drafts drop a block."""
        self._model = model = self._model.bound(manager)
        self._checkpoints = Checkpoints(model, self._retention_interval)
        unit = model.tokens_per_hit
        # A smaller block costs a hit only where the other groups have no more than the hit.
        of_units = (group for group in model.groups if group.block_size == unit)
        self._num_dropped = max(map(num_blocks_dropped, of_units), default=0)

    def admitted(self, request: Request, num_local_tokens: int, num_external_tokens: int) -> None:
        """Count a request that vLLM admits for the first time."""
        self._advance()
        if self._stores(request):
            self._computing[request.request_id] = request, request.num_tokens
        is_counted = not request.skip_reading_prefix_cache
        if self._slots is not None:
            self._slots.admitted(request, num_local_tokens, counts=is_counted)
        if not is_counted:
            return
        # Where hits drop a block, one of so many blocks needs the block after it, too.
        num_dropped = self._num_dropped
        keys = self._model.hit_hashes(request, request.num_tokens - (not num_dropped))
        num_local = num_local_tokens // self._tokens_per_key
        ends, asked = self._checkpoints.ends(keys), keys[num_dropped:]
        num_known = self._curve.lookup(asked, num_local, ends=ends)
        self._curve.insert(keys[:num_known])
        self._num_window_slots += self._checkpoints.retain(keys, num_known)
        self._num_hits += num_local + num_external_tokens // self._tokens_per_key
        self._num_lookups += len(asked)

    @property
    def is_computing(self) -> bool:
        """Whether a prompt was not computed when `stepped` looked last."""
        return bool(self._computing)

    def stepped(self, scheduled: Collection[str]) -> None:
        """Insert the prompts that are computed. Call it when vLLM has scheduled a step.

        Args:
            scheduled: the ids of the requests of the step. Only those of the last step have moved
                on since, while thousands may be loading.
        """
        candidates = in_both(self._computing, self._scheduled)
        self._scheduled = scheduled
        for request_id in candidates:
            request, num_tokens = self._computing[request_id]
            if request.num_computed_tokens >= num_tokens:
                del self._computing[request_id]
                self._insert(request, num_tokens)
            elif self._slots is not None:
                self._slots.computed(request, request.num_computed_tokens)

    def finished(self, request: Request) -> None:
        """Insert what a request has computed, and make it most recent."""
        self._computing.pop(request.request_id, None)
        if self._stores(request):
            num_computed = request.num_computed_tokens - request.num_in_flight_tokens
            if self._options.offload_prompt_only:
                num_computed = min(num_computed, request.num_prompt_tokens)
            self._insert(request, num_computed)
        if self._slots is not None:
            self._slots.finished(request)

    def emptied(self) -> None:
        """Forget all blocks, because a reset empties the tier. What was counted stays."""
        self._curve.clear()
        if self._slots is not None:
            self._slots.emptied()
        self._checkpoints.clear()
        self._computing.clear()

    def resize(self, num_slots: int) -> None:
        """Take the slots of a tier as large as the options say.

        Requests that vLLM has admitted before have met an empty tier of any size.
        """
        if num_slots == self.num_slots:
            return
        self.num_slots = num_slots
        if len(self._model.groups) == 1 or not num_slots:
            return
        # Small sizes come first. The curve is farthest off for them.
        room = CURVE_BYTES // SLOT_BYTES
        sums = accumulate(self._sizes())
        sizes = [size for size, total in zip(self._sizes(), sums, strict=True) if total <= room]
        interval, has_all_states = self._retention_interval, self._has_all_states
        self._slots = ShadowSlots(self._model, interval, sizes, has_all_states=has_all_states)
        for request, _ in self._computing.values():
            self._slots.admitted(request, 0, counts=False)

    def _sizes(self) -> list[int]:
        """Return the slots of the sizes that are reported."""
        slots_per_gib = self.num_slots / self._tier_gib
        return [max(1, int(self._gib * factor * slots_per_gib)) for factor in FACTORS]

    def gauges(self) -> Mapping[str, float]:
        """Return the statistics that are known, by key; sizes follow the key of the ratios."""
        self._advance()
        seconds = self._past_s + self._clock() - self._turn_began
        found = {"shadow_window_seconds": seconds, "shadow_sampling_rate": self._curve.rate}
        slots_per_key = self._slots_per_key()
        # Without full attention no block takes a slot until a prompt has been computed.
        if not (self.num_slots and self._num_lookups and slots_per_key):
            return found
        capacities = [int(size / slots_per_key) for size in self._sizes()]
        ratios: list[float] = self._curve.hit_ratios([0, *capacities, _UNBOUNDED]).tolist()
        if self._slots is not None:
            for at, hits in enumerate(self._slots.hits, 1):
                ratios[at] = ratios[0] + hits / self._tokens_per_key / self._num_lookups
            ratios[-1] = max(ratios)
        labels = ["0", *(f"{self._gib * factor:.6g}" for factor in FACTORS), "inf"]
        for label, ratio in zip(labels, ratios, strict=True):
            found[SHADOW_KEY + label] = ratio
        found["shadow_hit_ratio_error"] = float(self._curve.errors(capacities).max())
        found["hit_ratio"] = self._num_hits / self._num_lookups
        return found

    def _insert(self, request: Request, num_tokens: int) -> None:
        keys = self._model.hit_hashes(request, num_tokens)
        if self._slots is not None:
            self._slots.computed(request, num_tokens)
        before = self._curve.num_unique
        self._curve.insert(keys)
        self._num_new_keys += max(0, self._curve.num_unique - before)
        for end in where_prompts_end(self._model, request.num_prompt_tokens):
            boundary = end // self._tokens_per_key
            self._num_window_slots += self._checkpoints.retain(keys, boundary)

    def _slots_per_key(self) -> float:
        mean = self._num_window_slots / self._num_new_keys if self._num_new_keys else 0.0
        return self._checkpoints.slots_per_key + mean

    @staticmethod
    def _stores(request: Request) -> bool:
        return Hints.read(request.kv_transfer_params, lambda *_: None).store

    def _advance(self) -> None:
        """Begin a turn of the curve for each half-life that has passed."""
        now, half_life_s = self._clock(), self._half_life_s
        num_turns = int((now - self._turn_began) // half_life_s)
        for _ in range(min(num_turns, MAX_TURNS)):
            self._curve.turn(KEPT_TURNS)
            self._past_s = (self._past_s + half_life_s) / 2
            self._num_hits /= 2
            self._num_lookups /= 2
            self._num_new_keys /= 2
            self._num_window_slots /= 2
            if self._slots is not None:
                self._slots.halve()
        self._turn_began += num_turns * half_life_s


class Checkpoints:
    """Where hits of a model can end, and how many slots its blocks take.

    With full attention only, hits end at each block. vLLM retains windows and states for a hit at
    the end of a prompt and where prompts part, and perhaps at regular intervals.

    Attributes:
        slots_per_key: slots of each block, whatever hits end there.
    """

    def __init__(self, model: Model, retention_interval: int | None) -> None:
        """Retain nothing yet; the interval is that of `ShadowTier`."""
        unit = model.tokens_per_hit
        self.slots_per_key = 0.0
        self._interval = (retention_interval or 0) // unit
        # By the numbers of blocks before and after its end that a hit needs: the slots of such a
        # block, and the blocks that are retained.
        self._retained: dict[tuple[int, int], tuple[float, dict[bytes, None]]] = {}
        for group in model.groups:
            per_key = unit / group.block_size
            if keeps_all(group) or retention_interval is None:
                self.slots_per_key += per_key
                continue
            num_before, num_after = num_blocks_needed(group, unit), num_blocks_dropped(group)
            needed = num_before, num_after
            if self._interval:
                num_needed = num_before + num_after
                self.slots_per_key += per_key * min(1.0, num_needed / self._interval)
            others, retained = self._retained.get(needed, (0.0, {}))
            self._retained[needed] = others + per_key, retained

    def ends(self, keys: Sequence[bytes]) -> list[int] | None:
        """Return the numbers of blocks at which a hit can end; None: at each."""
        if not self._retained:
            return None
        ends = set(range(1, len(keys) + 1))
        for (num_before, num_after), (_, retained) in self._retained.items():
            lengths = accumulate(
                map(retained.__contains__, keys), lambda length, is_in: (length + 1) * is_in
            )
            ends.intersection_update(
                end
                for end, length in enumerate(lengths, 1 - num_after)
                if length >= min(num_before, end) + num_after
            )
        if self._interval:
            ends.update(range(self._interval, len(keys) + 1, self._interval))
        return sorted(ends)

    def retain(self, keys: Sequence[bytes], end: int) -> float:
        """Retain what a hit of `end` blocks needs; return the slots that this takes."""
        num_slots = 0.0
        for (num_before, num_after), (per_key, retained) in self._retained.items():
            for key in keys[max(0, end - num_before) : end + num_after]:
                num_slots += per_key * (key not in retained)
                retained.pop(key, None)
                retained[key] = None
            while len(retained) > MAX_RETAINED:
                del retained[next(iter(retained))]
        return num_slots

    def clear(self) -> None:
        """Forget all that is retained."""
        for _, retained in self._retained.values():
            retained.clear()
