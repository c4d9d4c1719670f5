"""How a request is admitted: what the device holds, what the host holds, and room for the rest."""

import math
from dataclasses import dataclass
from typing import Self

from kvstow._core import (
    BlockLedger,
    ChunkedLocal,
    ConfigError,
    KvstowError,
    OutOfBlocks,
    RequestTooLarge,
)
from kvstow.arguments import checked_int
from kvstow.engine.answers import Admission, AdmissionState
from kvstow.engine.arguments import checked_size
from kvstow.engine.copies import Copies
from kvstow.engine.request import Request
from kvstow.engine.state import State
from kvstow.transfer import Event

_MAX_TOKENS = 1 << 40  # the most that the ledger counts


@dataclass(frozen=True, slots=True)
class Wish:
    """What `Engine.admit` is asked for, in its words."""

    request_id: str
    num_tokens: int
    max_new_tokens: int
    num_lookahead_tokens: int
    reserve: int
    must_fit_tokens: int | None

    @classmethod
    def of(  # noqa: PLR0913 - its attributes
        cls,
        request_id: str,
        num_tokens: int,
        max_new_tokens: int,
        *,
        num_lookahead_tokens: int,
        reserve: int,
        must_fit_tokens: int | None,
    ) -> Self:
        """Return a wish of ints, because a sum of numpy integers may overflow.

        Raises:
            ConfigError: a number is no integer, or outside its bounds.
        """
        fix = "a request has 1 or more, and without room in the step it waits"
        return cls(
            request_id,
            checked_int("num_tokens", num_tokens, 1, _MAX_TOKENS, fix),
            checked_int("max_new_tokens", max_new_tokens, 1, _MAX_TOKENS, fix),
            checked_size("num_lookahead_tokens", num_lookahead_tokens),
            checked_size("reserve", reserve),
            None if must_fit_tokens is None else checked_size("must_fit_tokens", must_fit_tokens),
        )

    def check(self, state: State) -> None:
        """Refuse too few tokens, and a request that no hit lets fit into an empty pool."""
        ledger, must_fit_tokens = state.ledger, self.must_fit_tokens or 0
        num_hashed = ledger.num_hashes(self.request_id) * ledger.hash_block_size
        if num_hashed > self.num_tokens:
            raise ConfigError(
                f"request {self.request_id!r} has {self.num_tokens} tokens, but hashes of "
                f"{num_hashed}, {ledger.hash_block_size} each: pass all tokens known of it, and to "
                f"hash_tokens a block_size of {ledger.hash_block_size}"
            )
        last = self.num_tokens - 1
        self.check_can_end(state, last - last % ledger.hit_block_size)  # the longest hit of all
        num_usable = state.num_usable
        num_to_fit = ledger.blocks_to_fit(must_fit_tokens)
        if num_to_fit > num_usable:
            # The request may end before it has so many tokens. A window, chunk or state also needs
            # fewer blocks at once. So the request may run.
            problem = (
                f"must_fit_tokens={must_fit_tokens} counts {num_to_fit} blocks for request "
                f"{self.request_id!r}, the pool has {num_usable}: pass no must_fit_tokens, or "
                f"build the engine with num_device_blocks={num_to_fit + 1} or more"
            )
            if ledger.min_blocks(must_fit_tokens, must_fit_tokens - 1) <= num_usable:
                problem += (
                    ". With its max_in_flight_tokens (the most tokens that one request has in "
                    "unfinished steps) windows and chunks count less, the smaller it is"
                )
            raise OutOfBlocks(problem)

    def check_can_end(self, state: State, num_computed: int) -> None:
        """Refuse a request that could not compute all its tokens, also if it were alone.

        `num_computed` counts the tokens of its hit, which it does not compute.
        """
        num_usable = state.num_usable
        if peak_blocks(state, num_computed, self.num_tokens, num_usable) == num_usable:
            return
        num_needed = peak_blocks(state, 0, self.num_tokens)
        raise RequestTooLarge(
            f"request {self.request_id!r} needs {num_needed} blocks for {self.num_tokens} tokens, "
            f"the pool has {num_usable}: it can never run; refuse it, or build the engine with "
            f"num_device_blocks={num_needed + 1} or more"
        )

    def check_has_room(self, state: State, num_computed: int, num_slots: int) -> None:
        """Refuse an admission that would not fit into an empty pool either.

        `num_slots` counts the slots behind the computed tokens.
        """
        num_usable = state.num_usable
        num_needed = state.ledger.min_blocks(num_computed + num_slots, num_computed) + self.reserve
        if num_needed > num_usable:
            in_reserve = f", {self.reserve} of them in reserve" if self.reserve else ""
            raise OutOfBlocks(
                f"request {self.request_id!r} needs {num_needed} blocks now{in_reserve}, and the "
                f"pool has {num_usable}: pass less max_new_tokens, num_lookahead_tokens or "
                "reserve, and to step no more new tokens of this request than here"
            )


def peak_blocks(state: State, num_computed: int, num_tokens: int, at_least: int = 0) -> int:
    """Return the most blocks that a request holds while it computes its tokens one by one.

    In a pool with fewer usable blocks it can never compute one of them. A request that is alone
    needs no more blocks.

    Args:
        state: what has the ledger and the groups.
        num_computed: tokens that it does not compute, from the first.
        num_tokens: tokens that it has then.
        at_least: what to return if it holds fewer. A greater number makes this faster.
    """
    chunks = [group.chunk for group in state.blueprint.groups if isinstance(group, ChunkedLocal)]
    # A period later, a token needs at least as many blocks: groups that skip blocks hold as many
    # again, or more if the first blocks were not skipped yet. So look at the last period alone.
    period = math.lcm(state.ledger.hit_block_size, *chunks)
    return _peak_within(state.ledger, max(num_computed, num_tokens - period), num_tokens, at_least)


def _peak_within(ledger: BlockLedger, first: int, end: int, at_least: int) -> int:
    """Return the most blocks that a token from `first` to before `end` needs, or `at_least`."""
    # No single token needs more than all of them at once.
    bound = ledger.min_blocks(end, first)
    if bound <= at_least:
        return at_least
    if end - first == 1:
        return bound
    middle = (first + end) // 2
    at_least = _peak_within(ledger, middle, end, at_least)
    return _peak_within(ledger, first, middle, at_least)


def check_step_fits(
    state: State, request_id: str, num_slots: int, num_in_flight_tokens: int
) -> None:
    """Refuse a step that could be granted only with fewer tokens, also if the pool were empty.

    A loop that preempts the request and admits it again would never end. If not even one token
    fits, that admission is refused.

    Raises:
        OutOfBlocks: the message says how many blocks the step needs.
    """
    ledger, num_usable = state.ledger, state.num_usable
    num_granted = ledger.num_granted_tokens(request_id)
    num_computed = max(0, num_granted - num_in_flight_tokens)
    num_needed = ledger.min_blocks(num_granted + num_slots, num_computed)
    if ledger.min_blocks(num_granted + 1, num_computed) <= num_usable < num_needed:
        raise OutOfBlocks(
            f"request {request_id!r} needs {num_needed} blocks for this step, and the pool has "
            f"{num_usable}: pass fewer new tokens or a smaller num_lookahead_tokens"
        )


def admit(state: State, copies: Copies, wish: Wish, after: Event) -> Admission:
    """Let an added request run, or begin its load, as `Engine.admit` describes."""
    ledger, scheduler, request_id = state.ledger, state.scheduler, wish.request_id
    request, begin_s = state.requests[request_id], copies.now_s()
    hit = ledger.lookup(request_id, wish.num_tokens - 1)
    num_hit, num_external = hit.num_tokens, 0
    with state.change:
        if not request.recompute:
            found = None
            may_promote = _may_promote(copies, request, begin_s)
            args = request_id, num_hit, wish.num_tokens - 1
            if not may_promote or copies.disk is None or copies.disk.has_asked(state, *args):
                found = scheduler.lookup(*args, promote=may_promote)
            if found is None:
                if request.pending_since_s is None:
                    request.pending_since_s = begin_s
                return Admission(AdmissionState.PENDING, num_hit)
            num_external = found
        num_new = 0 if num_external else min(wish.num_tokens - num_hit, wish.max_new_tokens)
        # A load fills every block that it gets, so `step` grants lookahead slots after it.
        num_lookahead = 0 if num_external else wish.num_lookahead_tokens
        try:
            wish.check_can_end(state, num_hit + num_external)
            blocks = ledger.allocate(
                request_id,
                num_new,
                hit=hit,
                num_external_tokens=num_external,
                num_lookahead_tokens=num_lookahead,
                delay_caching=num_external > 0,
                reserve=wish.reserve,
                must_fit_tokens=wish.must_fit_tokens,
            )
            if blocks is None:
                wish.check_has_room(state, num_hit + num_external, num_new + num_lookahead)
        except KvstowError:
            scheduler.release(request_id)
            raise
        if blocks is None:
            state.keep_host_hit(request_id)
            return Admission(AdmissionState.NO_ROOM, num_hit, num_external)
        state.change.commit()
        state.count_query(request_id, wish.num_tokens, num_hit)
        if not num_external:
            state.run(request_id)
            tables = state.tables(request_id)
            return Admission(AdmissionState.RUNS, num_hit, 0, num_new, tables)
        deadline = copies.deadline_s("load", begin_s)
        job = scheduler.load(request_id, num_external, blocks, deadline=deadline)
        request.state, request.load_id = "loading", job.job_id
        tables, num_loaded = state.tables(request_id), num_hit + num_external
        transfer = copies.begin(
            "load", job, begin_s, after, request_id=request_id, num_tokens=num_loaded
        )
    return Admission(AdmissionState.LOADS, num_hit, num_external, 0, tables, transfer)


def _may_promote(copies: Copies, request: Request, now_s: float) -> bool:
    """Return whether a request may still wait for the tier below the host."""
    since_s = request.pending_since_s
    if copies.disk is None or since_s is None:
        return True
    limit_s = copies.disk.options.promote_timeout_s
    return limit_s is None or now_s - since_s < limit_s
