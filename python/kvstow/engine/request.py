"""What an engine remembers of a request, beside what ledger and scheduler know."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvstow._core import Hashes

Known: TypeAlias = tuple[Hashes, list[int] | None, list[tuple[object, ...] | None] | None]
"""The hashes of a request, its tokens and its extra keys."""


@dataclass(slots=True)
class Request:
    """What the engine remembers of a request. The ledger has its hashes and its block tables.

    Attributes:
        num_hashes: number of hashes that `add` and `extend` gave. The ledger has more after an
            extension that was cut short.
        num_known: all its tokens that the caller knew when it was last admitted. None before that,
            and after a sleep in a file.
        num_computed: computed tokens when its last block became full, without those taken back.
        due_tokens: number of computed tokens that fills its next block.
        state: "stranded" is a request that was loading when the engine was closed.
        load_id: the job that it waits for. 0 for none.
        pending_since_s: when its admission first had to wait. None before that.
        recompute: its load failed, so the next admission does not ask the host.
        is_stale: a reset came after it got blocks. What it computes is not cached, because it
            follows from KV of before the reset.
        known: its hashes, tokens and extra keys, while recovery adds it again.
    """

    num_hashes: int
    num_known: int | None = None
    num_computed: int = 0
    due_tokens: int = 1
    state: Literal["added", "loading", "running", "stranded"] = "added"
    load_id: int = 0
    pending_since_s: float | None = None
    recompute: bool = False
    is_stale: bool = False
    known: Known | None = None
