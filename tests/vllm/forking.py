"""Saves imports of vLLM in a process that runs it, each of which takes a core over ten seconds.

`KVSTOW_VLLM=full` leaves all processes to vLLM.
"""

from __future__ import annotations

import multiprocessing
import os

IS_FULL = os.environ.get("KVSTOW_VLLM") == "full"


def fork_processes() -> None:
    """Have vLLM fork all that this process and its children start from now on.

    On a GPU vLLM forks by default. On a CPU it starts each process anew.
    """
    if not IS_FULL:
        forking = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda _=None: forking  # type: ignore[assignment]


def inspect_here() -> None:
    """Have vLLM look at the class of a model in this process, which loads it anyway.

    vLLM does so in a process of its own, because a GPU must not be touched before a fork.
    """
    if not IS_FULL:
        from vllm.model_executor.models import registry  # noqa: PLC0415 - after its environment

        registry._run_in_subprocess = lambda inspect: inspect()
