"""How the parts of an engine are built, when it starts and each time that it wakes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvstow._core import BlockLedger, ConfigError, OffloadScheduler
from kvstow.arguments import checked_int
from kvstow.engine.arguments import Group, Policy
from kvstow.engine.ranks import MakeMover, Ranks
from kvstow.transfer.layout import MAX_BLOCKS


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What builds the parts of an engine.

    Attributes:
        ledger: builds a ledger for a number of device blocks.
        scheduler: builds a scheduler for `num_device_blocks`.
        ranks: builds the movers between layouts and arenas.
        groups: groups of layers, in the order of the block tables.
        world_size: number of ranks.
        blocks_per_slot: blocks in a slot of the scheduler; an arena has as many slots for each.
        horizon_blocks: how many of the next blocks to be evicted a lazy engine stores. None for
            an eager engine.
        is_shared: whether other engines share the tier below the host. Then events do not report
            its blocks as this engine's.
    """

    ledger: Callable[[int], BlockLedger]
    scheduler: Callable[..., OffloadScheduler]
    ranks: Callable[..., Ranks]
    groups: list[Group]
    world_size: int
    blocks_per_slot: int
    horizon_blocks: int | None
    is_shared: bool = False

    @classmethod
    def of(  # noqa: PLR0913 - most of what the constructor of an engine takes
        cls,
        groups: list[Group],
        num_host_blocks: int,
        *,
        mode: Literal["eager", "lazy"],
        policy: Policy,
        horizon_blocks: int | None,
        max_in_flight_tokens: int | None,
        world_size: int,
        blocks_per_slot: int,
        events: bool,
        mover: MakeMover,
    ) -> "Blueprint":
        """Return the blueprint of an engine without a tier below the host.

        Raises:
            ConfigError: the horizon does not suit the mode.
        """
        return cls(
            partial(
                BlockLedger,
                groups=groups,
                publish="computed",
                max_in_flight_tokens=max_in_flight_tokens,
                events=events,
            ),
            partial(
                OffloadScheduler,
                num_host_blocks,
                groups,
                mode=mode,
                policy=policy,
                blocks_per_slot=blocks_per_slot,
                world_size=world_size,
                events=events,
            ),
            partial(Ranks, mover=mover),
            *(groups, world_size, blocks_per_slot),
            _checked_horizon(mode, horizon_blocks),
        )


def _checked_horizon(mode: str, horizon_blocks: int | None) -> int | None:
    if (mode == "lazy") != (horizon_blocks is not None):
        raise ConfigError(
            f"mode is {mode!r} and horizon_blocks {horizon_blocks}; a lazy engine needs a horizon, "
            "an eager one has none: with mode='lazy' pass the most blocks that a step may take"
        )
    if horizon_blocks is None:
        return None
    return checked_int("horizon_blocks", horizon_blocks, 1, MAX_BLOCKS, "pass the blocks of a step")
