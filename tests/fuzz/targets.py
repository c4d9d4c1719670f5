"""Every parser of bytes that kvstow did not make itself just now, each with what to feed it.

A target either accepts its input or raises one of its errors. Any other exception is a defect, and
so is a parser that takes hundreds of MiB or does not end. What is accepted is used as the next
step of the program uses it, because a wrong value often fails only there.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import lzma
import socket
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tests.engine.sleep_world import WHO, World, put_to_sleep
from tests.fuzz.inputs import VALUES, changed, damaged
from tests.tiers.setup import MODEL, NUM_SLOTS, SLOT_BYTES, Here, key_of, new_arena, put, slot_file

from kvstow import BlockLedger, ConfigError, FullAttention, OffloadScheduler, SnapshotError
from kvstow._core import row_digests
from kvstow.engine.snapshot_file import SnapshotFile
from kvstow.geometry.config import read_config
from kvstow.geometry.layout import lay_out
from kvstow.replay.convert import TokenReader, VllmLogReader, trace_lines
from kvstow.replay.trace import ChainedReader, ContentReader, TraceReader
from kvstow.sizes import parse_bytes
from kvstow.tiers.frame import FRAME, SCHEMA, Context, are_of, are_sound, place_of, seal
from kvstow.tiers.namespace import HEADER_BYTES, Namespace
from kvstow.tiers.resp import commands
from kvstow.tiers.resp.address import Address
from kvstow.tiers.resp.wire import Wire, WireError
from kvstow.tiers.slot_index import VERSION, Header, _digest
from kvstow.tiers.sums import ArenaSums
from kvstow.tiers.warm import adopt
from kvstow.transfer import READY, HostArena


@dataclass(frozen=True)
class Target:
    """A parser.

    Attributes:
        sample: an input that it accepts.
        inputs: what to feed it.
        parse: feeds it.
        errors: what it may raise.
    """

    sample: Callable[[], Any]
    inputs: st.SearchStrategy[Any]
    parse: Callable[[Any], object]
    errors: tuple[type[Exception], ...] = (ConfigError,)

    def check(self, given: Any) -> None:
        """Feed the parser, and let every exception pass that is not one of its errors."""
        with contextlib.suppress(*self.errors):
            self.parse(given)


@cache
def folder() -> Path:
    """Return a folder that lasts as long as this process."""
    kept = tempfile.TemporaryDirectory(prefix="kvstow-fuzz-")
    _KEPT.append(kept)
    return Path(kept.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def written(data: bytes) -> Path:
    """Return a file with this content."""
    path = folder() / "input"
    path.write_bytes(data)
    return path


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


# -- traces ------------------------------------------------------------------------------------

_ROW = {"timestamp": 3.5, "input_length": 1030, "output_length": 7, "hash_ids": [4, 5, 6]}
_TOKENS = {"timestamp": 0, "prompt_token_ids": [1, 2, 3], "output_length": 1, "salt": "a"}
_LINES = as_json(_ROW) + b"\n" + as_json(_ROW | {"timestamp": 1, "hash_ids": [4, 5, 9]}) + b"\n"
_LOG = (
    b"DEBUG 01-31 10:00:00 [loggers.py:1] Request a details: prompt: 'x', prompt_token_ids: "
    b"[1, 2, 3], prompt_embeds shape: None.\n"
    b"INFO 01-31 10:00:00 [loggers.py:2] Received request a: params: x, lora_request: "
    b"LoRARequest(lora_name='b').\n"
    b"INFO 12-01 10:00:05 [loggers.py:3] Generated response a details: output_token_ids: [5, 6]\n"
)


def _read(reader: type[TraceReader], *options: int) -> Callable[[bytes], object]:
    return lambda data: list(trace_lines(reader(written(data), *options).read()))


def _as_lines(rows: list[Any]) -> bytes:
    return b"\n".join(map(as_json, rows))


_TRACES = st.one_of(
    damaged(_LINES, gzip.compress(_LINES), bz2.compress(_LINES), lzma.compress(_LINES)),
    st.lists(changed(_ROW), max_size=3).map(_as_lines),
)

# -- models ------------------------------------------------------------------------------------


def _read_config(data: bytes) -> object:
    return lay_out(read_config(written(data)), 16, dtype="bfloat16")


def _lay_out(fields: Any) -> object:
    return _read_config(as_json(fields))


_CONFIGS: list[dict[str, Any]] = [
    {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "head_dim": 8,
        "sliding_window": 32,
        "sliding_window_pattern": 2,
        "dtype": "bfloat16",
    },
    {
        "text_config": {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "chunked_attention"],
            "attention_chunk_size": 64,
            "num_attention_heads": 4,
            "hidden_size": 32,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 4,
        }
    },
    {
        "num_hidden_layers": 3,
        "hybrid_override_pattern": "M*-",
        "num_attention_heads": 4,
        "hidden_size": 32,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    },
]

# -- slot files --------------------------------------------------------------------------------


def _open_slots(index: bytes) -> int:
    """Open a slot file with this index, and return how many records a scheduler took."""
    path = folder() / "slot-file"
    path.mkdir(exist_ok=True)
    (path / "slots.index").write_bytes(index)
    (path / "slots").write_bytes(bytes(NUM_SLOTS * SLOT_BYTES))
    with new_arena() as arena, slot_file(path).open(arena, MODEL, files=Here()) as tier:
        scheduler = OffloadScheduler(4, [FullAttention(16)], num_disk_blocks=NUM_SLOTS)
        num_adopted = adopt(scheduler, tier.records())
        scheduler.check()
        put(tier, [key_of(1)], [0])
        return num_adopted


def _page(fields: Any) -> bytes:
    """Return a header with these fields and its right checksum."""
    page = np.zeros(4096, np.uint8)
    text = as_json(fields)[:4000]
    prefix = struct.pack("<8sII", b"KVSLOTS\n", VERSION, len(text)) + text
    page[: len(prefix)] = np.frombuffer(prefix, np.uint8)
    page[-8:] = np.frombuffer(struct.pack("<Q", _digest(page)), np.uint8)
    return page.tobytes()


_HEADER = Header(SLOT_BYTES, NUM_SLOTS, 77, False, MODEL.fields)
_FIELDS = {name: getattr(_HEADER, name) for name in Header.__dataclass_fields__}
_PAGE = _page(_FIELDS)


def _frames() -> Any:
    """Return the frames of two blocks, parent and child."""
    frames = np.zeros(2, FRAME)
    frames["schema"], frames["hash_bytes"] = SCHEMA, 32
    frames["parent_bytes"] = [0, 32]
    frames["length"], frames["slot"], frames["sequence"] = SLOT_BYTES, [0, 1], [5, 6]
    frames["generation"], frames["fingerprint"] = 77, np.void(MODEL.digest)
    frames["hash"], frames["parent"] = [b"a" * 32, b"b" * 32], [b"", b"a" * 32]
    seal(frames, np.zeros(2, np.uint64))
    return frames


@st.composite
def _forged_frames(draw: st.DrawFn) -> bytes:
    """Return an index of two frames with wrong fields and right checksums."""
    frames = _frames()
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.sampled_from([name for name in FRAME.names or () if name != "digest"]))
        size = FRAME[name].itemsize
        value = draw(st.one_of(st.integers(0, 40), st.integers(0, 256**size - 1)))
        at = draw(st.integers(0, 1))
        row = frames[at : at + 1].view(np.uint8)
        row[place_of(name)] = np.frombuffer(value.to_bytes(size, "little"), np.uint8)
    seal(frames, np.zeros(2, np.uint64))
    index: bytes = _PAGE + frames[: draw(st.integers(1, 2))].tobytes()
    return index


def _match_frames(data: bytes) -> None:
    frames = np.frombuffer(data[: len(data) // FRAME.itemsize * FRAME.itemsize], FRAME).copy()
    are_sound(frames) & are_of(frames, Context(MODEL.digest, 77, SLOT_BYTES))


# -- shared stores -----------------------------------------------------------------------------

_SPACE = Namespace(b"n" * 16)
_ROWS = np.arange(64, dtype=np.uint8).reshape(2, 32)
_SUMS = ArenaSums(HostArena(2, 32))  # no mover keeps checksums there
_PART = commands.Part([0, 1], [b"k0", b"k1"], [0, 0], [b"h" * 8, b"i" * 8], [0, 1])
_VALUES_OF_BOTH = b"".join(
    b"$%d\r\n%s\r\n"
    % (
        HEADER_BYTES + 32,
        _SPACE.header(0, name, 32, int(row_digests(row[None], [0])[0])) + bytes(row),
    )
    for name, row in zip(_PART.hashes, _ROWS, strict=True)
)
_CALLS: list[Callable[[Wire], object]] = [
    lambda wire: list(
        commands.get(wire, _PART, commands.Memory(np.zeros_like(_ROWS), _SUMS), _SPACE)
    ),
    lambda wire: list(commands.put(wire, _PART, commands.Memory(_ROWS, _SUMS), _SPACE, ())),
    lambda wire: list(commands.contains(wire, _PART)),
    lambda wire: list(commands.delete(wire, _PART)),
    lambda wire: wire.answer(),
]


def _answer(given: tuple[bytes, int]) -> None:
    """Let a server give these bytes as its answer to a call, and close the connection."""
    answer, call = given
    here, there = socket.socketpair()
    with here, there:
        there.sendall(answer[: 32 << 10])
        there.shutdown(socket.SHUT_WR)
        connection = SimpleNamespace(connect=lambda: None, disconnect=here.close, _sock=here)
        wire = Wire(connection)
        wire.limit(time.monotonic() + 1000)
        _CALLS[call](wire)


_ANSWERS = damaged(
    _VALUES_OF_BOTH, b"$-1\r\n$-1\r\n", b"+OK\r\n+OK\r\n", b":1\r\n:0\r\n",
    b"-MOVED 3 a:1\r\n:1\r\n", b"$3\r\nabc\r\n$0\r\n\r\n",
    b"*1\r\n*3\r\n:0\r\n:9\r\n*2\r\n$1\r\na\r\n:1\r\n",
)  # fmt: skip


def _match_header(data: bytes) -> int | None:
    return _SPACE.checksum(data, 3, b"h" * 32, 4096)


_HEADER_OF_A_BLOCK = _SPACE.header(3, b"h" * 32, 4096, 5)
_URLS = [
    b"redis://host:6379/0",
    b"rediss://[::1]:1,other:2",
    b"redis+sentinel://a:26379/service",
    b"unix:///tmp/socket",
    b"redis+cluster://a",
]

# -- snapshots ---------------------------------------------------------------------------------


@cache
def _snapshot() -> bytes:
    path = folder() / "snapshot"
    put_to_sleep(path)
    return path.read_bytes()


@st.composite
def _snapshots(draw: st.DrawFn) -> bytes:
    """Return a snapshot file with changed bytes, or a changed header with its right checksum."""
    whole = _snapshot()
    [num_bytes] = struct.unpack_from("<I", whole, 12)
    if draw(st.booleans()):
        return draw(damaged(whole[:4096])) + whole[4096:]
    header = as_json(draw(changed(json.loads(whole[20 : 20 + num_bytes]))))
    crc = zlib.crc32(header, zlib.crc32(struct.pack("<II", 1, len(header))))
    prefix = struct.pack("<8sIII", whole[:8], 1, len(header), crc)
    return (prefix + header).ljust(4096, b"\0") + whole[4096:]


def _open_snapshot(data: bytes) -> None:
    path = written(data)
    with SnapshotFile(path) as file:
        file.damaged_slots()
    world = World()
    try:
        world.engine.restart(path, after=READY, requests=True, **WHO)
    finally:
        world.engine.close()


def _restore_scheduler(data: bytes) -> None:
    OffloadScheduler(8, [FullAttention(4)]).restore(data)


def _restore_ledger(data: bytes) -> None:
    BlockLedger(8, [FullAttention(4)]).restore(data)


@cache
def _scheduler_snapshot() -> bytes:
    scheduler = OffloadScheduler(8, [FullAttention(4)])
    scheduler.add("a", [b"1" * 8, b"2" * 8])
    job = scheduler.store(["a"], [8], [1, 2], [0, 2])
    assert job is not None
    scheduler.complete(job.job_id)
    return scheduler.snapshot()


@cache
def _ledger_snapshot() -> bytes:
    ledger = BlockLedger(8, [FullAttention(4)])
    ledger.add("a", [b"1" * 8, b"2" * 8])
    ledger.allocate("a", 9)
    return ledger.snapshot()


def targets() -> Iterator[tuple[str, Target]]:
    """Yield each target with its name."""
    tokens = st.lists(changed(_TOKENS), max_size=3).map(_as_lines)
    index = _PAGE + _frames().tobytes()
    yield "trace", Target(lambda: _LINES, _TRACES, _read(ChainedReader))
    yield "content_trace", Target(lambda: _LINES, _TRACES, _read(ContentReader))
    yield "token_trace", Target(lambda: as_json(_TOKENS), tokens, _read(TokenReader, 2))
    yield "vllm_log", Target(lambda: _LOG, damaged(_LOG), _read(VllmLogReader, 2))
    yield "config", Target(lambda: _CONFIGS[0], changed(*_CONFIGS), _lay_out)
    yield (
        "config_bytes",
        Target(lambda: as_json(_CONFIGS[2]), damaged(*map(as_json, _CONFIGS)), _read_config),
    )
    sizes = st.one_of(VALUES, damaged(b"1.5GiB").map(_text))
    yield "size", Target(lambda: "1.5GiB", sizes, parse_bytes)
    yield "slot_header", Target(lambda: _PAGE, changed(_FIELDS).map(_page), _open_slots)
    yield "slot_index", Target(lambda: index, damaged(index), _open_slots)
    yield "slot_frames", Target(lambda: index, _forged_frames(), _open_slots)
    yield (
        "frames",
        Target(lambda: _frames().tobytes(), damaged(_frames().tobytes()), _match_frames, ()),
    )
    yield (
        "answer",
        Target(
            lambda: (_VALUES_OF_BOTH, 0),
            st.tuples(_ANSWERS, st.integers(0, len(_CALLS) - 1)),
            _answer,
            (WireError,),
        ),
    )
    yield (
        "block_header",
        Target(lambda: _HEADER_OF_A_BLOCK, damaged(_HEADER_OF_A_BLOCK), _match_header, ()),
    )
    yield "address", Target(lambda: _text(_URLS[1]), damaged(*_URLS).map(_text), Address.parse)
    yield "snapshot_file", Target(_snapshot, _snapshots(), _open_snapshot, (SnapshotError,))
    yield (
        "scheduler_snapshot",
        Target(
            _scheduler_snapshot,
            st.deferred(lambda: damaged(_scheduler_snapshot())),
            _restore_scheduler,
            (SnapshotError,),
        ),
    )
    yield (
        "ledger_snapshot",
        Target(
            _ledger_snapshot,
            st.deferred(lambda: damaged(_ledger_snapshot())),
            _restore_ledger,
            (SnapshotError,),
        ),
    )


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


TARGETS = dict(targets())
