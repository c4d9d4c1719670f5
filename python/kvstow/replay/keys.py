"""The keys of a request's blocks: digests chained over the ids of its trace.

    block      0 .. full - 1          full .. last
    holds      prompt                 the prompt's tail, and what is generated
    digest     chained over ids       chained after the prompt, with the request as an extra key

Chained ids and digests correspond one to one. For content ids, the chaining gives a passage under
two prefixes two keys. No other request can hit a block with generated tokens, but its own request
can, after a preemption.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from kvstow._core import hash_tokens
from kvstow.replay.trace import TraceRequest

ALGORITHM: Final = "xxhash_cbor"


def block_digests(request: TraceRequest, block_size: int) -> list[bytes]:
    """Return the digest of every block of the request, a partial last block included."""
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
    return [*digests, *generated]


def digest_words(digests: list[bytes]) -> npt.NDArray[np.uint64]:
    """Return the first eight bytes of each digest, from which the bytes of the block derive."""
    heads = b"".join([digest[:8] for digest in digests])
    return np.frombuffer(heads, dtype="<u8").astype(np.uint64)
