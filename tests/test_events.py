"""The events file: its lines, their completeness, and files that cannot be written."""

import errno
import gc
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from tests.forks import in_child
from tests.interrupts import is_interrupted, is_interrupted_behind

from kvstow import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlockStored,
    CacheStoreCommitted,
    ConfigError,
    Engine,
    FullAttention,
    TransferCompleted,
    TransferInitiated,
    cli,
    hash_tokens,
)
from kvstow.engine import event_log
from kvstow.observability import events
from kvstow.observability.events import EventFile, event_fields
from kvstow.replay import BUNDLED_TRACE, ReplayConfig, ReplayEngine, read_trace
from kvstow.transfer import READY, BlockLayout

BLOCK = 4
DOCUMENT = list(range(16))
FULL_DISK = Path("/dev/full")


def lines(path: Path) -> list[dict[str, object]]:
    parsed = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(isinstance(line, dict) for line in parsed)
    return parsed


def engine(num_device_blocks: int = 9, num_host_blocks: int = 4, **options: object) -> Engine:
    memory = np.zeros((num_device_blocks, BLOCK), np.int64)
    layouts = [BlockLayout.from_arrays([memory])]
    groups = [FullAttention(BLOCK)]
    return Engine(num_device_blocks, num_host_blocks, groups, layouts, **options)  # type: ignore[arg-type]


def serve(kv: Engine, name: str, tokens: list[int]) -> None:
    """Run a request: load or compute its prompt, store it, and finish."""
    hashes, keys = hash_tokens(tokens, BLOCK), [("lora", 7, b"\x01\xff"), None]
    kv.add(name, hashes, tokens=tokens, extra_keys=(keys * len(hashes))[: len(hashes)])
    found = kv.admit(name, len(tokens), 1000, after=READY)
    if found.transfer is not None:
        assert kv.end(found.transfer).ok
        kv.step([name], [len(tokens) - kv.ledger.num_granted_tokens(name)])
    stored = kv.computed([name], [len(tokens)], after=READY)
    if stored is not None:
        assert kv.end(stored).ok
    kv.finish(name)
    kv.poll()


def test_every_event_is_a_line_with_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    now_s = iter(range(1000))
    with engine(events=True, events_path=path, clock=lambda: float(next(now_s))) as kv:
        serve(kv, "first", [*DOCUMENT, 5])
        assert kv.ledger.pool.reset()
        serve(kv, "again", [*DOCUMENT, 6])
        serve(kv, "other", list(range(100, 132)))
        kv.reset()
        kept = [*kv.take_events(), *kv.take_transfer_events()]
    written = lines(path)
    times = [line.pop("time_s") for line in written]
    assert times == sorted(times)  # type: ignore[type-var]
    assert len(set(times)) > 3

    def as_line(event: events.BlockEvent | events.TransferEvent) -> str:
        return json.dumps(event_fields(event), default=bytes.hex, sort_keys=True)

    assert Counter(map(as_line, kept)) == Counter(
        json.dumps(line, sort_keys=True) for line in written
    )
    kinds = {line["event"] for line in written}
    assert kinds == {
        "BlockStored", "BlockRemoved", "AllBlocksCleared",
        "TransferInitiated", "CacheStoreCommitted", "TransferCompleted",
    }  # fmt: skip
    hashes = [digest.hex() for digest in hash_tokens(DOCUMENT, BLOCK)]
    assert {line.get("medium") for line in written if "medium" in line} == {"GPU", "CPU"}
    [first, *_] = [line for line in written if line["event"] == "BlockStored"]
    assert first == {
        "event": "BlockStored",
        "medium": "GPU",
        "group": 0,
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": DOCUMENT,
        "extra_keys": [["lora", 7, "01ff"], None] * 2,
        "block_size": BLOCK,
    }
    on_host = [line for line in written if line["event"] == "BlockStored"][1]
    assert (on_host["medium"], on_host["block_hashes"]) == ("CPU", hashes)
    assert [line for line in written if line.get("job_id") == 1] == [
        {"event": "TransferInitiated", "job_id": 1, "direction": "store", "num_blocks": 4},
        {"event": "CacheStoreCommitted", "job_id": 1, "num_blocks": 4},
        {"event": "TransferCompleted", "job_id": 1, "direction": "store", "ok": True},
    ]


@pytest.mark.parametrize("now_s", [np.float32(1.5), np.int64(2), Fraction(3, 2), True], ids=repr)
def test_time_of_any_real_number_is_a_number_in_the_file(now_s: float, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with engine(events_path=path, load_timeout_s=60.0, clock=lambda: now_s) as kv:
        serve(kv, "first", DOCUMENT)
        assert type(kv.stats()["store_seconds"]) is float
    assert {type(line["time_s"]) for line in lines(path)} == {float}
    assert {line["time_s"] for line in lines(path)} == {float(now_s)}


@pytest.mark.parametrize("now_s", [float("nan"), float("inf"), None, "1"], ids=repr)
def test_time_that_is_no_finite_number_is_refused_and_loses_no_event(
    now_s: object, tmp_path: Path
) -> None:
    path = tmp_path / "events.jsonl"
    times: list[object] = [now_s]
    with engine(events_path=path, clock=lambda: times[-1]) as kv:
        assert kv.ledger.pool.reset()
        with pytest.raises(ConfigError, match="the clock says"):
            kv.poll()
        assert path.read_bytes() == b""
        times.append(0.5)
        kv.poll()
    [line] = lines(path)
    assert line == {"time_s": 0.5, "event": "AllBlocksCleared", "medium": "GPU"}


def test_the_module_docstring_lists_the_fields_of_each_event() -> None:
    documented = events.__doc__ or ""
    for kind, fields in events._FIELDS.items():
        _, found, rest = documented.partition(f"    {kind.__name__} ")
        assert found, kind
        block = rest.split("\n\n")[0].replace("\n" + " " * 25, " ").split("\n")[0]
        assert tuple(block.replace(",", "").split()) == fields
        shown = {name for name, member in vars(kind).items() if not name.startswith("_")}
        assert set(fields) == shown, "a field of the event is left out"


def test_a_second_engine_appends_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for name in "first", "second":
        with engine(events_path=path) as kv:
            serve(kv, name, DOCUMENT)
    kinds = [line["event"] for line in lines(path)]
    assert kinds == kinds[: len(kinds) // 2] * 2


def test_event_behind_a_line_that_a_crash_cut_off_has_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        with engine(events_path=path) as kv:
            serve(kv, "first", DOCUMENT)
    num_lines = len(lines(path))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with engine(events_path=path) as kv:
        assert path.read_bytes() == whole[:-20]
        for name in "first", "again":
            serve(kv, name, DOCUMENT)
    written = path.read_bytes().splitlines()
    assert written[: num_lines - 1] == whole.splitlines()[:-1]
    assert written[num_lines - 1] == whole.splitlines()[-1][:-19]
    assert len(written) > num_lines
    assert all(json.loads(line) for line in written[num_lines:])


def test_close_completes_the_transfers_in_flight_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with engine(events_path=str(path)) as kv:
        kv.add("first", hash_tokens(DOCUMENT, BLOCK))
        kv.admit("first", 16, 16, after=READY)
        kv.computed(["first"], [16], after=READY)
        kv.close()
        kv.close()
    assert [line["event"] for line in lines(path)][-2:] == [
        "TransferInitiated",
        "TransferCompleted",
    ]
    assert lines(path)[-1]["ok"] is False


def test_an_engine_keeps_events_for_the_caller_only_on_request(tmp_path: Path) -> None:
    for path in None, tmp_path / "events.jsonl":
        with engine(events_path=path) as kv:
            if path is not None:
                serve(kv, "first", DOCUMENT)
            assert (kv.take_events(), kv.take_transfer_events()) == ([], [])
    with engine(events=True) as kv:
        serve(kv, "first", DOCUMENT)
        assert {type(event) for event in kv.take_events()} == {BlockStored}
        kinds = [type(event) for event in kv.take_transfer_events()]
        assert kinds == [TransferInitiated, CacheStoreCommitted, TransferCompleted]
        assert (kv.take_events(), kv.take_transfer_events()) == ([], [])


def store(kv: Engine) -> None:
    """Compute the document, and end its store."""
    kv.add("first", hash_tokens(DOCUMENT, BLOCK))
    kv.admit("first", 16, 16, after=READY)
    stored = kv.computed(["first"], [16], after=READY)
    assert stored is not None
    kv.end(stored)


def test_interrupted_poll_loses_no_event(tmp_path: Path) -> None:
    """Events may come twice then, and the last one about a block is still right."""
    for line in range(1, 1000):
        path = tmp_path / f"{line}.jsonl"
        with engine(events=True, events_path=path) as kv:
            store(kv)
            interrupted = is_interrupted(kv.poll, line, event_log.__file__)
            kv.poll()
            kept = [event_fields(it) for it in (*kv.take_events(), *kv.take_transfer_events())]
            for events_ in kept, lines(path):
                assert {it["event"] for it in events_} == {
                    "BlockStored", "TransferInitiated", "CacheStoreCommitted", "TransferCompleted",
                }, f"line {line}"  # fmt: skip
                media = {it["medium"] for it in events_ if it["event"] == "BlockStored"}
                assert media == {"GPU", "CPU"}, f"line {line}"
        if not interrupted:
            break
    assert line > 15


def test_an_interrupt_behind_a_call_loses_no_events() -> None:
    for number in range(1, 1000):
        with engine(events=True) as kv:
            store(kv)
            interrupted = is_interrupted_behind(kv.flush_events, number, event_log.__file__)
            stores = [it for it in kv.take_events() if isinstance(it, BlockStored)]
            assert {it.medium for it in stores} == {"GPU", "CPU"}, f"call {number}"
            kinds = {type(it) for it in kv.take_transfer_events()}
            assert kinds == {TransferInitiated, CacheStoreCommitted, TransferCompleted}
        if not interrupted:
            break
    assert number > 3


# -- a file that cannot be written -------------------------------------------------------------


@pytest.mark.parametrize("name", ["missing/events.jsonl", "."])
def test_the_error_names_a_file_that_cannot_be_opened(tmp_path: Path, name: str) -> None:
    path = f"{tmp_path}/{name}"
    num_threads = threading.active_count()
    with pytest.raises(ConfigError, match=r"cannot be opened .* name a file") as raised:
        engine(events_path=path)
    assert repr(path) in str(raised.value)
    assert threading.active_count() <= num_threads


@pytest.mark.parametrize("kind", ["pipe", "pipe with a reader", "socket"])
def test_a_file_that_could_block_the_engine_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "events"
    with ExitStack() as opened:
        if kind == "socket":
            server = opened.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(path))
        else:
            os.mkfifo(path)
        if kind == "pipe with a reader":
            opened.callback(os.close, os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        num_open = _num_open(path)
        with pytest.raises(ConfigError, match=r"cannot be opened .* is a pipe or .* name a file"):
            EventFile(path)
        assert _num_open(path) == num_open


def test_character_devices_take_events() -> None:
    with EventFile(os.devnull) as file:
        pool = BlockPool(4, events=True)
        pool.cache(pool.allocate(1), [b"ab"])
        file.write(pool.take_events())
        assert (file.num_written, file.num_lost) == (1, 0)
        assert file._descriptor is not None
        assert os.get_blocking(file._descriptor)


def test_an_unreferenced_file_closes_its_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    files = [EventFile(path) for _ in range(5)]
    assert _num_open(path) == 5
    files[0].close()
    files.clear()
    gc.collect()
    assert _num_open(path) == 0


def _num_open(path: Path) -> int:
    """Return how many descriptors of this process name `path`."""
    return sum(os.path.realpath(link) == str(path) for link in Path("/proc/self/fd").iterdir())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_writes_no_events(tmp_path: Path) -> None:
    pool = BlockPool(4, events=True)
    pool.cache(pool.allocate(1), [b"ab"])
    cached = pool.take_events()
    with EventFile(tmp_path / "events.jsonl") as file:

        def check() -> None:
            file.write(cached)
            assert (file.num_written, file.num_lost) == (0, 1)
            file.close()

        in_child(check)
        file.write(cached)
    assert len(lines(tmp_path / "events.jsonl")) == 1


def test_a_failing_mover_leaves_no_open_file(tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("no mover")

    path = tmp_path / "events.jsonl"
    with pytest.raises(ConfigError, match="no mover"):
        engine(events_path=path, mover=refuse)
    assert _num_open(path) == 0


@pytest.mark.skipif(not FULL_DISK.exists(), reason="needs Linux's /dev/full")
def test_an_engine_logs_a_full_disk_once_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engine(events=True, events_path=FULL_DISK) as kv:
        for round_ in range(3):
            serve(kv, f"request {round_}", list(range(16 * round_, 16 * round_ + 16)))
        num_events = len(kv.take_events()) + len(kv.take_transfer_events())
        assert kv.stats()["lost_events"] == num_events > 10
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("kvstow: the events file '/dev/full' cannot be written")
    assert "No space left" in record.getMessage()


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """It runs in a child process, because the limit applies to the whole process."""
    path = tmp_path / "events.jsonl"
    code = f"""
import resource
from kvstow import BlockPool
from kvstow.observability.events import EventFile
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
pool = BlockPool(100, events=True)
with EventFile({str(path)!r}, clock=lambda: 0.5) as file:
    for number in range(20):
        ids = pool.allocate(1)
        pool.cache(ids, [b"%08d" % number])
        file.write(pool.take_events())
    print(file.num_written, file.num_lost)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    num_written, num_lost = map(int, done.stdout.split())
    assert num_written + num_lost == 20
    assert num_written == len(lines(path)) > 2
    assert path.read_text().endswith("\n")
    assert done.stderr.count("\n") == 1
    assert "File too large" in done.stderr


def test_partial_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real_write(file, data[:7]))
    path = tmp_path / "events.jsonl"
    with EventFile(path, clock=lambda: 0.5) as file:
        pool = BlockPool(4, events=True)
        pool.cache(pool.allocate(2), [b"ab", b"cd"])
        file.write(pool.take_events())
        pool.evict([1])
        assert file.num_written == 1
        file.write([*pool.take_events()])
    [stored, removed] = lines(path)
    assert stored["block_hashes"] == ["6162", "6364"]
    assert removed == {
        "time_s": 0.5, "event": "BlockRemoved", "medium": "GPU", "group": 0,
        "block_hashes": ["6162"],
    }  # fmt: skip


@pytest.mark.parametrize("where", ["behind the part", "between two parts"])
def test_a_full_disk_leaves_the_lines_of_another_writer(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    part, line = b'{"time_s', b'{"time_s": 1}\n'
    num_parts = {"behind the part": 1, "between two parts": 2}[where]
    written: list[int] = []

    def write(file: int, data: bytes) -> int:
        if len(written) == num_parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(real_write(file, part))
        if len(written) == 1:
            with path.open("ab", buffering=0) as other:
                real_write(other.fileno(), line)
        return written[-1]

    real_write = os.write
    pool = BlockPool(4, events=True)
    pool.cache(pool.allocate(1), [b"ab"])
    with EventFile(path) as file:
        monkeypatch.setattr(os, "write", write)
        file.write(pool.take_events())
        monkeypatch.undo()
        assert (file.num_written, file.num_lost) == (0, 1)
    assert path.read_bytes() == part + line + part * (num_parts - 1)


def test_an_error_on_close_is_logged_and_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(descriptor: int) -> None:
        real_close(descriptor)
        raise OSError(errno.EIO, "the server is gone")

    real_close = os.close
    file = EventFile(tmp_path / "events.jsonl")
    monkeypatch.setattr(os, "close", fail)
    file.close()
    file.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


# -- a whole replay ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "seed", "world_size", "blocks_per_slot"),
    [("full", None, 1, 1), ("full", 0, 1, 1), ("full", 2, 2, 4), ("jamba", 1, 1, 1)],
)
def test_each_transfer_is_initiated_and_completed_once(
    tmp_path: Path, model: str, seed: int | None, world_size: int, blocks_per_slot: int
) -> None:
    path = tmp_path / "events.jsonl"
    config = ReplayConfig(
        device_blocks=350 if model == "full" else 700,
        host_blocks=3000 // blocks_per_slot,
        model=model,
        faults=seed,
        world_size=world_size,
        blocks_per_slot=blocks_per_slot,
        events_path=str(path),
    )
    replay = ReplayEngine(read_trace(BUNDLED_TRACE, limit=150), config)
    try:
        replay.run()
    finally:
        replay.close()
    stats, found = replay.kv.stats(), lines(path)
    assert stats["lost_events"] == 0
    of_kind: dict[object, list[dict[str, object]]] = {}
    for line in found:
        of_kind.setdefault(line["event"], []).append(line)

    initiated, completed = of_kind["TransferInitiated"], of_kind["TransferCompleted"]
    jobs = [line["job_id"] for line in initiated]
    assert jobs == list(range(1, len(jobs) + 1))
    assert sorted(line["job_id"] for line in completed) == jobs  # type: ignore[type-var]
    way = {line["job_id"]: line["direction"] for line in initiated}
    assert all(line["direction"] == way[line["job_id"]] for line in completed)
    assert len(set(way.values())) == 2

    num_failed = Counter(line["direction"] for line in completed if not line["ok"])
    assert num_failed["store"] == stats["failed_stores"]
    assert num_failed["load"] == stats["failed_loads"]
    assert (num_failed.total() > 0) == (seed is not None)
    committed = of_kind["CacheStoreCommitted"]
    assert sum(line["num_blocks"] for line in committed) == stats["stored_blocks"]  # type: ignore[misc]
    good = {line["job_id"] for line in completed if line["ok"] and line["direction"] == "store"}
    assert {line["job_id"] for line in committed} == good

    # In each memory, the blocks stored and not removed are those cached. On the device several
    # blocks may hold a key.
    num_held = {}
    for medium in "GPU", "CPU":
        held: set[object] = set()
        for line in found:
            if line.get("medium") != medium:
                continue
            keys = {(line["group"], name) for name in line["block_hashes"]}  # type: ignore[attr-defined]
            if line["event"] == "BlockStored":
                assert not held & keys
                held |= keys
            else:
                assert keys <= held
                held -= keys
        num_held[medium] = len(held)
    assert num_held["CPU"] == stats["resident_blocks"] > 0
    assert 0 < num_held["GPU"] <= stats["device_blocks_cached"]


def test_two_runs_of_the_command_write_equal_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    small = ["replay", "--limit", "100", "--device-blocks", "350", "--host-blocks", "1500"]
    for path in paths:
        assert cli.main([*small, "--faults", "3", "--events", str(path)]) == 0
    one, two = (path.read_text() for path in paths)
    assert one == two
    assert "TransferCompleted" in one
    assert cli.main([*small, "--events", str(tmp_path / "missing" / "events.jsonl")]) == 2
    assert "events file" in capsys.readouterr().err


@pytest.mark.skipif(not FULL_DISK.exists(), reason="needs Linux's /dev/full")
def test_the_command_reports_lost_events(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["replay", "--limit", "20", "--device-blocks", "350"]
    assert cli.main([*small, "--events", str(FULL_DISK)]) == 0
    assert "/dev/full cannot be written" in capsys.readouterr().out
    assert cli.main([*small, "--events", os.devnull]) == 0
    assert "events lost" not in capsys.readouterr().out


def test_the_file_knows_every_kind_of_event() -> None:
    assert set(events._FIELDS) == {
        BlockStored, BlockRemoved, AllBlocksCleared,
        TransferInitiated, CacheStoreCommitted, TransferCompleted,
    }  # fmt: skip
