"""The memory that is free: on the machine, and within the limits of its containers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvstow._core import ConfigError

_ROOT = Path("/")
# The mode in which the system promises no more memory than it has. It ends a process that writes to
# memory shared with others beyond that (SIGBUS).
_STRICT = 2
_NO_LIMIT = 1 << 62  # In version 1, "no limit" is a number of this size.


def check_memory(
    num_blocks: int, block_bytes: int, *, lower: str, free: int | None, num_ranks: int = 1
) -> None:
    """Refuse host blocks that this machine has no memory for. Mapping them alone would not fail.

    Args:
        num_blocks: host blocks of each rank.
        block_bytes: bytes of a block in the host memory of a rank.
        lower: the option that sets the number, for the message.
        free: what `free_memory` returned, before any rank mapped its part.
        num_ranks: ranks on this machine that need as much, each in a process of its own.

    Raises:
        ConfigError: all ranks together need more than is free.
    """
    num_bytes = num_blocks * block_bytes
    if free is None or num_bytes * num_ranks <= free:
        return
    each = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
    most = free // (block_bytes * num_ranks)
    most_gib = most * block_bytes * 10 // 2**30 / 10  # rounded down, so that it fits
    fix = f"lower {lower}, to at most {most} blocks ({most_gib} GiB){each}"
    if most == 0:
        fix = "not even one fits, so end what takes the memory, or raise the container's limit"
    raise ConfigError(
        f"{num_blocks} host blocks of {block_bytes} bytes are {num_bytes / 2**30:.1f} GiB{each}, "
        f"and {free / 2**30:.1f} GiB of memory are free on this machine; {fix}"
    )


def free_memory(root: Path = _ROOT) -> int | None:
    """Return the bytes that this machine and the containers around this process have left.

    Args:
        root: the folder that has `proc` and `sys`.

    Returns:
        The least of four figures: what the system has available, what the memory nodes have that
        this process may use, what the system still promises if it counts promises, and what a
        control group of this process or an ancestor of it may still use. None if the system reports
        none of them.
    """
    left = []
    with suppress(OSError, LookupError, ValueError):
        left.append(_kib_in(root / "proc/meminfo")["MemAvailable"] * 1024)
    with suppress(OSError, LookupError, ValueError):
        if (on_nodes := _free_on_nodes(root)) is not None:
            left.append(on_nodes)
    with suppress(OSError, LookupError, ValueError):
        if int((root / "proc/sys/vm/overcommit_memory").read_text()) == _STRICT:
            values = _kib_in(root / "proc/meminfo")
            left.append(1024 * max(0, values["CommitLimit"] - values["Committed_AS"]))
    for group in _control_groups(root):
        left += [
            free
            for limit, usage, caches in (
                ("memory.max", "memory.current", ("active_file", "inactive_file")),
                # Above this one, the system slows the group down almost to a standstill.
                ("memory.high", "memory.current", ("active_file", "inactive_file")),
                (
                    "memory.limit_in_bytes",
                    "memory.usage_in_bytes",
                    ("total_active_file", "total_inactive_file"),
                ),
            )
            if (free := _left_of(group / limit, group / usage, group / "memory.stat", caches))
            is not None
        ]
    return min(left, default=None)


def _kib_in(file: Path) -> dict[str, int]:
    """Return the figures of a `meminfo`, of the machine or of a node."""
    lines = file.read_text(encoding="ascii").splitlines()
    named = [line.rpartition(":") for line in lines]
    return {name.split()[-1]: int(figure.split()[0]) for name, _, figure in named}


def _free_on_nodes(root: Path) -> int | None:
    """Return what the nodes have left that this process may use; None if it may use all nodes.

    The system ends a process that needs more (`--cpuset-mems` of a container), though other nodes
    have memory. It drops cached files first, as in a group.
    """
    status = (root / "proc/self/status").read_text(encoding="utf-8", errors="replace")
    lines = dict(line.partition(":")[::2] for line in status.splitlines())
    allowed: set[int] = set()
    for part in lines["Mems_allowed_list"].split(","):
        first, _, last = part.strip().partition("-")
        allowed |= {*range(int(first), int(last or first) + 1)}
    files = root.glob("sys/devices/system/node/node[0-9]*/meminfo")
    nodes = {int(file.parent.name[4:]): _kib_in(file) for file in files}
    if {node for node, has in nodes.items() if has["MemTotal"]} <= allowed:
        return None
    names = ("MemFree", "Active(file)", "Inactive(file)")
    return 1024 * sum(nodes[node][name] for node in allowed for name in names)


def _control_groups(root: Path) -> Iterator[Path]:
    """Yield this process's groups of version 2 and 1 that limit memory, and their ancestors.

    In a container, the mount often begins at the container's own group, but the process's path
    begins at the topmost group of the machine. So of a path only the part that exists counts.
    """
    mounts = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        lines = ["0::/", "1:memory:/"]
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            folders = [mounts, mounts / "unified"]
        elif "memory" in controllers.split(","):
            folders = [mounts / "memory"]
        else:
            continue
        for folder in folders:
            group = Path(path.lstrip("/"))
            for ancestor in (group, *group.parents):
                if ".." not in ancestor.parts:
                    yield folder / ancestor


def _left_of(limit: Path, usage: Path, stat: Path, caches: tuple[str, str]) -> int | None:
    """Return the bytes that a group may still use, or None if it has no limit.

    The usage of a group includes the files that the system caches for it. After hours of serving,
    they fill whatever is left. The system drops them before it refuses memory, so they do not count
    here.
    """
    try:
        limit_bytes, used_bytes = int(limit.read_text()), int(usage.read_text())  # "max": no limit
    except (OSError, ValueError):
        return None
    if limit_bytes >= _NO_LIMIT:
        return None
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
        values = dict(line.split() for line in lines)
        used_bytes -= sum(int(values.get(name, 0)) for name in caches)
    except (OSError, ValueError):
        pass
    return max(0, limit_bytes - max(0, used_bytes))
