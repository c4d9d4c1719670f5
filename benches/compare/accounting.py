"""How much faster than vLLM's block accounting is kvstow's, for the same work?

Both sides serve the same requests in one process, in turns, and must return the same block ids.
vLLM's side is its `KVCacheManager`, called as its scheduler calls it. These rules apply:

- vLLM's own hash function makes the block hashes (`request.block_hashes`) beforehand. The time
  counts on neither side. vLLM reads the hashes in place; kvstow gets them through
  `BlockLedger.add`, and through `extend` as blocks fill. So there are rows with and without these
  calls. `BlockPool.lookup` gets the hashes in each call.
- vLLM takes request objects and returns block objects. kvstow takes request ids and returns arrays
  of block ids. The conversion of objects to ids does not count, except in one row of a step.
- The pools are full of other prompts' blocks, so each allocation evicts. "Nothing cached" is the
  state right after a reset. The free queues are in order in some rows, as in a new server, and
  shuffled in others, as in an old one.
- The garbage collector is on, as in production. Objects from before the measurement are frozen, as
  vLLM's engine does when it starts. Each turn begins with a collection that is not timed.
- Events and statistics are off on both sides.
- `offload` says what the rows of the host tier count in addition.

The results are medians. "cold" is the ratio of the medians of each turn's first call: the other
side's turn has just used the caches, as other work does in a server.

Run it from the project's folder: `python -m benches.compare.accounting [--json]`.
"""

import functools

from . import report
from .decode import Decode
from .million import Million
from .offload import OffloadDecode, OffloadPrompts
from .prompts import ONE_GROUP, THREE_GROUPS, Prompts

if __name__ == "__main__":
    report.main(
        __doc__,
        [
            functools.partial(Prompts, groups=ONE_GROUP, capacity=1, shuffled=False),
            functools.partial(Prompts, groups=ONE_GROUP, capacity=4, shuffled=False),
            functools.partial(Prompts, groups=ONE_GROUP, capacity=4, shuffled=True),
            functools.partial(Prompts, groups=THREE_GROUPS, capacity=1, shuffled=False),
            functools.partial(Prompts, groups=THREE_GROUPS, capacity=4, shuffled=True),
            Decode,
            functools.partial(OffloadPrompts, capacity=1),
            functools.partial(OffloadPrompts, capacity=4),
            OffloadDecode,
            Million,
        ],
    )
