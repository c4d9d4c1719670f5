"""`Engine.rewind` is interrupted, or gets a count of numpy: the engine sleeps and wakes."""

from typing import Any

import numpy as np
import pytest
from tests.engine.sleep_world import BLOCK, WHO, prompt, world
from tests.interrupts import is_interrupted

from kvstow import HOST, ConfigError, StateError, hash_tokens
from kvstow.transfer import READY

LAZY: dict[str, Any] = {"mode": "lazy", "horizon_blocks": 8}


def sleeps_after_a_rewind(line: int, options: dict[str, Any]) -> bool:
    """Interrupt line `line` of a rewind behind reported tokens. Return whether it has one."""
    with world(**options) as it:
        it.engine.add("a", hash_tokens(prompt(1, 20)[:16], BLOCK))
        it.engine.admit("a", 20, 1000, after=READY)
        it.engine.computed(["a"], [20], after=READY)
        num_tokens: Any = np.int64(18)
        is_cut_short = is_interrupted(lambda: it.engine.rewind("a", num_tokens), line)
        it.sleep(to=HOST, **WHO)
        it.wake(**WHO)
        it.engine.finish("a")
        it.engine.check()
        return is_cut_short


@pytest.mark.parametrize("options", [{}, LAZY], ids=str)
def test_engine_wakes_after_an_interrupted_rewind(options: dict[str, Any]) -> None:
    line = 1
    while sleeps_after_a_rewind(line, options):
        line += 1
    assert line > 1, "no line was interrupted"


def test_rewind_that_the_ledger_refuses_changes_nothing() -> None:
    with world() as it:
        it.engine.add("a", hash_tokens(prompt(1, 24), BLOCK))
        it.engine.admit("a", 24, 20, after=READY)
        it.engine.computed(["a"], [20], after=READY)
        with pytest.raises(StateError, match="20 are published"):
            it.engine.rewind("a", 12)
        with pytest.raises(ConfigError, match="20 were reported before"):
            it.engine.computed(["a"], [19], after=READY)
        it.engine.finish("a")
