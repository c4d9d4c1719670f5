"""The shared tier of both halves on Mooncake Store, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiers.mooncake_master import Master, missing
from tests.vllm.sharing import NUM_BLOCKS, NUM_HIT, Started, serve, stat

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.skipif(bool(missing()), reason=missing() or "Mooncake runs here"),
]


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    master = Master(tmp_path)
    yield master
    master.kill()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_server_loads_what_another_computed(
    master: Master, started: Started, num_ranks: int
) -> None:
    given = {"shared": master.url, "shared_segment_bytes": 64 << 20, "num_ranks": num_ranks}
    a, b = started(**given), started(**given)
    assert serve(a, "p") == 0
    assert stat(a, "demoted_blocks") == NUM_BLOCKS
    assert serve(b, "p") == NUM_HIT
    assert stat(b, "promoted_blocks") == NUM_BLOCKS
    assert serve(started(**given), "p") == NUM_HIT, "a server that joins later is warm"
    assert serve(started(**given, weights="another model"), "p") == 0
    b.weights = "changed in place"
    b.half.reset()
    assert serve(b, "p") == 0


def test_a_master_that_ends_costs_the_deadline_and_nothing_else(
    master: Master, started: Started
) -> None:
    server = started(
        shared=master.url,
        shared_segment_bytes=64 << 20,
        shared_timeout_s=1,
        shared_ask_timeout_s=0.05,
    )
    serve(server, "p")
    master.kill()
    for name in "qrst":
        assert serve(server, name) == 0
    master.start()  # without one, Mooncake closes slowly
