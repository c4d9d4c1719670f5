import numpy as np
import pytest
from tests.replay.scenario import (
    BLOCK,
    Checked,
    Watched,
    assert_ended_well,
    comes_back,
    prepared,
    pushed_out,
    request,
    trace,
)

from kvstow import ConfigError
from kvstow.engine import Transfer
from kvstow.replay import ReplayConfig, ReplayEngine, ReplayState

# -- time and counting -------------------------------------------------------------------------


def test_steps_and_virtual_time_of_a_single_request() -> None:
    """33 tokens of prompt in chunks of 16, 16 and 1, then one step for each of 10 output tokens."""
    config = ReplayConfig(
        device_blocks=8,
        host_blocks=8,
        step_ms=3.0,
        prefill_token_ms=0.5,
        decode_request_ms=0.25,
        max_step_tokens=16,
    )
    engine = ReplayEngine(trace(request(1, [1, 2, 3], tail=1, output=10, at_s=7.0)), config)
    engine.run()
    engine.close()
    figures = engine.figures

    assert_ended_well(engine)
    assert figures.steps == 3 + 10
    assert (figures.prefill_tokens, figures.decode_tokens) == (33, 10)
    assert (figures.published, figures.stored_blocks, figures.recomputed_blocks) == (2, 2, 3)
    assert engine.verifier.num_verified == 3  # 43 tokens, the last block partial
    assert figures.virtual_seconds == pytest.approx((13 * 3 + 33 * 0.5 + 10 * 0.25) / 1000)


def test_a_job_waits_for_the_link() -> None:
    """A block of 128 bytes takes 0.128 s, so the link is busy when the second is submitted."""
    landings: list[float] = []

    class Landings(Checked):
        def landed(self, replay: ReplayState, transfer: Transfer) -> None:
            landings.append(replay.now_s)

    of = trace(request(1, [1, 2, 3], output=0, at_s=7.0))
    with prepared(
        of,
        device_blocks=8,
        max_step_tokens=16,
        bandwidth_bytes_per_s=1000.0,
        observer=Landings(),
    ) as engine:
        engine.run()

        assert_ended_well(engine)
        # The first job begins after a chunk of 5 ms, and 0.1 ms for each of 16 tokens.
        first_s = 7.0 + 0.0066 + 0.128
        assert landings == pytest.approx([first_s, first_s + 0.128, first_s + 0.256])


def test_instant_copies_add_no_virtual_time() -> None:
    with prepared(trace(request(1, [1, 2], output=3)), device_blocks=8) as engine:
        engine.run()

        assert engine.figures.virtual_seconds == pytest.approx((5 + 3.2 + 3 * 5.05) / 1000)


def test_the_last_token_of_a_prompt_is_computed() -> None:
    """So a repeated prompt of whole blocks hits all but its last block."""
    of = trace(
        request(1, [1, 2, 3]), request(2, [1, 2, 3], at_s=1), request(3, [1, 2, 3, 4], at_s=2)
    )
    with prepared(of, device_blocks=16) as engine:
        engine.run()

        assert_ended_well(engine)
        assert engine.figures.device_hits == 2 + 3
        assert engine.figures.recomputed_blocks == 3 + 1 + 1
        assert engine.figures.prefill_tokens == (3 + 1 + 1) * BLOCK


def test_a_partial_block_is_never_hit() -> None:
    of = trace(request(1, [1, 2], tail=5), request(2, [1, 2], tail=5, at_s=1))
    with prepared(of, device_blocks=16) as engine:
        engine.run()

        assert (engine.figures.device_hits, engine.figures.recomputed_blocks) == (1, 3)


def test_budget_and_seats_bound_a_step() -> None:
    of = trace(*(request(line, [10 * line, 10 * line + 1], output=4) for line in range(1, 9)))
    watched = Watched()
    with prepared(
        of, device_blocks=100, max_step_tokens=24, max_requests=3, observer=watched
    ) as engine:
        engine.run()

        assert_ended_well(engine)
        assert watched.most_running == 3
        assert engine.figures.prefill_tokens == 8 * 2 * BLOCK
        assert watched.most_tokens == 24


def test_requests_run_in_order_of_arrival() -> None:
    of = trace(*(request(line, [line], output=2) for line in (1, 2, 3)))
    watched = Watched()
    with prepared(of, device_blocks=16, max_requests=1, observer=watched) as engine:
        engine.run()

        assert list(watched.found) == ["1", "2", "3"]
        assert engine.figures.steps == 3 * (1 + 2)


# -- the host tier -----------------------------------------------------------------------------


def test_a_prefix_comes_back_from_the_host() -> None:
    watched = Watched()
    of = pushed_out(8, comes_back(3, at_s=200))
    with prepared(of, device_blocks=9, observer=watched) as engine:
        engine.run()

        assert_ended_well(engine)
        assert watched.found["3"] == [(0, 4 * BLOCK)]
        assert (engine.figures.device_hits, engine.figures.host_hits) == (0, 4)
        assert (engine.figures.loaded_blocks, engine.figures.stored_blocks) == (4, 4 + 7 + 1)
        assert engine.figures.published == 4 + 7 + 5
        assert engine.verifier.num_verified == 4 + (
            5 + 8 + 6
        )  # loaded blocks, and three block tables


def test_others_run_while_a_request_loads() -> None:
    """A load of 4 blocks of 128 bytes takes 5 s here. A short request ends long before."""
    finished: list[str] = []

    class Order(Checked):
        def landed(self, replay: ReplayState, transfer: Transfer) -> None:
            if transfer.direction == "load":
                finished.append(f"{replay.figures.finished_requests} before the load has landed")

    of = pushed_out(12, comes_back(3, at_s=200), request(4, [31], at_s=200, output=2))
    with prepared(of, device_blocks=13, bandwidth_bytes_per_s=100, observer=Order()) as engine:
        engine.run()

        assert_ended_well(engine)
        assert engine.figures.host_hits == 4
        assert finished == ["3 before the load has landed"]


def test_a_load_lands_before_a_later_request_arrives() -> None:
    landings: list[float] = []

    class Landings(Checked):
        def landed(self, replay: ReplayState, transfer: Transfer) -> None:
            if transfer.direction == "load":
                landings.append(replay.now_s)

    of = pushed_out(8, comes_back(3, at_s=200), request(4, [31], at_s=1000))
    with prepared(of, device_blocks=9, bandwidth_bytes_per_s=100, observer=Landings()) as engine:
        engine.run()

        assert_ended_well(engine)
        assert landings == pytest.approx([200 + 4 * 128 / 100])


def test_a_request_waits_for_blocks_that_another_request_loads() -> None:
    """The blocks are copied once, and the second request hits them on the device."""
    of = pushed_out(
        16,
        comes_back(3, at_s=200),
        comes_back(4, at_s=200),
        request(5, [41], at_s=200, output=2),
    )
    watched = Watched()
    with prepared(of, device_blocks=17, bandwidth_bytes_per_s=100, observer=watched) as engine:
        engine.run()

        assert_ended_well(engine)
        assert watched.found["3"] == [(0, 4 * BLOCK)]
        assert watched.found["4"] == [(4 * BLOCK, 0)]
        assert engine.figures.loaded_blocks == 4
        assert (engine.figures.device_hits, engine.figures.host_hits) == (4, 4)
        assert list(watched.found) == ["1", "2", "3", "5", "4"], "the wait held up the next one"


def test_requests_that_wait_for_a_load_keep_their_places() -> None:
    """4 and 5 are passed over. 6 takes the last seat meanwhile, and 7 waits behind 4 and 5."""
    of = pushed_out(
        23,
        *(comes_back(line, at_s=200) for line in (3, 4, 5)),
        request(6, [61], at_s=200, output=8 * BLOCK),
        request(7, [71], at_s=200),
    )
    watched = Watched()
    with prepared(
        of, device_blocks=24, bandwidth_bytes_per_s=1000, max_requests=2, observer=watched
    ) as engine:
        engine.run()

        assert_ended_well(engine)
        assert watched.order == ["1", "2", "3", "6", "4", "5", "7"]


# -- preemption --------------------------------------------------------------------------------


def test_a_preempted_request_resumes_where_it_was() -> None:
    """Two requests that need 8 blocks each share a pool of 11."""
    of = trace(request(1, [1, 2], output=6 * BLOCK), request(2, [11, 12], output=6 * BLOCK))
    watched = Watched()
    with prepared(of, device_blocks=12, observer=watched) as engine:
        engine.run()

        assert_ended_well(engine)
        assert engine.figures.preemptions >= 1
        assert len(watched.found["1"]) == 1, "the first request is never the one to go"
        # The request finds all its full blocks again, generated ones included.
        device_tokens, host_tokens = watched.found["2"][-1]
        assert device_tokens + host_tokens > 2 * BLOCK
        assert engine.figures.resumed_hits == (device_tokens + host_tokens) // BLOCK
        assert engine.figures.recomputed_blocks == 4
        stored_when_preempted = engine.figures.stored_blocks

    with prepared(of, device_blocks=100) as engine:
        engine.run()

        assert engine.figures.preemptions == 0
        assert engine.figures.stored_blocks == stored_when_preempted == 2 * 8


def test_a_preempted_request_goes_to_the_head_of_the_queue() -> None:
    of = trace(
        *(request(line, [10 * line], output=6 * BLOCK) for line in (1, 2)),
        request(3, [30], output=1),
    )
    watched = Watched()
    with prepared(of, device_blocks=10, max_requests=2, observer=watched) as engine:
        engine.run()

        assert_ended_well(engine)
        assert engine.figures.preemptions == 1
        assert set(watched.order[:-1]) == {"1", "2"}
        assert watched.order[-1] == "3"


def test_a_step_that_preempts_admits_no_request() -> None:
    class Watching(Checked):
        num_before = 0

        def looked_up(self, replay: ReplayState, *_: object) -> None:
            assert replay.figures.preemptions == self.num_before

        def stepped(self, replay: ReplayState) -> None:
            super().stepped(replay)
            self.num_before = replay.figures.preemptions

    of = trace(*(request(line, [10 * line], output=6 * BLOCK) for line in (1, 2)))
    with prepared(of, device_blocks=10, observer=Watching()) as engine:
        engine.run()

        assert engine.figures.preemptions == 1


def test_a_prefill_is_preempted_between_its_chunks() -> None:
    """The first request needs blocks for its output that the second one holds."""
    of = trace(request(1, [1], output=5 * BLOCK), request(2, list(range(11, 18)), output=1))
    with prepared(of, device_blocks=10, max_step_tokens=3) as engine:
        engine.run()

        assert_ended_well(engine)
        assert engine.figures.preemptions >= 1
        assert engine.figures.stored_blocks == 1 + 5 + 7


def test_the_oldest_request_waits_while_jobs_hold_the_other_blocks() -> None:
    """A slow store pins the blocks of a finished request, so preemption would free no block."""
    of = trace(request(1, [11, 12, 13]), request(2, [1], output=4 * BLOCK, at_s=0.1))
    with prepared(of, device_blocks=6, bandwidth_bytes_per_s=50.0) as engine:
        engine.run()

        assert_ended_well(engine)
        assert engine.figures.preemptions == 0
        assert engine.figures.virtual_seconds > 3 * 128 / 50, "it never had to wait"
        assert engine.figures.stored_blocks == 3 + 5


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    of = trace(request(1, [1]), request(2, [2, 3], output=BLOCK + 1))
    problem = r"scenario\.jsonl:2: the request needs 4 blocks for its 49 tokens, and 3 of 4 device"

    with pytest.raises(ConfigError, match=problem), prepared(of, device_blocks=4):
        pass
    with prepared(of, device_blocks=5) as engine:
        engine.run()
        assert_ended_well(engine)


def test_the_batch_has_the_block_tables_of_the_ledger() -> None:
    """The replay writes bytes to the blocks that the ledger allocated."""
    compared = 0

    class Compared(Checked):
        def stepped(self, replay: ReplayState) -> None:
            nonlocal compared
            for seat in replay.batch.running:
                name = replay.batch.request(seat).name
                table = replay.kv.ledger.block_table(name)
                assert replay.batch.num_blocks[seat] == len(table)
                assert np.array_equal(table, replay.batch.tables[0, seat, : len(table)])
                compared += 1

    of = pushed_out(8, comes_back(3, at_s=200))
    with prepared(of, device_blocks=9, observer=Compared()) as engine:
        engine.run()
    assert compared
