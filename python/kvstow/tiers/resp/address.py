"""Which servers a URL names, and how to log in to them."""

from __future__ import annotations

import os
import ssl
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias
from urllib.parse import SplitResult, urlsplit

from kvstow._core import ConfigError
from kvstow.arguments import is_path

Kind: TypeAlias = Literal["servers", "cluster", "sentinel"]

FORMS: Final = (
    "redis://HOST:PORT/DB (rediss:// for TLS), several of them separated by commas, "
    "redis+cluster://HOST:PORT, redis+sentinel://HOST:PORT/SERVICE, or unix:///PATH"
)
PASSWORD_VARIABLE: Final = "KVSTOW_SHARED_PASSWORD"
USERNAME_VARIABLE: Final = "KVSTOW_SHARED_USERNAME"
_PORTS: Final = {"servers": 6379, "cluster": 6379, "sentinel": 26379}
MAX_PORT: Final = 65535
_MAX_DATABASE_DIGITS: Final = 9


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """One server: a host and port, or the path of a socket."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        """Return what messages say."""
        return self.path or f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Address:
    """What a URL names.

    Attributes:
        kind: "servers" are independent, and each has a part of the keys.
        nodes: the servers; of a cluster or of Sentinel, those to ask first.
        database: the number of the database.
        is_encrypted: whether connections use TLS.
        service: the name that Sentinel knows the servers by.
    """

    kind: Kind
    nodes: tuple[Node, ...]
    database: int = 0
    is_encrypted: bool = False
    service: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Return what `url` names.

        Raises:
            ConfigError: it names no server, or contains a password. The message has no password.
        """
        parsed = [_parse_one(part) for part in _parts(url)]
        first = parsed[0]
        if len(parsed) == 1:
            return first
        if any(_shared(one) != _shared(first) for one in parsed):
            raise ConfigError(
                f"the URLs of {', '.join(str(one.nodes[0]) for one in parsed)} differ in more than "
                "host and port: name servers of one kind, with one database"
            )
        nodes = tuple(node for one in parsed for node in one.nodes)
        if len(set(nodes)) < len(nodes):
            raise ConfigError(f"{', '.join(map(str, nodes))} name a server twice: name each once")
        return cls(first.kind, nodes, first.database, first.is_encrypted, first.service)

    def __str__(self) -> str:
        """Return what messages say of all servers."""
        return ", ".join(map(str, self.nodes))


@dataclass(frozen=True, slots=True)
class Credentials:
    """How to log in. Messages never contain them.

    Attributes:
        username: of an access list; None for the default user.
        password: None for none.
        password_file: the file that it was read from, which each new connection reads again.
    """

    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    password_file: str | None = None

    def __post_init__(self) -> None:
        """Refuse what redis-py cannot send. Its error would contain the password."""
        for name, value in (
            (f"the user ({USERNAME_VARIABLE})", self.username),
            (f"the password ({PASSWORD_VARIABLE})", self.password),
        ):
            if value is not None and not _is_utf_8(value):
                raise ConfigError(
                    f"{name} is not text in UTF-8: encode it so, or choose another one"
                )

    @classmethod
    def find(cls, password_file: str | os.PathLike[str] | None = None) -> Credentials:
        """Return what the environment holds, with the password of a file if one is named.

        Raises:
            ConfigError: the file cannot be read, or the user or the password is not UTF-8.
        """
        username = os.environ.get(USERNAME_VARIABLE)
        if password_file is None:
            return cls(username, os.environ.get(PASSWORD_VARIABLE) or None)
        if not is_path(password_file):
            raise ConfigError(f"password_file is {password_file!r}; pass the name of a file")
        try:
            password = _read_password(password_file)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the password file {os.fspath(password_file)} cannot be read ({error}): name "
                f"a file with only the password, or set {PASSWORD_VARIABLE}"
            ) from error
        return cls(username, password, os.fspath(password_file))

    def get_credentials(self) -> tuple[str, ...]:
        """Return user and password as redis-py sends them, with what the file holds now.

        A file that cannot be read or is empty, for example while it is replaced, leaves the first
        password.
        """
        password = self.password or ""
        if self.password_file is not None:
            with suppress(OSError, UnicodeDecodeError):
                password = _read_password(self.password_file) or password
        if self.username:
            return self.username, password
        return (password,) if password else ()


def _is_utf_8(given: object) -> bool:
    """Return whether `given` is a str without bytes of another encoding.

    `os.environ` shows such bytes as surrogates, which UTF-8 does not encode.
    """
    return isinstance(given, str) and not any("\ud800" <= letter <= "\udfff" for letter in given)


def _read_password(path: str | os.PathLike[str]) -> str | None:
    return Path(path).read_text("utf-8").rstrip("\r\n") or None


@dataclass(frozen=True, slots=True)
class Security:
    """How TLS proves both sides. It always checks the server's certificate and name.

    Attributes:
        ca_file: the only certificates that vouch for the server; None for those of the system.
        certificate_file: this side's certificate, if the server asks for one.
        key_file: its key.
    """

    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None

    def check(self, address: Address) -> None:
        """Raise `ConfigError` unless connections to `address` can use the files."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        for name, path in given.items():
            if not is_path(path):
                raise ConfigError(f"{name} is {path!r}; pass the name of a file")
            if not address.is_encrypted:
                raise ConfigError(
                    f"{name} is {os.fspath(path)!r}, and connections to {address} have no TLS: "
                    f"begin the URL with rediss, or leave {name} out"
                )
            try:
                Path(path).open("rb").close()
            except OSError as error:
                raise ConfigError(
                    f"{name} is {os.fspath(path)!r}, which cannot be read ({error.strerror}): name "
                    "a PEM file"
                ) from error
        if self.key_file is not None and self.certificate_file is None:
            raise ConfigError(
                f"key_file is {os.fspath(self.key_file)!r}, and certificate_file is missing: name "
                "the certificate of this key"
            )
        if given:
            self.context()

    def context(self) -> ssl.SSLContext:
        """Return what connects by TLS, with what the files hold now.

        Raises:
            ConfigError: TLS cannot use the files.
        """
        used = {"ca_file": self.ca_file}
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.certificate_file is not None:
                used = {"certificate_file": self.certificate_file, "key_file": self.key_file}
                # For the password of a key, OpenSSL would ask the terminal.
                context.load_cert_chain(self.certificate_file, self.key_file, password="")
        except OSError as error:
            named = ((name, path) for name, path in used.items() if path is not None)
            names = ", ".join(f"{name} {os.fspath(path)!r}" for name, path in named)
            raise ConfigError(
                f"TLS cannot use {names} ({error.strerror}): name PEM files, with this side's "
                "certificate and its own key without a password"
            ) from error
        return context


def _parts(url: str) -> list[str]:
    """Split a list of URLs. A part without a scheme takes that of the first."""
    given: object = url
    if not isinstance(given, str) or "://" not in given or "\0" in given:
        raise ConfigError(
            f"the URL of a shared tier has no scheme, or a null character: it must be {FORMS}"
        )
    parts = [part.strip() for part in url.split(",")]
    scheme = parts[0].split("://", 1)[0]
    parts = [part if "://" in part else f"{scheme}://{part}" for part in parts]
    # Of a password with a slash or a comma, a part would pass for a database or for a server.
    if "@" in url and not all(part.startswith("unix:") for part in parts):
        raise ConfigError(
            "the URL of the shared tier contains credentials before an @, which logs and process "
            f"lists would show: set {USERNAME_VARIABLE} and {PASSWORD_VARIABLE}, or name a "
            "password file"
        )
    return parts


def _parse_one(url: str) -> Address:
    try:
        found = urlsplit(url)
        port = found.port
    except ValueError:  # whose message may show a part of a password
        raise ConfigError(f"a URL of the shared tier has no valid port: use {FORMS}") from None
    scheme, _, kind = found.scheme.partition("+")
    kinds: dict[str, Kind] = {"": "servers", "cluster": "cluster", "sentinel": "sentinel"}
    is_socket = found.scheme == "unix" and bool(found.path) and not found.netloc
    is_host = scheme in ("redis", "rediss") and kind in kinds and bool(found.hostname)
    if not (is_socket or is_host):
        raise ConfigError(
            f"{found.scheme}://{found.hostname or ''} names no RESP servers: use {FORMS}"
        )
    if found.query or found.fragment:
        raise ConfigError(
            f"the URL of {found.hostname or found.path} has options after the path: leave them "
            f"out, and use {FORMS}"
        )
    if is_socket:
        return Address("servers", (Node("", 0, found.path),))
    node = Node(_host(found), _PORTS[kinds[kind]] if port is None else port)
    if not 1 <= node.port <= MAX_PORT:
        raise ConfigError(f"the port of {node} must be 1 to {MAX_PORT}: name the server's port")
    service, database = _path(found, kinds[kind])
    return Address(kinds[kind], (node,), database, scheme == "rediss", service)


def _host(url: SplitResult) -> str:
    """Return the host of a URL that has one."""
    host = url.hostname or ""
    try:
        host.encode("idna")  # as the system's resolver does
    except UnicodeError:
        raise ConfigError(
            f"the URL names the host {host!r}, and each part between its dots must have 1 to 63 "
            "characters: name the server's host"
        ) from None
    return host


def _path(url: SplitResult, kind: Kind) -> tuple[str, int]:
    """Return the service and the database that a URL's path names."""
    path = url.path.strip("/")
    if kind == "sentinel":
        if not path:
            raise ConfigError(
                f"the URL of {url.hostname} names no service of Sentinel: use {FORMS}"
            )
        return path, 0
    if not path:
        return "", 0
    if kind == "cluster" or not path.isdecimal():
        fix = "leave it out" if kind == "cluster" else "it must be a number"
        raise ConfigError(f"the URL of {url.hostname} names database {path!r}: {fix}")
    if len(path) > _MAX_DATABASE_DIGITS:
        raise ConfigError(
            f"the URL of {url.hostname} names a database of {len(path)} digits: it must be at "
            f"most {_MAX_DATABASE_DIGITS} digits long"
        )
    return "", int(path)


def _shared(address: Address) -> tuple[object, ...]:
    return address.kind, address.database, address.is_encrypted, address.service
