"""kvstow keeps an LLM server's KV cache when the GPU runs out of room.

Accounting for a device's blocks and a host tier (`BlockPool`, `BlockLedger`, `OffloadScheduler`),
block hashes equal to vLLM's (`hash_tokens`), the movement of bytes (`kvstow.transfer`), and all of
it in one object for the author of an engine (`Engine`), which can `sleep`.
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
    HitCurve,
    InvalidBlock,
    Job,
    JobEnd,
    KvstowError,
    LedgerPool,
    OffloadScheduler,
    OutOfBlocks,
    PrefixHit,
    SlidingWindow,
    SnapshotError,
    StateError,
    StateSpace,
    StepAllocation,
    TransferCompleted,
    TransferError,
    TransferInitiated,
    UnknownRequest,
    __version__,
    clairvoyant_hits,
    hash_tokens,
)

if TYPE_CHECKING:
    from kvstow.engine import HOST, Admission, AdmissionState, Awake, Engine, Landed, Transfer
else:

    def __getattr__(name: str) -> object:
        """Import the engine when it is first asked for: the accounting alone needs no transfer."""
        if name in {"HOST", "Admission", "AdmissionState", "Awake", "Engine", "Landed", "Transfer"}:
            from kvstow import engine  # noqa: PLC0415

            return getattr(engine, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """List what is imported when it is first asked for, too."""
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
    "Engine",
    "FullAttention",
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
    "SlidingWindow",
    "SnapshotError",
    "StateError",
    "StateSpace",
    "StepAllocation",
    "Transfer",
    "TransferCompleted",
    "TransferError",
    "TransferInitiated",
    "UnknownRequest",
    "__version__",
    "clairvoyant_hits",
    "hash_tokens",
]

if _core.debug_build:
    warnings.warn(
        "kvstow was built without optimisation and is many times slower than it should be: "
        "rebuild it in release mode (pip install ., or maturin develop --release)",
        RuntimeWarning,
        stacklevel=2,
    )
