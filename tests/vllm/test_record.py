"""The recorder writes a trace of what vLLM has served, and never disturbs serving."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm.halves import FULL, cache_config
from tests.vllm.simulated import Simulated

from kvstow import ConfigError, hash_tokens
from kvstow.replay import read_trace
from kvstow.vllm import record
from kvstow.vllm.model import Model
from kvstow.vllm.record import TraceRecorder

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

BLOCK = 16
MODEL = Model(64, Model.of(cache_config(FULL)).groups, ((),), BLOCK)
MIB = 1 << 20
START_S = 1000.0


def request(
    name: str, prompt: Sequence[int], arrival_s: float = START_S, num_output: int = 3
) -> Any:
    return SimpleNamespace(
        request_id=name,
        num_prompt_tokens=len(prompt),
        num_output_tokens=num_output,
        arrival_time=arrival_s,
        block_hashes=list(hash_tokens(prompt, BLOCK)),
    )


def recorder(path: Path | str, **options: Any) -> TraceRecorder:
    max_bytes = options.get("max_bytes", MIB)
    return TraceRecorder(str(path), MODEL, max_bytes=max_bytes, clock=lambda: START_S)


def serve(record: TraceRecorder, *requests: Any) -> None:
    for each in requests:
        record.admitted(each, 0, 0)
        record.finished(each)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_times_lengths_and_shared_ids(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = recorder(path)
    shared = list(range(100, 132))
    serve(
        trace,
        request("a", [*shared, 1, 2, 3], START_S + 0.5, num_output=7),
        request("b", [*shared, *range(16)], START_S + 2.0),
        request("c", [*shared, 1, 2, 3], START_S - 1),
    )
    trace.close()
    first, second, third = rows(path)
    assert list(first) == ["timestamp", "input_length", "output_length", "hash_ids"]
    assert (first["timestamp"], first["input_length"], first["output_length"]) == (500, 35, 7)
    assert (second["timestamp"], third["timestamp"]) == (2000, 0)
    assert first["hash_ids"][:2] == second["hash_ids"][:2] == third["hash_ids"][:2]
    ends = {first["hash_ids"][2], second["hash_ids"][2], third["hash_ids"][2]}
    assert len(ends) == 3, "a partial block serves nobody, so it has an id of its own"
    read = read_trace(path, block_size=BLOCK)
    assert [each.prompt_tokens for each in read.requests] == [35, 48, 35]


def test_a_trace_has_no_token_and_no_hash(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = recorder(path)
    prompt = [123_456_789 + at for at in range(40)]
    served = request("secret-name", prompt)
    serve(trace, served)
    trace.close()
    text = path.read_text()
    assert "123456" not in text and "secret" not in text
    for digest in served.block_hashes:
        assert digest.hex() not in text
        for size in (4, 8):
            for order in ("big", "little"):
                assert str(int.from_bytes(digest[:size], order)) not in text


def test_each_recording_has_a_salt_of_its_own(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        trace = recorder(tmp_path / name)
        serve(trace, request("a", range(48)))
        trace.close()
        found.append(set(rows(tmp_path / name)[0]["hash_ids"]))
        assert trace._salt.hex() not in (tmp_path / name).read_text()
    assert len(found[0]) == 3 and not found[0] & found[1]


def test_requests_are_in_the_order_of_admission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl"
    trace = recorder(path)
    requests = [request(str(at), range(20 + at), START_S + at) for at in range(4)]
    for each in requests:
        trace.admitted(each, 0, 0)
    for at in (2, 3, 0):
        trace.finished(requests[at])
    trace.close()
    # The second request still runs when the recording ends.
    assert [row["input_length"] for row in rows(path)] == [20, 22, 23]

    monkeypatch.setattr(record, "MAX_HELD_BYTES", 500)
    trace = recorder(path)
    for each in requests:
        trace.admitted(each, 0, 0)
    for at in (2, 3, 1, 0):
        trace.finished(requests[at])
    trace.close()
    assert [row["input_length"] for row in rows(path)] == [22, 23, 21, 20], "too much waited"


def test_requests_without_a_block_pass_one_that_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "MAX_HELD_BYTES", 10_000)
    path = tmp_path / "trace.jsonl"
    trace = recorder(path)
    endless = request("endless", range(16))
    trace.admitted(endless, 0, 0)
    serve(trace, *(request(str(at), range(3)) for at in range(100)))
    wait_until(lambda: path.stat().st_size > 0)
    trace.finished(endless)
    trace.close()
    lengths = [row["input_length"] for row in rows(path)]
    assert sorted(lengths) == [3] * 100 + [16]


def test_request_whose_id_is_used_again_keeps_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = recorder(path)
    first, second, third = [request(name, range(20 + at)) for at, name in enumerate("abb")]
    trace.admitted(first, 0, 0)
    serve(trace, second, third)
    trace.finished(first)
    trace.close()
    assert [row["input_length"] for row in rows(path)] == [20, 21, 22]


def test_a_full_file_moves_and_its_ids_stay(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("earlier\n")
    trace = recorder(path, max_bytes=400)
    assert (tmp_path / "trace.jsonl.1").read_text() == "earlier\n"
    serve(trace, *(request(str(at), range(64), START_S + at) for at in range(10)))
    trace.close()
    before, after = rows(tmp_path / "trace.jsonl.1"), rows(path)
    assert [row["timestamp"] for row in before + after][-1] == 9000
    assert {tuple(row["hash_ids"]) for row in before + after} == {tuple(after[0]["hash_ids"])}
    assert all((tmp_path / name).stat().st_size <= 400 for name in os.listdir(tmp_path))


def test_a_full_file_behind_a_link_moves_beside_it(tmp_path: Path) -> None:
    large, link = tmp_path / "large", tmp_path / "trace.jsonl"
    large.mkdir()
    link.symlink_to("large/trace.jsonl")
    (large / "trace.jsonl").write_text("earlier\n")
    trace = recorder(link, max_bytes=400)
    assert (large / "trace.jsonl.1").read_text() == "earlier\n"
    serve(trace, *(request(str(at), range(64), START_S + at) for at in range(10)))
    trace.close()
    assert link.is_symlink() and {*os.listdir(tmp_path)} == {"large", "trace.jsonl"}
    assert {*os.listdir(large)} == {"trace.jsonl", "trace.jsonl.1"}
    assert rows(link)[-1]["timestamp"] == 9000


def test_a_server_does_not_move_the_file_of_another(tmp_path: Path, log: list[str]) -> None:
    path = tmp_path / "trace.jsonl"
    requests = [request(str(at), range(64), START_S + at) for at in range(10)]
    first = recorder(path, max_bytes=400)
    serve(first, requests[0])
    wait_until(lambda: path.stat().st_size > 0)
    second = recorder(path)
    serve(second, *requests[:5])
    wait_until(lambda: path.read_bytes().count(b"\n") == 5)
    serve(first, *requests)
    wait_until_off(first)
    serve(second, *requests[5:])
    second.close()
    assert [row["timestamp"] for row in rows(path)] == [1000 * at for at in range(10)]
    [line] = log
    assert "another server records there: name a file for each" in line


def test_requests_that_have_waited_for_another_do_not_fill_a_file_beyond_its_size(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.jsonl"
    trace = recorder(path, max_bytes=1000)
    first = request("first", range(16))
    trace.admitted(first, 0, 0)
    serve(trace, *(request(str(at), range(64), START_S + at) for at in range(50)))
    trace.finished(first)
    trace.close()
    sizes = {name: (tmp_path / name).stat().st_size for name in os.listdir(tmp_path)}
    assert sizes.keys() == {"trace.jsonl", "trace.jsonl.1"} and max(sizes.values()) <= 1000
    assert rows(path)[-1]["timestamp"] == 49_000


@pytest.mark.parametrize("path", ["", "missing/trace.jsonl", "."])
def test_a_path_that_cannot_be_opened_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name a file in a folder"):
        recorder(f"{tmp_path}/{path}" if path else "\0")


def test_a_full_disk_ends_the_recording_with_one_warning(log: list[str]) -> None:
    trace = recorder("/dev/full")
    serve(trace, request("a", range(40)))
    wait_until_off(trace)
    serve(trace, request("b", range(40)), request("c", range(40)))
    trace.close()
    assert sum("cannot be written" in line for line in log) == 1


def test_a_size_limit_leaves_whole_lines(tmp_path: Path, log: list[str]) -> None:
    path = tmp_path / "trace.jsonl"
    trace = recorder(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        for at in range(100):
            serve(trace, request(str(at), range(64), START_S + at))
        wait_until_off(trace)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    trace.close()
    assert 0 < len(rows(path)) < 100
    assert sum("cannot be written" in line for line in log) == 1


def test_a_slow_disk_loses_requests_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    monkeypatch.setattr(record, "MAX_QUEUED_BLOCKS", 10)
    path = tmp_path / "trace.jsonl"
    trace = recorder(path)
    is_slow = [True]

    def append(descriptor: int, data: bytes) -> None:
        while is_slow[0]:
            time.sleep(0.001)
        os.write(descriptor, data)

    monkeypatch.setattr(record, "append_all", append)
    for at in range(20):
        serve(trace, request(str(at), range(64), START_S + at))
    is_slow[0] = False
    trace.close()
    assert 2 <= len(rows(path)) < 20
    assert sum("too slow" in line for line in log) == 1


def test_a_disk_that_hangs_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    monkeypatch.setattr(record, "MAX_QUEUED_ITEMS", 10)
    answers = threading.Event()
    monkeypatch.setattr(record, "append_all", lambda *_: answers.wait(60))
    trace = recorder(tmp_path / "trace.jsonl")
    for number in range(50):
        serve(trace, request(str(number), range(3)))
    assert trace.is_off
    assert trace._queue.qsize() <= 10
    answers.set()
    trace.close()
    assert [line for line in log if "cannot be written" in line] == log
    assert "its disk hangs" in log[0]


def test_requests_without_hashes_still_have_an_id_for_each_block(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = recorder(path)
    bare = request("a", range(40))
    bare.block_hashes = []
    serve(trace, bare, request("b", range(3)))
    trace.close()
    read_trace(path, block_size=BLOCK)
    assert [len(row["hash_ids"]) for row in rows(path)] == [3, 1]


def wait_until_off(trace: TraceRecorder) -> None:
    wait_until(lambda: trace.is_off)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    assert condition()


# -- behind vLLM's scheduler -----------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"observe": True}, {"num_cpu_blocks": 40}], ids=str)
def test_a_scheduler_records_what_it_serves(
    folder: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    path = tmp_path / "trace.jsonl"
    engine = Simulated(folder, {**options, "record_trace": str(path)})
    prompts = [list(range(1, 41)), list(range(1, 46)), list(range(20))]
    for at, prompt in enumerate([*prompts, prompts[0]]):
        engine.add(str(at), prompt, max_tokens=3 + at)
    engine.add("never", range(10))
    engine.abort("never")
    engine.settle()
    engine.connector.shutdown()
    found = rows(path)
    assert [row["input_length"] for row in found] == [40, 45, 20, 40]
    assert [row["output_length"] for row in found] == [3, 4, 5, 6]
    ids = [row["hash_ids"] for row in found]
    assert ids[0][:2] == ids[1][:2] == ids[3][:2] and ids[2][0] != ids[0][0]
    read_trace(path, block_size=BLOCK)
    assert engine.answers["0"] == engine.right_answer(prompts[0], 3, None)


def test_a_scheduler_goes_on_when_the_disk_is_full(folder: Path, log: list[str]) -> None:
    engine = Simulated(folder, {"observe": True, "record_trace": "/dev/full"})
    for at in range(5):
        engine.add(str(at), list(range(at, at + 40)), max_tokens=3)
        engine.settle()
        assert engine.answers[str(at)] == engine.right_answer(list(range(at, at + 40)), 3, None)
    engine.connector.shutdown()
    assert sum("cannot be written" in line for line in log) == 1
