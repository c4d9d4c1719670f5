"""The options of `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple

from kvstow import ConfigError, KvstowError
from kvstow.tiers.asking import DEFAULT_WAIT_S
from kvstow.tiers.queued import DEFAULT_QUEUED_BYTES, DEFAULT_TIMEOUT_S
from kvstow.tiers.shared import SharedStore
from kvstow.transfer.layout import MAX_BLOCKS
from kvstow.vllm.option_readers import (
    option,
    read_choice,
    read_count,
    read_flag,
    read_names,
    read_number_of,
    read_option,
    read_path,
    read_seconds,
    read_size,
    read_size_or_zero,
    read_text,
    read_trace_bytes,
    read_url,
)

DEFAULT_BYTES = 8 << 30
DEFAULT_TRACE_BYTES = 1 << 30
MAX_THRESHOLD = 255
WHERE = "kv_connector_extra_config"

_OF_BOTH = ("min_promote_tokens", "promote_timeout_s", "skip_slow_loads")
# With both tiers, one write goes to both, and the index has the slots of the disk.
_DECIDED_BY_DISK = {
    "shared_admit": "disk_admit",
    "shared_max_write_bytes_per_s": "disk_max_write_bytes_per_s",
    "shared_flush_s": "disk_flush_s",
    "shared_index_blocks": "disk_bytes_to_use",
}


class Lower(NamedTuple):
    """What both kinds of a tier below the host have: see the options of the same names."""

    admit: Literal["all", "returned"]
    max_write_bytes_per_s: int | None
    flush_s: float


def _check_below(options: Options, given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless each option of a tier below the host has its partner."""
    has = {"disk_path": options.disk_path is not None, "shared": options.shared is not None}
    if options.observe and any(has.values()):
        tiers = " and ".join(tier for tier, is_there in has.items() if is_there)
        raise ConfigError(
            f"{WHERE} has observe and {tiers}, and a server that observes keeps no tier: "
            f"remove observe, or remove {tiers}"
        )
    for name, value in given.items():
        partners = [tier for tier in has if name.startswith(f"{tier.removesuffix('_path')}_")]
        partners = [*has] if name in _OF_BOTH else partners
        if value is not None and partners and not any(has[tier] for tier in partners):
            either = " or ".join(partners)
            raise ConfigError(
                f"{WHERE}.{name} is {value!r}, and it has an effect only with {either}: add "
                f"{either}, or remove {name}"
            )
    for name, decides in _DECIDED_BY_DISK.items():
        if all(has.values()) and given.get(name) is not None:
            raise ConfigError(
                f"{WHERE}.{name} is {given[name]!r}, and with disk_path and shared {decides} "
                f"counts for both tiers: set {decides}, and remove {name}"
            )
    if has["disk_path"] and options.disk_bytes_to_use is None:
        raise ConfigError(
            f"{WHERE}.disk_path is {options.disk_path!r}, and disk_bytes_to_use is missing: add "
            'the disk space of an engine, for example disk_bytes_to_use: "500GiB"'
        )
    for tier, is_there in has.items():
        if is_there and options.preserve_on_sleep and options.weights_version_path is None:
            raise ConfigError(
                f"{WHERE} has {tier} and preserve_on_sleep without weights_version_path. vLLM does "
                "not say whether it resets its caches for other weights, and the tier outlives the "
                "server: add weights_version_path, or remove one of the two"
            )
    if options.shared is not None:
        try:
            options.store.check()
        except ConfigError as error:
            raise ConfigError(of_shared_options(error)) from error


def of_shared_options(error: KvstowError) -> str:
    """Return the message of a `SharedStore`, with the names that its options have here."""
    names = {"max_queued_bytes": "shared_queue_bytes"}
    first, _, rest = str(error).partition(" ")
    name = names.get(first, f"shared_{first}")
    is_option = name in {known.name for known in fields(Options)}
    return f"{WHERE}.{name} {rest}" if is_option else f"{WHERE}.shared: {error}"


def path_of_engine(path: str, parallel: Any) -> str:
    """Return the path of a data-parallel engine's own file: engine N above 0 adds `.engineN`.

    Args:
        path: what the user has named.
        parallel: vLLM's configuration of the engine.
    """
    engine = getattr(parallel, "data_parallel_index", 0)
    return f"{path}.engine{engine}" if engine else path


def rank_in_engine(parallel: Any) -> int:
    """Return a worker's number in its engine.

    With data parallelism vLLM may number the workers of all engines.
    """
    return int(parallel.rank % parallel.world_size)


@dataclass(frozen=True)
class Options:
    """The options that a user may set. Where vLLM has an option, its name is vLLM's.

    Attributes:
        cpu_bytes_to_use: host memory of an engine, divided equally among its ranks. The default is
            8 GiB.
        cpu_bytes_to_use_per_rank: host memory of each rank, instead of `cpu_bytes_to_use`.
        num_cpu_blocks: host blocks of each rank, instead of bytes.
        lazy_offload: store a block when vLLM is about to overwrite it, not when it is computed.
        offload_prompt_only: store only blocks of prompts, not those with generated tokens. Of a
            streaming session, only the first prompt counts.
        store_threshold: store a block once this many requests have computed, hit or loaded it and
            every block before it. At most 255.
        max_store_blocks_in_flight: the most device blocks that stores may hold. vLLM cannot use
            these blocks until they are copied. The default leaves a quarter of the device's blocks
            to vLLM.
        eviction_policy: "lru" evicts the block that was used least recently. "hit-density" evicts
            the block with the fewest expected hits per unit of time.
        load_timeout_s: seconds after which a load or store counts as failed. The request of a
            failed load recomputes.
        verify: "checksum" compares every loaded block with the checksum of its store, and
            recomputes those that differ.
        events_path: a file that gets a JSON line for each transfer that begins, commits or ends.
        preserve_on_sleep: keep the tier when vLLM resets its caches, which it also does to sleep.
        weights_version_path: a file that names the served weights. kvstow reads it at each reset,
            also of vLLM's own cache alone, and empties the tier if the content has changed. Needs
            `preserve_on_sleep`.
        accelerate: replace three functions of vLLM with faster ones that have the same results, for
            versions of vLLM that kvstow knows.
        observe: keep no tier and copy nothing, and only report the hit ratios that host tiers of
            several sizes would have. Not with `disk_path` or `shared`.
        observe_gib: a size in GiB. The ratios are those of tiers of 0.5, 1, 2, 4 and 8 times this
            size. The default is the size of the host tier.
        observe_half_life_s: seconds after which a lookup counts half in these ratios.
        record_trace: a file that gets a JSON line for each request, for `kvstow plan` and `kvstow
            replay`. It has lengths, times and salted block ids, and neither tokens nor texts.
        record_trace_bytes: at this size, 1 MiB at least, the trace moves to `record_trace` with
            `.1` added, and a new one begins.
        min_promote_tokens: a request waits for a tier below the host only if the tier adds this
            many tokens.
        promote_timeout_s: seconds after which a request goes on without what the tier still reads.
        skip_slow_loads: let no request wait for a tier below the host while its loads take longer
            than computing. One slow load in 16 takes place, because the tier may be faster again.
            Runs then depend on the clock.
        disk_path: a folder on a local disk that keeps more than host memory. A restarted server
            finds its blocks there. Needs `disk_bytes_to_use`.
        disk_bytes_to_use: disk space of an engine, reserved at the start and divided equally among
            its ranks.
        disk_admit: "all" writes every block that is stored. "returned" writes blocks that requests
            hit, or that are stored again after an eviction, and the blocks before them.
        disk_max_write_bytes_per_s: the most bytes per second that an engine writes. Blocks wait for
            their turn, and are lost if the host evicts them first. When the server ends, its
            workers write at once what this allows in `disk_flush_s`. With `shared`, it also bounds
            what the disk keeps of what the store brought. Default: no bound.
        disk_on_mismatch: what to do with files of another model, version or layout. "reset" empties
            them, and logs what differs. "refuse" ends the start with an error.
        disk_flush_s: seconds for which an idle server goes on writing blocks that are due, before
            vLLM rests or sleeps. When the server ends, its workers write for as long what only the
            host has, if vLLM lets them (`--shutdown-timeout`).
        shared: URL of a store that servers of one model share, such as "redis://HOST:PORT",
            "rediss://HOST:PORT" for TLS, or "mooncake://HOST:PORT". A URL with a password is
            refused.
        shared_password_file: a file with the store's password, which each new connection reads
            again. The default is the environment variable KVSTOW_SHARED_PASSWORD. The user is
            KVSTOW_SHARED_USERNAME in both cases.
        shared_ca_file: the only certificates that vouch for the store. The default is those of
            the system.
        shared_certificate_file: the server's own certificate, if the store asks for one.
        shared_key_file: its key.
        shared_ask_timeout_s: the most seconds that a request waits for the store to say what it
            has.
        shared_timeout_s: the most seconds for a read or a write, up to 86,400.
        shared_ttl_s: seconds after which a RESP store drops a block. Default: never.
        shared_index_blocks: blocks that each server remembers the store to have, 130 bytes each.
            The default is 8 times those of the host. With `disk_path`, it is the disk's slots.
        shared_queue_bytes: bytes of each rank that may wait for a write. More wait on the host.
        shared_admit: as `disk_admit`, which counts for both tiers if there are both.
        shared_max_write_bytes_per_s: as `disk_max_write_bytes_per_s`, which counts for both.
        shared_flush_s: as `disk_flush_s`, which counts for both. Workers write nothing to a store
            when the server ends.
        shared_host: Mooncake only: the name by which other machines reach this one.
        shared_segment_bytes: Mooncake only: memory of each rank that the store may fill.
        shared_protocol: Mooncake only: "tcp" or "rdma".
        shared_devices: Mooncake only: the RDMA devices, separated by commas.
    """

    cpu_bytes_to_use: int | None = option(None, read_size)
    cpu_bytes_to_use_per_rank: int | None = option(None, read_size)
    num_cpu_blocks: int | None = option(None, read_count(1, MAX_BLOCKS - 1))
    lazy_offload: bool = option(False, read_flag)
    offload_prompt_only: bool = option(False, read_flag)
    store_threshold: int = option(1, read_count(1, MAX_THRESHOLD))
    max_store_blocks_in_flight: int | None = option(None, read_count(1))
    eviction_policy: str = option("lru", read_choice("lru", "hit-density"))
    load_timeout_s: float = option(60.0, read_seconds)
    verify: Literal["off", "checksum"] = option("off", read_choice("off", "checksum"))
    events_path: str | None = option(None, read_path)
    preserve_on_sleep: bool = option(False, read_flag)
    weights_version_path: str | None = option(None, read_path)
    accelerate: bool = option(False, read_flag)
    observe: bool = option(False, read_flag)
    observe_gib: float | None = option(None, read_number_of("GiB"))
    observe_half_life_s: float = option(3600.0, read_seconds)
    record_trace: str | None = option(None, read_path)
    record_trace_bytes: int = option(DEFAULT_TRACE_BYTES, read_trace_bytes)
    min_promote_tokens: int = option(256, read_count(0))
    promote_timeout_s: float = option(5.0, read_seconds)
    skip_slow_loads: bool = option(False, read_flag)
    disk_path: str | None = option(None, read_path)
    disk_bytes_to_use: int | None = option(None, read_size)
    disk_admit: Literal["all", "returned"] = option("all", read_choice("all", "returned"))
    disk_max_write_bytes_per_s: int | None = option(None, read_size)
    disk_on_mismatch: Literal["refuse", "reset"] = option("reset", read_choice("refuse", "reset"))
    disk_flush_s: float = option(3.0, read_seconds)
    shared: str | None = option(None, read_url)
    shared_password_file: str | None = option(None, read_path)
    shared_ca_file: str | None = option(None, read_path)
    shared_certificate_file: str | None = option(None, read_path)
    shared_key_file: str | None = option(None, read_path)
    shared_ask_timeout_s: float = option(DEFAULT_WAIT_S, read_seconds)
    shared_timeout_s: float = option(DEFAULT_TIMEOUT_S, read_seconds)
    shared_ttl_s: int | None = option(None, read_count(1))
    shared_index_blocks: int | None = option(None, read_count(1, MAX_BLOCKS - 1))
    shared_queue_bytes: int = option(DEFAULT_QUEUED_BYTES, read_size)
    shared_admit: Literal["all", "returned"] = option("all", read_choice("all", "returned"))
    shared_max_write_bytes_per_s: int | None = option(None, read_size)
    shared_flush_s: float = option(3.0, read_seconds)
    shared_host: str = option("127.0.0.1", read_text)
    shared_segment_bytes: int = option(0, read_size_or_zero)
    shared_protocol: Literal["tcp", "rdma"] = option("tcp", read_choice("tcp", "rdma"))
    shared_devices: str = option("", read_names)

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> Options:
        """Return the options that the user wrote.

        Raises:
            ConfigError: an option that does not exist (the message names the nearest one), a value
                of the wrong kind or out of bounds, or more than one size of the tier.
        """
        given = given or {}
        values = {name: read_option(cls, WHERE, name, value) for name, value in given.items()}
        sizes = [known.name for known in fields(cls)[:3] if values.get(known.name) is not None]
        if len(sizes) > 1:
            raise ConfigError(
                f"{WHERE} has {' and '.join(sizes)}, and only one option may set the size of the "
                "host tier: keep one"
            )
        options = cls(**values)
        if options.weights_version_path is not None and not options.preserve_on_sleep:
            raise ConfigError(
                f"{WHERE}.weights_version_path is {options.weights_version_path!r}, and it has an "
                "effect only with preserve_on_sleep, because otherwise every reset empties the "
                "tier: add preserve_on_sleep: true, or remove weights_version_path"
            )
        _check_below(options, values)
        return options

    @cached_property  # each step asks
    def lower(self) -> Lower:
        """The options of the tier below the host. With both, those of the disk."""
        if self.disk_path is not None or self.shared is None:
            rate = self.disk_max_write_bytes_per_s
            return Lower(self.disk_admit, rate, self.disk_flush_s)
        rate = self.shared_max_write_bytes_per_s
        return Lower(self.shared_admit, rate, self.shared_flush_s)

    @property
    def store(self) -> SharedStore:
        """The store that `shared` names."""
        assert self.shared is not None, "only a server with a shared tier has a store"
        return SharedStore(
            self.shared,
            password_file=self.shared_password_file,
            ca_file=self.shared_ca_file,
            certificate_file=self.shared_certificate_file,
            key_file=self.shared_key_file,
            ttl_s=self.shared_ttl_s,
            timeout_s=self.shared_timeout_s,
            max_queued_bytes=self.shared_queue_bytes,
            host=self.shared_host,
            segment_bytes=self.shared_segment_bytes,
            protocol=self.shared_protocol,
            devices=self.shared_devices,
        )

    def total_bytes(self, slot_stride_bytes: int, world_size: int) -> int:
        """Return the bytes of the tier on all ranks."""
        if self.num_cpu_blocks is not None:
            return self.num_cpu_blocks * slot_stride_bytes * world_size
        if self.cpu_bytes_to_use_per_rank is not None:
            return self.cpu_bytes_to_use_per_rank * world_size
        return DEFAULT_BYTES if self.cpu_bytes_to_use is None else self.cpu_bytes_to_use

    def num_host_blocks(self, slot_stride_bytes: int, world_size: int, num_sharing: int = 1) -> int:
        """Return the number of slots of each of `world_size` ranks.

        A rank without layers stores nothing. Its slots take 0 bytes, so it sets no bound. Ranks
        that share an arena (`num_sharing`) put their memory together.

        Raises:
            ConfigError: the memory does not hold a single block.
        """
        if self.num_cpu_blocks is not None:
            return self.num_cpu_blocks
        if slot_stride_bytes == 0:
            return MAX_BLOCKS - 1
        num_bytes = self.total_bytes(slot_stride_bytes, world_size) // world_size
        if num_bytes < slot_stride_bytes:
            name, num_ranks = "cpu_bytes_to_use", world_size
            if self.cpu_bytes_to_use_per_rank is not None:
                name, num_ranks = "cpu_bytes_to_use_per_rank", 1
            raise ConfigError(
                f"{WHERE}.{name} gives each rank {num_bytes} bytes, and one block of this model "
                f"takes {slot_stride_bytes}: raise {name} to at least "
                f"{slot_stride_bytes * num_ranks}"
            )
        return num_bytes * num_sharing // slot_stride_bytes
