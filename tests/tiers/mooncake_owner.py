"""A process that gives memory to a Mooncake store, so that a test can end it apart from others."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.stopped import stop
from tests.tiers.mooncake_master import Master

ROOT = Path(__file__).parents[2]
_BUFFER_BYTES = 16 << 20


class Owner:
    """A process in whose memory the blocks of a store are."""

    def __init__(self, master: Master, num_bytes: int) -> None:
        """Start it."""
        address = f"127.0.0.1:{master.port}"
        self._command = [sys.executable, "-m", __name__, address, str(num_bytes)]
        self.start()

    def start(self) -> None:
        """Start the process, and wait until the store has its memory."""
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", "it gives no memory to the store"

    def kill(self) -> None:
        """End the process at once. Its blocks go with it."""
        self._process.kill()
        self._process.communicate()

    def pause(self) -> None:
        """Let the process stand still."""
        stop(self._process)

    def resume(self) -> None:
        """Let the process go on."""
        self._process.send_signal(signal.SIGCONT)


def own(master: str, num_bytes: int) -> None:
    """Give memory to a store until the test ends, and the standard input with it."""
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - needs system libraries

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", num_bytes, _BUFFER_BYTES, "tcp", "", master)
    assert code == 0, code
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    own(sys.argv[1], int(sys.argv[2]))
