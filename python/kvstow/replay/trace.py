"""Readers of request traces: one class per form, with errors that name file and line.

The form fixes how ids relate to tokens. No reader guesses it from the data:

    form      an id names                     last id           prompt tokens
    chained   a block and all before it       a partial block   `input_length`
    content   a passage, under any prefix     a whole block     `len(hash_ids)` blocks, nominal

`docs/reference/traces.md` describes the fields.
"""

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Never

from kvstow._core import ConfigError
from kvstow.replay.source import Source

MAX_TRACE_ID = 2**63 - 1
MAX_BLOCK_SIZE = 2**20
MAX_OUTPUT_TOKENS = 2**24
"""More is no length that was measured, and a plan would take hours over its blocks."""
DEFAULT_BLOCK_SIZE = 512
_LEAST_NANOSECONDS = 10**18  # since 1970, in 2001
_MOST_NAMES, _LONGEST_NAME = 8, 40  # of fields in an error
_TEXTS = frozenset(
    {"prompt", "messages", "text", "conversations", "body"}
)  # fields of logs that have no token ids
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # the first bytes of such a file
# vLLM puts `(APIServer pid=N) ` before a line, and the journal a host and `PROGRAM[PID]: `.
_VLLM_LOG = re.compile(rb"^[^{]{0,200}?\b(DEBUG|INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        line: the line in the file, from 1.
        arrival_s: arrival in virtual seconds, no earlier than that of the request before.
        prompt_tokens: number of tokens in the prompt.
        output_tokens: number of tokens that the request generates.
        trace_ids: one id per block of the prompt, a partial last block included.
        late_s: how much later than its timestamp the request arrives.
        input_length: the prompt's length by the trace, if `prompt_tokens` is a nominal one.
    """

    line: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    trace_ids: tuple[int, ...]
    late_s: float = 0.0
    input_length: int | None = None

    @property
    def total_tokens(self) -> int:
        """Number of prompt and output tokens, whose KV exists when the request ends."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trace.

    Attributes:
        path: the path of the file; `<stdin>` for standard input.
        block_size: number of tokens per id.
        requests: the requests in file order.
        limit: the most requests that were to be read; None for all.
        is_content: whether the ids name passages.
    """

    path: str
    block_size: int
    requests: list[TraceRequest]
    limit: int | None = None
    is_content: bool = False

    def as_json(self) -> dict[str, object]:
        """Return how it was read, for `json.dumps`: the options of the command that decide."""
        return {"block_size": self.block_size, "chain": self.is_content, "limit": self.limit}

    @property
    def num_blocks(self) -> int:
        """Number of blocks in all prompts, partial last blocks included."""
        return sum(len(request.trace_ids) for request in self.requests)


def read_trace(
    path: str | Path,
    *,
    chain: bool = False,
    limit: int | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> Trace:
    """Read a trace of the chained form, or with `chain` of the content form.

    Args:
        path: a file of JSON lines, or `-` for standard input. It may be compressed with gzip,
            bzip2, xz or (from Python 3.14) zstd; its first bytes decide, not its name.
        chain: whether ids name passages, and are to be chained by path.
        limit: number of requests to read; the rest of the file is not read.
        block_size: number of tokens per id.

    Raises:
        ConfigError: the file is missing, empty, truncated or malformed, or its ids do not fit the
            form. The message names file and line.
        OSError: reading failed after the file was opened.
    """
    reader = (ContentReader if chain else ChainedReader)(path, block_size)
    return reader.read(limit)


class TraceReader:
    """The base of the readers: it splits a file into lines and checks the fields of a line.

    A timestamp that goes backwards counts as a late log line: the requests keep their order, and a
    request arrives no earlier than the one before it.
    """

    _FIELDS = "timestamp, input_length, output_length and hash_ids"
    _NAMES_PASSAGES = False

    def __init__(self, path: str | Path, block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise ConfigError(
                f"--block-size is {block_size}; it must be 1 to {MAX_BLOCK_SIZE} tokens"
            )
        self.source = Source(path)
        self.block_size = block_size

    def read(self, limit: int | None = None) -> Trace:
        """Read and check the whole trace, or its first `limit` requests."""
        if limit is not None and limit < 1:
            raise ConfigError(f"--limit is {limit}; it must be at least 1 request")
        requests: list[TraceRequest] = []
        latest_s = 0.0
        for line, row in self._rows():
            arrival_s = self._timestamp(row, line) / 1000
            latest_s = max(latest_s, arrival_s)
            request = self._request(row, line, latest_s)
            if arrival_s < latest_s:
                request = replace(request, late_s=latest_s - arrival_s)
            requests.append(request)
            if len(requests) == limit:
                break
        self._checked_all()
        if not requests:
            self._fail(None, "the trace is empty; expected one JSON object a line")
        return Trace(self.source.name, self.block_size, requests, limit, self._NAMES_PASSAGES)

    def _request(self, row: dict[str, object], line: int, arrival_s: float) -> TraceRequest:
        raise NotImplementedError

    def _checked_all(self) -> None:
        """Raise the errors that a form can only find when it has read every line."""

    def _fail(self, line: int | None, problem: str) -> Never:
        self.source.fail(line, problem)

    # -- lines ---------------------------------------------------------------------------------

    def _rows(self) -> Iterator[tuple[int, dict[str, object]]]:
        for line, text in self.source.lines():
            if text.strip():
                yield line, self._parse(text, line)

    def _parse(self, text: bytes, line: int) -> dict[str, object]:
        try:
            row = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            self._fail(line, f"not a JSON object: {error}; {self._way_out(text, line)}")
        if not isinstance(row, dict):
            split = "; split the list: jq -c '.[]'" if isinstance(row, list) else ""
            self._fail(
                line,
                f"not a JSON object but {_kind(row)}; each line must be an object with "
                f"{self._FIELDS}{split}",
            )
        return row

    def _way_out(self, text: bytes, line: int) -> str:
        """Return what to do about a line that is no JSON."""
        if text.startswith(_UTF_16):
            return "the file is in UTF-16: convert it with iconv -f UTF-16 -t UTF-8"
        if _VLLM_LOG.match(text):
            return "it is a log of vLLM: pass it to kvstow trace convert --from vllm-log"
        if not text.endswith(b"\n"):
            return "the file may be cut off here"
        way_out = f"each line must be an object with {self._FIELDS}"
        if text.rstrip().endswith((b"{", b"[", b",")):
            way_out += (
                "; for objects over several lines run jq -c . FILE, for a list jq -c '.[]' FILE, "
                "and for the JSON of kvstow trace convert jq -c '.trace[]' FILE"
            )
        elif line == 1 and not text.lstrip().startswith(b"{"):
            # vLLM's log may begin with what Python and other libraries print.
            way_out += (
                "; pass a log of vLLM to kvstow trace convert --from vllm-log, and write an object "
                "for each row of a table"
            )
        return way_out

    # -- fields --------------------------------------------------------------------------------

    def _field(self, row: dict[str, object], line: int, key: str) -> object:
        if key not in row:
            has_tokens = "prompt_token_ids" in row and "prompt_token_ids" not in self._FIELDS
            way_out = "; make them from token ids: kvstow trace convert" if has_tokens else ""
            if "hash_ids" in row and "hash_ids" not in self._FIELDS:
                way_out = (
                    "; it is a trace already, so pass it to kvstow plan or kvstow replay. For "
                    "blocks of n ids, keep every nth id of a request, and its last one"
                )
            if "trace" in row:
                way_out = "; split the JSON of kvstow trace convert: jq -c '.trace[]'"
            self._fail_without(key, row, line, way_out)
        return row[key]

    def _fail_without(
        self, key: str, row: dict[str, object], line: int, way_out: str = ""
    ) -> Never:
        """Raise the error for a missing field, with the fields that the line has."""
        names = [
            name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..." for name in row
        ]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        if not way_out and _TEXTS & row.keys() and "hash_ids" not in row:
            way_out = "; make prompt_token_ids from the text with your model's tokenizer"
        found = f"has {', '.join(names[:_MOST_NAMES])}{more}" if names else "has no field"
        self._fail(
            line, f"no {key!r}; a request has {self._FIELDS}, and this line {found}{way_out}"
        )

    def _count(
        self,
        row: dict[str, object],
        line: int,
        key: str,
        *,
        at_least: int,
        at_most: int = 2**31 - 1,
    ) -> int:
        value = self._field(row, line, key)
        if not isinstance(value, int) or isinstance(value, bool):
            self._fail(line, f"{key} is {_kind(value)}; expected a number of tokens")
        if not at_least <= value <= at_most:
            self._fail(line, f"{key} is {value}; expected {at_least} to {at_most} tokens")
        return value

    def _output(self, row: dict[str, object], line: int) -> int:
        return self._count(row, line, "output_length", at_least=0, at_most=MAX_OUTPUT_TOKENS)

    def _timestamp(self, row: dict[str, object], line: int) -> float:
        value = self._field(row, line, "timestamp")
        if not isinstance(value, int | float) or isinstance(value, bool):
            way_out = ": of a date, 1000 * datetime.timestamp()" if isinstance(value, str) else ""
            self._fail(line, f"timestamp is {_kind(value)}; expected milliseconds{way_out}")
        if not (0 <= value < 2**53 and math.isfinite(value)):
            way_out = ": divide nanoseconds by 1000000" if value >= _LEAST_NANOSECONDS else ""
            self._fail(line, f"timestamp is {value}; expected 0 to 2**53 ms{way_out}")
        return float(value)

    def _ids(self, row: dict[str, object], line: int) -> tuple[int, ...]:
        ids = self._field(row, line, "hash_ids")
        if not isinstance(ids, list):
            self._fail(line, f"hash_ids is {_kind(ids)}; expected a list of ids")
        for position, value in enumerate(ids):
            if type(value) is not int:
                way_out = ": number the hashes as they first appear" if type(value) is str else ""
                self._fail(
                    line,
                    f"hash_ids[{position}] is {_kind(value)}; expected an integer{way_out}",
                )
            if not 0 <= value <= MAX_TRACE_ID:
                way_out = ": shift hashes of 64 bits right by 1" if 0 < value < 2**64 else ""
                self._fail(
                    line, f"hash_ids[{position}] is {value}; expected 0 to 2**63 - 1{way_out}"
                )
        if not ids:
            self._fail(line, "hash_ids is empty; a request has at least one block")
        return tuple(ids)


class ChainedReader(TraceReader):
    """Reads the Mooncake form: ids are chained, and the last id may name a partial block.

    Args:
        path: as for `read_trace`.
        block_size: number of tokens per id.
        predecessors: the id before each id of other files, if ids are equal in all of them.
    """

    _REMEDY = (
        "Pass --chain if the ids name passages. If several traces were joined here that have ids "
        "of their own, join their token ids and convert them together, or pass the traces one by "
        "one to kvstow plan --separate-files"
    )

    def __init__(
        self,
        path: str | Path,
        block_size: int = DEFAULT_BLOCK_SIZE,
        predecessors: dict[int, int | None] | None = None,
    ) -> None:
        super().__init__(path, block_size)
        self._predecessor = {} if predecessors is None else predecessors
        self._first_miscount: tuple[int, str, str] | None = None
        self._least_block, self._most_block = 1, sys.maxsize  # tokens, of all requests

    def _request(self, row: dict[str, object], line: int, arrival_s: float) -> TraceRequest:
        prompt = self._count(row, line, "input_length", at_least=1)
        output = self._output(row, line)
        ids = self._ids(row, line)
        self._check_chained(ids, line)
        self._fit_block(prompt, len(ids))
        num_expected = -(-prompt // self.block_size)
        # Raised at the end, because ids that turn out not to be chained need another error.
        if len(ids) != num_expected and self._first_miscount is None:
            # Caches know full blocks only, so a trace of their keys lacks the id of the last block.
            rest = prompt % self.block_size if len(ids) == prompt // self.block_size else 0
            lacks = f", or give the last block, of {rest} tokens, an id as well" if rest else ""
            self._first_miscount = (
                line,
                f"found {len(ids)} hash_ids, expected {num_expected} (ceil({prompt} / "
                f"{self.block_size})): pass --block-size if your blocks have another size",
                f", or --chain if the ids name passages{lacks}",
            )
        return TraceRequest(line, arrival_s, prompt, output, ids)

    def _check_chained(self, ids: tuple[int, ...], line: int) -> None:
        before: int | None = None
        for trace_id in ids:
            known = self._predecessor.setdefault(trace_id, before)
            if known != before:
                self._fail(
                    line,
                    f"the ids are not chained: id {trace_id} comes {_after(before)} here and "
                    f"{_after(known)} before. {self._REMEDY}",
                )
            before = trace_id

    def _fit_block(self, prompt: int, num_ids: int) -> None:
        """Note the sizes of a block with which the prompt has so many."""
        self._least_block = max(self._least_block, -(-prompt // num_ids))
        if num_ids > 1:
            self._most_block = min(self._most_block, -(-prompt // (num_ids - 1)) - 1)

    def _fitting_block(self) -> str:
        """Return the sizes of a block that fit all requests, as a part of an error."""
        least, most = self._least_block, self._most_block
        if least > most or most == sys.maxsize:
            return ""
        if least == most:
            return f" ({least} tokens fit all requests)"
        usual = 1 << (most.bit_length() - 1)
        such = f", such as {usual}" if usual >= least else ""
        return f" ({least} to {most} tokens fit all requests{such})"

    def _checked_all(self) -> None:
        if self._first_miscount is not None:
            line, wrong, way_out = self._first_miscount
            self._fail(line, f"{wrong}{self._fitting_block()}{way_out}")


class ContentReader(TraceReader):
    """Reads the RAGPulse form: ids name passages, and the replay chains them by path.

    The trace does not record the length of a passage (`input_length` does not follow from the ids).
    So each id counts as one whole block: a prompt has `len(hash_ids) * block_size` tokens.
    """

    _NAMES_PASSAGES = True

    def _request(self, row: dict[str, object], line: int, arrival_s: float) -> TraceRequest:
        length = self._count(row, line, "input_length", at_least=1)
        output = self._output(row, line)
        ids = self._ids(row, line)
        nominal = len(ids) * self.block_size
        return TraceRequest(line, arrival_s, nominal, output, ids, input_length=length)


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is not a finite number")


def _after(trace_id: int | None) -> str:
    return "first" if trace_id is None else f"after id {trace_id}"


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), f"{value!r}")
