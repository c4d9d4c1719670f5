"""Replays with several ranks, and with host slots of several blocks."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.replay.scenario import (
    BLOCK,
    FULL,
    Checked,
    assert_ended_well,
    least_device_blocks,
    prepared,
    traces,
)

from kvstow import Transfer, cli
from kvstow.replay import BUNDLED_TRACE, ReplayConfig, ReplayEngine, ReplayState, Trace, read_trace

SMALL = ["--limit", "150", "--device-blocks", "350", "--host-blocks", "1500"]


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert cli.main(["replay", *arguments, "--json"]) == 0
    loaded = json.loads(capsys.readouterr().out)
    assert isinstance(loaded, dict)
    return loaded


def test_several_ranks_change_only_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    one, three = figures(capsys, *SMALL), figures(capsys, *SMALL, "--world-size", "3")
    for key in "seconds", "accounting_us_per_step", "options":
        assert one.pop(key) != three.pop(key)
    for key in "bytes_stored", "bytes_loaded":
        assert three.pop(key) == 3 * one.pop(key) > 0  # type: ignore[operator]
    assert one == three
    assert one["loaded_blocks"]


@pytest.mark.parametrize(("blocks_per_slot", "num_slots"), [(4, 800), (7, 500)])
def test_slots_may_hold_several_blocks(
    capsys: pytest.CaptureFixture[str], blocks_per_slot: int, num_slots: int
) -> None:
    found = figures(
        capsys, "--limit", "300", "--device-blocks", "350", "--host-blocks", str(num_slots),
        "--blocks-per-slot", str(blocks_per_slot), "--world-size", "2",
    )  # fmt: skip
    assert found["corrupt_blocks"] == 0
    assert found["loaded_blocks"] > 50  # type: ignore[operator]
    assert found["stored_blocks"] % blocks_per_slot == 0  # type: ignore[operator]
    assert found["evicted_blocks"]["host"] > 50  # type: ignore[index]
    options = found["options"]
    assert isinstance(options, dict)
    assert (options["blocks_per_slot"], options["world_size"]) == (blocks_per_slot, 2)


@settings(max_examples=40)
@given(
    of=traces(),
    seed=st.one_of(st.none(), st.integers(0, 10_000)),
    world_size=st.integers(1, 3),
    blocks_per_slot=st.integers(1, 4),
    spare_blocks=st.sampled_from([0, 3, 20]),
    num_host_slots=st.sampled_from([3, 20, 500]),
    max_step_tokens=st.sampled_from([7, BLOCK, 8192]),
    bandwidth=st.sampled_from([100.0, 1e4, float("inf")]),
)
def test_any_trace_on_any_ranks_replays_to_its_end(
    of: Trace,
    seed: int | None,
    world_size: int,
    blocks_per_slot: int,
    spare_blocks: int,
    num_host_slots: int,
    max_step_tokens: int,
    bandwidth: float,
) -> None:
    needed = least_device_blocks(of, FULL, max_step_tokens=max_step_tokens)
    with prepared(
        of,
        model=FULL,
        device_blocks=needed + spare_blocks,
        host_blocks=num_host_slots,
        max_step_tokens=max_step_tokens,
        bandwidth_bytes_per_s=bandwidth,
        faults=seed,
        world_size=world_size,
        blocks_per_slot=blocks_per_slot,
    ) as engine:
        engine.run()

        assert_ended_well(engine)


# -- faults ------------------------------------------------------------------------------------


def flip_a_byte(replay: ReplayState, transfer: Transfer) -> None:
    replay.kv.arenas[1].slots[transfer.job.host_slots, 77] ^= 1


def swap_ranks(replay: ReplayState, transfer: Transfer) -> None:
    one, two = (arena.slots for arena in replay.kv.arenas)
    slots = transfer.job.host_slots
    one[slots], two[slots] = two[slots], one[slots]


def swap_within_a_slot(replay: ReplayState, transfer: Transfer) -> None:
    pair = transfer.job.host_slots[:2]
    assert pair[0] // 4 == pair[1] // 4
    replay.kv.arenas[1].slots[pair] = replay.kv.arenas[1].slots[pair[::-1]]


@pytest.mark.parametrize(
    ("fault", "rank"), [(flip_a_byte, 1), (swap_ranks, 0), (swap_within_a_slot, 1)]
)
def test_the_report_of_a_wrong_shard_names_the_rank(
    fault: Callable[[ReplayState, Transfer], None], rank: int
) -> None:
    class Spoil(Checked):
        def landed(self, replay: ReplayState, transfer: Transfer) -> None:
            if transfer.direction == "store":
                fault(replay, transfer)

    config = ReplayConfig(device_blocks=350, host_blocks=1000, world_size=2, blocks_per_slot=4)
    engine = ReplayEngine(read_trace(BUNDLED_TRACE, limit=150), config, observer=Spoil())
    try:
        engine.run()
    finally:
        engine.close()
    assert engine.verifier.num_corrupt > 0
    assert {report.rank for report in engine.verifier.reports} == {rank}
    assert {report.tier for report in engine.verifier.reports} == {"host"}
    assert f"of rank {rank}, loaded from host slot" in str(engine.verifier.reports[0])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--world-size", "0"], "world-size is 0; it must be 1 to 64"),
        (["--world-size", "65"], "world-size is 65"),
        (["--blocks-per-slot", "0"], "blocks-per-slot is 0; it must be 1 to 1024"),
        (["--blocks-per-slot", "2", "--mode", "lazy"], "2 blocks per slot in lazy mode"),
        (["--blocks-per-slot", "2", "--model", "jamba"], "2 blocks per slot with a group that"),
    ],
)
def test_invalid_ranks_and_slots_are_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], problem: str
) -> None:
    assert cli.main(["replay", *options]) == 2
    assert problem in capsys.readouterr().err
