"""When the processes of this server began, as `/proc` has it.

```
server ------------> engine ------------> worker
 |  reads how to      |  may be the        |  asks for the time
 |  prepare images    |  worker, too
```
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from pathlib import Path


def process_began(pid: int | str = "self") -> float:
    """Return the time of the clock at which a process began; 0 if that is not known."""
    try:
        fields = _stat(pid)
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since the system's start
    except (OSError, ValueError, IndexError):
        return 0.0
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)


def parents_began() -> float:
    """Return when the first process of vLLM's above this one began; infinity without any.

    The process that started vLLM does not count, because it may run for days.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return math.inf
    began = process_began(parent.pid)
    try:
        title, *_ = Path(f"/proc/{parent.pid}/cmdline").read_bytes().split(b"\0")
        fields = _stat(parent.pid)
    except OSError:
        return 0.0
    # An engine is always below a server. Without the title, this one is in the engine's process.
    return min(began, process_began(fields[1])) if b"::EngineCore" in title else began


def _stat(pid: int | str) -> list[str]:
    """Return what Linux says of a process from its state on: its parent at 1, its start at 19."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
