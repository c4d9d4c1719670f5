"""A process that has imported vLLM's server, and of which each server of a test is a fork.

    python -m tests.vllm.template SOCKET

`Template` starts it. The calls through the socket are lines of JSON: to fork a process that runs a
module with the arguments, the environment and the log of the call, and to ask how one has ended.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from tests.vllm.forking import fork_processes, inspect_here
from tests.vllm.setting import SERVED

# `vllm serve` does the same, but only if the package has the name `vllm`.
SERVER = "vllm.entrypoints.openai.api_server"
# What the server imports when it runs. Not every version of vLLM has all of it.
LATER = ("vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.core")


class Forked:
    """A process that the template has forked, with the methods of `Popen` that tests call."""

    def __init__(self, template: Template, pid: int) -> None:
        self._template, self.pid = template, pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the status of a process that has ended."""
        if self._status is None:
            self._status = self._template.ask(ended=self.pid)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, and return its status."""
        end_s = float("inf") if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            time.sleep(0.02)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal to a process that has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Template:
    """The template process, as the tests see it. It ends with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.template", str(theirs.fileno())],
                env=os.environ | SERVED,
                pass_fds=[theirs.fileno()],
            )
        self._socket, self._calls = ours, ours.makefile("rw")
        atexit.register(self.close)

    def close(self) -> None:
        """Let the template end. What it has forked goes on."""
        self._calls.close()
        self._socket.close()
        self._process.wait()

    def ask(self, **call: Any) -> Any:
        """Make a call, and return the answer."""
        with self._lock:
            self._calls.write(f"{json.dumps(call)}\n")
            self._calls.flush()
            answer = self._calls.readline()
        assert answer, f"the template has ended with status {self._process.wait()}"
        return json.loads(answer)

    def fork(
        self, module: str, arguments: list[str], environment: dict[str, str], log: Path
    ) -> Forked:
        """Run a module in a process group of its own, with all its output in a log."""
        call = {"module": module, "arguments": arguments, "environment": environment}
        return Forked(self, self.ask(**call, log=str(log)))


@cache
def template() -> Template:
    """Return the template of this process."""
    return Template()


# -- in the template -------------------------------------------------------------------------------


def ended(pid: int) -> int | None:
    """Return the status of a child that has ended, as `Popen` does."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def fork() -> int:
    """Return 0 in a new session, and its id in the template."""
    pid = os.fork()
    if pid:
        while os.getsid(pid) != pid:  # else a signal to the group would miss it
            time.sleep(0.001)
    else:
        os.setsid()
    return pid


def become(module: str, arguments: list[str], environment: dict[str, str], log: str) -> None:
    """Do what `python -m module` would with this environment and this output."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [module, *arguments]
    runpy.run_module(module, run_name="__main__")


def load() -> None:
    """Import what a server imports."""
    importlib.import_module(SERVER)
    for name in LATER:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the process that has started it
    load()
    del sys.modules[SERVER]  # each fork executes it as its main module
    fork_processes()
    inspect_here()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=descriptor) as calls, calls.makefile("rw") as lines:
        for line in lines:
            call = json.loads(line)
            if "ended" in call:
                answer = ended(call["ended"])
            elif not (answer := fork()):
                break
            lines.write(f"{json.dumps(answer)}\n")
            lines.flush()
        else:
            return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    become(**call)


if __name__ == "__main__":
    main(int(sys.argv[1]))
