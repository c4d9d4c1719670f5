"""The output of a command: text for people, JSON for programs."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Final

import click
from rich.box import Box
from rich.console import Console
from rich.table import Table

from kvstow._core import ConfigError
from kvstow.build import version_and_build
from kvstow.closing import Closing

STANDARD_OUTPUT: Final = "standard output"
_STANDARD_STREAMS: Final = (1, 2)
_OTHER_PICTURES: Final = {".eps", ".gif", ".jpeg", ".jpg", ".pdf", ".svg", ".webp"}
_WRITTEN: Final = frozenset({"html", "png", "csv_file", "json_file", "events_path"})
"""The parameters of all commands that name a file to write."""
_READ_METAVARS: Final = frozenset({"FILE", "PATH", "MODEL"})
_LEAST_COLUMNS: Final = 60  # rich drops the columns of a table that do not fit
_MOST_COLUMNS: Final = 10_000  # of a pipe or a file, where no line is cut for a reader such as grep
_RULE: Final = "─"  # below the heads of a table
_MOST_RANKS: Final = 64  # of kvstow replay --world-size
_STDIN_PATH: Final = "/dev/stdin"  # a link to the file that the shell has opened
_WRITE_IN_PLACE: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


def with_output(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options `--json` and `--json-file`, and an argument `output`."""

    @click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
    @click.option("--json-file", metavar="FILE", help="Also write that object to FILE.")
    @wraps(command)
    def run(*arguments: object, as_json: bool, json_file: str | None, **options: object) -> int:
        _check_files(click.get_current_context())
        with Output(as_json=as_json, json_file=json_file) as output:
            return command(*arguments, output=output, **options)

    return run


def _check_files(context: click.Context) -> None:
    """Check that a command overwrites neither what it reads nor its own other result.

    Raises:
        ConfigError: it would, or a result would go to a file with the name `-`.
    """
    taken: dict[str, str] = {}
    parameters = context.command.params
    for parameter in sorted(parameters, key=lambda one: one.name in _WRITTEN):
        given, option = context.params[parameter.name or ""], parameter.opts[0]
        is_file = isinstance(parameter, click.Argument) or parameter.metavar in _READ_METAVARS
        if given is None or not is_file:
            continue
        for name in map(str, given if isinstance(given, tuple) else (given,)):
            path = os.path.realpath(name)
            if name == "-" and parameter.name in _WRITTEN:
                raise ConfigError(
                    f"{option} is '-', which stands for standard input alone: pass /dev/stdout, or "
                    "./- for a file of that name"
                )
            if parameter.name not in _WRITTEN:
                for file in _files_behind(parameter.name, name):
                    taken[os.path.realpath(file)] = "the command reads that file"
            elif path in taken:
                raise ConfigError(f"{option} is {name!r}, and {taken[path]}: pass another name")
            elif os.path.isfile(path) or not os.path.exists(path):  # not a device or a pipe
                taken[path] = f"{option} writes that file"


def _files_behind(parameter: str | None, name: str) -> Iterator[str]:
    """Yield the files that a command uses for the value of a parameter."""
    match parameter:
        case "model":
            yield os.path.join(name, "config.json") if os.path.isdir(name) else name
        case "place" | "path":  # of a slot file, which has an index
            yield from (name, f"{name}.index")
        case "disk":  # several ranks have a slot file each
            for file in (name, *(f"{name}.{rank}" for rank in range(_MOST_RANKS))):
                yield from (file, f"{file}.index")
        case _:
            yield _STDIN_PATH if name == "-" else name


class Output(Closing):
    """Prints the result of a command, and writes it to the file of `--json-file`.

    Attributes:
        as_json: whether standard output gets JSON and nothing else.

    The constructor checks the file, so that the command fails before the work if it cannot write.

    Raises:
        OSError: the file, or later the standard output, cannot be written.
    """

    def __init__(self, *, as_json: bool, json_file: str | None) -> None:
        self.as_json = as_json
        self._file = None if json_file is None else ResultFile(json_file)

    @property
    def wants_json(self) -> bool:
        """Whether the JSON goes to standard output or to a file."""
        return self.as_json or self._file is not None

    def close(self) -> None:
        """Close the file of `--json-file`."""
        if self._file is not None:
            self._file.close()

    def write(self, result: Mapping[str, object], shown: Callable[[], Table | str]) -> None:
        """Write the result to the file, and print it: as JSON, or as what `shown` returns.

        The JSON also says which build of kvstow found it.
        """
        text = (
            json.dumps({**result, "kvstow": version_and_build()}, indent=2, allow_nan=False) + "\n"
        )
        if self._file is not None:
            self._file.write(text.encode())
        print_text(text if self.as_json else _rendered(shown()))


class ResultFile(Closing):
    """A file that a command writes at its end: it holds either the whole result or what it held.

    The content goes to a temporary file in the same folder, which then takes the name. An existing
    file keeps its mode. A device, a pipe, and the file that is standard output or standard error
    are written directly. So is an existing file whose folder refuses another one.

    The constructor changes no file. It checks that the file can be written.

    Raises:
        OSError: the file cannot be written. The `filename` of the error is `name`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._path = os.path.realpath(name)  # a symbolic link keeps its place
        self._old: os.stat_result | None = None
        self._direct: int | None = None
        with self._named_errors():
            try:
                self._old = os.stat(name)
            except FileNotFoundError:
                if not os.path.basename(name):
                    raise
            if self._old is not None and self._opened_directly(self._old):
                return
            try:
                os.unlink(self._new_file(b""))
            except OSError as error:
                if not self._can_write_in_place(error):
                    raise

    def close(self) -> None:
        """Close the device or pipe."""
        descriptor, self._direct = self._direct, None
        if descriptor is not None:
            with suppress(OSError):  # `write` has reported every error
                os.close(descriptor)

    def write(self, content: bytes) -> None:
        """Write the whole content. Call it once."""
        with self._named_errors():
            if self._direct is not None:
                _write_all(self._direct, content)
                return
            try:
                self._replace(content)
            except OSError as error:
                if not self._can_write_in_place(error):
                    raise
                with open(self._path, "wb") as file:
                    file.write(content)

    def _opened_directly(self, old: os.stat_result) -> bool:
        """Keep a descriptor of what no file can replace, and return whether it is such a thing."""
        for stream in _STANDARD_STREAMS:
            with suppress(OSError):  # the stream is closed
                if os.path.samestat(old, os.fstat(stream)):
                    self._direct = os.dup(stream)  # shares its position with the stream
                    return True
        descriptor = os.open(self._name, os.O_WRONLY)
        if stat.S_ISREG(old.st_mode):
            os.close(descriptor)
            return False
        self._direct = descriptor
        return True

    def _replace(self, content: bytes) -> None:
        path = self._new_file(content)
        try:
            os.replace(path, self._path)
        except BaseException:
            os.unlink(path)
            raise

    def _new_file(self, content: bytes) -> str:
        """Create a temporary file beside the target, with its mode, and return the path."""
        folder = os.path.dirname(self._path)
        path = os.path.join(folder, f".kvstow-{os.getpid()}-{secrets.token_hex(4)}")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if self._old is not None:
                with suppress(OSError):  # only root may give a file away
                    os.fchown(descriptor, self._old.st_uid, self._old.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(self._old.st_mode))
            _write_all(descriptor, content)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        return path

    def _can_write_in_place(self, error: OSError) -> bool:
        return self._old is not None and error.errno in _WRITE_IN_PLACE

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            folder = os.path.dirname(self._path)
            lacks = isinstance(error, FileNotFoundError) and not os.path.exists(folder)
            why = f"there is no folder {folder}" if lacks else error.strerror
            raise OSError(error.errno, why, self._name) from error


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def check_can_draw(png: str | None, *, otherwise: str = "") -> None:
    """Raise `ConfigError` if the picture would be no PNG by its name, or if matplotlib is missing.

    Args:
        png: the file of `--png`; None for no picture.
        otherwise: what else the user can do.
    """
    if png is not None and (suffix := Path(png).suffix.lower()) in _OTHER_PICTURES:
        raise ConfigError(
            f"--png is {png!r}, and kvstow writes no {suffix[1:].upper()}: pass a name that ends "
            f"in .png{otherwise}"
        )
    if png is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--png needs matplotlib, which is not installed: run pip install 'kvstow[plot]'"
            + otherwise
        )


@contextmanager
def written_file(name: str | None) -> Iterator[Callable[[Callable[[], str | bytes]], None]]:
    """Check a file before the work, so that the command fails at once if it cannot write.

    Yields a function that writes the text or the bytes that its argument returns. Without a name it
    does nothing.

    Raises:
        OSError: the file cannot be written.
    """
    if name is None:
        yield lambda _content: None
        return
    with ResultFile(name) as file:

        def write(content: Callable[[], str | bytes]) -> None:
            made = content()
            # A page shows the name of the trace, which may not be UTF-8.
            file.write(made if isinstance(made, bytes) else made.encode(errors="backslashreplace"))

        yield write


def _rendered(shown: Table | str) -> str:
    """Return the text for this terminal, or in lines of any length for a pipe or a file.

    `[/model]` or `:smile:` in a table is no markup.
    """
    if isinstance(shown, str):
        return shown
    if shown.box is not None and not can_print(_RULE):
        shown.box = Box(str(shown.box).replace(_RULE, "-"), ascii=True)
    for column in shown.columns:
        if not column.no_wrap:
            column.overflow = "fold"  # rich would end a long name with an ellipsis
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    text = io.StringIO()
    console = Console(
        file=text, force_terminal=is_terminal, highlight=False, markup=False, emoji=False
    )
    is_bounded = is_terminal or "COLUMNS" in os.environ
    console.width = max(console.width, _LEAST_COLUMNS) if is_bounded else _MOST_COLUMNS
    if not is_bounded and shown.title is not None:  # rich would wrap it to the table's width
        console.print(shown.title)
        shown.title = None
    console.print(shown)
    found = text.getvalue()
    return found if is_terminal else "".join(f"{line.rstrip()}\n" for line in found.splitlines())


def can_print(text: str) -> bool:
    """Return whether the encoding of standard output has these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


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
