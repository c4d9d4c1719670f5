"""The counters of a replay."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Figures:
    """Counters of one replay.

    A hit or recomputed block is a block of the trace, however many groups hold it. Each group's
    block that is published, stored or loaded counts on its own.

    Attributes:
        device_hits: blocks found in the device pool at first admissions.
        host_hits: blocks loaded from the host tier at first admissions.
        disk_hits: of the host hits, those that the disk tier had brought to the host for them.
        resumed_hits: blocks found in either pool at admissions after a preemption.
        recomputed_blocks: prompt blocks not found at first admissions, partial last blocks
            included.
        published: blocks that lookup could find on the device.
        stored_blocks: blocks that landed in the host tier.
        loaded_blocks: blocks that landed on the device.
        bytes_stored: bytes of the stored blocks.
        bytes_loaded: bytes of the loaded blocks.
        finished_requests: finished requests.
        preemptions: preemptions of running requests because the device pool ran out.
        failed_stores: store jobs whose copy failed.
        failed_loads: load jobs whose copy failed or was late, so that their requests recompute.
        late_loads: failed loads that missed their deadline.
        steps: scheduler iterations that computed tokens.
        prefill_tokens: tokens computed in chunks, those of recomputed outputs included.
        decode_tokens: tokens computed one per request and step.
        sleeps: how often the engine slept.
        moved_blocks: blocks that woke under another id.
        seconds: wall time.
        virtual_seconds: virtual time from the first arrival to the last landing.
        accounting_us: wall time per step in calls of `kvstow.Engine`, copies excluded.
    """

    device_hits: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    resumed_hits: int = 0
    recomputed_blocks: int = 0
    published: int = 0
    stored_blocks: int = 0
    loaded_blocks: int = 0
    bytes_stored: int = 0
    bytes_loaded: int = 0
    finished_requests: int = 0
    preemptions: int = 0
    failed_stores: int = 0
    failed_loads: int = 0
    late_loads: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    sleeps: int = 0
    moved_blocks: int = 0
    seconds: float = 0.0
    virtual_seconds: float = 0.0
    accounting_us: list[float] = field(default_factory=list)
