"""What a step has computed: the ledger publishes it, and the scheduler plans a store of it.

A lazy engine stores the blocks that the device evicts next. It looks for them when a step is
reported, and at a poll if requests have given up blocks since: the next step may evict these. Such
a store waits for the last reported compute, and so for every compute that was reported before.
"""

from collections.abc import Iterable, Sequence

from kvstow._core import ConfigError, Hashes
from kvstow.engine.copies import Copies
from kvstow.engine.state import State
from kvstow.engine.transfer import Transfer
from kvstow.transfer import Event

# Below this, it takes less time to look for each new hash than to build a set of the known ones.
_FEW_HASHES = 8


def publish(
    state: State, copies: Copies, computed: Iterable[tuple[str, int]], after: Event
) -> Transfer | None:
    """Publish computed tokens, and begin the store that they make due.

    Args:
        state: of the engine.
        copies: of the engine.
        computed: running requests, each named once, with the tokens whose KV exists once `after`
            has happened.
        after: the compute that fills the blocks.

    Raises:
        ConfigError: a request has more tokens than it was granted, or fewer than fill the blocks
            that were reported before.
    """
    due = []
    requests, block_size = state.requests, state.ledger.hash_block_size
    for name, count in computed:
        due_tokens = requests[name].due_tokens
        if count >= due_tokens:
            due.append((name, count))
        elif count < due_tokens - block_size or count < 0:
            reported = max(0, due_tokens - block_size)
            raise ConfigError(
                f"request {name!r} has computed {count} tokens, and {reported} were reported "
                "before: pass all tokens computed so far, not those of one step"
            )
    horizon_blocks = state.blueprint.horizon_blocks
    if not due and horizon_blocks is None:
        return None
    _check_granted(state, due)
    begin_s = copies.now_s()
    deadline = copies.deadline_s("store", begin_s)
    with state.change:
        fresh = state.fresh(due)
        job = state.report_computed(due, fresh, deadline) if due else None
        state.change.commit()
        if horizon_blocks is not None:
            # Before the keys. Else an interrupt here would let `store_freed` copy too early.
            state.last_compute = after
        state.ledger.cache_step(*fresh)
        if horizon_blocks is not None:
            state.has_freed = False
            job = state.scheduler.store_evictable(state.pool, horizon_blocks, deadline=deadline)
        return None if job is None else copies.begin("store", job, begin_s, after)


def store_freed(state: State, copies: Copies) -> None:
    """Begin the store of what a lazy engine evicts next, if requests have given up blocks."""
    horizon_blocks, after = state.blueprint.horizon_blocks, state.last_compute
    if horizon_blocks is None or after is None or not state.has_freed:
        return
    begin_s = copies.now_s()
    deadline = copies.deadline_s("store", begin_s)
    with state.change:
        state.change.commit()
        state.has_freed = False
        job = state.scheduler.store_evictable(state.pool, horizon_blocks, deadline=deadline)
        if job is not None:
            copies.begin("store", job, begin_s, after)


def check_chained(request_id: str, known: Sequence[bytes], hashes: Hashes) -> None:
    """Refuse equal hashes of a request, because each block would be read in place of the other.

    They are mostly hashes of a block's own tokens. `hash_tokens` chains those that it makes.

    Args:
        request_id: the request.
        known: its hashes so far.
        hashes: those that continue them.
    """
    if hashes.is_chained:
        return
    new = set(hashes)
    # A running request gets few hashes at a time, behind many.
    are_few = len(hashes) <= _FEW_HASHES
    is_repeated = any(digest in known for digest in new) if are_few else new.intersection(known)
    if len(new) == len(hashes) and not is_repeated:
        return
    first: dict[bytes, int] = {}
    for at, digest in enumerate([*known, *hashes]):
        if (before := first.setdefault(digest, at)) != at:
            raise ConfigError(
                f"request {request_id!r} has the hash {digest.hex()} at {before} and at {at}: "
                "chain each hash with the one before it, as hash_tokens does"
            )


def check_extension(state: State, request_id: str, num_more: int) -> None:
    """Refuse hashes of tokens that a running request cannot know yet.

    More hashes are mostly those of a block that was hashed twice. Then each later block would be
    found under the hash of another one. A request that slept in a file is not checked.
    """
    request, size = state.requests[request_id], state.ledger.hash_block_size
    if request.state != "running" or request.num_known is None or not num_more:
        return
    num_granted = state.ledger.num_granted_tokens(request_id)
    num_hashed = (request.num_hashes + num_more) * size
    if num_hashed > max(num_granted + 1, request.num_known):
        raise ConfigError(
            f"request {request_id!r} would have hashes of {num_hashed} tokens, and it was granted "
            f"{num_granted}: hash each block once, the prompt's last one with the prompt, and call "
            "step for further tokens before you extend"
        )


def _check_granted(state: State, due: Sequence[tuple[str, int]]) -> None:
    for name, count in due:
        if count > (num_granted := state.ledger.num_granted_tokens(name)):
            raise ConfigError(
                f"request {name!r} cannot have computed {count} tokens: it was granted "
                f"{num_granted}. Leave out the token that it sampled last, which has no KV yet, "
                "and let num_new_tokens of its step count the drafts"
            )
