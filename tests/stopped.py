"""Stops a child process."""

from __future__ import annotations

import os
import signal
import subprocess


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process, and return once it stands still.

    On a busy machine the signal comes late, and until then the process answers.
    """
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
