"""The command `kvstow snapshot`: what is in a file that an engine sleeps in."""

import json
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvstow._core import SnapshotError
from kvstow.snapshot import SnapshotFile

__all__ = ["snapshot"]

EXIT_OK, EXIT_DAMAGED = 0, 1
_MAX_NAMED_SLOTS = 10


@click.group()
def snapshot() -> None:
    """Look at the files that engines sleep in."""


@snapshot.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Write it as JSON, and no table.")
def info(file: Path, *, as_json: bool) -> int:
    """Say what is in FILE, and whether all of it is as it was written.

    Exits with 0 if it is sound, 1 if it is damaged or no snapshot, 2 for bad usage.
    """
    try:
        with SnapshotFile(file) as found:
            facts, damaged = _facts(found), found.damaged_slots()
    except SnapshotError as error:
        if as_json:
            click.echo(json.dumps({"file": str(file), "sound": False, "problem": str(error)}))
        else:
            click.echo(f"kvstow: {error}", err=True)
        return EXIT_DAMAGED
    problem = None if not damaged else _named(damaged)
    if as_json:
        click.echo(json.dumps(facts | {"sound": not damaged, "problem": problem}, indent=2))
    else:
        table = Table("", "", box=SIMPLE_HEAD, show_header=False, title=str(file))
        for name, value in facts.items():
            shown = f"{value:,}" if isinstance(value, int) else str(value)
            table.add_row(name.replace("_", " "), shown)
        table.add_row("sound", "yes" if problem is None else f"no: {problem}")
        Console(highlight=False).print(table)
    return EXIT_DAMAGED if damaged else EXIT_OK


def _facts(found: SnapshotFile) -> dict[str, object]:
    image = found.image
    return {
        "file": str(found.path),
        "version": found.version,
        "identity": image.model.identity,
        "weights_version": image.model.weights_version,
        "requests": image.num_requests,
        "tokens": image.num_tokens,
        "cached_blocks": image.num_blocks,
        "ranks": len(found.slot_bytes),
        "slot_bytes": max(found.slot_bytes),
        "used_slots": found.num_used_slots,
        "file_bytes": found.num_bytes,
        "bytes_on_disk": found.path.stat().st_blocks * 512,
    }


def _named(damaged: list[tuple[int, int]]) -> str:
    slots = ", ".join(f"{slot} of rank {rank}" for rank, slot in damaged[:_MAX_NAMED_SLOTS])
    num_more = len(damaged) - _MAX_NAMED_SLOTS
    return f"{len(damaged)} slots are damaged: {slots}{f' and {num_more} more' * (num_more > 0)}"
