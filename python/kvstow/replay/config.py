"""The options of a replay, checked before anything is built."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from kvstow._core import ConfigError
from kvstow.engine import Policy
from kvstow.replay.device import MoverKind
from kvstow.replay.model import MODELS, ReplayModel, build_model
from kvstow.transfer.arena import slot_stride_bytes

__all__ = [
    "REFERENCE_BYTES_PER_TOKEN",
    "REFERENCE_MODEL",
    "ReplayConfig",
    "Verify",
    "link_bytes_per_s",
]

Verify = Literal["all", "sample", "off"]

_LINK_BYTES_PER_S = 50e9  # PCIe 5 x16
REFERENCE_MODEL: Final = "Llama-3.1-8B"
"""The model whose sizes the reports give beside the replay's own."""
REFERENCE_BYTES_PER_TOKEN: Final = 32 * 8 * 128 * 2 * 2
"""32 layers of 8 KV heads of 128 values, K and V, 2 bytes each: 131,072 bytes of KV per token."""
# What the accounting keeps per block, at most.
_ACCOUNTING_BYTES = 200
# Where a container says how much memory it may use; a limit of none is a word or a huge number.
_CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_MAX_COUNT = 2**31 - 1
_MAX_WORLD_SIZE = 64  # each has two threads per group
_MAX_BLOCKS_PER_SLOT = 1024
_MAX_STEP_MS = 1e6


def link_bytes_per_s(bytes_per_token: int) -> float:
    """Return the default bandwidth.

    The replay's tokens are far smaller than a model's. The link is slowed in proportion, so that a
    block takes the time that a block of `REFERENCE_MODEL` takes over PCIe 5.
    """
    return _LINK_BYTES_PER_S * bytes_per_token / REFERENCE_BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """How to replay a trace.

    Attributes:
        device_blocks: blocks of the device pool, the null block included.
        host_blocks: slots of the host tier.
        policy: which slots the host tier gives up first.
        mode: when blocks are stored.
        mover: where blocks live and what copies them; "auto" takes a GPU if there is one, but for
            faults, which are made in host memory.
        verify: "all" blocks, a "sample" (1 in 16, by digest), or "off".
        step_ms: virtual time of a step, before what is computed in it.
        prefill_token_ms: and for each token of a prefill.
        decode_request_ms: and for each request that decodes.
        max_step_tokens: tokens computed in a step, at most.
        max_requests: requests that run or load at a time, at most.
        bandwidth_bytes_per_s: of each direction of the link, infinity included; None stands for
            `link_bytes_per_s` of what the model has per token.
        model: whose groups and layers the blocks are for.
        num_layers: layers whose K and V a block of the full model holds; None for its own.
        bytes_per_token: of the full model's KV, all layers; None for its own.
        faults: a seed for copies that are late, fail or get lost; None for none.
        world_size: ranks that each hold, and copy, a shard of every block.
        blocks_per_slot: consecutive blocks of a prompt that a host slot holds.
        events_path: a file that the events are appended to; None for none.
        lookahead_tokens: slots for drafts that a step grants besides, to each running request.
        sleep_at: after how many steps the engine sleeps and wakes; once for each time it is named.

    Raises:
        ConfigError: naming the option, its value and its bounds.
    """

    device_blocks: int
    host_blocks: int
    policy: Policy = "lru"
    mode: Literal["eager", "lazy"] = "eager"
    mover: MoverKind = "auto"
    verify: Verify = "all"
    step_ms: float = 5.0
    prefill_token_ms: float = 0.1
    decode_request_ms: float = 0.05
    max_step_tokens: int = 8192
    max_requests: int = 256
    bandwidth_bytes_per_s: float | None = None
    model: str = "full"
    num_layers: int | None = None
    bytes_per_token: int | None = None
    faults: int | None = None
    world_size: int = 1
    blocks_per_slot: int = 1
    events_path: str | None = None
    lookahead_tokens: int = 0
    sleep_at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_count("device-blocks", self.device_blocks, at_least=2)
        _check_count("host-blocks", self.host_blocks)
        _check_choice("policy", self.policy, get_args(Policy))
        _check_choice("mode", self.mode, ("eager", "lazy"))
        _check_choice("mover", self.mover, get_args(MoverKind))
        if self.mover == "cuda" and self.faults is not None:
            raise ConfigError("faults are made by a mover of host memory; leave out --mover cuda")
        _check_choice("verify", self.verify, ("all", "sample", "off"))
        _check_count("max-step-tokens", self.max_step_tokens)
        _check_count("max-requests", self.max_requests)
        _check_choice("model", self.model, MODELS)
        if self.num_layers is not None:
            _check_count("layers", self.num_layers, at_most=10_000)
        if self.bytes_per_token is not None:
            _check_count("bytes-per-token", self.bytes_per_token)
        if self.faults is not None:
            _check_count("faults", self.faults, at_least=0)
        _check_count("world-size", self.world_size, at_most=_MAX_WORLD_SIZE)
        _check_count("blocks-per-slot", self.blocks_per_slot, at_most=_MAX_BLOCKS_PER_SLOT)
        _check_count("lookahead-tokens", self.lookahead_tokens, at_least=0, at_most=1 << 20)
        for step in self.sleep_at:
            _check_count("sleep-at", step, at_least=0)
        for name, value in (
            ("step-ms", self.step_ms),
            ("prefill-token-ms", self.prefill_token_ms),
            ("decode-request-ms", self.decode_request_ms),
        ):
            if not 0 <= value <= _MAX_STEP_MS:
                raise ConfigError(f"{name} is {value}; it must be 0 to {_MAX_STEP_MS:.0f} ms")
        if self.bandwidth_bytes_per_s is not None and not self.bandwidth_bytes_per_s >= 1:
            raise ConfigError(
                f"bandwidth is {self.bandwidth_bytes_per_s}; it must be at least 1 byte/s"
            )

    def build_model(self, block_size: int) -> ReplayModel:
        """The model, with a trace's block size."""
        return build_model(
            self.model,
            block_size,
            num_layers=self.num_layers,
            bytes_per_token=self.bytes_per_token,
        )

    def check_memory(self, model: ReplayModel) -> None:
        """Raise `ConfigError` where both pools cannot be in memory."""
        slot_bytes = slot_stride_bytes(model.slot_bytes, self.blocks_per_slot)
        slot_bytes *= self.blocks_per_slot * self.world_size
        page_bytes = model.page_bytes * self.world_size
        needed_bytes = self.device_blocks * (page_bytes + _ACCOUNTING_BYTES)
        needed_bytes += self.host_blocks * (slot_bytes + _ACCOUNTING_BYTES)
        if needed_bytes > (memory_bytes := _memory_bytes()):
            raise ConfigError(
                f"{self.device_blocks} device and {self.host_blocks * self.blocks_per_slot} host "
                f"blocks of {model.slot_bytes * self.world_size} bytes need "
                f"{needed_bytes / 2**30:.1f} GiB; this machine "
                f"has {memory_bytes / 2**30:.1f} GiB. Take fewer blocks or fewer bytes-per-token"
            )

    def bytes_per_s(self, model: ReplayModel) -> float:
        """Of the link, in each direction."""
        if self.bandwidth_bytes_per_s is None:
            return link_bytes_per_s(model.bytes_per_token)
        return self.bandwidth_bytes_per_s


def _check_count(name: str, value: int, *, at_least: int = 1, at_most: int = _MAX_COUNT) -> None:
    if not at_least <= value <= at_most:
        raise ConfigError(f"{name} is {value}; it must be {at_least} to {at_most}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def _memory_bytes() -> int:
    """What this machine has, or its container may use."""
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _CONTAINER_LIMITS:
        with suppress(OSError, ValueError):
            num_bytes = min(num_bytes, int(limit.read_text()))
    return num_bytes
