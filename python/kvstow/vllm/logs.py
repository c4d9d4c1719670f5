"""How kvstow's own lines look in vLLM's log."""

from __future__ import annotations

import logging


def log_as_vllm() -> None:
    """Give the lines of the tiers level, time and process, as vLLM's own have them.

    A program that has set up logging for them, or for all, keeps what it has.
    """
    own, of_vllm = logging.getLogger("kvstow"), logging.getLogger("vllm")
    if not own.hasHandlers():
        own.setLevel(of_vllm.level)
        for handler in of_vllm.handlers:
            own.addHandler(handler)
