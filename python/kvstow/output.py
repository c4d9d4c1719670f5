"""The output of a command: text for people, JSON for programs."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from typing import IO, Final

import click
from rich.console import Console
from rich.table import Table

from kvstow._core import ConfigError
from kvstow.closing import Closing

STANDARD_OUTPUT: Final = "standard output"


def with_output(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options `--json` and `--json-file`, and an argument `output`."""

    @click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
    @click.option("--json-file", metavar="FILE", help="Also write that object to FILE.")
    @wraps(command)
    def run(*arguments: object, as_json: bool, json_file: str | None, **options: object) -> int:
        with Output(as_json=as_json, json_file=json_file) as output:
            return command(*arguments, output=output, **options)

    return run


class Output(Closing):
    """Prints the result of a command, and writes it to the file of `--json-file`.

    Attributes:
        as_json: whether standard output gets JSON and nothing else.

    The constructor opens the file, so that the command fails before the work if it cannot.

    Raises:
        OSError: the file, or later the standard output, cannot be written.
    """

    def __init__(self, *, as_json: bool, json_file: str | None) -> None:
        self.as_json = as_json
        self._name = json_file
        self._file: IO[str] | None = None
        if json_file is not None:
            self._file = open(json_file, "w", encoding="utf-8")  # noqa: SIM115

    def close(self) -> None:
        """Close the file of `--json-file`."""
        if self._file is not None:
            with suppress(OSError):  # `write` has flushed and reported every error
                self._file.close()

    def write(self, result: Mapping[str, object], shown: Callable[[], Table | str]) -> None:
        """Write the result to the file, and print it: as JSON, or as what `shown` returns."""
        text = json.dumps(result, indent=2, allow_nan=False) + "\n"
        if self._file is not None:
            try:
                self._file.write(text)
                self._file.flush()
            except OSError as error:
                error.filename = self._name
                raise
        print_text(text if self.as_json else _rendered(shown()))


def check_can_draw(png: str | None, *, otherwise: str = "") -> None:
    """Raise `ConfigError` if a picture is wanted and matplotlib is missing.

    Args:
        png: the file of `--png`; None for no picture.
        otherwise: what else the user can do.
    """
    if png is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--png needs matplotlib, which is not installed: run pip install 'kvstow[plot]'"
            + otherwise
        )


@contextmanager
def written_file(name: str | None) -> Iterator[Callable[[Callable[[], str | bytes]], None]]:
    """Open a file before the work, so that the command fails at once if it cannot.

    Yields a function that writes the text or the bytes that its argument returns. Without a name it
    does nothing.

    Raises:
        OSError: the file cannot be opened or written.
    """
    if name is None:
        yield lambda _content: None
        return
    with open(name, "wb") as file:

        def write(content: Callable[[], str | bytes]) -> None:
            made = content()
            try:
                file.write(made if isinstance(made, bytes) else made.encode())
                file.flush()
            except OSError as error:
                error.filename = name
                raise

        yield write


def _rendered(shown: Table | str) -> str:
    """Return the text for this terminal; `[/model]` or `:smile:` in a table is no markup."""
    if isinstance(shown, str):
        return shown
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    text = io.StringIO()
    console = Console(
        file=text, force_terminal=is_terminal, highlight=False, markup=False, emoji=False
    )
    console.print(shown)
    return text.getvalue()


def print_text(text: str) -> None:
    """Write text to standard output, and escape the characters that its encoding lacks.

    Raises:
        OSError: standard output is closed, full, or a pipe without a reader. Its `filename` is
            `STANDARD_OUTPUT`.
    """
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        error.filename = STANDARD_OUTPUT
        raise


def discard_standard_output() -> None:
    """Drop the buffered output, which Python would write again when it exits, and fail."""
    with suppress(AttributeError, OSError, ValueError):  # no stdout, or one without a descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
