"""The command `kvstow`.

It needs click and rich. `import kvstow` imports neither them nor this module.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import click

from kvstow._core import ConfigError
from kvstow.build import version_and_build
from kvstow.output import STANDARD_OUTPUT, discard_standard_output
from kvstow.texts import on_one_line

EXIT_USAGE: Final = 2
EXIT_BUG: Final = os.EX_SOFTWARE  # 70
EXIT_IO: Final = os.EX_IOERR  # 74
EXIT_INTERRUPTED: Final = 130
_ENDING: Final = (signal.SIGHUP, signal.SIGTERM)
# `timeout` sends its signal to the command and to the group of the command, so twice at once.
_AT_ONCE_S: Final = 1.0


class _Ended(BaseException):
    """A signal ends the process. `kvstow doctor` would take `SystemExit` for that of a library."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        arguments: the arguments of the process unless given.

    Returns:
        0 for success, 1 if a check failed, 2 for bad usage or input, 70 for an error in kvstow
        itself (with its traceback), 74 if input or output failed, 130 after Ctrl-C, 143 after
        SIGTERM, 129 after SIGHUP.
    """
    try:
        with _unwound_by_signals():
            return _status_of(list(sys.argv[1:] if arguments is None else arguments))
    except _Ended as end:
        return int(end.args[0])


@contextmanager
def _unwound_by_signals() -> Iterator[None]:
    """Let a signal that ends the process raise, so that a command removes its files and blocks."""
    first_s: float | None = None

    def end(number: int, _frame: object) -> None:
        nonlocal first_s
        now_s = time.monotonic()
        if first_s is None:
            first_s = now_s
            raise _Ended(128 + number)
        if now_s - first_s > _AT_ONCE_S:  # the command hangs
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    changed = []
    if threading.current_thread() is threading.main_thread():  # no other may set a handler
        # `nohup` ignores SIGHUP.
        changed = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def _status_of(arguments: list[str]) -> int:
    try:
        status = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except click.ClickException as error:
        with suppress(OSError):
            error.show()
        return EXIT_USAGE
    except ConfigError as error:
        _complain(f"kvstow: {on_one_line(str(error))}")
        return EXIT_USAGE
    except OSError as error:
        discard_standard_output()
        is_closed_pipe = error.errno == errno.EPIPE and error.filename in (None, STANDARD_OUTPUT)
        if not is_closed_pipe:  # `kvstow replay | head -1` should print no error
            where = "" if error.filename is None else f"{error.filename}: "
            _complain(f"kvstow: {on_one_line(f'{where}{error.strerror or error}')}")
        return EXIT_IO
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except Exception:
        _complain(traceback.format_exc().rstrip())
        return EXIT_BUG


def _run(arguments: list[str]) -> int:
    # `Group.main` returns status 1 for a closed pipe, but here 1 means that a check failed.
    commands = _commands()
    try:
        with commands.make_context("kvstow", arguments) as context:
            status: int | None = commands.invoke(context)
    except click.exceptions.Exit as end:  # after --help and --version
        return end.exit_code
    return status or 0


def _commands() -> click.Group:
    # Imported here so that Ctrl-C during these slow imports shows no traceback.
    from kvstow.bench.command import bench  # noqa: PLC0415
    from kvstow.doctor.command import doctor  # noqa: PLC0415
    from kvstow.engine.snapshot_command import snapshot  # noqa: PLC0415
    from kvstow.plan.command import plan  # noqa: PLC0415
    from kvstow.replay.command import replay  # noqa: PLC0415
    from kvstow.replay.convert_command import trace  # noqa: PLC0415
    from kvstow.tiers.command import tier  # noqa: PLC0415

    commands = [bench, doctor, plan, replay, snapshot, tier, trace]
    group = click.Group(
        "kvstow", help="Keep the KV cache of an LLM server in host memory.", commands=commands
    )
    # Not `click.version_option`, which takes the version itself: each command would read all code.
    return click.option(
        "--version",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_print_version,
        help="Show the version and exit.",
    )(group)


def _print_version(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        click.echo(f"kvstow, version {version_and_build()}")
        context.exit()


def _complain(message: str) -> None:
    with suppress(OSError):  # standard error is full or closed
        click.echo(message, err=True)
