"""Free memory of machines that a folder describes, and the refusal of more than that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from kvstow import ConfigError, Engine, FullAttention
from kvstow.engine import ranks as ranks_module
from kvstow.memory import check_memory, free_memory
from kvstow.transfer import BlockLayout

GIB = 2**30
NO_LIMIT_V1 = 0x7FFFFFFFFFFFF000


class Machine:
    """A root folder with the files in which Linux reports memory."""

    def __init__(self, root: Path, *, available: int = 100 * GIB, cgroup: str = "0::/\n") -> None:
        self.root = root
        self._write("proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n")
        self._write("proc/self/cgroup", cgroup)

    def _write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def group(
        self, path: str, limit: int | str, used: int, stat: Mapping[str, int] | None = None
    ) -> None:
        """Add a control group of version 2."""
        folder = f"sys/fs/cgroup/{path}"
        self._write(f"{folder}/memory.max", f"{limit}\n")
        self._write(f"{folder}/memory.current", f"{used}\n")
        if stat is not None:
            self._write(f"{folder}/memory.stat", _lines(stat))

    def old_group(self, path: str, limit: int, used: int, stat: Mapping[str, int]) -> None:
        """Add a control group of version 1."""
        folder = f"sys/fs/cgroup/memory/{path}"
        self._write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self._write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        self._write(f"{folder}/memory.stat", _lines(stat))

    def node(self, node: int, free: int, cached: int = 0, total: int = 60 * GIB) -> None:
        """Add a memory node."""
        figures = {"MemTotal": total, "MemFree": free, "Active": cached + 2 * GIB}
        figures |= {"Active(file)": cached // 2, "Inactive(file)": cached // 2}
        lines = "".join(f"Node {node} {name}: {it // 1024} kB\n" for name, it in figures.items())
        lines += f"Node {node} HugePages_Total: 0\n"
        self._write(f"sys/devices/system/node/node{node}/meminfo", lines)

    def allow(self, nodes: str) -> None:
        """Let the process use these memory nodes, as `docker run --cpuset-mems` does."""
        self._write(
            "proc/self/status", f"Name: a:b\nMems_allowed:\tf\nMems_allowed_list:\t{nodes}\n"
        )

    def free(self) -> int | None:
        return free_memory(self.root)


def _lines(stat: Mapping[str, int]) -> str:
    return "".join(f"{name} {value}\n" for name, value in stat.items())


def test_machine_without_limits_has_what_is_available(tmp_path: Path) -> None:
    assert Machine(tmp_path, available=7 * GIB).free() == 7 * GIB


@pytest.mark.parametrize(
    ("mode", "committed", "expected"),
    [("0", 5, 100 * GIB), ("1", 5, 100 * GIB), ("2", 5, 7 * GIB), ("2", 13, 0), ("", 5, 100 * GIB)],
)
def test_system_that_promises_no_more_than_it_has_has_the_rest_free(
    tmp_path: Path, mode: str, committed: int, expected: int
) -> None:
    machine = Machine(tmp_path)
    machine._write("proc/sys/vm/overcommit_memory", f"{mode}\n")
    with (tmp_path / "proc/meminfo").open("a") as file:
        file.write(f"CommitLimit: {12 << 20} kB\nCommitted_AS: {committed << 20} kB\n")
    assert machine.free() == expected


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("0", 9 * GIB),
        ("1", 20 * GIB),
        ("0,10", 14 * GIB),
        ("0-1", 29 * GIB),
        ("0-1,10", 100 * GIB),  # all that have memory
        ("", 100 * GIB),
        ("0-7", 100 * GIB),
        ("5", 100 * GIB),  # which the folder does not have
    ],
)
def test_nodes_that_the_process_may_not_use_have_no_memory_for_it(
    tmp_path: Path, nodes: str, expected: int
) -> None:
    machine = Machine(tmp_path)
    machine.allow(nodes)
    machine.node(0, 5 * GIB, 4 * GIB)
    machine.node(1, 20 * GIB)
    machine.node(2, 0, total=0)
    machine.node(10, 5 * GIB)
    assert machine.free() == expected


def test_files_in_the_page_cache_do_not_count_as_used(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    stat = {"anon": 2 * GIB, "file": 7 * GIB, "active_file": 2 * GIB, "inactive_file": 4 * GIB}
    machine.group("", 10 * GIB, 9 * GIB, stat)
    assert machine.free() == 7 * GIB
    # Shared memory counts as a file, but on neither list, because the system cannot drop it.
    machine.group("", 10 * GIB, 9 * GIB, stat | {"shmem": 3 * GIB, "active_file": 0})
    assert machine.free() == 5 * GIB


@pytest.mark.parametrize(
    ("used", "stat", "expected"),
    [
        (9 * GIB, None, 1 * GIB),
        (9 * GIB, {}, 1 * GIB),
        (12 * GIB, {"inactive_file": 1 * GIB}, 0),  # over its limit for a moment
        (1 * GIB, {"inactive_file": 3 * GIB}, 10 * GIB),  # read at different moments
    ],
)
def test_free_memory_of_a_group_is_from_none_to_its_limit(
    tmp_path: Path, used: int, stat: dict[str, int] | None, expected: int
) -> None:
    machine = Machine(tmp_path)
    machine.group("", 10 * GIB, used, stat)
    assert machine.free() == expected


def test_free_memory_is_that_of_the_tightest_group_above_the_process(tmp_path: Path) -> None:
    machine = Machine(tmp_path, cgroup="0::/pods/one/engine\n")
    machine.group("pods", 50 * GIB, 45 * GIB, {})
    machine.group("pods/one", 20 * GIB, 12 * GIB, {})
    machine.group("pods/one/engine", "max", 3 * GIB, {})
    machine.group("pods/other", 1 * GIB, 1 * GIB, {})
    assert machine.free() == 5 * GIB
    machine.group("pods", "max", 45 * GIB, {})
    assert machine.free() == 8 * GIB
    machine.group("pods/one/engine", 4 * GIB, 3 * GIB, {})
    assert machine.free() == 1 * GIB


@pytest.mark.parametrize(
    ("high", "expected"),
    [(6 * GIB, 3 * GIB), ("max", 6 * GIB), (20 * GIB, 6 * GIB), (2 * GIB, 0)],
)
def test_group_that_is_slowed_down_below_its_limit_has_less_free(
    tmp_path: Path, high: int | str, expected: int
) -> None:
    machine = Machine(tmp_path, cgroup="0::/engine\n")
    machine.group("engine", 9 * GIB, 4 * GIB, {"inactive_file": 1 * GIB})
    (tmp_path / "sys/fs/cgroup/engine/memory.high").write_text(f"{high}\n")
    assert machine.free() == expected


@pytest.mark.parametrize("path", ["/docker/4f2a", "/../../elsewhere"])
def test_path_that_the_container_cannot_see_counts_as_its_own_group(
    tmp_path: Path, path: str
) -> None:
    machine = Machine(tmp_path, cgroup=f"0::{path}\n")
    machine.group("", 10 * GIB, 4 * GIB, {})
    assert machine.free() == 6 * GIB


def test_group_whose_folder_cannot_be_opened_has_no_limit(tmp_path: Path) -> None:
    # A name that no system takes, because root may open every folder.
    machine = Machine(tmp_path, cgroup=f"0::/{'x' * 300}/a\n")
    machine.group("", 10 * GIB, 4 * GIB, {})
    assert machine.free() == 6 * GIB


def test_groups_of_version_1_limit_free_memory_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path, cgroup="9:name=systemd:/\n4:cpu,memory:/docker/a\n0::/\n")
    stat = {"inactive_file": 0, "total_inactive_file": 2 * GIB, "total_active_file": 1 * GIB}
    machine.old_group("docker/a", 10 * GIB, 9 * GIB, stat)
    machine.old_group("docker", NO_LIMIT_V1, 30 * GIB, stat)
    assert machine.free() == 4 * GIB


@pytest.mark.parametrize("limit", [NO_LIMIT_V1, 2**63 - 1, 2**63 - 2**16])
def test_group_of_version_1_without_a_limit_has_no_figure(tmp_path: Path, limit: int) -> None:
    machine = Machine(tmp_path, cgroup="4:memory:/\n")
    machine.old_group("", limit, 3 * GIB, {})
    assert machine.free() == 100 * GIB
    (tmp_path / "proc/meminfo").unlink()
    assert machine.free() is None


def test_groups_of_version_2_may_be_mounted_beside_those_of_version_1(tmp_path: Path) -> None:
    machine = Machine(tmp_path, cgroup="4:memory:/\n0::/a\n")
    machine.group("unified/a", 3 * GIB, 1 * GIB, {})
    assert machine.free() == 2 * GIB


@pytest.mark.parametrize("garbage", ["", "many\n", "\x00", "0\n"])
def test_free_memory_ignores_unreadable_figures(tmp_path: Path, garbage: str) -> None:
    machine = Machine(tmp_path, cgroup=garbage)
    machine.group("", 10 * GIB, 4 * GIB, {})
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("much")
    assert machine.free() == 100 * GIB
    (tmp_path / "proc/meminfo").write_text(garbage)
    assert machine.free() is None


def test_free_memory_is_none_without_proc(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None


def test_free_memory_of_this_machine_is_positive_or_unknown() -> None:
    free = free_memory()
    assert free is None or free > 0


def test_ranks_of_one_machine_share_its_memory() -> None:
    check_memory(10, GIB, lower="num_cpu_blocks", free=40 * GIB, num_ranks=4)
    with pytest.raises(
        ConfigError,
        match=r"11 host blocks of 1073741824 bytes are 11\.0 GiB on each of 4 ranks, and 40\.0 GiB "
        r"of memory are free on this machine; lower num_cpu_blocks, to at most 10 blocks "
        r"\(10\.0 GiB\) on each of 4 ranks",
    ):
        check_memory(11, GIB, lower="num_cpu_blocks", free=40 * GIB, num_ranks=4)
    check_memory(10**9, GIB, lower="num_cpu_blocks", free=None)


def test_the_most_gib_in_the_message_fit() -> None:
    with pytest.raises(ConfigError, match=r"to at most 1279 blocks \(1\.2 GiB\)$"):
        check_memory(2000, 1 << 20, lower="num_cpu_blocks", free=1279 << 20)


@pytest.mark.parametrize("free", [0, GIB - 1, 4 * GIB - 1])
def test_memory_without_room_for_a_block_has_another_way_out_than_0_blocks(free: int) -> None:
    with pytest.raises(ConfigError, match=r"; not even one fits, so end what takes the memory, or"):
        check_memory(1, GIB, lower="num_cpu_blocks", free=free, num_ranks=4)


@pytest.mark.parametrize("world_size", [1, 3])
def test_engine_refuses_memory_that_the_machine_does_not_have(
    monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    monkeypatch.setattr(ranks_module, "free_memory", lambda: 8 * 4096 * world_size)
    arrays = [np.zeros((9, 100), np.uint8) for _ in range(world_size)]
    ranks = [[BlockLayout.from_arrays([array])] for array in arrays]
    layouts = ranks[0] if world_size == 1 else ranks

    def build(num_host_blocks: int) -> Engine:
        groups = [FullAttention(16)]
        return Engine(9, num_host_blocks, groups, layouts, world_size=world_size)

    build(8).close()
    with pytest.raises(ConfigError, match="lower num_host_blocks, to at most 8 blocks"):
        build(9)
