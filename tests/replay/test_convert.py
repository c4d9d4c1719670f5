"""Token ids become a trace, and its replay has the hits that a hand count gives."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstow import ConfigError, cli
from kvstow.build import version_and_build
from kvstow.replay.convert import TokenReader, VllmLogReader, trace_lines
from kvstow.replay.trace import DEFAULT_BLOCK_SIZE

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "traces.md"
BLOCK = 4


def converted(path: Path, rows: list[dict[str, object]]) -> list[dict[str, Any]]:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [json.loads(line) for line in trace_lines(TokenReader(path, BLOCK).read())]


def row(tokens: list[int], **fields: object) -> dict[str, object]:
    return {"timestamp": 0, "prompt_token_ids": tokens, "output_length": 3, **fields}


def test_only_equal_prefixes_share_ids(tmp_path: Path) -> None:
    rows = [
        row([*range(10)], timestamp=2.5),
        row([*range(8), 9, 9]),  # two blocks, and another tail
        row([9, *range(1, 10)]),  # the second block has equal tokens, after another first
        row([*range(12)]),  # the third block begins as the tail of the first
        row([*range(10)]),
        row([*range(10)], salt="a tenant"),
        row([*range(8)], salt="a tenant"),
        row([*range(3)]),
        row([*range(3)], salt="a tenant"),  # not even a tail
    ]
    trace = converted(tmp_path / "t", rows)
    assert [request["hash_ids"] for request in trace] == [
        [0, 1, 2], [0, 1, 3], [4, 5, 6], [0, 1, 7], [0, 1, 2], [8, 9, 10], [8, 9], [11], [12],
    ]  # fmt: skip
    assert trace[0] == {
        "timestamp": 2.5, "input_length": 10, "output_length": 3, "hash_ids": [0, 1, 2],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids must be a list of one or more"),
        ({"prompt_token_ids": "text"}, "prompt_token_ids must be a list of one or more"),
        ({"prompt_token_ids": [1, -1]}, "prompt_token_ids[1] is -1; expected 0 to 4294967295"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids[0] is True"),
        ({"prompt_token_ids": [2**32]}, "prompt_token_ids[0] is 4294967296"),
        ({"output_length": -1}, "output_length is -1"),
        ({"salt": 7}, "salt is 7; expected a string"),
        ({"cache_salt": "a"}, "cache_salt is the name in vLLM's API, and kvstow reads salt"),
    ],
)
def test_the_error_for_a_bad_field_names_it(
    tmp_path: Path, fields: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"t:2: {problem}")):
        converted(tmp_path / "t", [row([1]), row([1]) | fields])


@pytest.mark.parametrize(
    "fields", [{"cache_salt": None}, {"cache_salt": ""}, {"cache_salt": "a", "salt": ""}]
)
def test_cache_salt_without_effect_is_ignored(tmp_path: Path, fields: dict[str, object]) -> None:
    rows = [row([*range(4)]), row([*range(4)]) | fields]
    assert [request["hash_ids"] for request in converted(tmp_path / "t", rows)] == [[0], [0]]


def test_converted_tokens_give_the_expected_hits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompts arrive far apart, so each finds the blocks of those before it."""
    rows = [
        row([*range(10)]),
        row([*range(8)], timestamp=60_000),  # the last token is computed, so one block is hit
        row([*range(8), 7, 7], timestamp=120_000),  # two blocks
        row([*range(8), 7, 7], timestamp=180_000, salt="other"),  # none
    ]
    tokens, trace = tmp_path / "tokens.jsonl", tmp_path / "trace.jsonl"
    tokens.write_text("".join(f"{json.dumps(fields)}\n" for fields in rows))
    assert cli.main(["trace", "convert", str(tokens), "--block-size", "4"]) == 0
    trace.write_text(capsys.readouterr().out)
    assert cli.main(["replay", str(trace), "--block-size", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hit_blocks"] == {"device": 3, "host": 0, "resumed": 0}
    assert (found["blocks"], found["recomputed_blocks"]) == (3 + 2 + 3 + 3, 8)
    assert found["corrupt_blocks"] == 0


def test_the_example_of_the_docs_has_the_documented_hits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```json[^\n]*\n(.*?)```", DOCS.read_text(), re.DOTALL)
    path = tmp_path / "three.jsonl"
    path.write_text(example)
    assert cli.main(["replay", str(path), "--block-size", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hit_blocks"] == {"device": 1 + 3, "host": 0, "resumed": 0}
    assert found["block_size"] == 16


LOG = """\
(APIServer pid=7) INFO 12-31 23:59:57 [api_server.py:1] Starting
\x1b[32mDEBUG\x1b[0m 12-31 23:59:58 [request_logger.py:56] Request a details: prompt: 'x, prompt_token_ids: [9], prompt_embeds shape: None.', prompt_token_ids: [1, 2, 3, 4, 5], prompt_embeds shape: None.
INFO 12-31 23:59:58 [request_logger.py:66] Received request a: params: SamplingParams(n=1), lora_request: None.
DEBUG 01-01 00:00:01 [request_logger.py:56] Request b details: prompt: None, prompt_token_ids: [1, 2, 3, 4], prompt_embeds shape: None.
INFO 01-01 00:00:01 [request_logger.py:66] Received request b: params: SamplingParams(n=1), lora_request: LoRARequest(lora_name='poet', lora_int_id=1).
DEBUG 01-01 00:00:02 [request_logger.py:102] Generated response a (streaming delta) details: output_token_ids: [7, 8]
DEBUG 01-01 00:00:02 [request_logger.py:102] Generated response a (streaming delta) details: output_token_ids: [9]
DEBUG 01-01 00:00:02 [request_logger.py:102] Generated response a (streaming complete) details: output_token_ids: None
INFO 01-01 00:00:03 [x.py:1] somebody wrote: DEBUG 01-01 00:00:03 [y.py:1] Request c details: prompt: '', prompt_token_ids: [1], prompt_embeds shape: None.
"""  # noqa: E501 - as vLLM writes them


def test_a_vllm_log_becomes_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(LOG)
    trace = VllmLogReader(path, BLOCK, output_tokens=50).read()
    first, second = trace.requests
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0, 5, 3)
    assert (second.arrival_s, second.prompt_tokens, second.output_tokens) == (3, 4, 50)
    assert not {*first.trace_ids} & {*second.trace_ids}, "an adapter shares no blocks"


def test_requests_of_a_log_may_have_the_same_id(tmp_path: Path) -> None:
    """A client may send its id in the header X-Request-Id with each turn of a chat."""
    path, lines = tmp_path / "vllm.log", LOG.splitlines()
    later = lines[1].replace("12-31 23:59:58", "01-01 00:00:04").replace("4, 5]", "4, 5, 6]")
    answer, unread = lines[5].replace("[7, 8]", "[7]"), lines[1][:-60]
    path.write_text("\n".join([*lines, later, answer, unread, answer]))
    requests = VllmLogReader(path, BLOCK, output_tokens=50).read().requests
    assert [(one.arrival_s, one.prompt_tokens, one.output_tokens) for one in requests] == [
        (0, 5, 3), (3, 4, 50), (6, 6, 1),
    ]  # fmt: skip


def test_a_log_may_have_an_empty_output_and_last_for_days(tmp_path: Path) -> None:
    path, lines = tmp_path / "vllm.log", LOG.splitlines()
    empty = lines[5].replace("response a", "response b").replace("[7, 8]", "[]")
    later = lines[1].replace("12-31 23:59:58", "01-03 00:00:00").replace("Request a", "Request d")
    behind = lines[3].replace("01-01 00:00:01", "01-02 00:00:00").replace("Request b", "Request e")
    path.write_text("\n".join([*lines, empty, later, behind]))
    requests = VllmLogReader(path, BLOCK, output_tokens=50).read().requests
    assert [one.output_tokens for one in requests] == [3, 0, 50, 50]
    # A line that was written late keeps its place, and arrives with the line before.
    two_days_s = 2 * 24 * 3600 + 2
    assert [one.arrival_s for one in requests] == [0, 3, two_days_s, two_days_s]


@pytest.mark.parametrize("before", ["01-01 00:00:00", "12-31 23:59:59"])
def test_a_log_line_from_before_the_first_one_arrives_with_it(tmp_path: Path, before: str) -> None:
    path, line = tmp_path / "vllm.log", LOG.splitlines()[3]
    path.write_text("\n".join([line, line.replace("01-01 00:00:01", before)]))
    requests = VllmLogReader(path, BLOCK).read().requests
    assert [one.arrival_s for one in requests] == [0, 0]


@pytest.mark.parametrize(
    "before",
    ["Dec 31 23:59:59 host vllm[12]: ", "2026-12-31T23:59:59+0000 host vllm[12]: ", "vllm-1  | "],
)
def test_a_log_may_come_from_the_journal_or_a_container(tmp_path: Path, before: str) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(LOG)
    plain = VllmLogReader(path, BLOCK).read().requests
    path.write_text("".join(f"{before}{line}\n" for line in LOG.splitlines()))
    assert VllmLogReader(path, BLOCK).read().requests == plain


def test_requests_of_a_log_that_cannot_be_read_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, lines = tmp_path / "vllm.log", LOG.splitlines()
    cut = [*lines, lines[1][:-60], lines[3].replace("[1, 2, 3, 4]", "None")]
    path.write_text("\n".join(cut))
    convert = ["trace", "convert", str(path), "--from", "vllm-log"]
    assert cli.main(convert) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 2
    assert "their token ids cannot be read: 2, the first in line 10" in printed.err
    path.write_text(LOG)
    assert cli.main(convert) == 0
    assert "cannot be read" not in capsys.readouterr().err


def test_requests_of_a_log_without_an_output_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(LOG)
    convert = ["trace", "convert", str(path), "--from", "vllm-log", "--output-tokens", "200"]
    assert cli.main(convert) == 0
    error = capsys.readouterr().err
    assert "no output of 1 of 2 requests, so each of these counts with 200 output tokens\n" in error
    assert cli.main(convert[:-2]) == 0
    assert "0 output tokens: pass the mean of your server" in capsys.readouterr().err
    path.write_text(LOG.replace("response a (streaming complete)", "response b"))
    path.write_text(path.read_text().replace("output_token_ids: None", "output_token_ids: [4]"))
    assert cli.main(convert) == 0
    assert not capsys.readouterr().err
    assert cli.main(["trace", "convert", str(path), "--output-tokens", "3"]) == 2
    assert "--output-tokens is 3, and token ids have an output_length" in capsys.readouterr().err


def test_an_empty_salt_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, ids = tmp_path / "tokens.jsonl", list(range(BLOCK))
    rows = [{"timestamp": 0, "prompt_token_ids": ids, "output_length": 1}] * 3
    salted = [rows[0], rows[1] | {"salt": ""}, rows[2] | {"salt": "a"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in salted))
    assert cli.main(["trace", "convert", str(path), "--block-size", str(BLOCK)]) == 0
    found = [json.loads(line)["hash_ids"] for line in capsys.readouterr().out.splitlines()]
    assert found == [[0], [0], [1]]


def test_the_converter_reads_a_pipe_and_names_the_line_of_bad_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def standard_input(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    standard_input(LOG)
    assert cli.main(["trace", "convert", "-", "--from", "vllm-log", "--output-tokens", "5"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"timestamp": 0.0, "input_length": 5, "output_length": 3, "hash_ids": [0]}
    assert (second["timestamp"], second["output_length"]) == (3000.0, 5)
    standard_input("{}\n")
    assert cli.main(["trace", "convert", "-"]) == 2
    assert (
        "<stdin>:1: no 'timestamp'; a request has timestamp, prompt_token_ids"
        in capsys.readouterr().err
    )


def test_the_converter_prints_and_writes_one_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, file = tmp_path / "vllm.log", tmp_path / "trace.json"
    log.write_text(LOG)
    convert = ["trace", "convert", str(log), "--from", "vllm-log", "--block-size", str(BLOCK)]
    assert cli.main(convert) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert cli.main([*convert, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "block_size": BLOCK, "requests": 2, "blocks": 3, "unique_blocks": 3, "trace": rows,
        "kvstow": version_and_build(),
    }  # fmt: skip
    assert cli.main([*convert, "--json-file", str(file)]) == 0
    assert json.loads(file.read_text()) == found
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows


def test_the_error_for_a_log_without_requests_names_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(LOG.splitlines()[0])
    with pytest.raises(ConfigError, match="--enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG"):
        VllmLogReader(path, BLOCK).read()
    path.write_text(LOG.splitlines()[1][:-60])
    with pytest.raises(ConfigError, match="log:1: the token ids cannot be read, and no other line"):
        VllmLogReader(path, BLOCK).read()


def test_help_ends_with_the_block_size_of_the_other_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["trace", "convert", "--help"]) == 0
    assert " ".join(capsys.readouterr().out.split()).endswith(
        f"the same --block-size to kvstow plan and kvstow replay, which take {DEFAULT_BLOCK_SIZE} "
        "without it."
    )
