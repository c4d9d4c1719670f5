"""`BlockPool` against the naive pool, and the forms of ids and hashes that it accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.accounting.model import ModelPool, Refused, flat

from kvstow import BlockPool, InvalidBlock, KvstowError

Ints: TypeAlias = Sequence[int] | npt.NDArray[np.integer]

MAX_BLOCKS = 12
NUM_GROUPS = 2
NAMES = [bytes([name]) * 3 for name in range(6)]


def read_only(ids: Sequence[int]) -> npt.NDArray[np.integer]:
    array = np.array(ids, np.int32)
    array.flags.writeable = False
    return array


def unaligned(ids: Sequence[int]) -> npt.NDArray[np.integer]:
    return np.frombuffer(b"?" + np.array(ids, np.int32).tobytes(), np.int32, offset=1)


FORMS: dict[str, Callable[[Sequence[int]], Ints]] = {
    "list": list,
    "tuple": tuple,
    "list of numpy ints": lambda ids: [np.int16(id) for id in ids],  # type: ignore[misc]
    "int32": lambda ids: np.array(ids, np.int32),
    "int64": lambda ids: np.array(ids, np.int64),
    "uint8": lambda ids: np.array(ids, np.uint8),
    "uint64": lambda ids: np.array(ids, np.uint64),
    "big-endian int32": lambda ids: np.array(ids, ">i4"),
    "big-endian int64": lambda ids: np.array(ids, ">i8"),
    "strided": lambda ids: np.repeat(np.array(ids, np.int32), 3)[::3],
    "reversed": lambda ids: np.array(ids[::-1], np.int64)[::-1],
    "column": lambda ids: np.array([ids, ids], np.int32).T[:, 1],
    "read-only": read_only,
    "unaligned": unaligned,
}

some_ids = st.lists(st.integers(-1, MAX_BLOCKS), max_size=4)
some_names = st.lists(st.sampled_from(NAMES), max_size=4)
groups = st.integers(0, NUM_GROUPS - 1)


class PoolMachine(RuleBasedStateMachine):
    """Drive both with each op, then compare all observable state."""

    @initialize(num_blocks=st.integers(2, MAX_BLOCKS))
    def build(self, num_blocks: int) -> None:
        self.real = BlockPool(num_blocks, events=True)
        self.model = ModelPool(num_blocks)

    def both(self, name: str, *args: object, **kwargs: object) -> None:
        try:
            expected = getattr(self.model, name)(*args, **kwargs)
        except Refused:
            with pytest.raises(KvstowError):
                getattr(self.real, name)(*args, **kwargs)
            return
        got = getattr(self.real, name)(*args, **kwargs)
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == expected

    @rule(n=st.integers(0, 6))
    def allocate(self, n: int) -> None:
        self.both("allocate", n)

    @rule(name=st.sampled_from(["touch", "free", "pin", "unpin", "evict"]), ids=some_ids)
    def by_ids(self, name: str, ids: list[int]) -> None:
        self.both(name, ids)

    @rule(data=st.data(), num_kept=st.integers(0, 4))
    def free_what_is_held(self, data: st.DataObject, num_kept: int) -> None:
        held = [id for id, refs in enumerate(self.model.refs) for _ in range(refs)]
        self.both("free", data.draw(st.permutations(held))[num_kept:])

    @rule(data=st.data(), names=some_names, group=groups)
    def cache_what_is_held(self, data: st.DataObject, names: list[bytes], group: int) -> None:
        held = [id for id, refs in enumerate(self.model.refs) if refs and id not in self.model.held]
        ids = data.draw(st.permutations(held))[: len(names)]
        self.both("cache", ids, names[: len(ids)], group=group)

    @rule(ids=some_ids, names=some_names, group=groups)
    def cache(self, ids: list[int], names: list[bytes], group: int) -> None:
        self.both("cache", ids, names, group=group)

    @rule(names=some_names, group=groups)
    def lookup(self, names: list[bytes], group: int) -> None:
        self.both("lookup", names, group=group)

    @rule()
    def reset(self) -> None:
        self.both("reset")

    @invariant()
    def equal(self) -> None:
        real, model = self.real, self.model
        real.check()
        assert real.num_free == model.num_free
        assert real.num_cached == len(model.held)
        assert real.free_order().tolist() == model.queue
        assert real.ref_counts(range(real.num_blocks)).tolist() == model.refs
        for group in range(NUM_GROUPS):
            for name in NAMES:
                found = real.lookup([name], group=group).tolist()
                assert found == model.lookup([name], group), (name, group)
        assert flat(real.take_events()) == model.events
        model.events.clear()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=200, stateful_step_count=30)


@pytest.mark.parametrize("form", FORMS)
def test_ids_are_accepted_in_any_integer_form(form: str) -> None:
    pool = BlockPool(8)
    allocated = pool.allocate(6).tolist()
    ids = FORMS[form]([5, 2, 3])
    pool.touch(ids)
    pool.pin(ids)
    pool.unpin(ids)
    pool.cache(ids, NAMES[:3])
    assert pool.lookup(NAMES[:4]).tolist() == [5, 2, 3]
    assert pool.ref_counts(ids).tolist() == [2, 2, 2]
    pool.free(ids)
    pool.free(allocated)
    # Blocks without a key go to the head, blocks with a key to the tail, both in order.
    assert pool.free_order().tolist() == [1, 4, 6, 7, 2, 3, 5]
    pool.evict(ids)
    assert pool.num_cached == 0
    pool.check()


def test_num_evicted_counts_only_allocations() -> None:
    pool = BlockPool(6)
    pool.cache(pool.allocate(4), NAMES[:4])
    assert pool.num_evicted == 0
    pool.free([1, 2, 3, 4])
    pool.evict([1])
    pool.allocate(1)  # the block that never held a key
    pool.allocate(3)
    assert pool.num_evicted == 2


@pytest.mark.parametrize("form", [form for form in FORMS if "numpy" not in form])
def test_empty_ids_are_accepted_in_any_form(form: str) -> None:
    pool = BlockPool(4)
    none = FORMS[form]([])
    for call in (pool.touch, pool.free, pool.pin, pool.unpin, pool.evict):
        call(none)
    pool.cache(none, ())
    assert pool.ref_counts(none).tolist() == []
    pool.check()


def test_ranges_and_repeated_ids_are_accepted() -> None:
    pool = BlockPool(8)
    assert pool.ref_counts(range(8)).tolist() == [0] * 8
    pool.touch(np.broadcast_to(np.int32(3), 2))
    assert pool.ref_counts([3]).tolist() == [2]
    pool.free(range(3, 4))
    assert pool.ref_counts([3]).tolist() == [1]


def test_returned_ids_are_int32_arrays_that_the_caller_owns() -> None:
    pool = BlockPool(8)
    allocated = pool.allocate(3)
    pool.cache(allocated, NAMES[:3])
    outputs = [allocated, pool.lookup(NAMES[:3]), pool.free_order(), pool.ref_counts(allocated)]
    for array in outputs:
        assert (array.dtype, array.ndim, len(array) > 0) == (np.dtype(np.int32), 1, True)
        array[:] = 7
    assert pool.lookup(NAMES[:3]).tolist() == [1, 2, 3]
    assert pool.free_order().tolist() == [4, 5, 6, 7]
    pool.check()


@pytest.mark.parametrize("width", [1, 16, 31, 32])
@pytest.mark.parametrize("form", [list, tuple])
def test_hashes_of_every_width_are_accepted_in_lists_and_tuples(
    width: int, form: Callable[[list[bytes]], Sequence[bytes]]
) -> None:
    pool = BlockPool(4, events=True)
    # Digests differ in their last byte and begin with zeros, so lost or added bytes show.
    digests = [b"\0" * (width - 1) + bytes([last]) for last in range(3)]
    pool.cache(pool.allocate(3), form(digests))
    assert pool.lookup(form(digests)).tolist() == [1, 2, 3]
    assert pool.lookup(form(digests[2:])).tolist() == [3]
    (stored,) = pool.take_events()
    assert flat([stored]) == [
        ("stored", digest, 0, parent)
        for digest, parent in zip(digests, [None, *digests[:2]], strict=True)
    ]


def test_allocate_skips_a_pinned_block_which_keeps_its_place() -> None:
    pool = BlockPool(6)
    pool.pin([1, 3])
    assert (pool.num_free, pool.free_order().tolist()) == (3, [1, 2, 3, 4, 5])
    assert pool.allocate(2).tolist() == [2, 4]
    pool.pin([3])
    pool.unpin([1, 3])
    assert (pool.num_free, pool.free_order().tolist()) == (2, [1, 3, 5])
    assert not pool.reset()
    pool.unpin([3])
    assert pool.allocate(3).tolist() == [1, 3, 5]


def test_lookup_returns_the_oldest_duplicate_that_is_still_cached() -> None:
    pool = BlockPool(6, events=True)
    ids = pool.allocate(3).tolist()
    for id in reversed(ids):
        pool.cache([id], NAMES[:1])
    for oldest in reversed(ids):
        assert pool.lookup(NAMES[:1]).tolist() == [oldest]
        pool.evict([oldest])
    assert pool.lookup(NAMES[:1]).tolist() == []
    # Duplicates cause no events.
    assert flat(pool.take_events()) == [("stored", NAMES[0], 0, None), ("removed", NAMES[0], 0)]


def test_a_pool_without_events_records_none() -> None:
    pool = BlockPool(4)
    pool.cache(pool.allocate(2), NAMES[:2])
    assert pool.take_events() == []


def test_refused_publication_keeps_the_keys_that_were_there() -> None:
    pool = BlockPool(8)
    table = pool.allocate(3)
    assert table is not None
    names = [bytes([name] * 8) for name in range(4)]
    pool.cache(table[:1], names[:1])
    pool.cache(table[2:], names[3:])
    with pytest.raises(InvalidBlock, match="holds another key"):
        pool.cache(table, names[:3])
    assert pool.lookup(names[:2]).tolist() == table[:1].tolist()
    assert pool.num_cached == 2
    pool.check()
