"""The measured speed of a device's link, which decides between the mover's two paths.

Before each copy the copy engine rests for some microseconds, however few bytes the copy carries. So
direct copies come near the link's peak only if each takes many times as long as this rest. Packed
copies are long, whatever the size of a fragment. Direct copies are chosen where they are as fast,
because they need no kernel. The mover also packs fragments whose direct copies would keep the host
busy for more than a quarter of the transfer.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path as FilePath
from typing import Literal, TypeAlias

import numpy as np

from kvstow.transfer.cuda.interface import Copies, Pack, Runtime, Stream
from kvstow.transfer.cuda.kernels import MAX_BLOCKS, chunk_table, ids_for_launch
from kvstow.transfer.layout import Region
from kvstow.transfer.mover import Direction

Path: TypeAlias = Literal["packed", "direct"]

_FORMAT = 3
# The share of the link's peak that packed copies reach, as measured on an H100. Direct copies that
# reach it too are the better ones.
_PACKED_SHARE = 0.92
# The part of a transfer for which direct copies may keep the host busy.
_HOST_SHARE = 1 / 4
_LONG_BYTES = 64 << 20
_NUM_PARTS = 256
_NUM_BLOCKS = 512
_NUM_TURNS = 5
_LEAST_COPY_S = 1e-9


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The measured speed of a device's link.

    Attributes:
        store_bytes_per_s: speed of a long copy from the device to pinned memory.
        load_bytes_per_s: speed of a long copy from pinned memory to the device.
        copy_seconds: time that each copy takes besides that of its bytes.
        gather_bytes_per_s: speed of the kernel that packs blocks.
        submit_seconds: least time for which a copy call keeps the host busy.
    """

    store_bytes_per_s: float
    load_bytes_per_s: float
    copy_seconds: float
    gather_bytes_per_s: float
    submit_seconds: float

    def direct_from_bytes(self, direction: Direction) -> int:
        """Return the least size of a fragment that is copied directly."""
        peak = self.store_bytes_per_s if direction == "store" else self.load_bytes_per_s
        copies_s = self.copy_seconds * _PACKED_SHARE / (1 - _PACKED_SHARE)
        return int(max(copies_s, self.submit_seconds / _HOST_SHARE) * peak)

    def path(self, direction: Direction, fragment_bytes: int) -> Path:
        """Return the path for blocks that consist of fragments of this size."""
        if fragment_bytes >= self.direct_from_bytes(direction):
            return "direct"
        return "packed"


def link_speed(runtime: Runtime, *, anew: bool = False) -> LinkSpeed:
    """Return the speed of this device's link with this driver, from the cache or measured now.

    The cache is a file in `$XDG_CACHE_HOME/kvstow`, by default `~/.cache/kvstow`. With `anew` the
    cache is not read. A measurement takes well under a second.
    """
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or FilePath.home() / ".cache"
    except RuntimeError:  # no home folder, as a user that only a number names has in a container
        return measure(runtime)
    name = re.sub(r"[^A-Za-z0-9]+", "-", runtime.identity)
    file = FilePath(cache) / "kvstow" / f"link-{_FORMAT}-{name}.json"
    cached = None if anew else _read(file)
    if cached is not None:
        return cached
    measured = measure(runtime)
    _write(file, measured)
    return measured


def measure(runtime: Runtime, clock: Callable[[], float] = time.perf_counter) -> LinkSpeed:
    """Measure a device. Take the best of some turns, because disturbance only makes it slower."""
    with ExitStack() as stack:
        host = runtime.allocate_mapped(_LONG_BYTES)
        stack.callback(runtime.free_mapped, host)
        host_address = host.host.ctypes.data
        blocks = runtime.allocate(_LONG_BYTES)
        stack.callback(runtime.free, blocks)
        staging = runtime.allocate(_LONG_BYTES)
        stack.callback(runtime.free, staging)
        stream, event = runtime.stream(), runtime.event()
        stack.enter_context(runtime.current())

        def seconds(queue: Callable[[Stream], None]) -> tuple[float, float]:
            """Return the least time until all is done, and until the host has queued it."""
            turns = []
            for _ in range(_NUM_TURNS):
                begin = clock()
                queue(stream)
                queued = clock()
                runtime.record(event, stream)
                runtime.synchronize(event)
                turns.append((clock() - begin, queued - begin))
            totals, hosts = zip(*turns, strict=True)
            return min(totals), min(hosts)

        def copies(num_bytes: int, num: int, *, to_host: bool) -> Copies:
            ends = (host_address, blocks) if to_host else (blocks, host_address)
            runs = [(ends[0] + i * num_bytes, ends[1] + i * num_bytes, 1) for i in range(num)]
            return Copies(runs, num_bytes, num_bytes, num_bytes, to_host=to_host)

        long_store = copies(_LONG_BYTES, 1, to_host=True)
        long_load = copies(_LONG_BYTES, 1, to_host=False)
        parts = copies(_LONG_BYTES // _NUM_PARTS, _NUM_PARTS, to_host=True)
        size = _LONG_BYTES // _NUM_BLOCKS
        table = chunk_table([Region(blocks, size, size)], [0])
        chunks = runtime.allocate(table.nbytes)
        stack.callback(runtime.free, chunks)
        runtime.upload(chunks, table.tobytes())
        ids = ids_for_launch(np.arange(MAX_BLOCKS, dtype=np.int32))
        pack = Pack(chunks, len(table), ids, _NUM_BLOCKS, staging, size, 0)
        gather_s, _ = seconds(lambda stream: runtime.launch("gather", pack, stream))
        store_s, _ = seconds(lambda stream: runtime.copy(long_store, stream))
        load_s, _ = seconds(lambda stream: runtime.copy(long_load, stream))
        parts_s, submit_s = seconds(lambda stream: runtime.copy(parts, stream))
        return LinkSpeed(
            store_bytes_per_s=_LONG_BYTES / store_s,
            load_bytes_per_s=_LONG_BYTES / load_s,
            # On a busy machine the parts may seem to take no longer than the whole.
            copy_seconds=max(parts_s - store_s, 0.0) / _NUM_PARTS or _LEAST_COPY_S,
            gather_bytes_per_s=_LONG_BYTES / gather_s,
            submit_seconds=submit_s / _NUM_PARTS,
        )


def _read(file: FilePath) -> LinkSpeed | None:
    """Return the content of a cache file; None if it is missing or cannot be right."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        speed = LinkSpeed(**{field.name: float(content[field.name]) for field in fields(LinkSpeed)})
    except (ArithmeticError, KeyError, OSError, RecursionError, TypeError, ValueError):
        return None
    return speed if all(0 < value < float("inf") for value in asdict(speed).values()) else None


def _write(file: FilePath, speed: LinkSpeed) -> None:
    """Write the cache file whole or not at all. After an error the next process measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8"
        ) as written:
            json.dump(asdict(speed), written, indent=2)
        os.replace(written.name, file)
    except OSError:
        pass
