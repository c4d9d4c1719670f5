"""The HTML report of a replay."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstow.replay.report import figures_rows, reference_bytes
from kvstow.replay.state import ReplayState
from kvstow.replay.timeline import Spans, Timeline
from kvstow.report import Chart, Part, Series, Table, html_page
from kvstow.report.page import Format

Floats = npt.NDArray[np.float64]


def replay_page(
    replay: ReplayState, timeline: Timeline, title: str, *, interrupted: bool = False
) -> str:
    """Return the page."""
    figures = replay.figures
    subtitle = (
        f"{title}{' (interrupted)' if interrupted else ''}: {figures.finished_requests:,} of "
        f"{len(replay.trace.requests):,} requests, {figures.steps:,} steps in "
        f"{figures.virtual_seconds / 3600:,.2f} hours of virtual time"
    )
    return html_page("kvstow replay", subtitle, _parts(replay, timeline))


def _parts(replay: ReplayState, timeline: Timeline) -> Iterator[Part]:
    spans = timeline.spans(replay)
    if spans is not None:
        yield _hits_chart(spans)
        yield _queue_chart(spans)
        if spans.increases["preemptions"].any():
            yield _preemptions_chart(spans)
        yield _bytes_chart(replay, spans)
        yield _accounting_chart(spans)
    rows = [row for section in figures_rows(replay) for row in section]
    yield Table("All figures", ("", "", ""), rows, texts=(0, 2))


def _chart(  # noqa: PLR0913 - what differs between the charts
    spans: Spans,
    title: str,
    text: str,
    lines: dict[str, Floats],
    *,
    y_format: Format,
    y_label: str,
    stacked: bool = False,
    log_y: bool = False,
) -> Chart:
    hours = [float(hour) for hour in spans.hours]
    series = [
        Series(name, hours, [None if np.isnan(value) else float(value) for value in values])
        for name, values in lines.items()
    ]
    return Chart(
        title,
        f"{text} A point stands for {spans.span_s:,.3g} seconds.",
        series,
        x_format="hours",
        y_format=y_format,
        x_label="virtual time",
        y_label=y_label,
        stacked=stacked,
        log_y=log_y,
    )


def _hits_chart(spans: Spans) -> Chart:
    parts = {
        "device": spans.increases["device_hits"],
        "host": spans.increases["host_hits"],
    }
    asked = sum(parts.values()) + spans.increases["recomputed_blocks"]
    asked = np.where(asked > 0, asked, np.nan)
    return _chart(
        spans,
        "Hits by tier",
        "The share of the blocks of admitted requests that each tier had.",
        {name: hits / asked for name, hits in parts.items()},
        y_format="percent",
        y_label="hits",
        stacked=True,
    )


def _queue_chart(spans: Spans) -> Chart:
    return _chart(
        spans,
        "Requests",
        "The most requests that waited, ran and loaded at a time.",
        {"waiting": spans.waiting, "running": spans.running, "loading": spans.loading},
        y_format="number",
        y_label="requests",
    )


def _preemptions_chart(spans: Spans) -> Chart:
    return _chart(
        spans,
        "Preemptions",
        "How often a running request lost its blocks, because the device pool had run out.",
        {"preemptions": spans.increases["preemptions"]},
        y_format="number",
        y_label="preemptions",
    )


def _bytes_chart(replay: ReplayState, spans: Spans) -> Chart:
    block_bytes = reference_bytes(replay, 1)
    if block_bytes is None:
        text = "What each direction carried. The replayed tokens are far smaller than a model's."
        lines = {name: spans.increases[f"bytes_{name}"] for name in ("stored", "loaded")}
    else:
        text = f"What each direction would carry for {replay.model.stands_for}."
        lines = {
            name: spans.increases[f"{name}_blocks"] * block_bytes for name in ("stored", "loaded")
        }
    rates = {name: values / spans.span_s for name, values in lines.items()}
    return _chart(
        spans,
        "Bytes on the link",
        text,
        rates,
        y_format="bytes_per_s",
        y_label="bytes per second",
    )


def _accounting_chart(spans: Spans) -> Chart:
    return _chart(
        spans,
        "Accounting per step",
        "Time of this machine in calls of kvstow, copies excluded.",
        {"p50": spans.accounting_p50_us, "p99": spans.accounting_p99_us},
        y_format="microseconds",
        y_label="time per step",
        log_y=True,
    )
