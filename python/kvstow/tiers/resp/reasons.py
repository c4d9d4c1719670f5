"""Why a server did not do what it was asked, in words that name the fix. No secret is in them."""

from __future__ import annotations

import ssl
from typing import Final

from kvstow.tiers.resp.address import PASSWORD_VARIABLE, USERNAME_VARIABLE

_LOGIN: Final = f"set {USERNAME_VARIABLE} and {PASSWORD_VARIABLE}, or name a password file"
_ACCESS: Final = "allow the user +get +set +exists +del on the keys kvstow:*"
# What the servers say, in the order in which it is looked for.
_FIXES: Final = (
    ("HELLO must be called", f"the server asks for a password: {_LOGIN}"),
    ("Authentication required", f"the server asks for a password: {_LOGIN}"),
    ("username-password", f"the server refused the login: {_LOGIN}"),
    ("NOPERM", f"the access list refused a command: {_ACCESS}"),
)


def reason(error: BaseException) -> str:
    """Return what is wrong, and what to do about it where that is known."""
    for cause in _chain(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"its certificate does not verify ({cause.verify_message}): name the file of the "
                "authority that signed it, and take the host's name from the certificate"
            )
        if "handshake operation timed out" in str(cause):
            return "it does not answer the TLS handshake: for a server without TLS, use redis://"
    text = str(error)
    return next((fix for sign, fix in _FIXES if sign in text), text)


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and what led to it."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__ or cause.__context__
    return found
