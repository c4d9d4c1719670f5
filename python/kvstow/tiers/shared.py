"""`SharedStore`: the shared tier that a URL names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, TypeVar

from kvstow._core import ConfigError
from kvstow.tiers.frame import Fingerprint
from kvstow.tiers.mooncake import MooncakeTier
from kvstow.tiers.mooncake_link import parse as parse_mooncake
from kvstow.tiers.queued import DEFAULT_QUEUED_BYTES, DEFAULT_TIMEOUT_S, checked_job_timeout_s
from kvstow.tiers.resp import Address, Credentials, RespTier, Security, checked_expiry
from kvstow.tiers.tier import SharedTier
from kvstow.transfer import HostArena

SCHEMES: Final = (
    "redis", "rediss", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel",
    "unix", "mooncake",
)  # fmt: skip

_RESP_OPTIONS: Final = ("password_file", "ca_file", "certificate_file", "key_file", "ttl_s")
_MOONCAKE_OPTIONS: Final = ("host", "segment_bytes", "protocol", "devices")

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class SharedStore:
    """Where a shared tier lies, and how to reach it.

    Attributes:
        url: RESP servers (`redis://HOST:PORT`, `rediss://` for TLS, `redis+cluster://`,
            `redis+sentinel://HOST:PORT/SERVICE`, several separated by commas), or `mooncake://HOST`.
        password_file: file with the password, which each new connection reads again. Without it,
            the environment variable KVSTOW_SHARED_PASSWORD counts. The user is
            KVSTOW_SHARED_USERNAME in both cases.
        ca_file: the only certificates that vouch for the servers; None for those of the system.
        certificate_file: this side's certificate, if the servers ask for one.
        key_file: its key.
        ttl_s: seconds after which a RESP server drops a block; None to keep it.
        timeout_s: the most seconds for a call, up to 86,400.
        num_threads: threads for puts, and as many for all other calls.
        max_queued_bytes: bytes of puts that may wait. More puts fail at once, so an `Engine` moves
            no more at a time.
        host: Mooncake only: the name by which other machines reach this one.
        segment_bytes: Mooncake only: memory of this process that the store may fill.
        protocol: Mooncake only: "tcp" or "rdma".
        devices: Mooncake only: the RDMA devices, separated by commas.
    """

    url: str
    password_file: str | os.PathLike[str] | None = None
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    ttl_s: int | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    num_threads: int = 2
    max_queued_bytes: int = DEFAULT_QUEUED_BYTES
    host: str = "127.0.0.1"
    segment_bytes: int = 0
    protocol: str = "tcp"
    devices: str = ""

    def check(self) -> None:
        """Check the URL and the credentials, without a connection.

        Raises:
            ConfigError: the URL names no store, an option has no effect on it or is out of bounds,
                or a file cannot be read.
        """
        is_mooncake = self._scheme() == "mooncake"
        self._check_options(is_mooncake)
        checked_job_timeout_s(self.timeout_s)
        if is_mooncake:
            parse_mooncake(self.url)
            return
        security = Security(self.ca_file, self.certificate_file, self.key_file)
        security.check(Address.parse(self.url))
        Credentials.find(self.password_file)
        checked_expiry(self.ttl_s)

    def _check_options(self, is_mooncake: bool) -> None:
        """Raise `ConfigError` if an option is given that has no effect on this kind of store."""
        others, kind = (
            (_RESP_OPTIONS, "a RESP server") if is_mooncake else (_MOONCAKE_OPTIONS, "Mooncake")
        )
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in others and value != option.default:
                raise ConfigError(
                    f"{option.name} is {value!r}, and it has an effect only with the URL of "
                    f"{kind}: leave it out"
                )

    def _scheme(self) -> str:
        """Return the scheme of the URL.

        Raises:
            ConfigError: it is not one of `SCHEMES`.
        """
        given: object = self.url
        scheme = given.split("://", 1)[0] if isinstance(given, str) and "://" in given else ""
        if scheme not in SCHEMES:
            raise ConfigError(
                f"shared names {scheme or 'no scheme'}, expected a URL that begins with "
                f"{', '.join(SCHEMES)}: pass redis://HOST:PORT or mooncake://HOST:PORT"
            )
        return scheme

    def open(self, arena: HostArena, fingerprint: Fingerprint) -> SharedTier:
        """Return a tier between an arena and the store. It connects when the first job comes.

        Args:
            arena: the host side.
            fingerprint: whose KV it is. Blocks of another fingerprint are never found.

        Raises:
            ConfigError: the URL names no store, an option is wrong, or a library is missing.
            StateError: the arena is closed, or the system starts no more threads.
        """
        is_mooncake = self._scheme() == "mooncake"
        self._check_options(is_mooncake)
        if is_mooncake:
            return MooncakeTier(
                arena,
                self.url,
                fingerprint.digest,
                host=self.host,
                segment_bytes=self.segment_bytes,
                protocol=self.protocol,
                devices=self.devices,
                timeout_s=self.timeout_s,
                num_threads=self.num_threads,
                max_queued_bytes=self.max_queued_bytes,
            )
        return RespTier(
            arena,
            self.url,
            fingerprint.digest,
            credentials=Credentials.find(self.password_file),
            security=Security(self.ca_file, self.certificate_file, self.key_file),
            timeout_s=self.timeout_s,
            ttl_s=self.ttl_s,
            num_threads=self.num_threads,
            max_queued_bytes=self.max_queued_bytes,
        )


def of_shared(stats: Mapping[str, _Number]) -> dict[str, _Number]:
    """Return statistics of a tier below the host under the keys of a shared tier."""
    return {f"shared_{key.removeprefix('disk_')}": value for key, value in stats.items()}
