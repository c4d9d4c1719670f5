"""The options of an engine's disk tier, and the fingerprint of its files."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

from kvstow._core import ConfigError
from kvstow.arguments import checked_int
from kvstow.engine.arguments import Group, Policy, checked_limit_s
from kvstow.sizes import parse_bytes
from kvstow.tiers import Fingerprint, SlotFile
from kvstow.transfer import BlockLayout

_MAX_BLOCKS = 2**31 - 1
_MAX_TOKENS = 1 << 40
_MAX_FLUSH_S = 86400.0
_CHOICES = {"admit": ("all", "returned"), "policy": get_args(Policy)}


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """How an engine uses its disk tier.

    Attributes:
        identity: the model whose KV this is, and all that shapes it or its hashes. A file of
            another identity is not used.
        weights_version: version of the model's weights, under the same rule.
        admit: "all" writes every stored block to the disk. "returned" writes blocks that were hit,
            or that came back after the host had evicted them.
        policy: which disk slots are evicted first: "lru" or "hit-density".
        min_promote_tokens: a request waits for the disk only if the disk adds this many tokens to
            what device and host have. Shorter runs are faster to recompute.
        max_blocks_in_flight: the most slots that are written at a time, and the most that are read.
        promote_timeout_s: seconds that a request waits for blocks from the disk. Then it goes on
            with what the host has. None: no limit.
        timeout_s: seconds after which a read or a write of the disk is late and has failed. Its
            slots stay reserved until it has ended. None: no limit.
        max_write_bytes_per_s: bytes that all ranks together write per second, on average, such as
            "100MiB". It bounds the wear of the disk. None: no limit.
        flush_s: seconds that `Engine.close` may take to write blocks that are due.

    Raises:
        ConfigError: a value is out of its bounds.
    """

    identity: str
    weights_version: str
    admit: Literal["all", "returned"] = "all"
    policy: Policy = "lru"
    min_promote_tokens: int = 0
    max_blocks_in_flight: int = 64
    promote_timeout_s: float | None = 1.0
    timeout_s: float | None = 30.0
    max_write_bytes_per_s: int | str | None = None
    flush_s: float = 3.0

    def __post_init__(self) -> None:
        """Check what no other part checks."""
        for name in ("identity", "weights_version"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigError(
                    f"{name} is {value!r}; pass a name, because cached KV of another model or of "
                    "other weights must not be served"
                )
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"{name} is {value!r}; pass {' or '.join(map(repr, choices))}")
        checked_int("min_promote_tokens", self.min_promote_tokens, 0, _MAX_TOKENS, "pass tokens")
        checked_int(
            "max_blocks_in_flight", self.max_blocks_in_flight, 1, _MAX_BLOCKS, "pass blocks"
        )
        checked_limit_s("promote_timeout_s", self.promote_timeout_s)
        checked_limit_s("timeout_s", self.timeout_s)
        if self.max_write_bytes_per_s is not None:
            parse_bytes(self.max_write_bytes_per_s, name="max_write_bytes_per_s")
        if not isinstance(self.flush_s, Real) or not 0.0 <= self.flush_s <= _MAX_FLUSH_S:
            raise ConfigError(
                f"flush_s is {self.flush_s!r}, outside 0 to {_MAX_FLUSH_S}; pass the seconds that "
                "close may take"
            )

    def write_bytes_per_s(self) -> int | None:
        """Return `max_write_bytes_per_s` in bytes."""
        given = self.max_write_bytes_per_s
        return None if given is None else parse_bytes(given, name="max_write_bytes_per_s")


def checked_files(
    disk: SlotFile | Sequence[SlotFile] | None, options: DiskOptions | None, world_size: int
) -> list[SlotFile]:
    """Return one slot file per rank; none without a disk tier."""
    if (disk is None) != (options is None):
        raise ConfigError(
            f"disk is {disk!r} and disk_options {options!r}; a disk tier needs both, so pass "
            "SlotFile(...) and DiskOptions(identity=..., weights_version=...), or neither"
        )
    if not isinstance(options, DiskOptions | None):
        raise ConfigError(
            f"disk_options is {options!r}; pass DiskOptions(identity=..., weights_version=...)"
        )
    if disk is None:
        return []
    if isinstance(disk, str | os.PathLike):
        raise ConfigError(
            f"disk is {disk!r}, the name of a file; pass SlotFile({os.fspath(disk)!r}, "
            "max_bytes=...)"
        )
    files = [disk] if isinstance(disk, SlotFile) else list(disk)
    if len(files) != world_size or not all(isinstance(file, SlotFile) for file in files):
        raise ConfigError(
            f"disk is {disk!r}, but world_size is {world_size}; pass one SlotFile for each rank, "
            "each with a path of its own"
        )
    return files


def fingerprints(
    options: DiskOptions,
    groups: Sequence[Group],
    ranks: Sequence[Sequence[BlockLayout]],
    blocks_per_slot: int,
) -> list[Fingerprint]:
    """Return, for each rank, whose KV its file holds."""
    prints = []
    for rank, layouts in enumerate(ranks):
        shapes = [[region.block_bytes for region in layout.regions] for layout in layouts]
        text = json.dumps([[repr(group) for group in groups], shapes])
        fields: dict[str, str | int] = {
            "engine": 1,
            "identity": options.identity,
            "weights_version": options.weights_version,
            "rank": rank,
            "world_size": len(ranks),
            "blocks_per_slot": blocks_per_slot,
            "block_bytes": sum(map(sum, shapes)),
            "groups": hashlib.sha256(text.encode()).hexdigest()[:16],
        }
        prints.append(Fingerprint(fields))
    return prints
