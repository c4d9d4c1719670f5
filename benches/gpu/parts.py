"""The parts of the benchmark and their files: each row is on the disk as soon as it is measured."""

import json
from pathlib import Path
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]


class Log:
    """The rows of one part, in STEM-PART.json."""

    def __init__(self, stem: Path, part: str, head: Row) -> None:
        """Begin with a head, which says what was measured on what."""
        self._file = part_file(stem, part)
        self._content: Row = {**head, "part": part, "is_whole": False, "rows": []}
        self._file.parent.mkdir(parents=True, exist_ok=True)

    def add(self, *rows: Row) -> None:
        """Print rows, and write them to the file."""
        for row in rows:
            shown = {
                name: round(value, 3) if isinstance(value, float) else value
                for name, value in row.items()
            }
            print(" ", " ".join(f"{name}={value}" for name, value in shown.items()), flush=True)
        self._content["rows"] += rows
        self._write()

    def end(self, **found: Any) -> None:
        """Add what the rows show, and mark the part as whole."""
        self._content |= {**found, "is_whole": True}
        self._write()

    def _write(self) -> None:
        text = json.dumps(self._content, indent=1, allow_nan=False) + "\n"
        self._file.write_text(text, encoding="utf-8")


def part_file(stem: Path, part: str) -> Path:
    """Return the file of a part."""
    return stem.with_name(f"{stem.name}-{part}.json")


def read(stem: Path, part: str) -> Row | None:
    """Return the content of a part's file; None if the part was not measured."""
    try:
        content: Row = json.loads(part_file(stem, part).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return content
