"""`hash_tokens` from Python: vLLM's known answers, every form of tokens, and refused input."""

import array
from collections import UserList, deque
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import pytest

import kvstow

Algorithm = Literal["sha256", "sha256_cbor", "xxhash_cbor"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

TOKENS = range(48)
EXTRA_KEYS = [
    (("cache_salt", "s"),),
    None,
    (("lora", "a", "/p"), ("mm", "id", -3), ("prompt_embeds", b"\x00\xff")),
]
FIRST_PARENT = {
    ("sha256", None): "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
    ("sha256_cbor", None): "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
    ("xxhash_cbor", "0"): "1ebe36576dcb573f26b99533a20aaeca",
}
# Computed by vLLM 0.32: SHA-256 with its default seed, xxhash_cbor with PYTHONHASHSEED=0.
PLAIN = {
    ("sha256", None): [
        "fe8fa5dda3210d0ca2031e37cbe3b001186773cd1c710beb2d45fcb51d434798",
        "8be7aaa33831156d316f1f463ae57e643deb63f42e633e2d631df88815cc4629",
        "9d537f74907f6ada2b6cccb46b9845df2ebdbaf60c73d8679cf1da81b15b302c",
    ],
    ("sha256_cbor", None): [
        "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749",
        "c300ec275d7bf08af8fc63e76cdc0086911bbc7091e03c5cf892553bef84ef0c",
        "117dad852830e0103c12d7c7f8b7cf58434ea8751d1f42ee07b1c93711e4da6c",
    ],
    ("xxhash_cbor", "0"): [
        "209f5d549fc07c8e39d823615ede61ce",
        "03888914ee75b87e89df867a21beb72b",
        "f1a782fa3401ed3cb6bd42b1ed0bd4dd",
    ],
}
WITH_KEYS = {
    ("sha256", None): [
        "23bb70ca91a3697ed579080cc3a4d36b53c7348f3a8a63c7b5b67491d85e237d",
        "ac48f41687f81f9bd90585b082e279d5f8069482cd0414751f1d90a92b77786d",
        "34017d85e1e121a79e3b44ff1ebf70329fbd3b8cad86e54c80b8447adffadbb4",
    ],
    ("sha256_cbor", None): [
        "67e9f72522b34138a0f4be0e3a68d9d49b1e50aea0af7762f6170ad7eebbdeaf",
        "7493457b6e24d881371fedb4841b59ecba9aaf993d8493ed0177a944fdcfcb3b",
        "b75503e80dfb6d059b4eea2f98ae4273adb83ccce0acf1148c05a25bead1d2a1",
    ],
    ("xxhash_cbor", "0"): [
        "5010b1cc4b4366e0e96a6a8da63a2e14",
        "bb87aa06ffa34deb848d777223780d74",
        "3a268b52d7d29b20082c42fa5e465ff1",
    ],
}


def in_hex(hashes: kvstow.Hashes) -> list[str]:
    return [digest.hex() for digest in hashes]


@pytest.mark.parametrize(
    ("algorithm", "seed"),
    [("sha256", None), ("sha256_cbor", None), ("xxhash_cbor", "0")],
    ids=ALGORITHMS,
)
def test_hashes_equal_those_of_vllm(algorithm: Algorithm, seed: str | None) -> None:
    plain = kvstow.hash_tokens(TOKENS, 16, algorithm=algorithm, seed=seed)
    assert in_hex(plain) == PLAIN[algorithm, seed]
    with_keys = kvstow.hash_tokens(
        TOKENS, 16, algorithm=algorithm, seed=seed, extra_keys=EXTRA_KEYS
    )
    assert in_hex(with_keys) == WITH_KEYS[algorithm, seed]
    first = bytes.fromhex(FIRST_PARENT[algorithm, seed])
    assert kvstow.hash_tokens(TOKENS, 16, algorithm=algorithm, parent=first) == plain


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_environment_does_not_change_hashes(
    algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    by_default = kvstow.hash_tokens(TOKENS, 16, algorithm=algorithm)
    assert by_default == kvstow.hash_tokens(TOKENS, 16, algorithm=algorithm, seed="vllm-none-hash")
    assert by_default != kvstow.hash_tokens(TOKENS, 16, algorithm=algorithm, seed="0")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_parent_continues_a_chain(algorithm: Algorithm) -> None:
    whole = kvstow.hash_tokens(range(40), 16, algorithm=algorithm)
    assert len(whole) == 2
    assert whole[1:] == kvstow.hash_tokens(range(16, 40), 16, algorithm=algorithm, parent=whole[0])
    assert whole == kvstow.hash_tokens(range(40), 16, algorithm=algorithm, parent=b"")


UNALIGNED = np.zeros(48, dtype=[("pad", "u1"), ("token", "i8")])
UNALIGNED["token"] = TOKENS
# Consecutive in memory, but not at a multiple of eight bytes.
ODD_ADDRESS = np.frombuffer(b"\x00" + np.arange(48, dtype="i8").tobytes(), "i8", offset=1)
READ_ONLY = np.arange(48)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(list(TOKENS), id="list"),
        pytest.param(tuple(TOKENS), id="tuple"),
        pytest.param(deque(TOKENS), id="deque"),
        pytest.param(UserList(TOKENS), id="sequence written in Python"),
        pytest.param(array.array("H", TOKENS), id="array.array"),
        pytest.param([np.int32(token) for token in TOKENS], id="list of numpy ints"),
        *(
            pytest.param(np.arange(48, dtype=code), id=f"array {code}")
            for code in ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4", ">i8", ">u8"]
        ),
        pytest.param(np.repeat(np.arange(48), 2)[::2], id="strided"),
        pytest.param(np.arange(47, -1, -1)[::-1], id="negative stride"),
        pytest.param(UNALIGNED["token"], id="unaligned"),
        pytest.param(ODD_ADDRESS, id="odd address"),
        pytest.param(READ_ONLY, id="read-only"),
    ],
)
def test_every_form_of_the_same_tokens_has_the_same_hashes(
    tokens: Sequence[int] | npt.NDArray[np.integer],
) -> None:
    assert in_hex(kvstow.hash_tokens(tokens, 16)) == PLAIN["sha256_cbor", None]


@pytest.mark.parametrize("token", [2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63])
def test_large_tokens_hash_equally_in_list_and_array(token: int) -> None:
    expected = kvstow.hash_tokens([1, token], 2)
    assert kvstow.hash_tokens(np.array([1, token], dtype="u8"), 2) == expected
    if token < 2**63:
        assert kvstow.hash_tokens(np.array([1, token], dtype="i8"), 2) == expected
    assert kvstow.hash_tokens([1, token - 1], 2) != expected


def test_extra_keys_hash_equally_in_lists_and_tuples() -> None:
    hashes = kvstow.hash_tokens(
        TOKENS,
        16,
        extra_keys=[
            [["cache_salt", "s"]],
            None,
            [["lora", "a", "/p"], ("mm", "id", -3), ["prompt_embeds", b"\x00\xff"]],
        ],
    )
    assert in_hex(hashes) == WITH_KEYS["sha256_cbor", None]


def test_similar_extra_keys_have_different_hashes() -> None:
    similar = [None, (), (None,), ((),), (0,), (False,), (1,), (True,), ("",), (b"",), ("1",)]
    digests = [kvstow.hash_tokens([1], 1, extra_keys=[keys])[0] for keys in similar]
    assert len(set(digests)) == len(similar)


def test_only_full_blocks_are_hashed() -> None:
    assert in_hex(kvstow.hash_tokens(range(47), 16)) == PLAIN["sha256_cbor", None][:2]
    assert kvstow.hash_tokens(range(15), 16, extra_keys=[]) == []
    assert kvstow.hash_tokens([], 16) == []
    assert kvstow.hash_tokens(range(15), 2**63) == []
    assert len(kvstow.hash_tokens(range(15), np.int64(5))) == 3  # type: ignore[arg-type] # an int too


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, -2, 3], r"token 1 is -2: token ids go from 0 to 2\*\*63"),
        ([1, 2, 2**63 + 1], r"token 2 is 9223372036854775809: token ids go from 0 to 2\*\*63"),
        ([2**64], "token 0 is 18446744073709551616:"),
        ([10**5000], "token 0 is an int of more than 80 digits:"),
        (np.array([1, -2]), "token 1 is -2:"),
        (np.array([1, -2], dtype="i1"), "token 1 is -2:"),
        (np.array([1, 2, -3], dtype="i4"), "token 2 is -3:"),
        (np.array([2**64 - 1], dtype="u8"), "token 0 is 18446744073709551615:"),
        (np.array([1, 2**63 + 1], dtype="u8"), "token 1 is 9223372036854775809:"),
        ([1, 2.0], "token 1 is of type float: token ids are ints"),
        ([None], "token 0 is of type NoneType: token ids are ints"),
        ("12", "token 0 is of type str: token ids are ints"),
        ([[1, 2]], "token 0 is of type list: token ids are ints"),
        (
            np.array([1.0, 2.0]),
            "tokens is an array of dtype float64: pass a one-dimensional array of integers",
        ),
        (np.array([True]), "tokens is an array of dtype bool:"),
        (np.array([1, 2], dtype=object), "tokens is an array of dtype object:"),
        (np.zeros((2, 2), dtype="i4"), r"tokens is an array of shape \[2, 2\]:"),
        (np.array(3), r"tokens is an array of shape \[\]:"),
        ({1: 2}, "tokens is of type dict: pass a sequence of ints or an integer array"),
        (iter([1]), "tokens is of type list_iterator:"),
        (3, "tokens is of type int:"),
        (None, "tokens is of type NoneType:"),
    ],
)
def test_error_names_the_bad_token(tokens: Sequence[int], message: str) -> None:
    with pytest.raises(kvstow.ConfigError, match=message):
        kvstow.hash_tokens(tokens, 1)


@pytest.mark.parametrize("block_size", [0, -1, -(2**70), 2**70])
def test_error_names_the_bad_block_size(block_size: int) -> None:
    with pytest.raises(kvstow.ConfigError, match=f"block_size is {block_size}: a block has"):
        kvstow.hash_tokens([1, 2], block_size)
    with pytest.raises(TypeError, match="block_size: 'float' object cannot"):
        kvstow.hash_tokens([1, 2], 1.0)  # type: ignore[arg-type]


def test_error_names_the_unknown_algorithm() -> None:
    with pytest.raises(kvstow.ConfigError, match='"md5" is not known: use "sha256", "sha'):
        kvstow.hash_tokens([1, 2], 1, algorithm="md5")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("algorithm", "num_bytes", "width"),
    [("sha256", 16, 32), ("sha256_cbor", 16, 32), ("xxhash_cbor", 32, 16)],
)
def test_parent_with_the_width_of_another_algorithm_is_refused(
    algorithm: Algorithm, num_bytes: int, width: int
) -> None:
    message = f"parent has {num_bytes} bytes and {algorithm} digests have {width}:"
    with pytest.raises(kvstow.ConfigError, match=message):
        kvstow.hash_tokens([1, 2], 1, algorithm=algorithm, parent=bytes(num_bytes))


CYCLE: list[object] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("extra_keys", "message"),
    [
        ([], "extra_keys has 0 entries and the tokens fill 2 blocks of 1:"),
        ([None], "extra_keys has 1 entries and the tokens fill 2 blocks of 1:"),
        ([None] * 3, "extra_keys has 3 entries and the tokens fill 2 blocks of 1:"),
        (7, "extra_keys is of type int: pass a sequence with one entry per full block"),
        ({0: None, 1: None}, "extra_keys is of type dict:"),
        (
            "ab",
            "the extra keys of block 0 are of type str: pass None or a tuple of keys for each",
        ),
        ([None, b"ab"], "the extra keys of block 1 are of type bytes:"),
        ([None, bytearray(b"ab")], "the extra keys of block 1 are of type bytearray:"),
        ([None, 7], "the extra keys of block 1 are of type int:"),
        ([None, (1.5,)], "an extra key of block 1 is of type float: keys are None, bools,"),
        ([None, (("a", {}),)], "an extra key of block 1 is of type dict:"),
        ([None, (bytearray(b"ab"),)], "an extra key of block 1 is of type bytearray:"),
        ([None, (np.int64(1),)], "an extra key of block 1 is of type int64:"),
        ([None, (2**127,)], "an extra key of block 1 is an int wider than 128 bits"),
        ([None, ("\ud800",)], "an extra key of block 1 is a str with a lone surrogate"),
        ([None, CYCLE], "the extra keys of block 1 nest deeper than 32 levels: flatten them"),
    ],
)
def test_error_names_the_bad_extra_key(
    extra_keys: Sequence[Sequence[int] | None], message: str
) -> None:
    with pytest.raises(kvstow.ConfigError, match=message):
        kvstow.hash_tokens([1, 2], 1, extra_keys=extra_keys)


def test_exception_of_a_token_reaches_the_caller() -> None:
    class Token:
        def __index__(self) -> int:
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        kvstow.hash_tokens([1, Token()], 1)  # type: ignore[list-item]


def test_sequence_with_a_wrong_length_is_hashed_to_its_end() -> None:
    class Endless(UserList[int]):
        def __len__(self) -> int:
            return 2**62

    assert in_hex(kvstow.hash_tokens(Endless(TOKENS), 16)) == PLAIN["sha256_cbor", None]


def test_array_larger_than_memory_raises_memory_error() -> None:
    broadcast = np.broadcast_to(np.int64(1), (2**59,))  # one number in memory
    with pytest.raises(MemoryError):
        kvstow.hash_tokens(broadcast, 16)


def test_a_parent_that_is_no_digest_is_refused() -> None:
    hashes = kvstow.hash_tokens(range(32), 16)
    with pytest.raises(kvstow.ConfigError, match=r"parent is of type Hashes: .* hashes\[-1\]"):
        kvstow.hash_tokens(range(32, 48), 16, parent=hashes)  # type: ignore[arg-type]
