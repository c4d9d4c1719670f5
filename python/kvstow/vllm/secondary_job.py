"""A store or a load of `KVStowDisk`, from vLLM's order to vLLM's next question."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from kvstow.tiers import TierTicket
from kvstow.vllm.secondary_order import Key

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.base import TransferJob


@dataclasses.dataclass(slots=True)
class Job:
    """A store or a load whose end vLLM does not know yet.

    Attributes:
        order: what vLLM has asked for.
        keys: its keys, in the order of the blocks of the ticket.
        slots: their slots.
        ticket: None if the tier had nothing to do.
        is_load: whether it fills chunks.
        is_whole: whether each key of vLLM's job is among `keys`, or is on the disk or on its way.
        since_s: when it began.
    """

    order: TransferJob
    keys: list[Key]
    slots: list[int]
    ticket: TierTicket | None
    is_load: bool
    is_whole: bool = False
    since_s: float = dataclasses.field(default_factory=time.monotonic)
