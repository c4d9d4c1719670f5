"""Counts of pins and blocks against naive counts."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvstow import BlockLedger, BlockPool, FullAttention, SlidingWindow

SIZES = st.sampled_from([4, 8])
FULL = st.builds(FullAttention, SIZES)
WINDOWS = st.builds(SlidingWindow, SIZES, st.integers(1, 20))
GROUPS = st.lists(FULL | WINDOWS, min_size=1, max_size=3)


def num_read(group: FullAttention | SlidingWindow, num_tokens: int, num_computed: int) -> int:
    """Count blocks with a token that a token after `num_computed` reads or writes."""
    window = group.window if isinstance(group, SlidingWindow) else num_tokens
    read = range(max(0, num_computed - window + 1), num_tokens)
    return len({position // group.block_size for position in read})


@given(st.lists(st.integers(1, 7), max_size=12), st.lists(st.integers(1, 7), max_size=8))
def test_pin_counts_are_the_pins_of_each_block(pinned: list[int], asked: list[int]) -> None:
    pool = BlockPool(8)
    for block_id in pinned:
        pool.pin([block_id])
    counts = Counter(pinned)
    assert pool.pin_counts(asked).tolist() == [counts[block_id] for block_id in asked]


@given(GROUPS, st.integers(1, 100), st.data())
def test_min_blocks_are_those_that_the_next_token_or_a_later_one_uses(
    groups: list[FullAttention | SlidingWindow], num_tokens: int, data: st.DataObject
) -> None:
    num_computed = data.draw(st.integers(0, num_tokens - 1))
    expected = sum(num_read(group, num_tokens, num_computed) for group in groups)
    assert BlockLedger(8, groups).min_blocks(num_tokens, num_computed) == expected


@given(GROUPS, st.integers(1, 100), st.integers(1, 30))
def test_blocks_to_fit_suffice_for_every_step_of_a_request(
    groups: list[FullAttention | SlidingWindow], num_tokens: int, limit: int
) -> None:
    every = sum(num_read(group, num_tokens, 0) for group in groups)
    assert BlockLedger(8, groups).blocks_to_fit(num_tokens) == every
    fit = BlockLedger(8, groups, max_in_flight_tokens=limit).blocks_to_fit(num_tokens)
    steps = range(num_tokens)
    most = [
        max(num_read(group, min(num_tokens, at + limit), at) for at in steps) for group in groups
    ]
    assert sum(most) <= fit <= every
