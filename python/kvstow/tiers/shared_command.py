"""What `kvstow tier` does with a shared store: list the models there, or delete one's blocks."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvstow._core import ConfigError, TransferError
from kvstow.output import Output
from kvstow.texts import counted
from kvstow.tiers.resp import Credentials, Security
from kvstow.tiers.shared_keys import count_blocks, delete_blocks, is_mooncake, namespace_of

_Command = TypeVar("_Command", bound=Callable[..., int])

_FILES: Final = {
    "password_file": "file with the password. Without it, KVSTOW_SHARED_PASSWORD counts",
    "ca_file": "certificates that vouch for the servers, for rediss://",
    "certificate_file": "certificate of this side, if the servers ask for one",
    "key_file": "its key",
}


def store_options(command: _Command) -> _Command:
    """Give a command the options that a shared store takes."""
    for name, text in reversed(_FILES.items()):
        option = "--" + name.replace("_", "-")
        command = click.option(option, metavar="FILE", help=f"Of a shared store: {text}.")(command)
    return command


def is_url(place: str) -> bool:
    """Return whether a place is a shared store and no path."""
    return "://" in place


def refuse_store_options(command: str, **others: str | None) -> None:
    """Raise `ConfigError` if an option of a shared store is given for a path."""
    given = click.get_current_context().params
    for name, value in ({name: given.get(name) for name in _FILES} | others).items():
        if value is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for a shared store: leave it out, or pass its URL "
                f"to kvstow tier {command}"
            )


def show_blocks(output: Output, url: str, files: Mapping[str, Any]) -> int:
    """List how many blocks each fingerprint has."""
    found = _asked(lambda: count_blocks(url, **store_access(files)))

    def shown() -> Table:
        table = Table("fingerprint", "blocks", box=SIMPLE_HEAD, title=url, title_justify="left")
        table.columns[1].justify = "right"
        for fingerprint, num in sorted(found.items()):
            table.add_row(fingerprint, f"{num:,}")
        return table

    output.write({"url": url, "blocks": found}, shown)
    return 0


def drop_blocks(output: Output, url: str, fingerprint: str | None, files: Mapping[str, Any]) -> int:
    """Delete the blocks of one fingerprint."""
    if fingerprint is None:
        lister = (
            "each server logs them at its start"
            if is_mooncake(url)
            else f"kvstow tier info {url} lists them"
        )
        raise ConfigError(
            "--fingerprint is missing: pass the 32 digits of the model whose blocks are to be "
            f"deleted; {lister}"
        )
    namespace = namespace_of(fingerprint)
    num = _asked(lambda: delete_blocks(url, namespace, **store_access(files)))
    result = {"url": url, "fingerprint": fingerprint, "dropped_blocks": num}
    output.write(result, lambda: f"{counted(num, 'block')} dropped\n")
    return 0


def store_access(files: Mapping[str, Any]) -> dict[str, Any]:
    """Return how to log in and to prove both sides, from the values of `store_options`.

    Raises:
        ConfigError: a file cannot be read.
    """
    security = Security(files["ca_file"], files["certificate_file"], files["key_file"])
    return {"credentials": Credentials.find(files["password_file"]), "security": security}


_T = TypeVar("_T")


def _asked(call: Callable[[], _T]) -> _T:
    """Return what a store answers. A store that does not is an `OSError`, as for a file."""
    try:
        return call()
    except TransferError as error:
        raise OSError(errno.EIO, str(error)) from error
