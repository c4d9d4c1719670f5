"""kvstow keeps an LLM server's KV cache in host memory when the GPU runs out of room.

`Engine` is for the author of an inference engine: it has the accounting and moves the bytes. Its
parts are `BlockPool`, `BlockLedger` and `OffloadScheduler`, which do the accounting for a device
and a host tier, and `kvstow.transfer`, which moves bytes. `hash_tokens` returns vLLM's hashes.
"""

import warnings
from typing import TYPE_CHECKING

from kvstow import _core
from kvstow._core import (
    AllBlocksCleared,
    BlockLedger,
    BlockPool,
    BlockRemoved,
    BlockStored,
    CacheStoreCommitted,
    ChecksumMismatch,
    ChunkedLocal,
    ConfigError,
    FullAttention,
    Hashes,
    HitCurve,
    InvalidBlock,
    Job,
    JobEnd,
    KvstowError,
    LedgerPool,
    OffloadScheduler,
    OutOfBlocks,
    PrefixHit,
    RequestTooLarge,
    SlidingWindow,
    SnapshotError,
    StateError,
    StateSpace,
    StepAllocation,
    TierJob,
    TransferCompleted,
    TransferError,
    TransferInitiated,
    UnknownRequest,
    __version__,
    clairvoyant_hits,
    hash_tokens,
    salted_ids,
)

if TYPE_CHECKING:
    from kvstow.engine import (
        HOST,
        Admission,
        AdmissionState,
        Awake,
        DiskOptions,
        Engine,
        Landed,
        SharedOptions,
        Transfer,
    )
else:
    _OF_THE_ENGINE = {
        "HOST",
        "Admission",
        "AdmissionState",
        "Awake",
        "DiskOptions",
        "Engine",
        "Landed",
        "SharedOptions",
        "Transfer",
    }

    def __getattr__(name: str) -> object:
        """Import the engine at its first use, because the accounting alone needs no transfer."""
        if name in _OF_THE_ENGINE:
            from kvstow import engine  # noqa: PLC0415

            return getattr(engine, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """List the names that are imported at their first use, too."""
        return sorted({*globals(), *__all__})


__all__ = [
    "HOST",
    "Admission",
    "AdmissionState",
    "AllBlocksCleared",
    "Awake",
    "BlockLedger",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CacheStoreCommitted",
    "ChecksumMismatch",
    "ChunkedLocal",
    "ConfigError",
    "DiskOptions",
    "Engine",
    "FullAttention",
    "Hashes",
    "HitCurve",
    "InvalidBlock",
    "Job",
    "JobEnd",
    "KvstowError",
    "Landed",
    "LedgerPool",
    "OffloadScheduler",
    "OutOfBlocks",
    "PrefixHit",
    "RequestTooLarge",
    "SharedOptions",
    "SlidingWindow",
    "SnapshotError",
    "StateError",
    "StateSpace",
    "StepAllocation",
    "TierJob",
    "Transfer",
    "TransferCompleted",
    "TransferError",
    "TransferInitiated",
    "UnknownRequest",
    "__version__",
    "clairvoyant_hits",
    "hash_tokens",
    "salted_ids",
]

if _core.debug_build:
    warnings.warn(
        "kvstow was built without optimisation and is many times slower than it should be: "
        "rebuild it in release mode (pip install ., or maturin develop --release)",
        RuntimeWarning,
        stacklevel=2,
    )
