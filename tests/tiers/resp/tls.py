"""A server behind TLS, which the wheel's own server does not speak, and a CA for tests."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
import threading
from pathlib import Path
from typing import Any, Self

import pytest


class Authority:
    """A CA with files for both sides.

    Attributes:
        ca_file: its own certificate.
    """

    def __init__(self, folder: Path) -> None:
        """Make a key and a certificate that signs others."""
        x509 = pytest.importorskip("cryptography.x509")
        self._x509, self._folder = x509, folder
        self._key = self._new_key()
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a CA for tests")])
        own = self._sign(self._name, self._key, x509.BasicConstraints(ca=True, path_length=0), None)
        self.ca_file = str(folder / "ca.pem")
        Path(self.ca_file).write_bytes(own)

    def issue(self, host: str) -> tuple[str, str]:
        """Return the files of a certificate for an address or a name, and of its key."""
        x509 = self._x509
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

        try:
            known = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            known = x509.DNSName(host)
        key = self._new_key()
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
        basic = x509.BasicConstraints(ca=False, path_length=None)
        certificate = self._sign(name, key, basic, x509.SubjectAlternativeName([known]))
        files = self._folder / f"{host}.pem", self._folder / f"{host}.key"
        files[0].write_bytes(certificate)
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        files[1].write_bytes(private)
        return str(files[0]), str(files[1])

    def _new_key(self) -> Any:
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

        return ec.generate_private_key(ec.SECP256R1())

    def _sign(self, name: Any, key: Any, basic: Any, known: Any) -> bytes:
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415

        x509, now = self._x509, datetime.datetime.now(datetime.UTC)
        identifier = x509.SubjectKeyIdentifier.from_public_key
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(basic, critical=True)
            .add_extension(identifier(key.public_key()), critical=False)
        )
        if known is not None:
            made = made.add_extension(known, critical=False)
        signed = made.sign(self._key, hashes.SHA256())
        encoded: bytes = signed.public_bytes(serialization.Encoding.PEM)
        return encoded


def encrypt(file: str) -> None:
    """Give the key in a file a password."""
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

    key = serialization.load_pem_private_key(Path(file).read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"open-sesame"),
    )
    Path(file).write_bytes(locked)


class TlsServer:
    """Speaks TLS on a port of its own, and passes the bytes on to a plain server.

    Attributes:
        port: where it listens.
    """

    def __init__(
        self, target_port: int, files: tuple[str, str], client_ca_file: str | None = None
    ) -> None:
        """Begin to listen, with a certificate and its key. With a CA, clients need one, too."""
        self._target_port = target_port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*files)
        if client_ca_file is not None:
            self._context.load_verify_locations(client_ca_file)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        )
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        target = await asyncio.open_connection("127.0.0.1", self._target_port)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(_pass_on(reader, target[1]), _pass_on(target[0], writer))
        for one in (writer, target[1]):
            one.close()

    def close(self) -> None:
        """Stop, and end all connections."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __enter__(self) -> Self:
        """Return the server."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()
