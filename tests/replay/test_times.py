"""Timestamps in seconds or out of order get a warning, and others none."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvstow import ConfigError, cli
from kvstow.replay import BUNDLED_TRACE, TraceRequest, read_trace
from kvstow.replay.times import warn_of_seconds, warn_of_times

NOW_S = 1.7e9  # 2023, in seconds since 1970


def every(step_ms: float, *, number: int = 1000, tokens: int = 4000, first_ms: float = 0) -> bytes:
    rows = [
        {
            "timestamp": first_ms + step_ms * at,
            "input_length": tokens,
            "output_length": 1,
            "hash_ids": list(range(-(-tokens // 512))),
        }
        for at in range(number)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def warning(tmp_path: Path, capsys: pytest.CaptureFixture[str], trace: bytes) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(trace)
    warn_of_seconds(read_trace(path).requests)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "trace",
    [
        every(0.5),  # two requests a second
        every(0.7, tokens=1500),  # a small server
        every(10, first_ms=NOW_S),  # one in ten seconds
        every(100.3, first_ms=NOW_S),  # one in a hundred seconds, with fractions
    ],
)
def test_seconds_are_doubted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trace: bytes
) -> None:
    found = warning(tmp_path, capsys, trace)
    assert found.startswith("kvstow: are the timestamps seconds? kvstow expects milliseconds")
    assert found.count("\n") == 1


@pytest.mark.parametrize(
    "trace",
    [
        every(0),  # all at once
        every(1),  # a burst
        every(7.3),  # parts of milliseconds
        every(500),
        every(10_000, first_ms=1000 * NOW_S),  # milliseconds since 1970
        every(100, first_ms=NOW_S),  # a part of a long recording
        every(0.001, number=50),  # an example
    ],
)
def test_milliseconds_are_not_doubted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trace: bytes
) -> None:
    assert warning(tmp_path, capsys, trace) == ""


@pytest.mark.parametrize(("first_ms", "is_doubted"), [(1e3 * NOW_S, False), (1e6 * NOW_S, True)])
def test_microseconds_since_1970_are_doubted(
    first_ms: float, is_doubted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(every(500_000, number=5, first_ms=first_ms))
    warn_of_times(read_trace(path).requests)
    warned = capsys.readouterr().err
    assert ("are the timestamps microseconds?" in warned) is is_doubted


def test_nanoseconds_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(every(1, number=1, first_ms=1e9 * NOW_S))
    with pytest.raises(ConfigError, match=r"0 to 2\*\*53 ms: divide nanoseconds by 1000000$"):
        read_trace(path)


@pytest.mark.parametrize(
    ("block_size", "counted"), [(512, "51,200"), (16, ""), (64, ""), (2, "200")]
)
def test_passages_far_from_their_lengths_are_doubted(
    block_size: int, counted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"timestamp": 0, "input_length": 160, "output_length": 1, "hash_ids": list(range(10))}
    path = tmp_path / "trace.jsonl"
    path.write_text(10 * f"{json.dumps(row)}\n")
    warn_of_times(read_trace(path, chain=True, block_size=block_size).requests)
    warned = capsys.readouterr().err
    if counted:
        assert f"{counted} tokens, and 1,600 by their input_length: pass --block-size 16" in warned
    else:
        assert not warned


def test_chained_ids_need_no_chaining(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_times(read_trace(BUNDLED_TRACE, chain=True).requests)
    assert "leave out --chain" in capsys.readouterr().err
    warn_of_times(read_trace(BUNDLED_TRACE).requests)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("length", "second"),
    [
        (1400, [5, 2, 3]),  # a passage under another prefix
        (1000, [0, 2, 3]),  # a length of other blocks
    ],
)
def test_ids_of_passages_are_chained_without_a_warning(
    length: int, second: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": ids}
        for ids in ([0, 2, 3], second)
    ]
    path.write_text(100 * "".join(f"{json.dumps(row)}\n" for row in rows))
    warn_of_times(read_trace(path, chain=True).requests)
    assert not capsys.readouterr().err


def test_bundled_trace_is_doubted_only_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    requests = read_trace(BUNDLED_TRACE).requests
    for number in range(1, len(requests) + 1):
        warn_of_seconds(requests[:number])
    assert capsys.readouterr().err == ""
    warn_of_seconds([in_seconds(request) for request in requests])
    assert "seconds?" in capsys.readouterr().err


def in_seconds(request: TraceRequest) -> TraceRequest:
    return replace(request, arrival_s=request.arrival_s / 1000)


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--bytes-per-token", "4096", "TRACE"],
        ["replay", "--servers", "1", "TRACE"],
        ["replay", "--limit", "150", "--verify", "off", "TRACE"],
        ["trace", "convert", "TOKENS"],
    ],
)
def test_each_command_warns_once(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, tokens = tmp_path / "trace.jsonl", tmp_path / "tokens.jsonl"
    with gzip.open(BUNDLED_TRACE) as source, trace.open("w") as file:
        for line in source:
            row = json.loads(line)
            print(json.dumps(row | {"timestamp": row["timestamp"] / 1000}), file=file)
    with tokens.open("w") as file:
        for at in range(200):
            ids = list(range(3000))
            row = {"timestamp": at * 0.5, "prompt_token_ids": ids, "output_length": 1}
            print(json.dumps(row), file=file)
    files = {"TRACE": str(trace), "TOKENS": str(tokens)}
    assert cli.main([files.get(word, word) for word in command]) == 0
    assert capsys.readouterr().err.count("are the timestamps seconds?") == 1


def at_seconds(tmp_path: Path, seconds: list[float]) -> Path:
    path = tmp_path / "trace.jsonl"
    row = {"input_length": 512, "output_length": 1, "hash_ids": [0]}
    rows = [json.dumps({"timestamp": at * 1000} | row) for at in seconds]
    path.write_text("".join(f"{row}\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("seconds", "counts", "worst"),
    [
        ([3, 2, 1], "2 of 3", "line 3 by 2.0 s"),
        ([0, 100, 39, 200, 300, 400], "1 of 6", "line 3 by 61.0 s"),
    ],
)
def test_trace_that_is_not_sorted_by_time_gets_a_warning(
    seconds: list[float],
    counts: str,
    worst: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = str(at_seconds(tmp_path, seconds))
    assert cli.main(["replay", trace, "--verify", "off"]) == 0
    warned = capsys.readouterr().err
    assert warned.startswith(f"kvstow: {counts} requests have an earlier timestamp")
    assert worst in warned


def test_log_in_the_order_of_completion_gets_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every fifth answer is long, so that its line stands behind those of later requests."""
    ends = sorted((at + (4 if at % 5 == 0 else 0.5), float(at)) for at in range(100))
    warn_of_times(read_trace(at_seconds(tmp_path, [at for _, at in ends])).requests)
    assert capsys.readouterr().err.startswith("kvstow: 20 of 100 requests have an earlier")


@pytest.mark.parametrize("seconds", [[0, 0, 0], [0, 50, 30, 60, 90], [5, 66, 6.1, 70, 80]])
def test_a_few_late_lines_get_no_warning(
    seconds: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_times(read_trace(at_seconds(tmp_path, seconds)).requests)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("every", "late_s"), [(2, 0.9), (11, 2.5)])
def test_lines_that_are_hardly_late_or_seldom_late_get_no_warning(
    every: int, late_s: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = [at + 10 - (1 + late_s) * (at % every == 1) for at in range(200)]
    warn_of_times(read_trace(at_seconds(tmp_path, seconds)).requests)
    assert capsys.readouterr().err == ""
