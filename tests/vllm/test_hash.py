"""`kvstow.hash_tokens` compared with vLLM's own functions, chained as in vLLM."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.vllm.versions import HASHES_ADAPTER_PATH
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

import kvstow

Key: TypeAlias = int | str | bytes | bool | tuple["Key", ...] | list["Key"] | None
Algorithm: TypeAlias = Literal["sha256", "sha256_cbor", "xxhash_cbor"]
HashFunction: TypeAlias = Callable[[object], bytes]

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
algorithms: st.SearchStrategy[Algorithm] = st.sampled_from(ALGORITHMS)

# Nearly all uniform ids take nine bytes, so ask for the other lengths and their edges, too.
bounds = (24, 2**8, 2**16, 2**31, 2**32, 2**39, 2**47, 2**55, 2**63 - 1)
edges = [bound + by for bound in bounds for by in (-1, 0, 1)]
token_ids = st.sampled_from(edges) | st.integers(0, 200_000) | st.integers(0, 2**63)

texts = st.text(st.characters(exclude_categories=["Cs"]))
leaves: st.SearchStrategy[Key] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([sign * edge for edge in [*edges, 2**64 - 1, 2**64] for sign in (-1, 1)]),
    st.integers(-(2**127), 2**127 - 1),
    texts,
    st.binary(),
)
keys: st.SearchStrategy[Key] = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4).flatmap(lambda k: st.sampled_from([k, tuple(k)])),
    max_leaves=6,
)
as_vllm_derives_them = st.one_of(
    st.tuples(st.just("lora"), texts, texts),
    st.tuples(st.just("mm"), texts, st.integers(-(2**31), 2**31)),
    st.tuples(st.just("cache_salt"), texts),
    st.tuples(st.just("prompt_embeds"), st.binary(min_size=32, max_size=32)),
)
block_keys: st.SearchStrategy[tuple[Key, ...] | None] = st.none() | st.one_of(
    st.lists(as_vllm_derives_them, max_size=4).map(tuple), st.lists(keys, max_size=4).map(tuple)
)
# Values that an environment variable may have.
hash_seeds = st.none() | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@contextmanager
def vllm_seeded(algorithm: Algorithm, python_hash_seed: str | None) -> Iterator[HashFunction]:
    """Make vLLM hash as if this process had started with this PYTHONHASHSEED."""
    function: HashFunction = hashing.get_hash_fn_by_name(algorithm)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NONE_HASH", "_NONE_HASH_SEED"):
            patch.setattr(kv_cache_utils, name, None, raising=False)
        if python_hash_seed is None:
            patch.delenv("PYTHONHASHSEED", raising=False)
        else:
            patch.setenv("PYTHONHASHSEED", python_hash_seed)
        kv_cache_utils.init_none_hash(function)
        yield function


def seed_to_pass(algorithm: Algorithm, python_hash_seed: str | None) -> str | None:
    """Return the seed that a user passes to get vLLM's hashes; None for vLLM's fixed seed."""
    if python_hash_seed is None and algorithm == "xxhash_cbor":
        drawn: str = kv_cache_utils.get_none_hash_seed()
        return drawn
    return python_hash_seed


def vllm_hashes(
    function: HashFunction,
    tokens: Sequence[int],
    block_size: int,
    parent: bytes | None,
    extra_keys: Sequence[tuple[Key, ...] | None],
) -> list[bytes]:
    hashes = []
    for block, block_extra_keys in enumerate(extra_keys):
        block_tokens = tokens[block * block_size : (block + 1) * block_size]
        parent = kv_cache_utils.hash_block_tokens(function, parent, block_tokens, block_extra_keys)
        hashes.append(parent)
    return hashes


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], int, list[tuple[Key, ...] | None]]:
    tokens = draw(st.lists(token_ids, max_size=80))
    block_size = draw(st.integers(1, 33))
    num_blocks = len(tokens) // block_size
    extra_keys = draw(st.lists(block_keys, min_size=num_blocks, max_size=num_blocks))
    return tokens, block_size, extra_keys


@given(
    prompts(),
    algorithms,
    hash_seeds,
    st.none() | st.just(b"") | st.binary(min_size=32, max_size=32),
)
@example((list(range(600)), 300, [None, (("cache_salt", "s"),)]), "sha256_cbor", None, None)
def test_hashes_equal_vllms(
    prompt: tuple[list[int], int, list[tuple[Key, ...] | None]],
    algorithm: Algorithm,
    python_hash_seed: str | None,
    parent: bytes | None,
) -> None:
    tokens, block_size, extra_keys = prompt
    if parent is not None and algorithm == "xxhash_cbor":
        parent = parent[:16]
    with vllm_seeded(algorithm, python_hash_seed) as function:
        expected = vllm_hashes(function, tokens, block_size, parent, extra_keys)
        seed = seed_to_pass(algorithm, python_hash_seed)
    found = kvstow.hash_tokens(
        tokens, block_size, algorithm=algorithm, parent=parent, extra_keys=extra_keys, seed=seed
    )
    assert found == expected

    without_keys = kvstow.hash_tokens(
        np.array(tokens, dtype="u8"), block_size, algorithm=algorithm, parent=parent, seed=seed
    )
    if all(block is None for block in extra_keys):
        assert without_keys == expected
    else:
        assert without_keys[-1] != expected[-1]


# The ids on both sides of each power of two, and of 24: there the forms of integers change.
bounds_of_forms = (24, *(1 << bit for bit in range(63)))
ids_at_bounds = sorted({bound + by for bound in bounds_of_forms for by in (-1, 0, 1)})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("block_size", [1, 3, 8, 15, 16, 20, 32, 64])
def test_ids_of_every_length_hash_as_in_vllm(algorithm: Algorithm, block_size: int) -> None:
    """Each id stands alone and beside a large one, which changes how its neighbours are written."""
    others = [7, 30, 200, 60_000, 130_000]
    blocks = [[one] * block_size for one in ids_at_bounds]
    for place in range(block_size):
        for one in (23, 24, 31, 32, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32):
            block = [others[at % len(others)] for at in range(block_size)]
            block[place] = one
            blocks.append(block.copy())
            block[place - 1] = 2**40
            block[place] = one
            blocks.append(block.copy())
    tokens = [one for block in blocks for one in block]
    with vllm_seeded(algorithm, "1") as function:
        expected = vllm_hashes(function, tokens, block_size, None, [None] * len(blocks))
    found = kvstow.hash_tokens(tokens, block_size, algorithm=algorithm, seed="1")
    assert found == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("block_size", [*range(1, 35), 63, 64, 65, 255, 256, 257, 65_535, 65_536])
def test_blocks_of_every_size_hash_as_in_vllm(algorithm: Algorithm, block_size: int) -> None:
    """The length of the array has forms, too, and the message ends anywhere in a block of SHA."""
    tokens = [at * at % 130_000 for at in range(3 * block_size)]
    with vllm_seeded(algorithm, "1") as function:
        expected = vllm_hashes(function, tokens, block_size, None, [None] * 3)
    found = kvstow.hash_tokens(tokens, block_size, algorithm=algorithm, seed="1")
    assert found == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_hashes_equal_those_of_a_vllm_request(algorithm: Algorithm) -> None:
    """vLLM derives the extra keys of a request, and hashes its prompt and output."""
    with vllm_seeded(algorithm, "1234") as function:
        request = Request(
            "r",
            prompt_token_ids=list(range(40)),
            sampling_params=SamplingParams(max_tokens=30),
            pooling_params=None,
            mm_features=[
                MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    identifier="id",
                    mm_position=PlaceholderRange(offset=10, length=20),
                )
            ],
            lora_request=LoRARequest("adapter", 1, "/adapters/a"),
            cache_salt="salt",
            block_hasher=kv_cache_utils.get_request_block_hasher(16, function),
        )
        request.append_output_token_ids(list(range(1000, 1030)))
    lora: Key = ("lora", "adapter", "/adapters/a")
    first: list[Key] = [("mm", "id", 10), ("cache_salt", "salt")]
    second: Key = ("mm", "id", -6)
    if not HASHES_ADAPTER_PATH:  # nor what a key is of
        lora, first, second = "adapter", [("id", 10), "salt"], ("id", -6)
    assert request.block_hashes == kvstow.hash_tokens(
        request.all_token_ids,
        16,
        algorithm=algorithm,
        extra_keys=[(lora, *first), (lora, second), (lora,), (lora,)],
        seed="1234",
    )
