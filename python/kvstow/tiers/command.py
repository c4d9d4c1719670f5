"""The command `kvstow tier`: inspect, verify or empty a slot file or a shared store."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvstow._core import ConfigError
from kvstow.output import Output, with_output
from kvstow.texts import on_one_line
from kvstow.tiers.inspection import Inspection, inspected
from kvstow.tiers.opening import INDEX_SUFFIX
from kvstow.tiers.shared_command import (
    drop_blocks,
    is_url,
    refuse_store_options,
    show_blocks,
    store_options,
)
from kvstow.tiers.slot_index import SlotFileMismatch

EXIT_OK, EXIT_DAMAGED = 0, 1
_MAX_NAMED_SLOTS = 10

_PLACE = click.argument("place", metavar="PLACE")
_PATH = click.argument("path")


@click.group()
def tier() -> None:
    """Inspect, verify or empty a slot file or a shared store."""


@tier.command()
@_PLACE
@store_options
@with_output
def info(output: Output, place: str, **store: Any) -> int:
    """Show what a slot file or a shared store holds. Servers may use it meanwhile.

    PLACE is the path of the slot file, or the URL of RESP servers. The command reads every key of
    these servers, which takes long for a large store.

    The exit status is 0, or 1 if the file is damaged, 2 for bad usage, a missing file or another
    kind of file, and 74 if it cannot be read, or if a server does not answer.
    """
    if is_url(place):
        return show_blocks(output, place, store)
    refuse_store_options("info")
    path = _checked_path(place)

    def look() -> tuple[dict[str, object], str | None]:
        with inspected(path, to_lock=False) as found:
            return _facts(found), _cut(found)

    return _reported(output, path, look)


@tier.command()
@_PATH
@with_output
def verify(output: Output, path: str) -> int:
    """Compare every block of the slot file PATH with its checksum.

    Stop the server first. The exit status is 0 if all blocks are sound, 1 if one is not, 2 for bad
    usage, a missing file or a file in use, and 74 if it cannot be opened.
    """
    if is_url(path):
        raise ConfigError(
            f"{path} is a URL, and verify reads slot files only: servers check each block of a "
            "store when they read it"
        )
    path = _checked_path(path)

    def look() -> tuple[dict[str, object], str | None]:
        with inspected(path, to_lock=True) as found:
            facts, problem = _facts(found), _cut(found)
            verified = found.verify()
        bad = verified.bad_slots
        facts |= {"sound_blocks": verified.num_sound, "bad_blocks": len(bad)}
        if bad:
            slots = ", ".join(map(str, bad[:_MAX_NAMED_SLOTS]))
            more = f" and {len(bad) - _MAX_NAMED_SLOTS} more" * (len(bad) > _MAX_NAMED_SLOTS)
            why = f" ({verified.error.strerror})" if verified.error else ""
            problem = (
                f"damaged blocks of {path}: {len(bad)}{why}, in slots {slots}{more}. They are "
                "misses. After kill -9 a few are normal; otherwise check the disk"
            )
        return facts, problem

    return _reported(output, path, look)


@tier.command()
@_PLACE
@click.option(
    "--fingerprint",
    metavar="DIGITS",
    help="Of a shared store: whose blocks to delete, 32 hexadecimal digits. `kvstow tier info URL` "
    "lists them.",
)
@store_options
@with_output
def reset(output: Output, place: str, fingerprint: str | None, **store: Any) -> int:
    """Drop all blocks of a slot file, or of one model in a store.

    PLACE is the path of the slot file, which keeps its size, or the URL of the store. Stop the
    server of a slot file first. No loss of power brings the blocks back. Servers of a shared store
    may run. One of this model puts its blocks again.

    The exit status is 0, or 1 if the header of the file is damaged, 2 for bad usage, a missing
    file or a file in use, and 74 if the file cannot be written or the store does not answer.
    """
    if is_url(place):
        return drop_blocks(output, place, fingerprint, store)
    refuse_store_options("reset", fingerprint=fingerprint)
    path = _checked_path(place)

    def empty() -> tuple[dict[str, object], str | None]:
        with inspected(path, to_lock=True, to_write=True) as found:
            found.reset()
        return {"dropped_blocks": len(found.frames)}, None

    return _reported(output, path, empty)


def _checked_path(place: str) -> str:
    """Return the path of a file that exists, or raise as click does.

    Raises:
        ConfigError: it is a folder.
    """
    if os.path.isdir(place):
        there = set(os.listdir(place))
        names = sorted(name for name in there if name + INDEX_SUFFIX in there)
        such = f"such as {os.path.join(place, names[0])}" if names else "and this folder has none"
        raise ConfigError(f"{place} is a folder: pass the path of a slot file, {such}")
    return str(click.Path(exists=True, dir_okay=False).convert(place, None, None))


def _reported(
    output: Output, path: str, look: Callable[[], tuple[dict[str, object], str | None]]
) -> int:
    """Write what `look` returns: the facts, and what is wrong with the file."""
    facts: dict[str, object] = {}
    problem: str | None
    try:
        facts, problem = look()
    except SlotFileMismatch as error:
        problem = f"{error}; or remove {path} and its index"
    except OSError as error:
        error.filename = error.filename or path
        raise
    result = {"path": path} | facts | {"sound": problem is None, "problem": problem}
    output.write(result, lambda: _table(path, facts, is_sound=problem is None))
    if problem is not None and not output.as_json:
        click.echo(f"kvstow: {on_one_line(problem)}", err=True)
    return EXIT_OK if problem is None else EXIT_DAMAGED


def _facts(found: Inspection) -> dict[str, object]:
    header = found.header
    return {
        "fingerprint": dict(header.fingerprint),
        "slot_bytes": header.slot_bytes,
        "slots": header.num_slots,
        "blocks": len(found.frames),
        "warm_blocks": found.num_warm,
        "dropped_records": found.num_dropped,
        "file_bytes": found.num_bytes,
        "bytes_on_disk": found.bytes_on_disk,
    }


def _cut(found: Inspection) -> str | None:
    return f"{found.path} or its index is cut short" if found.is_cut else None


def _table(path: str, facts: Mapping[str, object], *, is_sound: bool) -> Table:
    table = Table("", "", box=SIMPLE_HEAD, show_header=False)
    table.add_row("path", on_one_line(path))
    for name, value in facts.items():
        if isinstance(value, dict):
            for own, text in value.items():
                table.add_row(on_one_line(str(own)), on_one_line(str(text)))
        else:
            table.add_row(
                name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value)
            )
    table.add_row("sound", "yes" if is_sound else "no")
    return table
