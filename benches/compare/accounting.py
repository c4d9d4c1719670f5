"""How much quicker than vLLM's own block accounting is kvstow's, doing the same work?

Both sides do the same requests in one process, taking turns, and must come to the same block ids: a
rival that does something else is no rival. vLLM's side is its `KVCacheManager`, called as its
scheduler calls it. What is counted, and what is not:

- Block hashes are vLLM's own (`request.block_hashes`), made beforehand and counted on neither side.
  vLLM reads them where they are; kvstow is handed them (`BlockLedger.add`, and `extend` as blocks
  fill), so rows come with and without that call. `BlockPool.lookup` takes them anew in each call.
- vLLM takes request objects and returns block objects, kvstow takes request ids and returns arrays
  of block ids. Making ids of the objects is not counted; a step has a row in which it is.
- The pools are full of other prompts' blocks, so that an allocation evicts; "nothing cached" is
  right after a reset. Once the free queues are in order, as in a server that has just started,
  and once they are shuffled, as in one that has long been up.
- The garbage collector is on, as in production. What was made before the measurement is frozen, as
  vLLM's engine does when it starts, and each turn begins with a collection that is not timed.
- Events and statistics are off on both sides.
- What the rows of the host tier count beyond that stands in `offload`.

Medians count. "cold" is the ratio of the medians of each turn's first: the other side's turn has
just been through the caches, as other work has in a server.

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
