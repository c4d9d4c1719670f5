"""What kvstow needs to know of vLLM's configuration: how the groups attend, where blocks lie.

The bytes follow from vLLM's own description of its allocation (`KVCacheConfig.kv_cache_tensors`),
never from the shapes of tensors:

```
allocation |... layer l: base + offset + l * layer_stride ...|
                         |block 0|block 1| ...                 block_stride apart
```

Groups overlay each other there, and a block belongs to one group at a time: of each block only its
own group's layers are copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvstow import ChunkedLocal, ConfigError, FullAttention, SlidingWindow
from kvstow.transfer.arena import SLOT_ALIGNMENT_BYTES
from kvstow.transfer.layout import BlockLayout, Region, cuda_device

if TYPE_CHECKING:
    import torch

Group = FullAttention | SlidingWindow | ChunkedLocal


@dataclass(frozen=True)
class Layer:
    """Where one layer's blocks lie in the allocation, in bytes."""

    name: str
    offset: int
    block_stride: int
    block_bytes: int


@dataclass(frozen=True)
class Model:
    """A model as vLLM has laid it out.

    Attributes:
        num_blocks: of the device pool, the null block included.
        groups: how the layers attend, in vLLM's order.
        layers: per group, the layers that this rank has of it, as they lie in memory. A pipeline
            stage may have none.
    """

    num_blocks: int
    groups: tuple[Group, ...]
    layers: tuple[tuple[Layer, ...], ...]

    @classmethod
    def of(cls, config: KVCacheConfig) -> Model:
        """Read vLLM's configuration.

        Raises:
            ConfigError: a kind of attention or a layout that kvstow does not know.
        """
        if not config.kv_cache_groups:
            raise ConfigError(
                "vLLM keeps no KV cache for this model, so there is nothing to store: start it "
                "without the connector"
            )
        groups, layers = [], []
        for number, group in enumerate(config.kv_cache_groups):
            spec = group.kv_cache_spec
            groups.append(_group(f"KV cache group {number}", spec))
            placed = [_layer(config, name, spec) for name in group.layer_names]
            layers.append(tuple(sorted(placed, key=lambda layer: layer.offset)))
        model = cls(config.num_blocks, tuple(groups), tuple(layers))
        cacheable = getattr(config, "prefix_cacheable_group_ids", range(len(groups)))
        if len(cacheable) < len(groups):
            raise ConfigError(
                f"vLLM caches prefixes only of the KV cache groups {list(cacheable)}, of "
                f"{len(groups)}: kvstow does not know such models, start vLLM without it"
            )
        return model

    @property
    def tokens_per_hash(self) -> int:
        """Tokens per block hash that kvstow is given."""
        return math.gcd(*(group.block_size for group in self.groups))

    @property
    def tokens_per_hit(self) -> int:
        """A hit ends at a multiple of that many tokens."""
        return math.lcm(*(group.block_size for group in self.groups))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a host slot on this rank: the largest group's block; 0 without layers."""
        return max(sum(layer.block_bytes for layer in layers) for layers in self.layers)

    @property
    def slot_stride_bytes(self) -> int:
        """What a host slot takes of the arena."""
        return -(-self.slot_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES

    @property
    def local_groups(self) -> tuple[int, ...]:
        """The groups of which this rank has layers: what it copies of a block."""
        return tuple(group for group, layers in enumerate(self.layers) if layers)

    def layouts(self, kv_caches: Mapping[str, torch.Tensor]) -> tuple[BlockLayout, ...]:
        """Per local group, where its blocks lie in the memory that vLLM has allocated.

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
                    f"vLLM registers no KV cache for layer {layer.name!r}: kvstow does not know "
                    "this layout, start vLLM without it"
                )
            storage = tensor.untyped_storage()
            base = storage.data_ptr() + layer.offset
            end = layer.offset + (self.num_blocks - 1) * layer.block_stride + layer.block_bytes
            if tensor.data_ptr() != base or end > storage.nbytes():
                raise ConfigError(
                    f"the KV cache of layer {layer.name!r} lies {tensor.data_ptr() - base:+} bytes "
                    f"from where vLLM's configuration says, in {storage.nbytes()} bytes of which "
                    f"it should take {end}: kvstow does not know this layout, start vLLM without it"
                )
            owners.append(tensor)
            last = regions[-1] if regions else None
            if (
                last is not None
                and last.base_address + last.block_bytes == base
                and last.block_stride_bytes == layer.block_stride
                and last.block_bytes + layer.block_bytes <= layer.block_stride
            ):
                # Side by side in each block: one copy, not two.
                regions[-1] = Region(
                    last.base_address, layer.block_stride, last.block_bytes + layer.block_bytes
                )
            else:
                regions.append(Region(base, layer.block_stride, layer.block_bytes))
        return BlockLayout(
            self.num_blocks,
            tuple(regions),
            owners=tuple(owners),
            device=cuda_device(owners[0]),
        )


def _group(name: str, spec: KVCacheSpec) -> Group:
    """How the layers of a group attend."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        # Layers of one kind whose blocks differ in bytes only.
        return _group(name, next(iter(spec.kv_cache_specs.values())))
    # Exactly these: a subclass may keep more than a table of blocks.
    kind = type(spec)
    if kind.__name__ in ("FullAttentionSpec", "MLAAttentionSpec") and isinstance(
        spec, FullAttentionSpec
    ):
        # vLLM folds windows into full attention where its hybrid manager is switched off: then
        # every block is kept, and a hit needs them all.
        return FullAttention(spec.block_size)
    if kind is SlidingWindowSpec:
        return SlidingWindow(
            spec.block_size,
            spec.sliding_window,
            extra_retained_tokens=spec.extra_retained_tokens,
        )
    if kind is ChunkedLocalAttentionSpec:
        return ChunkedLocal(spec.block_size, spec.attention_chunk_size)
    raise ConfigError(
        f"{name} is of kind {kind.__name__}, which kvstow does not know in vLLM; known are full "
        "attention (also MLA), sliding windows and local chunks: start vLLM without the connector"
    )


def _layer(config: KVCacheConfig, name: str, spec: Any) -> Layer:
    """Where a layer's blocks lie."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.kv_cache_specs[name]
    for tensor in config.kv_cache_tensors:
        if name in tensor.layers:
            if getattr(tensor, "host_resident", False):
                break
            offset = tensor.offset + tensor.layers.index(name) * tensor.layer_stride
            return Layer(name, offset, tensor.block_stride, spec.page_size_bytes)
    raise ConfigError(
        f"vLLM's configuration does not say where on the device layer {name!r} lies: kvstow does "
        "not know this layout, start vLLM without it"
    )
