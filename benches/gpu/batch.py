"""The driver's batched copies in a separate process, which prints a JSON line per configuration.

`cuMemcpyBatchAsync` takes arrays of addresses, so it is called by ctypes with numpy's: lists would
cost as much as the call. In parts of 4096 copies, for longer ones have hung.
"""

import ctypes
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from benches.gpu.device import Device, seconds
from benches.gpu.moves import JOB_BLOCKS, Cache
from benches.gpu.rivals import fragments

PART = 4096
IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes: two hints for managed memory, of 8 bytes each, and no flags."""

    _fields_ = (
        ("access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


def main(arguments: Sequence[str]) -> int:
    num_turns, *sizes_kib = map(int, arguments)
    library = ctypes.CDLL("libcuda.so.1")
    call, takes_failed_index = getattr(library, "cuMemcpyBatchAsync_v2", None), False
    if call is None:  # the call of a CUDA 12 driver takes one more argument
        call, takes_failed_index = getattr(library, "cuMemcpyBatchAsync", None), True
    if call is None:
        print(json.dumps({"rival": "batched", "failed": "this driver has no cuMemcpyBatchAsync"}))
        return 0
    device = Device()
    for kib in sizes_kib:
        with Cache(device, kib << 10) as cache:
            for direction in ("store", "load"):
                work = _work(cache, direction, call, takes_failed_index=takes_failed_index)
                row = {
                    "rival": "batched",
                    "fragment_kib": kib,
                    "direction": direction,
                    "gb_per_s": JOB_BLOCKS * cache.block_bytes / 1e9 / seconds(work, num_turns),
                }
                print(json.dumps(row), flush=True)
    return 0


def _work(cache: Cache, direction: str, call: Any, *, takes_failed_index: bool) -> Any:
    runtime = cache.device.runtime
    stream, event = runtime.stream(), runtime.event()
    host, device = (np.array(ends, dtype=np.uint64) for ends in fragments(cache, direction))
    to, origin = (host, device) if direction == "store" else (device, host)
    sizes = np.full(len(to), cache.fragment_bytes, dtype=np.uint64)
    attributes = Attributes(access_order=IN_STREAM_ORDER)
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    last = [ctypes.c_void_p(stream.ptr)]
    if takes_failed_index:
        last.insert(0, ctypes.byref(failed))  # type: ignore[arg-type]

    def work() -> None:
        for begin in range(0, len(to), PART):
            num = min(PART, len(to) - begin)
            arrays = [ctypes.c_void_p(a[begin:].ctypes.data) for a in (to, origin, sizes)]
            status = call(
                *arrays,
                ctypes.c_size_t(num),
                ctypes.byref(attributes),
                ctypes.byref(first),
                ctypes.c_size_t(1),
                *last,
            )
            if status != 0:
                raise RuntimeError(f"cuMemcpyBatchAsync: CUDA error {status}")
        runtime.record(event, stream)
        runtime.synchronize(event)

    return work


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
