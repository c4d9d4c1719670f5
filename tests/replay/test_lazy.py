"""Lazy replays store what the device is about to evict, and serve no wrong block."""

from contextlib import closing
from typing import Literal

import pytest

from kvstow.replay import BUNDLED_TRACE, ReplayConfig, ReplayEngine, read_trace
from kvstow.replay.model import MODELS

from .scenario import Checked

NUM_REQUESTS = 150
DEVICE_BLOCKS = {"full": 300, "gemma-3": 1024, "gpt-oss": 600, "jamba": 600}


class Seldom(Checked):
    every = 16


def replayed(model: str, mode: Literal["eager", "lazy"], seed: int | None = None) -> ReplayEngine:
    config = ReplayConfig(
        device_blocks=DEVICE_BLOCKS[model], host_blocks=8192, model=model, mode=mode, faults=seed
    )
    engine = ReplayEngine(read_trace(BUNDLED_TRACE, limit=NUM_REQUESTS), config, observer=Seldom())
    with closing(engine):
        engine.run()
    return engine


@pytest.mark.parametrize("model", MODELS)
def test_a_lazy_replay_serves_from_the_host_and_stores_less(model: str) -> None:
    lazy, eager = replayed(model, "lazy"), replayed(model, "eager")
    for engine in (lazy, eager):
        assert engine.figures.finished_requests == NUM_REQUESTS
        assert (engine.verifier.num_corrupt, engine.verifier.num_verified > 1000) == (0, True)
    assert lazy.figures.loaded_blocks > 0
    assert 0 < lazy.figures.stored_blocks < eager.figures.stored_blocks


@pytest.mark.parametrize(("model", "seed"), [("full", 6), ("jamba", 5)])
def test_a_lazy_replay_with_faults_has_no_corrupt_block(model: str, seed: int) -> None:
    engine = replayed(model, "lazy", seed=seed)
    assert engine.figures.finished_requests == NUM_REQUESTS
    assert engine.verifier.num_corrupt == 0
    assert engine.figures.failed_loads > 0
