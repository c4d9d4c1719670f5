"""kvstow keeps an LLM server's KV cache when the GPU runs out of room.

Accounting for a device's blocks and a host tier (`BlockPool`, `BlockLedger`, `OffloadScheduler`),
block hashes equal to vLLM's (`hash_tokens`), and the movement of bytes (`kvstow.transfer`).
"""

import warnings

from kvstow import _core
from kvstow._core import (
    AllBlocksCleared,
    BlockLedger,
    BlockPool,
    BlockRemoved,
    BlockStored,
    ChecksumMismatch,
    ChunkedLocal,
    ConfigError,
    FullAttention,
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
    TransferError,
    UnknownRequest,
    __version__,
    hash_tokens,
)

__all__ = [
    "AllBlocksCleared",
    "BlockLedger",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "ChecksumMismatch",
    "ChunkedLocal",
    "ConfigError",
    "FullAttention",
    "InvalidBlock",
    "Job",
    "JobEnd",
    "KvstowError",
    "LedgerPool",
    "OffloadScheduler",
    "OutOfBlocks",
    "PrefixHit",
    "SlidingWindow",
    "SnapshotError",
    "StateError",
    "StateSpace",
    "StepAllocation",
    "TransferError",
    "UnknownRequest",
    "__version__",
    "hash_tokens",
]

if _core.debug_build:
    warnings.warn(
        "kvstow was built without optimisation and is many times slower than it should be: "
        "rebuild it in release mode (pip install ., or maturin develop --release)",
        RuntimeWarning,
        stacklevel=2,
    )
