"""Arguments of a wrong type, shape or range raise an error that names them, and change nothing.

The last test draws arguments at random.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.accounting.worlds import (
    DIGEST,
    NUM_BLOCKS,
    WIDTH,
    LedgerWorld,
    PoolWorld,
    TierWorld,
    World,
    names,
    refused,
)

from kvstow import (
    ConfigError,
    InvalidBlock,
    KvstowError,
    OffloadScheduler,
    StateError,
)
from kvstow._core import BlockCopier

BEYOND = f"ids go from 0 to {NUM_BLOCKS - 1}"

BAD_IDS = [
    (ConfigError, "float64.*integer", np.array([1.0])),
    (ConfigError, "float64.*integer", np.array([])),
    (ConfigError, "bool.*integer", np.array([True, False])),
    (ConfigError, "True", list(np.array([True, False]))),
    (ConfigError, "object.*integer", np.array([1], object)),
    (ConfigError, "U1.*integer", np.array(["1"])),
    (ConfigError, "timedelta64.*integer", np.array([1], "timedelta64[s]")),
    (ConfigError, r"shape \[1, 2\]", np.array([[1, 2]])),
    (ConfigError, r"shape \[\]", np.array(1)),
    (ConfigError, r"1\.0", [1.0]),
    (ConfigError, "'1'", ["1"]),
    (ConfigError, "str", "12"),
    (ConfigError, "bytes", b"12"),
    (ConfigError, "None", [None]),
    (ConfigError, "NoneType", None),
    (ConfigError, "int", 1),
    (ConfigError, "set", {1}),
    (ConfigError, r"\[1\]", [[1]]),
    (InvalidBlock, f"-1 .*{BEYOND}", [-1]),
    (InvalidBlock, f"{NUM_BLOCKS} .*{BEYOND}", [NUM_BLOCKS]),
    (InvalidBlock, f"{NUM_BLOCKS} .*{BEYOND}", [1, 3, 4, NUM_BLOCKS]),
    (InvalidBlock, f"{NUM_BLOCKS} .*{BEYOND}", range(1, NUM_BLOCKS + 1)),
    # Cut to 32 bits, each of these would be a valid id.
    (InvalidBlock, f"{2**32 + 1} .*{BEYOND}", [2**32 + 1]),
    (InvalidBlock, f"{2**32 + 1} .*{BEYOND}", np.array([2**32 + 1])),
    (InvalidBlock, f"{2**64 + 1} .*{BEYOND}", [2**64 + 1]),
    (InvalidBlock, f"{1 - 2**64} .*{BEYOND}", [1 - 2**64]),
    (InvalidBlock, f"{2**31} .*{BEYOND}", [2**31]),
    (InvalidBlock, f"{2**63} .*{BEYOND}", [2**63]),
    (InvalidBlock, f"-1 .*{BEYOND}", np.array([-1], np.int32)),
    (InvalidBlock, f"{2**32 - 1} .*{BEYOND}", np.array([2**32 - 1], np.uint32)),
    (InvalidBlock, f"{2**64 - 1} .*{BEYOND}", np.array([2**64 - 1], np.uint64)),
    (InvalidBlock, f"256 .*{BEYOND}", np.array([256], ">i2")),
]
BAD_HASHES = [
    ("0 bytes.* 1 to 32", [b""]),
    ("33 bytes.* 1 to 32", [b"x" * 33]),
    (f"{WIDTH + 1} bytes.* {WIDTH}", [DIGEST, b"x" * (WIDTH + 1)]),
    (f"{WIDTH - 1} bytes.* {WIDTH}", [b"x" * (WIDTH - 1)]),
    ("str", [DIGEST, "x"]),
    ("NoneType", [None]),
    ("int", [1]),
    ("bytearray", [bytearray(DIGEST)]),
    ("str", "x" * WIDTH),
    ("bytes", DIGEST),
    ("NoneType", None),
    ("set", {DIGEST}),
    ("ndarray", np.array([DIGEST])),
]
BAD_COUNTS = [
    (ConfigError, "-1", -1),
    (ConfigError, str(2**64), 2**64),
    (TypeError, "float", 1.0),
    (TypeError, "str", "1"),
    (TypeError, "None", None),
]
BAD_GROUPS = [
    (ConfigError, "-1", -1),
    (ConfigError, str(2**32 - 1), 2**32 - 1),
    (ConfigError, str(2**32), 2**32),
    (ConfigError, str(2**64), 2**64),
    (TypeError, "float", 1.0),
]
with_bad_ids = pytest.mark.parametrize(("error", "says", "ids"), BAD_IDS)
with_bad_hashes = pytest.mark.parametrize(("says", "hashes"), BAD_HASHES)
with_bad_counts = pytest.mark.parametrize(("error", "says", "count"), BAD_COUNTS)
with_bad_groups = pytest.mark.parametrize(("error", "says", "group"), BAD_GROUPS)


@pytest.mark.parametrize("name", ["touch", "free", "pin", "unpin", "evict", "ref_counts"])
@with_bad_ids
def test_pool_refuses_wrong_ids(name: str, error: type[Exception], says: str, ids: object) -> None:
    refused(PoolWorld, lambda w: getattr(w.pool, name)(ids), error, says)


@pytest.mark.parametrize("name", ["pin", "unpin", "evict", "ref_counts"])
@with_bad_ids
def test_the_pool_of_a_ledger_refuses_wrong_ids(
    name: str, error: type[Exception], says: str, ids: object
) -> None:
    refused(LedgerWorld, lambda w: getattr(w.ledger.pool, name)(ids), error, says)


@with_bad_hashes
def test_pool_refuses_wrong_hashes(says: str, hashes: list[bytes]) -> None:
    refused(PoolWorld, lambda w: w.pool.lookup(hashes), ConfigError, says)
    refused(PoolWorld, lambda w: w.pool.cache([6], hashes), ConfigError, says)


@with_bad_hashes
def test_ledger_refuses_wrong_hashes(says: str, hashes: list[bytes]) -> None:
    refused(LedgerWorld, lambda w: w.ledger.add("x", hashes), ConfigError, says)
    refused(LedgerWorld, lambda w: w.ledger.extend("again", hashes), ConfigError, says)


@with_bad_hashes
def test_scheduler_refuses_wrong_hashes(says: str, hashes: list[bytes]) -> None:
    refused(TierWorld, lambda w: w.tier.add("x", hashes), ConfigError, says)
    refused(TierWorld, lambda w: w.tier.extend("fresh", hashes), ConfigError, says)


@with_bad_counts
def test_pool_refuses_wrong_counts(error: type[Exception], says: str, count: int) -> None:
    refused(PoolWorld, lambda w: w.pool.allocate(count), error, says)


@pytest.mark.parametrize("name", ["lookup", "cache", "rewind", "block_table", "allocate"])
@with_bad_counts
def test_ledger_refuses_wrong_counts(
    name: str, error: type[Exception], says: str, count: int
) -> None:
    refused(LedgerWorld, lambda w: getattr(w.ledger, name)("running", count), error, says)


@pytest.mark.parametrize(
    "name",
    [
        "num_external_tokens",
        "num_lookahead_tokens",
        "reserve",
        "num_in_flight_tokens",
        "must_fit_tokens",
    ],
)
@pytest.mark.parametrize(
    ("error", "says", "count"), [*BAD_COUNTS[:-1], (ConfigError, str(2**63), 2**63)]
)
def test_ledger_refuses_wrong_optional_counts(
    name: str, error: type[Exception], says: str, count: object
) -> None:
    def call(world: LedgerWorld) -> object:
        return world.ledger.allocate("waiting", 1, **{name: count})  # type: ignore[arg-type]

    refused(LedgerWorld, call, error, says)


@with_bad_counts
def test_scheduler_refuses_wrong_counts(error: type[Exception], says: str, count: int) -> None:
    refused(TierWorld, lambda w: w.tier.lookup("fresh", count, 9), error, says)
    refused(TierWorld, lambda w: w.tier.lookup("holding", 0, count), error, says)
    refused(TierWorld, lambda w: w.tier.load("holding", count, [[7]]), error, says)


@with_bad_groups
def test_pool_refuses_wrong_groups(error: type[Exception], says: str, group: int) -> None:
    refused(PoolWorld, lambda w: w.pool.cache([6], [DIGEST], group=group), error, says)
    refused(PoolWorld, lambda w: w.pool.lookup([DIGEST], group=group), error, says)


@pytest.mark.parametrize(
    ("says", "counts"),
    [
        ("-1", [1, -1]),
        (r"1\.0", [1, 1.0]),
        ("str", "11"),
        ("NoneType", None),
        ("float64", np.ones(2)),
        (r"shape \[2, 1\]", np.ones((2, 1), int)),
        (str(2**63), [1, 2**63]),
        (str(2**63 - 1), [1, 2**63 - 1]),
    ],
)
def test_a_step_refuses_wrong_counts(says: str, counts: list[int]) -> None:
    refused(
        LedgerWorld,
        lambda w: w.ledger.allocate_step(["running", "waiting"], counts),
        ConfigError,
        says,
    )


@pytest.mark.parametrize(
    ("error", "says", "computed", "block_ids", "offsets"),
    [
        (ConfigError, "2 requests, 2 .* 2 offsets", [4, 4], [9, 10], [0, 2]),
        (ConfigError, "2 requests, 2 .* 4 offsets", [4, 4], [9, 10], [0, 1, 2, 2]),
        (ConfigError, "2 requests, 1 .* 3 offsets", [4], [9, 10], [0, 1, 2]),
        (ConfigError, "2 requests, 2 .* 0 offsets", [4, 4], [9, 10], []),
        (ConfigError, "offsets .* 2 block", [4, 4], [9, 10], [0, 1, 1]),
        (ConfigError, "offsets .* 2 block", [4, 4], [9, 10], [0, 1, 3]),
        (ConfigError, "offsets .* from 0", [4, 4], [9, 10], [1, 1, 2]),
        (ConfigError, "offsets .* rise", [4, 4], [9, 10], [0, 3, 2]),
        (ConfigError, "-1", [4, 4], [9, 10], [0, -1, 2]),
        (ConfigError, "float64", [4, 4], [9, 10], np.arange(3.0)),
        (ConfigError, "-4", [4, -4], [9, 10], [0, 1, 2]),
        (ConfigError, r"4\.5", [4, 4.5], [9, 10], [0, 1, 2]),
        (ConfigError, "float64", [4, 4], np.ones(2), [0, 1, 2]),
        (ConfigError, r"shape \[2, 1\]", [4, 4], np.ones((2, 1), int), [0, 1, 2]),
        (InvalidBlock, "block 0 .*null", [4, 4], [9, 0], [0, 1, 2]),
        (InvalidBlock, "block -1 ", [4, 4], [9, -1], [0, 1, 2]),
        (InvalidBlock, f"block {2**31} ", [4, 4], [9, 2**31], [0, 1, 2]),
        (InvalidBlock, f"block {2**32 + 9} ", [4, 4], [9, 2**32 + 9], [0, 1, 2]),
    ],
)
def test_store_refuses_wrong_lists(
    error: type[Exception],
    says: str,
    computed: list[int],
    block_ids: list[int],
    offsets: list[int],
) -> None:
    refused(
        TierWorld,
        lambda w: w.tier.store(["fresh", "storing"], computed, block_ids, offsets),
        error,
        says,
    )


@pytest.mark.parametrize(("says", "id"), [("surrogate", "\ud800"), ("int", 3), ("None", None)])
def test_a_request_id_that_is_not_a_str_is_refused(says: str, id: str) -> None:
    error = ConfigError if says == "surrogate" else TypeError
    refused(LedgerWorld, lambda w: w.ledger.add(id, [DIGEST]), error, says)
    refused(TierWorld, lambda w: w.tier.add(id, [DIGEST]), error, says)
    # In a list of ids, the error is about the list.
    refused(LedgerWorld, lambda w: w.ledger.allocate_step([id], [1]), ConfigError, says)
    refused(TierWorld, lambda w: w.tier.store([id], [4], [9], [0, 1]), ConfigError, says)


class Liar(Sequence[Any]):
    """An empty sequence that claims to be too long for any memory."""

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: Any) -> Any:
        raise IndexError(index)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (ConfigError, lambda tier: tier.load("fresh", 4, Liar())),
        (StateError, lambda tier: tier.load("fresh", 4, [[1]], local_ids=Liar())),
        (ConfigError, lambda tier: tier.store(["fresh"], [4], [9], [0, 1], new_hashes=Liar())),
    ],
)
def test_no_memory_is_reserved_for_what_a_sequence_claims(
    error: type[Exception], call: Callable[[OffloadScheduler], object]
) -> None:
    refused(TierWorld, lambda w: call(w.tier), error, "")
    BlockCopier(Liar(), 1, np.zeros(8, np.uint8), 8, 8, 1)


# Numbers at each bound of a conversion, and values that are no numbers.
at_bounds = [
    sign * 2**bits + off for bits in (31, 32, 63, 64) for sign in (1, -1) for off in (-1, 0)
]
ints = st.integers(-2, NUM_BLOCKS + 2) | st.sampled_from(at_bounds)
texts = st.sampled_from(["running", "waiting", "fresh", "holding"]) | st.text(max_size=2)
single = st.one_of(st.none(), st.floats(), st.binary(max_size=2), texts, ints, st.booleans())
arrays = st.builds(
    np.array,
    st.lists(st.integers(-2, NUM_BLOCKS), max_size=3),
    st.sampled_from(["i1", "i4", ">i8", "f4"]),
)
argument = st.one_of(
    single,
    arrays,
    *(st.lists(item, max_size=3) for item in (single, ints, texts, st.lists(ints, max_size=2))),
    st.lists(st.binary(max_size=33) | st.sampled_from(names(1, 4)), max_size=3),
)

PARAMETERS: dict[type[World], dict[str, tuple[int, list[str]]]] = {
    PoolWorld: {
        **{name: (1, []) for name in ("allocate", "touch", "free", "pin", "unpin", "evict")},
        "cache": (2, ["group"]),
        "lookup": (1, ["group"]),
        "ref_counts": (1, []),
    },
    LedgerWorld: {
        "add": (2, ["tokens", "extra_keys"]),
        "extend": (2, ["tokens", "extra_keys"]),
        "lookup": (2, []),
        "allocate": (2, ["hit", "num_external_tokens", "reserve", "must_fit_tokens"]),
        "allocate_step": (2, ["num_lookahead_tokens", "num_in_flight_tokens"]),
        "cache": (2, []),
        "rewind": (2, []),
        "block_table": (1, ["group"]),
        "free": (1, []),
    },
    TierWorld: {
        "add": (2, []),
        "extend": (2, []),
        "lookup": (3, []),
        "load": (3, []),
        "release": (1, []),
        "store": (4, []),
        "complete": (1, ["ok"]),
        "finish": (1, []),
    },
}


@pytest.mark.parametrize("kind", PARAMETERS)
@given(data=st.data())
def test_random_arguments_raise_only_kvstow_errors_and_change_nothing(
    kind: type[World], data: st.DataObject
) -> None:
    world = kind()
    target = next(iter(vars(world).values()))
    for name in data.draw(st.lists(st.sampled_from(list(PARAMETERS[kind])), max_size=6)):
        num, optional = PARAMETERS[kind][name]
        args = [data.draw(argument) for _ in range(num)]
        kwargs = {key: data.draw(single) for key in optional if data.draw(st.booleans())}
        world.look()  # takes the events of the calls before
        before = world.look()
        try:
            getattr(target, name)(*args, **kwargs)
        except (KvstowError, TypeError):
            assert world.look() == before
        world.check()
