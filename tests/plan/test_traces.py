"""Traces in every form, several as one, and the blocks that they look up."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstow import ConfigError
from kvstow.plan import build_workload, read_traces
from kvstow.replay import BUNDLED_TRACE, read_trace

BLOCK = 4


def line(at: float, ids: Sequence[int], *, output: int = 0, size: int = BLOCK) -> str:
    fields = {"timestamp": at, "input_length": size * len(ids), "output_length": output}
    return json.dumps(fields | {"hash_ids": list(ids)}) + "\n"


def tokens(at: float, ids: Sequence[int]) -> str:
    fields = {"timestamp": at, "prompt_token_ids": list(ids), "output_length": 0}
    return json.dumps(fields) + "\n"


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    first.write_text(line(0, [1, 2]) + line(2000, [1, 3]))
    second.write_bytes(gzip.compress((line(0, [1, 2, 4]) + line(1000, [1, 3])).encode()))
    return [first, second]


def test_several_files_are_served_in_the_order_of_arrival(two: list[Path]) -> None:
    trace = read_traces(two, block_size=BLOCK)
    arrived = [(one.arrival_s, one.request.trace_ids) for one in trace.requests]
    assert arrived == [(0, (1, 2)), (0, (1, 2, 4)), (1, (1, 3)), (2, (1, 3))]
    assert build_workload(trace, BLOCK).prompts == [[1, 2], [1, 2, 4], [1, 3], [1, 3]]


def test_separate_files_share_no_block(two: list[Path]) -> None:
    trace = read_traces(two, block_size=BLOCK, separate=True)
    first, second, third, fourth = build_workload(trace, BLOCK).prompts
    assert not {*first, *fourth} & {*second, *third}
    assert first[0] == fourth[0]
    assert second[0] == third[0]


def test_ids_that_disagree_between_files_are_refused(two: list[Path]) -> None:
    two[0].write_text(line(0, [2, 1]))
    with pytest.raises(ConfigError, match=r"b.jsonl.gz:1: .*--separate-files .* token ids"):
        read_traces(two, block_size=BLOCK)
    assert len(read_traces(two, block_size=BLOCK, separate=True).requests) == 3


def test_error_in_one_file_names_chain_and_a_way_out_of_joined_traces(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(line(0, [1, 2]) + line(0, [2, 1]))
    with pytest.raises(ConfigError, match=r"before. Pass --chain if .* If several traces"):
        read_traces([path], block_size=BLOCK)


def test_token_ids_of_several_files_share_blocks(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_text(tokens(0, range(40)))
    trace = read_traces(paths)
    assert trace.block_size == 16
    first, second = build_workload(trace, 16).prompts
    assert first == second
    assert len(first) == 2


def test_token_ids_of_several_files_share_no_more_than_their_prefix(tmp_path: Path) -> None:
    prompts = [*range(40)], [*range(16), *range(100, 124)], [*range(200, 240)]
    paths = [tmp_path / str(number) for number in range(len(prompts))]
    for path, ids in zip(paths, prompts, strict=True):
        path.write_text(tokens(0, ids))
    first, second, third = build_workload(read_traces(paths), 16).prompts
    assert first[0] == second[0]
    assert len({*first, *second, *third}) == 2 + 1 + 2


def test_separate_files_of_token_ids_share_no_block(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_text(2 * tokens(0, range(40)))
    trace = read_traces([*paths, paths[0]], separate=True)
    first, again, *others = build_workload(trace, 16).prompts
    assert first == again
    assert len({*first}.union(*others)) == 3 * 2


def test_chain_without_hash_ids_is_refused(tmp_path: Path) -> None:
    own, ids = tmp_path / "tokens", tmp_path / "ids"
    own.write_text(tokens(0, range(40)))
    with pytest.raises(ConfigError, match=r"--chain is given, and .*tokens has prompt_token_ids: "):
        read_traces([own], chain=True)
    ids.write_text(line(0, [0, 1], size=16))
    assert read_traces([own, ids], chain=True, block_size=16).is_content


def test_file_that_is_given_twice_is_refused_unless_separate(two: list[Path]) -> None:
    with pytest.raises(ConfigError, match=r"b.jsonl.gz is given twice, .*pass it once, or pass -"):
        read_traces([*two, two[1]], block_size=BLOCK)
    assert len(read_traces([*two, two[1]], block_size=BLOCK, separate=True).requests) == 6


@pytest.mark.parametrize("has_tokens", [False, True])
def test_copy_of_a_file_is_refused_unless_separate(tmp_path: Path, has_tokens: bool) -> None:
    made = tokens if has_tokens else line
    text = made(0, [0, 1]) + made(1000, [0, 1])
    first, second, other = (tmp_path / name for name in ("a.jsonl", "a.jsonl.gz", "b.jsonl"))
    first.write_text(text)
    second.write_bytes(gzip.compress(text.encode()))
    other.write_text(made(0, [0, 1]) + made(2000, [0, 1]))
    with pytest.raises(ConfigError, match=r"a.jsonl.gz has the same requests as \S+a.jsonl, and"):
        read_traces([first, other, second], block_size=BLOCK)
    assert len(read_traces([first, second], block_size=BLOCK, separate=True).requests) == 4
    assert len(read_traces([first, other], block_size=BLOCK).requests) == 4


def test_tokens_and_ids_share_no_block(tmp_path: Path) -> None:
    ids, own = tmp_path / "ids", tmp_path / "tokens"
    ids.write_text(2 * line(0, [0, 1]))
    own.write_text(2 * tokens(0, range(8)))
    prompts = build_workload(read_traces([ids, own], block_size=BLOCK), BLOCK).prompts
    assert not set(prompts[0]) & set(prompts[2])


def test_passages_are_chained_by_path(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(line(0, [1, 2]) + line(0, [2, 1]) + line(0, [1, 2, 1]))
    first, second, third = build_workload(
        read_traces([path], block_size=BLOCK, chain=True), BLOCK
    ).prompts
    assert not set(first) & set(second)
    assert third[:2] == first
    assert len(set(third)) == 3


def test_larger_blocks_take_the_key_of_their_last_part(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(line(0, [1, 2, 3, 4, 5], output=13))
    trace = read_traces([path], block_size=BLOCK)
    work = build_workload(trace, 2 * BLOCK)
    # 20 prompt tokens fill 2 blocks of 8, and 33 tokens in all fill 4.
    assert (work.prompts, work.num_generated) == ([[2, 4]], [2])
    assert (work.num_blocks, work.num_filled) == (2, 4)
    passages = build_workload(read_traces([path], block_size=BLOCK, chain=True), BLOCK)
    doubled = build_workload(read_traces([path], block_size=BLOCK, chain=True), 2 * BLOCK)
    assert doubled.prompts == [passages.prompts[0][1::2]]


def test_workload_of_the_bundled_trace_counts_full_blocks() -> None:
    requests = read_trace(BUNDLED_TRACE).requests
    work = build_workload(read_traces([BUNDLED_TRACE]), 512)
    assert work.num_blocks == sum(request.prompt_tokens // 512 for request in requests)
    assert work.num_filled == sum(request.total_tokens // 512 for request in requests)
    keys, offsets = work.all_keys
    assert len(keys) == offsets[-1] == work.num_filled == sum(map(len, work.digests))
    generated = keys[keys >= 2**63]
    assert len(set(generated.tolist())) == len(generated) == work.num_filled - work.num_blocks


@pytest.mark.parametrize(
    ("texts", "block_size", "message"),
    [
        ([""], None, r"t0: the trace is empty"),
        ([line(0, [1, 2, 3])], 16, r"found 3 hash_ids, expected 1 .*: pass --block-size if"),
        ([line(0, [1], size=8)], 5, r"expected 2 .*, or give the last block, of 3 tokens, an id"),
        ([line(0, [1], size=8)], 4, r"expected 2 .* the ids name passages$"),
        ([line(0, [2**64 - 1])], BLOCK, r"hash_ids\[0\] is .*: shift hashes of 64 bits right by 1"),
        ([line(0, [1, 2])], None, r"found 2 hash_ids, expected 1 \(ceil\(8 / 512\)\)"),
        ([line(0, [1]) + tokens(0, [1])], BLOCK, r":2: the lines before have hash_ids, and all"),
        ([tokens(0, [1]) + line(0, [1])], BLOCK, r":2: the lines before have prompt_token_ids"),
        (['{"timestamp": 0}\n'], None, r":1: no 'hash_ids'; a request has .*, and this line has t"),
        ([line(0, [1], size=512), tokens(0, [1])], None, r"blocks of 16 and 512 tokens.*: pass --"),
        ([line(0, [1])], 0, r"block-size is 0; it must be 1 to"),
    ],
)
def test_bad_trace_is_refused(
    texts: list[str], block_size: int | None, message: str, tmp_path: Path
) -> None:
    paths = [tmp_path / f"t{number}" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_traces(paths, block_size=block_size)


def test_trace_without_a_full_block_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(line(0, [1, 2]))
    trace = read_traces([path], block_size=BLOCK)
    with pytest.raises(ConfigError, match=r"^no prompt of .*t fills a block of 32 tokens, so not"):
        build_workload(trace, 32)


def test_standard_input_is_read_once() -> None:
    with pytest.raises(ConfigError, match=r"^- stands for standard input, and is given twice"):
        read_traces(["-", "-"])
