"""The host tier stores blocks, gives them back, and evicts the least recent.

See `scenario_rig` for the rig.
"""

from __future__ import annotations

from typing import Literal

import pytest
from tests.accounting.scenario_rig import HYBRIDS, Group, Rig, every_model, num_skipped


@every_model
def test_eager_stores_are_loaded_again(groups: list[Group]) -> None:
    rig = Rig(groups)
    rig.serve("first", "abcde")
    assert rig.on_host == rig.names("abcde")
    rig.forget_device()
    rig.add("second", "abcdex")
    load = rig.admit("second")
    assert rig.copied(load) == rig.names("abcde", hit=True)
    rig.land()
    rig.prefill("second")
    rig.finish("second")
    rig.land()
    assert rig.on_host == rig.names("abcdex")
    assert rig.stat("stored_blocks") == len(rig.names("abcdex"))
    assert rig.stat("loaded_blocks") == len(rig.names("abcde", hit=True))
    rig.assert_nothing_is_held()


@every_model
def test_lazy_stores_are_loaded_again(groups: list[Group]) -> None:
    rig = Rig(groups, mode="lazy")
    rig.add("first", "abcde")
    rig.admit("first")
    rig.prefill("first", num_chunks=2)
    rig.finish("first")
    assert not rig.jobs
    names = rig.names("abcde")
    # Blocks that were never used stand first in the free queue.
    num_unused = rig.num_device - len(names)
    assert rig.store_evictable(num_unused) is None
    assert len(rig.copied(rig.store_evictable(num_unused + 2))) == 2
    rig.store_evictable(rig.num_device)
    rig.land()
    assert rig.on_host == names
    rig.forget_device()
    rig.add("second", "abcdex")
    assert rig.copied(rig.admit("second")) == rig.names("abcde", hit=True)
    rig.land()
    rig.prefill("second")
    rig.finish("second")
    rig.store_evictable(rig.num_device)
    rig.land()
    assert rig.on_host == rig.names("abcdex")
    assert rig.stat("stored_blocks") == len(rig.names("abcdex"))
    rig.assert_nothing_is_held()


@every_model
@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("is_landed", [True, False])
def test_a_key_on_the_host_or_in_flight_is_not_stored_again(
    groups: list[Group], mode: Literal["eager", "lazy"], is_landed: bool
) -> None:
    rig = Rig(groups, mode=mode)
    used: list[set[int]] = []
    for id in ("first", "second"):
        rig.add(id, "abcd")
        rig.admit(id, host=False)
        rig.prefill(id)
        used.append(
            {block for at in range(len(groups)) for block in rig.ledger.block_table(id, at)}
        )
        rig.finish(id)
        if mode == "lazy":
            rig.store_evictable(rig.num_device)
        assert len(rig.jobs) == (id == "first" or not is_landed)
        if is_landed:
            rig.land()
        rig.forget_device()
    assert used[0].isdisjoint(used[1]), "the second request uses other blocks"
    rig.land()
    assert rig.on_host == rig.names("abcd")
    assert rig.stat("stored_blocks") == len(rig.names("abcd"))


OLD, MIDDLE, RECENT = "aaaa", "bbbb", "cccc"


def filled(groups: list[Group]) -> Rig:
    """Return a rig whose host tier is full of three prompts."""
    rig = Rig(groups, num_host=len(OLD + MIDDLE + RECENT) * len(groups))
    for prompt in (OLD, MIDDLE, RECENT):
        rig.serve(prompt, prompt)
    assert rig.on_host == rig.names(OLD) | rig.names(MIDDLE) | rig.names(RECENT)
    return rig


@every_model
@pytest.mark.parametrize("num_new", [1, 3, 4, 5, 8, 10])
def test_eviction_starts_at_the_tail_of_the_least_recent_prompt(
    groups: list[Group], num_new: int
) -> None:
    rig = filled(groups)
    rig.serve("new", "z" * num_new)
    kept = ["z" * num_new]
    for at, prompt in enumerate((OLD, MIDDLE, RECENT)):
        num_lost = min(max(num_new - at * len(prompt), 0), len(prompt))
        kept.append(prompt[: len(prompt) - num_lost])
    assert rig.on_host == set().union(*map(rig.names, kept))
    assert [rig.reload(prompt) for prompt in kept] == [len(prompt) for prompt in kept]
    assert rig.stat("evicted_blocks") == num_new * len(groups)


@every_model
@pytest.mark.parametrize("use", ["loaded", "found on the device", "computed again", "looked up"])
def test_used_blocks_are_evicted_later(groups: list[Group], use: str) -> None:
    rig = filled(groups)
    if use in ("loaded", "computed again"):
        rig.forget_device()
    if use == "computed again":
        rig.serve("user", OLD, host=False)
    elif use == "looked up":
        assert rig.found(OLD) == len(OLD)
    else:
        rig.add("user", OLD + "x")
        load = rig.admit("user")
        assert (load is not None) == (use == "loaded")
        rig.land()
        rig.finish("user")
    rig.serve("new", "zzzz")
    lost = OLD if use == "looked up" else MIDDLE
    kept = MIDDLE if use == "looked up" else OLD
    assert rig.on_host == rig.names(kept) | rig.names(RECENT) | rig.names("zzzz")
    assert [rig.reload(prompt) for prompt in (lost, kept)] == [0, len(kept)]


@pytest.mark.parametrize("groups", HYBRIDS)
def test_null_blocks_are_never_stored_or_loaded(groups: list[Group]) -> None:
    prompt = "abcdefgh"
    rig = Rig(groups)
    rig.add("first", prompt)
    rig.admit("first")
    # The report comes late. Blocks that no token reads any more are null by then.
    for _ in prompt:
        rig.grant({"first": rig.size})
        rig.compute(["first"])
    last = (len(prompt) - 1) * rig.size
    held = {
        rig.name(at, rig.text(prompt), index)
        for at, group in enumerate(groups)
        for index in range(num_skipped(group, last), len(prompt))
    }
    num_nulls = sum(num_skipped(group, last) for group in groups)
    tables = [rig.ledger.block_table("first", at).tolist() for at in range(len(groups))]
    assert sum(table.count(0) for table in tables) == num_nulls > 0
    assert rig.copied(rig.report("first")) == held
    rig.finish("first")
    rig.land()
    assert rig.on_host == held
    rig.forget_device()
    rig.add("second", prompt + "x")
    assert rig.copied(rig.admit("second")) == rig.names(prompt, hit=True)
    for at, group in enumerate(groups):
        table = rig.ledger.block_table("second", at).tolist()
        assert table.count(0) == num_skipped(group, len(rig.text(prompt)))
    rig.land()
    assert rig.copied(rig.step({"second": rig.size})) == rig.names(prompt + "x", len(prompt))


@every_model
@pytest.mark.parametrize(("num_local", "num_host"), [(0, 5), (1, 5), (2, 5), (4, 5), (2, 3)])
def test_load_starts_after_the_local_hit_and_ends_where_the_host_does(
    groups: list[Group], num_local: int, num_host: int
) -> None:
    prompt = "abcdefgh"
    rig = Rig(groups)
    rig.serve("host", prompt[:num_host])
    rig.forget_device()
    if num_local:
        rig.serve("local", prompt[:num_local], host=False)
    rig.add("it", prompt)
    assert rig.found(prompt, num_local) == num_host - num_local
    load = rig.admit("it")
    read = rig.names(prompt[:num_host], hit=True)
    assert rig.copied(load) == read & rig.names(prompt[:num_host], num_local)
    rig.land()
    assert rig.requests["it"].num_computed == num_host * rig.size
    store = rig.step({"it": (len(prompt) - num_host) * rig.size})
    assert rig.copied(store) == rig.names(prompt, num_host)
    rig.finish("it")
    rig.land()
    assert rig.on_host == rig.names(prompt)
    assert rig.stat("stored_blocks") == len(rig.names(prompt))
    rig.assert_nothing_is_held()


@every_model
@pytest.mark.parametrize("num_accepted", [1, 2, 3])
def test_found_blocks_that_the_request_does_not_accept_can_be_evicted(
    groups: list[Group], num_accepted: int
) -> None:
    prompt = "abcde"
    rig = Rig(groups, num_host=len(prompt) * len(groups))
    rig.serve("before", prompt)
    rig.forget_device()
    rig.add("it", prompt + "x")
    load = rig.admit("it", num_accepted=num_accepted)
    assert load is not None
    accepted = rig.names(prompt[:num_accepted], hit=True)
    assert rig.copied(load) == accepted
    rig.add("other", "z" * 9)
    rig.admit("other")
    rig.prefill("other")
    for job in list(rig.jobs.values()):
        if job is not load:
            rig.end(job)
    assert rig.on_host & rig.names(prompt) == accepted
    assert len(rig.on_host & rig.names("z" * 9)) == len(prompt) * len(groups) - len(accepted)
    rig.end(load)
    # The request computes all blocks after those that it accepted.
    rig.prefill("it")
    for id in ("it", "other"):
        rig.finish(id)
    rig.land()
    rig.assert_nothing_is_held()
