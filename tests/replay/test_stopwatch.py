import pytest

from kvstow.replay.stopwatch import Stopwatch


@pytest.fixture(name="clock_ns")
def _clock_ns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [0]
    monkeypatch.setattr("kvstow.replay.stopwatch.time.perf_counter_ns", lambda: now[0])
    return now


def test_a_pause_is_left_out(clock_ns: list[int]) -> None:
    watch = Stopwatch()
    with watch:
        clock_ns[0] += 3_000
        with watch.paused():
            clock_ns[0] += 50_000
        clock_ns[0] += 4_000
    assert watch.take_us() == 7
    assert watch.take_us() == 0


def test_a_pause_outside_of_the_context_does_nothing(clock_ns: list[int]) -> None:
    watch = Stopwatch()
    with watch:
        clock_ns[0] += 1_000
    clock_ns[0] += 90_000
    with watch.paused():
        clock_ns[0] += 5_000
    clock_ns[0] += 90_000
    assert watch.take_us() == 1
