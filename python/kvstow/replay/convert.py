"""Readers that make a trace from token ids.

Blocks are numbered in the order in which they first appear. The ids are chained, as in the Mooncake
form: two requests share an id if all their tokens up to the end of that block are equal. The trace
holds no token, and no hash of one.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from kvstow._core import hash_tokens
from kvstow.replay.trace import Trace, TraceReader, TraceRequest

_MAX_TOKEN_ID = 2**32 - 1


def trace_json(trace: Trace) -> dict[str, object]:
    """Return the trace and its size as an object for `json.dumps`."""
    ids = {trace_id for request in trace.requests for trace_id in request.trace_ids}
    return {
        "block_size": trace.block_size,
        "requests": len(trace.requests),
        "blocks": trace.num_blocks,
        "unique_blocks": len(ids),
        "trace": [_row(request) for request in trace.requests],
    }


def trace_lines(trace: Trace) -> Iterator[str]:
    """Yield the requests as JSON lines, which `read_trace` reads."""
    for request in trace.requests:
        yield json.dumps(_row(request), separators=(",", ":")) + "\n"


def _row(request: TraceRequest) -> dict[str, object]:
    return {
        "timestamp": round(request.arrival_s * 1000, 3),
        "input_length": request.prompt_tokens,
        "output_length": request.output_tokens,
        "hash_ids": request.trace_ids,
    }


class TokenReader(TraceReader):
    """Reads JSON lines with `timestamp`, `prompt_token_ids`, `output_length` and maybe `salt`.

    Args:
        path: as for `read_trace`.
        block_size: number of tokens per block.
        numbers: the number of each block of other files, by its digest.
    """

    _FIELDS = "timestamp, prompt_token_ids and output_length"

    def __init__(
        self, path: str | Path, block_size: int, numbers: dict[bytes, int] | None = None
    ) -> None:
        super().__init__(path, block_size)
        self._numbers = {} if numbers is None else numbers

    def _request(self, row: dict[str, object], line: int, arrival_s: float) -> TraceRequest:
        tokens = self._tokens(row, line)
        output = self._output(row, line)
        if row.get("cache_salt") and "salt" not in row:
            self._fail(
                line,
                "cache_salt is the name in vLLM's API, and kvstow reads salt: rename the field, or "
                "remove it if requests of different salts may share blocks",
            )
        salt = row.get("salt")
        if salt is not None and not isinstance(salt, str):
            self._fail(line, f"salt is {salt!r}; expected a string")
        ids = self._block_ids(tokens, salt)
        return TraceRequest(line, arrival_s, len(tokens), output, ids)

    def _tokens(self, row: dict[str, object], line: int) -> array[int]:
        tokens = self._field(row, line, "prompt_token_ids")
        if not isinstance(tokens, list) or not tokens:
            self._fail(line, "prompt_token_ids must be a list of one or more token ids")
        for position, token in enumerate(tokens):
            if type(token) is not int or not 0 <= token <= _MAX_TOKEN_ID:
                self._fail(
                    line,
                    f"prompt_token_ids[{position}] is {token!r}; expected 0 to {_MAX_TOKEN_ID}",
                )
        return array("I", tokens)

    def _block_ids(self, tokens: array[int], salt: str | None) -> tuple[int, ...]:
        """Return one id per block, a partial last block included."""
        size = self.block_size
        num_full = len(tokens) // size
        first = [("salt", salt)] if salt else []  # as vLLM, which takes "" for none
        keys = [*first, *[None] * (num_full + 1 - len(first))]
        digests = list(hash_tokens(tokens[: num_full * size], size, extra_keys=keys[:num_full]))
        if tail := tokens[num_full * size :]:
            parent = digests[-1] if digests else None
            digests += hash_tokens(tail, len(tail), parent=parent, extra_keys=keys[num_full:])
        numbers = self._numbers
        return tuple(numbers.setdefault(digest, len(numbers)) for digest in digests)


_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# The journal puts a host and `PROGRAM[PID]: ` before a line. No other text in brackets may come
# before the time, because a line may quote another one.
_MOMENT = r"^(?:[^\[\]]*\[\d+\]: )?[^\[\]]*?(?P<moment>\d\d-\d\d \d\d:\d\d:\d\d) \[[^\]]*\] "
_ANY_REQUEST = re.compile(_MOMENT + r"Request (?P<id>\S+) details: ")
_REQUEST = re.compile(
    _MOMENT + r"Request (?P<id>\S+) details: prompt: .*, "
    r"prompt_token_ids: (?P<tokens>\[[0-9, ]+\]), prompt_embeds shape: .*\.$"
)
_RECEIVED = re.compile(_MOMENT + r"Received request (?P<id>\S+): .*, lora_request: (?P<lora>.*)\.$")
_LORA_NAME = re.compile(r"lora_name='(.*?)'")
_RESPONSE = re.compile(
    _MOMENT + r"Generated response (?P<id>\S+)(?: \(streaming \w+\))? details: "
    r"output_token_ids: (?P<tokens>\[[0-9, ]*\])$"
)
_HALF_A_YEAR = timedelta(days=183)


@dataclass(slots=True)
class _Logged:
    """A request of a log; without an output in the log, `num_output` is None."""

    line: int
    time_ms: float
    tokens: list[int]
    salt: str | None = None
    num_output: int | None = None

    def row(self, output_tokens: int) -> dict[str, object]:
        """Return its fields, with `output_tokens` if the log has no output."""
        return {
            "timestamp": self.time_ms,
            "prompt_token_ids": self.tokens,
            "output_length": output_tokens if self.num_output is None else self.num_output,
            "salt": self.salt,
        }


class VllmLogReader(TokenReader):
    """Reads the log of a vLLM server with `--enable-log-requests` and `VLLM_LOGGING_LEVEL=DEBUG`.

    `--enable-log-outputs` adds the outputs of chat requests. A request whose output is not in the
    log gets `output_tokens`.

    Attributes:
        unread: the lines that begin as one with a prompt and go on otherwise. They are left out.
        num_without_output: how many requests got `output_tokens`.
    """

    def __init__(self, path: str | Path, block_size: int, output_tokens: int = 0) -> None:
        super().__init__(path, block_size)
        self._output_tokens = output_tokens
        self.unread: list[int] = []
        self.num_without_output = 0

    def _rows(self) -> Iterator[tuple[int, dict[str, object]]]:
        requests: list[_Logged] = []
        newest: dict[str, _Logged] = {}  # clients may send the id of an earlier request again
        begin: datetime | None = None
        latest: datetime | None = None
        self.unread = []
        for line, raw in self.source.lines():
            text = _ANSI.sub("", raw.decode(errors="replace").rstrip())
            if found := _REQUEST.match(text):
                moment = latest = self._moment(found["moment"], latest, line)
                begin = begin or moment
                time_ms = (moment - begin).total_seconds() * 1000
                logged = _Logged(line, time_ms, self._listed(found["tokens"], line))
                newest[found["id"]] = logged
                requests.append(logged)
            elif (found := _RECEIVED.match(text)) and found["id"] in newest:
                if name := _LORA_NAME.search(found["lora"]):
                    newest[found["id"]].salt = name[1]
            elif (found := _RESPONSE.match(text)) and found["id"] in newest:
                logged = newest[found["id"]]
                num_tokens = len(self._listed(found["tokens"], line))
                logged.num_output = (logged.num_output or 0) + num_tokens
            elif found := _ANY_REQUEST.match(text):
                newest.pop(found["id"], None)  # the lines that follow are not of an earlier one
                self.unread.append(line)
        if not requests and self.unread:
            self._fail(
                self.unread[0],
                "the token ids cannot be read, and no other line has any: the line is cut, or the "
                "request has embeddings",
            )
        if not requests:
            self._fail(
                None,
                "the log has no line `DEBUG MM-DD HH:MM:SS [...] Request ID details: ... "
                "prompt_token_ids: [...]` in vLLM's own form: start vLLM with "
                "--enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG in the environment",
            )
        self.num_without_output = sum(one.num_output is None for one in requests)
        for one in requests:
            yield one.line, one.row(self._output_tokens)

    def _listed(self, text: str, line: int) -> list[int]:
        try:
            listed: list[int] = json.loads(text)
        except ValueError as error:
            self._fail(line, f"a list of token ids is damaged ({error}); copy the log again")
        return listed

    def _moment(self, text: str, latest: datetime | None, line: int) -> datetime:
        """Return the time of a line in a made-up leap year; January follows December.

        A line that was written late arrives with the line before.
        """
        try:
            moment = datetime.strptime(f"2000-{text}", "%Y-%m-%d %H:%M:%S")
        except ValueError:
            self._fail(line, f"{text!r} is no time; expected MONTH-DAY HOUR:MINUTE:SECOND")
        if latest is None:
            return moment
        while moment < latest - _HALF_A_YEAR:
            moment += timedelta(days=366)
        is_of_last_year = moment > latest + _HALF_A_YEAR
        return latest if is_of_last_year else max(moment, latest)
