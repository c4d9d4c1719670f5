"""A real Mooncake master for tests: that of the installed wheel."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.stopped import stop
from tests.tiers.resp.server import free_port
from tests.tiers.setup import LONG_S

from kvstow.tiers.mooncake import MooncakeTier
from kvstow.transfer import HostArena


def missing() -> str:
    """Return why Mooncake does not run here; empty if it does."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake is not installed"
    try:
        import mooncake.store  # noqa: F401, PLC0415 - needs libraries of the system
    except ImportError as error:
        return f"mooncake cannot be loaded: {error}"
    return ""


def owning(arena: HostArena, url: str, namespace: bytes) -> MooncakeTier:
    """Return a tier with memory for blocks, whose jobs outlast a machine that stands still."""
    return MooncakeTier(arena, url, namespace, segment_bytes=64 << 20, timeout_s=LONG_S)


class Master:
    """A master process, which knows where blocks are."""

    def __init__(self, folder: Path, lease_ms: int = 30_000, client_ttl_s: int = 30) -> None:
        """Start it, by default for a machine that stands still for seconds.

        Args:
            folder: where its log goes.
            lease_ms: for how long a block that was read stays. A get that takes longer fails.
            client_ttl_s: after how long without a word a client has ended, and its memory with it.
        """
        self._lease_ms, self._client_ttl_s = lease_ms, client_ttl_s
        self.port, self._metrics_port = free_port(), free_port()
        self._log = folder / "master.log"
        self.start()

    @property
    def url(self) -> str:
        """The URL of a tier."""
        return f"mooncake://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the process, and wait until it answers."""
        beside = Path(sys.executable).parent / "mooncake_master"
        binary = str(beside) if beside.exists() else shutil.which("mooncake_master")
        assert binary is not None
        options = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.port,
            "metrics_port": self._metrics_port,
            "client_ttl": self._client_ttl_s,
            "default_kv_lease_ttl": self._lease_ms,
        }
        args = [f"--{name}={value}" for name, value in options.items()]
        with self._log.open("a") as log:
            self._process = subprocess.Popen([binary, *args], stdout=log, stderr=log)
        until_s = time.monotonic() + 20
        while time.monotonic() < until_s:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
            except OSError:
                time.sleep(0.02)
            else:
                return
        raise RuntimeError(self._log.read_text())

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Let the process stand still."""
        stop(self._process)

    def resume(self) -> None:
        """Let the process go on."""
        self._process.send_signal(signal.SIGCONT)
