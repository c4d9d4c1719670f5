"""The host tier's block events in vLLM's own form, which has tokens and adapters beside hashes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_events
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import (
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from kvstow import BlockRemoved, BlockStored

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvstow.observability.events import BlockEvent

_STORED_FIELDS = frozenset(kv_events.BlockStored.__struct_fields__)
_REMOVED_FIELDS = frozenset(kv_events.BlockRemoved.__struct_fields__)


@dataclass(frozen=True, slots=True)
class _Content:
    """The tokens of a block, and what else its hash covers."""

    token_ids: list[int]
    extra_keys: tuple[Any, ...] | None
    lora_id: int | None
    lora_name: str | None
    parent: bytes | None


class HostEvents:
    """Converts events, and remembers the content of blocks from the plan of their store on.

    When a store lands, the request may be gone, so its content cannot be read then. An event leaves
    out content that is not remembered any more, like the events of vLLM's own connectors.
    """

    def __init__(self, config: KVCacheConfig, group_ids: Sequence[int], max_blocks: int) -> None:
        """Remember the content of at most `max_blocks` blocks; vLLM has these numbers of groups."""
        self._group_ids = group_ids
        self._kinds = [_kind(config.kv_cache_groups[number].kv_cache_spec) for number in group_ids]
        self._max_blocks = max_blocks
        self._contents: OrderedDict[tuple[bytes, int], _Content] = OrderedDict()

    def computed(
        self,
        request: Request,
        group: int,
        block_size: int,
        blocks: Sequence[tuple[int, bytes, bytes | None]],
    ) -> None:
        """Remember the content of a request's blocks, which may be stored.

        Args:
            request: the request, with its tokens.
            group: the number of their group.
            block_size: tokens of each.
            blocks: the index of each, its hash, and the hash of the block before it.
        """
        lora = request.lora_request
        tokens = request.all_token_ids
        for index, block_hash, parent in blocks:
            start, end = index * block_size, (index + 1) * block_size
            extra_keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
            self._contents.pop((block_hash, group), None)  # it is the most recent one now
            self._contents[block_hash, group] = _Content(
                list(tokens[start:end]),
                extra_keys,
                None if lora is None else lora.adapter_id,
                None if lora is None else lora.name,
                parent,
            )
        while len(self._contents) > self._max_blocks:
            self._contents.popitem(last=False)

    def convert(self, events: Sequence[BlockEvent]) -> Iterator[Any]:
        """Yield vLLM's events for kvstow's.

        A tier that is emptied names its blocks. vLLM's `AllBlocksCleared` has no medium, so it
        would take the device's blocks, too.
        """
        for event in events:
            if isinstance(event, BlockStored):
                yield self._stored(event)
            elif isinstance(event, BlockRemoved):
                fields = {
                    "block_hashes": [maybe_convert_block_hash(h) for h in event.block_hashes],
                    "medium": event.medium,
                    "group_idx": self._group_ids[event.group],
                    "locality": "LOCAL",
                }
                yield kv_events.BlockRemoved(**_known(fields, _REMOVED_FIELDS))

    def _stored(self, event: BlockStored) -> Any:
        # The disk tier stores a block after the host has, so its content is needed twice.
        found = [self._contents.get((h, event.group)) for h in event.block_hashes]
        contents = [content for content in found if content is not None]
        is_known = len(contents) == len(found)
        first = contents[0] if is_known else None
        keys = [content.extra_keys for content in contents] if is_known else []
        # The tier does not know the parent of a window's first block, and None is that of a root.
        parent = event.parent_block_hash if first is None else first.parent
        fields = {
            "block_hashes": [maybe_convert_block_hash(h) for h in event.block_hashes],
            "parent_block_hash": None if parent is None else maybe_convert_block_hash(parent),
            "token_ids": [t for content in contents for t in content.token_ids] if is_known else [],
            "block_size": event.block_size,
            "lora_id": None if first is None else first.lora_id,
            "lora_name": None if first is None else first.lora_name,
            "medium": event.medium,
            "extra_keys": _untagged(keys),
            "group_idx": self._group_ids[event.group],
            "locality": "LOCAL",
        }
        return kv_events.BlockStored(**_known(fields | self._kinds[event.group], _STORED_FIELDS))


def _known(fields: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Return the fields that the installed vLLM has, because newer versions have more."""
    return {name: value for name, value in fields.items() if name in names}


def _kind(spec: Any) -> dict[str, Any]:
    """Return the fields of a group's events that describe its attention."""
    return {
        "kv_cache_spec_kind": get_kv_cache_spec_kind(spec).value,
        "kv_cache_spec_sliding_window": get_kv_cache_spec_sliding_window(spec),
    }


def _untagged(keys: list[tuple[Any, ...] | None]) -> list[tuple[Any, ...] | None] | None:
    """Return extra keys in the form that vLLM publishes."""
    try:
        from vllm.v1.core.kv_cache_utils import to_event_extra_keys  # noqa: PLC0415 - since 0.31
    except ImportError:
        return keys or None
    converted: list[tuple[Any, ...] | None] | None = to_event_extra_keys(keys)
    return converted
