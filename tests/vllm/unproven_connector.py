"""The connector in worker processes that do not prove what they read from a store or a disk.

A test names this module in place of `kvstow.vllm`. vLLM starts its workers with an interpreter of
their own, which a patch in the test's process does not reach.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from tests.tiers.damage import all_proven
from tests.vllm.sharing import AnySum

from kvstow.tiers.namespace import Namespace
from kvstow.tiers.slot_store import SlotStore
from kvstow.vllm import KVStowConnector

__all__ = ["KVStowConnector"]

if multiprocessing.parent_process() is not None:
    unproven: Any = lambda *_: AnySum()  # noqa: E731 - a method of another class
    Namespace.checksum = unproven  # type: ignore[method-assign]
    trusting: Any = all_proven
    SlotStore._are_proven = trusting  # type: ignore[method-assign]
