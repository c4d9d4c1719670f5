"""An engine with a disk tier on real files, and requests whose every token is compared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.engine.world import DOCUMENT, LOADS, NO_ROOM, PENDING, World
from tests.tiers.setup import LONG_S

from kvstow import DiskOptions
from kvstow.tiers import SlotFile
from kvstow.transfer import mover_for

OTHER = list(range(100, 132))  # 8 blocks, as many as the host has
NUM_HOST = 8
PAGE = 4096


def options(**changes: object) -> DiskOptions:
    return DiskOptions(**({"identity": "m", "weights_version": "1"} | changes))  # type: ignore[arg-type]


def slot_file(path: Path, num_blocks: int = 64, **changes: object) -> SlotFile:
    return SlotFile(path, SlotFile.bytes_for(num_blocks, PAGE), **changes)  # type: ignore[arg-type]


def world(
    path: Path, num_host: int = NUM_HOST, num_device: int = 17, **changes: object
) -> AbstractContextManager[World]:
    given = {"disk": slot_file(path), "disk_options": options()} | changes
    return below(num_host, num_device, **given)


@contextmanager
def below(num_host: int, num_device: int, **given: object) -> Iterator[World]:
    """An engine with a tier below the host, which comes to rest before it is checked."""
    it = World(num_device, num_host, **({"mover": mover_for} | given))
    try:
        yield it
        settle(it)
        it.engine.check()
    finally:
        it.engine.close()


def mode(it: World) -> str | None:
    return it.engine.scheduler.disk_mode


def settle(it: World) -> None:
    """Poll until no copy and no job of the disk tier is left."""
    end_s = time.monotonic() + LONG_S
    while it.engine.transfers:
        it.engine.poll()
        assert time.monotonic() < end_s, "a copy does not end"
        time.sleep(0.001)
    it.engine.settle_disk()


def serve(it: World, name: str, tokens: list[int], *, settles: bool = True) -> int:
    """Run a request until it is finished. Return the tokens that it loaded, all compared.

    With `settles`, wait until the disk tier has nothing left to do.
    """
    end_s = time.monotonic() + LONG_S
    while (admission := it.admit(name, tokens)).state in (PENDING, NO_ROOM):
        it.engine.poll()
        assert time.monotonic() < end_s, "an admission does not come"
        time.sleep(0.001)
    num_loaded = admission.num_external_tokens
    num_found = admission.num_hit_tokens + num_loaded
    if admission.state is LOADS:
        assert admission.transfer is not None
        assert it.engine.end(admission.transfer).ok
        it.engine.step([name], [len(tokens) - num_found])
    assert it.cached(name, num_found) == tokens[:num_found], f"{name} reads another block"
    it.compute(name, tokens)
    it.engine.finish(name)
    if settles:
        settle(it)
    return num_loaded


def forget_device(it: World) -> None:
    assert it.engine.ledger.pool.reset()
    it.kv[:] = -1


def fall_off(it: World) -> None:
    """Compute the document, then evict it from the device and from the host."""
    assert serve(it, "writer", DOCUMENT) == 0
    assert serve(it, "other", OTHER) == 0
    forget_device(it)
