"""`accelerate`: kvstow's faster functions leave the same state as vLLM's, and can be undone."""

from __future__ import annotations

import inspect
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.vllm.lockstep import MODELS, Lockstep, Switch, switch

from kvstow.vllm.accelerate import allocation, lookup

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

NUM_SEQUENCES = int(os.environ.get("KVSTOW_SEQUENCES", "120"))
SEED = int(os.environ.get("KVSTOW_SEED", random.randrange(1 << 32)))


@pytest.fixture(scope="module")
def between() -> Iterator[Switch]:
    with switch() as made:
        yield made


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of early exits."""
    counts: Counter[str] = Counter()
    original = allocation._changes_nothing

    def counting(*args: Any) -> bool:
        is_exit = original(*args)
        counts["exits" if is_exit else "walks"] += 1
        return is_exit

    monkeypatch.setattr(allocation, "_changes_nothing", counting)
    return counts


def run(model: str, seed: int, between: Switch, counts: Counter[str]) -> None:
    Lockstep(seed, model, between, counts).run(60)


@pytest.mark.parametrize("model", MODELS)
def test_managers_stay_equal(model: str, between: Switch, exits: Counter[str]) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEED, SEED + NUM_SEQUENCES):
        try:
            run(model, seed, between, counts)
        except AssertionError as error:
            pytest.fail(f"{model}, KVSTOW_SEED={seed}: {error}")
    can_exit = MODELS[model][1]
    print(SEED, counts, exits)
    assert (exits["exits"] > 3 * NUM_SEQUENCES) == can_exit
    assert min(counts[each] for each in ("admit", "step", "preempt", "reset")) > 0


MUTATIONS = {
    "a block of a window may leave": ("is not group._null_block", "is None"),
    "one token more fits": (
        "num_slots > len(blocks) * block_size",
        "num_slots > len(blocks) * block_size + 1",
    ),
    "drafts take no slots": ("num_final + num_lookahead", "num_final"),
    "a full block stays unknown": ("< num_final // block_size", "< num_final // block_size - 1"),
    "the window ends a token later": ("num_processed - window)", "num_processed - window - 1)"),
    "other groups do not count": (
        "for group, block_size, window in groups:",
        "for group, block_size, window in groups[:1]:",
    ),
}


MODELS_OF_MUTATIONS = ("full", "full and window", "full and two windows", "two full")


def assert_noticed(between: Switch) -> None:
    with pytest.raises(AssertionError):
        for seed in range(500):
            run(MODELS_OF_MUTATIONS[seed % 4], seed, between, Counter())


def mutated(function: Any, old: str, new: str) -> Any:
    """Return a function whose source differs in one place."""
    source = inspect.getsource(function)
    assert source.count(old) == 1
    names = dict(vars(inspect.getmodule(function)))
    exec(source.replace(old, new), names)
    return names[function.__name__]


@pytest.mark.parametrize(("old", "new"), MUTATIONS.values(), ids=list(MUTATIONS))
def test_a_wrong_early_exit_is_noticed(
    old: str, new: str, between: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the comparison."""
    changed = mutated(allocation._changes_nothing, old, new)
    monkeypatch.setattr(allocation, "_changes_nothing", changed)
    assert_noticed(between)


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("_run", "block = _first(block)", "break"),
        ("_run", "            break\n        for", "            continue\n        for"),
        ("_first", "next(iter(duplicates.values()))", "list(duplicates.values())[-1]"),
    ],
)
def test_a_wrong_lookup_is_noticed(
    function: str, old: str, new: str, between: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, function, mutated(getattr(lookup, function), old, new))
    assert_noticed(between)
