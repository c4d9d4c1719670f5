"""A connector that needs vLLM's handshake, like NIXL, and refuses metadata of other connectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)


@dataclass
class Hand(KVConnectorHandshakeMetadata):
    tp_rank: int


class Nothing(KVConnectorMetadata):
    pass


class HandshakeConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves nothing. `shaken` has the metadata that the scheduler side got."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.shaken: dict[int, KVConnectorHandshakeMetadata] | None = None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Hand(0) if self.role == KVConnectorRole.WORKER else None

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        if not all(isinstance(hand, Hand) for hand in metadata.values()):
            raise ValueError(f"expected this connector's own metadata, got {metadata}")
        self.shaken = metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Nothing()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None
