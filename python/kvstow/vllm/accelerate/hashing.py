"""Prefix hashing in Rust, in place of vLLM's hasher of requests.

How a hash could be wrong, and what guards:

- Extra keys (an adapter, an image, a salt, embeddings) are part of the hash, and so is the tail of
  the next block with some drafts: such requests stay with vLLM's hasher.
- Any difference of version: each new hasher first hashes a sample with vLLM's hasher, too. If the
  digests differ, or an attribute is missing, vLLM's hasher serves.
- Tokens that `hash_tokens` refuses, or a parent of another form: vLLM's hasher serves.

With CBOR a token `True` has the hash of the token 1, which vLLM would hash differently. The KV of
both is the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils

from kvstow import hash_tokens
from kvstow.vllm.accelerate.patch import Patch

logger = logging.getLogger("vllm." + __name__)

Hasher: TypeAlias = Callable[[Any], list[Any]]
Algorithm: TypeAlias = Literal["sha256", "sha256_cbor", "xxhash_cbor"]

# At these token ids, an encoding grows by a byte or more.
_EDGES = (23, 24, 0xFF, 0x100, 0xFFFF, 0x10000, 2**31 - 1, 2**31, 2**32 - 1, 2**32)


def _faster_factory(vllm_factory: Callable[..., Hasher]) -> Callable[..., Hasher]:
    def get_request_block_hasher(
        hash_block_size: int,
        caching_hash_fn: Callable[[Any], bytes],
        num_hash_lookahead_tokens: int = 0,
    ) -> Hasher:
        if num_hash_lookahead_tokens:
            return vllm_factory(hash_block_size, caching_hash_fn, num_hash_lookahead_tokens)
        vllm_hasher = vllm_factory(hash_block_size, caching_hash_fn)
        algorithm = _algorithm(caching_hash_fn)
        if algorithm is None:
            return vllm_hasher
        hasher = _Hasher(hash_block_size, algorithm)
        if not _agree(hasher, vllm_hasher):
            logger.warning("kvstow: accelerate leaves hashing to vLLM: the hashes differ")
            return vllm_hasher
        return hasher.or_else(vllm_hasher)

    return get_request_block_hasher


def _algorithm(function: Callable[[Any], bytes]) -> Algorithm | None:
    known: dict[Algorithm, Any] = {
        "sha256": hashing.sha256,
        "sha256_cbor": hashing.sha256_cbor,
        "xxhash_cbor": hashing.xxhash_cbor,
    }
    return next((name for name, each in known.items() if each is function), None)


class _Hasher:
    """Hashes the new full blocks of requests without extra keys."""

    def __init__(self, block_size: int, algorithm: Algorithm) -> None:
        self.block_size = block_size
        self.algorithm: Algorithm = algorithm

    def hashes(self, request: Any, num_hashed: int) -> list[bytes]:
        """Return the hashes of the request's full blocks after the first `num_hashed`."""
        parent = request.block_hashes[-1] if num_hashed else kv_cache_utils.NONE_HASH
        if not parent:  # `hash_tokens` takes it for the start of a prompt, with a seed of its own
            raise ValueError("the parent hash is empty")
        tokens = request._all_token_ids  # without a copy for a new prompt
        if num_hashed:
            tokens = tokens[num_hashed * self.block_size :]
        return list(hash_tokens(tokens, self.block_size, algorithm=self.algorithm, parent=parent))

    def or_else(self, vllm_hasher: Hasher) -> Hasher:
        """Return a hasher that leaves to vLLM what this one cannot hash."""
        block_size, hashes = self.block_size, self.hashes

        def hasher(request: Any) -> list[Any]:
            num_hashed = len(request.block_hashes)
            if (num_hashed + 1) * block_size > len(request._all_token_ids):
                return []
            if (
                request.lora_request
                or request.mm_features
                or request.cache_salt
                or request.prompt_embeds is not None
            ):
                return vllm_hasher(request)
            try:
                return hashes(request, num_hashed)
            except Exception:
                return vllm_hasher(request)

        return hasher


def _agree(hasher: _Hasher, vllm_hasher: Hasher) -> bool:
    """Whether both hash a prompt equally, from its start and from a block within it."""
    num_tokens = max(3 * hasher.block_size, len(_EDGES))
    tokens = [_EDGES[at % len(_EDGES)] + at // len(_EDGES) for at in range(num_tokens)]
    sample = SimpleNamespace(
        all_token_ids=tokens,
        _all_token_ids=tokens,
        num_tokens=num_tokens,
        block_hashes=[],
        mm_features=[],
        lora_request=None,
        cache_salt=None,
        prompt_embeds=None,
    )
    try:
        expected = vllm_hasher(sample)
        if hasher.hashes(sample, 0) != expected:
            return False
        sample.block_hashes = expected[:1]
        return hasher.hashes(sample, 1) == expected[1:] == vllm_hasher(sample)
    except Exception as error:
        logger.debug("kvstow: the sample could not be hashed: %s", error)
        return False


PATCH = Patch(
    what="prefix hashing",
    replacements={
        # The engine's own name first, because its import may come after the patch of the module.
        "vllm.v1.engine.core:get_request_block_hasher": _faster_factory,
        "vllm.v1.core.kv_cache_utils:get_request_block_hasher": _faster_factory,
    },
    reads={
        "vllm.v1.core.kv_cache_utils": (
            "get_request_block_hasher",
            "hash_block_tokens",
            "generate_block_hash_extra_keys",
            "_gen_mm_extra_hash_keys",
            "_gen_lora_extra_hash_keys",
            "_gen_prompt_embeds_extra_hash_keys",
        ),
        "vllm.utils.hashing": ("sha256", "sha256_cbor", "xxhash_cbor"),
    },
    known={
        "ff2303bed75488eb5cd174851a2c60e9c54c382161ff20b6ce7ecc496b4262ec": "0.30",
        "f93922c371dfcc0be7a7ded03b378ed1fe904b8b2848da43f47ea0c036acae5a": "0.31, 0.32",
        "8926f19d09cfe11db60247890c9d0631641172309dab09142548a2c69ce3c5d3": "0.33",
    },
)
