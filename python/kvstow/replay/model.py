"""The models that a replay can imitate: their layers, and the bytes of a token.

    model     groups
    full      full attention; layers and bytes per token are options
    gemma-3   5 of 6 layers attend to a sliding window of 1,024 tokens: five groups, and a full one
    gpt-oss   every other layer attends to a sliding window of 128 tokens
    jamba     7 of 8 layers are recurrent: a group of state, larger than that of full attention
    any       a model of `kvstow plan`, or a `config.json`: its groups, each of one small layer

All groups allocate from one pool, and their blocks overlay the same bytes of the device. As in
vLLM, a group has layers of one kind, and layers of one kind may form several groups so that all
groups have pages of equal size. Bytes per token are thousands of times smaller than in the real
models.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from kvstow._core import ChunkedLocal, ConfigError, FullAttention, SlidingWindow, StateSpace
from kvstow.geometry import find_model, lay_out
from kvstow.replay.content import Geometry, page_shape

Attention: TypeAlias = FullAttention | SlidingWindow | StateSpace

REFERENCE_MODEL: Final = "Llama-3.1-8B"
"""The model whose sizes the reports give beside the replay's own, if `--model` names none."""
REFERENCE_BYTES_PER_TOKEN: Final = lay_out(find_model(REFERENCE_MODEL), 1).token_bytes
"""Its bytes of KV per token, in 16 bits."""


@dataclass(frozen=True, slots=True)
class ModelGroup:
    """A group: layers that share a block table."""

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
        """Number of tokens that a token reads, itself included; None if it reads all.

        A recurrent layer reads only the state before the token, like a window of 2.
        """
        match self.attention:
            case SlidingWindow():
                return self.attention.window
            case StateSpace():
                return 2
            case _:
                return None

    def first_read(self, num_tokens: int) -> int:
        """Return the first block that the token after `num_tokens` reads."""
        if self.reach_tokens is None:
            return 0
        return max(0, num_tokens + 1 - self.reach_tokens) // self.geometry.block_size

    def most_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Return an upper bound on the blocks that a request holds at once."""
        num_blocks = -(-num_tokens // self.geometry.block_size)
        if self.reach_tokens is None:
            return num_blocks
        num_held_tokens = self.reach_tokens - 1 + max_step_tokens
        return min(num_blocks, -(-num_held_tokens // self.geometry.block_size) + 1)


@dataclass(frozen=True, slots=True)
class ReplayModel:
    """The KV cache of a model: groups with one block size.

    Args:
        name: the name that `--model` gave.
        groups: its groups of layers.
        stands_for: the model whose sizes the reports give.
        real_bytes_per_token: its bytes of KV per token.
    """

    name: str
    groups: tuple[ModelGroup, ...]
    stands_for: str = REFERENCE_MODEL
    real_bytes_per_token: int = REFERENCE_BYTES_PER_TOKEN

    @property
    def geometries(self) -> list[Geometry]:
        """The geometries of the groups."""
        return [group.geometry for group in self.groups]

    @property
    def block_size(self) -> int:
        """Tokens per block in every group."""
        return self.groups[0].geometry.block_size

    @property
    def num_layers(self) -> int:
        """Number of layers in all groups."""
        return sum(geometry.num_layers for geometry in self.geometries)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV and state per token, in all groups."""
        return sum(geometry.bytes_per_token for geometry in self.geometries)

    @property
    def page_bytes(self) -> int:
        """Bytes of device memory per block id, whichever group has the block."""
        num_rows, row_bytes = page_shape(self.geometries)
        return num_rows * row_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest block of any group."""
        return max(geometry.block_bytes for geometry in self.geometries)


@dataclass(frozen=True, slots=True)
class _GroupForm:
    """A group whose block size is not yet known."""

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
_HYBRID_BYTES_PER_TOKEN: Final = 4
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
    """Return one of `MODELS`, or a model that `find_model` finds.

    Only a model with full attention alone takes layers and bytes per token.

    Raises:
        ConfigError: no such model, one whose groups a replay cannot imitate, or layers or bytes for
            a hybrid.
    """
    if name in _HYBRIDS:
        groups = tuple(form.build(block_size) for form in _HYBRIDS[name])
    else:
        groups = () if name == _FULL else _groups_of(name, block_size)
    if all(isinstance(group.attention, FullAttention) for group in groups):
        layers = _FULL_LAYERS if num_layers is None else num_layers
        token_bytes = _FULL_BYTES_PER_TOKEN if bytes_per_token is None else bytes_per_token
        groups = (_GroupForm(FullAttention, layers, token_bytes).build(block_size),)
    elif num_layers is not None or bytes_per_token is not None:
        raise ConfigError(
            f"--layers and --bytes-per-token are fixed for the model {name!r}: leave them out, or "
            f"pass --model {_FULL}"
        )
    if name in MODELS or len(groups) > 1:
        return ReplayModel(name, groups)
    real = lay_out(find_model(name), block_size)
    return ReplayModel(name, groups, real.name, real.token_bytes)


def check_model(name: str) -> None:
    """Raise `ConfigError` unless there is such a model."""
    if name not in MODELS:
        try:
            find_model(name)
        except ConfigError as error:
            raise ConfigError(f"{error}. A replay also takes {', '.join(MODELS)}") from None


def _groups_of(name: str, block_size: int) -> tuple[ModelGroup, ...]:
    layout = lay_out(find_model(name), block_size)
    if layout.block_tokens != block_size:
        num_ids = layout.block_tokens // block_size
        raise ConfigError(
            f"the model {name!r} needs blocks of {layout.block_tokens} tokens, so that one has "
            f"room for a recurrent state, and an id of the trace stands for {block_size}: convert "
            "the token ids with blocks of that size (without token ids, keep one of "
            f"{num_ids} ids: the last of each block), or pass --model jamba"
        )
    geometry = Geometry(block_size, 1, _HYBRID_BYTES_PER_TOKEN)
    groups = []
    for group in layout.groups:
        if isinstance(group.attention, ChunkedLocal):
            raise ConfigError(
                f"the model {name!r} has {group}, which no replay imitates: check its size on a "
                "server"
            )
        groups.append(ModelGroup(group.attention, geometry))
    return tuple(groups)
