"""Sleep and wake of a whole engine: the device memory goes, and nothing of its work is lost.

```
 awake     ledger, scheduler, requests, movers, device memory
   | sleep    copies end; blocks in tables go to the host; the accounting becomes bytes
 asleep    those bytes, and the host memory: in this process, or in a file
   | wake     accounting from the bytes, new movers, blocks to the new device memory
 awake     under the same block ids or others, in a pool of the same size or another
```

What is not in those bytes does not exist after waking: there is no stale transfer, pin or lookup.
"""

import json
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import (
    BlockLedger,
    ConfigError,
    KvstowError,
    OffloadScheduler,
    SnapshotError,
    StateError,
    TransferError,
    UnknownRequest,
)
from kvstow.engine.arguments import checked_limit_s
from kvstow.engine.engine import Engine, Landed, _Request
from kvstow.engine.ranks import RankLayouts, Ranks, checked_layouts
from kvstow.engine.recovery import mend
from kvstow.engine.snapshot_file import HOST, Image, Model, Place, SnapshotFile, To, write_snapshot
from kvstow.transfer import BlockLayout, Event, HostArena, Ticket, TransferTimeout
from kvstow.transfer.mover import check_event

__all__ = ["HOST", "Awake", "Place", "restart", "sleep", "wake"]

Ids: TypeAlias = npt.NDArray[np.int32]
BlockIds: TypeAlias = Literal["same", "packed"] | Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Asleep:
    """What is left of an engine while it sleeps.

    Attributes:
        image: what is accounted.
        to: where it sleeps.
        sleep_id: of this sleep; the image has it too.
        lost: device blocks whose content is in no image.
    """

    image: Image
    to: To
    sleep_id: str
    lost: Ids

    @property
    def is_in_file(self) -> bool:
        """Whether the host memory is given back."""
        return self.to is not HOST


@dataclass(frozen=True, slots=True)
class Awake:
    """Where the blocks of an engine are now.

    Attributes:
        old_ids: of the blocks in tables, ascending, as they were when it went to sleep.
        new_ids: the same blocks'.
    """

    old_ids: Ids
    new_ids: Ids


def sleep(  # noqa: PLR0913 - each a choice of the caller's, most of them rarely made
    engine: Engine,
    *,
    after: Event,
    preserve: bool = True,
    to: To = HOST,
    identity: str = "",
    weights_version: str = "",
    timeout_s: float | None = None,
) -> None:
    """Let an engine sleep. When this returns, its device memory may go.

    Call it between steps: whatever was granted is to be computed once `after` has happened, and
    what is not (rejected drafts) is taken back with `rewind` before. Copies in flight end first;
    the next `poll` tells what has landed or failed. Slots of lookahead are dropped, and so is what
    only the device's prefix cache held.

    Args:
        engine: that is awake.
        after: the compute that fills the blocks. No copy begins before it.
        preserve: keep the blocks of every request that runs, its partial tail included, on the
            host. If not, requests are added ones again, and recompute what the host does not have.
        to: `HOST`, or the name of a file, which takes the place of one of that name when it is
            complete. The host memory is given back then.
        identity: the model whose KV this is, and whatever shapes it; `wake` must say the same. A
            file needs it, because it may outlive this process.
        weights_version: of the model's weights; likewise.
        timeout_s: how long copies in flight may take to end. Those that do not have failed, and
            their movers are stopped. None: as long as they need.

    Raises:
        OutOfBlocks: the host cannot hold the blocks.
        TransferError: they could not be copied there.
        SnapshotError: the file cannot be written.
        StateError: the engine sleeps already, or is closed.
        ConfigError: `after` is no `Event`, `to` no name of a file, or one without identity and
            weights version.

    Where it raises, the engine is awake as before, but that copies in flight have ended, and that
    the host may have evicted blocks to make room.
    """
    engine._check_open()
    timeout_s = checked_limit_s("timeout_s", timeout_s)
    model, to = Model(identity, weights_version), _checked_place(to)
    if not all(isinstance(name, str) for name in (identity, weights_version)):
        raise ConfigError(
            f"identity is {identity!r} and weights_version {weights_version!r}; pass strings"
        )
    if to is not HOST and not (identity and weights_version):
        raise ConfigError(
            f"identity is {identity!r} and weights_version {weights_version!r}; a file needs both, "
            "because cached KV of another model or of other weights must not be served from it"
        )
    check_event(after)
    _drain(engine, timeout_s)
    # Of no file's name nor size: two engines may sleep into the same one.
    sleep_id = secrets.token_hex(16)
    with engine._change:
        try:
            if preserve:
                job = engine.scheduler.hold_image(engine.ledger)
                _finish(engine._ranks.copy("store", job, job.block_ids, after), "stored")
            after.wait()  # also where nothing is copied: then the device memory may go
            image = _image(engine, model, sleep_id, preserve=preserve)
            if to is not HOST:
                write_snapshot(to, image, engine.arenas, _used_places(engine))
        except KvstowError:
            engine.scheduler.release_image()
            raise
        pool = engine.ledger.pool
        lost = pool.free_order() if preserve else np.arange(1, pool.num_blocks, dtype=np.int32)
        engine._fall_asleep(Asleep(image, to, sleep_id, lost))


def wake(  # noqa: PLR0913 - likewise
    engine: Engine,
    layouts: RankLayouts,
    *,
    after: Event,
    num_device_blocks: int | None = None,
    block_ids: BlockIds = "same",
    identity: str = "",
    weights_version: str = "",
) -> Awake:
    """Wake an engine over new device memory. When this returns, its blocks hold their bytes.

    Args:
        engine: that sleeps.
        layouts: as `Engine` takes them, of blocks of the same sizes as before.
        after: whatever may still touch the new memory. No copy begins before it.
        num_device_blocks: of the new pool, the null block included; None for as many as before.
        block_ids: "same" ids; "packed", as few and as low ones as there are blocks, for a pool that
            is smaller; or ids to take, in the order in which the tables name the blocks.
        identity: what `sleep` was told.
        weights_version: likewise. With other weights the KV is worth nothing: wake with the version
            it slept with, `preempt` the requests and `reset` the engine.

    Returns:
        Where the blocks are. `tables` has the new ids too.

    Raises:
        StateError: the engine does not sleep, or is closed.
        SnapshotError: another identity or weights version, other block sizes, or a file that is
            missing, damaged or another engine's.
        OutOfBlocks: the pool is too small for the blocks.
        InvalidBlock: `block_ids` has an id outside the pool, the null block, or one twice.
        TransferError: the blocks could not be copied.
        ConfigError: layouts that are too few or too small, ids that the pool does not have, or
            `after` is no `Event`.

    Where it raises, the engine sleeps on, and can be woken again.
    """
    engine._recover()
    asleep = engine._asleep
    if asleep is None:
        engine._check_open()
        raise StateError("this Engine does not sleep: call Engine.sleep first")
    check_event(after)
    num_blocks = engine.ledger.pool.num_blocks
    if num_device_blocks is not None:
        num_blocks = num_device_blocks
    ranks = checked_layouts(layouts, engine._world_size, len(engine._groups), num_blocks)
    model = Model(identity, weights_version)
    onto = _Onto(ranks, num_blocks, block_ids, after)
    if asleep.to is HOST:
        _check_model(asleep.image.model, model)
        return _restore(engine, asleep.image, onto, engine.arenas)
    with SnapshotFile(asleep.to) as file:
        _check_model(file.image.model, model)
        if _Record.read(file.image.engine).sleep_id != asleep.sleep_id:
            raise SnapshotError(
                f"{asleep.to} holds what another engine slept with, or this one another time: its "
                "requests are not this engine's. Put back the file that this sleep wrote and wake "
                "again, or close this engine and start without it; give each engine a file of its "
                "own"
            )
        return _restore_from(engine, file, onto)


def restart(  # noqa: PLR0913 - likewise
    engine: Engine,
    path: str | os.PathLike[str],
    *,
    after: Event,
    identity: str,
    weights_version: str,
    requests: bool = False,
    block_ids: BlockIds = "same",
) -> Awake:
    """Fill a new engine, of another process say, with what one slept with in a file.

    Its host memory becomes the file, copy-on-write, of which nothing is read before it is needed:
    host hits are served at once, and each slot is compared with its checksum by its first load. One
    that is damaged fails that load, and its request recomputes. The file stays as it is, for as
    often as it is wanted; give it to nobody who would overwrite it in place.

    Args:
        engine: that was just built, for the same groups, block sizes, ranks, number of host blocks,
            blocks per slot, mode and policy.
        path: the file.
        after: whatever may still touch the device memory.
        identity: what `sleep` was told.
        weights_version: likewise.
        requests: bring back the requests that slept as well, as `wake` does; if not, the engine
            knows none, and only the host is warm.
        block_ids: as `wake` takes them.

    Returns:
        Where the blocks of the requests are.

    Raises:
        StateError: the engine is not new, or is closed.
        SnapshotError: as `wake`.
        OutOfBlocks: the pool is too small for the requests' blocks.
        TransferError: they could not be copied.
        InvalidBlock: as `wake`.
        ConfigError: as `wake`.

    Where it raises, the engine is as it was: new.
    """
    engine._check_open()
    if not engine._is_new():
        raise StateError(
            "this Engine has requests, or blocks on the host: restart one that was just built"
        )
    check_event(after)
    model = Model(identity, weights_version)
    onto = _Onto(engine._ranks.layouts, engine.ledger.pool.num_blocks, block_ids, after)
    with SnapshotFile(path) as file:
        _check_model(file.image.model, model)
        return _restore_from(engine, file, onto, requests=requests)


# -- to sleep ----------------------------------------------------------------------------------


def _checked_place(to: To) -> To:
    try:
        if to is HOST or "\0" not in os.fspath(to):
            return to
    except TypeError:
        pass
    raise ConfigError(f"to is {to!r}; pass HOST, or the name of a file")


def _drain(engine: Engine, timeout_s: float | None) -> None:
    """Let copies in flight end, or fail those that take too long; the next poll reports them."""
    limit_s = None if timeout_s is None else time.monotonic() + timeout_s
    for transfer in engine.transfers:
        for ticket in transfer.tickets:
            left_s = None if limit_s is None else max(0.0, limit_s - time.monotonic())
            with suppress(TransferError, TransferTimeout):
                ticket.wait(left_s)
    engine._end_ended()
    if engine.transfers:
        mend(engine)


def _finish(tickets: Sequence[Sequence[Ticket]], done: str) -> None:
    """Wait for the copies of all ranks, to their end even where one has failed."""
    errors = []
    for ticket in (ticket for own in tickets for ticket in own):
        try:
            ticket.wait()
        except TransferError as error:
            errors.append(error)
    if errors:
        raise TransferError(
            f"the blocks could not be {done}: {errors[0]}. Nothing has changed, so try again"
        ) from errors[0]


def _image(engine: Engine, model: Model, sleep_id: str, *, preserve: bool) -> Image:
    """What is accounted of an engine, as it is now."""
    ledger, untold = engine.ledger, engine._untold
    if not preserve:  # who has just loaded does not run then: to be admitted anew, as who failed
        untold = replace(untold, loaded=[], failed=untold.failed + untold.loaded)
    record = {
        "sleep_id": sleep_id,
        "preserved": preserve,
        "block_bytes": _block_bytes(engine._ranks.layouts),
        "requests": [
            [name, request.state == "running", request.recompute, request.num_computed]
            for name, request in engine._requests.items()
        ],
        "landed": [
            untold.loaded, untold.failed, untold.num_stored_blocks, untold.num_failed_stores
        ],
    }  # fmt: skip
    names = engine._requests
    return Image(
        model,
        ledger.snapshot(blocks=preserve),
        engine.scheduler.snapshot(),
        json.dumps(record).encode(),
        num_requests=len(names),
        num_tokens=sum(map(ledger.num_granted_tokens, names)) if preserve else 0,
        num_blocks=engine.scheduler.num_resident * engine._blocks_per_slot,
    )


def _shape(arena: HostArena) -> tuple[int, int, int]:
    return arena.num_slots, arena.slot_bytes, arena.slots_per_run


def _block_bytes(layouts: Sequence[Sequence[BlockLayout]]) -> list[list[int]]:
    return [[layout.slot_bytes for layout in own] for own in layouts]


def _used_places(engine: Engine) -> npt.NDArray[np.int64]:
    """The arena slots that hold anything."""
    per_slot = engine._blocks_per_slot
    slots = engine.scheduler.used_slots().astype(np.int64)
    places: npt.NDArray[np.int64] = (slots[:, None] * per_slot + np.arange(per_slot)).reshape(-1)
    return places


# -- and awake again ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Onto:
    """The device memory to wake on."""

    layouts: Sequence[Sequence[BlockLayout]]
    num_blocks: int
    block_ids: BlockIds
    after: Event


@dataclass(frozen=True, slots=True)
class _Record:
    """What `_image` writes of the engine itself.

    Attributes:
        sleep_id: which sleep of which engine it is of; empty in files from before there was one.
        preserved: whether the blocks of the requests that ran are in the image.
        block_bytes: per rank and group.
        requests: each with whether it ran, whether it is to recompute, and its computed tokens.
        landed: what the next poll tells.
    """

    sleep_id: str
    preserved: bool
    block_bytes: list[list[int]]
    requests: list[tuple[str, bool, bool, int]]
    landed: Landed

    @classmethod
    def read(cls, text: bytes) -> Self:
        try:
            fields = json.loads(text)
            loaded, failed, num_stored, num_failed = fields["landed"]
            requests = [
                (name, bool(ran), bool(anew), int(num_computed))
                for name, ran, anew, num_computed in fields["requests"]
            ]
            names = [*(name for name, *_ in requests), *loaded, *failed]
            if not all(isinstance(name, str) for name in names):
                raise TypeError("a request's name is no string")
            landed = Landed(list(loaded), list(failed), int(num_stored), int(num_failed))
            sleep_id = str(fields.get("sleep_id", ""))
            return cls(sleep_id, bool(fields["preserved"]), fields["block_bytes"], requests, landed)
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise _damaged(f"its requests make no sense ({error!r})") from error


def _damaged(what: str) -> SnapshotError:
    return SnapshotError(f"the snapshot is damaged: {what}. Start without it")


def _restore(
    engine: Engine,
    image: Image,
    onto: _Onto,
    arenas: Sequence[HostArena],
    *,
    requests: bool = True,
) -> Awake:
    """Build everything anew and load the blocks; only then let the engine go on with it."""
    record = _Record.read(image.engine)
    if record.block_bytes != (given := _block_bytes(onto.layouts)):
        raise SnapshotError(
            f"the snapshot's blocks have {record.block_bytes} bytes, per rank and group, those "
            f"of these layouts {given}; give layouts of the model that slept"
        )
    ledger = engine._new_ledger(onto.num_blocks)
    scheduler = engine._new_scheduler(num_device_blocks=onto.num_blocks)
    scheduler.restore(image.scheduler)
    old_ids = new_ids = np.empty(0, dtype=np.int32)
    if requests:
        old_ids, new_ids = ledger.restore(image.ledger, block_ids=onto.block_ids)
    if list(map(_shape, arenas)) != list(map(_shape, engine.arenas)):
        raise _damaged("its slots are not those of the host tier that it describes")
    with ExitStack() as made:
        ranks = engine._new_ranks(onto.layouts, arenas)
        made.callback(_close_unused, engine, ranks)
        if requests and record.preserved:
            job = scheduler.image
            if not np.array_equal(np.sort(job.block_ids), old_ids):
                raise _damaged("its image is of other blocks than its tables")
            moved = new_ids[np.searchsorted(old_ids, job.block_ids)]
            _finish(ranks.copy("load", job, moved, onto.after), "loaded")
        known = _known_requests(engine, record, ledger, scheduler, keep=requests)
        scheduler.release_image()
        untold = record.landed if requests else Landed([], [], 0, 0)
        with engine._change:
            engine._awaken(ledger, scheduler, ranks, known, untold)
    return Awake(old_ids, new_ids)


def _restore_from(
    engine: Engine, file: SnapshotFile, onto: _Onto, *, requests: bool = True
) -> Awake:
    """Restore, with the slots of a file as host memory in place of what the engine has."""
    with ExitStack() as kept:
        for arena in engine.arenas:
            kept.callback(_close_unused_arena, engine, arena)
        kept.callback(_close_unused, engine, engine._ranks)
        arenas = []
        for arena in file.map_arenas():
            kept.callback(_close_unused_arena, engine, arena)
            arenas.append(arena)
        return _restore(engine, file.image, onto, arenas, requests=requests)


def _close_unused(engine: Engine, ranks: Ranks) -> None:
    if engine._ranks is not ranks:
        ranks.close()


def _close_unused_arena(engine: Engine, arena: HostArena) -> None:
    if all(arena is not own for own in engine.arenas):
        arena.close()


def _known_requests(
    engine: Engine,
    record: _Record,
    ledger: BlockLedger,
    scheduler: OffloadScheduler,
    *,
    keep: bool,
) -> dict[str, _Request]:
    """The requests that slept, as the engine knows them; without `keep`, nobody knows them."""
    known: dict[str, _Request] = {}
    num_requests = len({name for name, *_ in record.requests})
    if num_requests != len(record.requests) or (keep and num_requests != ledger.num_requests):
        raise _damaged("its ledger has other requests")
    for name, was_running, recompute, num_computed in record.requests:
        if not keep or (was_running and not record.preserved):
            scheduler.finish(name)
        if not keep:
            continue
        try:
            hashes, tokens, keys = ledger.known(name)
            num_granted = ledger.num_granted_tokens(name)
        except UnknownRequest as error:
            raise _damaged("its ledger has other requests") from error
        is_running = was_running and record.preserved
        if not 0 <= num_computed <= num_granted and is_running:
            raise _damaged(f"{name!r} has computed {num_computed} of {num_granted} tokens")
        if was_running and not is_running:
            scheduler.add(name, hashes)
        known[name] = _Request(
            hashes,
            tokens,
            None if keys is None else list(keys),
            engine._no_blocks(),
            num_computed=num_computed if is_running else 0,
            state="running" if is_running else "added",
            recompute=recompute,
        )
    return known


def _check_model(slept: Model, given: Model) -> None:
    if given.identity != slept.identity:
        raise SnapshotError(
            f"the snapshot is of {slept.identity!r}, not of {given.identity!r}: its KV is worth "
            "nothing to another model; give the identity that it slept with"
        )
    if given.weights_version != slept.weights_version:
        raise SnapshotError(
            f"the snapshot is of weights version {slept.weights_version!r}, not of "
            f"{given.weights_version!r}: its KV is not that of other weights. Wake with the "
            "version it slept with, and preempt its requests and reset it before they go on; or "
            "start without it"
        )
