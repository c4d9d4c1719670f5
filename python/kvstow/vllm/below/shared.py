"""The scheduler half of the shared tier: it asks the store what it has, once for each request.

```
lookup -- first time --> ask the store -- answer, or too late --> claim what it has --> lookup
            pending ........................................ then as for a disk: promote, load
```

The index of `OffloadScheduler` has what the store is known to have: what this server has put there,
and what a question has found. A claim that is wrong costs a read, and never a wrong block, because
the tier proves each block that it reads.

The names of the blocks in the store depend on the fingerprint of the rank, on the start of vLLM's
hash chains, and on the salt. Every order to the ranks has the salt, so there is no moment at which
a job of new blocks uses an old name.

How a wrong block could be served, and what prevents it:

- Weights change in place. Each reset that empties the host tier draws a random salt, drops the
  index and fences questions under way. So this server reads only what it computes from then on, and
  shares nothing until it starts again. Nothing here sees what it puts between a change and the
  reset: the page of the shared tier asks for a reset before the change.
- Two servers have unequal hashes of equal tokens, or equal hashes of unequal tokens: the start of
  the chains and the name of the algorithm are part of the names. A start that is random is private.
- The fingerprint does not cover the weights (`Identity.why_private`): the salt is random.
- A request asks, and another one with its id gets the answer: answers are kept by request object.
- What the jobs could do wrong: `lower_tier`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final
from weakref import WeakKeyDictionary

from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from kvstow import OffloadScheduler
from kvstow.observability.events import BlockEvent
from kvstow.tiers import Fingerprint
from kvstow.tiers.asking import Answer, Asker, Key, ask_tier
from kvstow.tiers.claims import CLAIMS_PER_SLOT, Lack
from kvstow.tiers.namespace import NAMESPACE_BYTES, salted
from kvstow.tiers.shared import of_shared
from kvstow.tiers.tier import MODES
from kvstow.transfer import HostArena
from kvstow.vllm.below.lower_tier import LowerTier
from kvstow.vllm.below.shared_worker import opened
from kvstow.vllm.messages import LowerOrders, LowerReport
from kvstow.vllm.options import Options

logger = logging.getLogger("vllm." + __name__)

# The arena of a client that moves no blocks.
_NO_BYTES: Final = 4096


class Questions:
    """Asks the store what requests lack, under the names that this server uses now.

    Attributes:
        salt: a part of all names; empty until `begin`.
        namespace: whose blocks the store is asked for: those of the first rank.
    """

    def __init__(self, options: Options) -> None:
        """Begin to connect, long before the first request, which would wait for it.

        Raises:
            ConfigError: an option does not fit, or a library is missing.
        """
        self.salt = self.namespace = b""
        # The tokens up to which a request has asked, and for what; None once it is answered, or if
        # there was nothing to ask.
        self._asked: WeakKeyDictionary[Request, tuple[int, Lack | None]] = WeakKeyDictionary()
        self._client = _Client(self, options)
        self._asker = Asker(lambda: self._client, wait_s=options.shared_ask_timeout_s)
        self._asker.connect()

    def begin(self, ranks: Mapping[int, LowerReport]) -> None:
        """Choose the names, unless a reset has. vLLM has chosen the start of its hash chains."""
        if not ranks:
            return
        if not self.salt:
            is_private = any(report.is_private for report in ranks.values())
            self.salt = _random() if is_private else hash_start()
        self._name(ranks)
        for rank, name in self.namespaces(ranks).items():
            logger.info("kvstow: rank %d shares blocks under the fingerprint %s", rank, name.hex())

    def reset(self, ranks: Mapping[int, LowerReport]) -> None:
        """Take new names. A question of before finds nothing, and is not asked again."""
        self.salt = _random()
        if ranks:
            self._name(ranks)
        self._asker.reset()  # after the new name: see `_Client`

    def _name(self, ranks: Mapping[int, LowerReport]) -> None:
        self.namespace = min(self.namespaces(ranks).items())[1]

    def namespaces(self, ranks: Mapping[int, LowerReport]) -> dict[int, bytes]:
        """Return what the names of each rank's blocks begin with."""
        return {rank: salted(report.fingerprint, self.salt) for rank, report in ranks.items()}

    def is_open(
        self, offload: OffloadScheduler, request: Request, num_local_tokens: int, end: int
    ) -> bool:
        """Whether the store is still to say what it has of a request. Ask it the first time.

        Its answer claims blocks. Ask nothing while the tier is not on.
        """
        if offload.disk_mode != "on":
            return False
        before = self._asked.get(request)
        if before is not None and before[0] == end:
            asked = before[1]
        else:  # the first time, or a session goes on, or was preempted
            asked = Lack.ask(self._asker, offload, request.request_id, num_local_tokens, end)
            self._asked[request] = end, asked
        if asked is None:
            return False
        if not asked.question.poll():
            return True
        asked.claim(offload)
        self._asked[request] = end, None
        return False

    def stats(self) -> dict[str, int]:
        """Return what was asked and answered."""
        return self._asker.stats.named()

    def close(self) -> None:
        """Ask no more, and close the connection."""
        self._asker.close()
        self._client.close()


@dataclass
class StoreTier(LowerTier):
    """A tier whose lookups wait until the store has said what it has.

    Attributes:
        questions: to the store.
    """

    questions: Questions = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.questions = Questions(self.options)

    def close(self) -> None:
        """Ask no more, and close the connection."""
        self.questions.close()

    def _is_asking(self, request: Request, num_local_tokens: int, end: int) -> bool:
        """Whether the store is still to say what it has of a request."""
        assert self._offload is not None, "there is no lookup before `begin`"
        return self.questions.is_open(self._offload, request, num_local_tokens, end)


@dataclass
class SharedTier(StoreTier):
    """Asks the store, and lets the ranks put and get blocks under the names that it chooses."""

    name: ClassVar[str] = "shared"

    # -- the start and resets -----------------------------------------------------------------

    def num_blocks(self, num_host_blocks: int) -> int:
        """Return the number of blocks that the store may be known to have."""
        given = self.options.shared_index_blocks or CLAIMS_PER_SLOT * num_host_blocks
        return given if self._ranks else 0

    def begin(self, offload: OffloadScheduler) -> None:
        """Open the tier of a new scheduler, with names for its blocks."""
        super().begin(offload)
        self.questions.begin(self._ranks)
        if self._ranks:
            offload.set_disk("on")

    def reset(self) -> None:
        """Take new names; see `LowerTier.reset`."""
        self.questions.reset(self._ranks)
        if self._offload is not None and self._ranks:
            self._offload.set_disk("on")

    # -- steps --------------------------------------------------------------------------------

    def _orders(self, offload: OffloadScheduler, now: float) -> LowerOrders | None:
        """Return the jobs of a step, with the salt of their names."""
        planned = self._plan(offload, now)
        return LowerOrders(planned, salt=self.questions.salt) if planned else None

    def _advance(self, offload: OffloadScheduler) -> None:
        """Follow what the connections still do."""
        if self._modes:
            self._follow(offload)

    # -- figures ------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Return the counters and gauges of the shared tier."""
        if self._offload is None:
            return {}
        mode = self._offload.disk_mode
        own = {"shared_mode": 0 if mode is None else MODES.index(mode)}
        return of_shared(self._offload.disk_stats()) | own | self.questions.stats()

    def take_events(self) -> list[BlockEvent]:
        """Return nothing: the blocks of a store are not this server's."""
        super().take_events()
        return []


class _Client:
    """Asks the store under the name that the scheduler half has now, on the asker's thread.

    A question from before a reset may be asked under the new name, and its answer does not count. A
    question from after a reset finds the new name.
    """

    def __init__(self, questions: Questions, options: Options) -> None:
        """Open a tier that moves no bytes; see `Questions`."""
        self._questions = questions
        self._arena = HostArena(1, _NO_BYTES)
        store = replace(options.store, num_threads=1, max_queued_bytes=_NO_BYTES, segment_bytes=0)
        self._tier = opened(store, self._arena, Fingerprint({"asks": "only"}))

    def found(self, keys: Sequence[Key], limit_s: float) -> Answer:
        """Return which of the keys the first rank has put into the store."""
        if self._questions.namespace:  # it connects before it has one
            self._tier.rename(self._questions.namespace)
        return ask_tier(self._tier, keys, limit_s)

    def close(self) -> None:
        """Close the connection."""
        self._tier.close()
        self._arena.close()


def hash_start() -> bytes:
    """Return the start of vLLM's hash chains in this process: 16 bytes or more."""
    start: bytes = kv_cache_utils.NONE_HASH
    return start


def _random() -> bytes:
    return os.urandom(NAMESPACE_BYTES)
