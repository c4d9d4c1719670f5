"""The command `kvstow`.

What it needs beyond the library is an extra, so it is imported when the command runs: where it is
missing, the user is told what to install and not shown a traceback.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstow._core import ConfigError, __version__

if TYPE_CHECKING:
    import click

__all__ = ["main"]

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; `arguments` are those of the process unless given.

    Returns:
        0 if all is well, 1 if a check failed, 2 for bad usage or input, 130 on Ctrl-C.
    """
    try:
        import click  # noqa: PLC0415
        import rich  # noqa: F401, PLC0415
    except ImportError as error:
        print(
            f"kvstow: the command line needs {error.name}: pip install 'kvstow[cli]'",
            file=sys.stderr,
        )
        return EXIT_USAGE
    try:
        status: int | None = _commands().main(
            args=None if arguments is None else list(arguments),
            prog_name="kvstow",
            standalone_mode=False,
        )
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ConfigError as error:
        print(f"kvstow: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return status or 0


def _commands() -> "click.Group":
    import click  # noqa: PLC0415

    from kvstow.doctor.command import doctor  # noqa: PLC0415
    from kvstow.replay.command import replay  # noqa: PLC0415
    from kvstow.snapshot_command import snapshot  # noqa: PLC0415

    commands = [doctor, replay, snapshot]
    group = click.Group("kvstow", help="Stow the KV cache of an LLM server.", commands=commands)
    return click.version_option(__version__, prog_name="kvstow")(group)
