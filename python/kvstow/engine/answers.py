"""What the methods of `Engine` return."""

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstow.engine.transfer import Transfer

Ids: TypeAlias = npt.NDArray[np.int32]


class AdmissionState(Enum):
    """What `Engine.admit` did with a request.

    Attributes:
        RUNS: it has slots for `num_new_tokens`. Compute them in this step.
        LOADS: the host has some of its blocks and they are being loaded. `poll` reports when it
            runs.
        PENDING: a load for another request, or for this one before a preemption, brings blocks that
            it needs, or a tier below has some of them. Ask again after the next `poll`.
        NO_ROOM: the device pool cannot give the blocks now. Nothing has changed, except that the
            host keeps what the request found there until another request is refused.
    """

    RUNS = "runs"
    LOADS = "loads"
    PENDING = "pending"
    NO_ROOM = "no room"


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to `Engine.admit`.

    Attributes:
        state: what the engine did with the request.
        num_hit_tokens: tokens found on the device.
        num_external_tokens: tokens found on the host, right after those.
        num_new_tokens: tokens to compute in this step, right after the hit. 0 unless the request
            runs.
        block_tables: block ids per group. Empty unless the request was admitted.
        transfer: the load that the request waits for, if any.
    """

    state: AdmissionState
    num_hit_tokens: int = 0
    num_external_tokens: int = 0
    num_new_tokens: int = 0
    block_tables: tuple[Ids, ...] = ()
    transfer: Transfer | None = None


@dataclass(frozen=True, slots=True)
class Landed:
    """What `Engine.poll` found.

    Attributes:
        loaded: requests whose load has landed. They run: put them into the next `step`.
        failed: requests whose load failed or is late. Each is reported once and holds no blocks.
            Admit it again, and it recomputes. The tickets of its `Admission.transfer` say why, once
            the load has ended.
        num_stored_blocks: blocks that stores have brought to the host.
        num_failed_stores: stores that failed or are late, each reported once.
    """

    loaded: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    num_stored_blocks: int = 0
    num_failed_stores: int = 0


@dataclass(frozen=True, slots=True)
class Awake:
    """Where the blocks of an engine are after it woke.

    Attributes:
        old_ids: ids of the blocks in tables when the engine fell asleep, ascending.
        new_ids: their ids now, in the same order.
    """

    old_ids: Ids
    new_ids: Ids
