"""vLLM's server in a process of its own, with a pool so small that it evicts blocks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.vllm.forking import IS_FULL
from tests.vllm.setting import CONNECTOR, SERVED
from tests.vllm.template import SERVER, Forked, template

Process = subprocess.Popen[bytes] | Forked
MAX_NUM_BATCHED_TOKENS = 128
SETTINGS = {
    "--host": "127.0.0.1",
    "--dtype": "float32",
    "--block-size": "32",
    # Six prompts of 300 tokens fit, but not with their answers, so vLLM preempts some.
    "--num-gpu-blocks-override": "64",
    "--max-model-len": "512",
    "--max-num-seqs": "16",
    "--max-num-batched-tokens": str(MAX_NUM_BATCHED_TOKENS),
    "--middleware": "kvstow.vllm.hints.RefuseWrongHints",
    # Without it vLLM kills its engine at once, and the engine closes nothing.
    "--shutdown-timeout": "180",
}
START_S, END_S = 240, 90


def words_of(flags: dict[str, str]) -> list[str]:
    """Return the words of a command line for these flags and their values."""
    return [word for flag in flags.items() for word in flag]


def start(module: str, arguments: list[str], environment: dict[str, str], log: Path) -> Process:
    """Run a module in a process group of its own, with all its output in a log."""
    if not IS_FULL:
        return template().fork(module, arguments, environment, log)
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def launch(
    model: Path, log: Path, connector: dict[str, Any] | None, flags: Iterable[str] = ()
) -> tuple[Process, str]:
    """Start a server in a process group of its own; return the process and the server's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = SETTINGS | {"--port": str(port), "--model": str(model)}
    if connector is not None:
        given["--kv-transfer-config"] = json.dumps(CONNECTOR | connector)
    arguments = ["--enforce-eager", "--disable-uvicorn-access-log"]
    arguments += ["--enable-prompt-tokens-details", *words_of(given), *flags]
    # Beside the model. Servers of one model remember its architecture, which takes an import.
    environment = os.environ | SERVED | {"XDG_CACHE_HOME": str(model.parent / "cache")}
    process = start(SERVER, arguments, environment, log)
    return process, f"http://127.0.0.1:{port}"


@contextmanager
def served(
    model: Path, log: Path, more_flags: Iterable[str] = (), **connector: Any
) -> Iterator[str]:
    """Run a server and yield its address. At the end the server must stop on SIGTERM."""
    process, address = launch(model, log, connector, more_flags)
    try:
        _wait_until_healthy(address, process, log)
        yield address
        assert process.poll() is None, f"the server has ended by itself:\n{_tail(log)}"
        # Checked before the end, because vLLM's front end logs the end of its engine as an error.
        assert "Traceback" not in log.read_text(), _tail(log)
        assert end(process, log) == 0, _tail(log)
        assert "all workers exited gracefully" in log.read_text(), _tail(log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end(process: Process, log: Path) -> int:
    """End a server by SIGTERM, and return its status."""
    process.send_signal(signal.SIGTERM)
    return wait_for_end(process, log, END_S)


def wait_for_end(process: Process, log: Path, limit_s: float) -> int:
    """Return the status with which a process ends. If it hangs, its processes say where."""
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # upon which faulthandler writes all stacks
        process.wait()
        _wait_until_gone(process.pid, log)
        raise AssertionError(f"it does not end:\n{_tail(log, 30_000)}") from None
    _wait_until_gone(process.pid, log)
    return status


def _wait_until_healthy(address: str, process: Process, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
            return
        time.sleep(0.25)
    raise AssertionError(f"the server does not start:\n{_tail(log)}")


def _wait_until_gone(group: int, log: Path) -> None:
    """Wait until the engine and the workers have ended, too."""
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError(f"processes of the server are left:\n{_tail(log)}")


def _tail(log: Path, num_characters: int = 4000) -> str:
    return log.read_text(errors="replace")[-num_characters:]
