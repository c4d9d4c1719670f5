"""A connector that offers the first prompt within its step, and fails to load a block of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from tests.vllm.handshake_connector import HandshakeConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass
class Missing(KVConnectorMetadata):
    block_ids: set[int] = field(default_factory=set)


class FailingConnector(HandshakeConnector):
    """Loads nothing for one request, and says so of the first block. `offered` has its tokens."""

    offered: ClassVar[int] = 0

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._missing = Missing()

    def get_handshake_metadata(self) -> None:
        return None

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return max(0, FailingConnector.offered - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            FailingConnector.offered = 0
            self._missing.block_ids.add(blocks.get_block_ids()[0][0])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        missing, self._missing = self._missing, Missing()
        return missing

    def get_block_ids_with_load_errors(self) -> set[int]:
        if not self.has_connector_metadata():
            return set()
        missing = self._get_connector_metadata()
        assert isinstance(missing, Missing)
        return missing.block_ids
