import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstow import cli
from kvstow.engine import Transfer
from kvstow.replay import BUNDLED_TRACE, Observer, ReplayEngine, ReplayState, command

COMMAND = [sys.executable, "-m", "kvstow"]
START_PAGE = Path(__file__).parents[2] / "docs" / "start.md"
SMALL = ["--limit", "150", "--device-blocks", "350", "--host-blocks", "1500"]

API_KEYS = {
    "model",
    "requests", "blocks", "hit_blocks", "recomputed_blocks", "stored_blocks", "loaded_blocks",
    "verified_blocks", "corrupt_blocks", "preemptions", "bytes_stored", "bytes_loaded", "steps",
    "seconds", "accounting_us_per_step",
}  # fmt: skip

# Of the bundled slice, with the defaults.
THE_FIGURES = {
    "requests": 1000, "blocks": 27305,
    "hit_blocks": {"device": 1046, "host": 3243, "resumed": 16907},
    "recomputed_blocks": 23016, "stored_blocks": 22712, "loaded_blocks": 3785,
    "evicted_blocks": {"device": 25496, "host": 14520}, "dropped_blocks": 0,
    "verified_blocks": 31782, "corrupt_blocks": 0, "corruptions": [], "preemptions": 437,
    "bytes_stored": 93028352, "bytes_loaded": 15503360, "prefill_tokens": 11665367,
    "decode_tokens": 349343, "steps": 11200, "virtual_seconds": 1240.003850000021,
}  # fmt: skip


def replay(*arguments: str) -> int:
    return cli.main(["replay", *arguments])


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=120
    )


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert replay(*arguments, "--json") == 0
    loaded = json.loads(capsys.readouterr().out)
    assert isinstance(loaded, dict)
    return loaded


def test_json_to_stdout_is_json_and_nothing_else() -> None:
    done = run("replay", *SMALL, "--json")

    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found.keys() >= API_KEYS
    assert found["hit_blocks"].keys() == {"device", "host", "resumed"}
    assert found["accounting_us_per_step"].keys() == {"p50", "p99"}
    assert found["requests"] == found["finished_requests"] == 150
    assert found["corrupt_blocks"] == 0
    hits = found["hit_blocks"]
    assert hits["device"] + hits["host"] + found["recomputed_blocks"] == found["blocks"]
    assert found["bytes_stored"] == 4096 * found["stored_blocks"]
    assert found["bytes_loaded"] == 4096 * found["loaded_blocks"]
    assert found["trace"] == f"{BUNDLED_TRACE.name} (bundled)"  # on every machine
    assert found["model"] == "full"
    assert not found["interrupted"]


def test_the_default_figures_of_the_bundled_slice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The figures depend on the trace and the options only."""
    path = tmp_path / "figures.json"
    assert replay("--json-file", str(path)) == 0
    found = json.loads(path.read_text())
    assert {key: found[key] for key in THE_FIGURES} == THE_FIGURES

    # The page "Start here" shows this table.
    (shown,) = re.findall(r"```text\n(conversation_1000.*?)```", START_PAGE.read_text(), re.DOTALL)
    printed = capsys.readouterr().out
    assert untimed(shown) == untimed(printed)
    assert "1,419.5 GiB in Llama-3.1-8B" in printed


def untimed(table: str) -> list[str]:
    """Return the lines that are equal on every machine, without padding."""
    lines = [" ".join(line.split()) for line in table.splitlines()]
    return [line for line in lines if line and not line.startswith(("accounting", "wall time"))]


@pytest.mark.parametrize("model", ["gemma-3", "gpt-oss", "jamba"])
def test_a_hybrid_model_hits_evicts_and_preempts(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    found = figures(
        capsys, "--model", model, "--limit", "150", "--device-blocks", "700",
        "--host-blocks", "3000",
    )  # fmt: skip

    assert found["model"] == model
    assert found["corrupt_blocks"] == 0
    assert found["verified_blocks"] > 4000  # type: ignore[operator]
    assert found["preemptions"] > 50  # type: ignore[operator]
    hits = found["hit_blocks"]
    assert isinstance(hits, dict)
    assert all(number > 20 for number in hits.values())
    assert hits["device"] + hits["host"] + found["recomputed_blocks"] == found["blocks"]
    assert all(found["evicted_blocks"].values())  # type: ignore[attr-defined]
    options = found["options"]
    assert isinstance(options, dict)
    assert (options["num_layers"], options["bytes_per_token"]) == {
        "gemma-3": (6, 24),
        "gpt-oss": (4, 16),
        "jamba": (8, 18),
    }[model]


def test_the_bundled_slice_under_the_other_policy(capsys: pytest.CaptureFixture[str]) -> None:
    """The policy evicts other blocks, and no block is corrupt."""
    sizes = ("--limit", "600", "--host-blocks", "2000")
    lru = figures(capsys, *sizes)
    found = figures(capsys, *sizes, "--policy", "hit-density")

    assert (found["corrupt_blocks"], found["finished_requests"]) == (0, 600)
    assert found["loaded_blocks"] > 300  # type: ignore[operator]
    assert found["stored_blocks"] != lru["stored_blocks"]


def test_two_runs_differ_only_in_wall_time(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = figures(capsys, *SMALL), figures(capsys, *SMALL)
    for found in (first, second):
        assert found.pop("seconds") is not None
        assert found.pop("accounting_us_per_step") is not None

    assert first == second
    assert first["preemptions"]
    assert first["loaded_blocks"]


def test_the_table_goes_to_stdout_and_json_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    done = run("replay", *SMALL, "--json-file", str(path))

    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(path.read_text())
    for text in (
        "hit on the device",
        "preemptions",
        f"{found['verified_blocks']:,}",
        "blocks (93.8 GiB), lru",
    ):
        assert text in done.stdout


def test_table_compares_the_link_with_that_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", "--limit", "2", "--bandwidth", "1.5MB/s"]) == 0
    # 131,072 bytes a token in Llama-3.1-8B, and 8 here
    row = " ".join(capsys.readouterr().out.split())
    assert "link 1,500,000 bytes/s each way, 25 GB/s in Llama-3.1-8B" in row


def test_table_has_the_sizes_of_the_model_that_was_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    of = ["--limit", "2", "--bandwidth", "1.5MB/s"]
    assert cli.main(["replay", "--model", "qwen3-8b", *of]) == 0
    # 36 layers x 8 KV heads x 128 values x 2 x 2 bytes = 147,456 bytes a token, and 8 here
    row = " ".join(capsys.readouterr().out.split())
    assert "of 512 tokens: 72 MiB each in qwen3-8b" in row
    assert "28 GB/s in qwen3-8b" in row
    assert "Llama" not in row


def test_options_reach_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(
        capsys, "--limit", "3", "--device-blocks", "400", "--host-blocks", "77", "--verify", "off",
        "--step-ms", "1", "--prefill-token-ms", "2", "--decode-request-ms", "3",
        "--max-step-tokens", "1000", "--max-requests", "5", "--bandwidth", "inf", "--layers", "1",
        "--bytes-per-token", "16", "--world-size", "2", "--blocks-per-slot", "3", "--events",
        os.devnull, "--lookahead-tokens", "4", "--sleep-at", "2,2",
    )  # fmt: skip

    assert found["options"] == {
        "device_blocks": 400, "host_blocks": 77, "policy": "lru", "mode": "eager", "mover": "auto",
        "verify": "off", "step_ms": 1.0, "prefill_token_ms": 2.0, "decode_request_ms": 3.0,
        "max_step_tokens": 1000, "max_requests": 5, "bandwidth_bytes_per_s": None, "model": "full",
        "num_layers": 1, "bytes_per_token": 16, "faults": None, "world_size": 2,
        "blocks_per_slot": 3, "events_path": os.devnull, "lookahead_tokens": 4, "sleep_at": [2, 2],
        "disk": None, "disk_blocks": None, "disk_admit": "all", "shared": None,
    }  # fmt: skip
    assert found["bytes_stored"] == 2 * 512 * 16 * found["stored_blocks"]  # type: ignore[operator]
    assert found["verified_blocks"] == 0


# -- bad usage and input: status 2, a message, no traceback -------------------------------------


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        (["--device-blocks", "0"], "device-blocks is 0"),
        (["--device-blocks", "many"], "device-blocks is 'many'; pass a whole number"),
        (["--host-blocks", "-1"], "host-blocks is -1"),
        (["--host-blocks", "2000000000"], "GiB"),
        (["--device-blocks", "20"], "19 of 20 device blocks are usable: pass --device-blocks 241"),
        (["--limit", "0"], "limit is 0"),
        (["--model", "gpt-2"], "model is 'gpt-2'; it must be the path of a config.json or one of"),
        (
            ["--model", "jamba", "--layers", "3"],
            "--layers and --bytes-per-token are fixed for the model 'jamba'",
        ),
        (["--policy", "arc"], "'arc' is not one of 'lru', 'hit-density'.\n"),
        (["--policy", "hit_density"], "'lru', 'hit-density'; did you mean 'hit-density'?\n"),
        (["--policy", "lru,hit-density"], "a replay has one policy, so run it once for each"),
        (["--policy", "lru", "--policy", "hit-density"], "'--policy': given 2 times; a replay has"),
        (["--host-blocks", "16GiB"], "host-blocks is '16GiB'; pass a whole number of blocks"),
        (["--host-blocks", "1024,2048"], "a replay has one size, so run it once for each"),
        (["--bandwidth", "nan"], "bandwidth is nan"),
        (["--bytes-per-token", "7"], "bytes-per-token is 7; it must be a multiple of 4"),
        (["--faults", "-1"], "faults is -1; it must be 0 to"),
        (["--no-such-option"], "No such option"),
        (["one.jsonl", "two.jsonl"], "unexpected extra argument"),
    ],
)
def test_bad_usage_is_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    assert replay(*arguments) == 2
    captured = capsys.readouterr()
    assert problem in captured.err
    assert captured.out == ""


def test_a_bad_trace_is_status_2_without_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0}\n')
    done = run("replay", str(path))

    assert done.returncode == 2
    assert done.stderr.startswith(f"kvstow: {path}:1: no 'input_length'")
    assert "Traceback" not in done.stderr


def test_token_ids_are_to_be_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tokens.jsonl"
    path.write_text('{"timestamp": 0, "prompt_token_ids": [1, 2], "output_length": 1}\n')
    assert replay(str(path)) == 2
    assert "make them from token ids: kvstow trace convert" in capsys.readouterr().err


def test_content_ids_need_chain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "content.jsonl"
    rows = [[1, 2], [2, 1], [2, 1]]
    path.write_text(
        "".join(
            f'{{"timestamp": {ms}, "input_length": 99, "output_length": 2, "hash_ids": {ids}}}\n'
            for ms, ids in enumerate(rows)
        )
    )

    assert replay(str(path)) == 2
    assert f"{path}:2: the ids are not chained" in capsys.readouterr().err
    found = figures(capsys, str(path), "--chain", "--max-requests", "1")
    assert (found["blocks"], found["stored_blocks"]) == (6, 4)
    assert found["prompt_tokens"] == 6 * 512
    # Only the third repeats a path, and all but the last block of it can be hit.
    assert found["hit_blocks"] == {"device": 1, "host": 0, "resumed": 0}


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay("--help") == 0
    shown = capsys.readouterr().out
    assert "--device-blocks" in shown
    assert "Needs matplotlib (kvstow[plot])." in " ".join(shown.split())
    assert cli.main(["--version"]) == 0
    assert cli.main(["no-such-command"]) == 2


# -- corruption: status 1 ----------------------------------------------------------------------


class SpoilHost(Observer):
    """Spoils the slots of every store of several blocks, once it has landed."""

    def __init__(self, fault: Callable[[ReplayState, Transfer], None]) -> None:
        self._fault = fault

    def landed(self, replay: ReplayState, transfer: Transfer) -> None:
        if transfer.direction == "store" and len(transfer.job) > 1:
            self._fault(replay, transfer)


def flip_one_byte(replay: ReplayState, transfer: Transfer) -> None:
    replay.arena.slots[transfer.job.host_slots[0], 1234] ^= 0x04


def swap_two_slots(replay: ReplayState, transfer: Transfer) -> None:
    pair = transfer.job.host_slots[:2]
    replay.arena.slots[pair] = replay.arena.slots[pair[::-1]]


@pytest.mark.parametrize("fault", [flip_one_byte, swap_two_slots])
def test_a_corrupt_block_is_status_1(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[ReplayState, Transfer], None],
) -> None:
    class Faulty(ReplayEngine):
        def run(self) -> None:
            self.observer = SpoilHost(fault)
            super().run()

    monkeypatch.setattr(command, "ReplayEngine", Faulty)

    assert replay(*SMALL, "--json") == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["corrupt_blocks"] > 0
    first = found["corruptions"][0]
    assert first["tier"] == "host"
    assert captured.err.startswith(
        f"corrupt: request {first['request']}: block {first['position']} (id {first['trace_id']}) "
        "of group 0 (full attention) is corrupt in the host tier: "
        f"device block {first['device_block']} of rank 0, "
        f"loaded from host slot {first['host_slot']}\n"
    )


# -- Ctrl-C: status 130, with the figures so far -----------------------------------------------


def test_ctrl_c_reports_the_figures_so_far_and_is_status_130(tmp_path: Path) -> None:
    """The test interrupts the replay when the bar shows one finished request."""
    path, figures_path = tmp_path / "long.jsonl", tmp_path / "figures.json"
    rows = [
        {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [0]},
        {"timestamp": 0, "input_length": 512, "output_length": 2_000_000, "hash_ids": [1]},
        {"timestamp": 2**52, "input_length": 50_000, "output_length": 1,
         "hash_ids": [*range(2, 100)]},
    ]  # fmt: skip
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    terminal, other_end = pty.openpty()
    # A shell may start this process with SIGINT ignored, so the child restores the handler.
    heeding = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('kvstow', run_name='__main__')"
    )
    arguments = ["replay", str(path), "--device-blocks", "5000", "--json-file", str(figures_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", heeding, *arguments],
        stdout=subprocess.PIPE,
        stderr=other_end,
        text=True,
        env=os.environ | {"TERM": "xterm"},
    )
    try:
        os.close(other_end)
        seen = b""
        while b"1/3" not in seen:
            seen += os.read(terminal, 1000)
        process.send_signal(signal.SIGINT)
        table, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)

    assert process.returncode == 130
    found = json.loads(figures_path.read_text())
    assert found["interrupted"]
    assert (found["requests"], found["finished_requests"]) == (3, 1)
    assert (found["blocks"], found["asked_blocks"], found["recomputed_blocks"]) == (100, 2, 2)
    assert found["steps"] > 0
    assert found["seconds"] > 0
    # Shares are of the two blocks asked for so far, not of all 100.
    assert re.search(r"recomputed +2 +100\.0% of the blocks asked for", table)
    assert re.search(r"not yet asked for +98 ", table)
    assert "(interrupted)" in table
