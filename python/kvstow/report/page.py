"""The parts of a page, and the page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Literal

Format = Literal["number", "percent", "bytes_per_s", "gib", "hours", "microseconds"]
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart.

    Attributes:
        name: in the legend.
        x: ascending.
        y: one value per x; None where there is none, so that the line has a gap.
        dots: whether to draw each point, for values between which nothing is known.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of lines.

    Attributes:
        title: the heading.
        text: what the reader sees, in a sentence or two.
        series: the lines; their order is that of the colours.
        x_format: how to write a value of x.
        y_format: how to write a value of y.
        x_label: what x is.
        y_label: what y is.
        marks: positions on the x axis to point out, with their names.
        stacked: whether the series add up. They must have equal x.
        can_be_log: whether the reader may choose a logarithmic x axis.
        log_y: whether the y axis is logarithmic. Then no value may be 0 or less.
    """

    title: str
    text: str
    series: Sequence[Series]
    x_format: Format
    y_format: Format
    x_label: str
    y_label: str
    marks: Sequence[tuple[float, str]] = ()
    stacked: bool = False
    can_be_log: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        title: the heading.
        head: the names of the columns.
        rows: the cells. All columns but those in `texts` are numbers.
        strong: the rows to point out.
        texts: the columns that hold text.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: tuple[int, ...] = ()
    texts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """Paragraphs.

    Attributes:
        title: the heading; empty for none.
        lines: the paragraphs.
        code: a line to copy, below them.
        strong: whether to point the text out.
    """

    title: str
    lines: Sequence[str]
    code: str = ""
    strong: bool = False


Part = Chart | Table | Text


def html_page(title: str, subtitle: str, parts: Iterable[Part]) -> str:
    """Return a page that needs no other file and no network."""
    parts = list(parts)
    charts = [part for part in parts if isinstance(part, Chart)]
    body = "\n".join(_part(part, charts) for part in parts)
    # Inside a script element only `<` could end the data.
    data = json.dumps([asdict(chart) for chart in charts], allow_nan=False).replace("<", r"\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data: blob:; \
style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>
{(_HERE / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>{escape(subtitle)}</p>
</header>
<main>
{body}
</main>
<noscript><p>The charts need a script. The tables have the main figures.</p></noscript>
<script type="application/json" id="charts">{data}</script>
<script>
{(_HERE / "charts.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _part(part: Part, charts: Sequence[Chart]) -> str:
    match part:
        case Chart():
            number = charts.index(part)
            return (
                f"<section><h2>{escape(part.title)}</h2><p>{escape(part.text)}</p>"
                f'<figure data-chart="{number}"></figure></section>'
            )
        case Table():
            return _table(part)
        case Text():
            heading = f"<h2>{escape(part.title)}</h2>" if part.title else ""
            lines = "".join(f"<p>{escape(line)}</p>" for line in part.lines)
            code = f"<pre><code>{escape(part.code)}</code></pre>" if part.code else ""
            kind = ' class="strong"' if part.strong else ""
            return f"<section{kind}>{heading}{lines}{code}</section>"


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str, kind: str = "") -> str:
        inner = "".join(
            f"<{tag}{' class=text' if at in table.texts else ''}>{escape(cell)}</{tag}>"
            for at, cell in enumerate(cells)
        )
        return f"<tr{kind}>{inner}</tr>"

    rows = "\n".join(
        row(cells, "td", ' class="strong"' if at in table.strong else "")
        for at, cells in enumerate(table.rows)
    )
    return (
        f'<section><h2>{escape(table.title)}</h2><div class="scroll" tabindex="0"><table>'
        f"<thead>{row(table.head, 'th')}</thead><tbody>{rows}</tbody></table></div></section>"
    )
