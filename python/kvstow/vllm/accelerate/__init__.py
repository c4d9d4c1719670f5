"""`"accelerate": true`: faster versions of three functions of vLLM, with the same results.

`hashing` hashes prompts in Rust. `allocation` returns early from allocations that change nothing.
`lookup` finds prefix hits with fewer calls. `patch` replaces vLLM's functions, and only those whose
source it knows. The connector imports this folder only if the option is on.

A patch holds for the process: with several engines in it, all are faster, and no result changes.

May import: kvstow.
"""

from __future__ import annotations

import logging
import threading

__all__ = ["disable", "enable"]

logger = logging.getLogger("vllm." + __name__)
_lock = threading.Lock()


def enable() -> list[str]:
    """Replace vLLM's functions where their source is known, and return what is faster now.

    A second call changes nothing. An unknown version of vLLM stays as it is.
    """
    try:
        from kvstow.vllm.accelerate import allocation, hashing, lookup  # noqa: PLC0415
    except ImportError as error:
        logger.warning("kvstow: accelerate changes nothing, because this vLLM differs: %s", error)
        return []
    patches = (hashing.PATCH, allocation.PATCH, lookup.PATCH)
    with _lock:
        if all(patch.is_on for patch in patches):
            return [patch.what for patch in patches]
        for patch in patches:
            refusal = patch.apply()
            if refusal is not None:
                logger.warning("kvstow: accelerate leaves %s to vLLM: %s", patch.what, refusal)
        faster = [patch.what for patch in patches if patch.is_on]
    logger.info("kvstow: accelerate is on for: %s", ", ".join(faster) or "nothing")
    return faster


def disable() -> None:
    """Put vLLM's own functions back."""
    from kvstow.vllm.accelerate import allocation, hashing, lookup  # noqa: PLC0415

    with _lock:
        for patch in (hashing.PATCH, allocation.PATCH, lookup.PATCH):
            patch.undo()
