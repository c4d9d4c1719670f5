"""An engine after an operation was cut short: by Ctrl-C, or by an error of an event or a mover.

An operation of `Engine` changes the ledger, the scheduler, the movers and the engine itself. An
exception may come between any two of these, and may hide what a call has returned.

```
 sound   -- an operation begins ---------------> torn
 torn    -- it ends, or is refused unchanged --> sound
 torn    -- the next operation calls mend -----> sound
```

`mend` does not ask how far the operation came. It ends every copy, because one may be under way of
which the engine has no ticket. Then it makes ledger and scheduler agree with the requests that the
engine knows. It can itself be cut short, and begins again then.
"""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from kvstow._core import KvstowError, UnknownRequest

if TYPE_CHECKING:
    from kvstow.engine.engine import Engine

__all__ = ["Change", "mend", "settle"]


class Change:
    """Knows whether an operation was cut short. Enter it around what must happen as a whole.

    Attributes:
        is_torn: whether an operation has begun and has not ended well.
    """

    def __init__(self) -> None:
        """Begin sound."""
        self.is_torn = False
        self._is_committed = False

    def __enter__(self) -> None:
        """Begin an operation that may still be refused."""
        self._is_committed = False
        self.is_torn = True

    def commit(self) -> None:
        """From here on any exception leaves the engine torn."""
        self._is_committed = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End it; a `KvstowError` before `commit` is a refusal that has changed nothing."""
        if kind is None or (issubclass(kind, KvstowError) and not self._is_committed):
            self.is_torn = False


def mend(engine: Engine) -> None:
    """End every copy as failed, make the accounting agree, and go on with new movers.

    The next `poll` reports the loads and stores that have failed.
    """
    engine._change.is_torn = True
    engine._ranks.close()
    settle(engine)
    engine._renew_movers()
    engine._change.is_torn = False


def settle(engine: Engine, *, closing: bool = False) -> None:
    """Account for the end of all copies, once no mover copies any more.

    With `closing`, requests that were loading keep their blocks and never run.
    """
    engine.scheduler.end_all()
    engine.scheduler.release_image()
    _drop_pins(engine)
    _end_stores(engine, report=not closing)
    for name in set(engine.ledger.request_ids()) - engine._requests.keys():
        _forget(engine, name)
    for name in list(engine._requests):
        _agree(engine, name, closing=closing)
    engine._running = {name for name, one in engine._requests.items() if one.state == "running"}


def _drop_pins(engine: Engine) -> None:
    """Unpin every block: all pins are of copies, and none is under way."""
    pool = engine.ledger.pool
    ids = np.arange(pool.num_blocks, dtype=np.int32)
    pool.unpin(np.repeat(ids, pool.pin_counts(ids)))
    engine._released.clear()


def _end_stores(engine: Engine, *, report: bool) -> None:
    stores = {t.job.job_id for t in engine.transfers if t.direction == "store"}
    if report:
        engine._report_store(0, len(stores - engine._late))
    engine._transfers.clear()
    engine._late.clear()


def _forget(engine: Engine, name: str) -> None:
    """Remove a request from ledger and scheduler, as far as they know it."""
    for call in engine.scheduler.finish, engine.ledger.free:
        with suppress(UnknownRequest):
            call(name)


def _agree(engine: Engine, name: str, *, closing: bool) -> None:
    """Make ledger and scheduler know a request as the engine does."""
    request = engine._requests[name]
    try:
        hashes, tokens, extra_keys = engine.ledger.known(name)
        num_granted = engine.ledger.num_granted_tokens(name)
    except UnknownRequest:
        hashes, tokens, extra_keys, num_granted = [], None, None, -1
    if num_granted >= 0 and hashes == request.hashes:
        if request.tokens is not None:
            request.tokens = tokens
        if request.extra_keys is not None and extra_keys is not None:
            request.extra_keys = list(extra_keys)
        if closing and request.state in {"loading", "stranded"}:
            request.state, request.load_id = "stranded", 0
            return
        if request.state == "running" or (request.state == "added" and num_granted == 0):
            # How much of its table the scheduler knows is not certain: report all of it again.
            request.num_told, request.due_tokens = engine._no_blocks(), 1
            with suppress(UnknownRequest):
                engine.scheduler.finish(name)
            engine.scheduler.add(name, request.hashes)
            return
    if request.state != "added":
        engine._untold.failed.append(name)
    recompute = request.recompute or request.state == "loading"
    engine._requests[name] = anew = request.anew(engine._no_blocks(), recompute=recompute)
    _forget(engine, name)
    engine._register(name, anew)
