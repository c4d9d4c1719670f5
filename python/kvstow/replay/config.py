"""The options of a replay, each defined once: its default, bounds, help text and command-line form.

`kvstow replay` makes its options from the fields of `ReplayConfig`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, get_args

from kvstow._core import ConfigError
from kvstow.engine import Policy
from kvstow.memory import free_memory
from kvstow.replay.device import MoverKind
from kvstow.replay.model import (
    REFERENCE_BYTES_PER_TOKEN,
    ReplayModel,
    build_model,
    check_model,
)
from kvstow.sizes import parse_bytes
from kvstow.tiers import SlotFile
from kvstow.transfer.arena import slot_stride_bytes

Verify = Literal["all", "sample", "off"]
_T = TypeVar("_T")

_LINK_BYTES_PER_S = 50e9  # PCIe 5 x16
# What the accounting keeps per block, at most.
_ACCOUNTING_BYTES = 200
_MAX_STEP_MS = 1_000_000


def link_bytes_per_s(
    bytes_per_token: int, real_bytes_per_token: int = REFERENCE_BYTES_PER_TOKEN
) -> float:
    """Return the default bandwidth.

    The replay's tokens are far smaller than a model's. The link is slowed in proportion, so that a
    block takes the time that a block of the model takes over PCIe 5.
    """
    return _LINK_BYTES_PER_S * bytes_per_token / real_bytes_per_token


@dataclass(frozen=True, slots=True)
class Option:
    """An option of `kvstow replay`.

    Attributes:
        default: used if the user does not give the option.
        text: the help text.
        parse: turns what the user types into the value.
        name: without the leading dashes; derived from the name of the field unless given.
        choices: the valid values; empty for a number or a path.
        of_choice: what to know about the choices, for the error message.
        at_least: the least valid number, or number in a list.
        at_most: the largest one.
        unit: of the number, for the error message.
        way_out: what to pass instead of a number that is too small, for the error message.
        metavar: stands for the value in the help.
    """

    default: object
    text: str
    parse: Callable[[str], Any]
    name: str = ""
    choices: tuple[str, ...] = ()
    of_choice: str = ""
    at_least: float = 1
    at_most: float = 2**31 - 1
    unit: str = ""
    way_out: str = ""
    metavar: str | None = None

    def check(self, value: object) -> None:
        """Raise `ConfigError` unless the value is valid."""
        name = f"--{self.name}"
        if self.choices and value not in self.choices:
            raise ConfigError(
                f"{name} is {value!r}; it must be one of {', '.join(self.choices)}{self.of_choice}"
            )
        for number in value if isinstance(value, tuple | list) else (value,):
            if number is None or isinstance(number, str):
                continue
            if not self.at_least <= number <= self.at_most:
                bounds = f"{self.at_least} to {self.at_most}{self.unit}"
                way_out = self.way_out if number < self.at_least else ""
                raise ConfigError(f"{name} is {number}; it must be {bounds}{way_out}")


def _option(
    default: _T, text: str, parse: Callable[[str], Any] | None = None, **properties: Any
) -> _T:
    """Return a field with this default; the type of the default parses what the user types."""
    option = Option(default, text, parse or type(default), **properties)
    made: Any = field(default=default, metadata={"option": option})
    return made  # type: ignore[no-any-return]


def _milliseconds(default: float, text: str) -> float:
    return _option(default, text, at_least=0, at_most=_MAX_STEP_MS, unit=" ms")


def _blocks(name: str) -> Callable[[str], int]:
    def parse(given: str) -> int:
        try:
            return int(given)
        except ValueError:
            if "," in given:
                raise ConfigError(
                    f"{name} is {given!r}; a replay has one size, so run it once for each"
                ) from None
            raise ConfigError(
                f"{name} is {given!r}; pass a whole number of blocks, such as 4096 (the JSON of "
                "`kvstow plan` has the bytes of a model's block as model.host_block_bytes and "
                "model.device_block_bytes_per_rank)"
            ) from None

    return parse


def _bandwidth(given: str) -> float:
    """Return the bytes per second of `50GB/s`, `5e9` or `inf`."""
    try:
        return float(given)
    except ValueError:
        return parse_bytes(given.removesuffix("/s"), name="--bandwidth")


def _size(given: str) -> int:
    return parse_bytes(given, name="--bytes-per-token")


def _steps(given: str) -> tuple[int, ...]:
    try:
        return tuple(int(step) for step in given.split(",") if given)
    except ValueError:
        raise ConfigError(
            f"--sleep-at is {given!r}; pass numbers of steps separated by commas, such as 10,20"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """How to replay a trace: the options that `kvstow replay --help` describes.

    Raises:
        ConfigError: an option is out of its bounds. The message names option, value and bounds.
    """

    device_blocks: int = _option(
        1024,
        "Number of blocks in the device pool, the null block included.",
        _blocks("--device-blocks"),
        metavar="N",
        at_least=2,
    )
    host_blocks: int = _option(
        8192,
        "Number of slots in the host tier. A slot holds a block of one group, or as many as "
        "--blocks-per-slot says.",
        _blocks("--host-blocks"),
        metavar="N",
        way_out=": pass 1 for as good as none",
    )
    policy: Policy = _option(
        "lru",
        "Which slot the host tier evicts first: lru, the least recently used one; hit-density, the "
        "one with the fewest expected hits per unit of time, learned from earlier hits and "
        "evictions.",
        choices=get_args(Policy),
        of_choice="; a replay has one policy, so run it once for each",
    )
    mode: Literal["eager", "lazy"] = _option(
        "eager",
        "When a block is stored: eager, as soon as it is computed; lazy, shortly before the device "
        "evicts it.",
        choices=("eager", "lazy"),
    )
    mover: MoverKind = _option(
        "auto",
        "Where the device blocks lie: cuda, on a GPU; host, in the memory of this machine; auto, "
        "on a GPU if there is one and --faults is not given.",
        choices=get_args(MoverKind),
    )
    verify: Verify = _option(
        "all",
        "Which blocks to compare with the bytes that they must hold: all, a sample of 1 in 16, or "
        "none.",
        choices=get_args(Verify),
    )
    step_ms: float = _milliseconds(5.0, "Virtual milliseconds that each step takes.")
    prefill_token_ms: float = _milliseconds(
        0.1, "Virtual milliseconds added to a step for each token of a prefill."
    )
    decode_request_ms: float = _milliseconds(
        0.05, "Virtual milliseconds added to a step for each request that decodes."
    )
    max_step_tokens: int = _option(8192, "Maximum number of tokens that a step computes.")
    max_requests: int = _option(256, "Maximum number of requests that run or load at a time.")
    bandwidth_bytes_per_s: float | None = _option(
        None,
        "Speed of each direction of the link for the small tokens of the replay, such as 3MB/s, "
        "3e6 or inf. [default: 50 GB/s (PCIe 5), divided by how much smaller a token is here than "
        "the 128 KiB of Llama-3.1-8B, or in the model of --model: 3.05 MB/s for 8 bytes]",
        _bandwidth,
        name="bandwidth",
        at_most=float("inf"),
        unit=" bytes/s",
        metavar="BYTES/S",
    )
    model: str = _option(
        "full",
        "Layers to replay: full, for every model with full attention only, because sizes are in "
        "blocks; one of the hybrids gemma-3, gpt-oss and jamba; or a model as for kvstow plan.",
        metavar="MODEL",
    )
    num_layers: int | None = _option(
        None, "Number of layers, for --model full. [default: 2]", int, name="layers", at_most=10_000
    )
    bytes_per_token: int | None = _option(
        None,
        "Bytes of KV per token in all layers, for --model full. [default: 8]",
        _size,
        metavar="BYTES",
    )
    faults: int | None = _option(
        None,
        "Delay some copies, let some fail, and let some loads miss a deadline of 5 virtual "
        "seconds. Those land after their requests have given them up. The same seed gives the same "
        "faults.",
        int,
        at_least=0,
        metavar="SEED",
    )
    world_size: int = _option(
        1,
        "Number of ranks. Each holds a shard of every block, on the device and on the host.",
        at_most=64,  # each has two threads per group
    )
    disk: str | None = _option(
        None,
        "Keep a disk tier below the host in the file PATH. A second replay finds what the first "
        "one left. With several ranks, the files are PATH.0, PATH.1 and so on.",
        str,
        metavar="PATH",
    )
    disk_blocks: int | None = _option(
        None,
        "Number of slots in the disk tier, as large as those of the host. Needs --disk.",
        _blocks("--disk-blocks"),
        metavar="N",
    )
    disk_admit: Literal["all", "returned"] = _option(
        "all",
        "Which blocks the disk tier takes: all, every stored one; returned, those that were hit or "
        "that came back after the host had evicted them.",
        choices=("all", "returned"),
    )
    shared: str | None = _option(
        None,
        "Share blocks below the host through the store URL, such as redis://HOST:PORT. A second "
        "replay finds there what the first one stored. With --disk, the store has what the disk "
        "lacks.",
        str,
        metavar="URL",
    )
    blocks_per_slot: int = _option(
        1,
        "Number of consecutive blocks that a host slot holds. More than 1 needs --mode eager and "
        "--model full.",
        at_most=1024,
    )
    events_path: str | None = _option(
        None,
        "Append the events of blocks and transfers to FILE, as JSON lines with virtual times.",
        str,
        name="events",
        metavar="FILE",
    )
    lookahead_tokens: int = _option(
        0,
        "Number of slots for draft tokens that each step grants to each request.",
        at_least=0,
        at_most=1 << 20,
    )
    sleep_at: tuple[int, ...] = _option(
        (),
        "Put the engine to sleep after each of these numbers of steps, overwrite its device "
        "memory, and wake it with its blocks under other ids.",
        _steps,
        at_least=0,
        metavar="STEP[,STEP...]",
    )

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return the options by the name of their field, in the order of the help."""
        return {
            own.name: replace(option, name=option.name or own.name.replace("_", "-"))
            for own in fields(cls)
            for option in [own.metadata["option"]]
        }

    def __post_init__(self) -> None:
        for name, option in self.options().items():
            option.check(getattr(self, name))
        check_model(self.model)
        if (self.disk is None) != (self.disk_blocks is None):
            raise ConfigError(
                f"--disk is {self.disk} and --disk-blocks {self.disk_blocks}; a disk tier needs "
                "both, so pass --disk PATH and --disk-blocks N, or neither"
            )
        if self.disk is None and self.disk_admit != "all":
            raise ConfigError(
                f"--disk-admit is {self.disk_admit}, and there is no disk tier: pass --disk PATH "
                "and --disk-blocks N too, or leave it out"
            )
        if self.mover == "cuda" and self.faults is not None:
            raise ConfigError("--faults needs a mover of host memory: leave out --mover cuda")

    def build_model(self, block_size: int) -> ReplayModel:
        """Return the model, with a trace's block size."""
        return build_model(
            self.model,
            block_size,
            num_layers=self.num_layers,
            bytes_per_token=self.bytes_per_token,
        )

    def check_memory(self, model: ReplayModel) -> None:
        """Raise `ConfigError` unless both pools fit into the free memory."""
        slot_bytes = self.slot_bytes(model) * self.world_size
        page_bytes = model.page_bytes * self.world_size
        needed_bytes = self.device_blocks * (page_bytes + _ACCOUNTING_BYTES)
        needed_bytes += self.host_blocks * (slot_bytes + _ACCOUNTING_BYTES)
        free_bytes = free_memory()
        if free_bytes is not None and needed_bytes > free_bytes:
            raise ConfigError(
                f"{self.device_blocks} device and {self.host_blocks * self.blocks_per_slot} host "
                f"blocks of {model.slot_bytes * self.world_size} bytes need "
                f"{needed_bytes / 2**30:.1f} GiB, and {free_bytes / 2**30:.1f} GiB of memory are "
                "free: lower --device-blocks, --host-blocks or --bytes-per-token"
            )

    def slot_bytes(self, model: ReplayModel) -> int:
        """Return the bytes of a host slot of one rank, padding included."""
        stride_bytes = slot_stride_bytes(model.slot_bytes, self.blocks_per_slot)
        return stride_bytes * self.blocks_per_slot

    @property
    def below(self) -> Literal["disk", "shared", "disk and shared"] | None:
        """Which tiers lie below the host."""
        if self.shared is None:
            return None if self.disk is None else "disk"
        return "shared" if self.disk is None else "disk and shared"

    def disk_files(self, model: ReplayModel) -> list[SlotFile] | None:
        """Return the files of the disk tier, one for each rank."""
        if self.disk is None or self.disk_blocks is None:
            return None
        max_bytes = SlotFile.bytes_for(self.disk_blocks, self.slot_bytes(model))
        if self.world_size == 1:
            return [SlotFile(self.disk, max_bytes)]
        return [SlotFile(f"{self.disk}.{rank}", max_bytes) for rank in range(self.world_size)]

    def bytes_per_s(self, model: ReplayModel) -> float:
        """Return the bandwidth of each direction of the link."""
        if self.bandwidth_bytes_per_s is None:
            return link_bytes_per_s(model.bytes_per_token, model.real_bytes_per_token)
        return self.bandwidth_bytes_per_s
