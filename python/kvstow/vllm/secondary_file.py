"""The slot file of a `KVStowDisk`. `kvstow doctor` checks its keys in vLLM's flag without vLLM."""

from __future__ import annotations

import logging
from typing import Any, Final

from kvstow import ConfigError
from kvstow.arguments import is_for_shell, is_path
from kvstow.tiers import SlotFile, SlotTier, TierTicket
from kvstow.transfer import TransferTimeout

logger = logging.getLogger("vllm." + __name__)

DISK_KEYS: Final = (
    "path",
    "max_bytes",
    "on_mismatch",
    "num_threads",
    "weights_version_path",
    "enable_kv_events",
    "locality",
)
"""The keys that a `KVStowDisk` takes, beside those of vLLM."""
# A sync that hangs must not hold up vLLM's scheduler for ever.
_RENEWAL_S: Final = 10.0


def secondary_file(  # noqa: PLR0913 - the keys of the user's configuration
    tier: str,
    /,
    *,
    path: Any = None,
    max_bytes: Any = None,
    on_mismatch: Any = "refuse",
    num_threads: Any = 4,
    weights_version_path: Any = None,
    **_: object,
) -> SlotFile:
    """Return the slot file that these keys name. Opens nothing.

    Args:
        tier: vLLM's name of the tier, for messages.
        path: see `KVStowDisk`, also for the others.
        max_bytes: see there.
        on_mismatch: see there.
        num_threads: see there.
        weights_version_path: see there.
        **_: keys that do not concern the file.

    Raises:
        ConfigError: a key is missing or wrong.
    """
    for name, value in (("path", path), ("max_bytes", max_bytes)):
        if value is None:
            raise ConfigError(f"the secondary tier {tier} has no {name}; add it beside its type")
    for name, value in (("path", path), ("weights_version_path", weights_version_path)):
        if value is not None and (not is_path(value) or is_for_shell(value)):
            raise ConfigError(
                f"the secondary tier {tier} has {name} {value!r}; pass the name of a file "
                "that does not begin with ~ or $, because nothing replaces them here"
            )
    return SlotFile(path, max_bytes, on_mismatch=on_mismatch, num_threads=num_threads)


def begin_renewal(tier: SlotTier) -> TierTicket:
    """Drop all chunks of a file, and wait for a while. The ticket ends once that is durable."""
    renewal = tier.renew()
    try:
        renewal.wait(_RENEWAL_S)
    except TransferTimeout:
        logger.warning(
            "kvstow: %s has not dropped its chunks durably within %g s, and keeps no new ones "
            "until it has; check the disk",
            tier.path,
            _RENEWAL_S,
        )
    return renewal
