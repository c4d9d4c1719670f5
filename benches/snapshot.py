"""How long does an engine take to sleep and to wake, and is a snapshot as fast as a file copy?

    .venv/bin/python -m benches.snapshot [--gb 4] [--folder FOLDER]     (needs twice as much memory)

One request fills the device pool. The engine is lazy, so the host has none of its blocks, and sleep
copies all of them. For "stored before" the engine is eager, so sleep copies only the partial last
block. Blocks have 2 MiB, in 16 regions as for 8 layers, and hold random bytes.

With a file, `sleep` ends when the file is on the disk. So does the plain copy of a file of this
size, which uses `shutil.copyfile` and fsync. `wake` from a file reads it once, and compares every
slot with its checksum. The files are read from the page cache, as far as they fit there.

The condition: sleep to a file and wake from it take at most twice the time of the plain copy.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvstow import Engine, FullAttention, hash_tokens
from kvstow.bench import machine
from kvstow.engine import HOST
from kvstow.transfer import READY, BlockLayout

BLOCK_TOKENS, NUM_REGIONS, BLOCK_BYTES = 16, 16, 2 << 20
WHO: dict[str, Any] = {"identity": "bench", "weights_version": "1"}
REQUIRED_SHARE = 0.5


class Device:
    """Device memory that can be released and allocated again, and a sample of its content."""

    def __init__(self, num_blocks: int) -> None:
        self.shape = (NUM_REGIONS, num_blocks, BLOCK_BYTES // NUM_REGIONS)
        self.memory: npt.NDArray[np.uint8] = np.empty(self.shape, np.uint8)
        page = np.random.default_rng(0).integers(0, 256, 8 << 20, np.uint8)
        flat = self.memory.reshape(-1)
        for begin in range(0, len(flat), len(page)):
            part = flat[begin : begin + len(page)]
            part[:] = page[: len(part)]
            part[::4096] = begin // len(page) % 251  # no two pages are equal
        self.sample = self.memory[:, 1::97, ::4093].copy()

    def go(self) -> None:
        self.memory = np.empty(0, np.uint8)

    def come(self) -> None:
        self.memory = np.zeros(self.shape, np.uint8)

    @property
    def layouts(self) -> list[BlockLayout]:
        return [BlockLayout.from_arrays(list(self.memory))]

    def check(self, num_blocks: int) -> None:
        held = self.memory[:, 1:num_blocks:97, ::4093]
        assert np.array_equal(held, self.sample[:, : held.shape[1]]), "other bytes came back"


def timed(call: Callable[[], Any]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def build(device: Device, num_blocks: int, mode: Literal["eager", "lazy"]) -> Engine:
    horizon = {"horizon_blocks": 1} if mode == "lazy" else {}
    groups = [FullAttention(BLOCK_TOKENS)]
    engine = Engine(num_blocks, num_blocks, groups, device.layouts, mode=mode, **horizon)  # type: ignore[arg-type]
    num_tokens = (num_blocks - 1) * BLOCK_TOKENS - 5
    engine.add("all", hash_tokens(range(num_tokens), BLOCK_TOKENS))
    engine.admit("all", num_tokens, num_tokens, after=READY)
    engine.computed(["all"], [num_tokens], after=READY)
    for transfer in engine.transfers:
        engine.end(transfer)
    return engine


def there_and_back(engine: Engine, device: Device, num_blocks: int, to: Any) -> tuple[float, float]:
    sleeping_s = timed(lambda: engine.sleep(after=READY, to=to, **WHO))
    device.go()
    device.come()
    layouts = device.layouts
    waking_s = timed(lambda: engine.wake(layouts, after=READY, **WHO))
    device.check(num_blocks)
    return sleeping_s, waking_s


def copy_s(path: Path) -> float:
    """A plain copy of a file, on the disk."""
    other = path.with_suffix(".copy")

    def copy() -> None:
        shutil.copyfile(path, other)
        with other.open("rb+") as file:
            os.fsync(file.fileno())

    seconds = timed(copy)
    other.unlink()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    num_blocks = int(options.gb * 1e9) // BLOCK_BYTES + 1
    num_bytes = (num_blocks - 1) * BLOCK_BYTES
    print(f"{machine()}; {num_bytes / 1e9:.1f} GB in {num_blocks - 1} blocks")
    is_met = True

    def row(name: str, seconds: float, plain_s: float | None = None) -> None:
        nonlocal is_met
        line = f"  {name:44} {seconds:8.3f} s {num_bytes / 1e9 / seconds:8.2f} GB/s"
        if plain_s is not None:
            met = plain_s / seconds >= REQUIRED_SHARE
            is_met &= met
            line += f" {plain_s / seconds:6.2f} of the copy{'' if met else '  MISSED'}"
        print(line, flush=True)

    device = Device(num_blocks)
    with build(device, num_blocks, "eager") as engine:
        for turn in ("stored before", "again"):
            slept_s, woken_s = there_and_back(engine, device, num_blocks, HOST)
            row(f"{turn}: sleep", slept_s)
            row(f"{turn}: wake", woken_s)
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        build(device, num_blocks, "lazy") as engine,
    ):
        slept_s, woken_s = there_and_back(engine, device, num_blocks, HOST)
        row("nothing stored: sleep, pages touched first", slept_s)
        row("nothing stored: wake", woken_s)
        slept_s, woken_s = there_and_back(engine, device, num_blocks, HOST)
        row("nothing stored: sleep", slept_s)
        row("nothing stored: wake", woken_s)
        path = Path(folder) / "image"
        written_s, read_s = there_and_back(engine, device, num_blocks, path)
        plain_s = copy_s(path)
        row("a plain copy of the file, synced", plain_s)
        row("to a file: sleep", written_s, plain_s)
        row("from a file: wake", read_s, plain_s)
    device.check(num_blocks)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "image"
        with build(device, num_blocks, "eager") as engine:
            engine.sleep(after=READY, to=path, **WHO)
        groups = [FullAttention(BLOCK_TOKENS)]
        with Engine(num_blocks, num_blocks, groups, device.layouts) as engine:
            restart_s = timed(lambda: engine.restart(path, after=READY, **WHO))
            print(f"  {'a new engine over the file is warm':44} {restart_s:8.3f} s")
            engine.add("again", hash_tokens(range(16 * BLOCK_TOKENS + 1), BLOCK_TOKENS))
            begin_s = time.perf_counter()
            admitted = engine.admit("again", 16 * BLOCK_TOKENS + 1, 1, after=READY)
            assert admitted.transfer is not None
            assert engine.end(admitted.transfer).ok
            hit_s = time.perf_counter() - begin_s
            print(f"  {'its first hit, of 16 blocks':44} {hit_s:8.3f} s")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
