"""The HTML report of a plan."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstow.plan.advice import flag, marks, sentence, size
from kvstow.plan.curves import Ints
from kvstow.plan.report import (
    about,
    drawn_hits,
    knee_method,
    least_hits,
    notes,
    row_figures,
    sizes_cells,
)
from kvstow.plan.tiers import Choice, Plan
from kvstow.plan.traces import PlanTrace
from kvstow.report import Chart, Part, Series, Table, Text, html_page

_MAX_POINTS = 400
DENSITY_LINE = "hit-density, simulated at the dots"
"""The name of the line whose points are few. Between them it is straight, and knows nothing."""


def plan_page(plan: Plan, trace: PlanTrace) -> str:
    """Return the page."""
    lines = about(plan, trace)
    return html_page("kvstow plan", lines[0], _parts(plan, lines[1:]))


def hits_charts(plan: Plan) -> list[Chart]:
    """Return the chart of the hits for each device."""
    return [_hits_chart(plan, choice) for choice in plan.choices]


def _parts(plan: Plan, lines: list[str]) -> Iterator[Part]:
    for choice in plan.choices:
        yield Text("", [sentence(plan, choice)], flag(plan, choice) or "", strong=True)
    yield from hits_charts(plan)
    head, cells = sizes_cells(plan)
    chosen = [at for at, row in enumerate(plan.rows) for one in plan.choices if row is one.tiers]
    names = [name.replace("\n", " ") for name in head]
    yield Table("What each size gives", names, cells, strong=tuple(chosen))
    if plan.workload.hours:
        yield from _traffic_charts(plan)
    yield Text(
        "How this was computed",
        [
            *lines,
            "Hits are the share of all prompt tokens that are found, in full blocks. Saved tokens "
            "are all hits less those that the device has without a host tier. Loads and stores are "
            "bytes per second on the link of one GPU, on average over the trace.",
            f"The knee is {knee_method(plan)}. The recommended size is the smallest one here that "
            "reaches it.",
            *notes(plan),
        ],
    )


def _hits_chart(plan: Plan, choice: Choice) -> Chart:
    beside, point = "", "Each point is a cache of that size."
    if choice.device_gib is not None:
        beside = f", beside {size(choice.device_gib)} on each device"
        point = (
            "With LRU and eager stores, a host tier no larger than the device's cache adds nothing."
        )
    without_disk = "" if choice.judged.disk_gib is None else ", without the disk"
    return Chart(
        f"Hits against memory{beside}{without_disk}",
        f"{point} No single cache of that size can hit more than the best possible one, which "
        "knows all later requests."
        if choice.curves.is_exact
        else "Each point is a simulation of the host tier with that size.",
        list(_hits_lines(plan, choice)),
        x_format="gib",
        y_format="percent",
        x_label="size of the host tier",
        y_label="hits",
        marks=marks(plan, choice),
        can_be_log=True,
    )


def _hits_lines(plan: Plan, choice: Choice) -> Iterator[Series]:
    """Yield the curves of a device, and the hits of unlimited memory."""
    curves, options, least = choice.curves, plan.options, least_hits(choice)

    def series(name: str, capacities: Ints, hits: Ints, *, dots: bool = False) -> Series:
        return Series(
            name,
            [round(plan.gib(capacity), 6) for capacity in capacities.tolist()],
            [round(plan.hit_ratio(max(number, least)), 6) for number in hits.tolist()],
            dots,
        )

    policy = "LRU" if options.policy == "lru" or curves.is_exact else options.policy
    how = "exact" if curves.is_exact else "simulated"
    capacities, hits = drawn_hits(plan, choice)
    places = _drawn_places(len(capacities))
    yield series(f"{policy}, {how}", capacities[places], hits[places], dots=not curves.is_exact)
    if len(curves.bound_at):
        bound = "best possible, one cache alone" if choice.device_gib else "best possible"
        yield series(bound, curves.bound_at, curves.clairvoyant)
    if len(curves.density_at):
        yield _density_series(plan, choice)
    if curves.is_exact and options.mode == "lazy":
        rows = _table_hits(plan, choice)
        name = f"{options.policy}, lazy, as in the table"
        yield Series(name, list(rows), list(rows.values()), dots=True)
    last = plan.gib(int(curves.capacities[-1]))
    infinite = plan.hit_ratio(curves.infinite)
    yield Series("unlimited memory", [0, last], [infinite, infinite])


def _drawn_places(number: int) -> Ints:
    """Return which of a curve's points to draw: half evenly spaced, half by equal ratios."""
    even = np.linspace(0, number - 1, _MAX_POINTS // 2)
    ratio = np.geomspace(1, number, _MAX_POINTS // 2) - 1
    places: Ints = np.unique(np.concatenate([even, ratio]).astype(np.int64))
    return places


def _density_series(plan: Plan, choice: Choice) -> Series:
    """Return the hits of hit-density, with the sizes of the table if it has that policy."""
    curves, options = choice.curves, plan.options
    hits = {
        round(plan.gib(capacity), 6): round(plan.hit_ratio(number), 6)
        for capacity, number in zip(
            curves.density_at.tolist(), curves.density.tolist(), strict=True
        )
    }
    if (options.policy, options.mode) == ("hit-density", "eager"):
        hits |= _table_hits(plan, choice)
    return Series(DENSITY_LINE, sorted(hits), [hits[gib] for gib in sorted(hits)], dots=True)


def _table_hits(plan: Plan, choice: Choice) -> dict[float, float]:
    """Return the hits of device and host at the sizes of the table."""
    return {
        row.host_gib: round(plan.hit_ratio(row.num_hits - row.disk_hits), 6)
        for row in plan.rows_of(choice)
    }


def _traffic_charts(plan: Plan) -> Iterator[Part]:
    """Yield a chart of the bytes per second for each device whose hosts have several sizes."""
    for choice in plan.choices:
        rows = plan.rows_of(choice)
        disk = rows[0].disk_gib
        rows = [row for row in rows if row.disk_gib == disk]
        if len(rows) < 2:  # noqa: PLR2004 - a line needs two points
            continue
        names = {"load_bytes_per_s": "loads", "store_bytes_per_s": "stores"}
        if disk is not None:
            names |= {
                "disk_read_bytes_per_s": "disk reads",
                "disk_write_bytes_per_s": "disk writes",
            }
        figures = [row_figures(plan, row) for row in rows]
        yield Chart(
            "Bytes to carry",
            "Loads and stores cross the link of each GPU. This is the average over the trace; a "
            "busy minute carries more.",
            [
                Series(name, [row.host_gib for row in rows], [one[key] for one in figures], True)
                for key, name in names.items()
            ],
            x_format="gib",
            y_format="bytes_per_s",
            x_label="size of the host tier",
            y_label="bytes per second",
            can_be_log=True,
        )
