import bz2
import gzip
import json
import lzma
import os
import re
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstow import ConfigError
from kvstow.replay import BUNDLED_TRACE, read_trace

GOOD = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}


def row(**changes: object) -> str:
    return json.dumps(GOOD | changes)


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """Return a function that reads bad lines and returns the error after the name of the file."""

    def refuse(*lines: str, chain: bool = False) -> str:
        path = written(tmp_path / "trace.jsonl", *lines)
        with pytest.raises(ConfigError) as caught:
            read_trace(path, chain=chain)
        message = str(caught.value)
        assert message.startswith(f"{path}:")
        return message.removeprefix(f"{path}:")

    return refuse


def test_a_request_has_the_fields_of_its_line(tmp_path: Path) -> None:
    second = row(timestamp=2500.5, input_length=1537, output_length=0, hash_ids=[0, 1, 2, 3])
    trace = read_trace(written(tmp_path / "t.jsonl", row(), "", second))

    assert trace.block_size == 512
    assert trace.num_blocks == 6
    first, last = trace.requests
    assert (first.line, first.arrival_s, first.prompt_tokens, first.output_tokens) == (
        1,
        0,
        1000,
        5,
    )
    assert first.trace_ids == (0, 1)
    assert (last.line, last.arrival_s, last.total_tokens) == (3, 2.5005, 1537)


def test_gzip_is_recognised_by_its_first_bytes(tmp_path: Path) -> None:
    plain = written(tmp_path / "plain.jsonl.gz", row())
    zipped = tmp_path / "zipped.jsonl"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))

    assert read_trace(zipped).requests == read_trace(plain).requests


def test_a_late_timestamp_keeps_its_place(tmp_path: Path) -> None:
    lines = [row(timestamp=ms) for ms in (1000, 400, 2000)]
    trace = read_trace(written(tmp_path / "t.jsonl", *lines))

    assert [request.arrival_s for request in trace.requests] == [1.0, 1.0, 2.0]


def test_lines_behind_the_limit_are_not_read(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", row(), row(), "not looked at")

    assert len(read_trace(path, limit=2).requests) == 2
    with pytest.raises(ConfigError, match="limit is 0"):
        read_trace(path, limit=0)


def test_the_bundled_slice() -> None:
    trace = read_trace(BUNDLED_TRACE)

    assert len(trace.requests) == 1000
    assert trace.requests[0].prompt_tokens == 6758
    assert trace.num_blocks == sum(-(-request.prompt_tokens // 512) for request in trace.requests)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl: cannot be read: No such file"):
        read_trace(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_an_empty_file_is_refused(refused: Callable[..., str], lines: list[str]) -> None:
    assert refused(*lines).startswith(" the trace is empty")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            '{"ts": 1, "prompt": "x"}',
            "this line has ts, prompt; make prompt_token_ids from the text with your model's "
            "tokenizer",
        ),
        (
            '{"custom_id": "a", "url": "/v1/completions", "body": {}}',  # OpenAI's
            "custom_id, url, body; make prompt_token_ids from the text with your model's tokenizer",
        ),
        (
            '{"id": "a", "conversations": []}',  # ShareGPT's
            "id, conversations; make prompt_token_ids from the text with your model's tokenizer",
        ),
        ("{}", "and this line has no field"),
        (json.dumps(dict.fromkeys("abcdefghij")), "has a, b, c, d, e, f, g, h and 2 more"),
        (json.dumps({"x" * 50: 1}), f"has {'x' * 40}..."),
    ],
)
def test_line_of_another_form_is_refused_with_its_fields(
    refused: Callable[..., str], line: str, found: str
) -> None:
    message = refused(line)
    assert message.startswith("1: no 'timestamp'; a request has timestamp, input_length, output_")
    assert message.endswith(found)


@pytest.mark.parametrize("compress", [bz2.compress, lzma.compress, gzip.compress])
def test_compressed_traces_are_read_and_damaged_ones_refused(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    plain = "".join(f"{row(timestamp=ms)}\n" for ms in range(5000)).encode()
    path = tmp_path / "trace.jsonl"
    path.write_bytes(whole := compress(plain))
    assert len(read_trace(path).requests) == 5000

    torn = bytearray(whole)
    torn[len(whole) // 2] ^= 0xFF
    path.write_bytes(whole[:-9])
    with pytest.raises(ConfigError, match=r"trace\.jsonl:\d+: the \w+ stream is cut off or"):
        read_trace(path)
    path.write_bytes(torn)  # the text may be wrong before the checksum is read
    with pytest.raises(ConfigError, match=r"trace\.jsonl:\d+: "):
        read_trace(path)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 reads zstd")
def test_the_error_for_zstd_names_the_command_to_decompress(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00\x00")
    with pytest.raises(ConfigError, match=r"lacks the module compression\.zstd") as caught:
        read_trace(path)
    assert str(caught.value).endswith(
        f"run zstd -dc {path} | kvstow replay -, or another command with -"
    )


@pytest.mark.parametrize("prepare", [bytes, gzip.compress])
def test_a_pipe_is_read_like_a_file(tmp_path: Path, prepare: Callable[[bytes], bytes]) -> None:
    """A pipe cannot seek, and its first read may return a single byte."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    content = prepare(f"{row()}\n{row()}\n".encode())

    def write() -> None:
        with path.open("wb", buffering=0) as pipe:
            for byte in content[:20]:
                pipe.write(bytes([byte]))
            pipe.write(content[20:])

    writer = threading.Thread(target=write)
    writer.start()
    assert len(read_trace(path).requests) == 2
    writer.join()


def test_a_failing_read_is_an_os_error_with_the_file_name() -> None:
    with pytest.raises(OSError, match="Input/output error: '/proc/self/mem'"):
        read_trace("/proc/self/mem")


def test_the_number_of_ids_must_fit_the_block_size(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", row(input_length=33, hash_ids=[0, 1, 2]))
    assert read_trace(path, block_size=16).block_size == 16
    chained = read_trace(path, block_size=16, chain=True)
    assert chained.requests[0].prompt_tokens == 48
    with pytest.raises(ConfigError, match=r"expected 2 \(ceil\(33 / 17\)\): pass --block-size"):
        read_trace(path, block_size=17)
    with pytest.raises(
        ConfigError, match=r"another size \(11 to 16 tokens fit all requests, such as 16\), or"
    ):
        read_trace(path, block_size=512)
    rows = [row(input_length=33, hash_ids=[0, 1, 2]), row(input_length=129, hash_ids=[*range(9)])]
    both = written(tmp_path / "both.jsonl", *rows)
    with pytest.raises(ConfigError, match=r"\(15 to 16 tokens fit all requests, such as 16\)"):
        read_trace(both, block_size=512)
    rows = [row(input_length=33, hash_ids=[0, 1, 2]), row(input_length=176, hash_ids=[*range(16)])]
    exact = written(tmp_path / "exact.jsonl", *rows)
    with pytest.raises(ConfigError, match=r"another size \(11 tokens fit all requests\), or"):
        read_trace(exact, block_size=512)
    none = written(tmp_path / "none.jsonl", *rows, row(input_length=33, hash_ids=[0, 1]))
    with pytest.raises(ConfigError, match="another size, or --chain"):
        read_trace(none, block_size=512)
    for tokens, ids, sizes in (32, [0, 1, 2], "11 to 15 tokens"), (33, [0, 1], "17 to 32 tokens"):
        bounds = written(tmp_path / "bounds.jsonl", row(input_length=tokens, hash_ids=ids))
        with pytest.raises(ConfigError, match=rf"another size \({sizes} fit all requests"):
            read_trace(bounds, block_size=512)
    one = written(tmp_path / "one.jsonl", row(input_length=33, hash_ids=[0]))
    with pytest.raises(ConfigError, match="another size, or --chain"):
        read_trace(one, block_size=16)
    for size in (0, -1, 2**20 + 1):
        with pytest.raises(ConfigError, match=f"block-size is {size}; it must be 1 to 1048576"):
            read_trace(path, block_size=size)


@pytest.mark.parametrize("keep", [1, 12, -1])
def test_the_error_for_a_truncated_gzip_names_the_line(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.jsonl.gz"
    whole = gzip.compress("".join(f"{row(timestamp=ms)}\n" for ms in range(5000)).encode())
    path.write_bytes(whole[: len(whole) * 3 // 4] if keep < 0 else whole[:keep])

    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    place, _, problem = str(caught.value).removeprefix(f"{path}:").partition(": ")
    if keep == 1:  # too short to be recognised as gzip
        assert (place, problem[:17]) == ("1", "not a JSON object")
    else:
        assert problem.startswith("the gzip stream is cut off or damaged")
        assert (int(place) > 1000) == (keep < 0)


def test_a_zip_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("trace.jsonl", row())
    with pytest.raises(ConfigError, match=r"trace\.zip: is a zip archive: unpack it"):
        read_trace(path)


def test_a_damaged_gzip_is_refused(tmp_path: Path) -> None:
    damaged = bytearray(gzip.compress(row().encode()))
    damaged[20] ^= 0xFF
    path = tmp_path / "damaged.jsonl.gz"
    path.write_bytes(damaged)

    with pytest.raises(ConfigError, match=r"damaged\.jsonl\.gz:1: the gzip stream is cut off or"):
        read_trace(path)


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.jsonl"
    path.write_bytes(row().encode() + b"\n\x80\x81\n")

    with pytest.raises(
        ConfigError, match=r"binary\.jsonl:2: not a JSON object.*invalid start byte"
    ):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        (json.dumps([{"timestamp": 0}], indent=1).encode(), "for a list jq -c '.[]' FILE"),
        (json.dumps({"timestamp": 0}, indent=1).encode(), "for objects over several lines run jq"),
        (json.dumps({"trace": []}, indent=1).encode(), "trace convert jq -c '.trace[]' FILE"),
        (b'{"trace": [], "requests": 0}', "split the JSON of kvstow trace convert: jq"),
        (f"{row()}\n".encode("utf-16"), "convert it with iconv -f UTF-16 -t UTF-8"),
        (
            b"DEBUG 11-23 10:15:02 [request_logger.py:56] Request cmpl-1 details\n",
            "pass it to kvstow trace convert --from vllm-log",
        ),
        (
            b"(APIServer pid=7) INFO 11-23 10:15:02 [api_utils.py:286] non-default args: {}\n",
            "pass it to kvstow trace convert --from vllm-log",
        ),
        (
            b"Nov 23 10:15:02 host vllm[7]: (APIServer pid=7) INFO 11-23 10:15:02 [a.py:1] b\n",
            "pass it to kvstow trace convert --from vllm-log",
        ),
        (
            b"Triton is installed, but doesn't include CPU backend. Disabling Triton.\n",
            "pass a log of vLLM to kvstow trace convert --from vllm-log, and write an object for",
        ),
    ],
)
def test_file_of_another_form_is_refused_with_the_way_out(
    text: bytes, way_out: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=re.escape(way_out)):
        read_trace(path)


def test_the_error_for_a_truncated_last_line_says_that_the_file_may_be_cut(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_text(f"{row()}\n{row()[:40]}")

    with pytest.raises(ConfigError, match=r"cut\.jsonl:2: not a JSON object.*may be cut off here"):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not a JSON object: Expecting"),
        ("time,prompt\n", "not a JSON object: Expecting value: line 1 column 1 (char 0); each"),
        ("[1, 2]", "not a JSON object but a list; each line must be an object with timestamp"),
        ("7", "not a JSON object but 7"),
        ("null", "not a JSON object but null"),
        ("[" * 100_000, "not a JSON object: maximum recursion"),
        (row().replace("1000", "1" * 5000), "not a JSON object: Exceeds the limit"),
        (row().replace("1000", "NaN"), "not a JSON object: NaN is not a finite number"),
        (row(timestamp=float("inf")), "not a JSON object: Infinity is not a finite"),
        (row().replace('"timestamp": 0', '"timestamp": 1e999'), "timestamp is inf; expected 0 to"),
        (row(timestamp=-1), "timestamp is -1; expected 0 to"),
        (row(timestamp=2**53), f"timestamp is {2**53}; expected 0 to 2**53 ms"),
        (row(timestamp=True), "timestamp is a boolean; expected milliseconds"),
        (
            row(timestamp="2026-01-31T08:00:00"),
            "timestamp is a string; expected milliseconds: of a date, 1000 * datetime.timestamp()",
        ),
        (row(input_length=0), "input_length is 0; expected 1 to"),
        (row(input_length=-3), "input_length is -3; expected 1 to"),
        (row(output_length=2**24 + 1), "output_length is 16777217; expected 0 to 16777216 tokens"),
        (row(input_length=2**31), "input_length is 2147483648; expected 1 to"),
        (row(input_length=7.0), "input_length is 7.0; expected a number of tokens"),
        (row(input_length=True), "input_length is a boolean"),
        (row(output_length=-1), "output_length is -1; expected 0 to"),
        (row(output_length=None), "output_length is null"),
        (row(hash_ids=7), "hash_ids is 7; expected a list of ids"),
        (row(hash_ids=[]), "hash_ids is empty"),
        (
            row(hash_ids=[0, "1"]),
            "hash_ids[1] is a string; expected an integer: number the hashes as they first appear",
        ),
        (row(hash_ids=[0, True]), "hash_ids[1] is a boolean; expected an integer"),
        (row(hash_ids=[0, -1]), "hash_ids[1] is -1; expected 0 to 2**63 - 1"),
        (row(hash_ids=[2**63, 1]), f"hash_ids[0] is {2**63}; expected 0 to 2**63 - 1"),
        (row(hash_ids=[0]), "found 1 hash_ids, expected 2 (ceil(1000 / 512)): pass --block-size"),
        (row(hash_ids=[0, 1, 2]), "found 3 hash_ids, expected 2 (ceil(1000 / 512))"),
    ],
)
def test_the_error_for_a_malformed_line_names_it(
    refused: Callable[..., str], line: str, problem: str
) -> None:
    assert refused(row(), line, row()).startswith(f"2: {problem}")


@pytest.mark.parametrize("key", sorted(GOOD))
def test_the_error_for_a_missing_key_names_it(refused: Callable[..., str], key: str) -> None:
    line = json.dumps({name: value for name, value in GOOD.items() if name != key})

    assert refused(row(), line).startswith(f"2: no {key!r}")


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([5, 1], "id 1 comes after id 5 here and after id 0 before"),
        ([1, 0], "id 1 comes first here and after id 0 before"),
        ([2, 2], "id 2 comes after id 2 here and first before"),
    ],
)
def test_ids_that_are_not_chained_are_refused(
    refused: Callable[..., str], ids: list[int], problem: str
) -> None:
    message = refused(row(), row(hash_ids=ids))

    assert message.startswith(f"2: the ids are not chained: {problem}")
    assert "Pass --chain" in message
    assert "convert them together, or pass the traces one by one to kvstow plan" in message


def test_unchained_ids_are_reported_before_a_wrong_number_of_ids(
    refused: Callable[..., str],
) -> None:
    """If ids name passages, their number does not follow from the length."""
    message = refused(row(input_length=99), row(), row(hash_ids=[1, 0]))

    assert message.startswith("3: the ids are not chained: id 1")
    assert refused(row(input_length=99), row()).startswith("1: found 2 hash_ids")
    assert refused(row(), row(input_length=99), row(input_length=98)).startswith(
        "2: found 2 hash_ids"
    )


def test_the_error_for_ids_of_full_blocks_alone_names_the_rest(
    refused: Callable[..., str],
) -> None:
    message = refused(row(hash_ids=[0]))

    assert message.endswith(", or give the last block, of 488 tokens, an id as well")
    assert "last block" not in refused(row(hash_ids=[0, 1, 2]))


def test_content_ids_need_no_chain_and_are_whole_blocks(tmp_path: Path) -> None:
    lines = [row(), row(hash_ids=[1, 0, 7, 7]), row(input_length=3)]
    trace = read_trace(written(tmp_path / "t.jsonl", *lines), chain=True)

    assert [request.prompt_tokens for request in trace.requests] == [1024, 2048, 1024]
    assert [request.output_tokens for request in trace.requests] == [5, 5, 5]
    assert trace.num_blocks == 8


def test_content_ids_are_checked(refused: Callable[..., str]) -> None:
    assert refused(row(), row(hash_ids=[]), chain=True).startswith("2: hash_ids is empty")
    assert refused(row(input_length=0), chain=True).startswith("1: input_length is 0")
