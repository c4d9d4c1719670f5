"""Sleep and wake of a whole engine: the device memory goes, and its work stays.

```
 awake    ledger, scheduler, ranks with movers, requests, device memory
   | fall_asleep   copies end; blocks in tables go to the host; the accounting becomes bytes
 asleep   those bytes, and the host memory: in this process, or in a file
   | awaken        accounting from the bytes, new movers, blocks to the new device memory
 awake    under the same block ids or others, in a pool of the same size or another
```

An engine that wakes is built from the bytes alone, so no stale transfer, pin or lookup survives.
"""

import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow._core import ConfigError, KvstowError, SnapshotError, StateError, TransferError
from kvstow.arguments import is_path
from kvstow.engine.answers import Awake
from kvstow.engine.copies import Copies
from kvstow.engine.ranks import Ranks
from kvstow.engine.record import Record, block_bytes, damaged, image_of
from kvstow.engine.recovery import mend
from kvstow.engine.snapshot_file import HOST, Image, Model, SnapshotFile, To, write_snapshot
from kvstow.engine.state import Asleep, State
from kvstow.transfer import BlockLayout, Event, HostArena, Ticket
from kvstow.transfer.arena import slots_of_runs
from kvstow.transfer.ticket import DamagedSlots

BlockIds: TypeAlias = Literal["same", "packed"] | Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class NewDevice:
    """The device memory that an engine wakes over.

    Attributes:
        layouts: where the blocks lie, one layout per group, for each rank.
        num_blocks: number of blocks in the pool, the null block included.
        block_ids: which ids the blocks get.
        after: what may still touch the memory. No copy begins before it.
    """

    layouts: Sequence[Sequence[BlockLayout]]
    num_blocks: int
    block_ids: BlockIds
    after: Event


def fall_asleep(  # noqa: PLR0913 - what `Engine.sleep` takes
    state: State,
    copies: Copies,
    model: Model,
    to: To,
    *,
    after: Event,
    preserve: bool,
    timeout_s: float | None,
) -> None:
    """Let an engine that is awake fall asleep, as `Engine.sleep` describes."""
    _check_place(to, model)
    _check_is_own(state, copies, model, in_file=to is not HOST)
    copies.drain(timeout_s)
    if copies.in_flight:
        mend(state, copies)
    # Two engines may sleep into one file, so neither its name nor its size tells them apart.
    sleep_id = secrets.token_hex(16)
    with state.change:
        try:
            if preserve:
                job = state.scheduler.hold_image(state.ledger)
                _finish(state.ranks.copy("store", job, job.block_ids, after), "stored")
            after.wait()  # also where nothing is copied: the device memory may go after it
            image = image_of(state, model, sleep_id, preserve=preserve)
            if to is not HOST:
                sizes = block_bytes(state.ranks.layouts)
                used = slots_of_runs(state.scheduler.used_slots(), state.blueprint.blocks_per_slot)
                write_snapshot(to, image, state.ranks.arenas, used, sizes)
        except KvstowError:
            state.scheduler.release_image()
            raise
        pool = state.pool
        lost = pool.free_order() if preserve else np.arange(1, pool.num_blocks, dtype=np.int32)
        state.fall_asleep(Asleep(image, to, sleep_id, lost))


def awaken(state: State, model: Model, device: NewDevice) -> Awake:
    """Wake a sleeping engine, as `Engine.wake` describes."""
    asleep = state.asleep
    if asleep is None:
        raise StateError("this Engine does not sleep: call Engine.sleep first")
    if asleep.to is HOST:
        _check_model(asleep.image.model, model)
        return _restore(state, asleep.image, device, state.ranks.arenas)
    with SnapshotFile(asleep.to) as file:
        _check_model(file.image.model, model)
        if Record.read(file.image.engine).sleep_id != asleep.sleep_id:
            raise SnapshotError(
                f"{asleep.to} was written by another sleep, of this engine or of another: its "
                "requests are not those of this engine. Put back the file that this sleep wrote "
                "and wake again, or close this engine and start without the file; give each "
                "engine a file of its own"
            )
        return _restore_from(state, file, device)


def restart(  # noqa: PLR0913 - what `Engine.restart` takes
    state: State,
    copies: Copies,
    path: str | os.PathLike[str],
    model: Model,
    device: NewDevice,
    *,
    requests: bool,
) -> Awake:
    """Fill a new engine from a file, as `Engine.restart` describes."""
    if copies.in_flight or not state.is_new:
        raise StateError(
            "this Engine has requests, or blocks on the host: restart one that was just built"
        )
    _check_is_own(state, copies, model, in_file=True)
    with SnapshotFile(path) as file:
        _check_model(file.image.model, model)
        return _restore_from(state, file, device, requests=requests)


def _check_is_own(state: State, copies: Copies, model: Model, *, in_file: bool) -> None:
    """Refuse a snapshot of another model than this engine or its tier has been given."""
    version, named = model.weights_version, state.weights_version
    if copies.disk is not None:
        copies.disk.check_is_of(model.identity, version, in_file=in_file)
    elif version and named not in (None, version):
        problem = "the last reset was cut short; call reset again"
        if named:
            problem = f"the last reset, wake or restart has named the weights {named!r}; pass "
            problem += "that name, or reset with that of new weights"
        raise ConfigError(f"weights_version is {version!r}, but {problem}")


# -- to sleep ----------------------------------------------------------------------------------


def _check_place(to: To, model: Model) -> None:
    given = f"identity is {model.identity!r} and weights_version {model.weights_version!r}"
    if not all(isinstance(name, str) for name in (model.identity, model.weights_version)):
        raise ConfigError(f"{given}; pass strings")
    if to is not HOST and not is_path(to):
        raise ConfigError(f"to is {to!r}; pass HOST, or the name of a file")
    if to is not HOST and not (model.identity and model.weights_version):
        raise ConfigError(
            f"{given}; a file needs both, because cached KV of another model or of other weights "
            "must not be served from it"
        )


def _finish(tickets: Sequence[Sequence[Ticket]], done: str) -> None:
    """Wait for the copies of all ranks, even after one has failed, and raise the first error.

    Damaged slots come first, because no other try brings their blocks back.
    """
    errors = []
    for ticket in (ticket for own in tickets for ticket in own):
        try:
            ticket.wait()
        except TransferError as error:
            errors.append(error)
    for lost in errors:
        if isinstance(lost, DamagedSlots):
            raise TransferError(
                f"the blocks could not be {done}: {lost}. Nothing has changed, and another try "
                "fails too: let the requests recompute, in a new engine or in one that restarts "
                "from the file with requests=False"
            ) from lost
    if errors:
        raise TransferError(
            f"the blocks could not be {done}: {errors[0]}. Nothing has changed, so try again"
        ) from errors[0]


# -- and awake again ---------------------------------------------------------------------------


def _restore(
    state: State,
    image: Image,
    device: NewDevice,
    arenas: Sequence[HostArena],
    *,
    requests: bool = True,
) -> Awake:
    """Build a new state and load its blocks. Only then put it in place of the old one."""
    record, blueprint = Record.read(image.engine), state.blueprint
    if record.block_bytes != (given := block_bytes(device.layouts)):
        raise SnapshotError(
            f"the snapshot's blocks have {record.block_bytes} bytes, per rank and group, those "
            f"of these layouts {given}; give layouts of the model that slept"
        )
    ledger = blueprint.ledger(device.num_blocks)
    scheduler = blueprint.scheduler(num_device_blocks=device.num_blocks)
    scheduler.restore(image.scheduler)
    old_ids = new_ids = np.empty(0, dtype=np.int32)
    if requests:
        old_ids, new_ids = ledger.restore(image.ledger, block_ids=device.block_ids)
    if list(map(_shape, arenas)) != list(map(_shape, state.ranks.arenas)):
        raise damaged("its slots are not those of the host tier that it describes")
    with ExitStack() as made:
        ranks = blueprint.ranks(device.layouts, arenas)
        made.callback(_close_unused, state, ranks)
        if requests and record.preserved:
            job = scheduler.image
            if not np.array_equal(np.sort(job.block_ids), old_ids):
                raise damaged("its image is of other blocks than its tables")
            moved = new_ids[np.searchsorted(old_ids, job.block_ids)]
            _finish(ranks.copy("load", job, moved, device.after), "loaded")
        new = State(blueprint, ledger, scheduler, ranks)
        if requests:
            new.adopt(record.restored_requests(ledger, scheduler), record.unreported)
        else:
            record.finish_requests(scheduler)
        scheduler.release_image()
        new.weights_version = image.model.weights_version
        if blueprint.horizon_blocks is not None and new.running:
            # Else what the device evicts before a request's next step would not be stored.
            counts = [(name, new.requests[name].num_computed) for name in new.running]
            new.report_computed(counts, new.fresh(counts))
        state.put_in(new)
    return Awake(old_ids, new_ids)


def _restore_from(
    state: State, file: SnapshotFile, device: NewDevice, *, requests: bool = True
) -> Awake:
    """Restore, with the slots of a file as host memory in place of what the engine has."""
    with ExitStack() as kept:
        for arena in state.ranks.arenas:
            kept.callback(_close_unused_arena, state, arena)
        kept.callback(_close_unused, state, state.ranks)
        arenas = []
        for arena in file.map_arenas():
            kept.callback(_close_unused_arena, state, arena)
            arenas.append(arena)
        return _restore(state, file.image, device, arenas, requests=requests)


def _close_unused(state: State, ranks: Ranks) -> None:
    if state.ranks is not ranks:
        ranks.close()


def _close_unused_arena(state: State, arena: HostArena) -> None:
    if all(arena is not own for own in state.ranks.arenas):
        arena.close()


def _shape(arena: HostArena) -> tuple[int, int, int]:
    return arena.num_slots, arena.slot_bytes, arena.slots_per_run


def _check_model(slept: Model, given: Model) -> None:
    if given.identity != slept.identity:
        raise SnapshotError(
            f"the snapshot is of {slept.identity!r}, not of {given.identity!r}: another model "
            "cannot use its KV; give the identity that it slept with"
        )
    if given.weights_version != slept.weights_version:
        raise SnapshotError(
            f"the snapshot is of weights version {slept.weights_version!r}, not of "
            f"{given.weights_version!r}: its KV is not that of other weights. Wake with the "
            "version it slept with, preempt its requests, and reset it with the new version; or "
            "start without it"
        )
