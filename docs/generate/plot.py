"""A plot of lines or of bars as SVG text, in a light and a dark form, without a drawing library."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import log10
from typing import Final, TypeAlias

Series: TypeAlias = tuple[str, Sequence[tuple[float, float]]]

WIDTH: Final = 640
STYLE: Final = """
svg { color-scheme: light dark; }
.page { fill: #ffffff; stroke: #d0d7de; }
.grid { stroke: #d5d9e0; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.c0 { stroke: #0072b2; fill: #0072b2; } .c1 { stroke: #d55e00; fill: #d55e00; }
.c2 { stroke: #009e73; fill: #009e73; } .c3 { stroke: #a8477f; fill: #a8477f; }
.line { fill: none; }
.d1, .d3 { stroke-dasharray: 6 4; }
text { font-family: system-ui, "DejaVu Sans", sans-serif; font-size: 13px; fill: #1f2328; }
.title { font-weight: 600; }
.note { fill: #57606a; font-size: 12px; }
@media (prefers-color-scheme: dark) {
  .page { fill: #1b1f24; stroke: #444c56; }
  .grid { stroke: #3a414d; }
  .c0 { stroke: #56b4e9; fill: #56b4e9; } .c1 { stroke: #f08a4b; fill: #f08a4b; }
  .c2 { stroke: #2bbf95; fill: #2bbf95; } .c3 { stroke: #e093bd; fill: #e093bd; }
  .line { fill: none; }
  text { fill: #e6edf3; }
  .note { fill: #adbac7; }
}
"""
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 36, 64, 56
_BAR_PX = 26
_MAX_STEPS = 6
_MAX_PLACES = 8


@dataclass(frozen=True)
class Lines:
    """Lines over a logarithmic axis.

    Attributes:
        title: what it shows.
        x_label: the unit of x.
        series: a name and points each; at most four.
        unit: that of y, behind its numbers.
    """

    title: str
    x_label: str
    series: Sequence[Series]
    unit: str = " %"

    def svg(self) -> str:
        """Return the file's text."""
        height, bottom = 360, 360 - _BOTTOM
        xs = [x for _, points in self.series for x, _ in points]
        most = max(y for _, points in self.series for _, y in points)
        step = next(step for step in (1, 2, 5, 10, 20, 50, 100) if most / step <= _MAX_STEPS)
        num_steps = int(-(-most // step))

        def at_x(x: float) -> float:
            return _LEFT + _share(x, min(xs), max(xs)) * (WIDTH - _LEFT - _RIGHT)

        def at_y(y: float) -> float:
            return bottom - y / (num_steps * step) * (bottom - _TOP)

        parts = []
        for tick in range(num_steps + 1):
            y = at_y(tick * step)
            parts.append(_rule(_LEFT, y, WIDTH - _RIGHT, y))
            parts.append(_text(_LEFT - 8, y + 4, f"{tick * step}{self.unit}", "note", "end"))
        for size in _ticks(xs):
            parts.append(_rule(at_x(size), _TOP, at_x(size), bottom))
            parts.append(_text(at_x(size), bottom + 18, f"{size:,.0f}", "note", "middle"))
        parts.append(_text((WIDTH + _LEFT) / 2, bottom + 40, self.x_label, "note", "middle"))
        for at, (name, points) in enumerate(self.series):
            path = " L".join(f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in points)
            parts.append(f'<path class="c{at} line d{at}" d="M{path}"/>')
            left, top = _LEFT + at % 2 * 280, 38 + at // 2 * 16
            parts.append(f'<path class="c{at} line d{at}" d="M{left} {top}h30"/>')
            parts.append(_text(left + 38, top + 4, name, "note", "start"))
        return _page(self.title, height, parts)


@dataclass(frozen=True)
class Bars:
    """Bars over a linear axis that begins at 0.

    Attributes:
        title: what it shows.
        rows: a name, its value, and the value as text.
    """

    title: str
    rows: Sequence[tuple[str, float, str]]

    def svg(self) -> str:
        """Return the file's text."""
        begin, most = 330, max(value for _, value, _ in self.rows)
        parts = []
        for at, (name, value, text) in enumerate(self.rows):
            y = 44 + at * _BAR_PX
            length = value / most * (WIDTH - begin - 80)
            parts.append(_text(begin - 8, y + 13, name, "note", "end"))
            parts.append(
                f'<rect class="c0" x="{begin}" y="{y}" width="{length:.1f}" height="16" rx="2"/>'
            )
            parts.append(_text(begin + length + 8, y + 13, text, "note", "start"))
        return _page(self.title, 56 + len(self.rows) * _BAR_PX, parts)


def _share(value: float, least: float, most: float) -> float:
    return (log10(value) - log10(least)) / (log10(most) - log10(least))


def _ticks(xs: Sequence[float]) -> list[float]:
    """Return the places of the points, if they are few."""
    if len(set(xs)) <= _MAX_PLACES:
        return sorted(set(xs))
    steps: list[float] = [base * 10**power for power in range(9) for base in (1, 2, 5)]
    return [step for step in steps if min(xs) <= step <= max(xs)]


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="grid" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def _page(title: str, height: int, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" '
            f'height="{height - 1}" rx="8"/>',
            _text(16, 24, title, "title", "start"),
            *parts,
            "</svg>",
            "",
        ]
    )


Plot: TypeAlias = Lines | Bars
Draw: TypeAlias = Callable[[str], Plot]
