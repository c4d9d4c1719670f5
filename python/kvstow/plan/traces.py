"""Read the traces of a plan: one or several files, with block ids or with token ids.

    a line has          its ids are                          tokens per block, unless given
    `hash_ids`          chained, or passages with `--chain`  512, as in replay
    `prompt_token_ids`  made here from the tokens            16, as in vLLM

Requests of several files are served in the order of their arrival. At equal times the file that is
named first comes first. An id names the same block in all files, and equal tokens are the same
block, unless the files are separate.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Final

from kvstow._core import ConfigError
from kvstow.replay.convert import TokenReader
from kvstow.replay.trace import (
    DEFAULT_BLOCK_SIZE,
    ChainedReader,
    ContentReader,
    TraceReader,
    TraceRequest,
)

TOKEN_BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request of one of the files.

    Attributes:
        request: the request.
        namespace: requests share blocks only with requests of the same namespace.
    """

    request: TraceRequest
    namespace: int

    @property
    def arrival_s(self) -> float:
        """Arrival in seconds."""
        return self.request.arrival_s


@dataclass(frozen=True, slots=True)
class PlanTrace:
    """The requests of all files, in the order of their arrival.

    Attributes:
        names: the paths of the files; `<stdin>` for standard input.
        block_size: number of tokens per id.
        is_content: whether the ids name passages.
        requests: the requests.
        limit: the most requests that were to be read of each file; None for all.
        is_separate: whether different files share no block.
    """

    names: tuple[str, ...]
    block_size: int
    is_content: bool
    requests: list[PlanRequest]
    limit: int | None = None
    is_separate: bool = False


def read_traces(
    paths: Sequence[str | Path],
    *,
    chain: bool = False,
    block_size: int | None = None,
    separate: bool = False,
    limit: int | None = None,
) -> PlanTrace:
    """Read traces as one.

    Args:
        paths: files, or `-` for standard input, at most once.
        chain: whether ids name passages, and are to be chained by path.
        block_size: number of tokens per id; None for the form's usual one.
        separate: whether different files share no block.
        limit: number of requests to read from each file.

    Raises:
        ConfigError: as `read_trace`, or the files have blocks of different sizes, or `chain` is
            given and all files have token ids.
        OSError: reading failed after a file was opened.
    """
    if [str(path) for path in paths].count("-") > 1:
        raise ConfigError("- stands for standard input, and is given twice: pass it once")
    repeated = [path for at, path in enumerate(paths) if path in paths[:at]]
    if repeated and not separate:
        raise ConfigError(
            f"{repeated[0]} is given twice, and every request would hit: pass it once, or pass "
            "--separate-files if two groups of users send it"
        )
    numbers: dict[bytes, int] = {}
    predecessors: dict[int, int | None] = {}
    streams: list[list[PlanRequest]] = []
    readers: list[_AnyReader] = []
    contents: list[tuple[bool, list[TraceRequest]]] = []
    for path in paths:
        reader = _AnyReader(
            path,
            chain=chain,
            block_size=block_size,
            numbers={} if separate else numbers,
            predecessors={} if separate else predecessors,
            is_alone=separate or len(paths) == 1,
        )
        trace = reader.read(limit)
        content = reader.has_tokens, trace.requests
        # Two files of one request may be examples that somebody wrote by hand.
        if not separate and content in contents and len(trace.requests) > 1:
            twin = readers[contents.index(content)].source.name
            raise ConfigError(
                f"{reader.source.name} has the same requests as {twin}, and every request would "
                "hit: pass one of them, or pass --separate-files if two groups of users send them"
            )
        contents.append(content)
        namespace = len(readers) if separate else int(not reader.has_tokens)
        streams.append([PlanRequest(request, namespace) for request in trace.requests])
        readers.append(reader)
    if chain and all(reader.has_tokens for reader in readers):
        raise ConfigError(
            f"--chain is given, and {', '.join(reader.source.name for reader in readers)} has "
            "prompt_token_ids: --chain is for hash_ids that name passages, so leave it out"
        )
    sizes = sorted({reader.block_size for reader in readers})
    if len(sizes) > 1:
        raise ConfigError(
            f"the files have blocks of {' and '.join(map(str, sizes))} tokens, and a plan needs "
            "blocks of one size: pass --block-size, or plan for each file"
        )
    return PlanTrace(
        tuple(reader.source.name for reader in readers),
        sizes[0],
        chain,
        list(heapq.merge(*streams, key=attrgetter("arrival_s"))),
        limit,
        separate,
    )


class _AnyReader(TraceReader):
    """Reads a file with block ids, or one with token ids.

    Attributes:
        has_tokens: whether the file has token ids; False before the first line is read.
    """

    _FIELDS = "timestamp, output_length, and either hash_ids and input_length or prompt_token_ids"

    def __init__(  # noqa: PLR0913 - the state that the files share, and the user's options
        self,
        path: str | Path,
        *,
        chain: bool,
        block_size: int | None,
        numbers: dict[bytes, int],
        predecessors: dict[int, int | None],
        is_alone: bool,
    ) -> None:
        super().__init__(path, DEFAULT_BLOCK_SIZE if block_size is None else block_size)
        self.has_tokens = False
        self._num_rows = 0
        token_size = TOKEN_BLOCK_SIZE if block_size is None else block_size
        self._of_tokens = TokenReader(path, token_size, numbers)
        self._of_ids: TraceReader
        if chain:
            self._of_ids = ContentReader(path, self.block_size)
        elif is_alone:
            self._of_ids = ChainedReader(path, self.block_size, predecessors)
        else:
            self._of_ids = _OneOfSeveral(path, self.block_size, predecessors)

    def _request(self, row: dict[str, object], line: int, arrival_s: float) -> TraceRequest:
        has_tokens = "prompt_token_ids" in row
        if self._num_rows and has_tokens != self.has_tokens:
            self._fail(
                line,
                "the lines before have "
                f"{'prompt_token_ids' if self.has_tokens else 'hash_ids'}, and all lines of a file "
                "must have the same: put the others into a file of their own",
            )
        if not has_tokens and "hash_ids" not in row:
            self._fail_without("hash_ids", row, line)
        self._num_rows += 1
        self.has_tokens = has_tokens
        reader = self._reader
        self.block_size = reader.block_size
        return reader._request(row, line, arrival_s)

    def _checked_all(self) -> None:
        self._reader._checked_all()

    @property
    def _reader(self) -> TraceReader:
        return self._of_tokens if self.has_tokens else self._of_ids


class _OneOfSeveral(ChainedReader):
    """Reads one of several files whose ids are equal where their blocks are."""

    _REMEDY = (
        "Pass --separate-files if each file has ids of its own, or --chain if the ids name "
        "passages. If the files were converted one by one, pass those with the token ids instead, "
        "or they lose what they share"
    )
