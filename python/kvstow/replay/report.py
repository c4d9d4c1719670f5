"""Report the figures of a replay: as JSON for programs, as a table for people."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvstow.replay.state import ReplayState

if TYPE_CHECKING:
    from rich.table import Table

# The tiers below the host, as the JSON form names them.
_KEYS = {"disk": "disk", "shared": "shared", "disk and shared": "disk_and_shared"}
# Counters that the JSON form gives in other terms.
_GROUPED = {"device_hits", "host_hits", "disk_hits", "resumed_hits", "published", "accounting_us"}


def figures_json(replay: ReplayState, *, interrupted: bool = False) -> dict[str, object]:
    """Return the figures so far, ready for `json.dumps`."""
    figures, verifier, stats = replay.figures, replay.verifier, replay.kv.stats()
    p50_us, p99_us = _percentiles(figures.accounting_us)
    bytes_per_s = replay.links.bytes_per_s
    in_force = {
        "model": replay.model.name,
        # JSON has no infinity.
        "bandwidth_bytes_per_s": bytes_per_s if math.isfinite(bytes_per_s) else None,
        "num_layers": replay.model.num_layers,
        "bytes_per_token": replay.model.bytes_per_token,
    }
    counters = {name: count for name, count in asdict(figures).items() if name not in _GROUPED}
    return counters | {
        "trace": replay.trace.path,
        **replay.trace.as_json(),
        "model": replay.model.name,
        "options": asdict(replay.config) | in_force,
        "interrupted": interrupted,
        "requests": len(replay.trace.requests),
        "prompt_tokens": sum(request.prompt_tokens for request in replay.trace.requests),
        "blocks": replay.trace.num_blocks,
        "asked_blocks": _num_asked(replay),
        "hit_blocks": {
            "device": figures.device_hits,
            "host": figures.host_hits - figures.disk_hits,
            "resumed": figures.resumed_hits,
            **_below_hits(replay),
        },
        **_below_figures(replay),
        "evicted_blocks": {
            "device": figures.published - replay.kv.ledger.pool.num_cached,
            "host": stats["evicted_blocks"],
        },
        "dropped_blocks": stats["dropped_blocks"],
        "verified_blocks": verifier.num_verified,
        "corrupt_blocks": verifier.num_corrupt,
        "corruptions": [asdict(corruption) for corruption in verifier.reports],
        "accounting_us_per_step": {"p50": p50_us, "p99": p99_us},
    }


def figures_table(replay: ReplayState, title: str, *, interrupted: bool = False) -> "Table":
    """Return the figures so far as a table for a terminal."""
    # Imported here because only the command needs rich.
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    title = f"{title}{' (interrupted)' if interrupted else ''}"
    table = Table("", "", "", title=title, box=SIMPLE_HEAD, show_header=False, title_justify="left")
    table.columns[1].justify = "right"
    for section in figures_rows(replay):
        for cells in section:
            table.add_row(*cells)
        table.add_section()
    return table


_Rows: TypeAlias = Iterator[tuple[str, str, str]]
"""The name, number and explanation of each row."""


def figures_rows(replay: ReplayState) -> Iterator[_Rows]:
    """Yield the rows of the table, section by section."""
    for rows in _run_rows, _hit_rows, _movement_rows, _check_rows:
        yield rows(replay)


def _run_rows(replay: ReplayState) -> _Rows:
    figures = replay.figures
    groups = Counter(map(str, replay.model.groups)).items()
    kinds = [kind if number == 1 else f"{number} x {kind}" for kind, number in groups]
    yield "model", replay.model.name, ", ".join(kinds)
    requests = replay.trace.requests
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    of_all = f"of {len(requests):,} finished, which arrive within {span_s:,.0f} s"
    yield "requests", f"{figures.finished_requests:,}", of_all
    yield "steps", f"{figures.steps:,}", f"{figures.virtual_seconds:,.0f} s of virtual time"
    yield "preemptions", f"{figures.preemptions:,}", f"{figures.resumed_hits:,} blocks hit again"
    given = replay.config.bandwidth_bytes_per_s
    if given is not None and math.isfinite(given):
        like = ""
        if len(replay.model.groups) == 1:
            # The tokens of a replay are small. So the speed of a real link is far too fast here.
            model = replay.model
            gb_per_s = given * model.real_bytes_per_token / model.bytes_per_token / 1e9
            like = f", {gb_per_s:,.{0 if gb_per_s >= 1 else 4}f} GB/s in {model.stands_for}"
        yield "link", f"{given:,.0f}", f"bytes/s each way{like}"


def _hit_rows(replay: ReplayState) -> _Rows:
    figures, num_asked = replay.figures, _num_asked(replay)

    def share(blocks: int) -> str:
        return f"{blocks / max(num_asked, 1):.1%} of the blocks asked for"

    like = ""
    if (num_bytes := reference_bytes(replay, 1)) is not None:
        like = f": {num_bytes / 2**20:,g} MiB each in {replay.model.stands_for}"
    yield "blocks asked for", f"{num_asked:,}", f"of {replay.trace.block_size} tokens{like}"
    if num_left := replay.trace.num_blocks - num_asked:
        yield "not yet asked for", f"{num_left:,}", "blocks of requests that were not admitted"
    yield "hit on the device", f"{figures.device_hits:,}", share(figures.device_hits)
    num_host = figures.host_hits - figures.disk_hits
    yield "hit on the host", f"{num_host:,}", share(num_host)
    if (below := replay.config.below) is not None:
        names = {"disk": "hit on the disk", "shared": "hit in the store"}
        name = names.get(below, "hit on disk or store")
        yield name, f"{figures.disk_hits:,}", share(figures.disk_hits)
    yield "recomputed", f"{figures.recomputed_blocks:,}", share(figures.recomputed_blocks)


def _movement_rows(replay: ReplayState) -> _Rows:
    figures, config, stats = replay.figures, replay.config, replay.kv.stats()
    num_evicted = figures.published - replay.kv.ledger.pool.num_cached

    def size(blocks: int) -> str:
        num_bytes = reference_bytes(replay, blocks)
        return "" if num_bytes is None else f"{num_bytes / 2**30:,.1f} GiB"

    def moved(blocks: int, num_bytes: int) -> str:
        like = f", {size(blocks)} in {replay.model.stands_for}" if size(blocks) else ""
        return f"{num_bytes / 2**20:,.1f} MiB here{like}"

    def pool(number: int, unit: str, blocks: int) -> str:
        like = f" ({size(blocks)})" if size(blocks) else ""
        return f"from {number:,} {unit}{like}"

    yield (
        "blocks stored",
        f"{figures.stored_blocks:,}",
        moved(figures.stored_blocks, figures.bytes_stored),
    )
    yield (
        "blocks loaded",
        f"{figures.loaded_blocks:,}",
        moved(figures.loaded_blocks, figures.bytes_loaded),
    )
    device = pool(config.device_blocks, "blocks", config.device_blocks)
    yield "evicted, device", f"{num_evicted:,}", device
    unit = "blocks" if config.blocks_per_slot == 1 else "slots"
    host = pool(config.host_blocks, unit, config.host_blocks * config.blocks_per_slot)
    yield "evicted, host", f"{stats['evicted_blocks']:,}", f"{host}, {config.policy}"
    if config.below is not None:
        yield from _below_rows(replay)
    if stats["dropped_blocks"]:
        yield "not stored", f"{stats['dropped_blocks']:,}", "blocks: the host tier had no room"
    if figures.failed_stores or figures.failed_loads:
        failed = f"{figures.failed_stores:,} / {figures.failed_loads:,}"
        yield "failed", failed, "store / load jobs"
    if figures.late_loads:
        yield "late loads", f"{figures.late_loads:,}", "of these missed their deadline"
    if config.world_size > 1:
        yield "ranks", f"{config.world_size}", "each with a shard of every block"
    if config.blocks_per_slot > 1:
        yield "blocks per slot", f"{config.blocks_per_slot}", "consecutive blocks of a prompt"
    if stats["lost_events"]:
        yield "events lost", f"{stats['lost_events']:,}", f"{config.events_path} cannot be written"
    if config.sleep_at:
        woke = f"{figures.moved_blocks:,} blocks woke under other ids"
        if figures.sleeps < len(config.sleep_at):
            woke = f"of {len(config.sleep_at)}: the replay ends after {figures.steps:,} steps"
        yield "sleeps", f"{figures.sleeps}", woke
    if config.faults is not None:
        yield "faults", f"{config.faults}", "seed of the late, failing and lost copies"


def _below_rows(replay: ReplayState) -> _Rows:
    config, figures = replay.config, _below_figures(replay)
    if replay.num_warm:
        yield "warm on the disk", f"{replay.num_warm:,}", "slots at the start, of an earlier replay"
    for name, moved in ("demoted", "written"), ("promoted", "read"):
        num_bytes = figures[f"bytes_{name}"] / 2**20
        yield (
            f"slots {name}",
            f"{figures[f'{name}_blocks']:,}",
            f"{num_bytes:,.1f} MiB {moved} here",
        )
    if config.disk_blocks is not None:
        number = f"{figures['disk_evicted_blocks']:,}"
        of = f"from {config.disk_blocks:,} slots, admits {config.disk_admit}"
        yield "evicted, disk", number, of
    if config.shared is not None:
        asked = f"of {figures['shared_asked_blocks']:,} slots asked for"
        yield "found in the store", f"{figures['shared_found_blocks']:,}", asked
    if "shared_got_blocks" in figures:
        yield "read from the store", f"{figures['shared_got_blocks']:,}", "slots, on all ranks"
    if config.below and (num_failed := figures[f"failed_{_KEYS[config.below]}_blocks"]):
        yield f"failed, {config.below}", f"{num_failed:,}", "slots, which count as misses"


def _below_hits(replay: ReplayState) -> dict[str, int]:
    """Return the hits of the tier below the host, by its name."""
    below = replay.config.below
    return {} if below is None else {_KEYS[below]: replay.figures.disk_hits}


def _below_figures(replay: ReplayState) -> dict[str, float]:
    """Return what the tier below the host did; nothing without one."""
    below = replay.config.below
    if below is None:
        return {}
    stats = replay.kv.stats()
    own = [] if replay.config.disk is None else ["disk_evicted_blocks"]
    own += [] if replay.config.shared is None else ["shared_asked_blocks", "shared_found_blocks"]
    own += ["shared_got_blocks"] if below == "disk and shared" else []
    tier = "shared_" if below == "shared" else ""
    num_failed = stats[f"{tier}failed_demotes"] + stats[f"{tier}failed_promotes"]
    warm = {} if replay.config.disk is None else {"disk_warm_blocks": replay.num_warm}
    return {
        **warm,
        "demoted_blocks": stats[f"{tier}demoted_blocks"],
        "promoted_blocks": stats[f"{tier}promoted_blocks"],
        "bytes_demoted": stats[f"{tier}demoted_bytes"],
        "bytes_promoted": stats[f"{tier}promoted_bytes"],
        **{name: stats[name] for name in own},
        f"failed_{_KEYS[below]}_blocks": num_failed,
    }


def _check_rows(replay: ReplayState) -> _Rows:
    verifier = replay.verifier
    p50_us, p99_us = _percentiles(replay.figures.accounting_us)
    how = f"blocks, byte for byte ({replay.config.verify})"
    yield "verified", f"{verifier.num_verified:,}", how
    yield "corrupt", f"{verifier.num_corrupt:,}", "blocks"
    yield "accounting", f"{p50_us:,.0f} us", f"a step at the median, {p99_us:,.0f} us at p99"
    yield "wall time", f"{replay.figures.seconds:,.1f} s", ""


def _num_asked(replay: ReplayState) -> int:
    """Return the prompt blocks of the requests admitted so far: all, unless interrupted."""
    figures = replay.figures
    return figures.device_hits + figures.host_hits + figures.recomputed_blocks


def reference_bytes(replay: ReplayState, blocks: int) -> int | None:
    """Return the bytes of these blocks in the real model; None for a hybrid model."""
    if len(replay.model.groups) > 1:
        return None
    return blocks * replay.trace.block_size * replay.model.real_bytes_per_token


def _percentiles(values_us: list[float]) -> tuple[float, float]:
    if not values_us:
        return 0.0, 0.0
    p50_us, p99_us = np.percentile(values_us, [50, 99])
    return float(p50_us), float(p99_us)
