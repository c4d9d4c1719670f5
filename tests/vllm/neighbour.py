"""A connector that loads random parts of prompts, within their step or not, and often fails.

It moves numbers of the simulated model: what it loads is right, and what it fails to load is not.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tests.vllm.handshake_connector import HandshakeConnector
from tests.vllm.places import place
from tests.vllm.simulated import Simulated
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.request import Request, RequestStatus

NOT_LOADED = -7


@dataclass
class World:
    """What both halves of the neighbour share, and how it behaves.

    Attributes:
        engine: the engine whose memory it writes.
        kind: "sync" for loads within a step, "async" for loads before it, or "mixed".
        idle: the share of lookups that find nothing.
        failing: the share of loads that fail.
        failing_now: the share of loads within a step that fail.
    """

    engine: Simulated
    dice: random.Random
    kind: str
    idle: float
    failing: float
    failing_now: float
    counts: Counter[str] = field(default_factory=Counter)


@dataclass
class Load:
    request: Request
    start: int
    end: int
    tables: Sequence[Sequence[Any]]
    num_polls: int = 0  # before it ends


@dataclass
class Orders(KVConnectorMetadata):
    now: list[Load] = field(default_factory=list)
    later: list[Load] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)


class Neighbour(HandshakeConnector):
    """Stands beside kvstow's connector in a `MultiConnector`."""

    world: ClassVar[World]

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._offers: dict[str, tuple[int, bool]] = {}
        self._orders = Orders()
        self._loading: list[Load] = []
        self._sending: list[str] = []
        self._invalid: set[int] = set()

    # -- scheduler ----------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        dice, world = self.world.dice, self.world
        self._offers.pop(request.request_id, None)
        most = request.num_tokens - num_computed_tokens
        if dice.random() < world.idle or most < 2:
            return 0, False
        if dice.random() < 0.05:
            return None, False
        is_async = world.kind == "async" or (world.kind == "mixed" and dice.random() < 0.5)
        if is_async and request.resumable and request.num_preemptions:
            return 0, False  # vLLM then computes wrong tokens, with any connector
        num_tokens = dice.choice([dice.randrange(1, most + is_async), most - 1])
        if dice.random() < 0.7:
            num_tokens -= num_tokens % 16
        self._offers[request.request_id] = num_computed_tokens, is_async
        return num_tokens, is_async and num_tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            start, is_async = self._offers.pop(request.request_id)
            tables = [list(table) for table in blocks.blocks]
            num_polls = self.world.dice.randrange(4)
            load = Load(request, start, start + num_external_tokens, tables, num_polls)
            (self._orders.later if is_async else self._orders.now).append(load)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        orders, self._orders = self._orders, Orders()
        return orders

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold the blocks of some requests for a while, as one that stores them would."""
        has_run = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        is_held = has_run and self._chance(0.3)
        if is_held:
            self._orders.sent.append(request.request_id)
        return is_held, None

    def _chance(self, share: float) -> bool:
        return self.world.idle < 1 and self.world.dice.random() < share

    # -- worker -------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Orders)
        self._loading += connector_metadata.later
        self._sending += connector_metadata.sent

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        for load in orders.now:
            missing = self._missing(load, self.world.failing_now)
            self._write(load, missing)
            self._invalid |= {load.tables[0][at].block_id for at in missing}

    def _missing(self, load: Load, failing: float) -> set[int]:
        """Return which blocks of the request a load does not bring, by their index."""
        dice, counts = self.world.dice, self.world.counts
        counts["loads"] += 1
        if dice.random() >= failing:
            return set()
        counts["failed"] += 1
        indices = range(load.start // 16, -(-load.end // 16))
        missing = set(dice.sample(indices, dice.choice([1, 1, len(indices)])))
        if dice.random() < 0.5:
            missing |= {at for at in indices if at > min(missing)}
        return missing

    def _write(self, load: Load, missing: set[int]) -> None:
        engine, request = self.world.engine, load.request
        values = engine.values(list(request.all_token_ids), request.cache_salt)
        for group, (table, spec) in enumerate(zip(load.tables, engine.specs, strict=True)):
            for at in range(load.start, load.end):
                block, where = place(spec, table, at)
                if not block.is_null:
                    value = NOT_LOADED if at // 16 in missing else values[at] ^ group
                    engine.kv[16][block.block_id, where] = value

    def get_block_ids_with_load_errors(self) -> set[int]:
        found, self._invalid = self._invalid, set()
        return found

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """End loads, of which some fail as a whole and others name the blocks that they lack."""
        due = [load for load in self._loading if load.num_polls == 0]
        self._loading = [load for load in self._loading if load.num_polls]
        for load in self._loading:
            load.num_polls -= 1
        failed = set()
        for load in due:
            missing = self._missing(load, self.world.failing)
            self._write(load, missing)
            if missing and (len(load.tables) > 1 or self._chance(0.3)):
                failed.add(load.request.request_id)
            else:
                self._invalid |= {load.tables[0][at].block_id for at in missing}
        sent = {name for name in self._sending if self.world.idle == 1 or self._chance(0.4)}
        self._sending = [name for name in self._sending if name not in sent]
        return KVConnectorTransferResults(
            finished_sending=sent,
            finished_recving={load.request.request_id for load in due},
            failed_recving=failed,
        )
