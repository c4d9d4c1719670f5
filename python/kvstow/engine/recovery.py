"""An engine after an operation was cut short: by Ctrl-C, or by an error of an event or a mover.

An operation changes the ledger, the scheduler, the movers and the requests. An exception may come
between any two of these changes, and may hide what a call has returned.

```
 sound   -- an operation begins -------------------> torn
 torn    -- it ends, or is refused unchanged ------> sound
 torn    -- the next operation calls recover ------> sound
```

Recovery does not ask how far the operation came. It ends every copy, because one may be in flight
of which the engine has no ticket. Then it makes ledger and scheduler agree with the requests of
the state. An exception may cut recovery short too. Then the next operation recovers again.

The ledger has the hashes of the requests, and the state has their number. A number that differs
shows an extension that was cut short.
"""

from contextlib import suppress

from kvstow._core import StateError, UnknownRequest
from kvstow.engine.copies import Copies
from kvstow.engine.state import State


def recover(state: State, copies: Copies) -> None:
    """Repair the state, if an exception has cut the last operation short.

    Raises:
        StateError: an operation is under way in another thread, or a close was cut short while the
            engine slept.
    """
    if not state.change.is_torn:
        return
    state.change.refuse_other_thread()
    if state.asleep is not None:
        state.forget_device()
    elif state.is_closed:
        settle(state, copies, closing=True)
    elif not state.ranks.layouts:  # it slept, and has no device memory to go on with
        raise StateError("a close of this Engine was cut short while it slept: call close again")
    else:
        mend(state, copies)
    state.change.is_torn = False


def mend(state: State, copies: Copies) -> None:
    """End every copy as failed, make the accounting agree, and go on with new movers.

    The next `poll` reports the loads and stores that have failed.
    """
    state.change.is_torn = True
    state.ranks.close()
    settle(state, copies)
    state.renew_movers()
    state.change.is_torn = False


def settle(state: State, copies: Copies, *, closing: bool = False) -> None:
    """Account for the end of all copies, once no mover copies any more.

    With `closing`, requests that were loading keep their blocks and never run.
    """
    disk = copies.disk
    if disk is None or closing:
        state.scheduler.end_all()
        if disk is not None:
            disk.forget_all()
    else:
        # Threads of the tier still read and write host slots.
        state.scheduler.end_all(list(disk.running))
        disk.agree(state.scheduler)
    state.scheduler.release_image()
    copies.forget_all(report=not closing)
    for name in set(state.ledger.request_ids()) - state.requests.keys():
        _forget(state, name)
    for name in state.requests:
        _agree(state, name, closing=closing)
    state.running = state.requests_that_run()


def _forget(state: State, name: str) -> None:
    """Remove a request from ledger and scheduler, as far as they know it."""
    for call in state.scheduler.finish, state.ledger.free:
        with suppress(UnknownRequest):
            call(name)


def _agree(state: State, name: str, *, closing: bool) -> None:
    """Make ledger and scheduler know a request as the engine does."""
    request = state.requests[name]
    is_longer = request.known is not None or state.ledger.num_hashes(name) > request.num_hashes
    if closing and request.state in {"loading", "stranded"} and not is_longer:
        request.state, request.load_id = "stranded", 0
        return
    if request.state != "added" and (request.state != "running" or is_longer):
        state.unreported.failed.append(name)
    recompute = request.recompute or request.state == "loading"
    if is_longer:
        _shorten(state, name, recompute=recompute)
    elif request.state != "running" and not _is_added(state, name):
        state.restart(name, recompute=recompute)
    # The scheduler may lack the request, its last hashes or its last blocks: report all again.
    request = state.requests[name]
    request.due_tokens = 1
    with suppress(UnknownRequest):
        state.scheduler.finish(name)
    state.scheduler.add(name, state.ledger.hashes(name))


def _is_added(state: State, name: str) -> bool:
    """Return whether ledger and state know a request as one that holds no blocks."""
    has_blocks = state.ledger.num_granted_tokens(name) > 0
    return state.requests[name].state == "added" and not has_blocks


def _shorten(state: State, name: str, *, recompute: bool) -> None:
    """Add a request again, without the hashes of an extension that was cut short.

    Its record keeps what is to be added, so that an interrupt cannot lose it.
    """
    request = state.requests[name]
    if (known := request.known) is None:
        num_hashes = request.num_hashes
        hashes, tokens, keys = state.ledger.known(name)
        num_tokens = num_hashes * state.ledger.hash_block_size
        known = (hashes[:num_hashes], tokens and tokens[:num_tokens], keys and keys[:num_hashes])
    state.forget_blocks(name, recompute=recompute, known=known)
    _forget(state, name)
    hashes, tokens, keys = known
    state.ledger.add(name, hashes, tokens=tokens, extra_keys=keys)  # type: ignore[arg-type]
    state.requests[name].known = None
