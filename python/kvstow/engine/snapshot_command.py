"""The command `kvstow snapshot`: inspect a file that an engine sleeps in."""

from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvstow._core import SnapshotError
from kvstow.engine.snapshot_file import SnapshotFile
from kvstow.output import Output, with_output
from kvstow.texts import on_one_line

EXIT_OK, EXIT_DAMAGED = 0, 1
_MAX_NAMED_SLOTS = 10


@click.group()
def snapshot() -> None:
    """Inspect the files that engines sleep in."""


@snapshot.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@with_output
def info(output: Output, file: Path) -> int:
    """Show what FILE holds, and compare all of it with its checksums.

    The exit status is 0 if FILE is sound, 1 if it is damaged or not a snapshot, 2 for bad usage
    or a missing FILE, and 74 if FILE cannot be read or the output cannot be written.
    """
    facts: dict[str, object] = {"file": str(file)}
    problem: str | None
    try:
        with SnapshotFile(file) as found:
            facts |= _facts(found)
            damaged = found.damaged_slots()
        problem = _named(damaged) if damaged else None
    except SnapshotError as error:
        if isinstance(error.__cause__, OSError):  # a failure to read proves no damage
            raise OSError(*error.__cause__.args[:2], str(file)) from error
        problem = str(error)
    result = facts | {"sound": problem is None, "problem": problem}
    output.write(result, lambda: _table(facts, is_sound=problem is None))
    if problem is not None and not output.as_json:
        click.echo(f"kvstow: {on_one_line(problem)}", err=True)
    return EXIT_OK if problem is None else EXIT_DAMAGED


def _table(facts: dict[str, object], *, is_sound: bool) -> Table:
    table = Table("", "", box=SIMPLE_HEAD, show_header=False)
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else on_one_line(str(value))
        table.add_row(name.replace("_", " "), shown)
    table.add_row("sound", "yes" if is_sound else "no")
    return table


def _facts(found: SnapshotFile) -> dict[str, object]:
    image = found.image
    return {
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
