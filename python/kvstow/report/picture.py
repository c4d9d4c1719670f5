"""The charts of a report as one picture, drawn by matplotlib, which is an optional library."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Final

from kvstow.report.page import Chart, Format

# Those of the page in its light form.
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#a8477f", "#9a6a00", "#3390c4")
_DASHES: Final[tuple[str | tuple[int, tuple[int, ...]], ...]] = (
    "-",
    "--",
    "-.",
    ":",
    (0, (1, 4)),
    (0, (6, 2, 1, 2, 1, 2)),
)
_INK, _SOFT, _LINE = "#1b1f26", "#565e6b", "#d5d9e0"
_INCHES: Final = (8.0, 4.5)
_DOTS_PER_INCH: Final = 150
_ROOM_ABOVE: Final = 1.05  # above the highest point
_FACTORS: Final[dict[Format, tuple[float, str]]] = {
    "percent": (100.0, " (%)"),
    "gib": (1.0, " (GiB)"),
    "bytes_per_s": (1e-6, " (MB/s)"),
}


def draw_png(charts: Sequence[Chart]) -> bytes:
    """Return a PNG with the charts, one below the other.

    Lines differ in colour and in dashes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - optional
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - optional

    width, height = _INCHES
    figure = Figure((width, height * len(charts)), _DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
        (x_factor, x_unit), (y_factor, y_unit) = (
            _FACTORS.get(form, (1.0, "")) for form in (chart.x_format, chart.y_format)
        )
        for at, series in enumerate(chart.series):
            axes.plot(
                [x * x_factor for x in series.x],
                [float("nan") if y is None else y * y_factor for y in series.y],
                linestyle=_DASHES[at % len(_DASHES)],
                color=_COLOURS[at % len(_COLOURS)],
                marker="o" if series.dots else None,
                markersize=4,
                label=series.name,
            )
        for at, (x, name) in enumerate(sorted(chart.marks)):
            axes.axvline(x * x_factor, color=_SOFT, linewidth=0.8, linestyle=":")
            # The names of two marks grow away from each other.
            is_right = at > 0 or len(chart.marks) == 1
            axes.annotate(
                name,
                (x * x_factor, 1),
                (4 if is_right else -4, 3),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                color=_SOFT,
                horizontalalignment="left" if is_right else "right",
            )
        if all(float(x).is_integer() for series in chart.series for x in series.x):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_title(chart.title, loc="left", color=_INK, pad=16)
        axes.set_xlabel(chart.x_label + x_unit, color=_SOFT)
        axes.set_ylabel(chart.y_label + y_unit, color=_SOFT)
        if not chart.log_y:
            axes.set_ylim(0, axes.dataLim.y1 * _ROOM_ABOVE or 1)
        axes.grid(color=_LINE, linewidth=0.5)
        axes.legend(frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
