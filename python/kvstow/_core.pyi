"""The accounting core, in Rust. Import these names from `kvstow`, not from here.

Ids come out as `int32` arrays and go in as any sequence of ints or any integer array. A hash is
`bytes`, 1 to 32 long, one width per object. Every operation is all or nothing: one that raises
has changed nothing.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias, final

import numpy as np
import numpy.typing as npt

__all__ = [
    "AllBlocksCleared",
    "BlockLedger",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CacheStoreCommitted",
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
    "TransferCompleted",
    "TransferError",
    "TransferInitiated",
    "UnknownRequest",
    "__version__",
    "debug_build",
    "hash_tokens",
]

__version__: str
debug_build: bool
"""Whether the binary was built without optimisation (`maturin develop` without `--release`)."""

_Ints: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
_Ids: TypeAlias = npt.NDArray[np.int32]
_Bools: TypeAlias = Sequence[bool] | npt.NDArray[np.bool_]
_ExtraKey: TypeAlias = int | str | bytes | bool | tuple["_ExtraKey", ...] | list["_ExtraKey"] | None
_ExtraKeys: TypeAlias = Sequence[Sequence[_ExtraKey] | None]
_Group: TypeAlias = FullAttention | SlidingWindow | ChunkedLocal | StateSpace
_TransferEvent: TypeAlias = TransferInitiated | CacheStoreCommitted | TransferCompleted
_Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared

class KvstowError(Exception):
    """The base of every error this library raises on purpose."""

class ConfigError(KvstowError):
    """A size, option or argument that can never be right."""

class OutOfBlocks(KvstowError):
    """An allocation that the pool cannot serve."""

class InvalidBlock(KvstowError):
    """A block id outside the pool, or a block whose state forbids the operation."""

class UnknownRequest(KvstowError):
    """A request that was never added, or that was freed."""

class StateError(KvstowError):
    """An operation that comes at the wrong moment."""

class TransferError(KvstowError):
    """A store or load that failed."""

class ChecksumMismatch(TransferError):
    """A loaded block whose bytes are not those that were stored."""

class SnapshotError(KvstowError):
    """A snapshot that is damaged, truncated or foreign."""

def hash_tokens(
    tokens: _Ints,
    block_size: int,
    *,
    algorithm: Literal["sha256_cbor", "xxhash_cbor"] = "sha256_cbor",
    parent: bytes | None = None,
    extra_keys: _ExtraKeys | None = None,
    seed: str | None = None,
) -> list[bytes]:
    """Hash the full blocks of `tokens`, each digest chained over its whole prefix.

    Bit-identical to vLLM's `hash_block_tokens` with the algorithm of that name.

    Args:
        tokens: token ids, 0 to 2**63. A partial last block is left out.
        block_size: tokens per block, at least 1.
        algorithm: "sha256_cbor" (32-byte digests) or "xxhash_cbor" (16-byte digests).
        parent: the digest of the block before the first; None or empty at the start of a prompt.
        extra_keys: one entry per full block: None, or a sequence of keys (nested tuples of ints,
            strings, bytes), as vLLM derives them from LoRA, multimodal inputs and cache salts.
        seed: the string that the first block's parent digest is derived from. vLLM takes
            `PYTHONHASHSEED` if that is set; else "vllm-none-hash" for sha256_cbor and a random
            string per process for xxhash_cbor. Here it is "vllm-none-hash" for both by default,
            and the environment is not read.

    Returns:
        One digest per full block.

    Raises:
        ConfigError: a token outside its bounds, a block size of 0, an unknown algorithm, a
            number of extra keys other than the number of full blocks, or a key of another type.
    """

@final
class BlockStored:
    """Blocks that became findable in one pool: consecutive in their prefix, one group."""

    @property
    def block_hashes(self) -> list[bytes]: ...
    @property
    def parent_block_hash(self) -> bytes | None:
        """The hash before the first; None at the start of a prompt or where it is not known."""
    @property
    def token_ids(self) -> list[int] | None:
        """The tokens of all the blocks; None where the caller gave none."""
    @property
    def extra_keys(self) -> list[tuple[_ExtraKey, ...] | None] | None:
        """Per block; None where the caller gave none."""
    @property
    def block_size(self) -> int | None:
        """Tokens per block; None for a bare `BlockPool`, which does not know it."""
    @property
    def group(self) -> int: ...
    @property
    def medium(self) -> str:
        """vLLM's name of the memory: "GPU" (device) or "CPU" (host)."""

@final
class BlockRemoved:
    """Keys that nothing in one pool holds any more."""

    @property
    def block_hashes(self) -> list[bytes]: ...
    @property
    def group(self) -> int: ...
    @property
    def medium(self) -> str: ...

@final
class AllBlocksCleared:
    """A pool dropped all its keys at once."""

    @property
    def medium(self) -> str: ...

@final
class FullAttention:
    """Layers that attend to the whole prefix: a hit needs every block of it (also MLA)."""

    def __new__(cls, block_size: int) -> FullAttention:
        """Raises `ConfigError` unless each is 1 to 2**30."""
    @property
    def block_size(self) -> int:
        """Tokens per block."""
    def __hash__(self) -> int: ...

@final
class SlidingWindow:
    """Layers in which a token attends to itself and the `window - 1` tokens before it."""

    def __new__(
        cls, block_size: int, window: int, *, extra_retained_tokens: int = 0
    ) -> SlidingWindow:
        """Describe a group of such layers.

        Args:
            block_size: tokens per block.
            window: in tokens, the attending one included.
            extra_retained_tokens: tokens right below the window that no token attends to, but
                whose blocks a request keeps and a load brings. Speculative decoding with several
                modules needs them (vLLM's `SlidingWindowSpec.extra_retained_tokens`). A hit on the
                device does not need them.

        Raises:
            ConfigError: a block size or window that is not 1 to 2**30, or a window of more
                together with its extra tokens.
        """
    @property
    def block_size(self) -> int:
        """Tokens per block."""
    @property
    def window(self) -> int:
        """In tokens, the attending one included."""
    @property
    def extra_retained_tokens(self) -> int:
        """Tokens right below the window whose blocks a request keeps."""
    def __hash__(self) -> int: ...

@final
class ChunkedLocal:
    """Layers in which a token attends to its own chunk, up to itself."""

    def __new__(cls, block_size: int, chunk: int) -> ChunkedLocal:
        """Raises `ConfigError` unless both are 1 to 2**30, the chunk a multiple of the block."""
    @property
    def block_size(self) -> int:
        """Tokens per block."""
    @property
    def chunk(self) -> int:
        """In tokens; chunks begin at its multiples."""
    def __hash__(self) -> int: ...

@final
class StateSpace:
    """Layers with a recurrent state (Mamba): a block holds the state after its last token."""

    def __new__(cls, block_size: int) -> StateSpace:
        """Raises `ConfigError` unless each is 1 to 2**30."""
    @property
    def block_size(self) -> int:
        """Tokens per block."""
    def __hash__(self) -> int: ...

@final
class BlockPool:
    """All blocks of one memory: reference counts, eviction order, and which prefixes they hold.

    Id 0 is the null block, a placeholder that is never handed out, so `num_blocks - 1` are usable.
    """

    def __new__(cls, num_blocks: int, *, events: bool = False) -> BlockPool:
        """Raises `ConfigError` unless `num_blocks` is 2 to 2**31 - 1."""
    @property
    def num_blocks(self) -> int:
        """All blocks, the null block included."""
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
        """Bytes of memory the accounting itself takes."""
    def allocate(self, n: int) -> _Ids:
        """Take n blocks from the head of the free queue; cached ones among them are evicted.

        Raises `OutOfBlocks` if fewer than n are free.
        """
    def touch(self, ids: _Ints) -> None:
        """Take one reference on each; a free block leaves the free queue."""
    def free(self, ids: _Ints) -> None:
        """Drop one reference on each, ids given in eviction order.

        Blocks that reach 0 with a key go to the tail of the free queue, those without to its
        head, each in the order given. Raises `InvalidBlock` for a block that is free already.
        """
    def pin(self, ids: _Ints) -> None:
        """Hold each for a copy under way: it keeps its place, and `allocate` passes over it."""
    def unpin(self, ids: _Ints) -> None:
        """Drop one pin on each. Raises `InvalidBlock` for a block that has none."""
    def cache(self, ids: _Ints, hashes: Sequence[bytes], *, group: int = 0) -> None:
        """Publish full blocks: ids[i] holds the KV that hashes[i] names.

        The key a block already holds changes nothing. Raises `InvalidBlock` for the null block, a
        free block, or a block that holds another key.
        """
    def lookup(self, hashes: Sequence[bytes], *, group: int = 0) -> _Ids:
        """The longest cached prefix of `hashes`. Of several blocks with one key, the oldest."""
    def evict(self, ids: _Ints) -> None:
        """Drop the keys of these blocks, referenced or not; a free one keeps its place."""
    def reset(self) -> bool:
        """Drop every key. False, and nothing changed, while a block is referenced or pinned."""
    def ref_counts(self, ids: _Ints) -> _Ids: ...
    def pin_counts(self, ids: _Ints) -> _Ids: ...
    def free_order(self) -> _Ids:
        """The free queue, next to be taken first; pinned blocks in it included."""
    def check(self) -> None:
        """Verify every invariant, O(num_blocks). Raises `StateError` if one is broken."""
    def take_events(self) -> list[_Event]:
        """The events since the last call, oldest first; always empty without `events=True`."""

@final
class PrefixHit:
    """What `BlockLedger.lookup` found. Using it in `allocate` is what takes references."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def blocks(self) -> tuple[_Ids, ...]:
        """One id array per group; 0 stands where the group needs no block."""

@final
class StepAllocation:
    """What `BlockLedger.allocate_step` took."""

    @property
    def num_granted(self) -> int:
        """How many requests, from the first, were served."""
    @property
    def ids(self) -> _Ids:
        """The newly taken ids of all served requests, request by request, group by group."""
    @property
    def offsets(self) -> _Ids:
        """Where each (request, group) begins in `ids`: `num_granted * num_groups + 1` entries."""

@final
class LedgerPool:
    """A view of a ledger's pool: what a caller may do besides what the ledger does."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def num_evicted(self) -> int: ...
    def pin(self, ids: _Ints) -> None:
        """As `BlockPool.pin`."""
    def unpin(self, ids: _Ints) -> None:
        """As `BlockPool.unpin`."""
    def evict(self, ids: _Ints) -> None:
        """As `BlockPool.evict`."""
    def reset(self) -> bool:
        """As `BlockPool.reset`."""
    def ref_counts(self, ids: _Ints) -> _Ids: ...
    def pin_counts(self, ids: _Ints) -> _Ids: ...
    def free_order(self) -> _Ids:
        """As `BlockPool.free_order`."""
    def take_events(self) -> list[_Event]:
        """As `BlockPool.take_events`."""

@final
class BlockLedger:
    """A device's accounting: requests, their block tables, and the prefixes they share."""

    def __new__(
        cls,
        num_blocks: int,
        groups: Sequence[_Group],
        *,
        publish: Literal["granted", "computed"] = "granted",
        max_in_flight_tokens: int | None = None,
        events: bool = False,
    ) -> BlockLedger:
        """All groups take their blocks from one pool of `num_blocks`, the null block included.

        `publish` says when the key of a full block can be found. "granted": when `allocate` gives
        it slots, as vLLM does, so requests of one step share what this step computes. If a step is
        dropped, say so with `free(num_computed_tokens=...)`. "computed": when `cache` or
        `cache_step` reports its tokens, so no lookup finds a block that was never computed.

        `max_in_flight_tokens` is the most tokens that a request is granted before they are
        processed (the token budget of a step, times the steps that overlap). With it
        `must_fit_tokens` counts, for a window or a chunk, what a request holds of it at once;
        without it, all its tokens. Raises `ConfigError` for no groups, or for block sizes whose
        common multiple is beyond 2**30.
        """
    @property
    def pool(self) -> LedgerPool: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def hash_block_size(self) -> int:
        """Tokens per hash: the greatest common divisor of the groups' block sizes."""
    @property
    def hit_block_size(self) -> int:
        """Hits end at its multiples: the least common multiple of the groups' block sizes."""
    @property
    def num_requests(self) -> int: ...
    def add(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        *,
        tokens: _Ints | None = None,
        extra_keys: _ExtraKeys | None = None,
    ) -> None:
        """Make a request known, with the hashes of its blocks known so far.

        `tokens` and `extra_keys` go into events and need `events=True`; `tokens` covers at least
        the hashed blocks. Raises `StateError` for a request that is already known.
        """
    def extend(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        *,
        tokens: _Ints | None = None,
        extra_keys: _ExtraKeys | None = None,
    ) -> None:
        """Append hashes as generated tokens fill blocks."""
    def lookup(self, request_id: str, max_tokens: int) -> PrefixHit:
        """The longest cached prefix of at most `max_tokens` tokens; changes nothing.

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
        """Grant slots for a hit, external tokens and new tokens, for every group or for none.

        Args:
            num_new_tokens: tokens to compute in this step, drafts included.
            hit: what `lookup` of this request returned; first allocation only. Refused with
                `StateError` once one of its blocks no longer holds the key it was found under.
            num_external_tokens: tokens right after the hit that a tier will fill: a multiple of
                the block size within the known hashes; first allocation only.
            num_lookahead_tokens: slots only; never published, never granted.
            delay_caching: publish nothing until `cache`; until then another `allocate` of this
                request raises `StateError`.
            reserve: refuse unless this many blocks stay free.
            num_in_flight_tokens: granted tokens whose step is not finished.
            must_fit_tokens: refuse unless slots for that many tokens would fit as well.

        Returns:
            Newly taken ids per group, hit blocks not included; None when the pool cannot serve
            it: then the request stays added and holds what it held.
        """
    def allocate_step(
        self,
        request_ids: Sequence[str],
        num_new_tokens: _Ints,
        *,
        num_lookahead_tokens: int = 0,
        num_in_flight_tokens: int = 0,
    ) -> StepAllocation:
        """As if `allocate` were called for each in turn; stops at the first that does not fit."""
    def cache(self, request_id: str, num_tokens: int) -> None:
        """Publish this request's blocks up to `num_tokens` computed tokens; ends a delay.

        Raises `ConfigError` beyond the granted tokens.
        """
    def cache_step(self, request_ids: Sequence[str], num_computed_tokens: _Ints) -> None:
        """Publish each request's blocks up to its computed tokens, as `cache` does.

        One call for a whole step. Raises what `cache` raises, and `ConfigError` for lists of
        unequal length; then no request has published anything.
        """
    def rewind(self, request_id: str, num_tokens: int) -> None:
        """Take granted tokens back to this many (rejected drafts); frees nothing.

        Raises `StateError` below what is published, `ConfigError` above what is granted.
        """
    def block_table(self, request_id: str, group: int = 0) -> _Ids:
        """The request's block ids; `ConfigError` for a group that does not exist."""
    def min_blocks(self, num_tokens: int, num_computed_tokens: int) -> int:
        """The fewest blocks that slots for `num_tokens` take, that many of them computed.

        A pool with fewer usable blocks can never grant them, however empty it is.
        """
    def blocks_to_fit(self, num_tokens: int) -> int:
        """The blocks that `must_fit_tokens` counts for so many tokens."""
    def num_granted_tokens(self, request_id: str) -> int: ...
    def free(self, request_id: str, *, num_computed_tokens: int | None = None) -> list[str]:
        """Drop the request: its references, each group's tail first, then the request itself.

        Args:
            request_id: a request that finished, was preempted or was aborted.
            num_computed_tokens: the tokens whose KV exists, where a step was never computed. The
                request's own blocks beyond them lose their keys; blocks that it hit keep theirs.
                None: all granted tokens were computed.

        Returns:
            The other requests whose tables hold such a block that was never computed. Free them
            too, and let them recompute. Empty with `publish="computed"`, where nobody can have hit
            such a block.

        Raises:
            UnknownRequest: it is not known.
            ConfigError: more computed tokens than were granted.
        """
    def request_ids(self) -> list[str]:
        """The ids of the requests that are known, in no order."""
    def known(
        self, request_id: str
    ) -> tuple[list[bytes], list[int] | None, list[tuple[object, ...] | None] | None]:
        """What a request was made known with: its hashes, and for events its tokens and extra keys.

        A block's extra keys come back as a tuple, whatever sequence was given.
        """
    def snapshot(self, *, blocks: bool = True) -> bytes:
        """The ledger as bytes, for `restore`: versioned, and with a checksum.

        In it are the requests, their tables up to the granted tokens, and the keys of the blocks in
        them. Lookahead, pins, events, and the keys of blocks that nobody references are not. With
        `blocks=False`, requests are as if they had never been served.
        """
    def restore(
        self, snapshot: bytes, *, block_ids: Literal["same", "packed"] | _Ints = "same"
    ) -> tuple[_Ids, _Ids]:
        """Fill this ledger, which must be new, with what a snapshot of another holds.

        Args:
            snapshot: what `snapshot` returned, of a ledger of the same groups. Tokens and extra
                keys are left out where this ledger keeps no events.
            block_ids: "same", or "packed": 1, 2, 3 and so on, in the order in which the tables name
                the blocks, request by request; or the ids to take, in that order, at least one for
                each block.

        Returns:
            The old ids of the blocks it holds, ascending, and their new ids.

        Raises:
            SnapshotError: damaged, cut off, of another version or other groups, or no snapshot.
            OutOfBlocks: the pool has fewer blocks than the snapshot holds.
            ConfigError: the pool has no such ids; packed, the blocks fit. Too few ids were given.
            InvalidBlock: an id outside the pool, null, or given twice.
            StateError: this ledger is not new.
        """
    def check(self) -> None:
        """Verify every invariant of ledger and pool. Raises `StateError` if one is broken."""

@final
class Job:
    """One store or load in flight. `block_ids[i]` and `host_slots[i]` name the two ends of a copy.

    Pin `block_ids` in the device pool when the job is planned; unpin what `complete` returns.
    """

    @property
    def job_id(self) -> int:
        """Counts up from 1; never used twice. 0 stands for the copies of a sleep image."""
    @property
    def block_ids(self) -> _Ids:
        """Device block ids."""
    @property
    def host_slots(self) -> _Ids:
        """Places on the host, one device block each: 0 to `num_host_blocks * blocks_per_slot - 1`.

        The blocks of one slot lie side by side.
        """
    @property
    def offsets(self) -> _Ids:
        """Where each group's copies begin, and the end of the last: `num_groups + 1` entries."""
    def __len__(self) -> int: ...

@final
class JobEnd:
    """How a job ended."""

    @property
    def job_id(self) -> int:
        """The job."""
    @property
    def block_ids(self) -> _Ids:
        """Device ids to unpin."""
    @property
    def ok(self) -> bool:
        """Whether its copies count: False if it failed, was late, or a reset overtook it.

        Blocks of a load that does not count must be recomputed. A store that went well counts even
        where some of its slots were given back, because the store of a block before them failed.
        """
    @property
    def late(self) -> bool:
        """Whether it was past its deadline: `expire` has told of it, its request has failed."""

@final
class TransferInitiated:
    """A job was planned."""

    @property
    def job_id(self) -> int: ...
    @property
    def direction(self) -> Literal["store", "load"]: ...
    @property
    def num_blocks(self) -> int:
        """Device blocks."""

@final
class CacheStoreCommitted:
    """What a store brought can be found."""

    @property
    def job_id(self) -> int: ...
    @property
    def num_blocks(self) -> int:
        """Device blocks; less than were planned where some were dropped meanwhile."""

@final
class TransferCompleted:
    """A job has ended, well or not: every one that was initiated once."""

    @property
    def job_id(self) -> int: ...
    @property
    def direction(self) -> Literal["store", "load"]: ...
    @property
    def ok(self) -> bool:
        """As `JobEnd.ok`."""

@final
class OffloadScheduler:
    """The host tier's accounting: which blocks it holds, what to store, what to load, the jobs.

    It names device blocks and never owns them. Recency is per request: a whole chain is ranked
    when its store completes, when a lookup is accepted and when the request finishes, and of a
    full-attention group no slot is evicted for room while a slot of its child is resident. A slot
    holds one block of one group.

    `num_host_blocks` slots, all usable.

    Eager, `store` plans the stores of what was computed; lazy, it only takes note of it, and
    `store_evictable` plans the stores of what the device is about to evict. Which slots go
    first is the `policy`'s choice: "lru", or "hit-density", which learns from what comes back
    and keeps 76 bytes more per slot for that. A slot holds `blocks_per_slot` consecutive blocks
    of one prompt (1 in lazy mode, and unless all groups are full attention); only whole slots
    are stored, so a shorter tail is not. A job ends when all `world_size` ranks have reported
    it. Device ids of `num_device_blocks` or more are refused. Raises `ConfigError` as
    `BlockLedger` does.
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
    ) -> OffloadScheduler: ...
    @property
    def num_host_blocks(self) -> int: ...
    @property
    def num_resident(self) -> int:
        """Slots that hold a block that `lookup` can find."""
    def add(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Make a request known, with the hashes of its blocks known so far."""
    def extend(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Append hashes as generated tokens fill blocks."""
    def truncate(self, request_id: str, num_hashes: int) -> None:
        """Keep the first `num_hashes` hashes of a request, because its last tokens were dropped.

        A streaming session drops its last token when its next chunk arrives: `truncate`, then
        `extend` with the new hashes. Blocks beyond are not stored any more. What was stored stays
        under its own hash. What the request's lookup holds is released. Raises `ConfigError` for
        more hashes than are known.
        """
    def invalidate(self, block_ids: _Ints) -> None:
        """Lazy mode: forget what was computed into device blocks that are about to be overwritten.

        Name all blocks that an allocation took, before their request runs. A pool may publish a
        block's hash when it grants the block; without this call, a request that leaves before its
        step has run would have blocks stored that nobody has computed. In eager mode it does
        nothing. The targets of `load` need no call.
        """
    def lookup(self, request_id: str, num_local_tokens: int, max_tokens: int) -> int | None:
        """How many tokens right after the local hit the host can serve, and pin them.

        At most up to `max_tokens` of the whole request. What is found stays pinned until `load`,
        `release`, `finish`, `reset` or the next `lookup` of this request.

        None means pending: some of it is just being loaded for another request and will be a
        local hit when that job has ended; nothing is pinned, ask again then.

        Raises `ConfigError` if `num_local_tokens` is not a multiple of the block size that all
        groups have in common.
        """
    def load(
        self,
        request_id: str,
        num_tokens: int,
        block_ids: Sequence[_Ints],
        *,
        deadline: float | None = None,
    ) -> Job:
        """Accept the first `num_tokens` of what `lookup` found; the rest is unpinned.

        `block_ids`: per group, the device blocks to fill, in order: what `BlockLedger.allocate`
        took for these external tokens. A group that skips blocks loads only those that the token
        after the load reads. Raises `StateError` without a lookup, and for fewer tokens than were
        found where the window before their end is not on the host; `ConfigError` for more tokens
        than were found, a number that is not a multiple of the block size or 0, or another number
        of blocks; `InvalidBlock` for a repeated or null block.
        """
    def release(self, request_id: str) -> None:
        """Give back what a request's lookup holds, when none of it is loaded."""
    def store(
        self,
        request_ids: Sequence[str],
        num_computed_tokens: _Ints,
        block_ids: _Ints,
        offsets: _Ints,
        *,
        deadline: float | None = None,
    ) -> Job | None:
        """Plan the stores that a finished step has made due, all in one job.

        Name every request in which a block became full, before the ledger's next allocation: that
        frees what has fallen out of a window.

        Args:
            num_computed_tokens: per request, tokens whose KV earlier steps have written.
            block_ids: the device ids appended to each request's block table since it was last
                named here, hits and loads included, 0 where a group skips; request by request,
                group by group.
            offsets: where each (request, group) begins in `block_ids`, as
                `StepAllocation.offsets`: `len(request_ids) * num_groups + 1` entries.

        Returns:
            The job, or None when there is nothing to store. Keys already on the host or in
            flight are not stored again; where slots are short, what fits is stored (of a
            full-attention group the first blocks, of a window the last), and the rest is counted
            as dropped.
        """
    def store_evictable(
        self, pool: BlockPool | LedgerPool, num_blocks: int, *, deadline: float | None = None
    ) -> Job | None:
        """Lazy mode: plan the stores of what stands among the next blocks that `pool` will evict.

        `num_blocks`, the horizon, is how many of its free queue are looked at: what the next step
        may take, its tokens and the loads that may be admitted. Stored is what `store` was told of
        as computed and the host does not have; the queue stays as it is. Call it after each step.
        Raises `StateError` in eager mode.
        """
    def store_candidates(
        self,
        block_ids: _Ints,
        hashes: Sequence[bytes],
        *,
        group: int = 0,
        deadline: float | None = None,
    ) -> Job | None:
        """As `store_evictable`, for a pool that is not kvstow's.

        `block_ids` are free blocks, next to be evicted first, and `hashes` what they hold.
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
            ok: how it went: one bool for the whole job, or one for each of its blocks, in the job's
                order. A whole job that failed drops nothing from the host tier, because a timeout
                or a device error says nothing about the host's bytes. Of a load, a block that is
                False has its slot dropped: no lookup finds it from now on, its memory is empty when
                its last pin ends, the slots of its children stay, and the next store of the block
                brings it back. Of a store, one False fails it.
            rank: whose part.

        Returns:
            None until all ranks have reported, and for jobs that `end_all` has ended. Then how the
            job ended: it failed if any part did. Of a store, the slots become visible to `lookup`,
            or are given back.

        Raises:
            StateError: the job is not in flight, or this rank has reported it.
            ConfigError: a rank outside the world, or another number of outcomes than blocks.
        """
    def expire(self, now: float) -> list[int]:
        """The jobs whose `deadline` lies before `now`, on the caller's own clock, each told once.

        Fail their requests now. Slots and device blocks stay pinned, in quarantine, until every
        rank has reported: a late copy must not land in blocks that are someone else's. No lookup
        waits for a job in quarantine, and its result never counts.
        """
    def end_all(self) -> list[JobEnd]:
        """End every job as failed, in quarantine or not: call it when the movers have been stopped.

        What their workers report afterwards is swallowed.
        """
    def finish(self, request_id: str) -> None:
        """Forget a request that finished, was preempted or aborted; its jobs go on."""
    def reset(self) -> None:
        """Empty the tier, at any moment, and release what lookups hold.

        Jobs in flight still end: stores without effect, loads with `JobEnd.ok` False.
        """
    def snapshot(self) -> bytes:
        """The scheduler as bytes, for `restore`: versioned, and with a checksum.

        In it are the tier with its order of eviction and what its policy learned, the requests, the
        sleep image and the counters. Jobs are not, in quarantine or not, as if they had failed; nor
        is what lookups hold.
        """
    def restore(self, snapshot: bytes) -> None:
        """Fill this scheduler, which must be new, with what a snapshot of another holds.

        It knows no device blocks then: `store` is to be told whole tables again. Reports of jobs
        that were in flight are swallowed.

        Raises:
            SnapshotError: damaged, cut off, of another version, of another number of slots, groups,
                blocks per slot or ranks, mode or policy, or no snapshot.
            StateError: this scheduler is not new.
        """
    def hold_image(self, ledger: BlockLedger) -> Job:
        """Set host slots aside for every block in a table of `ledger`: for the time it sleeps.

        A block whose key the tier has stays in that slot, which is pinned; each other one gets a
        place that no lookup finds. Evicts for them, and releases what lookups hold.

        Returns:
            The copies to make, device to host, as a job whose id is 0 and that nobody reports.

        Raises:
            OutOfBlocks: the tier cannot hold them. Nothing has changed.
            StateError: jobs are in flight, or an image is held already.
            ConfigError: a ledger of other groups.
        """
    @property
    def image(self) -> Job:
        """All copies of the image that is held: each the other way brings its block back.

        Block ids are those that the ledger had. Raises `StateError` where none is held.
        """
    def used_slots(self) -> _Ids:
        """The slots that hold anything, ascending: resident blocks, stores, a sleep image's own.

        0 to `num_host_blocks - 1`; slot i is the places i * `blocks_per_slot` and on.
        """
    def release_image(self) -> None:
        """Let the image go, if one is held: the device has its blocks, or will not need them."""
    def stats(self) -> dict[str, int]:
        """Counters since construction, and gauges of the moment.

        Counters: stored_blocks, loaded_blocks, dropped_blocks (due when their request went, and
        the tier had no room), evicted_blocks (for room), failed_stores, failed_loads,
        damaged_blocks (dropped because a load found them damaged), late_jobs (jobs),
        pending_lookups, query_tokens (in whole blocks, that a request's last lookup before
        it loaded or computed asked for), hit_tokens (accepted by loads). Gauges: resident_blocks,
        storing_blocks, jobs_in_flight, and of late jobs quarantined_jobs and quarantined_blocks.
        And capacity_tokens: of prompts, where every group keeps all of its blocks.
        """
    def take_events(self) -> list[_Event]:
        """The events since the last call, oldest first; always empty without `events=True`."""
    def take_transfer_events(self) -> list[_TransferEvent]:
        """What has happened to jobs since the last call, oldest first; needs `events=True` too."""
    def check(self) -> None:
        """Verify every invariant. Raises `StateError` if one is broken."""
