"""Why a server did not do what it was asked, in words that name the fix. No secret is in them."""

from __future__ import annotations

import ssl
from typing import Final

from kvstow._core import ConfigError
from kvstow.texts import MOST_OF_AN_ERROR, on_one_line
from kvstow.tiers.resp.address import PASSWORD_VARIABLE, USERNAME_VARIABLE
from kvstow.tiers.resp.login import causes
from kvstow.tiers.resp.nodes import NoMaster

ACCESS: Final = (
    "the access list refused a command: allow the user +get +set +exists +del on the keys "
    "kvstow:*, also +select for a database other than 0, and +cluster|slots for a cluster"
)
OF_CLUSTER: Final = (
    "it belongs to a cluster, and has only a part of the keys: begin the URL with redis+cluster, "
    "or rediss+cluster for TLS"
)
_PROTECTED: Final = (
    "the server is in protected mode, and takes connections of its own machine alone: give its "
    "default user a password, or set protected-mode no in a private network"
)
_ENDED: Final = (
    "it ended the connection before the first command: see whether it wants TLS (rediss://) or a "
    "certificate of this side"
)
# What redis-py and OpenSSL say of it. `wire` has other words.
_ENDS: Final = ("Connection closed by server", "while reading from", "while writing to", "_ALERT_")
_LOGIN: Final = f"set {USERNAME_VARIABLE} and {PASSWORD_VARIABLE}, or name a password file"
_SENTINEL: Final = "name the hosts and ports of Sentinel in the URL, not those of the servers"
# What the servers say, in the order in which it is looked for.
_FIXES: Final = (
    ("HELLO must be called", f"the server asks for a password: {_LOGIN}"),
    ("Authentication required", f"the server asks for a password: {_LOGIN}"),
    # What a server says to a block, because it reads no long command before a login.
    ("unauthenticated bulk length", f"the server asks for a password: {_LOGIN}"),
    (
        "username-password",
        f"the server refused the login: check {USERNAME_VARIABLE}, and {PASSWORD_VARIABLE} or the "
        "password file",
    ),
    ("DENIED", _PROTECTED),
    ("NOPERM", ACCESS),
    ("permissions to", ACCESS),  # redis-py removes the code
    ("SENTINEL", f"it is no Sentinel: {_SENTINEL}"),
    ("cluster support disabled", "it belongs to no cluster: take +cluster out of the URL"),
)


def reason(error: BaseException) -> str:
    """Return what is wrong, and what to do about it where that is known."""
    if isinstance(error, NoMaster):
        return _why_no_master(error)
    return _known(error) or on_one_line(str(error), MOST_OF_AN_ERROR)


def _known(error: BaseException) -> str | None:
    """Return what is wrong and what to do about it, or None if that is not known."""
    for cause in causes(error):
        if isinstance(cause, ConfigError):  # files for TLS that were replaced
            return str(cause)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"its certificate does not verify ({cause.verify_message}): name the file of the "
                "authority that signed it, and take the host's name from the certificate"
            )
        if "handshake operation timed out" in str(cause):
            return "it does not answer the TLS handshake: for a server without TLS, use redis://"
    text = str(error)
    if any(sign in text for sign in _ENDS):
        return f"{_ENDED} ({on_one_line(text, MOST_OF_AN_ERROR)})"
    return next((fix for sign, fix in _FIXES if sign in text), None)


def _why_no_master(error: NoMaster) -> str:
    names = {type(one).__name__ for one in error.errors}
    if not names:
        return (
            f"Sentinel knows no master {error.service!r} that is up: take the name from its line "
            "`sentinel monitor NAME`, and see that the master runs"
        )
    if "AuthenticationError" in names:
        return (
            f"Sentinel refused the login: set {PASSWORD_VARIABLE}, or name a password file, with a "
            "password that Sentinel and the servers have in common (`requirepass`)"
        )
    known = next(filter(None, map(_known, error.errors)), None)
    return known or f"{error} ({', '.join(sorted(names))}): {_SENTINEL}"
