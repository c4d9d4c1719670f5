"""The options of a replay, checked before anything is built."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvstow._core import ConfigError
from kvstow.replay.content import Geometry
from kvstow.transfer.arena import SLOT_ALIGNMENT_BYTES

__all__ = ["ReplayConfig", "Verify", "link_bytes_per_s"]

Verify = Literal["all", "sample", "off"]

# A PCIe 5 x16 link, and 128 KiB a token: a model of the 8B class in 16 bits.
_LINK_BYTES_PER_S = 50e9
_MODEL_BYTES_PER_TOKEN = 131_072
# What the accounting keeps per block, at most.
_ACCOUNTING_BYTES = 100
# Where a container says how much memory it may use; a limit of none is a word or a huge number.
_CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_MAX_COUNT = 2**31 - 1
_MAX_STEP_MS = 1e6


def link_bytes_per_s(bytes_per_token: int) -> float:
    """The default bandwidth: such that a load takes as many steps as it does in life.

    The replay's tokens are far smaller than a model's. With the link slowed in proportion, a block
    takes the time over it that a block of an 8B-class model takes over PCIe 5.
    """
    return _LINK_BYTES_PER_S * bytes_per_token / _MODEL_BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """How to replay a trace.

    Attributes:
        device_blocks: blocks of the device pool, the null block included.
        host_blocks: slots of the host tier.
        policy: which slots the host tier gives up first.
        mode: when blocks are stored.
        mover: what copies the bytes; "auto" takes the best there is.
        verify: "all" blocks, a "sample" (1 in 16, by digest), or "off".
        step_ms: virtual time of a step, before what is computed in it.
        prefill_token_ms: and for each token of a prefill.
        decode_request_ms: and for each request that decodes.
        max_step_tokens: tokens computed in a step, at most.
        max_requests: requests that run or load at a time, at most.
        bandwidth_bytes_per_s: of each direction of the link, infinity included; None stands for
            `link_bytes_per_s(bytes_per_token)`.
        num_layers: layers whose K and V a block holds.
        bytes_per_token: of KV, all layers.

    Raises:
        ConfigError: naming the option, its value and its bounds.
    """

    device_blocks: int
    host_blocks: int
    policy: Literal["lru"] = "lru"
    mode: Literal["eager"] = "eager"
    mover: Literal["auto", "host"] = "auto"
    verify: Verify = "all"
    step_ms: float = 5.0
    prefill_token_ms: float = 0.1
    decode_request_ms: float = 0.05
    max_step_tokens: int = 8192
    max_requests: int = 256
    bandwidth_bytes_per_s: float | None = None
    num_layers: int = 2
    bytes_per_token: int = 8

    def __post_init__(self) -> None:
        _check_count("device-blocks", self.device_blocks, at_least=2)
        _check_count("host-blocks", self.host_blocks)
        _check_choice("policy", self.policy, ("lru",))
        _check_choice("mode", self.mode, ("eager",))
        _check_choice("mover", self.mover, ("auto", "host"))
        _check_choice("verify", self.verify, ("all", "sample", "off"))
        _check_count("max-step-tokens", self.max_step_tokens)
        _check_count("max-requests", self.max_requests)
        _check_count("layers", self.num_layers, at_most=10_000)
        _check_count("bytes-per-token", self.bytes_per_token)
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

    def geometry(self, block_size: int) -> Geometry:
        """The geometry of a trace's blocks; `ConfigError` where both pools cannot be in memory."""
        geometry = Geometry(block_size, self.num_layers, self.bytes_per_token)
        slot_bytes = -(-geometry.block_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        needed_bytes = self.device_blocks * (geometry.block_bytes + _ACCOUNTING_BYTES)
        needed_bytes += self.host_blocks * (slot_bytes + _ACCOUNTING_BYTES)
        if needed_bytes > (memory_bytes := _memory_bytes()):
            raise ConfigError(
                f"{self.device_blocks} device and {self.host_blocks} host blocks of "
                f"{geometry.block_bytes} bytes need {needed_bytes / 2**30:.1f} GiB; this machine "
                f"has {memory_bytes / 2**30:.1f} GiB. Take fewer blocks or fewer bytes-per-token"
            )
        return geometry

    @property
    def link_bytes_per_s(self) -> float:
        """Bytes a second, in each direction."""
        if self.bandwidth_bytes_per_s is None:
            return link_bytes_per_s(self.bytes_per_token)
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
