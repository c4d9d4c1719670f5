"""An `Engine` with a disk tier whose k-th call is interrupted stays usable, and leaks nothing.

The calls are those of the scheduler and of the slot file. A call is interrupted before it does
anything, or after it has done all of it. `KVSTOW_FAULTS=full` tries every k.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.engine.disk_world import (
    NUM_HOST,
    OTHER,
    fall_off,
    forget_device,
    options,
    serve,
    settle,
    slot_file,
    world,
)
from tests.engine.test_faults import Faults, Watched
from tests.engine.world import BLOCK, DOCUMENT, World
from tests.sampled import sampled
from tests.tiers.setup import Here

from kvstow import OffloadScheduler
from kvstow.tiers import SlotTier
from kvstow.tiers.lanes import Lanes
from kvstow.tiers.runner import TierRunner
from kvstow.transfer import READY, BlockLayout, mover_for

NUM_TRIED = 40
WHO: dict[str, Any] = {"identity": "m", "weights_version": "1"}


def live(it: World) -> None:
    """Use the disk in every way."""
    fall_off(it)
    assert serve(it, "reader", DOCUMENT) == len(DOCUMENT) - BLOCK
    it.engine.sleep(after=READY, preserve=False, **WHO)
    it.engine.wake([BlockLayout.from_arrays([it.kv])], after=READY, **WHO)
    assert serve(it, "other again", OTHER[:12]) >= 0
    it.engine.reset()
    settle(it)
    serve(it, "after a reset", DOCUMENT)


def go_on(it: World) -> None:
    """Check an engine after an interrupt, and use it."""
    it.engine.check()
    if it.engine._state.asleep is not None:
        it.engine.wake([BlockLayout.from_arrays([it.kv])], after=READY, **WHO)
    for name in list(it.engine._state.requests):
        it.engine.finish(name)
    settle(it)
    forget_device(it)
    for number, tokens in enumerate((DOCUMENT, OTHER, DOCUMENT)):
        serve(it, f"again {number}", tokens)
        forget_device(it)
    it.engine.check()
    stats = it.engine.stats()
    assert stats["jobs_in_flight"] == stats["quarantined_jobs"] == 0
    assert stats["demoting_blocks"] == stats["promoting_blocks"] == 0
    assert stats["disk_mode"] == 2


def lived(at: int, *, after: bool, folder: Path, patch: pytest.MonkeyPatch) -> int:
    """Return the number of calls in a life whose call `at` is interrupted."""
    faults = Faults(at, KeyboardInterrupt, after=after)

    def build(*args: Any, **options: Any) -> Any:
        return Watched(OffloadScheduler(*args, **options), faults)

    def watch(kind: type, name: str) -> None:
        real = getattr(kind, name)
        patch.setattr(kind, name, lambda *args, **options: faults.call(real, *args, **options))

    patch.setattr("kvstow.engine.blueprint.OffloadScheduler", build)
    patch.setattr("kvstow.tiers.slot_file.Files", Here)
    for name in "put", "get", "delete", "renew", "records":
        watch(SlotTier, name)
    for name in "begin", "poll":
        watch(TierRunner, name)
    with world(folder / "disk") as it:
        faults.is_on = True
        with suppress(KeyboardInterrupt):
            live(it)
        faults.is_on = False
        go_on(it)
    return faults.num_calls


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_interrupted_call_leaks_no_pin_and_no_slot(
    after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "0"
    folder.mkdir()
    with monkeypatch.context() as patch:
        num_calls = lived(0, after=after, folder=folder, patch=patch)
    for at in sampled(range(1, num_calls + 1), NUM_TRIED / num_calls):
        folder = tmp_path / str(at)
        folder.mkdir()
        try:
            with monkeypatch.context() as patch:
                lived(at, after=after, folder=folder, patch=patch)
        except BaseException as failure:
            failure.add_note(f"call {at} of about {num_calls} was interrupted")
            raise


@pytest.mark.parametrize(("kind", "name"), [(Lanes, "stop"), (SlotTier, "close")])
def test_second_close_gives_up_the_file_that_an_interrupt_left_open(
    kind: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    given: Any = {"disk": slot_file(tmp_path / "disk"), "disk_options": options()}
    it = World(17, NUM_HOST, mover=mover_for, **given)
    fall_off(it)
    demoted_bytes = it.engine.stats()["demoted_bytes"]
    assert demoted_bytes
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            it.engine.close()
    it.engine.close()
    it.engine.check()
    assert it.engine.stats()["demoted_bytes"] == demoted_bytes
    with world(tmp_path / "disk") as other:
        assert serve(other, "reader", DOCUMENT)


def test_count_of_damaged_blocks_never_falls(tmp_path: Path) -> None:
    """Else Prometheus takes the next wake for a restart and counts the damage twice."""
    path = tmp_path / "disk"
    with world(path) as it:
        fall_off(it)
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
        assert not serve(it, "reader", DOCUMENT)
        num_damaged = it.engine.stats()["disk_mismatched_blocks"]
        assert num_damaged
        it.engine.sleep(after=READY, preserve=False, to=tmp_path / "image", **WHO)
        assert it.engine.stats()["disk_mismatched_blocks"] == num_damaged
        it.engine.wake([BlockLayout.from_arrays([it.kv])], after=READY, **WHO)
        assert it.engine.stats()["disk_mismatched_blocks"] == num_damaged
    assert it.engine.stats()["disk_mismatched_blocks"] == num_damaged
