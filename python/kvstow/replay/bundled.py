"""The trace that a command takes without an argument, unless standard input has another one."""

import os
import select
import stat
import sys
import termios
from fcntl import ioctl
from typing import Final

import click

from kvstow._core import ConfigError
from kvstow.replay import BUNDLED_TRACE

BUNDLED_NAME: Final = f"{BUNDLED_TRACE.name} (bundled)"
"""What reports call the bundled trace."""
_PIPE_PATIENCE_MS = 200


def refuse_ignored_input(use: str) -> None:
    """Raise `ConfigError` if standard input has data, which needs the argument `-`.

    `use` is what the command does with a trace.

    Otherwise standard input is a terminal, closed, /dev/null, at its end, or (under ssh and some CI
    systems) a pipe that stays open and empty.
    """
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or an object without descriptor
        return
    if stat.S_ISREG(mode):
        num_bytes = os.fstat(descriptor).st_size - os.lseek(descriptor, 0, os.SEEK_CUR)
    elif stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(_PIPE_PATIENCE_MS):
            click.echo(
                f"kvstow: standard input is open and empty, so this will {use} the bundled trace: "
                "pass - to wait for a trace",
                err=True,
            )
            return
        available = ioctl(descriptor, termios.FIONREAD, bytes(4))
        num_bytes = int.from_bytes(available, sys.byteorder)
    else:
        return
    if num_bytes > 0:
        raise ConfigError(
            f"standard input has data, but there is no argument TRACE: pass - to {use} the data, "
            f"or </dev/null to {use} the bundled trace"
        )
