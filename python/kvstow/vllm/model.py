"""The groups of a model in vLLM, the keys of their blocks, and where the blocks lie in memory.

The addresses follow from vLLM's description of its allocation (`KVCacheConfig.kv_cache_tensors`),
never from the shapes of tensors:

```
allocation |... layer l: base + offset + l * layer_stride ...|
                         |block 0|block 1| ...                 block_stride apart
```

Groups share these bytes, and a block belongs to one group at a time. So a copy of a block takes
only the layers of its own group.

A block of a recurrent group holds the states of its layers after the block's last token. vLLM pads
a state to the size of an attention block. Copies include the padding, because regions of equal
sizes let groups share a mover.

Two kinds of groups have blocks that vLLM does not key, so nothing of them is stored or loaded, and
`Model` leaves them out:

- Some models compress the keys of several tokens into one. The keys that are not compressed yet lie
  in a ring, one block for each request. A hit ends where no key is left in the ring.
- DeepSeek V4.1 computes the last tokens of a hit again for its windows (bounded replay), and does
  not write to the other groups then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvstow import ChunkedLocal, ConfigError, FullAttention, SlidingWindow, StateSpace
from kvstow.transfer.arena import slot_stride_bytes
from kvstow.transfer.layout import BlockLayout, Region, cuda_device, joined

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

Group = FullAttention | SlidingWindow | ChunkedLocal | StateSpace
T = TypeVar("T")


@dataclass(frozen=True)
class Layer:
    """The place of one layer's blocks in the allocation, in bytes."""

    name: str
    offset: int
    block_stride: int
    block_bytes: int


@dataclass(frozen=True)
class Model:
    """A model as vLLM has laid it out.

    Attributes:
        num_blocks: blocks of the device pool, the null block included.
        groups: the kind of attention of each group, in vLLM's order.
        layers: per group, its layers on this rank, in the order of their addresses. A pipeline
            stage may have none.
        tokens_per_vllm_hash: tokens per entry of `Request.block_hashes`, which divides
            `tokens_per_hash`. 0 in a worker, which knows no requests.
        group_ids: vLLM's number of each group. Empty: vLLM has these groups only.
        replayed_tokens: the last tokens of a hit that vLLM computes again for its windows.
        other_block_sizes: tokens of a block, per group that is left out; 0 for a ring.
    """

    num_blocks: int
    groups: tuple[Group, ...]
    layers: tuple[tuple[Layer, ...], ...]
    tokens_per_vllm_hash: int = 0
    group_ids: tuple[int, ...] = ()
    replayed_tokens: int = 0
    other_block_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.group_ids:
            object.__setattr__(self, "group_ids", tuple(range(len(self.groups))))

    @classmethod
    def of(cls, config: KVCacheConfig, context_parallel_size: int = 1) -> Model:
        """Return the model of vLLM's configuration.

        With decode context parallelism (`context_parallel_size` ranks) a block id names the same
        block on every rank, and each rank has a share of its tokens.

        Raises:
            ConfigError: a kind of attention or a layout that kvstow does not support.
        """
        if not config.kv_cache_groups:
            raise ConfigError(
                "vLLM keeps no KV cache for this model, and the connector needs at least one KV "
                "cache group: start vLLM without the connector"
            )
        groups, layers, ids, others, replayed = [], [], [], [], 0
        for number, group in enumerate(config.kv_cache_groups):
            spec, name = group.kv_cache_spec, f"KV cache group {number}"
            num_again = getattr(spec, "prefix_replay_tokens", 0)  # since 0.31
            if (is_ring := _is_ring(spec)) or num_again:
                others.append((spec.block_size, is_ring))
                replayed = max(replayed, num_again)
                continue
            groups.append(_group(name, _spread(name, spec, context_parallel_size)))
            placed = [_layer(config, name, spec) for name in group.layer_names]
            layers.append(tuple(sorted(placed, key=lambda layer: layer.offset)))
            ids.append(number)
        cacheable = list(getattr(config, "prefix_cacheable_group_ids", ids))
        if cacheable != ids or not ids:
            raise ConfigError(
                f"vLLM caches prefixes of the KV cache groups {cacheable} only, and kvstow needs "
                f"{ids}: start vLLM without the connector"
            )
        model = cls(
            config.num_blocks,
            tuple(groups),
            tuple(layers),
            group_ids=tuple(ids),
            replayed_tokens=replayed,
            other_block_sizes=tuple(0 if is_ring else size for size, is_ring in others),
        )
        if any(model.tokens_per_hit % size for size, _ in others):
            raise ConfigError(
                f"vLLM caches no prefix of groups with blocks of {[size for size, _ in others]} "
                f"tokens, and a hit of kvstow's, which is a multiple of {model.tokens_per_hit} "
                "tokens, may end within such a block: start vLLM without the connector"
            )
        return model

    def own(self, of_each: Sequence[T]) -> list[T]:
        """Return the items of these groups from a list with one for each group of vLLM's."""
        return [of_each[number] for number in self.group_ids]

    def bound(self, manager: KVCacheManager) -> Model:
        """Return the model whose groups drop the last block of a hit as vLLM's accounting does.

        vLLM names all groups if it does not know which are the draft model's. A draft model has no
        other kinds of attention than full attention and windows, so other groups stay as they are.
        """
        groups: list[Group] = []
        managers = self.own(manager.coordinator.single_type_managers)
        for group, does_drop in zip(self.groups, [one.use_eagle for one in managers], strict=True):
            match group:
                case FullAttention():
                    groups.append(FullAttention(group.block_size, drops_last_block=does_drop))
                case SlidingWindow():
                    groups.append(
                        SlidingWindow(
                            group.block_size,
                            group.window,
                            extra_retained_tokens=group.extra_retained_tokens,
                            drops_last_block=does_drop,
                        )
                    )
                case _:
                    groups.append(group)
        return replace(self, groups=tuple(groups))

    @cached_property
    def tokens_per_hash(self) -> int:
        """Tokens per block hash that the tier takes."""
        return math.gcd(*(group.block_size for group in self.groups))

    @cached_property
    def tokens_per_hit(self) -> int:
        """Tokens of which every hit is a multiple."""
        return math.lcm(*(group.block_size for group in self.groups))

    @cached_property
    def vllm_hashes_per_hash(self) -> int:
        """Entries of `Request.block_hashes` per block hash that the tier takes."""
        return self.tokens_per_hash // self.tokens_per_vllm_hash

    @cached_property
    def full_groups(self) -> list[tuple[int, int, int, bytes]]:
        """Per full-attention group: number, and a block's tokens, vLLM hashes and key suffix."""
        return [
            (
                g,
                group.block_size,
                group.block_size // self.tokens_per_vllm_hash,
                _suffix(self.group_ids[g]),
            )
            for g, group in enumerate(self.groups)
            if not self.is_window[g]
        ]

    @cached_property
    def is_full_attention(self) -> bool:
        """Whether a hit needs every block of the prefix in each group."""
        return not any(self.is_window)

    @cached_property
    def is_window(self) -> list[bool]:
        """Per group, whether a hit needs less than every block of the prefix."""
        return [not isinstance(group, FullAttention) for group in self.groups]

    @cached_property
    def has_states(self) -> bool:
        """Whether a group has recurrent states."""
        return any(isinstance(group, StateSpace) for group in self.groups)

    @cached_property
    def divided_states(self) -> list[tuple[int, int]]:
        """Number and block size of each group of states in whose blocks a hit may end."""
        return [
            (g, group.block_size)
            for g, group in enumerate(self.groups)
            if isinstance(group, StateSpace) and self.tokens_per_vllm_hash < group.block_size
        ]

    def num_cacheable_blocks(self, group: int, num_tokens: int) -> int:
        """Return how many of a group's first blocks are due for a key once tokens are computed.

        vLLM keys blocks up to where a hit can end, and then one more if hits drop the last one. If
        they are smaller than those of another group, some are full before.
        """
        size, num_dropped = self._sizes[group]
        unit = self.tokens_per_hit
        if unit != size:
            num_hit = num_tokens // unit * unit
            num_tokens = min(num_tokens, num_hit + num_dropped if num_hit else 0)
        return num_tokens // size

    @cached_property
    def _sizes(self) -> list[tuple[int, int]]:
        """Per group, the tokens of a block, and those that a hit drops at its end."""
        drops = (getattr(group, "drops_last_block", False) for group in self.groups)
        return [
            (group.block_size, group.block_size if does_drop else 0)
            for group, does_drop in zip(self.groups, drops, strict=True)
        ]

    def block_hash(self, request: Request, index: int, group: int) -> bytes:
        """Return the hash of a request's block: the last of those that the block covers."""
        end = (index + 1) * (self.groups[group].block_size // self.tokens_per_vllm_hash)
        block_hash: bytes = request.block_hashes[end - 1]
        return block_hash

    def hit_hashes(self, request: Request, num_tokens: int) -> Sequence[bytes]:
        """Return the hashes of a request's first tokens at each multiple of `tokens_per_hit`."""
        size = self.tokens_per_hit // self.tokens_per_vllm_hash
        hashes: Sequence[bytes] = request.block_hashes
        return hashes[size - 1 : num_tokens // self.tokens_per_hit * size : size]

    def block_key(self, request: Request, index: int, group: int) -> bytes:
        """Return vLLM's key of a request's block: its hash, then the group in four bytes."""
        return self.block_hash(request, index, group) + _suffix(self.group_ids[group])

    def group_of(self, suffix: bytes) -> int:
        """Return the group of a block from what vLLM's key of it has after the hash."""
        return self.group_ids.index(int.from_bytes(suffix, "big"))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a host slot on this rank: the largest group's block; 0 without layers."""
        return max(sum(layer.block_bytes for layer in layers) for layers in self.layers)

    @property
    def slot_stride_bytes(self) -> int:
        """Bytes from one host slot to the next in the arena."""
        return slot_stride_bytes(self.slot_bytes)

    @property
    def local_groups(self) -> tuple[int, ...]:
        """The groups that have layers on this rank, which are those that it copies."""
        return tuple(group for group, layers in enumerate(self.layers) if layers)

    def layouts(self, kv_caches: Mapping[str, torch.Tensor]) -> tuple[BlockLayout, ...]:
        """Return the layout of each local group in the memory that vLLM has allocated.

        Raises:
            ConfigError: a tensor is missing, or is not where the configuration says.
        """
        return tuple(self._layout(self.layers[group], kv_caches) for group in self.local_groups)

    def _layout(
        self, layers: tuple[Layer, ...], kv_caches: Mapping[str, torch.Tensor]
    ) -> BlockLayout:
        regions: list[Region] = []
        owners = []
        for layer in layers:
            tensor = kv_caches.get(layer.name)
            if tensor is None:
                raise ConfigError(
                    f"vLLM registers no KV cache for layer {layer.name!r}, and kvstow needs every "
                    "layer's: start vLLM without the connector"
                )
            storage = tensor.untyped_storage()
            base = storage.data_ptr() + layer.offset
            end = layer.offset + (self.num_blocks - 1) * layer.block_stride + layer.block_bytes
            if tensor.data_ptr() != base or end > storage.nbytes():
                raise ConfigError(
                    f"the KV cache of layer {layer.name!r} begins {tensor.data_ptr() - base:+} "
                    f"bytes from where vLLM's configuration says, in an allocation of "
                    f"{storage.nbytes()} bytes of which it should take {end}. kvstow does not "
                    "support this layout: start vLLM without the connector"
                )
            owners.append(tensor)
            regions.append(Region(base, layer.block_stride, layer.block_bytes))
        return BlockLayout(
            self.num_blocks,
            tuple(joined(regions)),
            owners=tuple(owners),
            device=cuda_device(owners[0]),
        )


def _suffix(number: int) -> bytes:
    """Return what vLLM's keys of the blocks of its group `number` have after the hash."""
    return number.to_bytes(4, "big")


def _is_ring(spec: KVCacheSpec) -> bool:
    """Whether a group has one block for each request, whose keys are no part of a prefix."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return _is_ring(next(iter(spec.kv_cache_specs.values())))
    return type(spec).__name__ == "CircularBufferSpec"  # since 0.30


def _spread(name: str, spec: KVCacheSpec, context_parallel_size: int) -> KVCacheSpec:
    """Return a spec whose block has the tokens that vLLM counts, which are those of all ranks."""
    if context_parallel_size == 1:
        return spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    if not isinstance(spec, AttentionSpec):
        raise ConfigError(
            f"--decode-context-parallel-size is {context_parallel_size}, and {name} is of kind "
            f"{type(spec).__name__}, which no context-parallel rank divides. vLLM then hits inside "
            "blocks, and kvstow does not: set it to 1, or start vLLM without the connector"
        )
    if not spec.dcp_sharded:
        return spec
    return replace(spec, block_size=spec.block_size * context_parallel_size)


def _group(name: str, spec: KVCacheSpec) -> Group:
    """Return the kind of attention of a group."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        # Its layers have one kind, and blocks of different bytes.
        return _group(name, next(iter(spec.kv_cache_specs.values())))
    # Exactly these classes, because a subclass may keep more than a table of blocks.
    kind = type(spec)
    if kind.__name__ in ("FullAttentionSpec", "MLAAttentionSpec") and isinstance(
        spec, FullAttentionSpec
    ):
        # Without its hybrid manager vLLM treats windows as full attention: it keeps every block,
        # and a hit needs them all.
        return FullAttention(spec.block_size)
    if kind.__name__ in ("SlidingWindowSpec", "SlidingWindowMLASpec") and isinstance(
        spec, SlidingWindowSpec
    ):
        return SlidingWindow(
            spec.block_size,
            spec.sliding_window,
            extra_retained_tokens=spec.extra_retained_tokens,
        )
    if kind is ChunkedLocalAttentionSpec:
        return ChunkedLocal(spec.block_size, spec.attention_chunk_size)
    if kind is MambaSpec:
        if spec.mamba_cache_mode in ("align", "all"):
            return StateSpace(spec.block_size)
        raise ConfigError(
            f"{name} is of kind MambaSpec in mode {spec.mamba_cache_mode!r}, and kvstow supports "
            "recurrent states only in the modes 'align' and 'all', because vLLM caches no state in "
            "another mode: start vLLM with --mamba-cache-mode align, or without the connector"
        )
    raise ConfigError(
        f"{name} is of kind {kind.__name__}, and in vLLM kvstow supports full attention (also "
        "MLA), sliding windows, local chunks and recurrent states (MambaSpec): start vLLM without "
        "the connector"
    )


def _layer(config: KVCacheConfig, name: str, spec: Any) -> Layer:
    """Return the place of a layer's blocks."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.kv_cache_specs[name]
    for tensor in config.kv_cache_tensors:
        if name in tensor.layers:
            if getattr(tensor, "host_resident", False):
                break
            offset = tensor.offset + tensor.layers.index(name) * tensor.layer_stride
            return Layer(name, offset, tensor.block_stride, spec.page_size_bytes)
    raise ConfigError(
        f"vLLM's configuration does not place the KV cache of layer {name!r} on the device, and "
        "kvstow needs its address: start vLLM without the connector"
    )
