"""Which tier an engine has below its host: none, a disk, a shared store, or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from kvstow._core import ConfigError
from kvstow.engine.blueprint import Blueprint
from kvstow.engine.both import Both
from kvstow.engine.disk import Disk
from kvstow.engine.disk_options import DiskOptions, checked_files, fingerprints
from kvstow.engine.shared import Shared, SharedOptions
from kvstow.tiers import SlotFile
from kvstow.tiers.shared import SharedStore
from kvstow.transfer import BlockLayout, HostArena

OpenBelow: TypeAlias = Callable[
    [Blueprint, Sequence[Sequence[BlockLayout]], Sequence[HostArena]], Disk | None
]
"""Opens the tier below the host of an engine; None without one."""


def checked_below(
    disk: SlotFile | Sequence[SlotFile] | None,
    disk_options: DiskOptions | None,
    store: SharedStore | None,
    options: SharedOptions | None,
    world_size: int,
) -> OpenBelow:
    """Return what opens the tier below the host.

    Raises:
        ConfigError: a tier without its options, or options without a tier.
    """
    if store is None and options is None:
        files = checked_files(disk, disk_options, world_size)
        return partial(_open_disk, files, disk_options)
    if not isinstance(store, SharedStore) or not isinstance(options, SharedOptions):
        raise ConfigError(
            f"shared is {store!r} and shared_options {options!r}; a shared tier needs both, so "
            "pass SharedStore(url) and SharedOptions(identity=..., weights_version=...), or neither"
        )
    if disk is None and disk_options is None:
        return partial(Shared, store, options)
    if disk_options is not None:
        raise ConfigError(
            f"disk_options is {disk_options!r}, but shared_options count for the disk too if there "
            "are both tiers; leave out disk_options"
        )
    if options.index_blocks is not None:
        raise ConfigError(
            f"index_blocks is {options.index_blocks}, but with a disk tier the index has the slots "
            "of the disk; leave it out"
        )
    return partial(Both, checked_files(disk, options, world_size), store, options)


def _open_disk(
    files: Sequence[SlotFile],
    options: DiskOptions | None,
    blueprint: Blueprint,
    layouts: Sequence[Sequence[BlockLayout]],
    arenas: Sequence[HostArena],
) -> Disk | None:
    """Open the disk tier of an engine. None without one."""
    if options is None:
        return None
    prints = fingerprints(options, blueprint.groups, layouts, blueprint.blocks_per_slot)
    return Disk(files, prints, options, arenas)
