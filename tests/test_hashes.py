"""`Hashes`: a sequence of bytes that ledgers, schedulers and pools share."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import kvstow
from kvstow import BlockLedger, BlockPool, FullAttention, Hashes, HitCurve, OffloadScheduler

SEED = random.randrange(1 << 32)
BLOCK = 16


def draw(choose: random.Random, num_hashes: int, width: int) -> list[bytes]:
    """Return hashes of which some are equal and some end in zeros."""
    pool = [choose.randbytes(width - 1) + choose.choice([b"\0", b"\1"]) for _ in range(num_hashes)]
    return [choose.choice(pool) for _ in range(num_hashes)]


@pytest.mark.parametrize("width", [1, 8, 16, 20, 31, 32])
def test_it_behaves_as_a_sequence_of_the_same_bytes(width: int) -> None:
    print("seed", SEED)
    choose = random.Random(SEED)
    for num_hashes in (0, 1, 2, 3, 17):
        plain = draw(choose, num_hashes, width)
        hashes = Hashes(plain)
        assert isinstance(hashes, Sequence)
        assert len(hashes) == len(plain) and bool(hashes) == bool(plain)
        assert list(hashes) == plain and list(reversed(hashes)) == plain[::-1]
        assert bytes(hashes) == b"".join(plain)
        for index in range(-num_hashes, num_hashes):
            assert hashes[index] == plain[index]
        for value in [*plain, bytes(width), b"", b"other", plain, 3, None]:
            assert (value in hashes) == (value in plain)
            assert hashes.count(value) == plain.count(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [1, 16, 32])
def test_array_has_a_row_of_bytes_for_each_hash(width: int) -> None:
    print("seed", SEED)
    plain = [*draw(random.Random(SEED), 5, width), bytes(width)]  # numpy's bytes drop the zeros
    hashes = Hashes(plain)
    rows = np.asarray(hashes)
    assert rows.shape == (6, width) and rows.dtype == np.uint8
    assert [row.tobytes() for row in rows] == plain
    assert np.asarray(hashes, dtype=np.int64).tolist() == rows.tolist()
    rows[:] = 0  # a copy
    assert hashes == plain
    assert np.array(Hashes([])).shape == (0, 0)
    with pytest.raises(ValueError, match="copy is False"):
        np.array(hashes, copy=False)


def test_slices_are_those_of_a_list() -> None:
    print("seed", SEED)
    choose = random.Random(SEED)
    plain = draw(choose, 9, 16)
    hashes = Hashes(plain)
    bounds = [None, *range(-11, 12), sys.maxsize, -sys.maxsize]
    for _ in range(2_000):
        part = slice(
            choose.choice(bounds), choose.choice(bounds), choose.choice([None, 1, 2, 5, -1, -3])
        )
        assert hashes[part] == plain[part]
        assert isinstance(hashes[part], Hashes)


@pytest.mark.parametrize("index", [3, -4, 2**62, -(2**63), 2**63, -(2**64)])
def test_index_outside_raises_index_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"index {index} of 3 hashes"):
        Hashes([b"a", b"b", b"c"])[index]


def test_index_finds_what_a_list_finds() -> None:
    plain = [b"a", b"b", b"a", b"c"]
    hashes = Hashes(plain)
    bounds = [*range(-6, 7), sys.maxsize, -sys.maxsize - 1, 2**64, -(2**64)]
    for value in (b"a", b"b", b"c"):
        for start in bounds:
            for stop in bounds:
                inside = value in plain[start:stop]
                if inside:
                    assert hashes.index(value, start, stop) == plain.index(value, start, stop)
                else:
                    with pytest.raises(ValueError, match="no hash among 4 equals the value"):
                        hashes.index(value, start, stop)


def test_it_equals_hashes_and_lists_of_the_same_bytes() -> None:
    hashes = Hashes([b"ab", b"cd"])
    same: list[object] = [
        Hashes([b"ab", b"cd"]),
        [b"ab", b"cd"],
        hashes[:],
        hashes[:1] + Hashes([b"cd"]),
    ]
    for other in same:
        assert hashes == other
        assert other == hashes
        assert not hashes != other  # noqa: SIM202 - another method
    others: list[object] = [
        Hashes([b"ab"]),
        Hashes([b"cd", b"ab"]),
        Hashes([b"ab\0", b"cd\0"]),  # the core pads hashes with zeros
        [b"ab"],
        [b"ab", 3],
        (b"ab", b"cd"),
        b"abcd",
        None,
    ]
    for other in others:
        assert hashes != other
        assert other != hashes
        assert not hashes == other  # noqa: SIM201 - another method
    assert Hashes([]) == Hashes([b"a"])[1:] == [] == hashes[2:]


def test_nothing_changes_it() -> None:
    hashes = Hashes([b"ab", b"cd"])
    with pytest.raises(TypeError, match="does not support item assignment"):
        hashes[0] = b"xy"  # type: ignore[index]
    with pytest.raises(TypeError, match="doesn't support item deletion"):
        del hashes[0]  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        hashes.append(b"xy")  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="unhashable"):
        hash(hashes)  # as a list's: they can be equal


@pytest.mark.parametrize(
    "again",
    [
        copy.copy,
        copy.deepcopy,
        *(lambda it, at=at: pickle.loads(pickle.dumps(it, at)) for at in range(2, 6)),
    ],
)
@pytest.mark.parametrize("width", [1, 16, 32])
def test_copies_and_pickles_are_equal(again: Callable[[Hashes], Hashes], width: int) -> None:
    for hashes in (Hashes([bytes([at]) * width for at in range(5)]), Hashes([])):
        found = again(hashes)
        assert type(found) is Hashes
        assert found == hashes


def test_product_repeats_the_hashes() -> None:
    plain = [b"ab", b"cd"]
    for times in (-1, 0, 1, 3):
        assert Hashes(plain) * times == times * Hashes(plain) == plain * times
    with pytest.raises(MemoryError):
        Hashes(plain) * 2**61


def test_sum_joins_hashes_of_one_width() -> None:
    left, right = [b"ab", b"cd"], [b"ef"]
    assert Hashes(left) + Hashes(right) == Hashes(left) + right == left + right
    assert Hashes([]) + left == Hashes(left) + Hashes([]) == left
    with pytest.raises(kvstow.ConfigError, match="block hash has 3 bytes"):
        Hashes(left) + Hashes([b"abc"])


@pytest.mark.parametrize(
    ("hashes", "message"),
    [
        ([b"ab", b"abc"], "block hash has 3 bytes"),
        ([b""], "block hash has 0 bytes"),
        ([bytes(33)], "block hash has 33 bytes"),
        ([b"ab", "cd"], "a block hash is of type <class 'str'>: pass bytes"),
        ((b"ab", 3), "a block hash is of type <class 'int'>: pass bytes"),
        (b"ab", "got <class 'bytes'>, not a sequence of block hashes"),
        (3, "got <class 'int'>, not a sequence of block hashes"),
        (None, "got <class 'NoneType'>, not a sequence of block hashes"),
    ],
)
def test_error_names_what_is_no_hash(hashes: Sequence[bytes], message: str) -> None:
    with pytest.raises(kvstow.ConfigError, match=message):
        Hashes(hashes)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash_cbor"])
@pytest.mark.parametrize("extra_keys", [None, [("key",), None, None]])
def test_hash_tokens_returns_hashes(algorithm: str, extra_keys: object) -> None:
    hashes = kvstow.hash_tokens(range(48), 16, algorithm=algorithm, extra_keys=extra_keys)  # type: ignore[arg-type]
    assert type(hashes) is Hashes
    assert len(hashes) == 3
    assert {len(digest) for digest in hashes} == {16 if algorithm == "xxhash_cbor" else 32}


def test_requests_that_share_hashes_stay_apart() -> None:
    """What one of them appends or drops reaches neither the others nor the caller's object."""
    print("seed", SEED)
    choose = random.Random(SEED)
    plain = draw(choose, 40, 32)
    given = Hashes(plain[:8])
    ledger = BlockLedger(100, [FullAttention(BLOCK)])
    tier = OffloadScheduler(100, [FullAttention(BLOCK)])
    expected: dict[str, list[bytes]] = {}
    for name in ("a", "b", "c"):
        ledger.add(name, given)
        tier.add(name, given)
        expected[name] = plain[:8]
    for _ in range(60):
        name = choose.choice("abc")
        more = Hashes(choose.choices(plain, k=choose.randrange(4)))
        ledger.extend(name, more)
        tier.extend(name, more)
        expected[name] = expected[name] + list(more)
        if choose.random() < 0.2:
            tier.truncate(name, choose.randrange(len(expected[name])))
            tier.finish(name)
            tier.add(name, ledger.known(name)[0])
        for each, hashes in expected.items():
            assert ledger.known(each)[0] == hashes
            assert ledger.num_hashes(each) == len(hashes)
    assert given == plain[:8]
    ledger.check()
    tier.check()


def test_everything_that_takes_hashes_takes_the_object() -> None:
    plain = [bytes([at]) * 16 for at in range(1, 9)]
    for form in (plain, tuple(plain), Hashes(plain)):
        pool = BlockPool(20)
        ids = pool.allocate(8)
        pool.cache(ids, form)
        assert pool.lookup(form).tolist() == ids.tolist()

        ledger = BlockLedger(20, [FullAttention(BLOCK)])
        ledger.add("a", form[:5])
        ledger.extend("a", form[5:])
        ledger.allocate("a", 8 * BLOCK)
        ledger.add("b", form)
        assert ledger.lookup("b", 8 * BLOCK).num_tokens == 8 * BLOCK

        tier = OffloadScheduler(20, [FullAttention(BLOCK)])
        tier.add("a", form[:2])
        tier.extend("a", form[2:])
        job = tier.store(["a"], [8 * BLOCK], ids, [0, 8])
        assert job is not None
        tier.complete(job.job_id)
        tier.add("b", form)
        assert tier.lookup("b", 0, 8 * BLOCK) == 8 * BLOCK

        curve = HitCurve()
        curve.add(form)
        curve.add(form)
        assert curve.hits([8]).tolist() == [8]


def test_hashes_of_another_width_are_refused() -> None:
    ledger = BlockLedger(20, [FullAttention(BLOCK)])
    ledger.add("a", Hashes([bytes(32)]))
    with pytest.raises(kvstow.ConfigError, match="block hash has 16 bytes"):
        ledger.add("b", Hashes([bytes(16)]))
    ledger.add("b", Hashes([bytes(16)])[1:])  # an empty list has no width
    ledger.extend("b", [bytes(32)])
    assert ledger.known("b")[0] == [bytes(32)]


def test_hashes_know_their_block_size() -> None:
    hashes = kvstow.hash_tokens(range(48), 16)
    assert hashes.block_size == 16
    more = kvstow.hash_tokens(range(16), 16, parent=hashes[-1])
    kept = [hashes[1:], hashes + more, hashes + list(hashes), Hashes(hashes), copy.copy(hashes)]
    kept += [pickle.loads(pickle.dumps(hashes)), Hashes(list(hashes), 16)]
    assert [it.block_size for it in kept] == [16] * len(kept)
    lost = [hashes[::2], hashes * 2]
    lost += [hashes + kvstow.hash_tokens(range(32), 32, parent=hashes[-1])]
    lost += [Hashes(list(hashes)), Hashes([])]
    assert [it.block_size for it in lost] == [None] * len(lost)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash_cbor"])
def test_hashes_know_whether_they_are_chained(algorithm: Any) -> None:
    hashes = kvstow.hash_tokens(range(48), 16, algorithm=algorithm)
    more = kvstow.hash_tokens(range(16), 16, algorithm=algorithm, parent=hashes[-1])
    chained = [hashes, more, hashes[1:], hashes + more, Hashes(hashes), Hashes(hashes, 8)]
    assert all(it.is_chained for it in chained)
    plain = list(hashes)
    unknown = [Hashes(plain), Hashes(plain, 16), hashes[::2], hashes * 2, hashes + plain]
    unknown += [Hashes(plain, 16)[1:], hashes + Hashes(plain, 16)[:0], Hashes(plain, 16) + more]
    assert not any(it.is_chained for it in unknown)


@pytest.mark.parametrize("block_size", [8, 32])
def test_accounting_refuses_hashes_of_another_block_size(block_size: int) -> None:
    """Or a block would be found by the hash of other tokens than it holds."""
    groups = [FullAttention(BLOCK), FullAttention(2 * BLOCK)]
    ledger, scheduler = BlockLedger(9, groups), OffloadScheduler(9, groups)
    right, wrong = (kvstow.hash_tokens(range(64), size) for size in (BLOCK, block_size))
    expected = f"the hashes are of {block_size} tokens each, those of these groups of 16: pass 16"
    for accounting in (ledger, scheduler):
        with pytest.raises(kvstow.ConfigError, match=expected):
            accounting.add("a", wrong)
        accounting.add("a", right)
        with pytest.raises(kvstow.ConfigError, match=expected):
            accounting.extend("a", wrong)
    assert ledger.num_hashes("a") == 4
    ledger.add("b", list(wrong))  # plain bytes know nothing of it
