"""Lay a model out as vLLM does: groups of layers, tokens per block, and bytes on each rank.

vLLM divides layers of several kinds into groups of equally many layers, so that a block has equally
many bytes in every group. A hybrid with states has larger blocks: vLLM raises the block size until
a block of an attention layer has the bytes of a state. `tests/vllm/test_geometry.py` compares this
with vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvstow._core import ChunkedLocal, ConfigError, FullAttention, SlidingWindow, StateSpace
from kvstow.geometry.config import Kind, ModelConfig, StateSize
from kvstow.texts import counted
from kvstow.transfer.arena import slot_stride_bytes

Attention = FullAttention | SlidingWindow | ChunkedLocal | StateSpace

DTYPE_BYTES: Final = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
AUTO: Final = "auto"
# vLLM makes the blocks of a hybrid with states a multiple of this many tokens.
_KERNEL_TOKENS: Final = 16
_MAX_TOKEN_BYTES: Final = 2**30  # more than any model has
_ATTENTION_NAMES: Final[Mapping[Kind, str]] = {
    "full": "full attention",
    "window": "sliding window",
    "chunk": "local chunk",
}


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a block table.

    Attributes:
        attention: what a hit needs of the group.
        num_layers: number of its layers.
        block_bytes: bytes of a block in these layers, on one rank.
    """

    attention: Attention
    num_layers: int
    block_bytes: int

    def __str__(self) -> str:
        match self.attention:
            case SlidingWindow():
                return f"sliding window of {self.attention.window:,} tokens"
            case ChunkedLocal():
                return f"local chunks of {self.attention.chunk:,} tokens"
            case StateSpace():
                return "recurrent state"
            case _:
                return "full attention"


@dataclass(frozen=True, slots=True)
class Geometry:
    """The KV cache of a model on the ranks of a server.

    Attributes:
        name: the model.
        dtype: of a value of K and V.
        groups: the groups of layers.
        block_tokens: tokens per block.
        num_ranks: ranks of tensor parallelism.
        num_copies: ranks that share one copy of their KV in host memory, as those of an MLA model.
        token_bytes: bytes of KV per token in all attention layers, on one rank.
        derivation: how the bytes come about, one line per kind of layer.
    """

    name: str
    dtype: str
    groups: tuple[KvGroup, ...]
    block_tokens: int
    num_ranks: int
    num_copies: int
    token_bytes: int
    derivation: tuple[str, ...]

    @property
    def is_one_full_group(self) -> bool:
        """Whether the model has full attention only, so that one curve has all capacities."""
        return len(self.groups) == 1 and isinstance(self.groups[0].attention, FullAttention)

    @property
    def attentions(self) -> list[Attention]:
        """What a hit needs of each group, as `BlockLedger` and `OffloadScheduler` take it."""
        return [group.attention for group in self.groups]

    @property
    def device_block_bytes(self) -> int:
        """Bytes of a device block on one rank, whichever group has it."""
        return max(group.block_bytes for group in self.groups)

    @property
    def host_block_bytes(self) -> int:
        """Bytes of a slot of the host tier on all ranks, each copy counted once."""
        return slot_stride_bytes(self.device_block_bytes) * (self.num_ranks // self.num_copies)

    @property
    def host_padding_bytes(self) -> int:
        """Bytes of a slot that hold nothing, because a slot begins at a multiple of 4 KiB."""
        used = self.device_block_bytes * (self.num_ranks // self.num_copies)
        return self.host_block_bytes - used


def lay_out(
    model: ModelConfig, block_tokens: int, *, dtype: str = AUTO, num_ranks: int = 1
) -> Geometry:
    """Return the layout of a model.

    Args:
        model: the model.
        block_tokens: tokens per block of the trace. The layout's blocks have a multiple of it.
        dtype: of the KV cache, as vLLM's `--kv-cache-dtype`.
        num_ranks: ranks of tensor parallelism.

    Raises:
        ConfigError: an unknown dtype, or ranks that cannot divide the model's heads.
    """
    kv_dtype, value_bytes = _dtype(model, dtype)
    heads = _heads_per_rank(model, num_ranks)
    layer_token_bytes = heads * model.head_values * value_bytes
    num_layers = model.num_layers
    num_attention = sum(count for kind, count in num_layers.items() if kind != "state")
    derivation = [_attention_text(model, kv_dtype, value_bytes, heads, num_ranks)]
    if model.state is not None:
        state_bytes = _state_bytes(model, model.state, num_ranks)
        page_tokens = _KERNEL_TOKENS * -(-state_bytes // (_KERNEL_TOKENS * layer_token_bytes))
        block_tokens *= max(1, -(-page_tokens // block_tokens))
        derivation.append(
            f"recurrent state: {counted(num_layers['state'], 'layer')} x {state_bytes:,} bytes per "
            "state"
            f"{'' if num_ranks == 1 else ' on each rank'}; vLLM makes blocks of {page_tokens:,} "
            f"tokens or more, so that a block has room for a state, here {block_tokens:,}"
        )
    block_bytes = block_tokens * layer_token_bytes
    sizes = _group_sizes([num_layers[kind] for kind in num_layers])
    groups = tuple(
        KvGroup(_attention(model, kind, block_tokens), size, size * block_bytes)
        for kind, sizes_of_kind in zip(num_layers, sizes, strict=True)
        for size in sizes_of_kind
    )
    if len(groups) > 1:
        derivation.append(
            f"{len(groups)} groups of up to {max(group.num_layers for group in groups)} layers; "
            "each block of a group takes a slot"
        )
    # vLLM reports equal KV for latents alone, so each rank keeps its copy of a repeated head.
    num_copies = num_ranks if model.is_latent and model.state is None else 1
    return Geometry(
        model.name,
        kv_dtype,
        groups,
        block_tokens,
        num_ranks,
        num_copies,
        num_attention * layer_token_bytes,
        tuple(derivation),
    )


def lay_out_evenly(token_bytes: int, block_tokens: int, *, num_ranks: int = 1) -> Geometry:
    """Return the layout of a model with full attention only, of which only its bytes are known.

    Args:
        token_bytes: bytes of KV per token, on all ranks together.
        block_tokens: tokens per block.
        num_ranks: ranks of tensor parallelism, which share the bytes evenly.

    Raises:
        ConfigError: no bytes, or bytes that the ranks cannot share.
    """
    if num_ranks < 1:
        raise ConfigError(f"--tensor-parallel-size is {num_ranks}; it must be at least 1")
    if not 1 <= token_bytes <= _MAX_TOKEN_BYTES or token_bytes % num_ranks:
        raise ConfigError(
            f"--bytes-per-token is {token_bytes}; it must be 1 to {_MAX_TOKEN_BYTES} and a "
            f"multiple of the number of ranks, {num_ranks}: pass the bytes on all ranks together"
        )
    own = token_bytes // num_ranks
    group = KvGroup(FullAttention(block_tokens), 1, block_tokens * own)
    ranks = "" if num_ranks == 1 else f", {own:,} on each of {num_ranks} ranks"
    return Geometry(
        "a model with full attention",
        AUTO,
        (group,),
        block_tokens,
        num_ranks,
        1,
        own,
        (f"{token_bytes:,} bytes per token{ranks}, as given",),
    )


def _dtype(model: ModelConfig, given: str) -> tuple[str, int]:
    """Return the dtype of the KV cache, and the bytes of a value."""
    name = given
    if given == AUTO and model.kv_dtype is not None:
        name = model.kv_dtype
        if name not in DTYPE_BYTES:
            raise ConfigError(
                f"{model.name}: declares a KV cache of {name}; kvstow counts "
                f"{', '.join(DTYPE_BYTES)}: give vLLM one of these as --kv-cache-dtype, and pass "
                "it as --dtype"
            )
    elif given == AUTO:
        if model.dtype is None:
            raise ConfigError(
                f"{model.name}: no 'dtype' and no 'torch_dtype': pass --dtype, for example bfloat16"
            )
        # vLLM runs float32 weights in 16 bits.
        name = "float16" if model.dtype == "float32" else model.dtype
    if name not in DTYPE_BYTES:
        raise ConfigError(
            f"dtype is {name!r}; it must be one of {', '.join(DTYPE_BYTES)}: pass --dtype"
        )
    return name, DTYPE_BYTES[name]


def _heads_per_rank(model: ModelConfig, num_ranks: int) -> int:
    if num_ranks < 1:
        raise ConfigError(f"--tensor-parallel-size is {num_ranks}; it must be at least 1")
    heads = model.num_kv_heads
    if not model.is_latent and heads % num_ranks and num_ranks % heads:
        raise ConfigError(
            f"--tensor-parallel-size is {num_ranks}; it must divide the {heads} KV heads of "
            f"{model.name}, or be a multiple of them"
        )
    if model.num_heads % num_ranks:
        raise ConfigError(
            f"--tensor-parallel-size is {num_ranks}; it must divide the {model.num_heads} "
            f"attention heads of {model.name}"
        )
    return max(1, heads // num_ranks)


def _attention_text(
    model: ModelConfig, dtype: str, value_bytes: int, heads: int, num_ranks: int
) -> str:
    """Return the derivation of the bytes per token of all attention layers."""
    counts = model.num_layers
    layers = sum(counts[kind] for kind in _ATTENTION_NAMES)
    kinds = " and ".join(
        f"{counted(counts[kind], 'layer')} of {name}"
        for kind, name in _ATTENTION_NAMES.items()
        if counts[kind]
    )
    kinds = f"({kinds})" if " and " in kinds else kinds
    if model.is_latent:
        what = f"{model.head_values} values of a latent"
    else:
        what = f"{counted(heads, 'KV head')} x {model.head_values // 2} values x 2 (K and V)"
    ranks = "" if num_ranks == 1 else f" on each of {num_ranks} ranks"
    total = layers * heads * model.head_values * value_bytes
    value = counted(value_bytes, "byte")
    return f"{kinds} x {what} x {value} ({dtype}) = {total:,} bytes per token{ranks}"


def _state_bytes(model: ModelConfig, size: StateSize, num_ranks: int) -> int:
    """Return the bytes of a layer's state on one rank."""
    if size.num_heads % num_ranks:
        raise ConfigError(
            f"--tensor-parallel-size is {num_ranks}; it must divide the {size.num_heads} state "
            f"heads of {model.name}"
        )
    groups = size.num_groups if size.num_groups % num_ranks == 0 else num_ranks
    channels = (size.inner_channels + groups * size.group_channels) // num_ranks
    model_bytes = 2 if model.dtype in (None, "float32") else DTYPE_BYTES.get(model.dtype, 2)
    recurrent_bytes = DTYPE_BYTES.get(model.state_dtype or "", model_bytes)
    heads = size.num_heads // num_ranks
    return channels * size.conv_tokens * model_bytes + heads * size.head_values * recurrent_bytes


def _attention(model: ModelConfig, kind: Kind, block_tokens: int) -> Attention:
    match kind:
        case "full":
            return FullAttention(block_tokens)
        case "window":
            return SlidingWindow(block_tokens, model.window)
        case "chunk":
            return ChunkedLocal(block_tokens, model.chunk)
        case "state":
            return StateSpace(block_tokens)


def _group_sizes(counts: Sequence[int]) -> list[list[int]]:
    """Return the number of layers in each group, per kind, as vLLM divides them."""
    least, most = min(counts), max(counts)
    size = most if most < 1.5 * least else least
    return [
        [len(range(first, count, num_groups)) for first in range(num_groups)]
        for count in counts
        for num_groups in [-(-count // size)]
    ]
