"""Eviction policies on the bundled slice, through the bench that measures them on whole traces."""

from typing import get_args

import pytest
from benches.policies import Requests
from tests.replay.test_trace_oracle import lru_hits

from kvstow.engine import Policy
from kvstow.replay import BUNDLED_TRACE, read_trace

REQUESTS = Requests(read_trace(BUNDLED_TRACE), full_blocks=True)


@pytest.mark.parametrize("capacity", [250, 1000, 5000, 20_000])
def test_lru_has_the_hits_of_a_dict_in_order_of_use(capacity: int) -> None:
    """Evicting leaves alone costs nothing: a chain is used as a whole, its root last."""
    prompts = [[int.from_bytes(digest) for digest in prompt] for prompt in REQUESTS.prompts]
    expected = lru_hits(prompts, capacity) / REQUESTS.num_blocks * 100
    assert REQUESTS.hit_ratio("lru", capacity) == expected


def test_hit_density_has_more_hits_than_lru_if_room_is_short() -> None:
    for capacity in (1000, 2000, 3000, 4000):
        gain = REQUESTS.hit_ratio("hit-density", capacity) - REQUESTS.hit_ratio("lru", capacity)
        assert gain > 0.5, f"{capacity} blocks"


@pytest.mark.parametrize("policy", get_args(Policy))
def test_every_policy_hits_every_repetition_if_all_blocks_fit(policy: Policy) -> None:
    num_distinct = len({digest for prompt in REQUESTS.prompts for digest in prompt})
    expected = (REQUESTS.num_blocks - num_distinct) / REQUESTS.num_blocks * 100
    assert REQUESTS.hit_ratio(policy, num_distinct) == expected
