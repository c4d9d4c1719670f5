"""A fleet hits what its servers and their shared store have together."""

from __future__ import annotations

import importlib.util
import io
import json
import random
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from kvstow import ConfigError
from kvstow.cli import main
from kvstow.engine import Policy
from kvstow.replay import Trace, TraceRequest
from kvstow.replay.fleet import (
    _ACCOUNTING_BYTES,
    Fleet,
    FleetFigures,
    SharedBlocks,
    serve_all,
)
from kvstow.replay.fleet_command import fleet_chart
from kvstow.report.picture import draw_png

BLOCK_SIZE = 16


def trace_of(*prompts: list[int]) -> Trace:
    """Return a trace of whole blocks, whose requests generate one token."""
    requests = [
        TraceRequest(line, float(line), len(ids) * BLOCK_SIZE, 1, tuple(ids))
        for line, ids in enumerate(prompts, 1)
    ]
    return Trace("a trace", BLOCK_SIZE, requests)


def sessions(seed: int, num_requests: int = 200) -> Trace:
    """Return a trace of conversations that grow, and share their first block."""
    draw, fresh = random.Random(seed), iter(range(10, 10_000))
    chats: list[list[int]] = []
    prompts = []
    for _ in range(num_requests):
        if not chats or draw.random() < 0.3:
            chats.append([0])
        chat = draw.choice(chats[-8:])
        chat += [next(fresh) for _ in range(draw.randint(1, 3))]
        prompts.append(chat[:24])
    return trace_of(*prompts)


def infinite_hits(trace: Trace) -> int:
    """Return the hits of one cache that loses nothing."""
    seen: set[tuple[int, ...]] = set()
    num_hits = 0
    for request in trace.requests:
        ids = request.trace_ids
        prefixes = [ids[: at + 1] for at in range(len(ids))]
        lookups = prefixes[: (request.prompt_tokens - 1) // BLOCK_SIZE]
        num_hits += next((at for at, one in enumerate(lookups) if one not in seen), len(lookups))
        seen.update(prefixes)
    return num_hits


def hits(figures: FleetFigures) -> int:
    return figures.host_hits + figures.shared_hits


def test_one_server_finds_what_another_computed() -> None:
    trace, fleet = trace_of([1, 2, 3], [1, 2, 3], [1, 2, 4]), Fleet(host_blocks=8)
    alone = fleet.serve(trace, 2, is_shared=False)
    assert (alone.asked, alone.host_hits, alone.shared_hits) == (9, 2, 0)
    shared = fleet.serve(trace, 2, is_shared=True)
    # One token is left to compute, so the last block of a prompt is never a hit.
    assert (shared.host_hits, shared.shared_hits) == (2, 2)
    # So the second server computes that block again, does not ask for it, and puts it.
    assert (shared.puts, shared.questions, shared.asked_keys) == (5, 2, 4)
    assert shared.hit_ratio == pytest.approx(4 / 9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("routing", ["round-robin", "prefix"])
def test_a_store_without_a_bound_makes_any_fleet_one_cache(seed: int, routing: str) -> None:
    trace = sessions(seed)
    fleet = Fleet(host_blocks=30, routing=routing)  # type: ignore[arg-type]
    expected = infinite_hits(trace)
    for num_servers in (1, 2, 5):
        shared = fleet.serve(trace, num_servers, is_shared=True)
        assert hits(shared) == expected, f"seed {seed}, {num_servers} servers"
        assert hits(fleet.serve(trace, num_servers, is_shared=False)) <= expected
        assert shared.lost == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_small_store_loses_blocks_and_the_fleet_goes_on(seed: int) -> None:
    trace = sessions(seed)
    large = Fleet(host_blocks=30).serve(trace, 3, is_shared=True)
    small = Fleet(host_blocks=30, shared_blocks=40).serve(trace, 3, is_shared=True)
    alone = Fleet(host_blocks=30).serve(trace, 3, is_shared=False)
    assert hits(alone) <= hits(small) < hits(large), f"seed {seed}"
    assert small.lost > large.lost == 0, f"seed {seed}"


@pytest.mark.parametrize("seed", range(5))
def test_prefix_routing_keeps_a_conversation_on_its_server(seed: int) -> None:
    trace, fleet = sessions(seed), Fleet(host_blocks=60, routing="prefix")
    by_prefix = fleet.serve(trace, 4, is_shared=False)
    by_turns = Fleet(host_blocks=60).serve(trace, 4, is_shared=False)
    assert hits(by_prefix) > hits(by_turns), f"seed {seed}"
    assert by_prefix.busiest <= 1.25 * by_prefix.asked / 4 + 24, f"seed {seed}"


def parts_by_prefix(trace: Trace, num_servers: int) -> list[Trace]:
    """Return what each server gets by the rule of `--routing prefix`."""
    parts: list[list[TraceRequest]] = [[] for _ in range(num_servers)]
    served: list[tuple[tuple[int, ...], int]] = []
    for request in trace.requests:
        ids = request.trace_ids
        loads = [sum(len(one.trace_ids) for one in part) for part in parts]
        idlest = loads.index(min(loads))
        known = (
            at
            for size in range(len(ids), 0, -1)
            for prompt, at in reversed(served)
            if prompt[:size] == ids[:size]
        )
        at = next(known, idlest)
        most = 1.25 * (sum(loads) + len(ids)) / num_servers
        if loads[at] + len(ids) > most and loads[at] > loads[idlest]:
            at = idlest
        parts[at].append(request)
        served.append((ids, at))
    return [Trace("a part", BLOCK_SIZE, part) for part in parts]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_servers", [1, 2, 5])
def test_prefix_routing_takes_the_server_that_last_got_the_longest_prefix(
    seed: int, num_servers: int
) -> None:
    # Outputs of two blocks, which are no part of a prompt.
    of = sessions(seed, num_requests=80)
    trace = replace(of, requests=[replace(one, output_tokens=40) for one in of.requests])
    fleet = Fleet(host_blocks=5000, routing="prefix")  # so many that no server loses a block
    found = fleet.serve(trace, num_servers, is_shared=False)
    parts = parts_by_prefix(trace, num_servers)
    assert found.busiest == max(part.num_blocks for part in parts)
    assert hits(found) == sum(map(infinite_hits, parts))


def test_prefix_routing_leaves_no_server_for_one_with_as_many_blocks() -> None:
    trace = trace_of([1, 2], [3, 4], [3, 4])  # the third exceeds the share of either server
    assert Fleet(8, routing="prefix").serve(trace, 2, is_shared=False).host_hits == 1


def test_blocks_of_outputs_are_stored_and_put() -> None:
    """A request ends with 32 tokens of its prompt and 40 of its output, so with 4 full blocks."""
    requests = [TraceRequest(line, 0.0, 32, 40, (1, 2)) for line in (1, 2)]
    figures = Fleet(8).serve(Trace("a trace", BLOCK_SIZE, requests), 1, is_shared=True)
    assert (figures.asked, figures.host_hits) == (4, 1)
    # The second request has the blocks of the prompt, and an output of its own.
    assert figures.puts == 4 + 2


def test_one_server_gets_all_blocks_that_are_asked_for() -> None:
    """Also if the last block of a prompt is not full."""
    requests = [TraceRequest(1, 0.0, 5, 1, (1,)), TraceRequest(2, 1.0, 40, 1, (2, 3, 4))]
    trace = Trace("a trace", BLOCK_SIZE, requests)
    for num_servers, busiest in (1, 4), (2, 3):
        figures = Fleet(host_blocks=8).serve(trace, num_servers, is_shared=True)
        assert (figures.asked, figures.busiest) == (4, busiest)


def test_the_policy_of_a_fleet_is_that_of_its_servers() -> None:
    trace = sessions(0)
    lru, density = (
        Fleet(host_blocks=30, policy=policy).serve(trace, 1, is_shared=False)
        for policy in ("lru", "hit-density")
    )
    assert lru.asked == density.asked
    assert lru.host_hits != density.host_hits


def test_a_row_has_the_figures_of_both_fleets_and_each_request_is_reported() -> None:
    trace = sessions(0, num_requests=60)
    num_served = 0

    def served() -> None:
        nonlocal num_served
        num_served += 1

    for row in serve_all(Fleet(host_blocks=30), trace, [1, 3], served):
        shown = row.as_json()
        for name, figures in ("alone", row.alone), ("shared", row.shared):
            expected = asdict(figures) | {"hit_ratio": hits(figures) / figures.asked}
            assert shown[name] == expected
        assert hits(row.alone) < hits(row.shared)
    assert num_served == 2 * 2 * len(trace.requests)


def test_the_store_drops_what_was_used_longest_ago() -> None:
    store = SharedBlocks(2)
    store.put(b"a")
    store.put(b"b")
    assert store.get(b"a")
    assert store.has(b"b"), "a question makes no block recent"
    store.put(b"c")
    assert [store.has(name) for name in (b"a", b"b", b"c")] == [True, False, True]
    assert not store.get(b"b")
    assert (len(store), store.num_evicted) == (2, 1)


def test_sizes_that_cannot_be_are_refused() -> None:
    trace = trace_of([1])
    with pytest.raises(ConfigError, match="servers is 0: it must be 1 to 1024"):
        Fleet(8).serve(trace, 0, is_shared=True)
    with pytest.raises(ConfigError, match="shared-blocks is 0: it must be 1 or more"):
        Fleet(8, shared_blocks=0).serve(trace, 1, is_shared=True)


def test_the_command_reports_a_row_for_each_fleet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    png = tmp_path / "hits.png"
    arguments = ["replay", "--limit", "60", "--servers", "1,3", "--host-blocks", "300"]
    assert main([*arguments, "--json", "--png", str(png)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["servers"] for row in report["rows"]] == [1, 3]
    one, three = report["rows"]
    assert three["shared"]["hit_ratio"] == one["shared"]["hit_ratio"]
    assert three["alone"]["hit_ratio"] <= three["shared"]["hit_ratio"]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert main([*arguments, "--routing", "prefix"]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert table.startswith("conversation_1000.jsonl.gz (bundled): 60 requests")
    assert "300 blocks (18.8 GiB) on each host, prefix, store unbounded" in table
    assert "GiB as in Llama-3.1-8B" in table
    puts = one["shared"]["puts"]
    assert f"{puts:,} ({puts / 16:,.1f})" in table


def test_the_table_has_a_line_that_a_terminal_without_utf_8_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="latin-1"))
    assert main(["replay", "--limit", "2", "--servers", "1"]) == 0
    text = shown.getvalue().decode("latin-1")
    assert " ---------------" in text
    assert "\\u" not in text


@pytest.mark.parametrize("servers", [[1], [1, 2, 3], [1, 4]])
def test_picture_names_whole_numbers_of_servers(
    servers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn: list[float] = []
    save = figure.savefig

    def saved(self: Any, *arguments: Any, **options: Any) -> None:
        save(self, *arguments, **options)
        drawn.extend(tick for axes in self.axes for tick in axes.get_xticks())

    monkeypatch.setattr(figure, "savefig", saved)
    fleet = Fleet(host_blocks=60)
    draw_png([fleet_chart(fleet, serve_all(fleet, sessions(0, 20), servers, lambda: None))])
    assert set(servers) <= set(drawn)
    assert all(tick.is_integer() for tick in drawn)


def test_png_without_matplotlib_is_refused_before_the_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    png, trace = tmp_path / "hits.png", tmp_path / "trace.jsonl"
    trace.write_text("no trace")
    assert main(["replay", str(trace), "--servers", "1,4", "--png", str(png)]) == 2
    assert capsys.readouterr().err == (
        "kvstow: --png needs matplotlib, which is not installed: run pip install 'kvstow[plot]'\n"
    )
    assert not png.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--servers", "1" * 5000], f"servers is '{'1' * 40}': pass numbers"),
        (["--servers", "1_0"], "servers is '1_0': pass numbers such as 1,2,4,8"),
        (["--servers", "-1"], "servers is '-1': pass numbers such as 1,2,4,8"),
        (["--servers", "two"], "servers is 'two': pass numbers such as 1,2,4,8"),
        (["--servers", "2", "--device-blocks", "9"], "--device-blocks has no effect on a fleet"),
        (["--servers", "2", "--png", "x.svg"], "writes no SVG: pass a name that ends in .png\n"),
        (["--servers", "2", "--html", "x.html"], "--html has no effect on a fleet"),
        (
            ["--servers", "2", "--host-blocks", "0"],
            "--host-blocks is 0: it must be 1 to 2147483646, and 1 is as good as none\n",
        ),
        (["--routing", "prefix"], "--routing is for a fleet: pass --servers too"),
        (["--shared-blocks", "9"], "--shared-blocks is for a fleet: pass --servers too"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["replay", "--limit", "5", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--servers", "1,2000"], "servers is 2000: it must be 1 to 1024"),
        (["--servers", "1", "--host-blocks", "99999999999"], "host-blocks is 99999999999: it must"),
        (["--servers", "1", "--shared-blocks", "0"], "shared-blocks is 0: it must be 1 or more"),
    ],
)
def test_sizes_are_refused_before_the_trace_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("no trace")
    assert main(["replay", str(trace), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_fleet_that_needs_more_than_the_free_memory_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstow.replay.fleet.free_memory", lambda: 2**30)
    arguments = ["replay", "--limit", "5", "--host-blocks", "8192", "--servers"]
    assert main([*arguments, "4"]) == 0
    assert main([*arguments, "4,512"]) == 2
    assert capsys.readouterr().err == (
        "kvstow: the accounting of 512 servers with 8192 host blocks each needs 5.1 GiB, and 1.0 "
        "GiB of memory are free: lower --servers or --host-blocks\n"
    )


# Argument: the policy. In a process of its own, no memory is left over from other tests.
MEASURE_BYTES_PER_BLOCK = """
import resource, sys
from pathlib import Path
from kvstow.replay.fleet import SharedBlocks, _Server

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

before = resident_bytes()
servers = [_Server(8192, sys.argv[1], SharedBlocks(None)) for _ in range(16)]
print((resident_bytes() - before) // (16 * 8192))
"""


@pytest.mark.parametrize("policy", get_args(Policy))
def test_accounting_of_a_fleet_takes_the_memory_that_its_check_expects(policy: Policy) -> None:
    command = [sys.executable, "-c", MEASURE_BYTES_PER_BLOCK, policy]
    measured = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert 0.8 * _ACCOUNTING_BYTES < measured <= _ACCOUNTING_BYTES
