"""Random lives of an `Engine`: every token that a request reads is compared."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.engine_loop import SHAPES, Loop, turns

from kvstow import Engine

NUM_TURNS = 600


@pytest.mark.parametrize("shape", SHAPES)
def test_no_request_reads_kv_that_is_not_its_own(shape: str, tmp_path: Path) -> None:
    """Requests leave before their step is computed, between compute and report, and after."""
    for _ in range(4):
        seed = random.SystemRandom().randrange(2**32)
        print(f"seed {seed}")
        loop = Loop(seed, folder=tmp_path, **SHAPES[shape])
        turns(loop, NUM_TURNS)
        assert loop.num_hits > 0
        assert loop.num_checked > 100
        loop.close()


class PublishesAtGrant(Engine):
    """What the test above must find."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._new_ledger = partial(self._new_ledger, publish="granted")
        self.ledger = self._new_ledger(self.ledger.pool.num_blocks)


@pytest.mark.parametrize("shape", ["eager", "lazy", "window"])
def test_publishing_at_the_grant_is_found(
    shape: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tests.engine_loop.Engine", PublishesAtGrant)
    with pytest.raises(AssertionError, match="that is not its own"):
        for seed in range(20):
            loop = Loop(seed, folder=tmp_path, **SHAPES[shape])
            try:
                turns(loop, NUM_TURNS)
            finally:
                loop.engine.close()
