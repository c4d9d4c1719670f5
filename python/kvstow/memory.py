"""How much memory there is to have."""

from __future__ import annotations

from pathlib import Path

__all__ = ["free_memory"]


def free_memory() -> int | None:
    """Bytes that this machine, or the container it runs in, has left; None if nothing tells."""
    left = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        values = dict(line.split(":", 1) for line in lines)
        left.append(int(values["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())  # "max" where there is none
        left.append(limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return min(left, default=None)
