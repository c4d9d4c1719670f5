"""A diagram of boxes and arrows as SVG text, without a drawing library.

A picture carries its own background and follows the reader's light or dark scheme, so that it reads
well on any page. It names no font and no file from elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal, TypeAlias

Point: TypeAlias = tuple[float, float]
Anchor: TypeAlias = Literal["start", "middle", "end"]

LINE_PX = 19
STYLE = """
svg { color-scheme: light dark; }
.page { fill: #ffffff; stroke: #d0d7de; }
.zone { fill: #f3f5f7; stroke: none; }
.box { fill: #e3ecfa; stroke: #4a72b0; }
.state { fill: #e4f1e6; stroke: #4c8a57; }
.end { fill: #f3e9da; stroke: #a9803f; }
.plain { fill: #ffffff; stroke: #8c959f; }
.arrow { fill: none; stroke: #57606a; stroke-width: 1.5; }
.head { fill: #57606a; }
text { font-family: system-ui, "DejaVu Sans", sans-serif; font-size: 14px; fill: #1f2328; }
.name { font-weight: 600; }
.note { fill: #57606a; font-size: 13px; }
@media (prefers-color-scheme: dark) {
  .page { fill: #1b1f24; stroke: #444c56; }
  .zone { fill: #252b32; }
  .box { fill: #22344f; stroke: #6b93d1; }
  .state { fill: #203a27; stroke: #6aa876; }
  .end { fill: #40331f; stroke: #c49a58; }
  .plain { fill: #2b3138; stroke: #768390; }
  .arrow { stroke: #adbac7; }
  .head { fill: #adbac7; }
  text { fill: #e6edf3; }
  .note { fill: #adbac7; }
}
"""


@dataclass(frozen=True)
class Box:
    """A named box; `kind` is a class of `STYLE`, and lines after the first are notes."""

    x: float
    y: float
    width: float
    height: float
    lines: Sequence[str] = ()
    kind: str = "box"

    def svg(self) -> str:
        """Return the rectangle and its lines, centred."""
        middle = self.x + self.width / 2
        top = self.y + self.height / 2 - (len(self.lines) - 1) * LINE_PX / 2 + 5
        rectangle = (
            f'<rect class="{self.kind}" x="{self.x}" y="{self.y}" width="{self.width}" '
            f'height="{self.height}" rx="6"/>'
        )
        texts = [
            _text(middle, top + index * LINE_PX, line, "note" if index else "name", "middle")
            for index, line in enumerate(self.lines)
        ]
        return "\n".join([rectangle, *texts])


@dataclass(frozen=True)
class Arrow:
    """A line through points with a head at its end, or at both; `label` is drawn at `at`."""

    points: Sequence[Point]
    label: str = ""
    at: Point | None = None
    anchor: Anchor = "middle"
    is_double: bool = False

    def svg(self) -> str:
        """Return the line and its label."""
        path = " L".join(f"{x} {y}" for x, y in self.points)
        begin = ' marker-start="url(#head)"' if self.is_double else ""
        line = f'<path class="arrow" d="M{path}"{begin} marker-end="url(#head)"/>'
        if not self.label:
            return line
        x, y = self.at or _between(self.points[0], self.points[-1])
        labels = [
            _text(x, y + index * (LINE_PX - 3), text, "note", self.anchor)
            for index, text in enumerate(self.label.split("\n"))
        ]
        return "\n".join([line, *labels])


@dataclass(frozen=True)
class Note:
    """A line of text by itself."""

    x: float
    y: float
    text: str
    anchor: Anchor = "start"

    def svg(self) -> str:
        """Return the text."""
        return _text(self.x, self.y, self.text, "note", self.anchor)


@dataclass(frozen=True)
class Diagram:
    """A picture of that many pixels, and what it shows for readers who cannot see it."""

    width: int
    height: int
    title: str
    parts: Sequence[Box | Arrow | Note] = field(default_factory=tuple)

    def svg(self) -> str:
        """Return the file's text."""
        head = (
            '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            'markerHeight="7" orient="auto-start-reverse"><path class="head" d="M0 0L10 5L0 10z"/>'
            "</marker>"
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{STYLE}</style>",
                f"<defs>{head}</defs>",
                f'<rect class="page" x="0.5" y="0.5" width="{self.width - 1}" '
                f'height="{self.height - 1}" rx="8"/>',
                *[part.svg() for part in self.parts],
                "</svg>",
                "",
            ]
        )


def _text(x: float, y: float, text: str, kind: str, anchor: Anchor) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _between(begin: Point, end: Point) -> Point:
    return (begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2 - 5
