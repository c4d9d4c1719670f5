"""The options of `kv_connector_extra_config`."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from kvstow import ConfigError
from kvstow.sizes import parse_bytes
from kvstow.transfer.layout import MAX_BLOCKS

DEFAULT_BYTES = 8 << 30
WHERE = "kv_connector_extra_config"


@dataclass(frozen=True)
class Options:
    """What a user may set; names are vLLM's own where vLLM has the option.

    Attributes:
        cpu_bytes_to_use: host memory of the whole server, shared out among its ranks; a number of
            bytes, or a text such as "32GiB".
        cpu_bytes_to_use_per_rank: host memory of one rank.
        num_cpu_blocks: host blocks of one rank, instead of bytes.
        lazy_offload: store blocks when they near eviction, not as soon as they are computed.
        eviction_policy: which blocks the host gives up first.
        load_timeout_s: a load that takes longer fails, and its request is recomputed.
        verify: "checksum" checks every block that is loaded against what was stored.
        events_path: a file that gets a line for each transfer begun, committed and ended.
        preserve_on_sleep: keep the tier when vLLM resets its caches, as it does when it sleeps.
        weights_version_path: a file that says which weights are served; read at each reset, and
            the tier is emptied if it says something else than before.
    """

    cpu_bytes_to_use: int | None = None
    cpu_bytes_to_use_per_rank: int | None = None
    num_cpu_blocks: int | None = None
    lazy_offload: bool = False
    eviction_policy: str = "lru"
    load_timeout_s: float = 60.0
    verify: Literal["off", "checksum"] = "off"
    events_path: str | None = None
    preserve_on_sleep: bool = False
    weights_version_path: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> Options:
        """Read what the user wrote.

        Raises:
            ConfigError: an option that does not exist, naming the nearest that does; a value of
                the wrong kind or out of bounds; sizes that say the same thing twice.
        """
        given = dict(given or {})
        known = [option.name for option in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                raise ConfigError(f"{WHERE} has no option {name!r}; {hint}")
        values = {name: _READERS[name](name, value) for name, value in given.items()}
        sizes = [name for name in known[:3] if values.get(name) is not None]
        if len(sizes) > 1:
            raise ConfigError(
                f"{WHERE} gives {' and '.join(sizes)}, which all say how large the host tier is; "
                "keep one"
            )
        options = cls(**values)
        if options.weights_version_path is not None and not options.preserve_on_sleep:
            raise ConfigError(
                f"{WHERE}.weights_version_path says when a tier that outlives resets is to be "
                "emptied, and without preserve_on_sleep every reset empties it; give "
                "preserve_on_sleep: true as well, or leave both out"
            )
        return options

    def num_host_blocks(self, slot_stride_bytes: int, world_size: int) -> int:
        """How many slots of that many bytes one of `world_size` ranks has.

        A rank without layers stores nothing, so it sets no bound: its slots take 0 bytes.

        Raises:
            ConfigError: the budget does not hold a single block.
        """
        if self.num_cpu_blocks is not None:
            return self.num_cpu_blocks
        if slot_stride_bytes == 0:
            return MAX_BLOCKS - 1
        name, num_bytes = "cpu_bytes_to_use_per_rank", self.cpu_bytes_to_use_per_rank
        if num_bytes is None:
            total = DEFAULT_BYTES if self.cpu_bytes_to_use is None else self.cpu_bytes_to_use
            name, num_bytes = "cpu_bytes_to_use", total // world_size
        if num_bytes < slot_stride_bytes:
            raise ConfigError(
                f"{WHERE}.{name} leaves {num_bytes} bytes for each rank, and one block of this "
                f"model takes {slot_stride_bytes}; raise {name} to at least "
                f"{slot_stride_bytes * (world_size if name == 'cpu_bytes_to_use' else 1)}"
            )
        return num_bytes // slot_stride_bytes


def _size(name: str, value: object) -> int:
    return parse_bytes(value, name=f"{WHERE}.{name}")


def _count(name: str, value: object) -> int:
    try:
        is_whole = isinstance(value, float) and value.is_integer()
        whole: Any = int(value) if is_whole else value  # type: ignore[call-overload]
        number = 0 if isinstance(value, bool) else operator.index(whole)
    except TypeError:
        number = 0
    if number < 1:
        raise ConfigError(f"{WHERE}.{name} is {value!r}; give a whole number of 1 or more")
    return number


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{WHERE}.{name} is {value!r}; give true or false")
    return value


def _seconds(name: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:  # type: ignore[operator]
        raise ConfigError(f"{WHERE}.{name} is {value!r}; give seconds above 0")
    return float(value)  # type: ignore[arg-type]


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{WHERE}.{name} is {value!r}; give a text")
    return value


def _one_of(*choices: str) -> Callable[[str, object], str]:
    def read(name: str, value: object) -> str:
        if value not in choices:
            raise ConfigError(f"{WHERE}.{name} is {value!r}; give one of {', '.join(choices)}")
        return str(value)

    return read


_READERS: dict[str, Callable[[str, object], Any]] = {
    "cpu_bytes_to_use": _size,
    "cpu_bytes_to_use_per_rank": _size,
    "num_cpu_blocks": _count,
    "lazy_offload": _flag,
    "eviction_policy": _one_of("lru", "hit-density"),
    "load_timeout_s": _seconds,
    "verify": _one_of("off", "checksum"),
    "events_path": _text,
    "preserve_on_sleep": _flag,
    "weights_version_path": _text,
}
