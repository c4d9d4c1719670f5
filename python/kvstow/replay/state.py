"""The state of a replay: the engine under test, its memory, the link, the requests and the clock.

`ReplayEngine` adds the loop. Sleep, reports and observers take this state.
"""

import random
from collections import deque
from typing import Final

from kvstow._core import ConfigError, StateError
from kvstow.closing import Closing
from kvstow.engine import DiskOptions, Engine, SharedOptions
from kvstow.engine.ranks import RankLayouts
from kvstow.replay.batch import Batch, Request, longest_table
from kvstow.replay.config import ReplayConfig
from kvstow.replay.content import device_memory
from kvstow.replay.device import device_for
from kvstow.replay.faults import LOAD_TIMEOUT_S, FaultyMover
from kvstow.replay.figures import Figures
from kvstow.replay.link import Links
from kvstow.replay.model import ReplayModel
from kvstow.replay.stopwatch import Stopwatch
from kvstow.replay.trace import Trace, TraceRequest
from kvstow.replay.verify import Verifier
from kvstow.tiers import SharedStore, SlotFileMismatch
from kvstow.transfer import BlockLayout, HostArena, Mover

# The most real seconds for a call of a shared store.
_PATIENCE_S: Final = 30.0


class ReplayState(Closing):
    """The state of one replay.

    Attributes:
        trace: the requests to replay.
        config: the options.
        model: the model whose blocks move.
        figures: what the replay has counted so far.
        watch: measures the time spent in calls of `kv`.
        now_s: virtual time.
        device: where the model computes.
        memory: the device memory, one view per group, rank by rank.
        kv: the engine under test.
        num_warm: slots of the disk with blocks of an earlier replay, at the start.
        arena: the host memory of the first rank.
        links: the transfers in flight.
        verifier: compares blocks with the bytes that they must hold.
        batch: the requests that run or load.
        waiting: the requests that have arrived but have no seat.
        coming: the requests that have not arrived yet.
        loading: by request, the seat of each request that loads.
    """

    def __init__(self, trace: Trace, config: ReplayConfig, model: ReplayModel | None) -> None:
        self.trace = trace
        self.config = config
        self.model = model or config.build_model(trace.block_size)
        if self.model.block_size != trace.block_size:
            raise ConfigError(
                f"the model {self.model.name!r} has blocks of {self.model.block_size} tokens, the "
                f"trace of {trace.block_size}; build it with the trace's block size"
            )
        max_blocks = longest_table(trace, self.model, config)
        config.check_memory(self.model)
        self.figures = Figures()
        self.watch = Stopwatch()
        self.now_s = trace.requests[0].arrival_s
        self.device = device_for(config.mover if config.faults is None else "host")
        self.memory = [
            group
            for rank in range(config.world_size)
            for group in device_memory(
                config.device_blocks, self.model.geometries, rank, self.device
            )
        ]
        try:
            self.kv = self._build_kv(max_blocks)
        except SlotFileMismatch as error:
            fix = "pass another path, or remove the file and its index"
            raise SlotFileMismatch(error.why, fix) from error
        except StateError as error:  # another process has the slot file open
            raise ConfigError(str(error)) from error
        self.num_warm = self.kv.stats()["disk_resident_blocks"] if config.disk else 0
        self.arena = self.kv.arenas[0]
        block_bytes = [geometry.block_bytes for geometry in self.model.geometries]
        self.links = Links(block_bytes, config.bytes_per_s(self.model))
        self.verifier = Verifier(self.model, self.memory, self.kv.arenas, config.verify)
        num_seats = min(config.max_requests, len(trace.requests))
        self.batch = Batch(len(self.model.groups), num_seats, max_blocks)
        self.waiting: deque[Request] = deque()
        self.coming: deque[TraceRequest] = deque(trace.requests)
        self.loading: dict[str, int] = {}

    def _build_kv(self, max_blocks: int) -> Engine:
        config, seed = self.config, self.config.faults
        chances = random.Random(seed)

        def mover(layout: BlockLayout, arena: HostArena) -> Mover:
            if seed is not None:
                return FaultyMover(layout, arena, chances)
            return self.device.mover(layout, arena, self.watch)

        return Engine(
            config.device_blocks,
            config.host_blocks,
            [group.attention for group in self.model.groups],
            self.layouts,
            mode=config.mode,
            horizon_blocks=self._horizon_blocks(max_blocks) if config.mode == "lazy" else None,
            policy=config.policy,
            load_timeout_s=None if seed is None else LOAD_TIMEOUT_S,
            clock=lambda: self.now_s,
            world_size=config.world_size,
            blocks_per_slot=config.blocks_per_slot,
            disk=config.disk_files(self.model),
            disk_options=_disk_options(config, self.model),
            shared=None if config.shared is None else SharedStore(config.shared),
            shared_options=_shared_options(config, self.model),
            events_path=config.events_path,
            mover=mover,
        )

    @property
    def layouts(self) -> RankLayouts:
        """The layouts of the device memory, as `kvstow.Engine` takes them."""
        layouts = [group.layout() for group in self.memory]
        num_groups = len(self.model.groups)
        if self.config.world_size == 1:
            return layouts
        firsts = range(0, len(layouts), num_groups)
        return [layouts[first : first + num_groups] for first in firsts]

    def _horizon_blocks(self, max_blocks: int) -> int:
        """Return the most blocks that the next step may allocate.

        These are blocks for its tokens, one more per request, and those of the longest load.
        """
        num_blocks = -(-self.config.max_step_tokens // self.trace.block_size)
        num_blocks += self.config.max_requests + max_blocks
        return min(self.config.device_blocks, num_blocks * len(self.model.groups))

    def close(self) -> None:
        """Stop the movers and release the host memory."""
        self.kv.close()

    def check_blocks(self, seat: int, num_tokens: int) -> None:
        """Check all blocks of a request's first tokens, a partial last block included."""
        request, keys = self.batch.request(seat), self.batch.keys[seat]
        for group, table in enumerate(self.kv.tables(request.name)):
            self.verifier.check_table(request, group, table, keys, num_tokens)


def _shared_options(config: ReplayConfig, model: ReplayModel) -> SharedOptions | None:
    """Return how the engine uses a shared tier, and a disk beside it, in no virtual time."""
    if config.shared is None:
        return None
    return SharedOptions(
        # The store may hold blocks of other sizes, whose bytes differ.
        identity=f"replay of {model.name}, {model.block_size} tokens a block",
        weights_version="1",
        admit=config.disk_admit,
        policy=config.policy,
        promote_timeout_s=None,
        timeout_s=_PATIENCE_S,
        flush_s=0.0,
        ask_timeout_s=_PATIENCE_S,
    )


def _disk_options(config: ReplayConfig, model: ReplayModel) -> DiskOptions | None:
    """Return how the engine uses the disk tier. Its reads and writes take no virtual time."""
    if config.below != "disk":
        return None
    return DiskOptions(
        # The bytes of a block follow from its key in every trace.
        identity=f"replay of {model.name}",
        weights_version="1",
        admit=config.disk_admit,
        policy=config.policy,
        promote_timeout_s=None,
        timeout_s=None,
        flush_s=0.0,
    )
