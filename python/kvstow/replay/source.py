"""Read the lines of a file or of standard input, and decompress them."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Never, cast

from kvstow._core import ConfigError

STANDARD_INPUT: Final = "-"

# The first bytes of a compressed stream, the module that opens one, the error that this module
# raises for a damaged stream, and the program that decompresses one where Python lacks the module.
_FORMS: Final = (
    (b"\x1f\x8b", "gzip", "BadGzipFile", "gzip -dc"),
    (b"BZh", "bz2", "EOFError", "bzip2 -dc"),
    (b"\xfd7zXZ\x00", "lzma", "LZMAError", "xz -dc"),
    (b"\x28\xb5\x2f\xfd", "compression.zstd", "ZstdError", "zstd -dc"),  # new in Python 3.14
)
_ZIP: Final = b"PK\x03\x04"
_LONGEST_MAGIC: Final = max(len(magic) for magic, *_ in _FORMS)


class Source:
    """A file, a pipe, or standard input. Its first bytes decide how it is decompressed.

    Attributes:
        name: the path, or `<stdin>`, for messages.

    Args:
        path: a path, or `-` for standard input.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._is_stdin = str(path) == STANDARD_INPUT
        self.name = "<stdin>" if self._is_stdin else str(path)

    def fail(self, line: int | None, problem: str) -> Never:
        """Raise `ConfigError` with the name, and the line if the problem is in one."""
        place = self.name if line is None else f"{self.name}:{line}"
        raise ConfigError(f"{place}: {problem}")

    def check(self) -> None:
        """Refuse a path that surely cannot be read. Opens nothing, because a pipe is read once.

        Raises:
            ConfigError: the file does not exist, is a folder, or may not be read.
        """
        if self._is_stdin:
            return
        try:
            mode = self._path.stat().st_mode
        except OSError as error:
            self.fail(None, f"cannot be read: {error.strerror or error}")
        if stat.S_ISDIR(mode):
            self.fail(None, f"cannot be read: {os.strerror(errno.EISDIR)}")
        if not os.access(self._path, os.R_OK):
            self.fail(None, f"cannot be read: {os.strerror(errno.EACCES)}")

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield each line with its number, from 1.

        Raises:
            ConfigError: the file cannot be opened, or a compressed stream is truncated or damaged.
            OSError: reading failed after the file was opened.
        """
        with ExitStack() as stack:
            raw = self._open(stack)
            try:
                yield from self._numbered(raw)
            except OSError as error:
                error.filename = error.filename or self.name
                raise

    def _numbered(self, raw: io.BufferedReader) -> Iterator[tuple[int, bytes]]:
        file = _Rejoined(raw, _LONGEST_MAGIC)
        form = next((form for form in _FORMS if file.head.startswith(form[0])), None)
        if file.head.startswith(_ZIP):
            self.fail(None, "is a zip archive: unpack it, and pass the file that is in it")
        if form is None:
            yield from enumerate(io.BufferedReader(file), start=1)
            return
        _, module_name, error_name, program = form
        module = self._module(module_name, program)
        own_error = getattr(module, error_name, EOFError)
        line = 0
        try:
            for line, text in enumerate(module.open(io.BufferedReader(file)), start=1):
                yield line, text
        except (EOFError, OSError, zlib.error, own_error) as error:
            if getattr(error, "errno", None) is not None:  # the file's, not the decompressor's
                raise
            kind = module_name.removeprefix("compression.")
            self.fail(line + 1, f"the {kind} stream is cut off or damaged ({error}); copy it again")

    def _open(self, stack: ExitStack) -> io.BufferedReader:
        if self._is_stdin:
            if sys.stdin is None:
                self.fail(None, "standard input is closed")
            return cast(io.BufferedReader, sys.stdin.buffer)
        try:
            return stack.enter_context(self._path.open("rb"))
        except OSError as error:
            self.fail(None, f"cannot be read: {error.strerror or error}")

    def _module(self, name: str, program: str) -> Any:
        try:
            return import_module(name)
        except ImportError:
            path = "" if self._is_stdin else f" {self.name}"
            self.fail(
                None,
                f"is compressed, and this Python lacks the module {name} to read it: run "
                f"{program}{path} | kvstow replay -, or another command with -",
            )


class _Rejoined(io.RawIOBase):
    """A stream that shows its first bytes before they are read, because pipes cannot seek.

    Attributes:
        head: the first bytes that have not been read.
    """

    def __init__(self, file: io.BufferedReader, num_bytes: int) -> None:
        self._file = file
        self.head = file.read(num_bytes)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with the bytes that are available at once."""
        part = self.head[: len(buffer)] or self._file.read1(len(buffer))
        self.head = self.head[len(part) :]
        buffer[: len(part)] = part
        return len(part)
