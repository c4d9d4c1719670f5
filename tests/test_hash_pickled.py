"""`algorithm="sha256"`: SHA-256 of Python's pickle, as vLLM hashes by default.

The core writes the pickles of plain blocks itself. Here `pickle.dumps` is the reference: that
of this Python and that of every other Python on this machine.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstow

SEED = random.randrange(1 << 32)
# At these values pickle's integers grow.
EDGES = [
    bound + by
    for bound in (0x100, 0x10000, *(1 << (8 * n - 1) for n in range(4, 9)))
    for by in (-1, 0)
] + [0, 2**63]


def sha256(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)).digest()


def reference(
    tokens: Sequence[Any],
    block_size: int,
    parent: bytes | None = None,
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None,
    seed: str = "vllm-none-hash",
) -> list[bytes]:
    """Return the hashes of vLLM's `hash_block_tokens`, chained."""
    parent = parent or sha256(seed)
    hashes = []
    for block in range(len(tokens) // block_size):
        inside = tuple(tokens[block * block_size : (block + 1) * block_size])
        parent = sha256((parent, inside, None if extra_keys is None else extra_keys[block]))
        hashes.append(parent)
    return hashes


def draw_token(choose: random.Random) -> int:
    kind = choose.randrange(8)
    return choose.choice(EDGES) if kind == 0 else choose.randrange(1 << choose.randrange(1, 64))


def test_random_blocks_have_the_hashes_of_pickle() -> None:
    print("seed", SEED)
    choose = random.Random(SEED)
    for _ in range(300):
        tokens = [draw_token(choose) for _ in range(choose.randrange(200))]
        block_size = choose.choice([1, 2, 3, 4, 5, 16, 32, 100])
        parent = choose.randbytes(32) if choose.randrange(2) else None
        expected = reference(tokens, block_size, parent)
        for form in (tokens, tuple(tokens), np.array(tokens, dtype="u8")):
            assert (
                kvstow.hash_tokens(form, block_size, algorithm="sha256", parent=parent) == expected
            )


class Int(int):
    """Pickle writes its class, too."""


class Bytes(bytes):
    pass


TOKENS = list(range(500, 532))
TEXT = "".join(["the ", "same"])
COPY = "".join(["the ", "same"])


@pytest.mark.parametrize(
    ("tokens", "more"),
    [
        pytest.param([True, False] * 16, {}, id="bools"),
        pytest.param([*TOKENS[:-1], Int(7)], {}, id="a subclass of int"),
        pytest.param([np.int64(token) for token in TOKENS], {}, id="numpy ints"),
        pytest.param(TOKENS, {"parent": Bytes(32)}, id="a subclass of bytes"),
        pytest.param(TOKENS, {"extra_keys": [None, None]}, id="no keys"),
        pytest.param(TOKENS, {"extra_keys": [(), None]}, id="an empty tuple of keys"),
        pytest.param(TOKENS, {"extra_keys": [(("lora", "a", "/p"),)] * 2}, id="an adapter"),
        pytest.param(TOKENS, {"extra_keys": [(TEXT, TEXT), None]}, id="one text twice"),
        pytest.param(TOKENS, {"extra_keys": [(TEXT, COPY), None]}, id="a text and its copy"),
        pytest.param(TOKENS, {"seed": "s" * 70_000}, id="a seed above 64 KiB"),
        pytest.param(TOKENS, {"seed": ""}, id="an empty seed"),
        pytest.param(TOKENS, {"seed": "é" * 200}, id="a seed of more than 255 bytes"),
    ],
)
def test_what_pickle_writes_differently_has_its_hash(tokens: list[Any], more: Any) -> None:
    found = kvstow.hash_tokens(tokens, 16, algorithm="sha256", **more)
    assert found == reference(tokens, 16, **more)


def test_pickle_tells_one_object_twice_from_two_equal_ones() -> None:
    """So hashes with extra keys need the caller's own objects."""
    assert TEXT == COPY and TEXT is not COPY
    one, two = (
        kvstow.hash_tokens([1], 1, algorithm="sha256", extra_keys=[(TEXT, text)])
        for text in (TEXT, COPY)
    )
    assert one != two


@pytest.mark.parametrize("num_tokens", [5_951, 5_952, 5_953, 6_600, 20_000])
def test_blocks_around_the_size_of_a_frame_have_the_hashes_of_pickle(num_tokens: int) -> None:
    """The core hashes blocks of up to 5,952 tokens; pickle begins another frame at 64 KiB."""
    tokens = [2**63] * num_tokens
    found = kvstow.hash_tokens(tokens, num_tokens, algorithm="sha256")
    assert found == reference(tokens, num_tokens)
    as_array = np.array(tokens, dtype="u8")
    assert kvstow.hash_tokens(as_array, num_tokens, algorithm="sha256") == found


def other_pythons() -> list[str]:
    """Return other interpreters of this machine, from 3.8 on (protocol 5)."""
    names = [f"python3.{minor}" for minor in range(8, 20)]
    installed = Path(sys.base_prefix).parent.glob("3.*/bin/python3")
    found = {path for name in names if (path := shutil.which(name))} | {str(p) for p in installed}
    versions: dict[str, str] = {}
    for path in sorted(found):
        code = "import sys, pickle; print(sys.version_info[:2], pickle.HIGHEST_PROTOCOL)"
        ran = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
        if ran.returncode == 0 and ran.stdout.strip().endswith("5"):
            versions.setdefault(ran.stdout, path)
    return list(versions.values())


SCRIPT = """
import hashlib, json, pickle, sys
for tokens, block_size in json.load(sys.stdin):
    previous = bytes(32)
    for at in range(0, len(tokens) - block_size + 1, block_size):
        value = (previous, tuple(tokens[at : at + block_size]), None)
        previous = hashlib.sha256(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)).digest()
    print(previous.hex())
"""


@pytest.mark.parametrize("python", other_pythons())
def test_every_python_of_this_machine_has_the_same_hashes(python: str) -> None:
    print("seed", SEED)
    choose = random.Random(SEED)
    cases = [
        ([draw_token(choose) for _ in range(choose.randrange(1, 100))], choose.randrange(1, 40))
        for _ in range(100)
    ]
    ran = subprocess.run(
        [python, "-c", SCRIPT], input=json.dumps(cases), capture_output=True, text=True, check=True
    )
    for (tokens, block_size), expected in zip(cases, ran.stdout.split(), strict=True):
        hashes = kvstow.hash_tokens(tokens, block_size, algorithm="sha256", parent=bytes(32))
        assert (hashes or [bytes(32)])[-1].hex() == expected
