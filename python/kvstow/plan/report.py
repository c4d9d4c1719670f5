"""Report a plan: JSON for programs, CSV for spreadsheets, tables and a sketch for people."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstow._core import SlidingWindow, StateSpace
from kvstow.output import can_print
from kvstow.plan.advice import (
    flag,
    knee_size,
    marks,
    rounded_size,
    sentence,
    size,
)
from kvstow.plan.curves import Ints
from kvstow.plan.tiers import GIB, MIB_PER_GIB, Choice, Plan, Tiers
from kvstow.plan.traces import PlanTrace
from kvstow.texts import counted, on_one_line

_SECONDS_PER_HOUR: Final = 3600
_SKETCH_COLUMNS, _SKETCH_ROWS = 60, 8
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
_MAX_JSON_POINTS: Final = 512
_WHOLE: Final = 10  # numbers from here on are shown without decimals

DENSITY_NOTE: Final = (
    "The table has one request after the other. Where requests overlap, and most where they are "
    "preempted, hit-density mostly hits less: check a size with kvstow replay --policy hit-density."
)
LAZY_NOTE: Final = (
    "The table has one request after the other. Where requests overlap, and most where they are "
    "preempted, the device evicts blocks before lazy mode has stored them: check a size with "
    "kvstow replay --mode lazy."
)
WINDOW_NOTE: Final = (
    "The table has one request after the other. Where requests overlap, the device can hold more "
    "prompts of a model with sliding windows. It then hits more, and the host tier less."
)
STATE_NOTE: Final = (
    "Recurrent states are kept where vLLM keeps them. kvstow replay keeps one after every block, "
    "so it can hit more, and less where memory is short."
)
_X_LABEL: Final = "size of the host tier"


def knee_method(plan: Plan) -> str:
    """Return how the knee is found."""
    curve = "curve"
    first, last = "the smallest size that was simulated", "the largest one"
    if plan.geometry.is_one_full_group:
        curve = "LRU curve"
        first, last = "the size of the device's cache (0 without one)", "where its hits end"
    return (
        f"the point of the {curve} farthest above the straight line from its first point, {first}, "
        f"to its last, {last} (Kneedle, 2011)"
    )


def notes(plan: Plan) -> list[str]:
    """Return what a reader of the table must know before taking a size."""
    has_points = plan.geometry.is_one_full_group or plan.options.capacities
    points_from = "--json" if has_points else "--json and --capacity"
    return [
        *([DENSITY_NOTE] if plan.options.policy == "hit-density" else []),
        *([LAZY_NOTE] if plan.options.mode == "lazy" else []),
        *([WINDOW_NOTE] if _has_windows_on_a_device(plan) else []),
        *([STATE_NOTE] if _has(StateSpace, plan) else []),
        *(
            f"The table is that of {plan.options.policy}. With {points_from}, `curve` has the hits "
            f"of one cache with {other}, too."
            for other in plan.options.policies[1:]
        ),
    ]


def _has_windows_on_a_device(plan: Plan) -> bool:
    has_device = any(choice.device_gib is not None for choice in plan.choices)
    return has_device and _has(SlidingWindow, plan)


def _has(kind: type[SlidingWindow | StateSpace], plan: Plan) -> bool:
    return any(isinstance(one, kind) for one in plan.geometry.attentions)


def row_figures(plan: Plan, row: Tiers) -> dict[str, float | None]:
    """Return the figures of one set of sizes; None where the trace has no duration."""
    hours, block_tokens = plan.workload.hours, plan.geometry.block_tokens
    saved_tokens = row.saved_blocks * block_tokens

    def per_hour(number: float) -> float | None:
        return number / hours if hours else None

    def per_second(number: float) -> float | None:
        return number / hours / _SECONDS_PER_HOUR if hours else None

    return {
        "device_gib": row.device_gib,
        "host_gib": row.host_gib,
        "disk_gib": row.disk_gib,
        "hit_ratio": plan.hit_ratio(row.num_hits),
        "device_hit_ratio": plan.hit_ratio(row.device_hits),
        "host_hit_ratio": plan.hit_ratio(row.host_hits),
        "disk_hit_ratio": plan.hit_ratio(row.disk_hits),
        "device_alone_hit_ratio": plan.hit_ratio(row.alone_hits),
        "saved_tokens_per_hour": per_hour(saved_tokens),
        "saved_prefill_seconds_per_hour": per_hour(
            saved_tokens / plan.options.prefill_tokens_per_s
        ),
        "load_bytes_per_s": per_second(row.load_bytes),
        "store_bytes_per_s": per_second(row.store_bytes),
        "disk_read_bytes_per_s": per_second(row.read_bytes),
        "disk_write_bytes_per_s": per_second(row.write_bytes),
    }


def plan_json(plan: Plan, trace: PlanTrace) -> dict[str, object]:
    """Return the plan, ready for `json.dumps`."""
    geometry, workload = plan.geometry, plan.workload
    return {
        "traces": list(trace.names),
        "block_size": trace.block_size,
        "chain": trace.is_content,
        "separate_files": trace.is_separate,
        "limit": trace.limit,
        "requests": len(workload.prompts),
        "blocks": workload.num_blocks,
        "unique_blocks": workload.num_unique,
        "infinite_hit_blocks": workload.num_blocks - workload.num_unique,
        "prompt_tokens": workload.num_prompt_tokens,
        "hours": workload.hours,
        "model": {
            "name": geometry.name,
            "dtype": geometry.dtype,
            "tensor_parallel_size": geometry.num_ranks,
            "bytes_per_token": geometry.token_bytes * geometry.num_ranks // geometry.num_copies,
            "block_tokens": geometry.block_tokens,
            "device_block_bytes_per_rank": geometry.device_block_bytes,
            "host_block_bytes": geometry.host_block_bytes,
            "groups": [
                {
                    "kind": str(group),
                    "layers": group.num_layers,
                    "block_bytes_per_rank": group.block_bytes,
                }
                for group in geometry.groups
            ],
            "derivation": list(geometry.derivation),
        },
        "policy": plan.options.policy,
        "mode": plan.options.mode,
        "prefill_tokens_per_s": plan.options.prefill_tokens_per_s,
        "knee_method": knee_method(plan),
        "curve": [
            {
                "policy": point.policy,
                "capacity_blocks": point.num_blocks,
                "gib": plan.gib(point.num_blocks),
                "hit_blocks": point.num_hits,
                "hit_ratio": point.num_hits / workload.num_blocks,
                "bound_hit_blocks": point.bound,
            }
            for point in plan.points
        ],
        "curves": [_curve_json(plan, choice) for choice in plan.choices],
        "sizes": [row_figures(plan, row) for row in plan.rows],
        "recommendations": [
            {
                "device_gib": choice.device_gib,
                "host_gib": choice.host_gib,
                "disk_gib": choice.disk_gib,
                "sentence": sentence(plan, choice),
                "flag": flag(plan, choice),
            }
            for choice in plan.choices
        ],
    }


def _curve_json(plan: Plan, choice: Choice) -> dict[str, object]:
    curves = choice.curves
    places = np.arange(len(curves.capacities))
    if len(places) > _MAX_JSON_POINTS:
        places = np.unique(np.linspace(0, len(places) - 1, _MAX_JSON_POINTS).astype(np.int64))

    def points(capacities: Sequence[int], hits: Sequence[int]) -> dict[str, list[float]]:
        return {
            "gib": [plan.gib(int(capacity)) for capacity in capacities],
            "hit_ratio": [plan.hit_ratio(int(number)) for number in hits],
        }

    return {
        "device_gib": choice.device_gib,
        "is_exact": curves.is_exact,
        "tier": points(list(curves.capacities[places]), list(curves.hits[places])),
        "clairvoyant": points(list(curves.bound_at), list(curves.clairvoyant)),
        "hit_density": points(list(curves.density_at), list(curves.density)),
        "infinite_hit_ratio": plan.hit_ratio(curves.infinite),
        "knee_gib": plan.gib(choice.knee),
    }


def least_hits(choice: Choice) -> int:
    """Return the hits of the device, which a smaller host tier does not lower."""
    # Simulated curves have them.
    return choice.curves.at(choice.num_device_blocks) if choice.curves.is_exact else 0


def drawn_hits(plan: Plan, choice: Choice) -> tuple[Ints, Ints]:
    """Return the capacities and hits to draw: a simulated curve also has the sizes of the table."""
    curves = choice.curves
    if curves.is_exact:
        return curves.capacities, curves.hits
    hits = dict(zip(curves.capacities.tolist(), curves.hits.tolist(), strict=True))
    slot_bytes = plan.geometry.host_block_bytes
    for row in plan.rows_of(choice):
        num_slots = int(row.host_gib * GIB // slot_bytes)
        if num_slots < curves.capacities[-1]:
            hits[num_slots] = row.num_hits - row.disk_hits
    capacities = np.array(sorted(hits), dtype=np.int64)
    return capacities, np.array([hits[at] for at in capacities.tolist()], dtype=np.int64)


def plan_csv(plan: Plan) -> str:
    """Return one line for each set of sizes."""
    rows = [row_figures(plan, row) for row in plan.rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


# -- for people --------------------------------------------------------------------------------


def about(plan: Plan, trace: PlanTrace) -> list[str]:
    """Return what was planned for: the requests, the model with its bytes, and its speed."""
    geometry, workload = plan.geometry, plan.workload
    hours = workload.hours
    time = f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 60:,.1f} minutes"
    if hours * 60 < 1:  # a short trace, or seconds for milliseconds
        time = f"{hours * _SECONDS_PER_HOUR:,.1f} seconds"
    # A reader sees in both whether the timestamps were seconds.
    per_s = workload.num_prompt_tokens / (hours * _SECONDS_PER_HOUR) if hours else None
    rate = "" if per_s is None else f" ({per_s:,.0f} a second)"
    speed, excess = plan.options.prefill_tokens_per_s, ""
    if per_s is not None and per_s > speed:
        excess = (
            f". The trace has {per_s / speed:,.1f} times as many, which is the traffic of several "
            "servers"
        )
    ranks = "" if geometry.num_ranks == 1 else f", {geometry.num_ranks} ranks"
    copies = "" if geometry.num_copies == 1 else f", one copy for {geometry.num_copies} ranks"
    num_groups, slot_gib = len(geometry.groups), geometry.host_block_bytes / GIB
    tokens = f"a block of {counted(geometry.block_tokens, 'token')} takes"
    slots = f"{tokens} {size(slot_gib)} of the host tier{copies}"
    if num_groups > 1:
        slots = (
            f"{tokens} up to {num_groups} slots of the host tier, one for each group: {num_groups} "
            f"x {size(slot_gib)} = {size(num_groups * slot_gib)}{copies}"
        )
    if padding := geometry.host_padding_bytes:
        padded = geometry.host_block_bytes
        each = "each " if num_groups > 1 else ""
        slots += f", {each}padded from {padded - padding:,} to {padded:,} bytes"
    names = on_one_line(", ".join(trace.names))
    return [
        f"{names}: {counted(len(workload.prompts), 'request')} in {time}, "
        f"{counted(workload.num_prompt_tokens, 'prompt token')}{rate}",
        f"{on_one_line(geometry.name)}{ranks}: {geometry.derivation[0]}",
        *geometry.derivation[1:],
        slots,
        f"saved prefill is that of a server that computes {speed:,.6g} prompt tokens a second: "
        f"--prefill-tokens-per-s{excess}",
    ]


def sizes_cells(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Return the table of sizes: the names of its columns, with units, and the cells."""
    has_device = any(row.device_gib is not None for row in plan.rows)
    has_disk = any(row.disk_gib is not None for row in plan.rows)
    unit = "GiB" if max(row.host_gib for row in plan.rows) >= 1 else "MiB"
    head: dict[str, str] = {}
    if has_device:
        head["device_gib"] = f"device\n{unit}"
    head["host_gib"] = f"host\n{unit}"
    if has_disk:
        head["disk_gib"] = f"disk\n{unit}"
    head["hit_ratio"] = "hits"
    if has_device:
        head["device_hit_ratio"] = "on\ndevice"
    if has_device or has_disk:
        head["host_hit_ratio"] = "on\nhost"
    if has_disk:
        head["disk_hit_ratio"] = "on\ndisk"
    head["saved_tokens_per_hour"] = "saved\ntokens/h"
    head["saved_prefill_seconds_per_hour"] = "saved\nprefill s/h"
    head |= {"load_bytes_per_s": "loads\nMB/s", "store_bytes_per_s": "stores\nMB/s"}
    if has_disk:
        head["disk_read_bytes_per_s"] = "reads\nMB/s"
        head["disk_write_bytes_per_s"] = "writes\nMB/s"
    figures = [row_figures(plan, row) for row in plan.rows]
    return list(head.values()), [[_cell(name, one[name], unit) for name in head] for one in figures]


def _cell(name: str, value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if name.endswith("_ratio"):
        return f"{value:.1%}"
    if name.endswith("_gib"):
        return f"{value if unit == 'GiB' else value * MIB_PER_GIB:,.6g}"
    if name.endswith("bytes_per_s"):
        value /= 1e6
    return f"{value:,.0f}" if abs(value) >= _WHOLE or not value else f"{value:,.2g}"


def plan_text(plan: Plan, trace: PlanTrace) -> str:
    """Return the whole report for a terminal."""
    parts = [*about(plan, trace), "", _table(plan), ""]
    for note in notes(plan):
        parts += [note, ""]
    for choice in plan.choices:
        if choice.curves.is_exact and not plan.is_lru_eager:
            mode = " with lazy stores" if plan.options.mode == "lazy" else ""
            parts.append(
                f"The curve is that of lru, the table that of {plan.options.policy}{mode}."
            )
        if choice.judged.disk_gib is not None:
            parts.append("The curve is that of the host tier without the disk.")
        parts += [sketch(plan, choice), "", sentence(plan, choice)]
        if (line := flag(plan, choice)) is not None:
            parts.append(line)  # on one line, to copy
        parts.append("")
    return "\n".join(parts)


def _table(plan: Plan) -> str:
    """Return the table of sizes, with a mark at each recommended one."""
    head, rows = sizes_cells(plan)
    chosen = [choice.tiers for choice in plan.choices]
    marks = [any(row is one for one in chosen) for row in plan.rows]
    lines = [[name.partition("\n")[0] for name in head], [name.partition("\n")[2] for name in head]]
    cells = [*lines, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        ("> " if is_chosen else "  ")
        + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line, is_chosen in zip(cells, [False, False, *marks], strict=True)
    )


def sketch(plan: Plan, choice: Choice) -> str:
    """Return the curve in block characters, with the knee and the recommended size below it."""
    curves = choice.curves
    last = int(curves.capacities[-1]) or 1
    at = np.linspace(last / _SKETCH_COLUMNS, last, _SKETCH_COLUMNS).astype(np.int64)
    hits = np.maximum(np.interp(at, *drawn_hits(plan, choice)), least_hits(choice))
    eighths = _EIGHTHS if can_print(_EIGHTHS) else "    #####"
    levels = np.rint(hits / (curves.infinite or 1) * _SKETCH_ROWS * 8).astype(np.int64)
    lines = []
    for line in reversed(range(_SKETCH_ROWS)):
        cells = "".join(eighths[int(np.clip(level - 8 * line, 0, 8))] for level in levels)
        top = plan.hit_ratio(curves.infinite * (line + 1) / _SKETCH_ROWS)
        lines.append(f"{top:6.1%} |{cells}")
    first, end = "0", rounded_size(plan.gib(last))
    axis = [" "] * _SKETCH_COLUMNS
    axis[0], axis[-len(end) :] = first, list(end)
    begin = (_SKETCH_COLUMNS - len(_X_LABEL)) // 2
    axis[begin : begin + len(_X_LABEL)] = list(_X_LABEL)
    lines.append(" " * 7 + "+" + "-" * _SKETCH_COLUMNS)
    lines.append(" " * 8 + "".join(axis))
    for gib, name in marks(plan, choice):
        shown = f"{name}, {knee_size(plan, choice)}" if name == "knee" else name
        place = round(gib / plan.gib(last) * _SKETCH_COLUMNS)
        lines.append(" " * (7 + min(max(1, place), _SKETCH_COLUMNS)) + f"^ {shown}")
    return "\n".join(lines)
