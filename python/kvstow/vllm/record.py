"""Record: a trace of the requests that vLLM has served, for `kvstow plan` and `kvstow replay`.

A line per request, in the Mooncake form:

    {"timestamp": 1500, "input_length": 40, "output_length": 7, "hash_ids": [12, 90, 33]}

- `timestamp`: milliseconds from the start of the recording to the request's arrival.
- `input_length`, `output_length`: tokens.
- `hash_ids`: an id for each block of the prompt. Equal ids mean equal blocks behind equal
  beginnings. An id is a keyed hash of vLLM's block hash. The key (the salt) is random, is written
  nowhere, and ends with the process. A partial last block has an id that occurs nowhere else,
  because no cache serves it.

So a trace shows how many requests came when, how long they were, and which of them share how many
blocks. It has no token and no text. Without the salt nobody can compute the id of a known prompt,
nor compare two recordings.

vLLM's scheduler only puts a request's hashes into a queue. A thread computes ids and writes. If it
falls behind, requests are missing from the trace. If the file cannot be written, the recording ends
with one warning.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

from vllm.v1.request import Request

from kvstow import ConfigError, salted_ids
from kvstow.observability.events import append_all, open_to_append
from kvstow.vllm.model import Model

logger = logging.getLogger("vllm." + __name__)

SALT_BYTES: Final = 32
# Blocks of requests that wait for the thread: 80 MiB of hashes.
MAX_QUEUED_BLOCKS: Final = 1 << 20
# Arrivals and ends of requests that wait for the thread: 50 MiB.
MAX_QUEUED_ITEMS: Final = 1 << 18
# Lines of requests that have ended, and wait for an earlier one that runs.
MAX_HELD_BYTES: Final = 64 << 20
# Memory of a line beside its text.
_LINE_BYTES: Final = 256
CLOSE_S: Final = 10.0


@dataclass(slots=True)
class _Line:
    """A request.

    Attributes:
        timestamp: its arrival.
        text: its line in the file, which is empty if it is missing there. None while it runs.
        is_passed: requests that vLLM admitted later do not wait for it.
    """

    timestamp: int
    text: str | None = None
    is_passed: bool = False

    @property
    def num_bytes(self) -> int:
        """Memory of a line that has a text."""
        return _LINE_BYTES + len(self.text or "")


@dataclass(frozen=True, slots=True)
class _Ended:
    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    hashes: Sequence[bytes]


class TraceRecorder:
    """Writes the requests of one vLLM scheduler to a file.

    Attributes:
        path: the file, or a symbolic link to it. The name of the file with `.1` has the requests
            before those.
        is_off: the recording has ended, by an error or by `close`.
    """

    def __init__(
        self,
        path: str,
        model: Model,
        *,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the file; what an earlier server has recorded there gets the name with `.1`.

        Args:
            path: a file in a folder that exists, or a symbolic link to one.
            model: the model, with the tokens of vLLM's hashes.
            max_bytes: when the file has so many bytes, it gets the name with `.1`, and another
                begins.
            clock: seconds since the epoch, as in `Request.arrival_time`.

        Raises:
            ConfigError: the file cannot be opened.
        """
        self.path = path
        self.is_off = False
        self._model = model
        self._max_bytes = max_bytes
        self._start_s = clock()
        self._salt = os.urandom(SALT_BYTES)
        self._num_tails = 0
        self._running: dict[str, _Line] = {}
        self._lines: deque[_Line] = deque()  # in the order of admission
        self._num_held_bytes = 0
        self._queue: SimpleQueue[tuple[str, int] | _Ended | None] = SimpleQueue()
        self._num_queued_blocks = self._num_written_blocks = 0
        self._num_lost = 0
        self._thread: threading.Thread | None = None
        self._descriptor: int | None = None
        self._num_bytes = 0
        try:
            self._file = os.path.realpath(path)  # a symbolic link keeps its place
            self._open()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"record_trace is {path!r}, which cannot be opened ({error}): name a file in a "
                "folder that exists and can be written"
            ) from error

    # -- vLLM's scheduler -----------------------------------------------------------------------

    def admitted(self, request: Request, num_local_tokens: int, num_external_tokens: int) -> None:
        """Take the arrival of a request that vLLM admits for the first time."""
        if not self.is_off:
            timestamp = max(0, round((request.arrival_time - self._start_s) * 1000))
            self._put((request.request_id, timestamp))

    def finished(self, request: Request) -> None:
        """Take a request that has ended."""
        if self.is_off:
            return
        hashes = self._model.hit_hashes(request, request.num_prompt_tokens)
        num_waiting = self._num_queued_blocks - self._num_written_blocks + len(hashes)
        if num_waiting > MAX_QUEUED_BLOCKS:
            self._lose(request.request_id)
            return
        self._num_queued_blocks += len(hashes)
        self._put(
            _Ended(request.request_id, request.num_prompt_tokens, request.num_output_tokens, hashes)
        )
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvstow-record", daemon=True)
            self._thread.start()

    def emptied(self) -> None:
        """Do nothing: a reset is no part of a trace."""

    def close(self) -> None:
        """Write the requests that have ended, and close the file."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_S)
        else:
            self._stop()
        self.is_off = True

    def _lose(self, request_id: str) -> None:
        if not self._num_lost:
            logger.warning(
                "kvstow: the disk of the trace %r is too slow, so requests are missing from the "
                "trace. Record to a faster disk",
                self.path,
            )
        self._num_lost += 1
        self._put(_Ended(request_id, 0, 0, ()))

    def _put(self, item: tuple[str, int] | _Ended) -> None:
        """Give the thread an arrival or an end; a disk that hangs ends the recording."""
        if self._queue.qsize() < MAX_QUEUED_ITEMS:
            self._queue.put(item)
            return
        self.is_off = True
        self._warn_of_end("its disk hangs")

    def _warn_of_end(self, why: object) -> None:
        logger.warning(
            "kvstow: the trace %r cannot be written (%s), so the recording ends. Make room, and "
            "restart the server to record again",
            self.path,
            why,
        )

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        """Write until the recording is closed or fails. Then only empty the queue."""
        try:
            while (item := self._queue.get()) is not None:
                if not self.is_off:
                    self._take(item)
            if not self.is_off:
                self._write_lines(all_ended=True)
        except Exception as error:
            self._warn_of_end(error)
        finally:
            self._stop()

    def _stop(self) -> None:
        self.is_off = True
        self._lines.clear()
        self._running.clear()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _take(self, item: tuple[str, int] | _Ended) -> None:
        if not isinstance(item, _Ended):
            request_id, timestamp = item
            admitted = self._running[request_id] = _Line(timestamp)
            self._lines.append(admitted)
            return
        self._num_written_blocks += len(item.hashes)
        # Forgotten before the line is written, because a later request may have this id.
        line = self._running.pop(item.request_id, None)
        if line is None:
            return
        is_missing = item.num_prompt_tokens == 0
        line.text = "" if is_missing else _json(line.timestamp, item, self._ids(item))
        self._num_held_bytes += line.num_bytes
        if line.is_passed:
            self._lines.append(line)
        self._write_lines()

    def _write_lines(self, *, all_ended: bool = False) -> None:
        """Write the requests that have ended, in the order of admission.

        A request waits for those before it, unless the lines that wait take too much memory.
        """
        while self._lines:
            line = self._lines[0]
            may_pass = all_ended or self._num_held_bytes > MAX_HELD_BYTES
            if line.text is None and not may_pass:
                break
            self._lines.popleft()
            if line.text is None:
                line.is_passed = True
                continue
            self._num_held_bytes -= line.num_bytes
            if line.text:
                self._write(line.text.encode())

    def _ids(self, item: _Ended) -> list[int]:
        """Return an id for each block of a prompt; those without a hash occur nowhere else."""
        ids: list[int] = salted_ids(item.hashes, self._salt).tolist()
        num_blocks = -(-item.num_prompt_tokens // self._model.tokens_per_hit)
        num_tails = num_blocks - len(ids)
        tails = range(self._num_tails, self._num_tails + num_tails)
        self._num_tails += num_tails
        names = [b"tail" + number.to_bytes(8, "big") for number in tails]
        ids += salted_ids(names, self._salt).tolist()
        return ids

    def _write(self, data: bytes) -> None:
        """Write one line, so that no file grows by a backlog of them."""
        if self._num_bytes and self._num_bytes + len(data) > self._max_bytes:
            self._open()
        assert self._descriptor is not None
        append_all(self._descriptor, data)
        self._num_bytes += len(data)

    def _open(self) -> None:
        """Begin an empty file. One that has content gets the name with `.1`.

        Raises:
            OSError: the file cannot be opened, or it is another server's by now.
        """
        own = None
        if self._descriptor is not None:
            own = os.fstat(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
        if os.path.isfile(self._file) and os.path.getsize(self._file):
            if own is not None and not os.path.samestat(own, os.stat(self._file)):
                raise OSError(errno.EBUSY, "another server records there: name a file for each")
            os.replace(self._file, f"{self._file}.1")
        self._descriptor, self._num_bytes = open_to_append(self._file), 0


def _json(timestamp: int, item: _Ended, ids: list[int]) -> str:
    fields = {
        "timestamp": timestamp,
        "input_length": item.num_prompt_tokens,
        "output_length": item.num_output_tokens,
        "hash_ids": ids,
    }
    return json.dumps(fields, separators=(",", ":")) + "\n"
