"""The points of a plan: the hits of one cache at capacities in blocks, for programs."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from kvstow import cli

BLOCK = 4


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["plan", *arguments, "--json"]) == 0
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    return made


def write_trace(path: Path, seed: int) -> list[list[int]]:
    """Write requests that share beginnings, and return the ids of their full blocks."""
    draw = random.Random(seed)
    chains: list[list[int]] = [[]]
    num_ids = 0
    full: list[list[int]] = []
    lines = []
    for at in range(120):
        ids = list(draw.choice(chains))
        for _ in range(draw.randint(1, 4)):
            num_ids += 1
            ids.append(num_ids)
        chains.append(ids[: draw.randint(1, min(9, len(ids)))])
        num_tokens = BLOCK * len(ids) - draw.choice([0, 0, 1, 3])
        full.append(ids[: num_tokens // BLOCK])
        request = {
            "timestamp": 10 * at,
            "input_length": num_tokens,
            "output_length": draw.randint(1, 20),
            "hash_ids": ids,
        }
        lines.append(json.dumps(request))
    path.write_text("\n".join(lines) + "\n")
    return full


def lru_hits(prompts: list[list[int]], capacity: int) -> int:
    """Return the hits of a cache that ranks each prompt's blocks tail before root."""
    cache: OrderedDict[int, None] = OrderedDict()
    num_hits = 0
    for prompt in prompts:
        num_found = next((at for at, id in enumerate(prompt) if id not in cache), len(prompt))
        num_hits += num_found
        for id in reversed(prompt):
            cache[id] = None
            cache.move_to_end(id)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return num_hits


@pytest.mark.parametrize("seed", range(5))
def test_points_are_those_of_a_plain_lru(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    prompts = write_trace(path, seed)
    largest = max(map(len, prompts))
    capacities = [largest, largest + 7, 60, 100, 10_000]
    options = [f"--capacity={capacity}" for capacity in capacities]
    made = plan(capsys, str(path), "--block-size", str(BLOCK), "--bytes-per-token", "512", *options)
    num_blocks = sum(map(len, prompts))
    unique = {id for prompt in prompts for id in prompt}
    assert made["blocks"] == num_blocks
    assert made["unique_blocks"] == len(unique)
    assert made["infinite_hit_blocks"] == num_blocks - len(unique)
    assert [point["capacity_blocks"] for point in made["curve"]] == capacities
    for point in made["curve"]:
        assert point["policy"] == "lru"
        hits = lru_hits(prompts, point["capacity_blocks"])
        assert point["hit_blocks"] == hits
        assert point["hit_ratio"] == hits / num_blocks
        assert hits <= point["bound_hit_blocks"] <= made["infinite_hit_blocks"]
        assert point["gib"] == point["capacity_blocks"] * 4096 / 2**30  # slots of whole pages
    assert made["curve"][-1]["hit_blocks"] == made["infinite_hit_blocks"]


def test_each_policy_has_its_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, 7)
    options = ["--policy=lru", "--policy=hit-density", "--capacity=30", "--capacity=90"]
    made = plan(capsys, str(path), "--block-size=4", "--bytes-per-token=512", *options)
    assert made["policy"] == "lru"
    named = [(point["policy"], point["capacity_blocks"]) for point in made["curve"]]
    assert named == [("lru", 30), ("lru", 90), ("hit-density", 30), ("hit-density", 90)]
    assert all(point["hit_blocks"] <= point["bound_hit_blocks"] for point in made["curve"])
    some = plan(capsys, str(path), "--block-size=4", "--bytes-per-token=512")["curve"]
    assert some[-1]["hit_blocks"] == made["infinite_hit_blocks"]


def test_a_hybrid_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, 8)
    arguments = [str(path), "--block-size=4", "--model=gpt-oss-20b", "--host-gib=1"]
    assert plan(capsys, *arguments)["curve"] == []
    (point,) = plan(capsys, *arguments, "--capacity=100000")["curve"]
    assert point["bound_hit_blocks"] is None
    assert point["hit_blocks"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "pass --model or --bytes-per-token"),
        (["--model=llama-3.1-8b", "--bytes-per-token=1"], "--bytes-per-token 1; a plan needs"),
        (["--bytes-per-token=0"], "bytes-per-token is '0'"),
        (["--bytes-per-token=1073741825"], "bytes-per-token is 1073741825; it must be 1 to "),
        (["--bytes-per-token=9", "--tp=2"], "a multiple of the number of ranks, 2"),
        (["--bytes-per-token=8", "--tp=0"], "tensor-parallel-size is 0"),
        (["--bytes-per-token=8", "--dtype=fp8"], "leave --dtype out"),
        (["--bytes-per-token=8", "--capacity=0"], "capacity is 0"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *options]) == 2
    assert message in capsys.readouterr().err
