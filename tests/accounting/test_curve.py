"""`HitCurve` and `clairvoyant_hits` from Python: real traces, kinds of keys, and bad input."""

from __future__ import annotations

import doctest
import os
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from benches.policies import Requests

import kvstow
from kvstow import ConfigError, HitCurve, clairvoyant_hits
from kvstow.replay import BUNDLED_TRACE, read_trace

MIB = 2**20


@cache
def bundled() -> Requests:
    return Requests(read_trace(BUNDLED_TRACE), full_blocks=False)


def flat(prompts: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.uint64], list[int]]:
    """All keys, and where each request begins."""
    keys = np.fromiter(chain.from_iterable(prompts), dtype=np.uint64)
    return keys, list(accumulate(map(len, prompts), initial=0))


def whole_trace(name: str) -> tuple[npt.NDArray[np.uint64], list[int]]:
    """A shared trace as chained ids; content ids are chained by path."""
    path = Path(os.environ["KVSTOW_TRACES"]) / name
    is_content = "ragpulse" in name
    prompts: list[Sequence[int]] = []
    for request in read_trace(path, chain=is_content).requests:
        ids: Sequence[int] = request.trace_ids
        if is_content:
            digests = kvstow.hash_tokens(ids, 1, algorithm="xxhash_cbor")
            ids = [int.from_bytes(digest[:8]) for digest in digests]
        prompts.append(ids)
    return flat(prompts)


needs_traces = pytest.mark.skipif(
    "KVSTOW_TRACES" not in os.environ, reason="KVSTOW_TRACES names no folder with whole traces"
)


@pytest.mark.parametrize("capacity", [30, 100, 250, 1000, 5000, 20_000])
def test_curve_hits_what_the_scheduler_hits(capacity: int) -> None:
    """30 and 100 slots are fewer than the longest prompt has blocks."""
    curve = HitCurve()
    for prompt in bundled().prompts:
        curve.add(prompt)
    assert max(map(len, bundled().prompts)) > 100
    assert curve.num_lookups == bundled().num_blocks
    hit_ratio = curve.hits([capacity])[0] / curve.num_lookups * 100
    assert hit_ratio == bundled().hit_ratio("lru", capacity)


def test_curve_of_ids_equals_curve_of_hashes() -> None:
    ids = [request.trace_ids for request in read_trace(BUNDLED_TRACE).requests]
    of_ids, of_hashes = HitCurve(), HitCurve()
    of_ids.add_all(*flat(ids))
    for prompt in bundled().prompts:
        of_hashes.add(prompt)
    capacities = np.arange(of_ids.largest_capacity + 2)
    np.testing.assert_array_equal(of_ids.hits(capacities), of_hashes.hits(capacities))
    assert of_ids.hits(capacities)[-1] == of_ids.num_lookups - of_ids.num_unique


@pytest.mark.parametrize("dtype", [np.uint64, np.int64, np.int32, ">u4"])
def test_any_integer_array_is_a_list_of_keys(dtype: npt.DTypeLike) -> None:
    expected, curve = HitCurve(), HitCurve()
    expected.add_all([5, 6, 7, 5, 6], [0, 3, 5])
    curve.add_all(np.array([5, 6, 7, 5, 6], dtype=dtype), np.array([0, 3, 5]))
    assert curve.hits([1, 2, 3]).tolist() == expected.hits([1, 2, 3]).tolist() == [1, 2, 2]


def test_keys_use_all_64_bits() -> None:
    curve = HitCurve()
    curve.add([2**64 - 1, 2**63])
    curve.add([2**64 - 1, 2**63 - 1])
    assert (curve.num_unique, curve.hits([9]).tolist()) == (3, [1])


def test_request_without_blocks_counts_as_a_request() -> None:
    curve = HitCurve()
    curve.add([])
    curve.add([b"hash"])
    assert (curve.num_requests, curve.num_lookups, curve.largest_capacity) == (2, 1, 0)
    assert curve.hits([]).tolist() == clairvoyant_hits([], [0], []).tolist() == []


@pytest.mark.parametrize("name", ["HitCurve", "clairvoyant_hits", "salted_ids"])
def test_examples_of_the_docstrings_hold(name: str) -> None:
    tested = getattr(kvstow, name)
    example = doctest.DocTestParser().get_doctest(tested.__doc__, vars(kvstow), name, None, None)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


def test_turns_halve_old_lookups_and_forget_unused_keys() -> None:
    curve = HitCurve()
    assert curve.hit_ratios([0, 9]).tolist() == [0, 0]
    curve.insert([b"one", b"two"])
    curve.lookup([b"one", b"two"], num_local=1)
    assert curve.hit_ratios([0, 1, 2]).tolist() == [0.5, 0.5, 1]
    curve.turn(1)
    curve.lookup([b"six", b"ten"])
    # One of two old lookups at weight 1/2, none of two new ones.
    assert curve.hit_ratios([0, 2]).tolist() == [0.5 / 3, 1 / 3]
    assert curve.num_unique == 2
    curve.turn(1)
    assert (curve.num_unique, curve.num_lookups) == (0, 4)
    curve.insert([b"one"])
    curve.clear()
    curve.lookup([b"one"])
    assert curve.hit_ratios([9]).tolist() == [0.5 / 2.5]


@pytest.mark.parametrize("call", ["lookup", "insert"])
def test_parts_of_a_request_refuse_what_the_whole_refuses(call: str) -> None:
    curve = HitCurve()
    for keys in ([-1], [1, b"hash"], None):
        with pytest.raises(ConfigError):
            getattr(curve, call)(keys)
    getattr(curve, call)([b"hash"])
    with pytest.raises(ConfigError, match="one kind"):
        getattr(curve, call)([1])


def test_sampled_curve_is_within_two_points_and_reports_its_error() -> None:
    exact = HitCurve()
    keys, offsets = flat([request.trace_ids for request in read_trace(BUNDLED_TRACE).requests])
    exact.add_all(keys, offsets)
    capacities = np.linspace(0.05, 2, 40) * exact.num_unique
    expected = exact.hits(capacities.astype(np.int64)) / exact.num_lookups
    for seed in range(10):
        sampled = HitCurve(max_keys=4000, seed=seed)
        sampled.add_all(keys, offsets)
        assert 0.05 < sampled.rate < 1
        assert sampled.num_keys <= 4000
        assert sampled.num_unique == pytest.approx(exact.num_unique, rel=0.1)
        found = sampled.hits(capacities.astype(np.int64)) / sampled.num_lookups
        assert np.abs(found - expected).max() < 0.02, f"seed {seed}"
        errors = sampled.errors(capacities.astype(np.int64))
        assert 0 < errors[-1] < 0.02
    assert not exact.errors(capacities.astype(np.int64)).any()


@needs_traces
@pytest.mark.parametrize(
    ("name", "num_unique", "known"),
    [
        (
            "mooncake_conversation_trace.jsonl.gz",
            182_790,
            {
                1_000: 0.0445,
                9_999: 61_044,
                10_000: 61_046,
                30_000: 0.3257,
                100_000: 0.3637,
                200_000: 105_710,
            },
        ),
        (
            "mooncake_synthetic_trace.jsonl.gz",
            43_924,
            {1_000: 0.0841, 10_000: 0.4239, 30_000: 0.6242, 100_000: 0.6396, 200_000: 0.6396},
        ),
        ("ragpulse_blocks512.jsonl.gz", 58_727, {200_000: 71_583 - 58_727}),
    ],
)
def test_whole_traces_hit_what_is_known(
    name: str, num_unique: int, known: dict[int, float]
) -> None:
    """Hit blocks, or their share to four digits; 32 MiB are enough to be exact."""
    keys, offsets = whole_trace(name)
    curve = HitCurve(max_bytes=32 * MIB)
    curve.add_all(keys, offsets)
    assert (curve.rate, curve.num_unique) == (1.0, num_unique)
    assert curve.memory_bytes <= 32 * MIB
    bounds = clairvoyant_hits(keys, offsets, list(known))
    hits = curve.hits(list(known))
    for found, expected, bound in zip(hits, known.values(), bounds, strict=True):
        assert expected == (found if expected > 1 else round(found / len(keys), 4))
        assert found <= bound <= hits[-1]


@pytest.mark.parametrize(
    "keys",
    [
        None,
        7,
        "text",
        b"bytes",
        [1.5],
        [-1],
        [2**64],
        ["text"],
        [None],
        [1, b"hash"],
        [b"hash", 1],
        [b"hash", b"longer"],
        [b""],
        [b"x" * 33],
        np.array([-1]),
        np.array([1.0]),
        np.array([[1]]),
        np.array([True]),
    ],
)
def test_keys_that_are_none_are_refused(keys: object) -> None:
    curve = HitCurve()
    with pytest.raises(ConfigError):
        curve.add(keys)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        curve.add_all(keys, [0, 1])  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        clairvoyant_hits(keys, [0, 1], [1])  # type: ignore[arg-type]
    assert (curve.num_requests, curve.num_lookups) == (0, 0)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        (-1, "an integer out of range"),
        (2**64, "an integer out of range"),
        ("a", r"of type .*str.*: bytes\.fromhex\(text\)"),
    ],
)
def test_error_for_a_key_says_what_is_wrong_with_it(key: object, wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"^key 1 is {wrong}"):
        HitCurve().add([1, key])  # type: ignore[arg-type]


def test_kinds_of_keys_do_not_mix_in_one_curve() -> None:
    curve = HitCurve()
    curve.add([b"hash"])
    for other in ([1], [b"wider"]):
        with pytest.raises(ConfigError):
            curve.add(other)
        with pytest.raises(ConfigError):
            curve.add_all(other, [0, 1])
    assert curve.num_requests == 1


@pytest.mark.parametrize("offsets", [[], [0], [1, 3], [0, 2], [0, 2, 1, 3], [0, -1, 3], None])
def test_offsets_that_do_not_fit_are_refused(offsets: object) -> None:
    with pytest.raises(ConfigError):
        HitCurve().add_all([1, 2, 3], offsets)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        clairvoyant_hits([1, 2, 3], offsets, [1])  # type: ignore[arg-type]


def test_bound_of_keys_that_are_not_chained_is_refused() -> None:
    with pytest.raises(ConfigError, match="chain the keys"):
        clairvoyant_hits([1, 2, 3, 2], [0, 2, 4], [1])


@pytest.mark.parametrize("bounds", [{"max_keys": 63}, {"max_bytes": 1000}, {"max_keys": -1}])
def test_bounds_that_are_too_small_are_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        HitCurve(**bounds)


def test_ends_that_descend_are_refused() -> None:
    curve = HitCurve()
    with pytest.raises(ConfigError, match="ends descend: pass them in ascending order"):
        curve.lookup([1, 2], ends=[2, 1])
    assert curve.num_requests == 0


def test_memory_that_no_machine_has_is_refused() -> None:
    for bounds in ({"max_keys": 2**60}, {"max_bytes": 2**62}):
        with pytest.raises(ConfigError, match="memory"):
            HitCurve(**bounds)
