"""The scheduler half: turns what vLLM schedules into stores and loads, and keeps its blocks alive.

Which part answers which call of vLLM's scheduler:

```
schedule()             lookup ............ get_num_new_matched_tokens      loads
                       allocated ......... update_state_after_alloc        loads: plans a load
                       end of the step ... build_connector_meta            steps: hands out jobs
update_from_output()   finished .......... request_finished_all_groups     steps: last stores
                       workers' reports .. update_connector_output         steps: ends jobs, stores
no room for a request  may it preempt? ... has_pending_block_frees         stores: gathered ones
nothing left to run    may it rest? ...... has_pending_push_work           sleep
reset of the caches    ................... reset_cache                     sleep

loads, steps, sleep -> stores -> requests, transfers -> tracked, tier -> below
```

A block is stored under a key only if it holds the KV of the key's tokens. vLLM keys blocks when it
grants them, and it may change a request's tokens afterwards. What vLLM does, and what guards here:

- A streaming session drops its last sampled token and the token's hash. Only hashes of computed
  tokens are reported, and a full-attention block is stored only where vLLM's own block has its key
  (`TrackedRequest.num_cached_tokens`). vLLM before 0.32 keeps the hash: sessions are not stored.
- Reported hashes differ from the request's: they are reported again (`TrackedRequest.new_hashes`).
- Drafts are rejected, sessions go back, loads of other connectors fail: `num_computed_tokens`
  shrinks. It is read when the outcome of the step is known, less the tokens of steps under way.
- Another connector fails to load blocks in the step that reads them. vLLM lets one request compute
  them again, and counts them as computed for others (`Requests.distrust`). Until the outcome of its
  first step is known, nothing of a request is stored (`TrackedRequest.num_cached_tokens`).
- Asynchronous scheduling counts tokens that are not sampled yet. They are computed tokens of steps
  under way, have no hash, and do not count either (`TrackedRequest.num_cached_tokens`).
- A request is aborted, finished or preempted while its steps are under way: those do not count, and
  its blocks are not stored. Those that another connector loads lose their keys, and so do those
  that it computed from them (`Requests.evict_unproven`, `Steps.evict_unwritten`).
- vLLM preempts a request in the step that granted it blocks: they lose their keys
  (`Steps.evict_unwritten`).
- With EAGLE vLLM may key a recurrent state that no step writes: it loses its key
  (`Steps.evict_skipped`).
- vLLM takes a block and caches it again, perhaps under an equal key: lazy mode offers a block only
  if it was computed since (`LazyQueue`).
- A reset empties vLLM's pool, the tier, or both, while requests run: what they computed before it
  is not stored (`TrackedRequest.is_stale`). A preempted request starts over (`Loads.lookup`).
- The weights change while vLLM sleeps, after the reset, or vLLM resets its own pool alone, which it
  reports to no connector: the first lookup of all, and after a reset of either kind, reads the
  version of the weights once more (`Sleep.compare_weights`).
- A reset empties the tier while requests hold vLLM's pool, which keeps old blocks. Later requests
  hit them there, and the tier stores them: the reset of the pool empties the tier again (`Sleep`).
- A draft model (EAGLE, MTP) computes a token from the token after it, which the hash of a block's
  last token does not cover. So where vLLM drops the last block of a hit, a hit on the host ends one
  block before the blocks that are found (`HostTier.bind`).
- A diffusion model guesses tokens and computes their KV in one more step. The guesses of a request
  that ends before it lose their keys, and only its prompt is stored (`Requests.evict_guessed`).
- The boundary of a shared prefix (`Loads.lookup`) decides only where vLLM ends a chunk and which
  blocks it hashes. It is the end of a block of the request's own prompt.
- The hashes of a request may be those of other KV, because they leave out a second input at one
  place, which positions of a prompt are tokens, or how a model treats media (`media`). Nothing is
  stored or loaded for such a request (`tracked.has_ambiguous_hashes`). vLLM's own cache still
  serves it.
- Structured output, adapters and prompt embeddings change no token that was reported. They are part
  of the hashes or of the sampling. Weights that change under one adapter's name: `Adapters`.
- vLLM uses a request id again only after `finished`, and after the end of its load was reported.
  The end of a late load is not reported again (`Transfer.is_late`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

from vllm.v1.request import Request

from kvstow import OffloadScheduler
from kvstow.vllm.adapters import Adapters
from kvstow.vllm.events import HostEvents
from kvstow.vllm.loads import Loads
from kvstow.vllm.requests import Requests
from kvstow.vllm.sleep import Sleep
from kvstow.vllm.steps import Steps
from kvstow.vllm.stores import Stores
from kvstow.vllm.tier import HostTier
from kvstow.vllm.transfers import Transfers
from kvstow.vllm.weights import WeightsVersion

logger = logging.getLogger("vllm." + __name__)

_Args = TypeVarTuple("_Args")
_Answer = TypeVar("_Answer")


class SchedulerHalf:
    """Everything that runs beside vLLM's scheduler, under one guard.

    An error in this half ends the tier, not the server. What the tier says may be wrong from then
    on, so nothing is looked up or stored any more. Requests that wait for a load compute. Blocks
    that jobs hold come free as the workers report.

    The connector calls the attributes that `__init__` sets: functions of the parts, with the guard.
    """

    def __init__(
        self,
        tier: HostTier,
        *,
        stores_sessions: bool = True,
        host_events: HostEvents | None = None,
    ) -> None:
        """Wait for vLLM's accounting (`bind`), and for the ranks' capacities: workers report them.

        Args:
            tier: the host tier, which is still absent.
            stores_sessions: the hashes of a session (a resumable request) are those of the tokens
                that vLLM keeps of it.
            host_events: gets the content of the blocks that may be stored.
        """
        self.tier = tier
        self.requests = Requests(tier, stores_sessions)
        self.transfers = Transfers(tier)
        parts = tier, self.requests, self.transfers
        stores = Stores(*parts, host_events)
        adapters = Adapters()
        self.loads = Loads(*parts, adapters, sees_all_blocks=host_events is not None)
        self.stores = stores
        self.steps = Steps(*parts, stores)
        version = WeightsVersion(tier.options.weights_version_path)
        self.sleep = Sleep(*parts, stores, adapters, version)
        self.bind = tier.bind
        self.create_tier = tier.create
        self.holds_freed_blocks = self._guard(self._holds_freed_blocks)
        self.lookup = self._guard(self._lookup)
        self.allocated = self._guard(self.loads.allocated)
        self.build = self._guard(self.steps.build)
        self.processed = self._guard(self.steps.processed)
        self.finished = self._guard(self.steps.finished)
        self.may_rest = self._guard(self.sleep.may_rest)
        self.reset = self._guard(self.sleep.reset)
        self.stats = self._guard(self._stats)
        self.take_events = self._guard(tier.take_events)
        self.take_transfer_events = self._guard(tier.take_transfer_events)
        self.close = self._guard(tier.end_all)

    @property
    def offload(self) -> OffloadScheduler | None:
        """The accounting of the host tier; None unless the tier is on."""
        return self.tier.offload

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host tier; 0 unless it is on."""
        return 0 if self.tier.offload is None else self.tier.offload.num_host_blocks

    def _stats(self) -> dict[str, int]:
        """Return the counters and gauges of the tier, or what a tier that is off still holds."""
        return self.transfers.remains() if self.tier.is_off else self.tier.stats()

    def _lookup(self, request: Request, num_local_tokens: int) -> int | None:
        """Look up a prefix as `Loads.lookup` does, in a tier of the present weights."""
        self.sleep.compare_weights()
        return self.loads.lookup(request, num_local_tokens)

    def _holds_freed_blocks(self) -> bool:
        """Return what `Transfers.holds_freed_blocks` does. vLLM preempts a request if it is not so.

        So first store what that request has computed: vLLM may give its blocks away at once.
        """
        self.stores.store_gathered()
        return self.transfers.holds_freed_blocks()

    def _guard(self, call: Callable[[*_Args], _Answer]) -> Callable[[*_Args], _Answer]:
        """Return `call`, which turns the tier off if it raises, and then runs again without a tier.

        Each guarded function may run again after any call that it makes has raised. An error that
        is raised without a tier comes from vLLM, and goes to vLLM. So does an interrupt.
        """

        @functools.wraps(call)
        def guarded(*args: *_Args) -> _Answer:
            try:
                return call(*args)
            except BaseException as error:
                if self.tier.is_off:
                    raise
                self._turn_off()
                if not isinstance(error, Exception):
                    raise
            return call(*args)

        return guarded

    def _turn_off(self) -> None:
        """Serve without the tier from now on, because of the error that is being handled.

        Each load in flight fails. A job that workers have, or get with the next step, ends when all
        ranks have reported it (`Steps.processed`).
        """
        logger.exception(
            "kvstow: the host tier is off because of the internal error below. Requests go on and "
            "recompute their prefixes. Restart the server to use the tier again, and please report "
            "the traceback"
        )
        self.tier.turn_off()
        self.transfers.give_up_loads()
