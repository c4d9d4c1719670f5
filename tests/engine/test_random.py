"""Random lives of an `Engine`: every token that a request reads is compared."""

import random
from pathlib import Path
from typing import Any

import pytest
from tests.engine_loop import SHAPES, Loop, turns

from kvstow import BlockLedger

NUM_TURNS = 600


@pytest.mark.parametrize("shape", SHAPES)
def test_no_request_reads_kv_that_is_not_its_own(shape: str, tmp_path: Path) -> None:
    """Requests finish before their step is computed, between compute and report, and after."""
    for _ in range(4):
        seed = random.SystemRandom().randrange(2**32)
        print(f"seed {seed}")
        loop = Loop(seed, folder=tmp_path, **SHAPES[shape])
        turns(loop, NUM_TURNS)
        assert loop.num_hits > 0
        assert loop.num_checked > 100
        loop.close()


def ledger_that_publishes_at_the_grant(*args: Any, **options: Any) -> BlockLedger:
    """Return a ledger with the fault that the test above must find."""
    return BlockLedger(*args, **(options | {"publish": "granted"}))


@pytest.mark.parametrize("shape", ["eager", "lazy", "window", "states"])
def test_random_loop_detects_a_ledger_that_publishes_at_the_grant(
    shape: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvstow.engine.blueprint.BlockLedger", ledger_that_publishes_at_the_grant)
    with pytest.raises(AssertionError, match="that is not its own"):
        for seed in range(20):
            loop = Loop(seed, folder=tmp_path, **SHAPES[shape])
            try:
                turns(loop, NUM_TURNS)
            finally:
                loop.engine.close()
