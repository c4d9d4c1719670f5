"""The keys of a request's blocks: digests chained over the ids of its trace.

    block      0 .. full - 1          full .. last
    holds      prompt                 the prompt's tail, and what is generated
    digest     chained over ids       chained after the prompt, with the request as an extra key

Over chained ids the digests are one to one with the ids; over content ids the chaining is what
makes one passage under two prefixes two keys. A block that is generated, even in part, can be no
other request's, but its own request finds it again after a preemption.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from kvstow._core import hash_tokens
from kvstow.replay.trace import TraceRequest

__all__ = ["ALGORITHM", "block_digests", "digest_words"]

ALGORITHM: Final = "xxhash_cbor"


def block_digests(request: TraceRequest, block_size: int) -> list[bytes]:
    """The digest of every block of the request, in order; the last may be a partial block."""
    num_prompt = request.prompt_tokens // block_size
    num_blocks = -(-request.total_tokens // block_size)
    digests = hash_tokens(request.trace_ids[:num_prompt], 1, algorithm=ALGORITHM)
    generated = hash_tokens(
        range(num_prompt, num_blocks),
        1,
        algorithm=ALGORITHM,
        parent=digests[-1] if digests else None,
        extra_keys=[("request", request.line)] * (num_blocks - num_prompt),
    )
    return digests + generated


def digest_words(digests: list[bytes]) -> npt.NDArray[np.uint64]:
    """The first eight bytes of each digest: what the contents of the blocks are derived from."""
    heads = b"".join([digest[:8] for digest in digests])
    return np.frombuffer(heads, dtype="<u8").astype(np.uint64)
