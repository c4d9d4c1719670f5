"""Lets the processes of vLLM be forks, as they are by default on a GPU.

On a CPU vLLM starts each one anew, and each imports vLLM again, which takes a server twice as long.
`KVSTOW_VLLM=full` leaves that as it is.
"""

from __future__ import annotations

import multiprocessing
import os


def fork_processes() -> None:
    """Have vLLM fork all that this process and its children start from now on."""
    if os.environ.get("KVSTOW_VLLM") != "full":
        forking = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda _=None: forking  # type: ignore[assignment]
