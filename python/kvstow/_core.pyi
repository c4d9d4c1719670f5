"""The accounting core, in Rust. Import these names from `kvstow`, not from here.

Ids come out as `int32` arrays and go in as any sequence of ints or any integer array. A hash is
`bytes`, 1 to 32 long, one width per object. Every operation is all or nothing: one that raises
has changed nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias, final, overload

import numpy as np
import numpy.typing as npt

__all__ = [
    "AllBlocksCleared",
    "BlockCopier",
    "BlockLedger",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CacheStoreCommitted",
    "ChecksumMismatch",
    "ChunkedLocal",
    "ConfigError",
    "FullAttention",
    "Hashes",
    "HitCurve",
    "InvalidBlock",
    "Job",
    "JobEnd",
    "KvstowError",
    "LedgerPool",
    "OffloadScheduler",
    "OutOfBlocks",
    "PrefixHit",
    "RequestTooLarge",
    "SlidingWindow",
    "SnapshotError",
    "StateError",
    "StateSpace",
    "StepAllocation",
    "TierJob",
    "TransferCompleted",
    "TransferError",
    "TransferInitiated",
    "UnknownRequest",
    "__version__",
    "clairvoyant_hits",
    "debug_build",
    "hash_tokens",
    "row_checksums",
    "row_digests",
    "salted_ids",
]

__version__: str
debug_build: bool
"""Whether the binary was built without optimisation (`maturin develop` without `--release`)."""

_Ints: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
_Ids: TypeAlias = npt.NDArray[np.int32]
_Keys: TypeAlias = Sequence[bytes] | _Ints
_Bools: TypeAlias = Sequence[bool] | npt.NDArray[np.bool_]
_ExtraKey: TypeAlias = int | str | bytes | bool | tuple["_ExtraKey", ...] | list["_ExtraKey"] | None
_ExtraKeys: TypeAlias = Sequence[Sequence[_ExtraKey] | None]
_Group: TypeAlias = FullAttention | SlidingWindow | ChunkedLocal | StateSpace
_TransferEvent: TypeAlias = TransferInitiated | CacheStoreCommitted | TransferCompleted
_Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared

class KvstowError(Exception):
    """The base of every error that this library raises on purpose."""

class ConfigError(KvstowError):
    """A size, option or argument that can never be right."""

class OutOfBlocks(KvstowError):
    """An allocation that the pool cannot serve."""

class RequestTooLarge(OutOfBlocks):
    """A request that can never run, because it needs more blocks than the whole pool has."""

class InvalidBlock(KvstowError):
    """A block id outside the pool, or a block whose state forbids the operation."""

class UnknownRequest(KvstowError):
    """A request that was never added, or that was freed."""

class StateError(KvstowError):
    """An operation that comes at the wrong moment."""

class TransferError(KvstowError):
    """A store or load that failed."""

class ChecksumMismatch(TransferError):
    """A loaded block whose bytes differ from the stored bytes."""

class SnapshotError(KvstowError):
    """A snapshot that is damaged, truncated or foreign."""

def hash_tokens(
    tokens: _Ints,
    block_size: int,
    *,
    algorithm: Literal["sha256", "sha256_cbor", "xxhash_cbor"] = "sha256_cbor",
    parent: bytes | None = None,
    extra_keys: _ExtraKeys | None = None,
    seed: str | None = None,
) -> Hashes:
    """Return one digest per full block of `tokens`. Each digest covers the whole prefix.

    The digests are bit-identical to those of vLLM's `hash_block_tokens` with the same algorithm.

    Args:
        tokens: token ids, 0 to 2**63. A partial last block gets no digest.
        block_size: tokens per block, at least 1.
        algorithm: vLLM's default is "sha256" (32-byte digests of Python's pickle). "sha256_cbor"
            (32-byte digests) and "xxhash_cbor" (16-byte digests) do not depend on Python.
        parent: the digest of the block before the first; None or empty at the start of a prompt.
        extra_keys: one entry per full block, None or a sequence of keys (nested tuples of ints,
            strings, bytes). vLLM derives keys from LoRA, multimodal inputs and cache salts. With
            "sha256", lists and tuples differ, and so do one object twice and two equal objects.
        seed: the string that determines the parent digest of a prompt's first block. vLLM takes
            `PYTHONHASHSEED` if it is set. Otherwise vLLM takes "vllm-none-hash" for SHA-256 and a
            random string per process for xxhash_cbor. This function takes "vllm-none-hash" for all
            by default. It does not read the environment.

    Returns:
        One digest per full block, as a sequence that ledgers and schedulers share.

    Raises:
        ConfigError: a token outside its bounds, a block size of 0, an unknown algorithm, a
            number of extra keys other than the number of full blocks, or a key of another type.
    """

@final
class Hashes(Sequence[bytes]):
    """The hashes of consecutive blocks: a sequence of `bytes` that nothing changes.

    Ledgers, schedulers and pools share it instead of copying it, so an `add` costs the same for any
    number of hashes. Slices and sums are new `Hashes`. It equals another `Hashes`, or a list, with
    the same hashes. `bytes(hashes)` joins them. `numpy.asarray(hashes)` has a row of uint8 for
    each. Both copy.

    It remembers the hash before its first one if `hash_tokens` made it. So `add` and `extend` can
    refuse hashes that do not continue those of a request, and a sum refuses hashes that do not
    continue its first part. A list of `bytes` remembers nothing.

    Args:
        hashes: a sequence of hashes, each 1 to 32 bytes, all of one width.
        block_size: the tokens that each hash adds to the one before, if known. Those of another
            `Hashes` are kept.

    Raises:
        ConfigError: hashes of different widths, or of a type other than bytes.
    """

    def __new__(cls, hashes: Sequence[bytes], block_size: int | None = None) -> Hashes: ...
    @property
    def block_size(self) -> int | None:
        """The tokens that each hash adds to the one before; None if unknown.

        `hash_tokens` sets it. Ledgers and schedulers refuse hashes of another block size than
        theirs.
        """
    @property
    def is_chained(self) -> bool:
        """Whether `hash_tokens` has chained each hash with the one before it.

        No two of them are equal then. A list of `bytes` may be chained too, but it is not known.
        """
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int, /) -> bytes: ...
    @overload
    def __getitem__(self, index: slice, /) -> Hashes: ...
    def __iter__(self) -> Iterator[bytes]: ...
    def __contains__(self, hash: object, /) -> bool: ...
    def __add__(self, other: Sequence[bytes], /) -> Hashes: ...
    def __mul__(self, times: int, /) -> Hashes: ...
    def __rmul__(self, times: int, /) -> Hashes: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __bytes__(self) -> bytes: ...
    def __array__(
        self, dtype: npt.DTypeLike | None = None, *, copy: bool | None = None
    ) -> npt.NDArray[np.uint8]:
        """Return an array of uint8 with one row per hash, always a copy.

        Without this method, numpy would make an array of `bytes`, which drops the zeros at the end
        of a hash.
        """
    def __getnewargs__(self) -> tuple[list[bytes], int | None]: ...
    def index(self, value: object, start: int = 0, stop: int = ...) -> int:
        """Return the first place of a hash. Raises `ValueError` if it is not there."""
    def count(self, value: object) -> int:
        """Return how often a hash occurs."""

def row_checksums(rows: npt.NDArray[np.uint8], row_ids: _Ints) -> npt.NDArray[np.uint32]:
    """Return the CRC-32 of each of these rows. The values equal those of `zlib.crc32`.

    The work runs without the interpreter lock, unless it is short.

    Args:
        rows: a two-dimensional array. The bytes of each row are contiguous; rows may be apart.
        row_ids: the rows to read, in any order.

    Raises:
        ConfigError: an array of another shape or dtype, rows that are not contiguous, or a row id
            outside the array.
    """

def row_digests(rows: npt.NDArray[np.uint8], row_ids: _Ints) -> npt.NDArray[np.uint64]:
    """Return the XXH3 digest of 64 bits, without a seed, of each of these rows.

    The work runs without the interpreter lock, unless it is short.

    Args:
        rows: a two-dimensional array. The bytes of each row are contiguous; rows may be apart.
        row_ids: the rows to read, in any order.

    Raises:
        ConfigError: an array of another shape or dtype, rows that are not contiguous, or a row id
            outside the array.
    """

@final
class BlockCopier:
    """Copies blocks between the regions of a layout and the slots of an arena.

    A copy runs without the interpreter lock, and its stores bypass the caches. A brief one keeps
    the lock, and stores into the caches. While the copier lives, its buffers can be neither resized
    nor released.

    Each call checks all pairs before it copies the first, so one that raises has changed nothing.

    Args:
        regions: (memory, block_stride_bytes, block_bytes) for each region, in the order of a slot.
            The memory is a writable, contiguous buffer of uint8 that begins with block 0.
        num_blocks: blocks in every region.
        slots: the memory of the arena, such a buffer.
        slot_stride_bytes: bytes from the start of one slot to the next.
        slot_bytes: bytes of a slot that a checksum covers.
        num_slots: slots of the arena.

    Raises:
        ConfigError: an object is not such a buffer, the rows reach past their memory or overlap, a
            block does not fit in a slot, or a region shares memory with the slots.
    """

    def __new__(
        cls,
        regions: Sequence[tuple[npt.NDArray[np.uint8], int, int]],
        num_blocks: int,
        slots: npt.NDArray[np.uint8],
        slot_stride_bytes: int,
        slot_bytes: int,
        num_slots: int,
    ) -> BlockCopier: ...
    def store(self, block_ids: _Ints, host_slots: _Ints, *, brief: bool = False) -> None:
        """Copy block `block_ids[i]` to slot `host_slots[i]`, for every i.

        Raises:
            InvalidBlock: a block or slot is out of range.
            ConfigError: the arguments are not ids, or differ in number.
        """
    def load(self, host_slots: _Ints, block_ids: _Ints, *, brief: bool = False) -> None:
        """Copy slot `host_slots[i]` to block `block_ids[i]`, for every i.

        Raises:
            InvalidBlock: as `store`.
            ConfigError: as `store`.
        """
    def store_with_checksums(
        self, block_ids: _Ints, host_slots: _Ints, *, brief: bool = False
    ) -> npt.NDArray[np.uint32]:
        """Copy as `store`, and return the CRC-32 of each slot, of all its `slot_bytes`.

        Each byte of a block is read once.

        Raises:
            InvalidBlock: as `store`.
            ConfigError: as `store`.
        """

@final
class BlockStored:
    """Blocks of one pool and one group that lookups can now find, consecutive in their prefix."""

    @property
    def block_hashes(self) -> list[bytes]:
        """The hashes of the blocks, in the order of the prefix."""
    @property
    def parent_block_hash(self) -> bytes | None:
        """The hash of the block before the first. None at the start of a prompt, or if unknown."""
    @property
    def token_ids(self) -> list[int] | None:
        """The tokens of all the blocks; None if the caller gave none."""
    @property
    def extra_keys(self) -> list[tuple[_ExtraKey, ...] | None] | None:
        """The extra keys of each block; None if the caller gave none."""
    @property
    def block_size(self) -> int | None:
        """Tokens per block; None for a bare `BlockPool`, which does not know it."""
    @property
    def group(self) -> int:
        """The index of the group."""
    @property
    def medium(self) -> str:
        """vLLM's name of the memory: "GPU" (device), "CPU" (host) or "STORAGE" (disk)."""

@final
class BlockRemoved:
    """Keys of one pool and one group that no block holds any more."""

    @property
    def block_hashes(self) -> list[bytes]:
        """The hashes of the removed keys."""
    @property
    def group(self) -> int:
        """The index of the group."""
    @property
    def medium(self) -> str:
        """vLLM's name of the memory: "GPU" (device), "CPU" (host) or "STORAGE" (disk)."""

@final
class AllBlocksCleared:
    """A pool dropped all its keys at once."""

    @property
    def medium(self) -> str:
        """vLLM's name of the memory: "GPU" (device), "CPU" (host) or "STORAGE" (disk)."""

@final
class FullAttention:
    """Layers that attend to the whole prefix, MLA included. A hit needs every block of the prefix.

    Args:
        block_size: tokens per block.
        drops_last_block: a hit ends one block before the blocks that are found. The attention
            layers of a draft model that reads hidden states (EAGLE, MTP) need this, because they
            compute a token from the token after it.

    Raises:
        ConfigError: a block size that is not 1 to 2**30.
    """

    def __new__(cls, block_size: int, *, drops_last_block: bool = False) -> FullAttention: ...
    @property
    def block_size(self) -> int:
        """Tokens per block."""
    @property
    def drops_last_block(self) -> bool:
        """Whether a hit ends one block before the blocks that are found."""
    def __getnewargs_ex__(self) -> tuple[tuple[int], dict[str, bool]]: ...
    def __hash__(self) -> int: ...

@final
class SlidingWindow:
    """Layers in which a token attends to itself and the `window - 1` tokens before it.

    Args:
        block_size: tokens per block.
        window: tokens in the window, the attending token included.
        extra_retained_tokens: tokens right below the window that no token attends to. A request
            keeps their blocks, and a load brings them. Speculative decoding with several MTP
            modules needs them (vLLM's `SlidingWindowSpec.extra_retained_tokens`). A hit on the
            device does not need them.
        drops_last_block: a hit ends one block before the blocks that are found. The attention
            layers of a draft model that reads hidden states (EAGLE, MTP) need this, because they
            compute a token from the token after it.

    Raises:
        ConfigError: a block size or window that is not 1 to 2**30, or a window that exceeds
            2**30 together with its extra tokens.
    """

    def __new__(
        cls,
        block_size: int,
        window: int,
        *,
        extra_retained_tokens: int = 0,
        drops_last_block: bool = False,
    ) -> SlidingWindow: ...
    @property
    def block_size(self) -> int:
        """Tokens per block."""
    @property
    def window(self) -> int:
        """Tokens in the window, the attending token included."""
    @property
    def extra_retained_tokens(self) -> int:
        """Tokens right below the window whose blocks a request keeps."""
    @property
    def drops_last_block(self) -> bool:
        """Whether a hit ends one block before the blocks that are found."""
    def __getnewargs_ex__(self) -> tuple[tuple[int, int], dict[str, int]]: ...
    def __hash__(self) -> int: ...

@final
class ChunkedLocal:
    """Layers in which a token attends to the tokens of its own chunk, up to itself.

    Args:
        block_size: tokens per block.
        chunk: tokens per chunk, a multiple of `block_size`.

    Raises:
        ConfigError: a block size or chunk that is not 1 to 2**30, or a chunk that is not a
            multiple of the block size.
    """

    def __new__(cls, block_size: int, chunk: int) -> ChunkedLocal: ...
    @property
    def block_size(self) -> int:
        """Tokens per block."""
    @property
    def chunk(self) -> int:
        """Tokens per chunk. Chunks begin at the multiples of this number."""
    def __getnewargs__(self) -> tuple[int, int]: ...
    def __hash__(self) -> int: ...

@final
class StateSpace:
    """Layers with a recurrent state (Mamba). A block holds the state after its last token.

    A step reads the state of the block that holds the token before its first one. It writes the
    state after the last token of each block that it fills, and after its own last token.
    Lookups find every full block. If your kernel returns only the last state, let no step
    compute past the next block end. `rewind` brings no earlier state back: before you compute
    drafts, copy the state.

    Args:
        block_size: tokens per block.

    Raises:
        ConfigError: a block size that is not 1 to 2**30.
    """

    def __new__(cls, block_size: int) -> StateSpace: ...
    @property
    def block_size(self) -> int:
        """Tokens per block."""
    def __getnewargs__(self) -> tuple[int]: ...
    def __hash__(self) -> int: ...

@final
class BlockPool:
    """All blocks of one memory: reference counts, eviction order, and the prefixes they hold.

    Block 0 is the null block, a placeholder that the pool never hands out. So `num_blocks - 1`
    blocks are usable.

    Args:
        num_blocks: number of blocks, the null block included.
        events: whether the pool records events for `take_events`.

    Raises:
        ConfigError: `num_blocks` is not 2 to 2**31 - 1, or the machine lacks the memory for the
            accounting.
    """

    def __new__(cls, num_blocks: int, *, events: bool = False) -> BlockPool: ...
    @property
    def num_blocks(self) -> int:
        """Number of blocks, the null block included."""
    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can take: neither referenced nor pinned."""
    @property
    def num_cached(self) -> int:
        """Blocks that hold a key, referenced or not."""
    @property
    def num_evicted(self) -> int:
        """Blocks that have lost their key to an `allocate`, since construction."""
    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the accounting itself takes."""
    def allocate(self, n: int) -> _Ids:
        """Take `n` blocks from the head of the free queue, each with one reference.

        Cached blocks among them lose their key.

        Returns:
            The ids of the blocks.

        Raises:
            OutOfBlocks: fewer than `n` blocks are free.
        """
    def touch(self, ids: _Ints) -> None:
        """Take one reference on each block. A free block leaves the free queue."""
    def free(self, ids: _Ints) -> None:
        """Drop one reference on each block.

        Blocks that reach 0 with a key go to the tail of the free queue. Blocks that reach 0
        without a key go to its head. Both keep the order of `ids`.

        Args:
            ids: block ids in eviction order.

        Raises:
            InvalidBlock: a block that is already free, or an id outside the pool.
        """
    def pin(self, ids: _Ints) -> None:
        """Hold each block for a copy. It keeps its place in the queue; `allocate` skips it."""
    def unpin(self, ids: _Ints) -> None:
        """Drop one pin on each block. Raises `InvalidBlock` for a block that has none."""
    def cache(self, ids: _Ints, hashes: Sequence[bytes], *, group: int = 0) -> None:
        """Publish full blocks: `ids[i]` holds the KV that `hashes[i]` names.

        A block that already holds this key stays as it is.

        Raises:
            InvalidBlock: the null block, a free block, or a block that holds another key.
            ConfigError: lists of different lengths, or hashes of another width than the pool's.
        """
    def lookup(self, hashes: Sequence[bytes], *, group: int = 0) -> _Ids:
        """Return the block ids of the longest cached prefix of `hashes`.

        If several blocks hold a key, the result has the oldest one.
        """
    def evict(self, ids: _Ints) -> None:
        """Drop the keys of these blocks, referenced or not. A free block keeps its place."""
    def reset(self) -> bool:
        """Drop every key. Return False and change nothing if a block is referenced or pinned."""
    def ref_counts(self, ids: _Ints) -> _Ids:
        """Return the number of references on each block."""
    def pin_counts(self, ids: _Ints) -> _Ids:
        """Return the number of pins on each block."""
    def free_order(self) -> _Ids:
        """Return the free queue, the next block to take first, pinned blocks included."""
    def check(self) -> None:
        """Verify every invariant in O(num_blocks). Raises `StateError` if one is broken."""
    def take_events(self) -> list[_Event]:
        """Return the events since the last call, oldest first. Empty without `events=True`."""

@final
class PrefixHit:
    """The prefix that `BlockLedger.lookup` found.

    A hit holds no references. `BlockLedger.allocate` takes them when you pass it the hit.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens in the prefix."""
    @property
    def blocks(self) -> tuple[_Ids, ...]:
        """One array of block ids per group. 0 stands where the group needs no block."""

@final
class StepAllocation:
    """The blocks that `BlockLedger.allocate_step` allocated."""

    @property
    def num_granted(self) -> int:
        """Number of requests, from the first, that got their slots."""
    @property
    def ids(self) -> _Ids:
        """The newly allocated block ids of these requests, request by request, group by group."""
    @property
    def offsets(self) -> _Ids:
        """Where each (request, group) begins in `ids`: `num_granted * num_groups + 1` entries."""

@final
class LedgerPool:
    """The pool of a ledger. The ledger alone takes and drops references in it."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks, the null block included."""
    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can take: neither referenced nor pinned."""
    @property
    def num_cached(self) -> int:
        """Blocks that hold a key, referenced or not."""
    @property
    def num_evicted(self) -> int:
        """Blocks that have lost their key to an `allocate`, since construction."""
    def pin(self, ids: _Ints) -> None:
        """Hold each block for a copy. It keeps its place in the queue; `allocate` skips it."""
    def unpin(self, ids: _Ints) -> None:
        """Drop one pin on each block. Raises `InvalidBlock` for a block that has none."""
    def evict(self, ids: _Ints) -> None:
        """Drop the keys of these blocks, referenced or not. A free block keeps its place."""
    def reset(self) -> bool:
        """Drop every key. Return False and change nothing if a block is referenced or pinned."""
    def ref_counts(self, ids: _Ints) -> _Ids:
        """Return the number of references on each block."""
    def pin_counts(self, ids: _Ints) -> _Ids:
        """Return the number of pins on each block."""
    def free_order(self) -> _Ids:
        """Return the free queue, the next block to take first, pinned blocks included."""
    def take_events(self) -> list[_Event]:
        """Return the events since the last call, oldest first. Empty without `events=True`."""

@final
class BlockLedger:
    """The accounting of a device: requests, their block tables, and the prefixes they share.

    Args:
        num_blocks: number of blocks in the pool, the null block included. All groups take their
            blocks from this pool.
        groups: the model's groups of layers.
        publish: when lookups can find the key of a full block. "granted": when `allocate` gives
            the block its slots, as in vLLM. So requests of one step share what this step
            computes. If a step is dropped, report it with `free(num_computed_tokens=...)`.
            "computed": when `cache` or `cache_step` reports the block's tokens. So no lookup finds
            a block that was never computed.
        max_in_flight_tokens: the most in-flight tokens of a request. Pass the token budget of a
            step, times the number of steps that overlap. With it, `must_fit_tokens` counts for a
            window or a chunk only what a request holds at once. Without it, `must_fit_tokens`
            counts all tokens.
        events: whether the ledger records events for `LedgerPool.take_events`.

    Raises:
        ConfigError: no groups, block sizes whose common multiple exceeds 2**30, or a number of
            blocks that `BlockPool` refuses.
    """

    def __new__(
        cls,
        num_blocks: int,
        groups: Sequence[_Group],
        *,
        publish: Literal["granted", "computed"] = "granted",
        max_in_flight_tokens: int | None = None,
        events: bool = False,
    ) -> BlockLedger: ...
    @property
    def pool(self) -> LedgerPool:
        """The pool that all groups take their blocks from."""
    @property
    def num_groups(self) -> int:
        """Number of groups."""
    @property
    def hash_block_size(self) -> int:
        """Tokens per hash: the greatest common divisor of the groups' block sizes."""
    @property
    def hit_block_size(self) -> int:
        """Hits end at its multiples: the least common multiple of the groups' block sizes."""
    @property
    def num_requests(self) -> int:
        """Number of requests that were added and not freed."""
    def add(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        *,
        tokens: _Ints | None = None,
        extra_keys: _ExtraKeys | None = None,
    ) -> None:
        """Add a request.

        Args:
            request_id: a new id.
            hashes: the hashes of its full blocks so far.
            tokens: token ids for events: those of the hashed blocks. Those of a last block that is
                not full may follow, and are dropped. They need `events=True`.
            extra_keys: extra keys for events, one entry per hash. They need `events=True`.

        Raises:
            StateError: the ledger has a request of this id.
        """
    def extend(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        *,
        tokens: _Ints | None = None,
        extra_keys: _ExtraKeys | None = None,
    ) -> None:
        """Append the hashes of blocks that generated tokens have filled.

        They continue the request's last hash, which `hash_tokens` takes as `parent`.

        Args:
            request_id: a request that was added.
            hashes: the hashes of the new blocks.
            tokens: the tokens of these blocks alone, if the request was added with tokens.
            extra_keys: the extra keys of these blocks, for events.

        Raises:
            ConfigError: hashes that are known to continue another block, or none, or tokens of
                other blocks than these.
        """
    def lookup(self, request_id: str, max_tokens: int) -> PrefixHit:
        """Return the longest cached prefix of at most `max_tokens` tokens. Changes nothing.

        Pass `num_tokens - 1`, so that one token is left to compute.
        """
    def allocate(
        self,
        request_id: str,
        num_new_tokens: int,
        *,
        hit: PrefixHit | None = None,
        num_external_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        delay_caching: bool = False,
        reserve: int = 0,
        num_in_flight_tokens: int = 0,
        must_fit_tokens: int | None = None,
    ) -> tuple[_Ids, ...] | None:
        """Grant slots for a hit, external tokens and new tokens, in all groups or in none.

        Args:
            request_id: a request that was added.
            num_new_tokens: tokens to compute in this step, drafts included.
            hit: what `lookup` of this request returned. Only the first allocation takes one.
            num_external_tokens: tokens right after the hit that a tier fills: a multiple of the
                block size within the known hashes. Only the first allocation takes them.
            num_lookahead_tokens: tokens that get slots, but are neither granted nor published.
            delay_caching: publish nothing until `cache`. Until then another `allocate` of this
                request raises `StateError`.
            reserve: refuse unless this many blocks stay free.
            num_in_flight_tokens: granted tokens whose step is not finished.
            must_fit_tokens: refuse unless slots for that many tokens would fit as well.

        Returns:
            The newly allocated block ids per group, without the blocks of the hit. None if the pool
            cannot serve the request. Then the request keeps what it held, except blocks that their
            group no longer reads.

        Raises:
            UnknownRequest: the request was never added, or was freed.
            ConfigError: nothing to grant, or external tokens that are not a multiple of the block
                size or exceed the known hashes.
            StateError: a hit of another request, a hit with a block that has lost its key, a hit
                or external tokens after the first allocation, or a load that has not ended.
        """
    def allocate_step(
        self,
        request_ids: Sequence[str],
        num_new_tokens: _Ints,
        *,
        num_lookahead_tokens: int = 0,
        num_in_flight_tokens: int = 0,
    ) -> StepAllocation:
        """Call `allocate` for each request in turn, and stop at the first that does not fit.

        Raises what `allocate` raises, and `ConfigError` for lists of different lengths. Then no
        request has got slots.
        """
    def cache(self, request_id: str, num_tokens: int) -> None:
        """Publish the request's blocks up to `num_tokens` computed tokens.

        This ends a delay that `allocate(delay_caching=True)` began.

        Raises:
            ConfigError: more tokens than were granted.
        """
    def cache_step(self, request_ids: Sequence[str], num_computed_tokens: _Ints) -> None:
        """Publish each request's blocks up to its computed tokens, as `cache` does.

        Call it once for a whole step.

        Raises what `cache` raises, and `ConfigError` for lists of different lengths. Then no
        request has published anything.
        """
    def rewind(self, request_id: str, num_tokens: int) -> None:
        """Reduce the granted tokens to `num_tokens`, because drafts were rejected. Frees nothing.

        Raises:
            ConfigError: more tokens than were granted.
            StateError: fewer tokens than are published, or blocks that are already freed and
                would be read again.
        """
    def block_table(self, request_id: str, group: int = 0) -> _Ids:
        """Return the request's block ids. Raises `ConfigError` if the group does not exist."""
    def min_blocks(self, num_tokens: int, num_computed_tokens: int) -> int:
        """Return the fewest blocks that slots for `num_tokens` tokens take.

        Blocks that their group no longer reads after `num_computed_tokens` computed tokens do not
        count. A pool with fewer usable blocks can never grant these slots, even if it is empty.
        """
    def blocks_to_fit(self, num_tokens: int) -> int:
        """Return the number of blocks that `must_fit_tokens=num_tokens` counts."""
    def num_granted_tokens(self, request_id: str) -> int:
        """Return the number of tokens with slots: hit, external and new ones, less rewound ones."""
    def num_hashes(self, request_id: str) -> int:
        """Return the number of hashes that `add` and `extend` gave for the request."""
    def free(self, request_id: str, *, num_computed_tokens: int | None = None) -> list[str]:
        """Drop the request and its references, in each group from the tail on.

        Args:
            request_id: a request that finished, was preempted or was aborted.
            num_computed_tokens: the tokens whose KV exists, if a step was never computed. The
                request's own blocks beyond them lose their keys. Blocks that it hit keep theirs.
                None: all granted tokens were computed.

        Returns:
            The other requests whose tables hold one of these uncomputed blocks. Free them too, and
            recompute them. The list is empty with `publish="computed"`, because no request can hit
            such a block.

        Raises:
            UnknownRequest: the request was never added, or was freed.
            ConfigError: more computed tokens than were granted.
        """
    def restart(self, request_id: str, *, num_computed_tokens: int | None = None) -> list[str]:
        """Free the request's blocks, as `free` does, and keep it added with its hashes.

        Call it when you preempt a request, or when its load failed. It takes and returns what
        `free` takes and returns. A hit from before is stale.
        """
    def request_ids(self) -> list[str]:
        """Return the ids of all requests that were added and not freed, in no order."""
    def hashes(self, request_id: str) -> Hashes:
        """Return the request's hashes."""
    def known(
        self, request_id: str
    ) -> tuple[Hashes, list[int] | None, list[tuple[object, ...] | None] | None]:
        """Return the request's hashes, and its tokens and extra keys if they were given for events.

        The extra keys of a block are a tuple, whatever sequence `add` or `extend` got.
        """
    def snapshot(self, *, blocks: bool = True) -> bytes:
        """Return the ledger as bytes for `restore`, with a version and a checksum.

        The bytes hold the requests, their tables up to the granted tokens, and the keys of the
        blocks in these tables. They do not hold lookahead slots, pins, events, or the keys of
        blocks without references.

        Args:
            blocks: False leaves out tables and keys, as if no request had got slots.
        """
    def restore(
        self, snapshot: bytes, *, block_ids: Literal["same", "packed"] | _Ints = "same"
    ) -> tuple[_Ids, _Ids]:
        """Fill this new ledger from a snapshot of another ledger.

        Args:
            snapshot: what `snapshot` of a ledger with equal groups returned. A ledger without
                events ignores tokens and extra keys.
            block_ids: "same", or "packed": 1, 2, 3 and so on, in the order in which the tables name
                the blocks, request by request. Or the ids to take in that order, at least one for
                each block.

        Returns:
            The old ids of the restored blocks, ascending, and their new ids.

        Raises:
            SnapshotError: not a kvstow snapshot, or one that is damaged, truncated, of another
                version or of other groups.
            OutOfBlocks: the pool has fewer blocks than the snapshot holds.
            ConfigError: the pool lacks the ids of "same", although "packed" would fit; or too few
                ids were given.
            InvalidBlock: an id outside the pool, the null block, or an id that was given twice.
            StateError: this ledger is not new.
        """
    def check(self) -> None:
        """Verify every invariant of ledger and pool. Raises `StateError` if one is broken."""

@final
class Job:
    """One store or load in flight: `block_ids[i]` and `host_slots[i]` are the two ends of a copy.

    Pin `block_ids` in the device pool when the job begins. Unpin what `complete` returns.
    """

    @property
    def job_id(self) -> int:
        """Id of the job. Ids count up from 1 and are not reused. 0 means a sleep image."""
    @property
    def block_ids(self) -> _Ids:
        """Device block ids."""
    @property
    def host_slots(self) -> _Ids:
        """Places on the host, one per device block: 0 to `num_host_blocks * blocks_per_slot - 1`.

        The blocks of one slot are side by side.
        """
    @property
    def offsets(self) -> _Ids:
        """Where each group's copies begin, and the end of the last: `num_groups + 1` values."""
    @property
    def has_all_ids(self) -> bool:
        """Whether `block_ids` are all ids that the planning call got, in order or reversed."""
    def __len__(self) -> int: ...

@final
class TierJob:
    """One demote or promote in flight: `host_slots[i]` and `disk_slots[i]` are the ends of a copy.

    The other columns say what each block is. Report the job to `OffloadScheduler.complete`.
    """

    @property
    def job_id(self) -> int:
        """Id of the job, of the same sequence as those of stores and loads."""
    @property
    def direction(self) -> Literal["demote", "promote"]:
        """The direction: "demote" copies to the disk, "promote" copies to the host."""
    @property
    def host_slots(self) -> _Ids:
        """Slots of the host, whole: slot i holds the places from `i * blocks_per_slot`."""
    @property
    def disk_slots(self) -> _Ids:
        """Slots of the disk, counted from 0."""
    @property
    def hashes(self) -> list[bytes]:
        """The hash of each block."""
    @property
    def groups(self) -> _Ids:
        """The group of each block."""
    @property
    def parents(self) -> list[bytes | None]:
        """The hash before each block; None at a prompt's start, and in groups that skip blocks."""
    def __len__(self) -> int: ...

@final
class JobEnd:
    """How a job ended."""

    @property
    def job_id(self) -> int:
        """Id of the job."""
    @property
    def block_ids(self) -> _Ids:
        """Device block ids to unpin."""
    @property
    def ok(self) -> bool:
        """Whether the copies count. False if the job failed, was late, or was in flight at a reset.

        Recompute the blocks of a load that does not count. A successful store counts even if the
        tier dropped some of its slots, because the store of a block before them failed.
        """
    @property
    def late(self) -> bool:
        """Whether the job missed its deadline, so that `expire` has returned it."""

@final
class TransferInitiated:
    """The scheduler planned a job."""

    @property
    def job_id(self) -> int:
        """Id of the job."""
    @property
    def direction(self) -> Literal["store", "load", "demote", "promote"]:
        """The direction: "store" or "load", or "demote" or "promote" for the disk tier."""
    @property
    def num_blocks(self) -> int:
        """Number of device blocks; of slots for a demote or a promote."""

@final
class CacheStoreCommitted:
    """Lookups can find the blocks of a store, a demote or a promote."""

    @property
    def job_id(self) -> int:
        """Id of the job."""
    @property
    def num_blocks(self) -> int:
        """Number of device blocks; of slots for a demote or a promote.

        Fewer than planned if some were dropped meanwhile.
        """

@final
class TransferCompleted:
    """A job has ended, successfully or not. Each initiated job has exactly one such event."""

    @property
    def job_id(self) -> int:
        """Id of the job."""
    @property
    def direction(self) -> Literal["store", "load", "demote", "promote"]:
        """The direction: "store" or "load", or "demote" or "promote" for the disk tier."""
    @property
    def ok(self) -> bool:
        """Whether the copies count, as in `JobEnd.ok`."""

@final
class OffloadScheduler:
    """Accounting of the host tier, and of a disk tier below it: blocks, what to copy, jobs.

    The scheduler names device blocks and never owns them. A slot holds one block of one group.

    A request makes its whole chain recent when its store completes, when its load begins and when
    it finishes. A slot of a full-attention group is not evicted for room while a child of it is
    resident.

    Args:
        num_host_blocks: number of slots, all usable.
        groups: the device's groups.
        mode: "eager" stores blocks as soon as they are computed. In "lazy" mode, `store` only
            records what was computed, and `store_evictable` plans the stores of blocks that the
            device is about to evict.
        policy: which slots are evicted first. "hit-density" learns from evicted blocks that come
            back, and takes 76 bytes more per slot than "lru".
        blocks_per_slot: consecutive blocks of one prompt in a slot. More than 1 requires eager mode
            and full attention in all groups. Only whole slots are stored, so a shorter tail is not.
        world_size: ranks that must report a job before it ends.
        num_device_blocks: blocks of the device pool. The scheduler refuses ids outside it.
        events: whether to record events for `take_events` and `take_transfer_events`.
        store_threshold: a block is stored once this many requests have computed, hit or loaded it
            and every block before it: 1 to 255. The counts take 32 bytes per slot, at least 512
            KiB, and a count is lost when many other blocks were seen since.
        num_disk_blocks: slots of the disk tier, as large as the host's. 0 for no disk tier. It is
            off until `set_disk` opens it.
        disk_policy: which disk slots are evicted first.
        disk_admit: "all" demotes every block that a store publishes. "returned" demotes blocks that
            were hit, or that are stored again after an eviction, and the blocks before them.
        max_disk_blocks_in_flight: the most slots that demotes copy at a time, and the most that
            promotes copy. Late jobs count until they end.
        min_promote_tokens: `lookup` waits for the disk only if the disk adds this many tokens.

    Raises:
        ConfigError: a value outside its range, or the machine lacks the memory for the accounting.
    """

    def __new__(
        cls,
        num_host_blocks: int,
        groups: Sequence[_Group],
        *,
        mode: Literal["eager", "lazy"] = "eager",
        policy: Literal["lru", "hit-density"] = "lru",
        blocks_per_slot: int = 1,
        world_size: int = 1,
        num_device_blocks: int | None = None,
        events: bool = False,
        store_threshold: int = 1,
        num_disk_blocks: int = 0,
        disk_policy: Literal["lru", "hit-density"] = "lru",
        disk_admit: Literal["all", "returned"] = "all",
        max_disk_blocks_in_flight: int = 64,
        min_promote_tokens: int = 0,
    ) -> OffloadScheduler: ...
    @property
    def num_host_blocks(self) -> int:
        """Number of slots."""
    @property
    def num_resident(self) -> int:
        """Number of host slots that `lookup` can find."""
    def add(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Add a request with the hashes of its blocks known so far."""
    def extend(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Append hashes as generated tokens fill blocks.

        They continue the request's last hash, which `hash_tokens` takes as `parent`.

        Raises:
            ConfigError: hashes that are known to continue another block, or none.
        """
    def truncate(self, request_id: str, num_hashes: int) -> None:
        """Keep the first `num_hashes` hashes of a request, because its last tokens were dropped.

        A streaming session drops its last token when its next chunk arrives. Call `truncate` then,
        and `extend` with the new hashes. The scheduler no longer stores dropped blocks. Stored
        blocks stay under their own hash. A group that skips blocks stores no dropped block again,
        whatever its new hash. Releases what the request's lookup holds.

        Raises:
            ConfigError: more hashes than are known.
        """
    def lower_priority(self, request_id: str) -> None:
        """Give a request low priority, until it finishes.

        The tier evicts the blocks that it stores from now on before all others, until a request of
        normal priority uses them. Its own loads and its end make no block recent.
        """
    def invalidate(self, block_ids: _Ints) -> None:
        """Lazy mode: forget what was computed into device blocks that will be overwritten.

        Name all blocks of an allocation before their request runs. A pool may publish a block's
        hash when it grants the block. If the request then leaves before its step has run, the
        scheduler would store a block that was never computed. In eager mode this does nothing.
        The targets of `load` need no call.
        """
    def lookup(
        self, request_id: str, num_local_tokens: int, max_tokens: int, *, promote: bool = True
    ) -> int | None:
        """Return the number of tokens after the local hit that the host can serve, and pin them.

        The slots stay pinned until `load`, `release`, `finish`, `reset` or the next `lookup` of
        this request.

        Args:
            request_id: the request.
            num_local_tokens: tokens of the local hit.
            max_tokens: upper bound for the whole request, the local hit included.
            promote: whether to wait for blocks that only the disk tier has. Pass False once the
                request has waited long enough: it goes on with what the host has.

        Returns:
            The number of tokens. None means pending. Either another request is loading some of the
            blocks, and they are a local hit once that job has ended. Or the disk tier has blocks
            that the host lacks: call `promote`, and ask again after its job has ended. A request
            has blocks promoted once, until `finish` or `restart`. Nothing is pinned while a request
            waits.

        Raises:
            ConfigError: `num_local_tokens` is not a multiple of the block size that all groups have
                in common.
        """
    def demote(
        self, *, max_blocks: int | None = None, deadline: float | None = None
    ) -> TierJob | None:
        """Plan the demote of the blocks that have been due longest.

        Copy each host slot to its disk slot. The job pins the host slots. It reserves the disk
        slots, whose blocks `lookup` finds once all ranks have reported the job. Evicts disk slots
        for room. A block that the host has lost since, or that the disk has, is left out.

        Args:
            max_blocks: the most slots that the job may have; None for no limit besides
                `max_disk_blocks_in_flight`.
            deadline: when `expire` fails the job, on the caller's clock.

        Returns:
            The job, or None if no block is due, if as many are in flight as may be, and unless the
            disk is "on".
        """
    def promote(
        self, *, max_blocks: int | None = None, deadline: float | None = None
    ) -> TierJob | None:
        """Plan the promote of blocks for which lookups wait, longest waiting request first.

        Copy each disk slot to its host slot. The job pins the disk slots. It reserves the host
        slots, whose blocks `lookup` finds once all ranks have reported the job. Evicts host slots
        for room. A block is promoted once for all requests that need it. A block that failed leaves
        the disk tier.

        Args:
            max_blocks: the most slots that the job may have; None for no limit besides
                `max_disk_blocks_in_flight`. A request that needs more is served in parts.
            deadline: when `expire` fails the job, on the caller's clock.

        Returns:
            The job, or None if no lookup waits, if as many are in flight as may be, and if the disk
            is "off".
        """
    def set_disk(self, mode: Literal["on", "read_only", "off"]) -> None:
        """Open or close the disk tier.

        The disk is off at first, and after each `reset`. Open it once every rank has made the reset
        durable. Jobs in flight continue, and the index stays.

        Args:
            mode: "on"; "read_only" demotes nothing; "off" promotes nothing either, and `lookup`
                sees the host only.

        Raises:
            StateError: the scheduler has no disk tier.
        """
    @property
    def disk_mode(self) -> Literal["on", "read_only", "off"] | None:
        """What the disk tier does: "on", "read_only" or "off"; None without a disk tier."""
    @property
    def num_disk_blocks(self) -> int:
        """Number of slots of the disk tier; 0 without one."""
    def adopt_disk(
        self,
        slots: _Ints,
        hashes: Sequence[bytes],
        groups: _Ints,
        parents: Sequence[bytes | None] | None = None,
    ) -> int:
        """Add blocks that the disk holds already, and return how many were added.

        Call it in as many parts as you like, the least recent blocks first. It leaves out records
        whose slot is in use, or whose key the disk has. A parent may come after its child.

        Args:
            slots: the disk slots, counted from 0.
            hashes: the hash of each block.
            groups: the group of each block.
            parents: the hash before each block, or None; None for no parents at all. Groups that
                skip blocks have no parents.

        Raises:
            StateError: the scheduler has no disk tier.
            ConfigError: a slot outside the disk, an unknown group, a parent in a group that skips
                blocks, hashes of another width, or lists of different lengths.
        """
    def unsaved(
        self, *, max_blocks: int = 16384
    ) -> tuple[_Ids, _Ids, list[bytes], _Ids, list[bytes | None]]:
        """Return the blocks that only the host has, the most recent first, each with a disk slot.

        They are lost when the host memory goes. Nothing changes, and no job reserves the slots:
        they are the empty ones, then those that the disk evicts first. So copy the blocks only when
        no other job begins any more, and leave out each slot that a job has used since this call.

        Args:
            max_blocks: how many of the most recent blocks of the host to look at.

        Returns:
            The host slot of each block, its disk slot, its hash, its group, and the hash before it
            or None. No blocks unless the disk is "on".
        """
    def tier_hits(self, request_id: str, num_local_tokens: int, max_tokens: int) -> tuple[int, int]:
        """Return the tokens of the hit on the host, and of the hit on host and disk together.

        Both include the local hit. They are equal if `lookup` would begin no promote: the disk tier
        adds less than `min_promote_tokens`, it is "off" or missing, or the request has waited for a
        promote already. Changes nothing.

        Args:
            request_id: the request.
            num_local_tokens: tokens of the local hit.
            max_tokens: upper bound for the whole request, the local hit included.

        Raises:
            ConfigError: `num_local_tokens` is not a multiple of the block size that all groups have
                in common.
        """
    def unclaimed(
        self,
        request_id: str,
        num_local_tokens: int,
        max_tokens: int,
        *,
        max_blocks: int = 8192,
    ) -> tuple[list[bytes], _Ids, list[bytes | None]]:
        """Return the blocks of a request to ask a shared store for, in the order of their prompt.

        Neither the host nor the disk tier has them, and they could lengthen the request's hit. Pass
        those that the store has to `claim`, and then call `lookup`.

        Args:
            request_id: the request.
            num_local_tokens: tokens of the local hit.
            max_tokens: upper bound for the whole request, the local hit included.
            max_blocks: the most blocks to return.

        Returns:
            The hash of each block, its group, and the hash before it or None. No blocks if the
            request has waited for a promote already, if they would add less than
            `min_promote_tokens`, and if the disk tier is "off" or missing.

        Raises:
            ConfigError: `num_local_tokens` is not a multiple of the block size that all groups have
                in common.
        """
    def claim(
        self,
        hashes: Sequence[bytes],
        groups: _Ints,
        parents: Sequence[bytes | None] | None = None,
    ) -> int:
        """Add blocks that a shared store has, and return how many were added.

        They take slots of the disk tier's index, evicting others for room. The slots name no place:
        a shared store finds a block by its key. A block whose promote fails leaves the index.

        Args:
            hashes: the hash of each block, the first of a prompt first.
            groups: the group of each block.
            parents: the hash before each block, or None; None for no parents at all. Groups that
                skip blocks have no parents.

        Returns:
            The number of blocks that the disk tier did not have. 0 if it is "off".

        Raises:
            StateError: the scheduler has no disk tier.
            ConfigError: an unknown group, a parent in a group that skips blocks, hashes of another
                width, or lists of different lengths.
        """
    def full_attention_hit(self, request_id: str) -> int:
        """Return the tokens of the prefix whose full-attention blocks the last `lookup` found.

        The local hit is part of it. Where it is longer than the hit, a window or a state that the
        host lacks has shortened the hit. It is 0 without full attention.

        Args:
            request_id: the request.
        """
    def load(
        self,
        request_id: str,
        num_tokens: int,
        block_ids: Sequence[_Ints],
        *,
        local_ids: Sequence[_Ints] | None = None,
        deadline: float | None = None,
    ) -> Job:
        """Load the first `num_tokens` of what `lookup` found, and unpin the rest.

        Args:
            request_id: the request.
            num_tokens: tokens to load, a multiple of the common block size.
            block_ids: per group, the device blocks to fill, in order. Pass what
                `BlockLedger.allocate` took for these external tokens. A group that skips blocks
                loads only those that the token after the load reads.
            local_ids: per group, the device blocks of the local hit. With them all blocks of the
                hit count as reported, and the next `store` takes those after them. So call
                `restart` if the load fails. For models of full attention alone. None: the next
                `store` takes all.
            deadline: when `expire` fails the job, on the caller's clock.

        Raises:
            StateError: `lookup` has found nothing to load. Or the load is shorter than what was
                found, and the host lacks the window before its end. Or the request has reported
                other blocks for these tokens. With `local_ids`, also if blocks were reported
                before, or in a model with windows or states.
            ConfigError: 0 tokens, more than were found, a number that is not a multiple of the
                block size, or another number of blocks.
            InvalidBlock: a repeated or null block.
        """
    def release(self, request_id: str) -> None:
        """Unpin what a request's lookup holds, because none of it is loaded."""
    def store(
        self,
        request_ids: Sequence[str],
        num_computed_tokens: _Ints,
        block_ids: _Ints,
        offsets: _Ints,
        *,
        new_hashes: Sequence[Sequence[bytes]] | None = None,
        max_blocks: int | None = None,
        deadline: float | None = None,
    ) -> Job | None:
        """Plan the stores that a finished step has made due, all in one job.

        Name every request in which a block became full. Call this before the ledger's next
        allocation, because that allocation frees blocks that have left a window.

        Args:
            request_ids: the requests.
            num_computed_tokens: per request, tokens whose KV earlier steps have written.
            block_ids: the device ids appended to each request's block table since you last named it
                here, request by request and group by group. Include the blocks of hits and loads,
                and 0 where a group skips a block.
            offsets: where each (request, group) begins in `block_ids`, as in
                `StepAllocation.offsets`: `len(request_ids) * num_groups + 1` entries.
            new_hashes: per request, hashes to append first, as `extend` does; None for no hashes.
            max_blocks: the most blocks that the job may have; None for no limit.
            deadline: when `expire` fails the job, on the caller's clock.

        Returns:
            The job, or None if there is nothing to store. Keys on the host or in flight are not
            stored again. If slots are short, the first blocks of a full-attention group are stored
            and the last blocks of a window. The others count as dropped. `max_blocks` leaves out
            the same blocks, and they count as throttled. A full-attention block that was left out
            is due again when its request is next named.
        """
    def store_step(
        self,
        ledger: BlockLedger,
        request_ids: Sequence[str],
        num_computed_tokens: _Ints,
        *,
        max_blocks: int | None = None,
        deadline: float | None = None,
    ) -> Job | None:
        """Plan the stores that a finished step has made due, with the block tables of `ledger`.

        As `store`, but the scheduler reads the tables, and the hashes that the requests have got
        since, from the ledger. It looks further only at requests in which a block became full, so
        you may name all requests of the step. Call this before the ledger's next allocation.

        Args:
            ledger: the device's ledger, of the same groups, with the same requests and hashes.
            request_ids: the requests.
            num_computed_tokens: per request, tokens whose KV earlier steps have written.
            max_blocks: as for `store`.
            deadline: when `expire` fails the job, on the caller's clock.

        Raises:
            ConfigError: a ledger of other groups, lists of unequal length, a request that is named
                twice, or more tokens than were granted.
            StateError: a request has other hashes in the ledger, or has started over only there.
        """
    def store_evictable(
        self, pool: BlockPool | LedgerPool, num_blocks: int, *, deadline: float | None = None
    ) -> Job | None:
        """Lazy mode: plan the stores of blocks that `pool` will evict next.

        Stores what was reported to `store` as computed and is not on the host. The pool's queue
        stays as it is. Call it after each step.

        Args:
            pool: the device's pool.
            num_blocks: how many blocks of its free queue to look at. Cover what the next step may
                take: its tokens, and loads that may begin.
            deadline: when `expire` fails the job, on the caller's clock.

        Raises:
            StateError: the scheduler is in eager mode.
        """
    def store_candidates(
        self,
        block_ids: _Ints,
        hashes: Sequence[bytes],
        *,
        group: int = 0,
        suffix_bytes: int = 0,
        deadline: float | None = None,
    ) -> Job | None:
        """As `store_evictable`, for a pool of another library.

        Args:
            block_ids: free blocks, the next to be evicted first.
            hashes: the hash of each block.
            group: the group of these blocks.
            suffix_bytes: bytes at the end of each of `hashes` that are not part of it.
            deadline: when `expire` fails the job, on the caller's clock.
        """
    def complete(
        self,
        job_id: int,
        *,
        ok: bool | _Bools = True,
        rank: int = 0,
    ) -> JobEnd | None:
        """Report that a rank's part of a job has ended, or that it never began.

        Args:
            job_id: the job.
            ok: one bool for the whole job, or one per block in the job's order, of a demote or a
                promote one per slot. Of these two, each block counts that no rank reports as False,
                and a block whose promote failed leaves the disk tier. A failed load drops
                the slot of each block that is False. No lookup finds a dropped slot, and it is
                empty when its last pin ends. Its children stay, and the next store of the block
                brings it back. False for a whole load drops no slot, because a timeout or a device
                error does not damage the host's bytes. A store fails if any of its blocks fails.
            rank: the rank that reports.

        Returns:
            None until all ranks have reported, and for jobs that `end_all` has ended. The last
            report returns how the job ended. A job fails if any part fails. `lookup` then finds the
            slots of a successful store. The slots of a failed one are empty.

        Raises:
            StateError: the job is not in flight, or this rank has reported it.
            ConfigError: a rank outside the world, or a number of outcomes other than the blocks'.
        """
    def expire(self, now: float) -> list[int]:
        """Return the ids of jobs whose `deadline` is before `now`, each of them once.

        Fail their requests now. Device blocks, and the slots of a load, stay pinned in quarantine
        until every rank has reported, because a late copy must not overwrite blocks of another
        request. A late store loses its keys at once, and its slots are empty when every rank has
        reported. No lookup waits for a job in quarantine, and its result never counts.
        """
    def end_all(self, running: Sequence[int] = ()) -> list[JobEnd]:
        """End every job as failed, those in quarantine too. Call it once the movers have stopped.

        The scheduler ignores later reports of these jobs.

        Args:
            running: demotes and promotes that a tier still carries out. They stay in flight, with
                all that they pin, until `complete`.
        """
    def finish(self, request_id: str) -> None:
        """Forget a request that finished, was preempted or was aborted. Its jobs continue."""
    def restart(self, request_id: str) -> None:
        """Forget what a request computed, as `finish` does, and keep it added with its hashes.

        `store_threshold` still counts the request once.
        """
    def reset(self) -> None:
        """Empty the tiers at any moment, and release what lookups hold.

        Jobs in flight still end: stores, demotes and promotes without effect, loads with
        `JobEnd.ok` False. A disk tier is "off" until `set_disk` opens it.

        The next store of a request brings all its full-attention blocks back, also those of before.
        If they must not come back, because the weights have changed, name the request in no store
        before you `restart` it.
        """
    def snapshot(self) -> bytes:
        """Return the scheduler as bytes for `restore`, with a version and a checksum.

        The bytes hold the host tier, its eviction order, what its policy learned, the requests, the
        sleep image and the counters. They hold no jobs, as if all had failed, no pins of lookups,
        and nothing of the disk tier.
        """
    def restore(self, snapshot: bytes) -> None:
        """Fill this new scheduler from a snapshot.

        The restored scheduler knows no device blocks, so report whole tables to `store` again. It
        ignores reports of jobs that were in flight.

        Raises:
            SnapshotError: not a snapshot, damaged, cut off, of another version, or of another
                number of slots, groups, blocks per slot, ranks, mode or policy.
            StateError: this scheduler is not new.
        """
    def hold_image(self, ledger: BlockLedger) -> Job:
        """Reserve host slots for every block that holds granted tokens, while the device sleeps.

        A block whose key is resident stays in that slot, which is pinned. Each other block gets a
        place that no lookup finds. The tier evicts slots for them. Lookups lose their pins.

        Returns:
            The copies to make from device to host, as a job with id 0. Do not report this job.

        Raises:
            OutOfBlocks: the tier cannot hold them. Nothing has changed.
            StateError: jobs are in flight, or the scheduler holds an image already.
            ConfigError: a ledger of other groups.
        """
    @property
    def image(self) -> Job:
        """All copies of the held image. The reverse of each brings its block back.

        The block ids are those that the ledger had. Raises `StateError` if no image is held.
        """
    def used_slots(self) -> _Ids:
        """Return the slots in use, ascending: resident, in a store, or part of a sleep image.

        Slots count from 0. Slot i holds the places from `i * blocks_per_slot`.
        """
    def release_image(self) -> None:
        """Release the image, if any, because the device has its blocks or never needs them."""
    def stats(self) -> dict[str, int]:
        """Return counters since construction, and gauges.

        Counters:
            stored_blocks, loaded_blocks: blocks that were copied.
            dropped_blocks: blocks that had found no room when their request left.
            rare_blocks: blocks that fewer requests than `store_threshold` had seen.
            throttled_blocks: blocks that `max_blocks` of `store` left out.
            evicted_blocks: slots that were evicted for room.
            failed_stores, failed_loads: jobs that have ended, late ones included.
            late_jobs: jobs that missed their deadline. Each counts at once.
            damaged_blocks: blocks that were dropped because a load found them damaged.
            pending_lookups: lookups deferred because another request is loading the same blocks, or
                because they wait for the disk tier.
            query_tokens: tokens, in whole blocks, that lookups asked for. Of each request, only the
                last lookup before it was loaded or computed counts.
            hit_tokens: tokens that loads accepted.

        Gauges:
            resident_blocks, storing_blocks: slots.
            jobs_in_flight: jobs, those in quarantine excluded.
            quarantined_jobs, quarantined_blocks: late jobs, and the device blocks that they pin.
            capacity_tokens: prompt tokens that fit if every group keeps all of its blocks.
        """
    def disk_stats(self) -> dict[str, int]:
        """Return counters of the disk tier, and gauges; all 0 without a disk tier.

        Counters, in slots:
            demoted_blocks, promoted_blocks: copied.
            failed_demotes, failed_promotes: their copy failed or was late.
            disk_dropped: no room on the disk for a demote, or on the host for a promote.
            disk_damaged_blocks: dropped from the disk because their promote failed or was late.
            disk_evicted_blocks: evicted from the disk for room.
            claimed_blocks: added because a shared store has them.

        Counter, in tokens:
            disk_hit_tokens: of loads, what the host lacked when the request began to wait.

        Gauges, in slots:
            disk_resident_blocks: on the disk.
            demoting_blocks, promoting_blocks: in jobs, late ones included.
        """
    def take_disk_events(self) -> list[_Event]:
        """Return the disk tier's events since the last call; none without `events=True`.

        Blocks of `claim` have none, because another server may have put them into the store.
        """
    def take_events(self) -> list[_Event]:
        """Return the events since the last call, oldest first. Empty without `events=True`."""
    def take_transfer_events(self) -> list[_TransferEvent]:
        """Return job events since the last call, oldest first; none without `events=True`."""
    def check(self) -> None:
        """Verify every invariant. Raises `StateError` if one is broken."""

@final
class HitCurve:
    """Hits of an LRU cache at every capacity, from the requests added so far.

    The cache holds one full-attention group, and a request hits the longest prefix that the cache
    holds. As in `OffloadScheduler`, each request is looked up as a whole and then becomes the most
    recent, tail before root. The curve is exact until it watches as many keys as its bounds allow.
    Then it halves its rate. It keeps a sample of the keys, and `hits` are estimates.

    A request is a list of keys, root first. A key stands for a block and all blocks before it.
    Keys are block hashes (`bytes`, one width per curve) or integers from 0 to 2**64 - 1, for
    example the chained ids of a trace. A curve takes hashes or integers, not both.

    For traffic without an end, divide time into turns: see `turn`.

        >>> curve = HitCurve()
        >>> curve.add_all([1, 2, 3, 1, 2, 4, 1, 2, 3], [0, 3, 6, 9])
        >>> curve.hits([1, 2, 3, 4]).tolist()
        [2, 4, 4, 5]

    Args:
        max_keys: the most keys that the curve watches at a time, at least 64. None: no bound.
        max_bytes: the most memory that the curve takes. None: no bound. With 32 MiB, a curve is
            exact for 400,000 distinct blocks.
        seed: chooses the sample. Equal seeds and requests give equal curves.

    Raises:
        ConfigError: a bound below 64 keys, or the machine lacks the memory.
    """

    def __new__(
        cls, *, max_keys: int | None = None, max_bytes: int | None = None, seed: int = 0
    ) -> HitCurve: ...
    def add(self, keys: _Keys) -> None:
        """Serve a request: look up all its keys, then make them recent, tail before root.

        Args:
            keys: keys of the request's blocks, root first.

        Raises:
            ConfigError: a key that is no hash and no integer within the bounds, a key of another
                kind than the curve's, or the machine lacks the memory.
        """
    def add_all(self, keys: _Keys, offsets: _Ints) -> None:
        """Serve all requests of a trace in turn. Releases the interpreter lock.

        Args:
            keys: keys of all requests, one request after the other.
            offsets: where each request begins in `keys`, and the number of keys at the end.

        Raises:
            ConfigError: as `add`, or offsets that do not fit the keys. If the machine lacks the
                memory for a request, the requests before it have been added.
        """
    def lookup(self, keys: _Keys, num_local: int = 0, *, ends: _Ints | None = None) -> int:
        """Look up all keys of a request, and leave their recency as it is.

        Args:
            keys: keys of the request's blocks, root first.
            num_local: the first blocks that a cache in front of this one has. They are hits at
                every capacity, 0 included, and this cache is not asked for them.
            ends: the numbers of blocks at which a hit may end, ascending. Models with sliding
                windows or recurrent states have few. None: a hit may end at each block.

        Returns:
            The first blocks that the curve knows: an estimate once `rate` is below 1.

        Raises:
            ConfigError: as `add`, or ends that descend.
        """
    def insert(self, keys: _Keys) -> None:
        """Make the keys of a request recent, tail before root, without a lookup.

        Args:
            keys: keys of the request's blocks, root first.

        Raises:
            ConfigError: as `add`.
        """
    def turn(self, num_kept: int) -> None:
        """Begin a turn: halve the weight of all lookups so far, and forget unused keys.

        Lookups of the present turn weigh 1, those of the turn before weigh 1/2, and so on. `hits`,
        `hit_ratios` and `errors` use these weights. A forgotten key is a miss at its next lookup.

        Args:
            num_kept: the last turns. Keys that no request has used during them are forgotten.
        """
    def clear(self) -> None:
        """Forget all keys, as a cache that is emptied. Past hits and lookups stay."""
    def hits(self, capacities: _Ints) -> npt.NDArray[np.int64]:
        """Return the hit blocks of an LRU cache at each of these capacities, over all requests.

        Args:
            capacities: numbers of blocks that a cache can hold.

        Returns:
            Hit blocks, one int64 per capacity. They are exact while `rate` is 1 and no turn has
            ended. Otherwise they are rounded.
        """
    def hit_ratios(self, capacities: _Ints) -> npt.NDArray[np.float64]:
        """Return the share of looked-up blocks that are hits, at each of these capacities.

        Args:
            capacities: numbers of blocks that a cache can hold.

        Returns:
            Hit ratios as fractions, one float64 per capacity; 0 without lookups.
        """
    def errors(self, capacities: _Ints) -> npt.NDArray[np.float64]:
        """Return the standard error of the hit ratio at each of these capacities.

        The estimate comes from the differences between 16 parts of the sample. It leaves out the
        keys with many uses, whose capacities are estimates, too. Where these keys make most of the
        hits, the error can be several times as large: compare curves of several seeds.

        Args:
            capacities: numbers of blocks that a cache can hold.

        Returns:
            Standard errors as fractions, one float64 per capacity: 0.01 is one point. They are 0
            while `rate` is 1.
        """
    @property
    def largest_capacity(self) -> int:
        """The capacity, in blocks, from which on a larger cache has no more hits."""
    @property
    def num_requests(self) -> int:
        """Requests looked up."""
    @property
    def num_lookups(self) -> int:
        """Blocks looked up: the keys of all requests, those of earlier turns in full."""
    @property
    def num_unique(self) -> int:
        """Distinct blocks that the curve remembers. It is an estimate once `rate` is below 1."""
    @property
    def num_keys(self) -> int:
        """Keys that the curve watches."""
    @property
    def rate(self) -> float:
        """The share of new keys that the curve watches: 1.0 while it is exact."""
    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the curve takes."""

def salted_ids(hashes: Sequence[bytes], salt: bytes) -> npt.NDArray[np.uint64]:
    """Return an id for each block hash, which only those who have the salt can compute.

    Equal hashes have equal ids under one salt. Ids under two salts have nothing in common.

        >>> salted_ids([b"one", b"two", b"one"], b"salt").tolist()
        [3556238144577063906, 1513496506158520935, 3556238144577063906]

    Args:
        hashes: block hashes, of one width.
        salt: random bytes, 16 or more to keep guesses out.

    Returns:
        Ids from 0 to 2**63 - 1, one uint64 per hash.

    Raises:
        ConfigError: a hash that is no `bytes`, is empty or longer than 32, or of another width.
    """

def clairvoyant_hits(keys: _Keys, offsets: _Ints, capacities: _Ints) -> npt.NDArray[np.int64]:
    """Return the most blocks that any cache can hit, at each of these capacities.

    The bound knows the future. It keeps the blocks with the nearest next uses, and it may bypass
    the cache. It holds for every eviction policy of a cache with one full-attention group that
    looks up each request as a whole. Releases the interpreter lock.

        >>> clairvoyant_hits([1, 2, 3, 1, 2, 4, 1, 2, 3], [0, 3, 6, 9], [1, 2, 3]).tolist()
        [2, 4, 5]

    Args:
        keys: keys of all requests, one request after the other, as `HitCurve` takes them.
        offsets: where each request begins in `keys`, and the number of keys at the end.
        capacities: numbers of blocks that the cache can hold.

    Returns:
        Hit blocks over all requests, one int64 per capacity.

    Raises:
        ConfigError: a key that is no hash and no integer within the bounds, keys that are not
            chained, offsets that do not fit the keys, more than 2**32 - 1 keys, or the machine
            lacks the memory.
    """
