"""The models that a replay can take the place of: which layers attend how, and how many bytes.

    model     groups
    full      full attention; layers and bytes per token are options
    gemma-3   5 of 6 layers attend to a sliding window of 1,024 tokens: five groups, and a full one
    gpt-oss   every other layer attends to a sliding window of 128 tokens
    jamba     7 of 8 layers are recurrent: a group of state, larger than that of full attention

All groups take their blocks from one pool, and their blocks overlay the same bytes of the device.
As in vLLM a group has layers of one kind only, and where that makes the pages of all groups equal,
the layers of one kind are several groups. What is left out is the size: bytes per token are
thousands of times smaller than in life.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from kvstow._core import ConfigError, FullAttention, SlidingWindow, StateSpace
from kvstow.replay.content import Geometry, page_shape

__all__ = ["MODELS", "ModelGroup", "ReplayModel", "build_model"]

Attention: TypeAlias = FullAttention | SlidingWindow | StateSpace


@dataclass(frozen=True, slots=True)
class ModelGroup:
    """Layers that share a block table."""

    attention: Attention
    geometry: Geometry

    def __str__(self) -> str:
        match self.attention:
            case SlidingWindow():
                return f"sliding window of {self.attention.window}"
            case StateSpace():
                return "recurrent state"
            case _:
                return "full attention"

    @property
    def reach_tokens(self) -> int | None:
        """How many tokens a token reads, itself included; None where it reads all.

        The state before a token stands for everything: recurrent layers read as a window of 2 does.
        """
        match self.attention:
            case SlidingWindow():
                return self.attention.window
            case StateSpace():
                return 2
            case _:
                return None

    def first_read(self, num_tokens: int) -> int:
        """The first block that is read by the token after so many."""
        if self.reach_tokens is None:
            return 0
        return max(0, num_tokens + 1 - self.reach_tokens) // self.geometry.block_size

    def most_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """The most blocks that a request of so many tokens holds at once, or a few more."""
        num_blocks = -(-num_tokens // self.geometry.block_size)
        if self.reach_tokens is None:
            return num_blocks
        num_held_tokens = self.reach_tokens - 1 + max_step_tokens
        return min(num_blocks, -(-num_held_tokens // self.geometry.block_size) + 1)


@dataclass(frozen=True, slots=True)
class ReplayModel:
    """A model's cache: its groups, all of one block size."""

    name: str
    groups: tuple[ModelGroup, ...]

    @property
    def geometries(self) -> list[Geometry]:
        """Of the groups, in their order."""
        return [group.geometry for group in self.groups]

    @property
    def block_size(self) -> int:
        """Tokens of a block, in every group."""
        return self.groups[0].geometry.block_size

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return sum(geometry.num_layers for geometry in self.geometries)

    @property
    def bytes_per_token(self) -> int:
        """Of KV and state, all groups."""
        return sum(geometry.bytes_per_token for geometry in self.geometries)

    @property
    def page_bytes(self) -> int:
        """What a block id stands for on the device, whichever group it belongs to."""
        num_rows, row_bytes = page_shape(self.geometries)
        return num_rows * row_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest group's block."""
        return max(geometry.block_bytes for geometry in self.geometries)


@dataclass(frozen=True, slots=True)
class _GroupForm:
    """A group before its block size is known."""

    attention: Callable[[int], Attention]
    num_layers: int
    bytes_per_token: int

    def build(self, block_size: int) -> ModelGroup:
        geometry = Geometry(block_size, self.num_layers, self.bytes_per_token)
        return ModelGroup(self.attention(block_size), geometry)


_WINDOW_128 = partial(SlidingWindow, window=128)
_WINDOW_1024 = partial(SlidingWindow, window=1024)
_FULL: Final = "full"
_FULL_LAYERS, _FULL_BYTES_PER_TOKEN = 2, 8
_HYBRIDS: Final = {
    "gemma-3": (_GroupForm(FullAttention, 1, 4), *[_GroupForm(_WINDOW_1024, 1, 4)] * 5),
    "gpt-oss": (_GroupForm(_WINDOW_128, 2, 8), _GroupForm(FullAttention, 2, 8)),
    "jamba": (_GroupForm(StateSpace, 7, 14), _GroupForm(FullAttention, 1, 4)),
}
MODELS: Final = (_FULL, *_HYBRIDS)


def build_model(
    name: str,
    block_size: int,
    *,
    num_layers: int | None = None,
    bytes_per_token: int | None = None,
) -> ReplayModel:
    """One of `MODELS`; layers and bytes per token can be chosen for the full one only."""
    if name == _FULL:
        layers = _FULL_LAYERS if num_layers is None else num_layers
        token_bytes = _FULL_BYTES_PER_TOKEN if bytes_per_token is None else bytes_per_token
        forms: tuple[_GroupForm, ...] = (_GroupForm(FullAttention, layers, token_bytes),)
    elif num_layers is None and bytes_per_token is None:
        forms = _HYBRIDS[name]
    else:
        raise ConfigError(
            f"layers and bytes-per-token belong to the model {name!r} already; leave them out, or "
            f"take the model {_FULL!r}"
        )
    return ReplayModel(name, tuple(form.build(block_size) for form in forms))
