"""Requests finish or are preempted while copies are in flight, and nothing leaks.

See `scenario_rig` for the rig.
"""

from __future__ import annotations

import pytest
from tests.accounting.scenario_rig import ALL, Group, Rig, every_model


@every_model
@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("under_way", ["store", "load", "lookup", "nothing"])
def test_preemption_leaks_no_host_block(groups: list[Group], under_way: str, ok: bool) -> None:
    rig = Rig(groups, num_host=4 * len(groups))
    for letter in "abcde":
        prompt = letter * 4
        if under_way in ("load", "lookup"):
            rig.serve("before", prompt)
            rig.forget_device()
        rig.add("it", prompt + "x")
        if under_way == "store":
            rig.admit("it")
            rig.step({"it": 4 * rig.size})
        elif under_way == "load":
            rig.admit("it")
        elif under_way == "lookup":
            assert rig.scheduler.lookup("it", 0, ALL) == 4 * rig.size
        assert len(rig.jobs) == (under_way in ("store", "load"))
        rig.preempt("it")
        for job in list(rig.jobs.values()):
            rig.end(job, ok=ok)
        rig.assert_nothing_is_held()
        is_there = under_way in ("load", "lookup") or (under_way == "store" and ok)
        assert rig.on_host & rig.names(prompt) == (rig.names(prompt) if is_there else set())
        assert rig.reload(prompt) == (len(prompt) if is_there else 0)
        rig.finish("it")
    rig.serve("last", "zzzz")
    assert rig.on_host == rig.names("zzzz")
    rig.assert_nothing_is_held()


@every_model
def test_finish_keeps_the_blocks_of_a_store_until_it_lands(groups: list[Group]) -> None:
    num_host = 4 * len(groups)
    rig = Rig(groups, num_host=num_host)
    rig.add("it", "abcd")
    rig.admit("it")
    rig.prefill("it")
    rig.finish("it")
    assert rig.ledger.pool.num_free == rig.num_device - num_host
    assert (rig.stat("jobs_in_flight"), rig.stat("storing_blocks")) == (1, num_host)
    assert (rig.found("abcd"), rig.on_host) == (0, set())
    # The store in flight uses all slots, so the next store finds none.
    rig.add("other", "wxyz")
    rig.admit("other")
    rig.prefill("other")
    rig.finish("other")
    assert len(rig.jobs) == 1
    assert rig.stat("dropped_blocks") == num_host
    rig.land()
    assert rig.on_host == rig.names("abcd")
    rig.assert_nothing_is_held()
    assert rig.reload("abcd") == 4


@every_model
def test_finish_keeps_the_blocks_of_a_load_until_it_lands(groups: list[Group]) -> None:
    num_host = 4 * len(groups)
    rig = Rig(groups, num_host=num_host)
    rig.serve("before", "abcd")
    rig.forget_device()
    rig.add("it", "abcdx")
    load = rig.admit("it")
    assert load is not None
    rig.finish("it")
    assert rig.ledger.pool.num_free == rig.num_device - len(load)
    # The host keeps the slots that the load reads, and can evict all others.
    rig.add("other", "wxyz")
    rig.admit("other")
    rig.prefill("other")
    rig.finish("other")
    for job in list(rig.jobs.values()):
        if job is not load:
            rig.end(job)
    assert rig.on_host >= rig.copied(load)
    assert len(rig.on_host) == num_host
    assert len(rig.on_host & rig.names("wxyz")) == num_host - len(load)
    rig.end(load)
    rig.assert_nothing_is_held()
    rig.serve("last", "mnop")
    assert rig.on_host == rig.names("mnop")
    assert rig.reload("mnop") == 4


@every_model
@pytest.mark.parametrize("num_before", [1, 2, 5])
@pytest.mark.parametrize("is_landed", [True, False])
@pytest.mark.parametrize("is_device_lost", [True, False])
def test_preemption_in_a_chunked_prefill_changes_no_stored_key(
    groups: list[Group], num_before: int, is_landed: bool, is_device_lost: bool
) -> None:
    """The host ends with the keys that it has without preemption, and stores each once."""
    prompt = "abcdefgh"
    rig = Rig(groups)
    rig.add("it", prompt)
    rig.admit("it")
    for _ in range(num_before):
        rig.step({"it": rig.size + rig.size // 3})
    num_done = rig.requests["it"].num_computed // rig.size
    if is_landed:
        rig.land()
    rig.preempt("it")
    if is_device_lost:
        rig.forget_device()
    load = rig.admit("it")
    if is_device_lost:
        loaded = rig.names(prompt[:num_done], hit=True) if is_landed else set()
        assert rig.copied(load) == loaded
        for job in list(rig.jobs.values()):
            if job is load:
                rig.end(job)
    else:
        assert load is None
    rig.prefill("it", num_chunks=3)
    rig.finish("it")
    rig.land()
    assert rig.on_host == rig.names(prompt)
    assert rig.stat("stored_blocks") == len(rig.names(prompt))
    assert rig.reload(prompt) == len(prompt)
    rig.assert_nothing_is_held()
