"""What a replay counts."""

from dataclasses import dataclass, field

__all__ = ["Figures"]


@dataclass(slots=True)
class Figures:
    """Counters of one replay; blocks unless the name says otherwise.

    What is hit or recomputed is counted in blocks of the trace, however many groups hold such a
    block or need none of it; what is published, stored or loaded, in blocks of all groups.

    Attributes:
        device_hits: found in the device pool at first admissions.
        host_hits: loaded from the host tier at first admissions.
        resumed_hits: found in either when requests were admitted again after a preemption.
        recomputed: blocks of prompts that first admissions did not find, partial tails included.
        published: made findable on the device.
        stored: landed in the host tier.
        loaded: landed on the device.
        stored_bytes: of the blocks stored.
        loaded_bytes: of the blocks loaded.
        finished: requests.
        preemptions: of running requests, when the device pool ran out.
        failed_stores: jobs whose copy failed.
        failed_loads: jobs whose copy failed or was late; their requests recompute.
        late_loads: those past their deadline, of these.
        steps: scheduler iterations that computed something.
        prefill_tokens: computed in chunks of prompts, after a preemption of outputs too.
        decode_tokens: computed one a request and step.
        sleeps: of the whole engine.
        moved: blocks that had another id when it woke.
        seconds: of wall time.
        virtual_seconds: from the first arrival to the last landing.
        accounting_us: wall time in calls of `kvstow.Engine`, copies left out, one entry a step.
    """

    device_hits: int = 0
    host_hits: int = 0
    resumed_hits: int = 0
    recomputed: int = 0
    published: int = 0
    stored: int = 0
    loaded: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    finished: int = 0
    preemptions: int = 0
    failed_stores: int = 0
    failed_loads: int = 0
    late_loads: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    sleeps: int = 0
    moved: int = 0
    seconds: float = 0.0
    virtual_seconds: float = 0.0
    accounting_us: list[float] = field(default_factory=list)
