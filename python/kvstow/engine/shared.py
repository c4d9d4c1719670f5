"""The shared tier of an engine: what any server of a fleet has computed.

The scheduler's index has what the store is known to have: what this engine has put there, and what
a question has found.

```
admit -- first time --> ask the store -- answer, or too late --> claim what it has --> lookup
            pending ........................................ then as for a disk: promote, load
```

How a wrong block could be served, and what prevents it:

- The store has the block of another model, of other weights, or under another key: the tier proves
  each block that it reads.
- A block from before a reset: a reset takes a new namespace, random unless the caller names the new
  weights. It drops the index, and fences questions under way. A put from before it ends under its
  own namespace.
- A request that runs across a named reset shares KV of two versions of the weights: the engine
  refuses to name them while a request holds blocks.
- A rank's part is missing: a block counts only if every rank has read its own.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar, Final

from kvstow._core import OffloadScheduler, StateError
from kvstow.arguments import check_seconds, checked_int
from kvstow.engine.blueprint import Blueprint
from kvstow.engine.disk import Disk
from kvstow.engine.disk_options import DiskOptions, fingerprints
from kvstow.engine.request import Request
from kvstow.engine.state import State
from kvstow.tiers.asking import DEFAULT_WAIT_S, Answer, Asker, Key, ask_tier
from kvstow.tiers.claims import CLAIMS_PER_SLOT, Lack
from kvstow.tiers.namespace import NAMESPACE_BYTES, salted
from kvstow.tiers.runner import TierRunner
from kvstow.tiers.shared import SharedStore, of_shared
from kvstow.tiers.tier import SharedTier
from kvstow.transfer import BlockLayout, HostArena

# How often `settle` looks for an answer.
_LOOK_S: Final = 0.0005


@dataclass(frozen=True, slots=True)
class SharedOptions(DiskOptions):
    """How an engine uses its shared tier.

    Attributes:
        index_blocks: slots in the index of what the store is known to have, 130 bytes each. None
            for 8 times as many as the host has.
        ask_timeout_s: the most seconds that a request waits for the store to say what it has.

    The other attributes are those of `DiskOptions`. Servers share blocks only if `identity` and
    `weights_version` are equal.
    """

    timeout_s: float | None = 5.0
    index_blocks: int | None = None
    ask_timeout_s: float = DEFAULT_WAIT_S

    def __post_init__(self) -> None:
        """Check what no other part checks."""
        DiskOptions.__post_init__(self)
        if self.index_blocks is not None:
            checked_int("index_blocks", self.index_blocks, 1, 2**31 - 2, "pass blocks, or None")
        check_seconds("ask_timeout_s", self.ask_timeout_s)


class _First:
    """Asks the store through the tier that the first rank has now. A wake opens another one."""

    def __init__(self, shared: Shared) -> None:
        # The thread of the asker has this object, and must not keep an engine that is dropped.
        self._shared: Shared = weakref.proxy(shared)

    def found(self, keys: Sequence[Key], limit_s: float) -> Answer:
        """Return which of the keys the store has."""
        return ask_tier(self._shared.first, keys, limit_s)

    def close(self) -> None:
        """Leave the tier to the jobs."""


class Shared(Disk):
    """Runs the jobs of an engine's shared tier, and asks the store what it has."""

    _name: ClassVar[str] = "shared"
    _is_shared: ClassVar[bool] = True

    def __init__(
        self,
        store: SharedStore,
        options: SharedOptions,
        blueprint: Blueprint,
        layouts: Sequence[Sequence[BlockLayout]],
        arenas: Sequence[HostArena],
    ) -> None:
        """Open a tier for each rank. They connect when the first job comes.

        Raises:
            ConfigError: the store's URL or an option is wrong, or a library is missing.
        """
        self._store = store
        self._num_claims = (
            options.index_blocks
            or CLAIMS_PER_SLOT * arenas[0].num_slots // blueprint.blocks_per_slot
        )
        self._salt = b""
        # What a request has asked for; None once it is answered, or if there was nothing to ask.
        self._asked: dict[str, tuple[Request, Lack | None]] = {}
        prints = fingerprints(options, blueprint.groups, layouts, blueprint.blocks_per_slot)
        super().__init__([], prints, options, arenas)
        self._asker = Asker(lambda: _First(self), wait_s=options.ask_timeout_s)

    @property
    def fingerprint(self) -> str:
        """The digits by which `kvstow tier` knows the blocks of the first rank."""
        return self._namespaces()[0].hex()

    @property
    def first(self) -> SharedTier:
        """The tier of the first rank.

        Raises:
            StateError: the tiers are closed.
        """
        if not self._shared_tiers:
            raise StateError("the shared tier is closed while the engine sleeps; wake it first")
        return self._shared_tiers[0]

    @property
    def _shared_tiers(self) -> list[SharedTier]:
        return [tier for tier in self._tiers if isinstance(tier, SharedTier)]

    def _namespaces(self) -> list[bytes]:
        digests = [print.digest for print in self._fingerprints]
        if not self._salt:
            return digests
        return [salted(digest, self._salt) for digest in digests]

    # -- what differs from a disk ----------------------------------------------------------------

    def _open(self, arenas: Sequence[HostArena]) -> None:
        with ExitStack() as opened:
            runners = [
                TierRunner(opened.enter_context(self._store.open(arena, fingerprint)))
                for fingerprint, arena in zip(self._fingerprints, arenas, strict=True)
            ]
            opened.pop_all()
        self._runners = runners
        self._rename()

    def _num_slots(self) -> int:
        return self._num_claims

    def _max_in_flight(self) -> int:
        """Return how many slots are moved at a time: no more puts than may wait for the store."""
        max_queued = self._store.max_queued_bytes // max(tier.slot_bytes for tier in self._tiers)
        return min(super()._max_in_flight(), max_queued)

    def _rename(self) -> None:
        # There is no tier if a wake could not open it. The next one gets the names that count then.
        for tier, namespace in zip(self._shared_tiers, self._namespaces(), strict=False):
            tier.rename(namespace)

    def _begin_generation(self) -> None:
        self._salt = self._new_salt()
        self._rename()
        self._forget_answers()

    def _new_salt(self) -> bytes:
        """Return what keeps the blocks apart from those of other weights of the same name."""
        return b"" if self._is_named else os.urandom(NAMESPACE_BYTES)

    def _forget_answers(self) -> None:
        self._asker.reset()
        self._asked.clear()

    def attach(self, state: State) -> None:
        """Let a new scheduler use the tier. It knows nothing yet of what the store has."""
        self._asked.clear()
        super().attach(state)

    def close(self) -> None:
        """Carry out every job, and close the connections."""
        self._asker.reset()
        super().close()

    def forget_all(self) -> None:
        """Forget the jobs that have not ended, because the engine is closed."""
        self._asker.close()
        super().forget_all()

    # -- questions -------------------------------------------------------------------------------

    def has_asked(
        self, state: State, request_id: str, num_local_tokens: int, max_tokens: int
    ) -> bool:
        """Ask the store once for a request. Return False until it has answered, or is late."""
        if not self._runners or self._mode == "off":
            return True
        request = state.requests[request_id]
        before = self._asked.get(request_id)
        # Another request may have had this id.
        if before is not None and before[0] is request:
            asked = before[1]
        else:
            self._forget_gone(state)
            asked = Lack.ask(self._asker, state.scheduler, request_id, num_local_tokens, max_tokens)
            self._asked[request_id] = request, asked
        if asked is None:
            return True
        if not asked.question.poll():
            return False
        self._asked[request_id] = request, None
        asked.claim(state.scheduler)
        return True

    def _forget_gone(self, state: State) -> None:
        """Keep the list of requests that have asked about as short as that of all requests."""
        if len(self._asked) > 2 * len(state.requests) + 8:
            known = state.requests
            self._asked = {name: asked for name, asked in self._asked.items() if name in known}

    def settle(self, state: State, now_s: float) -> None:
        """Wait for the answers to questions, and then for the jobs; see `Disk.settle`."""
        for _, asked in self._asked.values():
            while asked is not None and not asked.question.poll():
                time.sleep(_LOOK_S)
        super().settle(state, now_s)

    def drain(self, state: State, timeout_s: float | None) -> None:
        """Wait for every job; see `Disk.drain`. A late call may take its own time to end."""
        more_s = 2 * self._store.timeout_s
        super().drain(state, None if timeout_s is None else timeout_s + more_s)

    def stats(self, scheduler: OffloadScheduler) -> dict[str, float]:
        """Return what the scheduler, the store's client and the asker have counted."""
        return of_shared(super().stats(scheduler)) | self.question_stats()

    def question_stats(self) -> dict[str, int]:
        """Return what the asker has counted."""
        return self._asker.stats.named()
