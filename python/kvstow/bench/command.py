"""The command `kvstow bench` and its targets."""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
from rich.table import Table

from kvstow._core import ConfigError, TransferError, debug_build
from kvstow.bench.accounting import AccountingRow, Maker, measure_accounting
from kvstow.bench.clock import machine
from kvstow.bench.copy import CopyRow, Device, has_gpu, measure_copies
from kvstow.bench.tier import JOBS, NUM_SLOTS, TierRow, check_tier, measure_tier
from kvstow.memory import free_memory
from kvstow.output import Output, with_output
from kvstow.sizes import parse_bytes
from kvstow.tiers import Fingerprint, SlotFile
from kvstow.tiers.mooncake import MooncakeTier
from kvstow.tiers.resp import RespTier
from kvstow.tiers.shared import SharedStore
from kvstow.tiers.shared_command import store_access, store_options
from kvstow.transfer import HostArena

EXIT_OK, EXIT_WRONG = 0, 1
NAMESPACE_BYTES: Final = 16
_LEAST_BYTES: Final = 1 << 20
# Host memory for each byte of a copy job: four in the pool and its arena, two for the long copy,
# and two of the pool before, until Python collects it.
_MEMORY_PER_BYTE: Final = 8
_MOST_BLOCK_BYTES: Final = 64 << 20
_turns = click.option(
    "--turns",
    type=click.IntRange(min=1),
    default=9,
    show_default=True,
    help="Number of measurements of each row.",
)


@click.group()
def bench() -> None:
    """Measure this machine. Do it while nothing else runs."""


@bench.command()
@click.option(
    "--blocks",
    type=click.IntRange(min=1, max=1 << 20),
    default=2048,
    show_default=True,
    help="Number of blocks of a prompt.",
)
@_turns
@with_output
def accounting(output: Output, blocks: int, turns: int) -> int:
    """Time the block accounting, beside vLLM's if vLLM is installed.

    The times are medians of processor time. Both sides must take the same blocks.

    The exit status is 0 for success, 2 for bad usage, and 74 if the output cannot be written.
    """
    _refuse_debug_build()
    rivals: dict[str, Maker] = {}
    if importlib.util.find_spec("vllm") is not None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from kvstow.vllm.bench_side import VllmSide  # noqa: PLC0415 - optional, and slow to import

        rivals["vllm"] = VllmSide
    rows = measure_accounting(blocks, turns, rivals)
    output.write(_result(rows, turns), lambda: _accounting_table(rows))
    return EXIT_OK


@bench.command()
@click.option(
    "--device",
    type=click.Choice(["auto", "host", "cuda"]),
    default="auto",
    show_default=True,
    help="Where the pool is that blocks are copied from and to. host needs no GPU.",
)
@click.option(
    "--size", default="256MiB", show_default=True, help="Bytes of a copy job, at least 1MiB."
)
@_turns
@with_output
def copy(output: Output, device: str, size: str, turns: int) -> int:
    """Time copies between the device and host memory.

    It also times one long copy. The speeds are the best of all turns. The measurement takes host
    memory of about eight times the size.

    The exit status is 0 for success, 1 if a copied byte is wrong, 2 for bad usage or too little
    memory, and 74 if the output cannot be written.
    """
    _refuse_debug_build()
    num_bytes = parse_bytes(size)
    if num_bytes < _LEAST_BYTES:
        raise ConfigError(f"size is {size}; it must be at least 1MiB: pass --size 256MiB")
    free, needed = free_memory(), _MEMORY_PER_BYTE * num_bytes
    if free is not None and needed > free:
        raise ConfigError(
            f"size is {size}; the measurement needs {needed / 2**30:,.1f} GiB, and "
            f"{free / 2**30:,.1f} GiB of memory are free: pass --size "
            f"{max(1, (free // _MEMORY_PER_BYTE) >> 20)}MiB or less"
        )
    chosen: Device = "cuda" if device == "cuda" or (device == "auto" and has_gpu()) else "host"
    rows = list(measure_copies(chosen, num_bytes, turns))
    result = _result(rows, turns) | {"device": chosen, "job_bytes": num_bytes}
    output.write(result, lambda: _copy_table(rows, chosen))
    return EXIT_OK if all(row.is_right for row in rows) else EXIT_WRONG


@bench.command()
@click.argument("folder", metavar="PATH", type=click.Path(file_okay=False, path_type=Path))
@click.option("--size", default="1MiB", show_default=True, help="Bytes of a block.")
@_turns
@with_output
def disk(output: Output, folder: Path, size: str, turns: int) -> int:
    """Time a slot file in the folder PATH.

    Blocks go to the file and come back. The command makes the file, of 32 blocks, and removes it at
    the end. It says if the file system takes no direct I/O. The speeds are then those of memory.

    The times are the median of all turns, and the GB/s those of the best one.

    The exit status is 0 for success, 1 if a block failed or came back wrong, 2 for bad usage or a
    folder that cannot hold a slot file, and 74 if the output cannot be written.
    """
    _refuse_debug_build()
    block_bytes = _block_bytes(size)
    name = f"kvstow-bench-{os.urandom(4).hex()}"
    num_slots = JOBS[-1]
    try:
        with HostArena(NUM_SLOTS, block_bytes) as arena:
            max_bytes = SlotFile.bytes_for(num_slots, arena.slot_stride_bytes)
            file = SlotFile(folder / name, max_bytes)
            with file.open(arena, Fingerprint({"bench": name})) as tier:
                not_direct = tier.not_direct
                rows = measure_tier(tier, turns, has_slots=True)
    finally:
        for suffix in ("", ".index"):
            (folder / (name + suffix)).unlink(missing_ok=True)
    result = _result(rows, turns) | {"block_bytes": block_bytes, "not_direct": not_direct}
    note = "" if not_direct is None else f"no direct I/O: {not_direct}"
    output.write(result, lambda: _tier_table(rows, note))
    is_right = not any(row.num_failed or row.num_wrong for row in rows)
    return EXIT_OK if is_right else EXIT_WRONG


@bench.command()
@click.argument("url")
@click.option("--size", default="1MiB", show_default=True, help="Bytes of a block.")
@_turns
@store_options
@with_output
def shared(output: Output, url: str, size: str, turns: int, **store: Any) -> int:
    """Time a shared store at URL.

    Blocks go to the store and come back. URL is what the shared tier takes, for example
    redis://HOST:PORT/DB or mooncake://HOST:PORT. The blocks have keys of their own, and are deleted
    at the end.

    The times are the median of all turns, and the GB/s those of the best one.

    The exit status is 0 for success, 1 if a block failed or came back wrong, 2 for bad usage, and
    74 if the store cannot be reached or the output cannot be written.
    """
    _refuse_debug_build()
    block_bytes = _block_bytes(size)
    SharedStore(url, **store).check()
    namespace = os.urandom(NAMESPACE_BYTES)

    def opened(arena: HostArena) -> MooncakeTier | RespTier:
        if url.startswith("mooncake:"):
            return MooncakeTier(arena, url, namespace)
        return RespTier(arena, url, namespace, **store_access(store))

    with HostArena(NUM_SLOTS, block_bytes) as arena, opened(arena) as tier:
        try:
            check_tier(tier)
        except TransferError as error:
            raise OSError(errno.EIO, str(error)) from error
        rows = measure_tier(tier, turns, has_slots=False)
    result = _result(rows, turns) | {"block_bytes": block_bytes}
    output.write(result, lambda: _tier_table(rows))
    is_right = not any(row.num_failed or row.num_wrong for row in rows)
    return EXIT_OK if is_right else EXIT_WRONG


def _block_bytes(size: str) -> int:
    """Return the bytes of a block, or refuse a block that is too large."""
    num_bytes = parse_bytes(size)
    if not 1 <= num_bytes <= _MOST_BLOCK_BYTES:
        raise ConfigError(f"size is {size}; it must be 1 byte to 64MiB: pass the bytes of a block")
    return num_bytes


def _refuse_debug_build() -> None:
    if debug_build:
        raise ConfigError(
            "this build of kvstow is not optimised, so its times mean nothing: install it in "
            "release mode"
        )


def _result(rows: Sequence[AccountingRow | CopyRow | TierRow], turns: int) -> dict[str, object]:
    return {
        "machine": machine(),
        "python": platform.python_version(),
        "turns": turns,
        "rows": [asdict(row) for row in rows],
    }


def _table(*heads: str) -> Table:
    table = Table(box=None, title=machine(), title_justify="left", padding=(0, 2, 0, 0))
    for at, head in enumerate(heads):
        table.add_column(head, justify="right" if at else "left", no_wrap=True)
    return table


def _accounting_table(rows: Sequence[AccountingRow]) -> Table:
    table = _table("", "kvstow us", "ns a block", "vLLM us", "ratio")
    for row in rows:
        per_block = "" if row.num_blocks is None else f"{row.kvstow_us / row.num_blocks * 1e3:,.0f}"
        theirs = "not installed" if row.vllm_us is None else f"{row.vllm_us:,.0f}"
        ratio = "" if row.vllm_us is None else f"{row.vllm_us / row.kvstow_us:,.0f}x"
        blocks = "" if row.num_blocks is None else f" of {row.num_blocks:,} blocks"
        table.add_row(row.work + blocks, f"{row.kvstow_us:,.1f}", per_block, theirs, ratio)
    return table


def _copy_table(rows: Sequence[CopyRow], device: Device) -> Table:
    peak = "link GB/s" if device == "cuda" else "memcpy GB/s"
    table = _table("fragments", "direction", "kvstow GB/s", peak, "ratio", "bytes")
    for row in rows:
        table.add_row(
            f"{row.num_layers} x {row.fragment_kib} KiB",
            row.direction,
            f"{row.gb_per_s:.1f}",
            f"{row.peak_gb_per_s:.1f}",
            f"{row.gb_per_s / row.peak_gb_per_s:.2f}",
            "right" if row.is_right else "WRONG",
        )
    return table


def _tier_table(rows: Sequence[TierRow], note: str = "") -> Table:
    table = _table("", "median ms", "GB/s", "failed blocks", "wrong blocks")
    table.caption, table.caption_justify = note or None, "left"
    for row in rows:
        blocks = "1 block" if row.num_blocks == 1 else f"{row.num_blocks} blocks"
        table.add_row(
            f"{row.action} {blocks}",
            f"{row.median_ms:.2f}",
            f"{row.gb_per_s:.2f}",
            str(row.num_failed),
            str(row.num_wrong) if row.action == "get" else "",
        )
    return table
